/* SPDX-License-Identifier: Apache-2.0 */
/* Programs that update units under backward, from a ring of gradients instead of planes. */
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "made_program.h"
#include "schedule/build.h"
#include "schedule/objects.h"
#include "test.h"

/* Blocks of `per_block` layers' units each; those of blocks after the first `pending` are updated under backward. */
static void put_in_ring(struct fixture *f, int per_block, int pending)
{
    for (size_t u = 0; u < f->p.n_units; u++) {
        struct mt_unit_shape *s = &f->units[u];
        bool head = u + 1 == f->p.n_units;
        s->block = !u ? 0 : head ? 1000 : 1 + ((int)u - 1) / per_block;
        s->grad_in_ring = s->trainable && s->block > pending;
        if (s->grad_in_ring && s->grad_on_disk) {
            s->grad_on_disk = false;
            s->state_bytes = s->state_bytes_written;
        }
    }
    describe(f);
    take_fewest_buffers(&f->p, f->p.n_buffers[0]);
}

static void build(struct fixture *f, struct mt_program *prog)
{
    MUST(build_and_check, f, prog);
}

/* Sizes, placement and what is on drives by the bits of v. */
static void make_variant(struct fixture *f, int v)
{
    make(f, 2 + (size_t)(v & 3) * 2, 1 + (size_t)(v >> 2 & 1) * 2);
    f->tied = v >> 3 & 1;
    f->p.join = v >> 4 & 1;
    f->p.cast = !(v >> 5 & 1);
    f->p.poison = v >> 6 & 1;
    f->p.gather = v % 5 < 2;
    for (size_t u = 0; u < f->p.n_units; u++) {
        f->keeps[u] = v % 3 && !(u & 1);
        f->units[u].trainable = v % 7 || u > 1;
        f->units[u].moment_bytes = v % 11 < 4 ? 64 : 0;
    }
    if (v >> 7 & 1)
        put_on_disk(f, 1 + (unsigned)v % 15, (size_t)v % 3);
    put_in_ring(f, 1 + v % 3, v % 4);
}

/* Each trained unit is updated once, whole: pending if it has a plane, else after its gradient and before no load. */
static void check_updates(const struct fixture *f, const struct mt_program *p)
{
    size_t elems[2][MAX_UNITS] = {{0}}, stored[MAX_UNITS] = {0};
    for (size_t i = 0; i < p->n_instrs; i++) {
        const struct mt_instr *in = &p->instrs[i];
        if (in->op == MT_OP_UPDATE) {
            assert_true(in->own != in->update);
            elems[in->own][in->unit] += in->elems;
            assert_true(!in->own || stored[in->unit]);
        }
        if (in->op == MT_OP_STORE_GRAD)
            stored[in->unit] = 1;
        assert_false(in->op == MT_OP_LOAD && mt_object_is_of_planes(&p->objects[in->operand[0].object]) &&
                     elems[1][in->unit]);
        assert_false(in->op == MT_OP_WRITE && mt_kinds[p->objects[in->operand[0].object].kind].disk_use == MT_DISK_GRADIENTS &&
                     f->units[in->unit].grad_in_ring);
    }
    for (size_t u = 0; u < p->n_units; u++) {
        const struct mt_unit_shape *s = &f->units[u];
        assert_int_equal(elems[0][u], s->trainable && !s->grad_in_ring ? s->update_elems : 0);
        assert_int_equal(elems[1][u], s->grad_in_ring && f->p.mode == MT_MODE_TRAIN ? s->update_elems : 0);
    }
}

TEST(every_variant_updates_each_unit_once)
{
    for (int v = 0; v < 256; v++) {
        struct fixture f;
        struct mt_program prog;
        make_variant(&f, v);
        build(&f, &prog);
        check_updates(&f, &prog);
        mt_program_finish(&prog);
        f.p.mode = MT_MODE_UPDATE;
        build(&f, &prog);
        check_updates(&f, &prog);
        mt_program_finish(&prog);
        f.p.mode = MT_MODE_EVAL;
        build(&f, &prog);
        mt_program_finish(&prog);
    }
}

TEST(on_several_lanes)
{
    for (int v = 0; v < 128; v++) {
        struct fixture f;
        struct mt_program prog;
        int host[MT_N_POOLS];
        make_variant(&f, v);
        f.p.n_lanes = 2 + v % 2;
        for (size_t u = 0; u < f.p.n_units; u++) {
            f.units[u].lane = (uint8_t)(u % (size_t)f.p.n_lanes);
            f.units[u].lane_back = (uint8_t)((u + (size_t)(v >> 1 & 1)) % (size_t)f.p.n_lanes);
        }
        for (size_t u = 0; u < f.p.n_units; u++) /* the head, what stays on the device and a tied table have one lane */
            f.units[u].lane_back = f.keeps[u] || f.tied || u + 1 == f.p.n_units ? f.units[u].lane : f.units[u].lane_back;
        take_fewest_buffers(&f.p, host);
        for (int lane = 0; lane < f.p.n_lanes; lane++) {
            size_t bytes[MT_N_POOLS];
            int most[MT_N_POOLS];
            mt_program_size_pools(&f.p, lane, bytes, f.p.n_buffers[lane], most);
        }
        for (int i = 0; i < MT_N_POOLS; i++)
            f.p.n_buffers[0][i] = mt_pools[i].device ? f.p.n_buffers[0][i] : host[i];
        build(&f, &prog);
        check_updates(&f, &prog);
        mt_program_finish(&prog);
    }
}

/* A program for the faults that follow: two units a block, in host memory or on drives. */
static void begin(struct fixture *f, struct mt_program *prog, unsigned disk)
{
    make(f, 6, 2);
    if (disk)
        put_on_disk(f, disk, 0);
    put_in_ring(f, 2, 1);
    build(f, prog);
}

