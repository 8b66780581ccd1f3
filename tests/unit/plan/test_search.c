/* SPDX-License-Identifier: Apache-2.0 */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/mem.h"
#include "plan/evaluate.h"
#include "plan/search.h"
#include "shapes.h"
#include "test.h"

/* The least simulated step over a grid of placements, each evaluated separately. */
static double exhaustive(const struct mt_plan_request *base, size_t *n)
{
    static const enum mt_activations acts[] = {MT_ACT_KEEP, MT_ACT_OFFLOAD, MT_ACT_RECOMPUTE};
    static const size_t micro[] = {1, 2, 4, 8};
    double best = INFINITY;
    for (size_t a = 0; a < 3; a++)
        for (size_t mb = 0; mb < 4; mb++)
            for (int slots = 2; slots <= 8; slots++)
                for (int mix = 0; mix < (acts[a] == MT_ACT_RECOMPUTE ? (small.layers + 1) * (small.layers + 2) / 2 : 1); mix++) {
                    int keep = 0, offload = mix; /* all pairs whose sum is at most `layers` */
                    for (; offload > small.layers - keep; keep++)
                        offload -= small.layers - keep + 1;
                    struct mt_plan_request r = *base;
                    MT_CLOSED_BY(mt_plan_choice_finish) struct mt_plan_choice c = {0};
                    r.placement.activations = acts[a];
                    r.numerics.micro_batch = micro[mb];
                    r.placement.slots = slots;
                    r.placement.keep_layers = keep;
                    r.placement.offload_layers = offload;
                    ++*n;
                    if (mt_plan_evaluate(&c, &r, NULL, NULL))
                        continue;
                    best = fmin(best, c.sim.seconds);
                }
    return best;
}

TEST(the_choice_is_near_the_best_of_an_exhaustive_grid)
{
    MT_CLOSED_BY(mt_layout_destroy) struct mt_layout *l = make_layout(&small);
    static const double links[] = {0.05, 0.4, 4}, budgets[] = {0.05, 0.12, 0.5}; /* GB/s, GiB */
    for (size_t i = 0; i < 3; i++)
        for (size_t k = 0; k < 3; k++) {
            struct mt_machine m = make_machine(budgets[k], 8, 0);
            MT_CLOSED_BY(mt_plan_choice_finish) struct mt_plan_choice c = {0};
            struct mt_err err = {0};
            size_t n = 0;
            m.rate[MT_RATE_GEMM_BF16].value = 0.5; /* a slow device: links matter as on a fast one */
            m.rate[MT_RATE_ATTENTION].value = m.rate[MT_RATE_ATTENTION_BWD].value = 0.5;
            m.rate[MT_RATE_H2D].value = m.rate[MT_RATE_D2H].value = links[i];
            m.rate[MT_RATE_H2D_BOTH].value = m.rate[MT_RATE_D2H_BOTH].value = links[i];
            struct mt_plan_request r = make_request(l, &m, 128, 8);
            r.numerics.logits_chunk = 64;
            double best = exhaustive(&r, &n);
            assert_true(n >= 60);
            int rc = mt_plan_search(&c, &r, &err);
            if (!isfinite(best)) {
                assert_int_equal(rc, -ENOSPC);
                continue;
            }
            assert_int_equal(rc, 0);
            if (!(c.sim.seconds <= best * 1.02))
                fail_msg("link %g GB/s, %g GiB: chosen %g s, best of %zu is %g", links[i], budgets[k],
                         c.sim.seconds, n, best);
            assert_true(c.n_tried < n); /* with fewer candidates */
        }
}

/* The least step over all mixtures: kept layers, offloaded records of either part, slots. */
static double best_mixture(const struct mt_plan_request *base, size_t *n)
{
    int layers = (int)base->layout->cfg.n_layers;
    struct mt_plan_request r = *base;
    struct mt_plan_choice c;
    double best = INFINITY;
    r.placement.activations = MT_ACT_RECOMPUTE;
    for (r.placement.slots = 2; r.placement.slots <= layers; r.placement.slots++)
        for (r.placement.keep_layers = 0; r.placement.keep_layers <= layers; r.placement.keep_layers++)
            for (int mix = 0; mix < (layers + 1) * (layers + 1); mix++) {
                int most = layers - (int)r.placement.keep_layers;
                r.placement.offload_layers = mix / (layers + 1);
                r.placement.offload_attention = mix % (layers + 1);
                if (MT_MAX(r.placement.offload_layers, r.placement.offload_attention) > most)
                    continue;
                ++*n;
                if (mt_plan_evaluate(&c, &r, NULL, NULL))
                    continue;
                best = fmin(best, c.sim.seconds);
                mt_plan_choice_finish(&c);
            }
    return best;
}

