/* SPDX-License-Identifier: Apache-2.0 */
/* Programs as they are built: what they hold, in which order, and how much. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/mem.h"
#include "made_program.h"
#include "test.h"

TEST(every_variant_passes_the_checker)
{
    for (int v = 0; v < 4096; v++) {
        struct fixture f;
        make(&f, 1 + (size_t)(v & 3) * 2, 1 + (size_t)((v >> 2) & 1) * 3);
        f.tied = v >> 3 & 1;
        f.p.one_ring = !f.tied && v % 3 == 1;
        f.p.join = v >> 4 & 1;
        f.p.cast = !(v >> 5 & 1);
        f.p.poison = v >> 7 & 1;
        f.p.gather = v % 5 < 2;
        f.units[1].update_elems = v % 7 < 3 ? 5 * MT_PIECE_ALIGN : 500;
        f.p.mode = (v >> 8 & 3) == 3 ? MT_MODE_EVAL : MT_MODE_TRAIN;
        for (size_t u = 0; u < f.p.n_units; u++) {
            f.keeps[u] = !(v >> 10 & 1) && !(u & 1);
            f.units[u].trainable = (v >> 11 & 1) || u > 1;
        }
        describe(&f);
        int least[MT_N_POOLS], most[MT_N_POOLS];
        take_fewest_buffers(&f.p, least);
        mt_program_max_buffers(&f.p, most);
        for (int i = 0; i < MT_N_POOLS; i++) {
            int n[] = {least[i], least[i] + 1, most[i], least[i] + 2};
            f.p.n_buffers[0][i] = n[v >> 8 & 3];
        }
        struct mt_program prog = {0};
        struct mt_err err = {0};
        if (build_and_check(&f, &prog, &err))
            fail_msg("variant %d: %s", v, err.msg);
        mt_program_finish(&prog);
    }
}

TEST(every_variant_with_a_disk_passes_the_checker)
{
    for (int v = 0; v < 8192; v++) {
        struct fixture f;
        make(&f, 1 + (size_t)(v & 3) * 2, 1 + (size_t)((v >> 2) & 1) * 3);
        f.tied = v >> 3 & 1;
        f.p.one_ring = !f.tied && v % 3 == 1;
        f.p.join = v >> 4 & 1;
        f.p.poison = v >> 6 & 1;
        f.p.gather = v % 5 < 2; /* no effect */
        f.p.mode = (enum mt_program_mode)(v % 7 < 4 ? MT_MODE_TRAIN : v % 7 - 3);
        for (size_t u = 0; u < f.p.n_units; u++) {
            f.keeps[u] = !(v >> 7 & 1) && !(u & 1);
            f.units[u].trainable = (v >> 8 & 1) || u > 1;
        }
        put_on_disk(&f, 1 + (unsigned)v % 15, (size_t)v % 3);
        int least[MT_N_POOLS], most[MT_N_POOLS];
        take_fewest_buffers(&f.p, least);
        mt_program_max_buffers(&f.p, most);
        for (int i = 0; i < MT_N_POOLS; i++) {
            int few = MT_MIN(least[i] + 1, MT_MAX(most[i], least[i]));
            f.p.n_buffers[0][i] = v >> 9 & 1 ? few : v >> 10 & 1 ? most[i] : least[i];
            if (!mt_pools[i].device) /* host memory does not depend on the device's */
                f.p.n_buffers[0][i] = v >> 11 & 1 ? few : v >> 12 & 1 ? most[i] : least[i];
        }
        struct mt_program prog = {0};
        struct mt_err err = {0};
        if (build_and_check(&f, &prog, &err))
            fail_msg("variant %d: %s", v, err.msg);
        mt_program_finish(&prog);
    }
}

