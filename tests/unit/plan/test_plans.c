/* SPDX-License-Identifier: Apache-2.0 */
/* Plans of very large models against numbers computed by hand. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/mem.h"
#include "plan/search.h"
#include "shapes.h"
#include "test.h"

static void expect_near(const char *what, double got, double want, double tolerance)
{
    if (!(fabs(got / want - 1) <= tolerance))
        fail_msg("%s: %.6g, by hand %.6g", what, got, want);
}

/* Seconds of compute at 100 TFLOP/s: per weight and token two operations forward, four backward, and two for recomputing
 * a layer except its last product, whose result backward does not need (of each half, if layers are cut); attention 4
 * and 10 per visible pair, head and channel. */
enum recompute { NO, LAYERS, HALVES };
static double hand_compute(const struct shape *s, double tokens, double len, enum recompute recompute)
{
    double d = (double)s->hidden / s->heads, kv = s->kv * d, h = s->hidden;
    double layer = h * h * 2 + 2 * h * kv + 3 * h * s->ffn;
    double again = recompute ? layer - h * s->ffn - (recompute == HALVES ? h * h : 0) : 0;
    double products = tokens * 2 * ((layer * 3 + again) * s->layers + h * s->vocab * 3);
    double pairs = tokens * (len + 1) / 2 * s->layers;
    double attention = pairs * s->heads * d * (4 * (recompute ? 2 : 1) + 10);
    return (products + attention) / 100e12;
}

static double layer_elems(const struct shape *s)
{
    double d = (double)s->hidden / s->heads, h = s->hidden;
    return h * h * 2 + 2 * h * s->kv * d + 3 * h * s->ffn + 2 * h;
}

static double all_elems(const struct shape *s)
{
    return layer_elems(s) * s->layers + 2.0 * s->hidden * s->vocab;
}

/* 70B on 24 GB, 256 GB of memory, 4 drives, 262,144 tokens a step. */
TEST(a_70b_step_of_many_tokens_is_bound_by_compute)
{
    struct mt_machine m = make_machine(24, 256, 4);
    MT_CLOSED_BY(mt_layout_destroy) struct mt_layout *l = make_layout(&llama70b);
    struct mt_plan_request r = make_request(l, &m, 4096, 64);
    struct mt_plan_choice c;
    struct mt_err err = {0};
    r.placement.activations = MT_ACT_RECOMPUTE;
    r.placement.keep_layers = r.placement.offload_layers = 0;
    assert_int_equal(mt_plan_search(&c, &r, &err), 0);
    expect_near("parameters", (double)l->n_params, 70.55e9, 0.001);
    expect_near("compute", c.sim.busy[MT_Q_COMPUTE], hand_compute(&llama70b, 262144, 4096, LAYERS), 0.02);
    assert_int_equal(c.sim.bound[MT_SIM_FORWARD], MT_Q_COMPUTE);
    assert_int_equal(c.sim.bound[MT_SIM_BACKWARD], MT_Q_COMPUTE);
    /* everything else is hidden except at the end of the step: within 3% of compute alone */
    expect_near("step", c.sim.seconds, c.sim.busy[MT_Q_COMPUTE], 0.03);
    /* the state is 12 B a parameter and gradients 2: 988 GB do not fit in 230 */
    assert_true(c.n_tier[MT_UNIT_ON_HOST] < l->n_units);
    /* weights are loaded twice, except those that stay between the passes; stored boundaries are loaded again */
    double boundary = 2.0 * 262144 * llama70b.hidden;
    double weights = 2 * 2 * all_elems(&llama70b);
    assert_true(c.sim.bytes[MT_Q_H2D] <= weights + 2 * 82 * boundary); /* and their gradients */
    assert_true(c.sim.bytes[MT_Q_H2D] >= weights - 2.0 * 24 * 1073741824.0);
    /* gradients are stored once, in bf16; boundaries at most once each */
    assert_true(c.sim.bytes[MT_Q_D2H] >= 2 * all_elems(&llama70b));
    assert_true(c.sim.bytes[MT_Q_D2H] <= 2 * all_elems(&llama70b) * 1.01 + 2 * 82 * boundary);
    assert_true(c.engine.device_bytes <= r.placement.device_budget.bytes && c.host_bytes <= r.placement.host_budget.bytes);
    mt_plan_choice_finish(&c);
}

static bool on_disk(const struct mt_plan_choice *c, size_t unit, enum mt_plane_kind k)
{
    return c->engine.on_disk[unit] >> k & 1;
}