TEST(the_mixture_is_near_the_best_of_all)
{
    static const struct shape few = {512, 1536, 5, 8, 4, 512};
    static const double links[] = {0.3, 0.7, 1.5}, budgets[] = {0.05, 0.09}; /* GB/s, GiB */
    MT_CLOSED_BY(mt_layout_destroy) struct mt_layout *l = make_layout(&few);
    int apart = 0;
    for (size_t i = 0; i < MT_ARRAY_LEN(links); i++)
        for (size_t k = 0; k < MT_ARRAY_LEN(budgets); k++) {
            struct mt_machine m = make_machine(budgets[k], 8, 0);
            MT_CLOSED_BY(mt_plan_choice_finish) struct mt_plan_choice c = {0};
            size_t n = 0;
            m.rate[MT_RATE_GEMM_BF16].value = 0.5;
            m.rate[MT_RATE_ATTENTION].value = m.rate[MT_RATE_ATTENTION_BWD].value = 0.5;
            m.rate[MT_RATE_H2D].value = m.rate[MT_RATE_D2H].value = links[i];
            m.rate[MT_RATE_H2D_BOTH].value = m.rate[MT_RATE_D2H_BOTH].value = links[i];
            struct mt_plan_request r = make_request(l, &m, 128, 8);
            r.numerics.logits_chunk = 64;
            r.numerics.micro_batch = 2;
            double best = best_mixture(&r, &n);
            r.placement.activations = MT_ACT_RECOMPUTE;
            MUST(mt_plan_search, &c, &r);
            if (!(c.sim.seconds <= best * 1.02))
                fail_msg("link %g GB/s, %g GiB: chosen %g s, best of %zu is %g", links[i], budgets[k], c.sim.seconds, n, best);
            assert_true(c.n_tried < n / 3);
            apart += c.placement.offload_attention != c.placement.offload_layers;
        }
    assert_true(apart > 0); /* the two parts of records are offloaded differently */
}

/* Whatever the search tries beside it: a number that the user has given for attention's part stays as it is. */
TEST(what_is_set_for_attention_stays)
{
    static const struct shape few = {512, 1536, 5, 8, 4, 512};
    static const double links[] = {0.3, 0.7, 1.5}, budgets[] = {0.05, 0.07, 0.09}; /* GB/s, GiB */
    MT_CLOSED_BY(mt_layout_destroy) struct mt_layout *l = make_layout(&few);
    int mixed = 0;
    for (size_t i = 0; i < MT_ARRAY_LEN(links) * MT_ARRAY_LEN(budgets); i++)
        for (int attention = 0; attention <= 5; attention += 5) {
            struct mt_machine m = make_machine(budgets[i % MT_ARRAY_LEN(budgets)], 8, 0);
            MT_CLOSED_BY(mt_plan_choice_finish) struct mt_plan_choice c = {0};
            m.rate[MT_RATE_GEMM_BF16].value = 0.5;
            m.rate[MT_RATE_ATTENTION].value = m.rate[MT_RATE_ATTENTION_BWD].value = 0.5;
            m.rate[MT_RATE_H2D].value = m.rate[MT_RATE_D2H].value = links[i / MT_ARRAY_LEN(budgets)];
            m.rate[MT_RATE_H2D_BOTH].value = m.rate[MT_RATE_D2H_BOTH].value = m.rate[MT_RATE_H2D].value;
            struct mt_plan_request r = make_request(l, &m, 128, 8);
            r.numerics.logits_chunk = 64;
            r.numerics.micro_batch = 2;
            r.placement.activations = MT_ACT_RECOMPUTE;
            r.placement.offload_attention = attention;
            if (mt_plan_search(&c, &r, NULL))
                continue;
            assert_int_equal(c.placement.offload_attention, attention);
            for (size_t k = 0; k < c.n_tried; k++)
                assert_int_equal(c.tried[k].placement.offload_attention, attention);
            mixed += c.placement.offload_layers > 0 && c.placement.offload_layers != attention;
        }
    assert_true(mixed > 0); /* and the rest's is chosen beside it */
}