TEST(every_piece_is_read_updated_and_written_once)
{
    struct fixture f;
    struct mt_program prog;
    make(&f, 6, 2);
    put_on_disk(&f, STATES | WEIGHTS | GRADS, 0);
    for (int update = 0; update < 2; update++) {
        f.p.mode = update ? MT_MODE_UPDATE : MT_MODE_TRAIN;
        take_fewest_buffers(&f.p, f.p.n_buffers[0]);
        assert_int_equal(build_and_check(&f, &prog, NULL), 0);
        size_t pieces = 0, elems = 0, want = 0, read = 0, written = 0, in_all = 0;
        for (size_t u = 0; u < f.p.n_units; u++) {
            pieces += (f.units[u].grad_elems + MT_PIECE_ALIGN - 1) / MT_PIECE_ALIGN;
            want += f.units[u].grad_elems;
        }
        for (size_t i = 0; i < prog.n_instrs; i++) {
            const struct mt_instr *in = &prog.instrs[i];
            bool state_op = in->n_operands && prog.objects[in->operand[0].object].kind == MT_OBJ_STATE;
            elems += in->op == MT_OP_UPDATE ? in->elems : 0;
            in_all += in->op == MT_OP_UPDATE;
            read += in->op == MT_OP_READ && state_op;
            written += in->op == MT_OP_WRITE && state_op;
            if (in->op == MT_OP_WRITE && state_op)
                assert_int_equal(in->bytes % (10 * MT_PIECE_ALIGN), 0);
        }
        assert_int_equal(elems, want);
        assert_int_equal(in_all, pieces);
        assert_int_equal(read, pieces);
        assert_int_equal(written, pieces);
        struct mt_disk_traffic t = mt_program_disk_traffic(&prog);
        assert_true(t.read[MT_DISK_STATES] > t.written[MT_DISK_STATES]); /* gradients are read */
        assert_true((t.written[MT_DISK_GRADIENTS] > 0) == !update);
        mt_program_finish(&prog);
    }
}

/* Adam writes the new weights to staging, and forward's loads read them from there. */
TEST(forward_reads_no_weights_from_the_disk_again)
{
    struct fixture f;
    struct mt_program prog;
    make(&f, 8, 2);
    put_on_disk(&f, STATES | WEIGHTS, 0);
    take_fewest_buffers(&f.p, f.p.n_buffers[0]);
    assert_int_equal(build_and_check(&f, &prog, NULL), 0);
    int reads[10] = {0}, loads[10] = {0};
    for (size_t i = 0; i < prog.n_instrs; i++) {
        const struct mt_instr *in = &prog.instrs[i];
        if (!in->n_operands)
            continue;
        enum mt_object_kind kind = prog.objects[in->operand[0].object].kind;
        reads[in->unit] += in->op == MT_OP_READ && kind == MT_OBJ_STAGED;
        loads[in->unit] += in->op == MT_OP_LOAD && kind == MT_OBJ_WEIGHTS;
    }
    for (int u = 0; u < 10; u++)
        assert_true(reads[u] <= loads[u]);
    mt_program_finish(&prog);
}

TEST(nothing_is_spilled_to_disk_that_host_memory_holds)
{
    struct fixture f;
    struct mt_program prog;
    make(&f, 8, 3);
    for (size_t u = 0; u < f.p.n_units; u++)
        f.keeps[u] = true;
    put_on_disk(&f, SPILLS, 0);
    int most[MT_N_POOLS];
    take_fewest_buffers(&f.p, f.p.n_buffers[0]);
    mt_program_max_buffers(&f.p, most);
    uint64_t before = UINT64_MAX;
    for (int n = 2; n <= 2 * most[MT_POOL_SPILLED_RECORD]; n++) { /* records have two sizes */
        for (int i = MT_POOL_SPILLED_RECORD; i <= MT_POOL_SPILLED_RECORD_LAST; i++)
            f.p.n_buffers[0][i] = MT_MIN(n, most[i]);
        f.p.n_buffers[0][MT_POOL_SPILLED] = MT_MIN(2 * n, most[MT_POOL_SPILLED]);
        assert_int_equal(build_and_check(&f, &prog, NULL), 0);
        struct mt_disk_traffic t = mt_program_disk_traffic(&prog);
        assert_true(t.written[MT_DISK_ACTIVATIONS] <= before); /* more memory never costs more wear */
        assert_true(n > 2 || t.written[MT_DISK_ACTIVATIONS] > 0);
        before = t.written[MT_DISK_ACTIVATIONS];
        mt_program_finish(&prog);
    }
    assert_int_equal(before, 0);
}