/* The same with 8,192 tokens and two drives: reading and writing 10 bytes a parameter takes longer. */
TEST(a_70b_step_of_few_tokens_is_bound_by_drives)
{
    struct mt_machine m = make_machine(24, 256, 2);
    MT_CLOSED_BY(mt_layout_destroy) struct mt_layout *l = make_layout(&llama70b);
    struct mt_plan_request r = make_request(l, &m, 4096, 2);
    struct mt_plan_choice c;
    struct mt_err err = {0};
    r.placement.states = MT_STATES_DISK;
    r.placement.activations = MT_ACT_RECOMPUTE;
    r.placement.keep_layers = r.placement.offload_layers = 0;
    r.numerics.micro_batch = 1;
    assert_int_equal(mt_plan_evaluate(&c, &r, NULL, &err), 0);
    double n_states = 0, n_grads = 0;
    for (size_t u = 0; u < l->n_units; u++) {
        double n = (double)l->units[u].n_elems;
        assert_false(on_disk(&c, u, MT_PLANE_HI)); /* 141 GB of weights fit in host memory */
        bool states = on_disk(&c, u, MT_PLANE_STATE) && on_disk(&c, u, MT_PLANE_STATE + 1);
        n_states += on_disk(&c, u, MT_PLANE_LO) && states ? n : 0;
        n_grads += on_disk(&c, u, MT_PLANE_GRAD) ? n : 0;
    }
    expect_near("states on disk", n_states, all_elems(&llama70b), 0.01);
    /* weights and gradients are 282 GB, the budget 247, of which boundaries take at most 11 GB and rings 8 */
    double over = 4 * all_elems(&llama70b) - (double)r.placement.host_budget.bytes;
    assert_true(n_grads >= over / 2 && n_grads <= (over + 19e9) / 2);
    assert_int_equal(c.engine.disk_spill_bytes, 0);
    double each_way = 10 * n_states + 2 * n_grads;
    expect_near("disk reads", c.sim.bytes[MT_Q_DISK_READ], each_way, 0.001);
    expect_near("disk writes", c.sim.bytes[MT_Q_DISK_WRITE], each_way, 0.001);
    /* forward does not hide the update: it takes as long as the update's writes; backward waits for nothing */
    double forward = hand_compute(&llama70b, 8192, 4096, NO) / 3, writes = 10 * n_states / (2 * 5e9);
    assert_true(writes > forward);
    expect_near("forward", c.sim.phase[MT_SIM_FORWARD], writes, 0.05);
    expect_near("backward", c.sim.phase[MT_SIM_BACKWARD],
                hand_compute(&llama70b, 8192, 4096, LAYERS) - forward, 0.05);
    assert_int_equal(c.sim.bound[MT_SIM_FORWARD], MT_Q_DISK_WRITE);
    assert_int_equal(c.sim.bound[MT_SIM_BACKWARD], MT_Q_COMPUTE);
    mt_plan_choice_finish(&c);
}

/* Updates under backward: 12 bytes a parameter are kept instead of 14, and drives that bind the step write that much less. */
TEST(a_70b_step_whose_updates_are_under_backward_writes_no_gradients)
{
    struct mt_machine m = make_machine(24, 128, 2);
    MT_CLOSED_BY(mt_layout_destroy) struct mt_layout *l = make_layout(&llama70b);
    struct mt_plan_request r = make_request(l, &m, 4096, 4);
    struct mt_plan_choice f, b;
    r.placement.activations = MT_ACT_RECOMPUTE;
    r.placement.keep_layers = r.placement.offload_layers = 0;
    r.placement.embedding = MT_EMBEDDING_DEVICE;
    r.numerics.micro_batch = 1;
    r.numerics.logits_chunk = 1024;
    r.placement.slots = 2;
    r.numerics.grad_clip = 1;
    MUST(mt_plan_search, &f, &r);
    assert_int_equal(f.placement.update, MT_UPDATE_FORWARD); /* nothing else is possible */
    r.numerics.clip = MT_CLIP_UNIT;
    MUST(mt_plan_search, &b, &r);
    assert_int_equal(b.placement.update, MT_UPDATE_BACKWARD);
    assert_true(b.sim.seconds < 0.9 * f.sim.seconds);
    struct mt_plan_request t = mt_plan_request_as(&r, &b);
    struct mt_plan_choice one;
    for (t.placement.update_pending = 0; t.placement.update_pending < 3;
         t.placement.update_pending++) {
        MUST(mt_plan_evaluate, &one, &t, NULL);
        assert_true(b.sim.seconds <= one.sim.seconds * 1.001); /* none pending is tried, too */
        mt_plan_choice_finish(&one);
    }
    double kept = 2 * all_elems(&llama70b); /* the embedding's and a layer's gradients, and a ring's, stay in host memory */
    expect_near("written less", f.sim.bytes[MT_Q_DISK_WRITE] - b.sim.bytes[MT_Q_DISK_WRITE], kept, 0.12);
    assert_int_equal(b.engine.traffic.written[MT_DISK_GRADIENTS], 0);
    assert_true(f.engine.traffic.written[MT_DISK_GRADIENTS] > 0);
    assert_int_equal(b.plane[MT_PLANE_GRAD].disk_bytes, 0);
    assert_true((double)b.plane[MT_PLANE_GRAD].host_bytes < 0.05 * kept);
    assert_true(b.host_bytes <= r.placement.host_budget.bytes);
    mt_plan_choice_finish(&f);
    mt_plan_choice_finish(&b);
}

