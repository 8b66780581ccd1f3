/* SPDX-License-Identifier: Apache-2.0 */
/* Plans of gpt-oss-120b, as it is released, on the stored profile of an RTX 4090. Run with that file. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "test.h"
#include "weights/weights.h"
#include "shapes.h"

static const char *profile;

static const char config[] =
    "{\"architectures\":[\"GptOssForCausalLM\"],\"model_type\":\"gpt_oss\",\"hidden_size\":2880,"
    "\"intermediate_size\":2880,\"num_hidden_layers\":36,\"num_attention_heads\":64,\"num_key_value_heads\":8,"
    "\"head_dim\":64,\"vocab_size\":201088,\"num_local_experts\":128,\"num_experts_per_tok\":4,\"sliding_window\":128,"
    "\"max_position_embeddings\":131072,\"rms_norm_eps\":1e-5,\"rope_theta\":150000,\"attention_bias\":true,"
    "\"rope_scaling\":{\"rope_type\":\"yarn\",\"factor\":32.0,\"beta_fast\":32.0,\"beta_slow\":1.0,\"truncate\":false,"
    "\"original_max_position_embeddings\":4096},\"tie_word_embeddings\":false,\"hidden_act\":\"silu\","
    "\"torch_dtype\":\"bfloat16\",\"quantization_config\":{\"quant_method\":\"mxfp4\"}}";
enum { LAYERS = 36, TOKENS = 65536, ROW = 4096 };
/* Elements of matrices: of all experts; of the experts that a token uses; of attention in all layers; of the head. */
static const double experts = 36.0 * 128 * 3 * 2880 * 2880, active = 36.0 * 4 * 3 * 2880 * 2880,
                    attention = 36.0 * 2 * 2880 * (4096 + 512), head = 2880.0 * 201088;

static void expect_near(const char *what, double got, double want, double tolerance)
{
    if (!(fabs(got / want - 1) <= tolerance))
        fail_msg("%s: %.6g, by hand %.6g", what, got, want);
}

/* So many GiB of host memory, and drives that read 7 GB/s each. */
static struct mt_machine make_4090(double host_gib, double drives)
{
    struct mt_machine m;
    MUST(mt_machine_read, &m, profile);
    const struct {
        enum mt_rate_id id;
        double v;
    } rates[] = {{MT_RATE_HOST_GIB, host_gib}, {MT_RATE_DRIVES, drives}, {MT_RATE_READ, 7}, {MT_RATE_WRITE, 4.9},
                 {MT_RATE_READ_BOTH, 4.2},     {MT_RATE_WRITE_BOTH, 2.8}, {MT_RATE_DISK_US, 100}};
    for (size_t i = 0; i < MT_ARRAY_LEN(rates) && (drives > 0 || !i); i++)
        m.rate[rates[i].id] = (struct mt_rate){rates[i].v, MT_RATE_RATED};
    return m;
}

/* freeze: a glob, or NULL. */
static struct mt_layout *lay_out_120b(struct mt_adapter_spec *adapter, const char *freeze)
{
    struct mt_hf_config cfg;
    struct mt_layout *l = NULL;
    struct mt_err err = {0};
    struct mt_layout_params p = {.cut = mt_cut_layer, .adapter = adapter, .freeze = &freeze, .n_freeze = freeze != NULL};
    p.cut.expert_group = 5;
    if (mt_hf_config_parse(&cfg, config, sizeof(config) - 1, "gpt-oss-120b", &err) ||
        mt_layout_create(&l, &cfg, &p, &err) || mt_weights_mark_stored(l, NULL, MT_PACKED_NONE, NULL, NULL, &err))
        fail_msg("%s", err.msg);
    expect_near("parameters", (double)l->n_params, 116.83e9, 0.0005);
    expect_near("active", (double)l->n_active, 5.13e9, 0.002);
    return l;
}

static struct mt_plan_request make_step(const struct mt_layout *l, const struct mt_machine *m, int64_t micro_batch)
{
    struct mt_plan_request r = make_request(l, m, ROW, TOKENS / ROW);
    r.placement.device_budget.bytes = (uint64_t)23 << 30; /* 24 less the desktop's */
    r.placement.expert_group = 5;
    r.numerics.micro_batch = micro_batch;
    r.numerics.logits_chunk = r.numerics.logits_piece = 512;
    return r;
}

static void evaluate(struct mt_plan_choice *c, const struct mt_plan_request *r)
{
    MUST(mt_plan_evaluate, c, r, NULL);
    assert_true(c->engine.device_bytes <= r->placement.device_budget.bytes);
    assert_true(c->host_bytes <= r->placement.host_budget.bytes);
    print_message("  %.0f tokens/s, %.1f GB of host memory\n", TOKENS / c->sim.seconds, (double)c->host_bytes / 1e9);
}

/* Matrix operations per token: forward, recomputed except for the last product, backward; two per multiply-add. */
static double seconds_of(double matrices, double passes)
{
    return TOKENS * 2.0 * matrices * passes / 152e12;
}

