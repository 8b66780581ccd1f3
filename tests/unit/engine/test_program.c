/* SPDX-License-Identifier: Apache-2.0 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "engine/program.h"

enum { MAX_UNITS = 16 };

struct fixture {
    struct mt_unit_shape units[MAX_UNITS];
    struct mt_program_params p;
};

static void make(struct fixture *f, size_t layers, size_t n_micro)
{
    memset(f, 0, sizeof(*f));
    for (size_t u = 0; u < layers + 2; u++)
        f->units[u] = (struct mt_unit_shape){
            .kind = u == 0 ? MT_SHAPE_EMBED : u <= layers ? MT_SHAPE_LAYER : MT_SHAPE_HEAD,
            .weight_bytes = 1000,
            .link_bytes = 1000,
            .grad_elems = 500,
            .trainable = true,
            .recompute = true,
        };
    f->p = (struct mt_program_params){
        .mode = MT_MODE_TRAIN,
        .units = f->units,
        .n_units = layers + 2,
        .n_micro = n_micro,
        .cast = true,
        .boundary_bytes = 64,
        .record_bytes = 256,
        .grad_bytes = 2,
    };
    mt_program_min_buffers(&f->p, f->p.n_buffers);
}

static int build_and_check(struct fixture *f, struct mt_program *prog, struct mt_err *err)
{
    int rc = mt_program_build(prog, &f->p, err);
    return rc ? rc : mt_program_check(prog, err);
}

static size_t count(const struct mt_program *p, enum mt_opcode op)
{
    size_t n = 0;
    for (size_t i = 0; i < p->n_instrs; i++)
        n += p->instrs[i].op == op;
    return n;
}

static void every_variant_passes_the_checker(void **state)
{
    (void)state;
    for (int v = 0; v < 4096; v++) {
        struct fixture f;
        make(&f, 1 + (size_t)(v & 3) * 2, 1 + (size_t)((v >> 2) & 1) * 3);
        f.p.tied = v >> 3 & 1;
        f.p.join = v >> 4 & 1;
        f.p.cast = !(v >> 5 & 1);
        f.p.microbatch = v >> 6 & 1;
        f.p.poison = v >> 7 & 1;
        f.p.mode = (v >> 8 & 3) == 3 ? MT_MODE_EVAL : MT_MODE_TRAIN;
        for (size_t u = 0; u < f.p.n_units; u++) {
            f.units[u].recompute = (v >> 10 & 1) || (u & 1);
            f.units[u].trainable = (v >> 11 & 1) || u > 1;
        }
        int least[MT_N_POOLS], most[MT_N_POOLS];
        mt_program_min_buffers(&f.p, least);
        mt_program_max_buffers(&f.p, most);
        for (int i = 0; i < MT_N_POOLS; i++) {
            int n[] = {least[i], least[i] + 1, most[i], least[i] + 2};
            f.p.n_buffers[i] = n[v >> 8 & 3];
        }
        struct mt_program prog = {0};
        struct mt_err err = {0};
        if (build_and_check(&f, &prog, &err))
            fail_msg("variant %d: %s", v, err.msg);
        mt_program_finish(&prog);
    }
}

static void layered_moves_an_eighth_of_what_microbatch_moves(void **state)
{
    (void)state;
    struct fixture f;
    struct mt_program prog;
    size_t loads[2];
    make(&f, 12, 8);
    int resident = 0;
    for (int by_mb = 0; by_mb < 2; by_mb++) {
        f.p.microbatch = by_mb;
        assert_int_equal(build_and_check(&f, &prog, NULL), 0);
        loads[by_mb] = 0;
        for (size_t i = 0; i < prog.n_instrs; i++) {
            const struct mt_instr *in = &prog.instrs[i];
            if (in->op == MT_OP_LOAD && prog.objects[in->operand[0].object].kind == MT_OBJ_WEIGHTS &&
                prog.objects[in->operand[0].object].pool == MT_POOL_WEIGHTS)
                loads[by_mb]++;
        }
        mt_program_finish(&prog);
    }
    /* of two slots one or two layers stay over a turn: forward, backward, minus those */
    resident = 2;
    assert_int_equal(loads[0], 12 * 2 - resident);
    assert_true(loads[1] >= 8 * (12 * 2 - 2 * (size_t)resident) && loads[1] <= 8 * 12 * 2);
}

static void gradients_leave_once_a_step(void **state)
{
    (void)state;
    struct fixture f;
    struct mt_program prog;
    make(&f, 5, 4);
    assert_int_equal(build_and_check(&f, &prog, NULL), 0);
    assert_int_equal(count(&prog, MT_OP_STORE_GRAD), 7);
    assert_int_equal(count(&prog, MT_OP_GRAD_CAST), 7);
    mt_program_finish(&prog);
}

static void everything_resident_loads_each_unit_once(void **state)
{
    (void)state;
    struct fixture f;
    struct mt_program prog;
    make(&f, 6, 3);
    mt_program_max_buffers(&f.p, f.p.n_buffers);
    assert_int_equal(build_and_check(&f, &prog, NULL), 0);
    assert_int_equal(count(&prog, MT_OP_LOAD), 8);
    assert_int_equal(count(&prog, MT_OP_STORE), 0);
    assert_int_equal(prog.spill_bytes, 0);
    mt_program_finish(&prog);
}

