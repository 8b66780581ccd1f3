/* SPDX-License-Identifier: Apache-2.0 */
/* Programs with a fault, which the checker must refuse, and parameters of which none can be built. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "made_program.h"
#include "test.h"

/* The gathering computes the rows' update itself: after it, the plane's update would be made twice. */
TEST(gathering_after_the_update_is_rejected)
{
    struct fixture f;
    struct mt_program prog;
    struct mt_err err = {0};
    make(&f, 3, 2);
    f.tied = f.p.gather = true;
    describe(&f);
    take_fewest_buffers(&f.p, f.p.n_buffers[0]);
    assert_int_equal(build_and_check(&f, &prog, NULL), 0);
    size_t update = 0, gather = 0;
    for (size_t i = 0; i < prog.n_instrs; i++) {
        update = prog.instrs[i].op == MT_OP_UPDATE && prog.instrs[i].unit == 0 ? i : update;
        gather = prog.instrs[i].op == MT_OP_GATHER ? i : gather;
    }
    struct mt_instr t = prog.instrs[update];
    prog.instrs[update] = prog.instrs[gather];
    prog.instrs[gather] = t;
    assert_int_equal(mt_program_check(&prog, &err), -EPROTO);
    assert_non_null(strstr(err.msg, "after their update"));
    mt_program_finish(&prog);
}

/* The first instruction of that kind, of unit 0. */
static struct mt_instr *of_embedding(struct mt_program *p, enum mt_opcode op)
{
    for (size_t i = 0; i < p->n_instrs; i++)
        if (p->instrs[i].op == op && p->instrs[i].unit == 0)
            return &p->instrs[i];
    fail_msg("no %s", mt_opcodes[op].name);
    return NULL;
}

static void check_swapped(struct mt_program *p, struct mt_instr *a, struct mt_instr *b, const char *fault)
{
    struct mt_err err = {0};
    struct mt_instr t = *a;
    *a = *b;
    *b = t;
    assert_int_equal(mt_program_check(p, &err), -EPROTO);
    if (!strstr(err.msg, fault))
        fail_msg("%s", err.msg);
    *b = *a;
    *a = t;
}

/* Rows of a gradient that leave alone must be at their places before the update, and the plane zero before the next ones. */
TEST(packed_rows_are_unpacked_before_they_are_read)
{
    struct fixture f;
    struct mt_program prog;
    make(&f, 3, 2);
    f.p.gather = true;
    take_fewest_buffers(&f.p, f.p.n_buffers[0]);
    assert_int_equal(build_and_check(&f, &prog, NULL), 0);
    struct mt_instr *scatter = of_embedding(&prog, MT_OP_SCATTER), *update = of_embedding(&prog, MT_OP_UPDATE);
    assert_int_equal(of_embedding(&prog, MT_OP_STORE_GRAD)->row_bytes, 10);
    check_swapped(&prog, scatter, of_embedding(&prog, MT_OP_GATHER), "gradient was scattered");
    check_swapped(&prog, scatter, update, "after its update");
    struct mt_err err = {0};
    for (size_t i = 0; i < prog.n_instrs; i++) /* as of a unit whose rows are not scattered */
        prog.instrs[i].row_bytes = prog.instrs[i].op == MT_OP_STORE_GRAD ? 10 : 0;
    assert_int_equal(mt_program_check(&prog, &err), -EPROTO);
    assert_non_null(strstr(err.msg, "were not scattered"));
    mt_program_finish(&prog);
    f.p.cast = false; /* then no buffer is free for the rows */
    take_fewest_buffers(&f.p, f.p.n_buffers[0]);
    assert_int_equal(build_and_check(&f, &prog, NULL), 0);
    assert_int_equal(count(&prog, MT_OP_SCATTER), 0);
    assert_int_equal(of_embedding(&prog, MT_OP_STORE_GRAD)->row_bytes, 0);
    mt_program_finish(&prog);
}

/* A step that trains five layers, tied or not, with what is on drives by the bits of `disk`. */
static void drop_waits_of(unsigned disk, bool gather, bool tied)
{
    struct fixture f;
    struct mt_program prog;
    make(&f, 5, 3);
    f.tied = tied;
    f.p.gather = gather;
    describe(&f);
    for (size_t u = 0; u < f.p.n_units; u++)
        f.keeps[u] = disk;
    if (disk)
        put_on_disk(&f, disk, 0);
    take_fewest_buffers(&f.p, f.p.n_buffers[0]);
    assert_int_equal(build_and_check(&f, &prog, NULL), 0);
    drop_each_wait(&prog, NULL, "drives", disk);
    mt_program_finish(&prog);
}