/*
 * Adapters of rank 16 on attention, with 96 GiB: the experts' codes are 61 GB of host memory, 0.53 bytes a parameter, and
 * cross the link twice; compute takes longer and bounds both phases.
 */
TEST(adapters_on_packed_experts_are_bound_by_compute_with_96_gib)
{
    MT_CLOSED_BY(mt_adapter_spec_finish) struct mt_adapter_spec s = {.on = true, .rank = 16, .alpha = 32, .lr_ratio_b = 1};
    assert_true(mt_adapter_list_add(&s.targets, MT_ALL_LINEAR, 0));
    MT_CLOSED_BY(mt_layout_destroy) struct mt_layout *l = lay_out_120b(&s, NULL);
    struct mt_machine m = make_4090(96, 0);
    struct mt_plan_request r = make_step(l, &m, 4);
    MT_CLOSED_BY(mt_plan_choice_finish) struct mt_plan_choice c = {0};
    r.placement.activations = MT_ACT_RECOMPUTE;
    r.placement.keep_layers = 0;
    r.placement.offload_layers = 11;
    r.placement.slots = 3;
    evaluate(&c, &r);
    expect_near("trained", (double)l->n_trained, LAYERS * 16.0 * (2 * (2880 + 4096) + 2 * (2880 + 512)), 1e-9);
    expect_near("packed", (double)c.plane[MT_PLANE_PACKED].host_bytes, experts * (0.5 + 1.0 / 32), 0.001);
    assert_true(c.sim.bytes[MT_Q_H2D] >= 2 * 0.95 * experts * (0.5 + 1.0 / 32));
    /* five experts' codes and biases a slot: they are decoded one by one */
    double slot = 5 * (experts / LAYERS / 128 * (0.5 + 1.0 / 32) + 2 * 3 * 2880);
    expect_near("slots", (double)c.engine.pool_bytes[MT_POOL_WEIGHTS], 3 * slot, 0.01);
    /* experts: forward, gate and up recomputed, and the gradients of their inputs; head and attention likewise */
    double products = seconds_of(active, 1 + 2.0 / 3 + 1) + seconds_of(attention, 3) + seconds_of(head, 2);
    /* half of the layers see all before; 4 and 10 operations a pair, head and channel, forward twice, at 110 and 85 TFLOP/s */
    double pairs = LAYERS / 2 * (double)TOKENS * (ROW + 1) / 2 * 4096, seen = pairs * (2 * 4 / 110e12 + 10 / 85e12);
    /* codes are read and bf16 written, twice; a row of an expert is some 75 KB of traffic in each of three passes */
    double traffic = (2 * 2.53 * experts + 3 * 4.0 * TOKENS * LAYERS * 75e3) / 910e9;
    expect_near("compute", c.sim.busy[MT_Q_COMPUTE], products + seen + traffic, 0.1);
    assert_int_equal(c.sim.bound[MT_SIM_FORWARD], MT_Q_COMPUTE);
    assert_int_equal(c.sim.bound[MT_SIM_BACKWARD], MT_Q_COMPUTE);
    expect_near("step", c.sim.seconds, c.sim.busy[MT_Q_COMPUTE], 0.02);
    assert_true(TOKENS / c.sim.seconds > 3600);
    mt_plan_choice_finish(&c);
    /* with two drives for experts, host memory holds records, and less is computed again */
    m = make_4090(96, 2);
    r = make_step(l, &m, 8);
    r.placement.activations = MT_ACT_OFFLOAD;
    r.placement.slots = 8;
    evaluate(&c, &r);
    assert_int_equal(c.sim.bound[MT_SIM_FORWARD], MT_Q_COMPUTE);
    assert_int_equal(c.sim.bound[MT_SIM_BACKWARD], MT_Q_COMPUTE);
    assert_true(TOKENS / c.sim.seconds > 3780);
}

/* The example's step by host memory, with two drives: less memory leaves experts' codes to these and recomputes more. */
TEST(adapters_by_host_memory)
{
    static const struct {
        int gib;
        enum mt_activations activations;
        double least;
    } with[] = {{64, MT_ACT_RECOMPUTE, 3480}, {96, MT_ACT_OFFLOAD, 3780}, {128, MT_ACT_OFFLOAD, 3780},
              {256, MT_ACT_OFFLOAD, 3830}};
    MT_CLOSED_BY(mt_adapter_spec_finish) struct mt_adapter_spec s = {.on = true, .rank = 16, .alpha = 32, .lr_ratio_b = 1};
    assert_true(mt_adapter_list_add(&s.targets, MT_ALL_LINEAR, 0));
    MT_CLOSED_BY(mt_layout_destroy) struct mt_layout *l = lay_out_120b(&s, NULL);
    for (size_t i = 0; i < MT_ARRAY_LEN(with); i++) {
        struct mt_machine m = make_4090(with[i].gib, 2);
        struct mt_plan_request r = make_step(l, &m, with[i].activations == MT_ACT_OFFLOAD ? 8 : 4);
        MT_CLOSED_BY(mt_plan_choice_finish) struct mt_plan_choice c = {0};
        r.placement.activations = with[i].activations;
        r.placement.keep_layers = r.placement.offload_layers = 0;
        r.placement.slots = 8;
        print_message("  %d GiB:", with[i].gib);
        evaluate(&c, &r);
        double codes = experts * (0.5 + 1.0 / 32), on_drives = (double)c.disk_bytes;
        assert_true(c.sim.bytes[MT_Q_DISK_READ] <= 2 * (c.engine.uses_files ? codes : on_drives) + 6e9);
        assert_true(c.sim.bytes[MT_Q_DISK_WRITE] <= 16.0 * (double)l->n_trained); /* adapters alone */
        assert_true(on_drives < codes && (with[i].gib < 256 || (on_drives == 0 && !c.engine.uses_files)));
        assert_true(TOKENS / c.sim.seconds > with[i].least);
    }
}