TEST(a_123b_plan_on_four_drives_is_bound_by_compute)
{
    struct mt_machine m = make_machine(24, 256, 4);
    MT_CLOSED_BY(mt_layout_destroy) struct mt_layout *l = make_layout(&mistral123b);
    struct mt_plan_request r = make_request(l, &m, 4096, 64);
    struct mt_plan_choice c;
    struct mt_err err = {0};
    r.placement.offload_layers = 0;
    assert_int_equal(mt_plan_search(&c, &r, &err), 0);
    double bare = c.sim.seconds;
    expect_near("parameters", (double)l->n_params, 122.6e9, 0.001);
    assert_int_equal(c.placement.activations, MT_ACT_RECOMPUTE);
    assert_int_equal(c.sim.bound[MT_SIM_BACKWARD], MT_Q_COMPUTE);
    expect_near("compute", c.sim.busy[MT_Q_COMPUTE], hand_compute(&mistral123b, 262144, 4096, LAYERS), 0.02);
    assert_true(c.n_tier[MT_UNIT_ON_DISK] + c.n_tier[MT_UNIT_STATES_ON_DISK] > 60);
    expect_near("step", c.sim.seconds, c.sim.busy[MT_Q_COMPUTE], 0.05);
    mt_plan_choice_finish(&c);
    /* more host memory is used for states, not for records: these would move states to the drives, and wear them */
    m = make_machine(24, 1536, 4);
    r = make_request(l, &m, 4096, 64);
    assert_int_equal(mt_plan_search(&c, &r, &err), 0);
    assert_int_equal(c.placement.offload_layers, 0);
    mt_plan_choice_finish(&c);
    /* if all states are in memory, records get the rest */
    m = make_machine(24, 4096, 4);
    r = make_request(l, &m, 4096, 64);
    assert_int_equal(mt_plan_search(&c, &r, &err), 0);
    assert_true(c.placement.offload_layers > 10 && c.sim.seconds < bare * 0.95);
    assert_int_equal(c.engine.disk_spill_bytes, 0);
    assert_true(c.host_bytes <= r.placement.host_budget.bytes);
    mt_plan_choice_finish(&c);
}

/* Whole layers of 405B need 2 slots of 6.4 GB and 12.8 GB of gradients, with embedding and head in the same
 * buffers and gradients cast in place: 24 GB are too few, and the message says by how much and what would help. */
TEST(whole_405b_layers_do_not_fit_24_gib_and_the_plan_says_what_does)
{
    struct mt_machine m = make_machine(24, 256, 4);
    MT_CLOSED_BY(mt_layout_destroy) struct mt_layout *l = make_layout(&llama405b);
    struct mt_plan_request r = make_request(l, &m, 4096, 16);
    struct mt_plan_choice c;
    struct mt_plan_change change[3];
    struct mt_err err = {0};
    double slot = 2 * layer_elems(&llama405b), least = 2 * slot + 2 * slot, gib = 0;
    assert_int_equal(mt_plan_search(&c, &r, &err), -ENOSPC);
    assert_int_equal(err.kind, MT_ERR_NO_FIT);
    assert_non_null(strstr(err.msg, "device budget"));
    size_t n = mt_plan_changes(change, 3, &r);
    bool memory = false;
    for (size_t i = 0; i < n; i++)
        memory |= sscanf(change[i].what, "device memory of %lf GiB", &gib) == 1;
    assert_true(memory);
    assert_true(gib * 1073741824.0 >= least && gib * 1073741824.0 <= least * 1.25);
    m.rate[MT_RATE_DEVICE_GIB].value = gib;
    r = make_request(l, &m, 4096, 16);
    assert_int_equal(mt_plan_search(&c, &r, &err), 0);
    expect_near("compute", c.sim.busy[MT_Q_COMPUTE], hand_compute(&llama405b, 65536, 4096, LAYERS), 0.02);
    mt_plan_choice_finish(&c);
}