TEST(dropping_a_wait_is_rejected)
{
    for (unsigned disk = 0; disk < 16; disk++)
        drop_waits_of(disk, false, true);
    drop_waits_of(0, true, true);
    drop_waits_of(0, true, false);
}

TEST(a_plane_that_stays_in_staging_is_rejected)
{
    struct fixture f;
    struct mt_program prog;
    struct mt_err err = {0};
    make(&f, 3, 1);
    put_on_disk(&f, STATES, 0);
    take_fewest_buffers(&f.p, f.p.n_buffers[0]);
    assert_int_equal(build_and_check(&f, &prog, NULL), 0);
    size_t i = prog.n_instrs;
    while (prog.instrs[--i].op != MT_OP_WRITE)
        ;
    for (size_t k = i; k + 1 < prog.n_instrs; k++) {
        prog.instrs[k] = prog.instrs[k + 1];
        for (int q = 0; q < MT_N_QUEUES; q++)
            prog.instrs[k].wait[q] -= prog.instrs[k].wait[q] > (int)i;
    }
    prog.n_instrs--;
    assert_int_equal(mt_program_check(&prog, &err), -EPROTO);
    assert_non_null(strstr(err.msg, "never written to the disk"));
    mt_program_finish(&prog);
}

TEST(reusing_a_slot_before_its_last_reader_is_rejected)
{
    struct fixture f;
    struct mt_program prog;
    struct mt_err err = {0};
    make(&f, 5, 2);
    f.p.n_buffers[0][MT_POOL_BOUNDARY] = 20; /* else earlier loads of boundaries imply the wait */
    assert_int_equal(build_and_check(&f, &prog, NULL), 0);
    for (size_t i = 0; i < prog.n_instrs; i++) {
        struct mt_instr *in = &prog.instrs[i];
        if (in->op == MT_OP_LOAD && in->wait[MT_Q_COMPUTE] > 0 &&
            prog.objects[in->operand[0].object].kind == MT_OBJ_WEIGHTS) {
            in->wait[MT_Q_COMPUTE] = MT_NO_WAIT;
            break;
        }
    }
    assert_int_equal(mt_program_check(&prog, &err), -EPROTO);
    assert_non_null(strstr(err.msg, "loads over a buffer in use"));
    mt_program_finish(&prog);
}

TEST(taking_a_gradient_early_is_rejected)
{
    struct fixture f;
    struct mt_program prog;
    struct mt_err err = {0};
    make(&f, 3, 4);
    assert_int_equal(build_and_check(&f, &prog, NULL), 0);
    for (size_t i = 1; i < prog.n_instrs; i++)
        if (prog.instrs[i].op == MT_OP_GRAD_CAST && prog.instrs[i].unit == 2) {
            size_t k = i - 1; /* exchange with the backward before it */
            while (prog.instrs[k].op != MT_OP_BACKWARD)
                k--;
            struct mt_instr t = prog.instrs[k];
            prog.instrs[k] = prog.instrs[i];
            prog.instrs[i] = t;
            break;
        }
    assert_int_equal(mt_program_check(&prog, &err), -EPROTO);
    mt_program_finish(&prog);
}

TEST(a_pool_too_small_is_named)
{
    struct fixture f;
    struct mt_program prog;
    struct mt_err err = {0};
    make(&f, 3, 1);
    f.p.n_buffers[0][MT_POOL_BOUNDARY] = 1;
    assert_int_equal(mt_program_build(&prog, &f.p, &err), -ENOSPC);
    assert_non_null(strstr(err.msg, "boundaries"));
}

TEST(a_pool_of_more_buffers_than_operands_can_name_is_refused)
{
    struct fixture f;
    struct mt_program prog;
    struct mt_err err = {0};
    make(&f, 3, 1);
    f.p.n_buffers[0][MT_POOL_BOUNDARY] = MT_MAX_BUFFERS + 1;
    assert_int_equal(mt_program_build(&prog, &f.p, &err), -EINVAL);
    assert_non_null(strstr(err.msg, "boundaries"));
}