/* Layers compute before the embedding's own update, the last of all: only a tied head waits for it. */
TEST(gathered_rows_do_not_wait_for_the_embeddings_update)
{
    struct fixture f;
    struct mt_program prog;
    for (int tied = 0; tied < 2; tied++) {
        make(&f, 5, 3);
        f.p.gather = true;
        f.tied = tied;
        describe(&f);
        take_fewest_buffers(&f.p, f.p.n_buffers[0]);
        assert_int_equal(build_and_check(&f, &prog, NULL), 0);
        assert_int_equal(count(&prog, MT_OP_GATHER), 3);
        assert_int_equal(count(&prog, MT_OP_EMBED), 0);
        assert_int_equal(prog.instrs[0].op, MT_OP_GATHER); /* then the first layer's update, then the other rows */
        assert_int_equal(prog.instrs[1].unit, 1);
        assert_int_equal(prog.instrs[2].op, MT_OP_GATHER);
        int32_t last = 0;
        bool head = false;
        for (size_t i = 0; i < prog.n_instrs; i++) {
            const struct mt_instr *in = &prog.instrs[i];
            last = in->queue == MT_Q_HOST ? (int32_t)i : last;
            head |= in->op == MT_OP_HEAD || (in->op == MT_OP_LOAD && in->unit == 0);
            for (int k = 0; k < in->n_operands && in->op == MT_OP_LOAD; k++)
                if (prog.objects[in->operand[k].object].kind == MT_OBJ_WEIGHTS && in->unit == 0)
                    assert_true(tied && in->wait[MT_Q_HOST] == last);
            if (!head && in->queue != MT_Q_HOST)
                assert_true(in->wait[MT_Q_HOST] < last);
        }
        assert_int_equal(prog.instrs[last].op, MT_OP_UPDATE);
        assert_int_equal(prog.instrs[last].unit, 0);
        mt_program_finish(&prog);
    }
}

/* Each part of the first layer is loaded after its own update, and used when all of them are there. */
TEST(the_first_layer_is_loaded_in_parts)
{
    struct fixture f;
    struct mt_program prog;
    struct mt_err err = {0};
    make(&f, 5, 3);
    f.p.gather = true;
    f.units[1].update_elems = 20 * MT_PIECE_ALIGN - 100;
    f.units[1].link_bytes = 2 * f.units[1].update_elems + 30;
    assert_int_equal(build_and_check(&f, &prog, NULL), 0);
    size_t n = 0, bytes = 0, elems = 0, last = 0;
    for (size_t i = 0; i < prog.n_instrs; i++) {
        struct mt_instr *in = &prog.instrs[i];
        if (in->op != MT_OP_LOAD || in->unit != 1 || !in->elems)
            continue;
        int32_t wait = in->wait[MT_Q_HOST];
        assert_int_equal(prog.instrs[wait].op, MT_OP_UPDATE);
        assert_int_equal(prog.instrs[wait].piece, n);
        assert_int_equal(prog.instrs[wait].first, elems);
        assert_int_equal(in->first, elems);
        assert_int_equal(prog.instrs[wait].elems, in->elems);
        in->wait[MT_Q_HOST] = n ? prog.instrs[last].wait[MT_Q_HOST] : MT_NO_WAIT;
        assert_int_equal(mt_program_check(&prog, &err), -EPROTO);
        assert_non_null(strstr(err.msg, "before their update"));
        in->wait[MT_Q_HOST] = wait;
        elems += in->elems;
        bytes += in->bytes;
        last = i;
        n++;
    }
    assert_int_equal(n, 20);
    assert_int_equal(elems, f.units[1].update_elems);
    assert_int_equal(bytes, f.units[1].link_bytes);
    prog.instrs[last].elems--;
    assert_int_equal(mt_program_check(&prog, &err), -EPROTO);
    assert_non_null(strstr(err.msg, "a part was not loaded"));
    prog.instrs[last].elems++;
    prog.instrs[last].first--;
    assert_int_equal(mt_program_check(&prog, &err), -EPROTO);
    assert_non_null(strstr(err.msg, "does not follow"));
    mt_program_finish(&prog);
}