/* Cut in two, a layer's larger half is its MLP: 2.6 G parameters, 2 slots of 5.2 GB and 10.5 GB of gradients. */
TEST(a_405b_plan_on_24_gib_is_in_halves_and_bound_by_compute)
{
    struct mt_machine m = make_machine(24, 256, 4);
    struct mt_layout *l = make_layout(&llama405b), *halves = lay_out(&llama405b, true);
    struct mt_plan_request r = make_request(l, &m, 4096, 64);
    struct mt_plan_choice c;
    struct mt_err err = {0};
    double mlp = 3.0 * llama405b.hidden * llama405b.ffn + llama405b.hidden;
    r.halves = halves;
    expect_near("parameters", (double)l->n_params, 405.8e9, 0.001);
    assert_int_equal(mt_plan_search(&c, &r, &err), 0);
    assert_ptr_equal(c.layout, halves);
    assert_int_equal(c.placement.activations, MT_ACT_RECOMPUTE);
    expect_near("slots", (double)c.engine.pool_bytes[MT_POOL_WEIGHTS], 2 * 2 * mlp, 1e-6);
    expect_near("gradients", (double)c.engine.pool_bytes[MT_POOL_GRAD], 4 * mlp, 1e-6);
    assert_int_equal(c.engine.pool_bytes[MT_POOL_CAST], 0);
    assert_int_equal(c.engine.pool_bytes[MT_POOL_WEIGHTS_VOCAB], 0);
    assert_true(c.engine.device_bytes <= r.placement.device_budget.bytes && c.host_bytes <= r.placement.host_budget.bytes);
    expect_near("compute", c.sim.busy[MT_Q_COMPUTE], hand_compute(&llama405b, 262144, 4096, HALVES), 0.02);
    /* 262,144 tokens: some 18 and 14 B a parameter on four drives cost 260 and 284 s, compute 9,100; gradients
     * that leave where they were made keep the next half waiting for its 10.5 GB at 25 GB/s, 252 times */
    assert_int_equal(c.sim.bound[MT_SIM_FORWARD], MT_Q_COMPUTE);
    assert_int_equal(c.sim.bound[MT_SIM_BACKWARD], MT_Q_COMPUTE);
    expect_near("step", c.sim.seconds, c.sim.busy[MT_Q_COMPUTE], 0.05);
    /* all of the state except the weights that fit in host memory; boundaries may be in either */
    double state_bytes = (double)(c.disk_bytes - c.engine.disk_spill_bytes);
    assert_true(state_bytes <= 14.01 * all_elems(&llama405b));
    assert_true(state_bytes >= 14 * all_elems(&llama405b) - (double)r.placement.host_budget.bytes);
    mt_plan_choice_finish(&c);
    mt_layout_destroy(&l);
    mt_layout_destroy(&halves);
}

/* 70B with all matrices frozen; *bytes: their size. */
static struct mt_layout *make_frozen_70b(double *bytes)
{
    struct mt_layout *l = make_layout(&llama70b);
    for (size_t i = 0; i < l->n_tensors; i++) {
        struct mt_tensor *t = &l->tensors[i];
        t->trainable = t->n_dims == 1;
        t->is_bf16 = t->in_file = !t->trainable;
        if (bytes)
            *bytes += t->trainable ? 0 : 2.0 * (double)t->n;
    }
    assert_int_equal(mt_layout_set_ranges(l, NULL), 0);
    return l;
}

static struct mt_plan_request make_frozen_request(struct mt_layout *l, struct mt_machine *m, int64_t batch)
{
    struct mt_plan_request r = make_request(l, m, 4096, batch);
    r.placement.activations = MT_ACT_RECOMPUTE;
    r.placement.keep_layers = 0;
    r.placement.offload_layers = 0;
    r.numerics.micro_batch = 1;
    return r;
}

/*
 * With 64 GiB and no drive for scratch the base is read from the model's files, in forward and in backward, and
 * nothing is written.
 */