TEST(the_printed_values_give_the_same_step_again)
{
    MT_CLOSED_BY(mt_layout_destroy) struct mt_layout *l = make_layout(&small);
    struct mt_machine m = make_machine(0.12, 8, 0);
    struct mt_plan_request r = make_request(l, &m, 128, 8);
    MT_CLOSED_BY(mt_plan_choice_finish) struct mt_plan_choice c = {0}, again = {0};
    MUST(mt_plan_search, &c, &r);
    r.numerics.micro_batch = c.numerics.micro_batch;
    r.numerics.logits_chunk = c.numerics.logits_chunk;
    r.placement.slots = c.placement.slots;
    r.placement.keep_layers = c.placement.keep_layers;
    r.placement.offload_layers = c.placement.offload_layers;
    r.placement.offload_attention = c.placement.offload_attention;
    r.placement.activations = c.placement.activations;
    r.placement.embedding = c.placement.embedding;
    r.placement.update_pending = c.placement.update_pending;
    MUST(mt_plan_search, &again, &r);
    assert_int_equal(again.n_tried, 1);
    assert_true(again.sim.seconds == c.sim.seconds);
    assert_int_equal(again.engine.device_bytes, c.engine.device_bytes);
    assert_int_equal(again.host_bytes, c.host_bytes);
}

TEST(more_memory_is_never_much_slower)
{
    MT_CLOSED_BY(mt_layout_destroy) struct mt_layout *l = make_layout(&small);
    double before = INFINITY;
    for (double gib = 0.04; gib < 2; gib *= 2) {
        struct mt_machine m = make_machine(gib, 8, 0);
        m.rate[MT_RATE_H2D].value = m.rate[MT_RATE_D2H].value = 0.5;
        m.rate[MT_RATE_GEMM_BF16].value = 1;
        struct mt_plan_request r = make_request(l, &m, 128, 8);
        MT_CLOSED_BY(mt_plan_choice_finish) struct mt_plan_choice c = {0};
        r.placement.offload_layers = 0; /* with a link as slow as this one, offloading records delays loads */
        if (mt_plan_search(&c, &r, NULL))
            continue;
        assert_true(c.sim.seconds <= before * 1.03); /* not every placement is tried */
        before = c.sim.seconds;
    }
    assert_true(isfinite(before));
}

static double seconds_of(const struct mt_plan_request *r)
{
    struct mt_plan_choice c;
    if (mt_plan_search(&c, r, NULL))
        return INFINITY;
    double seconds = c.sim.seconds;
    mt_plan_choice_finish(&c);
    return seconds;
}

/* The search chooses the faster of halves and whole layers, within a margin; each is faster on some machine. */
TEST(layers_are_cut_where_that_is_faster)
{
    MT_CLOSED_BY(mt_layout_destroy) struct mt_layout *l = make_layout(&small), *halves = lay_out(&small, true);
    int only = 0, faster = 0, not_worth = 0, all_kept = 0;
    for (double gib = 0.03; gib < 0.6; gib *= 1.25) {
        struct mt_machine m = make_machine(gib, 8, 0);
        m.rate[MT_RATE_GEMM_BF16].value = m.rate[MT_RATE_ATTENTION].value = m.rate[MT_RATE_ATTENTION_BWD].value = 0.5;
        m.rate[MT_RATE_H2D].value = m.rate[MT_RATE_D2H].value = 0.4;
        m.rate[MT_RATE_H2D_BOTH].value = m.rate[MT_RATE_D2H_BOTH].value = 0.4;
        struct mt_plan_request r = make_request(l, &m, 128, 8), cut;
        r.placement.embedding = MT_EMBEDDING_DEVICE; /* the other is tried once, for the cut chosen */
        cut = r;
        cut.layout = halves;
        double whole = seconds_of(&r), half = seconds_of(&cut);
        MT_CLOSED_BY(mt_plan_choice_finish) struct mt_plan_choice c = {0};
        r.halves = halves;
        if (mt_plan_search(&c, &r, NULL)) {
            assert_true(isinf(whole) && isinf(half));
            continue;
        }
        only += isinf(whole);
        faster += isfinite(whole) && c.layout == halves;
        not_worth += c.layout == l && half < whole;
        all_kept += c.layout == l && c.placement.activations == MT_ACT_KEEP;
        assert_true(c.sim.seconds == (c.layout == halves ? half : whole));
        if (c.layout == halves)
            assert_true(isinf(whole) ? c.whole_seconds == 0 : c.whole_seconds == whole && half < whole / 1.01);
        else
            assert_true(c.placement.activations == MT_ACT_KEEP || c.placement.keep_layers == small.layers || half >= whole / 1.06);
    }
    assert_true(only && faster && not_worth && all_kept);
}