static void last_layers_stay_over_the_turn(void **state)
{
    (void)state;
    struct fixture f;
    struct mt_program prog;
    make(&f, 8, 2);
    f.p.n_buffers[MT_POOL_WEIGHTS] = 3;
    assert_int_equal(build_and_check(&f, &prog, NULL), 0);
    int loads_of[10] = {0};
    for (size_t i = 0; i < prog.n_instrs; i++)
        if (prog.instrs[i].op == MT_OP_LOAD &&
            prog.objects[prog.instrs[i].operand[0].object].kind == MT_OBJ_WEIGHTS)
            loads_of[prog.instrs[i].unit]++;
    for (int u = 1; u <= 8; u++)
        assert_int_equal(loads_of[u], u > 5 ? 1 : 2);
    mt_program_finish(&prog);
}

static void prefetch_starts_before_use(void **state)
{
    (void)state;
    /* with three slots the load of layer k + 1 must not wait for layer k's forward */
    struct fixture f;
    struct mt_program prog;
    make(&f, 8, 1);
    f.p.n_buffers[MT_POOL_WEIGHTS] = 3;
    assert_int_equal(build_and_check(&f, &prog, NULL), 0);
    for (size_t i = 0; i < prog.n_instrs; i++) {
        const struct mt_instr *in = &prog.instrs[i];
        if (in->op != MT_OP_LOAD || in->unit < 2 || in->unit > 7 || in->wait[MT_Q_COMPUTE] < 0)
            continue;
        const struct mt_instr *w = &prog.instrs[in->wait[MT_Q_COMPUTE]];
        if (w->op == MT_OP_FORWARD)
            assert_true(w->unit <= in->unit - 2);
    }
    mt_program_finish(&prog);
}

/* The head's buffer is free from the start, but its weights are those updated last: a load that waits for
 * them at the head of the queue would hold up every other. */
static void weights_do_not_queue_up_far_ahead_of_their_use(void **state)
{
    (void)state;
    struct fixture f;
    struct mt_program prog;
    for (int resident = 0; resident < 2; resident++) {
        make(&f, 8, 2);
        if (resident)
            mt_program_max_buffers(&f.p, f.p.n_buffers);
        assert_int_equal(build_and_check(&f, &prog, NULL), 0);
        int32_t unit = 0; /* that forward has come to */
        for (size_t i = 0; i < prog.n_instrs && prog.instrs[i].op != MT_OP_HEAD; i++) {
            const struct mt_instr *in = &prog.instrs[i];
            if (in->op == MT_OP_FORWARD)
                unit = in->unit;
            if (in->op == MT_OP_LOAD && prog.objects[in->operand[0].object].kind == MT_OBJ_WEIGHTS &&
                in->unit > unit + 3)
                fail_msg("the load of unit %d is queued in front of unit %d", in->unit, unit);
        }
        mt_program_finish(&prog);
    }
}

/* Waits that follow from others are not in a program, so every one that is must be missed. */
static void dropping_a_wait_is_rejected(void **state)
{
    (void)state;
    struct fixture f;
    struct mt_program prog;
    make(&f, 5, 3);
    f.p.tied = true;
    mt_program_min_buffers(&f.p, f.p.n_buffers);
    assert_int_equal(build_and_check(&f, &prog, NULL), 0);
    size_t tried = 0, found = 0;
    for (size_t i = 0; i < prog.n_instrs; i++)
        for (int q = 0; q < MT_N_QUEUES; q++) {
            int32_t w = prog.instrs[i].wait[q];
            if (w < 0)
                continue;
            prog.instrs[i].wait[q] = MT_NO_WAIT;
            tried++;
            found += mt_program_check(&prog, NULL) == -EPROTO;
            prog.instrs[i].wait[q] = w;
        }
    assert_true(tried > 50);
    if (found != tried)
        fail_msg("only %zu of %zu dropped waits were noticed", found, tried);
    mt_program_finish(&prog);
}

static void reusing_a_slot_before_its_last_reader_is_rejected(void **state)
{
    (void)state;
    struct fixture f;
    struct mt_program prog;
    struct mt_err err = {0};
    make(&f, 5, 2);
    f.p.n_buffers[MT_POOL_BOUNDARY] = 14; /* all stay: no load of theirs has waited already */
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

static void taking_a_gradient_early_is_rejected(void **state)
{
    (void)state;
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

static void a_pool_too_small_is_named(void **state)
{
    (void)state;
    struct fixture f;
    struct mt_program prog;
    struct mt_err err = {0};
    make(&f, 3, 1);
    f.p.n_buffers[MT_POOL_BOUNDARY] = 1;
    assert_int_equal(mt_program_build(&prog, &f.p, &err), -ENOSPC);
    assert_non_null(strstr(err.msg, "boundaries"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_variant_passes_the_checker),
        cmocka_unit_test(layered_moves_an_eighth_of_what_microbatch_moves),
        cmocka_unit_test(gradients_leave_once_a_step),
        cmocka_unit_test(everything_resident_loads_each_unit_once),
        cmocka_unit_test(last_layers_stay_over_the_turn),
        cmocka_unit_test(prefetch_starts_before_use),
        cmocka_unit_test(weights_do_not_queue_up_far_ahead_of_their_use),
        cmocka_unit_test(dropping_a_wait_is_rejected),
        cmocka_unit_test(reusing_a_slot_before_its_last_reader_is_rejected),
        cmocka_unit_test(taking_a_gradient_early_is_rejected),
        cmocka_unit_test(a_pool_too_small_is_named),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