TEST(a_frozen_70b_is_read_from_its_files_where_memory_is_short)
{
    struct mt_machine m = make_machine(24, 64, 0);
    double frozen = 0;
    MT_CLOSED_BY(mt_layout_destroy) struct mt_layout *l = make_frozen_70b(&frozen);
    struct mt_plan_request r = make_frozen_request(l, &m, 4);
    struct mt_plan_choice c;
    struct mt_err err = {0};
    MUST(mt_plan_evaluate, &c, &r, NULL);
    assert_int_equal(c.placement.base, MT_BASE_FILES);
    assert_true(c.engine.uses_files && !c.engine.uses_disk && c.disk_bytes == 0);
    assert_true(c.host_bytes <= r.placement.host_budget.bytes && (double)c.host_bytes < 0.3 * frozen);
    /* the last layers and the head stay on the device or in staging until backward; the embedding is not needed again */
    assert_true(c.sim.bytes[MT_Q_DISK_READ] <= 2 * frozen && c.sim.bytes[MT_Q_DISK_READ] > 1.8 * frozen);
    assert_true(c.sim.bytes[MT_Q_DISK_WRITE] == 0);
    assert_true(c.sim.seconds >= c.sim.bytes[MT_Q_DISK_READ] / 7e9); /* one drive of 7 GB/s */
    assert_int_equal(c.placement.base_blocks, 0);
    mt_plan_choice_finish(&c);
    r.placement.base = MT_BASE_HOST; /* it is larger than host memory */
    assert_int_equal(mt_plan_evaluate(&c, &r, NULL, &err), -ENOSPC);
}

/* As much of the base as fits stays in host memory, since drives bound so short a step. */
TEST(a_frozen_70b_is_faster_with_each_gib_of_host_memory)
{
    struct mt_machine m = make_machine(24, 64, 0);
    MT_CLOSED_BY(mt_layout_destroy) struct mt_layout *l = make_frozen_70b(NULL);
    struct mt_plan_request r = make_frozen_request(l, &m, 1);
    struct mt_plan_choice c;
    double reads = 1e300, seconds = 1e300;
    r.placement.base_blocks = MT_AUTO;
    for (uint64_t gib = 48; gib <= 144; gib += 32) {
        r.placement.host_budget.bytes = gib << 30;
        MUST(mt_plan_evaluate, &c, &r, NULL);
        assert_true(c.sim.bytes[MT_Q_DISK_WRITE] == 0 && c.host_bytes <= r.placement.host_budget.bytes);
        if (gib < 144) {
            assert_int_equal(c.placement.base, MT_BASE_FILES);
            assert_true(r.placement.host_budget.bytes - c.host_bytes <= (uint64_t)3 << 30); /* a block has 1.7 GB */
        } else {
            assert_true(!c.engine.uses_files && c.sim.bytes[MT_Q_DISK_READ] == 0);
        }
        if (c.sim.bytes[MT_Q_DISK_READ] > 0.9 * reads || c.sim.seconds > (gib < 112 ? 0.9 : 1) * seconds)
            fail_msg("%d GiB: %lld blocks, %.1f GB in %.1f s", (int)gib, (long long)c.placement.base_blocks,
                     c.sim.bytes[MT_Q_DISK_READ] * 1e-9, c.sim.seconds);
        reads = c.sim.bytes[MT_Q_DISK_READ];
        seconds = c.sim.seconds;
        mt_plan_choice_finish(&c);
    }
}

/* With as many blocks in host memory as there are nothing is read in place, and no memory is set aside for it. */
TEST(a_base_in_files_of_which_all_blocks_stay_takes_what_host_memory_takes)
{
    struct mt_machine m = make_machine(24, 256, 0);
    MT_CLOSED_BY(mt_layout_destroy) struct mt_layout *l = make_frozen_70b(NULL);
    struct mt_plan_request r = make_frozen_request(l, &m, 1);
    struct mt_plan_choice files, host;
    r.placement.base = MT_BASE_FILES;
    r.placement.base_blocks = 1000;
    MUST(mt_plan_evaluate, &files, &r, NULL);
    r.placement.base = MT_BASE_HOST;
    MUST(mt_plan_evaluate, &host, &r, NULL);
    assert_true(!files.engine.uses_files);
    assert_int_equal(files.engine.file_bytes, 0);
    assert_int_equal(files.host_bytes, host.host_bytes);
    mt_plan_choice_finish(&files);
    mt_plan_choice_finish(&host);
}

int main(void)
{
    mt_mem_keep_freed();
    return test_run();
}