TEST(what_is_short_is_said_and_each_change_makes_it_fit)
{
    MT_CLOSED_BY(mt_layout_destroy) struct mt_layout *l = make_layout(&small);
    struct mt_machine m = make_machine(0.06, 8, 0);
    struct mt_plan_request r = make_request(l, &m, 512, 8);
    struct mt_plan_choice c;
    struct mt_plan_change change[3];
    struct mt_err err = {0};
    r.numerics.micro_batch = 8;
    r.placement.activations = MT_ACT_KEEP;
    assert_int_equal(mt_plan_search(&c, &r, &err), -ENOSPC);
    assert_non_null(strstr(err.msg, "is short"));
    size_t n = mt_plan_changes(change, 3, &r);
    assert_true(n > 0);
    for (size_t i = 0; i < n; i++) {
        assert_true(change[i].seconds > 0);
        assert_true(!i || change[i].hardware >= change[i - 1].hardware); /* settings first */
    }
    size_t mb;
    double gib;
    for (size_t i = 0; i < n; i++) {
        struct mt_plan_request t = r;
        if (sscanf(change[i].what, "train.micro_batch = %zu", &mb) == 1)
            t.numerics.micro_batch = mb;
        else if (!strcmp(change[i].what, "memory.activations = recompute"))
            t.placement.activations = MT_ACT_RECOMPUTE;
        else if (sscanf(change[i].what, "device memory of %lf MiB", &gib) == 1)
            t.placement.device_budget.bytes = (uint64_t)(gib * 1.001 * 1048576);
        else if (sscanf(change[i].what, "device memory of %lf GiB", &gib) == 1)
            t.placement.device_budget.bytes = (uint64_t)(gib * 1.001 * 1073741824);
        else
            continue;
        MUST(mt_plan_search, &c, &t);
        mt_plan_choice_finish(&c);
    }
}

TEST(states_leave_the_host_in_reverse_order_of_need)
{
    MT_CLOSED_BY(mt_layout_destroy) struct mt_layout *l = make_layout(&small);
    struct mt_machine m = make_machine(1, 8, 2);
    struct mt_err err = {0};
    uint64_t all = 0;
    for (size_t u = 0; u < l->n_units; u++)
        all += l->units[u].n_elems * 14;
    size_t before = 0;
    for (uint64_t part = 1; part <= 8; part++) {
        struct mt_plan_request r = make_request(l, &m, 128, 8);
        MT_CLOSED_BY(mt_plan_choice_finish) struct mt_plan_choice c = {0};
        r.numerics.micro_batch = 2;
        r.placement.activations = MT_ACT_RECOMPUTE;
        r.placement.host_budget.bytes = mt_plan_process_bytes(&r, 8 * 128) + mt_plan_drive_bytes(l) + all / 2 + all * part / 8;
        if (mt_plan_search(&c, &r, &err))
            continue;
        assert_true(c.host_bytes <= r.placement.host_budget.bytes);
        assert_true(c.n_tier[MT_UNIT_ON_HOST] >= before); /* more memory, more units in it */
        before = c.n_tier[MT_UNIT_ON_HOST];
        for (size_t u = 1; u < l->n_units; u++) /* the first units of forward are the first to stay */
            assert_false(c.engine.on_disk[u - 1] & ~c.engine.on_disk[u]);
    }
    assert_true(before > 0);
}

/* With updates under backward only the first blocks that train keep gradients: one, and as many more as wait. */
TEST(as_many_blocks_keep_gradients_as_wait_for_forward)
{
    static const char *const freeze[] = {NULL, "model.embed_tokens.*"};
    struct mt_machine m = make_machine(1, 8, 0);
    for (size_t i = 0; i < 2 * MT_ARRAY_LEN(freeze); i++) {
        MT_CLOSED_BY(mt_layout_destroy) struct mt_layout *l = lay_out_but(&small, i % 2, freeze[i / 2]);
        struct mt_plan_request r = make_request(l, &m, 128, 8);
        r.numerics.clip = MT_CLIP_UNIT;
        r.placement.update = MT_UPDATE_BACKWARD;
        for (int pending = 0; pending < 4; pending++) {
            MT_CLOSED_BY(mt_plan_choice_finish) struct mt_plan_choice c = {0};
            r.placement.update_pending = pending;
            MUST(mt_plan_search, &c, &r);
            int last = -1, n = 0; /* the block before, and how many train so far */
            for (size_t u = 0; u < l->n_units; u++) {
                const struct mt_unit *unit = &l->units[u];
                n += unit->trainable && unit->block != last;
                last = unit->trainable ? unit->block : last;
                assert_int_equal(c.engine.planes[u].has >> MT_PLANE_GRAD & 1, unit->trainable && n <= 1 + pending);
            }
        }
    }
}