/* An untied head's buffer is free from the start; its load must not delay those of the layers. */
TEST(first_loads_stand_in_the_order_of_updates)
{
    struct fixture f;
    struct mt_program prog;
    make(&f, 8, 2);
    mt_program_max_buffers(&f.p, f.p.n_buffers[0]);
    for (int slots = 2; slots < 9; slots++) {
        f.p.n_buffers[0][MT_POOL_WEIGHTS] = slots;
        assert_int_equal(build_and_check(&f, &prog, NULL), 0);
        int next = 0;
        for (size_t i = 0; i < prog.n_instrs; i++)
            if (prog.instrs[i].op == MT_OP_LOAD && prog.instrs[i].unit == next &&
                prog.objects[prog.instrs[i].operand[0].object].kind == MT_OBJ_WEIGHTS)
                next++;
            else if (prog.instrs[i].op == MT_OP_LOAD)
                assert_true(prog.instrs[i].unit < next);
        assert_int_equal(next, 10);
        mt_program_finish(&prog);
    }
}

TEST(a_step_loads_each_layer_twice_whatever_its_micro_batches)
{
    for (size_t n_micro = 1; n_micro <= 8; n_micro *= 2) {
        struct fixture f;
        struct mt_program prog;
        size_t loads = 0;
        make(&f, 12, n_micro);
        assert_int_equal(build_and_check(&f, &prog, NULL), 0);
        for (size_t i = 0; i < prog.n_instrs; i++) {
            const struct mt_instr *in = &prog.instrs[i];
            const struct mt_object *o = &prog.objects[in->operand[0].object];
            loads += in->op == MT_OP_LOAD && o->kind == MT_OBJ_WEIGHTS && o->pool == MT_POOL_WEIGHTS;
        }
        mt_program_finish(&prog);
        assert_int_equal(loads, 12 * 2 - 2); /* with two slots, two layers stay on the device between the passes */
    }
}

/* Of layers in groups of three: loads of the first one's weights, in either pass, sums of all that leave once. */
TEST(layers_that_share_weights_load_them_once_a_pass)
{
    for (int v = 0; v < 64; v++) {
        struct fixture f;
        struct mt_program prog;
        struct mt_err err = {0};
        make(&f, 6, 3);
        for (size_t u = 1; u < 7; u++) {
            struct mt_unit_shape *s = &f.units[u];
            s->back = (int32_t)(u - 1) % 3;
            s->weight_bytes = s->back ? 0 : s->weight_bytes;
            s->link_bytes = s->back ? 0 : s->link_bytes;
            s->grad_elems = s->back ? 0 : s->grad_elems;
            s->trainable = !s->back;
            f.keeps[u] = v & 1 && u > 3;
        }
        f.p.join = v >> 1 & 1;
        f.p.groups = (struct mt_groups){v >> 2 & 1 ? 2 : 1, 3};
        f.p.gather = v >> 3 & 1;
        describe(&f);
        take_fewest_buffers(&f.p, f.p.n_buffers[0]);
        f.p.n_buffers[0][MT_POOL_WEIGHTS] += v >> 4;
        if (build_and_check(&f, &prog, &err))
            fail_msg("variant %d: %s", v, err.msg);
        size_t loads[2] = {0}, uses = 0;
        for (size_t i = 0; i < prog.n_instrs; i++) {
            const struct mt_instr *in = &prog.instrs[i];
            const struct mt_object *o = in->n_operands ? &prog.objects[in->operand[0].object] : NULL;
            if (in->op == MT_OP_LOAD && o->kind == MT_OBJ_WEIGHTS && o->unit > 0 && o->unit < 7)
                loads[o->unit == 4]++;
            uses += in->op == MT_OP_BACKWARD && in->unit < 4;
            if (in->op == MT_OP_GRAD_CAST && in->unit == 1)
                assert_int_equal(uses, 9); /* three layers' micro-batches */
        }
        assert_in_range(loads[0], 1, 2);
        assert_in_range(loads[1], 1, 2);
        assert_int_equal(count(&prog, MT_OP_GRAD_CAST), 4);
        assert_int_equal(count(&prog, MT_OP_UPDATE), 4);
        mt_program_finish(&prog);
    }
}