static size_t find(const struct mt_program *p, enum mt_opcode op, int unit, bool own)
{
    size_t i = 0;
    while (i < p->n_instrs && !(p->instrs[i].op == op && p->instrs[i].unit == unit && p->instrs[i].own == own))
        i++;
    assert_true(i < p->n_instrs);
    return i;
}

static void refuse(const struct mt_program *p, const char *why)
{
    struct mt_err err = {0};
    assert_int_equal(mt_program_check(p, &err), -EPROTO);
    if (!strstr(err.msg, why))
        fail_msg("%s", err.msg);
}

TEST(dropping_a_wait_is_rejected)
{
    for (unsigned disk = 0; disk < 16; disk += 3) {
        struct fixture f;
        struct mt_program prog;
        begin(&f, &prog, disk);
        drop_each_wait(&prog, NULL, "drives", disk);
        mt_program_finish(&prog);
    }
}

/* An update that does not wait for the other unit of its block, whose sums it is decided by. */
TEST(updating_a_block_before_all_its_gradient_is_rejected)
{
    struct fixture f;
    struct mt_program prog;
    begin(&f, &prog, 0);
    size_t at = find(&prog, MT_OP_UPDATE, 4, true), first = find(&prog, MT_OP_STORE_GRAD, 4, false);
    assert_true(prog.instrs[at].decides && prog.instrs[at].block == 3 && prog.instrs[at].block_end == 5);
    assert_true(prog.instrs[at].wait[MT_Q_D2H] > (int32_t)first);
    prog.instrs[first].signals = true;
    prog.instrs[at].wait[MT_Q_D2H] = (int32_t)first; /* of its own gradient alone */
    refuse(&prog, "before all of its gradient has arrived");
    mt_program_finish(&prog);
}

/* Optimizer states that the device changes come home before the update of their unit. */
TEST(updating_before_the_states_are_home_is_rejected)
{
    struct fixture f;
    struct mt_program prog;
    make(&f, 6, 2);
    for (size_t u = 0; u < f.p.n_units; u++)
        f.units[u].moment_bytes = 64;
    put_in_ring(&f, 2, 1);
    build(&f, &prog);
    size_t at = prog.n_instrs;
    for (size_t i = 0; i < prog.n_instrs && at == prog.n_instrs; i++)
        if (mt_instr_returns(&prog, &prog.instrs[i]) && prog.instrs[i].unit == 4)
            at = i;
    assert_true(at < prog.n_instrs && at < find(&prog, MT_OP_UPDATE, 4, true));
    prog.instrs[at].n_operands = 0; /* stores nothing */
    refuse(&prog, "before its states are home");
    mt_program_finish(&prog);
}

TEST(a_gradient_without_an_update_is_rejected)
{
    struct fixture f;
    struct mt_program prog;
    begin(&f, &prog, 0);
    size_t at = find(&prog, MT_OP_UPDATE, 4, true);
    prog.instrs[at].op = MT_OP_SCATTER; /* of the same queue */
    prog.instrs[at].n_operands = 0;
    refuse(&prog, "is used by no update");
    mt_program_finish(&prog);
}

TEST(updating_twice_is_rejected)
{
    struct fixture f;
    struct mt_program prog;
    begin(&f, &prog, 0);
    size_t at = find(&prog, MT_OP_UPDATE, 1, false);
    prog.instrs[at].unit = 4; /* the pending update of a unit that has none */
    refuse(&prog, "");
    prog.instrs[at].unit = 1;
    assert_int_equal(mt_program_check(&prog, NULL), 0);
    mt_program_finish(&prog);
}

/* A load of weights that the step has updated would mix two steps' weights. */
TEST(loading_after_the_update_is_rejected)
{
    struct fixture f;
    struct mt_program prog;
    begin(&f, &prog, 0);
    size_t update = find(&prog, MT_OP_UPDATE, 6, true), load = prog.n_instrs;
    for (size_t i = update; i < prog.n_instrs && load == prog.n_instrs; i++)
        if (prog.instrs[i].op == MT_OP_LOAD && prog.objects[prog.instrs[i].operand[0].object].kind == MT_OBJ_WEIGHTS)
            load = i;
    assert_true(load < prog.n_instrs);
    size_t mine = find(&prog, MT_OP_LOAD, 6, false);
    prog.instrs[load].operand[0].object = prog.instrs[mine].operand[0].object;
    prog.instrs[load].unit = 6;
    refuse(&prog, "have the update of this step already");
    mt_program_finish(&prog);
}

TEST(a_ring_too_small_for_a_block_is_named)
{
    struct fixture f;
    struct mt_program prog;
    struct mt_err err = {0};
    make(&f, 6, 2);
    put_in_ring(&f, 3, 0);
    f.p.n_buffers[0][MT_POOL_GRAD_OUT] = 2;
    assert_int_equal(mt_program_build(&prog, &f.p, &err), -ENOSPC);
    assert_non_null(strstr(err.msg, "gradient staging"));
    f.p.n_buffers[0][MT_POOL_GRAD_OUT] = 3;
    build(&f, &prog);
    mt_program_finish(&prog);
}

/* And no more: the largest block's gradients and two. */
TEST(a_ring_has_room_for_a_block_and_two)
{
    for (int per_block = 1; per_block <= 3; per_block++) {
        struct fixture f;
        make(&f, 12, 1);
        for (size_t u = 0; u < f.p.n_units; u++)
            f.units[u].trainable = true;
        put_in_ring(&f, per_block, 0);
        int n[MT_N_POOLS] = {0};
        mt_program_ring_buffers(&f.p, n);
        assert_int_equal(n[mt_program_pool(&f.p, MT_OBJ_GRAD_RING, 1)], per_block + 2);
    }
}