static double product_seconds(const struct mt_machine *m, unsigned variant, unsigned flags, double rows, double cols,
                              double k)
{
    double out = rows * cols * (flags & MT_METER_F32_OUT ? 4 : 2) * (flags & MT_METER_ADDS ? 2 : 1);
    struct mt_metered op = {.op = MT_DEV_GEMM, .variant = variant, .flags = flags, .dtype = MT_BF16, .n_dims = 3,
                            .dim = {(uint64_t)rows, (uint64_t)cols, (uint64_t)k}, .flops = 2 * rows * cols * k,
                            .bytes = 2 * k * (rows + cols) + out};
    return mt_machine_op_seconds(m, &op);
}

/* Time of a chunk's products relative to that at the full rate. */
static double head_cost(const struct mt_machine *m, double vocab, double hidden, double chunk, double piece)
{
    double logits = chunk / piece * product_seconds(m, MT_GEMM_NT, MT_METER_F32_OUT, piece, vocab, hidden);
    double dx = product_seconds(m, MT_GEMM_NN, 0, chunk, hidden, vocab);
    double dw = product_seconds(m, MT_GEMM_TN, MT_METER_F32_OUT | MT_METER_ADDS, vocab, hidden, chunk);
    return (logits + dx + dw) / (6 * chunk * vocab * hidden / (m->rate[MT_RATE_GEMM_BF16].value * 1e12));
}

TEST(the_head_of_a_large_vocabulary_costs_little_more_than_its_products)
{
    static const struct shape s = {3584, 18944, 28, 28, 4, 152064};
    static const double rates[][2] = {{650, 2900}, {670, 4200}, {152, 910}, {190, 1600}, {60, 840}}; /* TFLOP/s, GB/s */
    MT_CLOSED_BY(mt_machine_finish) struct mt_machine m = make_machine(24, 256, 0);
    MT_CLOSED_BY(mt_layout_destroy) struct mt_layout *l = make_layout(&s);
    for (size_t i = 0; i < 5; i++) {
        struct mt_plan_request r = make_request(l, &m, 2048, 32);
        MT_CLOSED_BY(mt_plan_choice_finish) struct mt_plan_choice c = {0};
        m.rate[MT_RATE_GEMM_BF16].value = rates[i][0];
        m.rate[MT_RATE_DEVICE_GBS].value = rates[i][1];
        MUST(mt_plan_search, &c, &r);
        double chunk = (double)c.numerics.logits_chunk, piece = (double)c.numerics.logits_piece;
        assert_true(chunk == 2048 && piece == 512);
        double cost = head_cost(&m, s.vocab, s.hidden, chunk, piece), narrow = head_cost(&m, s.vocab, s.hidden, 64, 64);
        if (cost > 1.15 || narrow < 2)
            fail_msg("%g TFLOP/s, %g GB/s: %g times its products, %g in chunks of 64", rates[i][0], rates[i][1], cost, narrow);
    }
}

TEST(a_chunk_of_logits_is_what_was_asked_for_or_fits)
{
    static const struct shape large = {3584, 18944, 2, 28, 4, 152064};
    MT_CLOSED_BY(mt_machine_finish) struct mt_machine m = make_machine(24, 256, 0);
    MT_CLOSED_BY(mt_layout_destroy) struct mt_layout *l = make_layout(&large), *few = make_layout(&tiny);
    struct mt_plan_request r = make_request(l, &m, 2048, 32);
    int64_t chunk[MT_PLAN_MAX_CHUNKS];
    assert_int_equal(mt_plan_chunks(&r, chunk), 3);
    assert_true(chunk[0] == 64 && chunk[1] == 512 && chunk[2] == 2048);
    r.layout = few;
    assert_int_equal(mt_plan_chunks(&r, chunk), 1);
    assert_int_equal(chunk[0], 4096);
    mt_plan_take_chunk(&r, chunk[0]); /* without pieces, as in older versions: the same bits */
    assert_int_equal(r.numerics.logits_piece, MT_AUTO);
    r.layout = l;
    r.numerics.logits_chunk = 128;
    assert_int_equal(mt_plan_chunks(&r, chunk), 1);
    mt_plan_take_chunk(&r, chunk[0]);
    assert_true(r.numerics.logits_chunk == 128 && r.numerics.logits_piece == MT_AUTO);
}

int main(void)
{
    mt_mem_keep_freed();
    return test_run();
}