/* All else trained, with 256 GiB: 12 bytes a parameter of 2.1 billion, 2 of gradients; and as fast as adapters. */
TEST(frozen_experts_leave_little_to_train_with_256_gib)
{
    MT_CLOSED_BY(mt_layout_destroy) struct mt_layout *l = lay_out_120b(NULL, "*.experts.*");
    struct mt_machine m = make_4090(256, 0);
    struct mt_plan_request r = make_step(l, &m, 8);
    MT_CLOSED_BY(mt_plan_choice_finish) struct mt_plan_choice c = {0};
    r.placement.activations = MT_ACT_OFFLOAD;
    r.placement.slots = 8;
    evaluate(&c, &r);
    expect_near("trained", (double)l->n_trained, attention + 2 * head + LAYERS * 128 * 2880.0, 0.005);
    expect_near("packed", (double)c.plane[MT_PLANE_PACKED].host_bytes, experts * (0.5 + 1.0 / 32), 0.001);
    for (int k = MT_PLANE_STATE; k < MT_PLANE_STATE + 2; k++)
        expect_near("moments", (double)c.plane[k].host_bytes, 4.0 * (double)l->n_trained, 0.005);
    assert_true(c.disk_bytes == 0 && c.sim.bytes[MT_Q_D2H] < 100e9);
    assert_int_equal(c.sim.bound[MT_SIM_FORWARD], MT_Q_COMPUTE);
    assert_int_equal(c.sim.bound[MT_SIM_BACKWARD], MT_Q_COMPUTE);
    assert_true(TOKENS / c.sim.seconds > 3400);
}

/* All of it trained, decoded to masters, with 512 GiB and four drives: 1.17 TB of states are written in every step. */
TEST(all_of_it_is_bound_by_drives_with_512_gib)
{
    MT_CLOSED_BY(mt_layout_destroy) struct mt_layout *l = lay_out_120b(NULL, NULL);
    struct mt_machine m = make_4090(512, 4);
    struct mt_plan_request r = make_step(l, &m, 4);
    MT_CLOSED_BY(mt_plan_choice_finish) struct mt_plan_choice c = {0};
    r.placement.activations = MT_ACT_RECOMPUTE;
    r.placement.keep_layers = 0;
    r.placement.offload_layers = 0;
    evaluate(&c, &r);
    assert_true(l->n_trained == l->n_params && c.plane[MT_PLANE_PACKED].host_bytes == 0);
    double on_disk = (double)c.disk_bytes;
    /* 14 bytes a parameter, less those in host memory */
    assert_true(on_disk > 14 * (double)l->n_params - (double)r.placement.host_budget.bytes);
    assert_true(c.sim.bytes[MT_Q_DISK_WRITE] > 10 * 0.95 * (double)l->n_params);
    assert_int_equal(c.sim.bound[MT_SIM_FORWARD], MT_Q_DISK_WRITE);
    assert_true(TOKENS / c.sim.seconds > 500 && TOKENS / c.sim.seconds < 750);
}

/* A step sends 2048 rows to each expert on average; a count ends anywhere in a bucket of 128. */
TEST(rows_of_experts_are_padded_by_half_a_bucket_on_average)
{
    MT_CLOSED_BY(mt_machine_finish) struct mt_machine m = make_4090(1024, 0);
    MT_CLOSED_BY(mt_layout_destroy) struct mt_layout *l = lay_out_120b(NULL, NULL);
    struct mt_plan_request r = make_step(l, &m, 1);
    MT_FREED struct mt_metered *ops = NULL;
    size_t n = 0, even = 0, more = 0;
    r.train = false;
    r.placement.host_budget.bytes = (uint64_t)4096 << 30;
    MUST(mt_plan_operations, &ops, &n, &r);
    for (size_t i = 0; i < n; i++)
        if (ops[i].op == MT_DEV_MOE_GATHER) {
            even += ops[i].dim[0] == 2048;
            more += ops[i].dim[0] == 2048 + 128;
            assert_true(ops[i].dim[0] == 2048 || ops[i].dim[0] == 2048 + 128);
        }
    assert_true(even > 0 && more > 0);
}

int main(int argc, char **argv)
{
    mt_mem_keep_freed();
    profile = argc > 1 ? argv[1] : "";
    return test_run();
}