TEST(gradients_leave_once_a_step)
{
    struct fixture f;
    struct mt_program prog;
    make(&f, 5, 4);
    assert_int_equal(build_and_check(&f, &prog, NULL), 0);
    assert_int_equal(count(&prog, MT_OP_STORE_GRAD), 7);
    assert_int_equal(count(&prog, MT_OP_GRAD_CAST), 7);
    mt_program_finish(&prog);
}

TEST(everything_resident_loads_each_unit_once)
{
    struct fixture f;
    struct mt_program prog;
    make(&f, 6, 3);
    mt_program_max_buffers(&f.p, f.p.n_buffers[0]);
    assert_int_equal(build_and_check(&f, &prog, NULL), 0);
    assert_int_equal(count(&prog, MT_OP_LOAD), 8);
    assert_int_equal(count(&prog, MT_OP_STORE), 0);
    assert_int_equal(prog.spill_bytes, 0);
    mt_program_finish(&prog);
}

TEST(last_layers_stay_over_the_turn)
{
    struct fixture f;
    struct mt_program prog;
    make(&f, 8, 2);
    f.p.n_buffers[0][MT_POOL_WEIGHTS] = 3;
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

TEST(prefetch_starts_before_use)
{
    /* with three slots the load of layer k + 1 must not wait for layer k's forward */
    struct fixture f;
    struct mt_program prog;
    make(&f, 8, 1);
    f.p.n_buffers[0][MT_POOL_WEIGHTS] = 3;
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

/* The head's buffer is free from the start, but its weights are updated last: a load of them that is queued first
 * would delay every other load. */
TEST(weights_do_not_queue_up_far_ahead_of_their_use)
{
    struct fixture f;
    struct mt_program prog;
    for (int resident = 0; resident < 2; resident++) {
        make(&f, 8, 2);
        if (resident)
            mt_program_max_buffers(&f.p, f.p.n_buffers[0]);
        assert_int_equal(build_and_check(&f, &prog, NULL), 0);
        int32_t unit = 0; /* that forward has reached */
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

/* Adapters with buffers of their own: one load a step, after the update, wherever the planes are; none in backward. */
TEST(adapters_that_stay_are_loaded_once)
{
    for (unsigned v = 0; v < 32; v++) {
        struct fixture f;
        struct mt_program prog;
        struct mt_err err = {0};
        size_t loads[2] = {0}, staged[2] = {0}, joins = 0, layers = 5;
        make(&f, layers, 3);
        f.p.join = v & 1;
        f.p.mode = v & 2 ? MT_MODE_EVAL : MT_MODE_TRAIN;
        for (size_t u = 1; u <= layers; u++) {
            f.units[u].adapter_bytes = 120;
            f.units[u].adapter_link_bytes = 100;
        }
        if (v & 12)
            put_on_disk(&f, STATES | WEIGHTS, 1);
        for (size_t u = 1; u <= layers && v & 12; u++) /* all staged planes are adapters', or some */
            f.units[u].staged_bytes_adapters = v & 4 ? f.units[u].staged_bytes : f.units[u].staged_bytes / 2;
        describe(&f);
        take_fewest_buffers(&f.p, f.p.n_buffers[0]);
        assert_int_equal(f.p.n_buffers[0][MT_POOL_ADAPTERS], layers);
        if (build_and_check(&f, &prog, &err))
            fail_msg("%u: %s", v, err.msg);
        for (size_t i = 0; i < prog.n_instrs; i++) {
            const struct mt_instr *in = &prog.instrs[i];
            enum mt_object_kind kind = prog.objects[in->operand[0].object].kind;
            bool own = kind == MT_OBJ_ADAPTERS, layer = in->unit >= 1 && in->unit <= (int)layers;
            joins += in->op == MT_OP_JOIN && own;
            if (in->op != MT_OP_LOAD || !layer || (kind != MT_OBJ_WEIGHTS && !own))
                continue;
            assert_false(in->once);
            assert_int_equal(in->bytes, own ? 100 : 1000);
            loads[own]++;
            staged[own] += in->n_operands > 1;
        }
        assert_int_equal(loads[1], layers);
        assert_true(loads[0] >= layers);
        assert_int_equal(joins, f.p.join ? layers : 0);
        assert_int_equal(staged[1], v & 12 ? layers : 0);
        assert_int_equal(staged[0], v & 12 && !(v & 4) ? loads[0] : 0);
        mt_program_finish(&prog);
    }
}

/* What generation keeps: a cache that does not stay comes and goes once a pass, what stays is only loaded to be there, by
 * instructions that later passes skip. */
TEST(caches_come_and_go_or_stay)
{
    for (size_t stay = 0; stay < 64; stay++) {
        struct fixture f;
        size_t caches = 0, weights = 0, loads = 0, stores = 0, once = 0;
        make(&f, 4, 1);
        f.tied = stay & 32;
        f.p.join = stay & 16;
        f.p.mode = stay & 1 ? MT_MODE_LOGITS : MT_MODE_EVAL;
        for (size_t u = 0; u < f.p.n_units; u++) {
            struct mt_unit_shape *s = &f.units[u];
            s->trainable = false;
            s->weights_stay = stay & 4 && (u != 2 || stay & 8);
            s->cache_bytes = u && u < 5 ? 300 + 100 * (u & 1) : 0;
            s->cache_stays = stay & 2 && u != 3;
            weights += s->weights_stay;
            caches += s->cache_bytes && s->cache_stays;
        }
        describe(&f);
        take_lane_buffers(&f.p, (int)(stay & 3));
        struct mt_program p = {0};
        struct mt_err err = {0};
        if (build_and_check(&f, &p, &err))
            fail_msg("variant %zu: %s", stay, err.msg);
        for (size_t i = 0; i < p.n_instrs; i++) {
            bool cache = p.instrs[i].n_operands && p.objects[p.instrs[i].operand[0].object].kind == MT_OBJ_CACHE;
            loads += cache && p.instrs[i].op == MT_OP_LOAD && !p.instrs[i].once;
            stores += cache && p.instrs[i].op == MT_OP_STORE;
            once += p.instrs[i].op == MT_OP_LOAD && p.instrs[i].once;
        }
        assert_int_equal(loads, 4 - caches);
        assert_int_equal(stores, 4 - caches);
        assert_int_equal(once, caches + weights);
        mt_program_finish(&p);
    }
}

TEST(micro_batches_may_be_more_than_16_bits_number)
{
    struct fixture f;
    struct mt_program prog;
    struct mt_err err = {0};
    make(&f, 1, 40000);
    assert_int_equal(build_and_check(&f, &prog, NULL), 0);
    int32_t next = 0;
    for (size_t i = 0; i < prog.n_instrs; i++)
        if (prog.instrs[i].op == MT_OP_HEAD)
            assert_int_equal(prog.instrs[i].mb, next++);
    assert_int_equal(next, 40000);
    mt_program_finish(&prog);
    f.p.n_micro = INT32_MAX; /* and two copies of each */
    assert_int_equal(mt_program_build(&prog, &f.p, &err), -E2BIG);
    assert_non_null(strstr(err.msg, "train.micro_batch"));
}

/* Nothing of placing may take the square of the buffers: 20,000 micro-batches in memory for most of their boundaries. */
TEST(a_step_of_very_many_micro_batches_is_made_at_once)
{
    struct fixture f;
    struct mt_program prog;
    make(&f, 3, 20000);
    f.p.n_buffers[0][MT_POOL_BOUNDARY] = 18000;
    double most = 2; /* it takes tenths of a second; the machine may do other things, too */
#ifdef __SANITIZE_ADDRESS__
    most *= 4;
#endif
    clock_t start = clock();
    MUST(mt_program_build, &prog, &f.p);
    double seconds = (double)(clock() - start) / CLOCKS_PER_SEC;
    mt_program_finish(&prog);
    if (seconds > most)
        fail_msg("making the program took %.2f s", seconds);
}
