/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Plans of adapters on bases that are larger than host memory, or not: the examples' steps, on the stored profile of an
 * RTX 4090 with two striped drives of 7 GB/s each that hold the model's files. Run with that file.
 */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/mem.h"
#include "test.h"
#include "weights/weights.h"
#include "shapes.h"

static const char *profile;

static const char qwen3_235b[] =
    "{\"architectures\":[\"Qwen3MoeForCausalLM\"],\"model_type\":\"qwen3_moe\",\"hidden_size\":4096,"
    "\"intermediate_size\":12288,\"num_hidden_layers\":94,\"num_attention_heads\":64,\"num_key_value_heads\":4,"
    "\"head_dim\":128,\"vocab_size\":151936,\"num_experts\":128,\"num_experts_per_tok\":8,\"moe_intermediate_size\":1536,"
    "\"norm_topk_prob\":true,\"decoder_sparse_step\":1,\"mlp_only_layers\":[],\"max_position_embeddings\":40960,"
    "\"rms_norm_eps\":1e-6,\"rope_theta\":1000000.0,\"tie_word_embeddings\":false,\"hidden_act\":\"silu\","
    "\"torch_dtype\":\"bfloat16\"}";
static const char llama_70b[] =
    "{\"architectures\":[\"LlamaForCausalLM\"],\"model_type\":\"llama\",\"hidden_size\":8192,\"intermediate_size\":28672,"
    "\"num_hidden_layers\":80,\"num_attention_heads\":64,\"num_key_value_heads\":8,\"vocab_size\":128256,"
    "\"max_position_embeddings\":131072,\"rms_norm_eps\":1e-5,\"rope_theta\":500000.0,\"tie_word_embeddings\":false,"
    "\"hidden_act\":\"silu\",\"torch_dtype\":\"bfloat16\"}";

/* A step of the example: adapters of rank 16 on all linear layers, rows of 4096 tokens. */
struct step {
    struct mt_machine m;
    struct mt_adapter_spec adapter;
    struct mt_layout *l;
    struct mt_plan_request r;
    struct mt_plan_choice c;
};

static void set_up(struct step *s, const char *config, size_t tokens, struct mt_cut cut)
{
    struct mt_hf_config cfg;
    struct mt_err err = {0};
    *s = (struct step){.adapter = {.on = true, .rank = 16, .alpha = 32, .lr_ratio_b = 1}};
    assert_true(mt_adapter_list_add(&s->adapter.targets, MT_ALL_LINEAR, 0));
    struct mt_layout_params p = {.cut = cut, .adapter = &s->adapter};
    if (mt_machine_read(&s->m, profile, &err) || mt_hf_config_parse(&cfg, config, strlen(config), "config", &err) ||
        mt_layout_create(&s->l, &cfg, &p, &err) || mt_weights_mark_stored(s->l, NULL, MT_PACKED_NONE, NULL, NULL, &err))
        fail_msg("%s", err.msg);
    const struct {
        enum mt_rate_id id;
        double v;
    } rates[] = {{MT_RATE_HOST_GIB, 64}, {MT_RATE_DRIVES, 1}, {MT_RATE_READ, 14}, {MT_RATE_WRITE, 10},
                 {MT_RATE_READ_BOTH, 14}, {MT_RATE_WRITE_BOTH, 10}, {MT_RATE_DISK_US, 100}};
    for (size_t i = 0; i < MT_ARRAY_LEN(rates); i++)
        s->m.rate[rates[i].id] = (struct mt_rate){rates[i].v, MT_RATE_RATED};
    s->r = make_request(s->l, &s->m, 4096, tokens / 4096);
    s->r.drives = 0; /* none for scratch: only the model's files */
    s->r.placement.device_budget.bytes = (uint64_t)23 << 30; /* 24 less the desktop's */
    s->r.placement.base_blocks = MT_AUTO;
    s->r.placement.activations = MT_ACT_RECOMPUTE;
    s->r.placement.keep_layers = s->r.placement.offload_layers = 0;
    s->r.numerics.logits_chunk = s->r.numerics.logits_piece = 512;
}

static void tear_down(struct step *s)
{
    mt_layout_destroy(&s->l);
    mt_adapter_spec_finish(&s->adapter);
}

/* Tokens per second with so much host memory. Nothing is written, and only what does not fit is read. */
static double tokens_per_second(struct step *s, int gib)
{
    struct mt_err err = {0};
    double tokens = (double)(s->r.numerics.rows_per_step * s->r.numerics.seq_len);
    s->r.placement.host_budget.bytes = (uint64_t)(gib * 0.9 * 1073741824.0);
    if (mt_plan_evaluate(&s->c, &s->r, NULL, &err))
        fail_msg("%d GiB: %s", gib, err.msg);
    const struct mt_plan_choice *c = &s->c;
    double rate = tokens / c->sim.seconds, in_host = (double)c->plane[MT_PLANE_IN_FILE].host_bytes;
    double read = 2 * (2.0 * (double)(s->l->n_params - s->l->n_trained) - in_host);
    print_message("  %3d GiB: %5.0f tokens/s, %3lld blocks (%.0f GB) in host memory, %.0f GB read; forward bound by %s, "
                  "backward by %s\n", gib, rate, (long long)c->engine.base_blocks, in_host / 1e9,
                  c->sim.bytes[MT_Q_DISK_READ] / 1e9, mt_queues[c->sim.bound[MT_SIM_FORWARD]].title,
                  mt_queues[c->sim.bound[MT_SIM_BACKWARD]].title);
    assert_true(c->engine.device_bytes <= s->r.placement.device_budget.bytes);
    assert_true(c->host_bytes <= s->r.placement.host_budget.bytes);
    assert_true(c->sim.bytes[MT_Q_DISK_WRITE] == 0 && c->disk_bytes == 0);
    if (c->engine.uses_files && !(c->sim.bytes[MT_Q_DISK_READ] > 0.85 * read && c->sim.bytes[MT_Q_DISK_READ] <= read))
        fail_msg("%d GiB: reads %.1f GB, by hand at most %.1f", gib, c->sim.bytes[MT_Q_DISK_READ] / 1e9, read / 1e9);
    if (c->engine.uses_files && c->engine.base_blocks <= s->l->cfg.n_layers) /* layers, which are read twice, stay before */
        assert_true(c->engine.in_files[0] && c->engine.in_files[s->l->n_units - 1]);
    mt_plan_choice_finish(&s->c);
    return rate;
}

/*
 * Records are 770 KB a token: each step has as many tokens as host memory can hold records of, and the rest of the
 * memory holds a part of the base's 470 GB. With few tokens drives bound the step, with many compute. With 256 GiB a
 * step has fewer tokens than fit: in halves of layers, whose boundaries between them spare backward a product, the
 * records are half as large again. The search finds this, for these tokens.
 */
TEST(adapters_on_qwen3_235b)
{
    static const struct {
        int gib;
        size_t tokens;
        const struct mt_cut *cut;
        int64_t micro_batch, slots, chunk;
        double least;
    } with[] = {{64, 16384, &mt_cut_layer, 2, MT_AUTO, 512, 240}, {96, 32768, &mt_cut_layer, 2, MT_AUTO, 512, 420},
                {128, 65536, &mt_cut_layer, 2, MT_AUTO, 512, 650}, {256, 98304, &mt_cut_half, 24, 6, 2048, 780}};
    for (size_t i = 0; i < MT_ARRAY_LEN(with); i++) {
        struct step s;
        set_up(&s, qwen3_235b, with[i].tokens, *with[i].cut);
        s.r.numerics.micro_batch = with[i].micro_batch;
        s.r.placement.slots = with[i].slots;
        s.r.numerics.logits_chunk = s.r.numerics.logits_piece = with[i].chunk;
        assert_true(fabs((double)(s.l->n_params - s.l->n_trained) / 235.09e9 - 1) < 0.001);
        assert_true(tokens_per_second(&s, with[i].gib) > with[i].least);
        tear_down(&s);
    }
}

/* Where a layer that is kept leaves no memory for as few sums of experts' outputs as are fastest, the step is as long as one
 * with more of them that are given. */
TEST(experts_in_less_memory_have_its_price)
{
    struct step s;
    struct mt_plan_choice given;
    set_up(&s, qwen3_235b, 98304, mt_cut_half);
    s.r.numerics.micro_batch = 24;
    s.r.numerics.logits_chunk = s.r.numerics.logits_piece = 2048;
    s.r.placement.slots = 3;
    s.r.placement.host_budget.bytes = (uint64_t)230 << 30;
    s.r.placement.expert_sums = s.r.placement.expert_streams = MT_AUTO;
    MUST(mt_plan_evaluate, &s.c, &s.r, NULL);
    double fast = s.c.sim.seconds;
    int64_t fewest = s.c.placement.expert_sums;
    mt_plan_choice_finish(&s.c);
    s.r.placement.keep_layers = 1;
    MUST(mt_plan_evaluate, &s.c, &s.r, NULL);
    assert_true(s.c.placement.expert_sums > fewest);
    assert_true(s.c.sim.seconds > fast);
    struct mt_plan_request t = mt_plan_request_as(&s.r, &s.c);
    MUST(mt_plan_evaluate, &given, &t, NULL);
    assert_true(given.sim.seconds == s.c.sim.seconds);
    mt_plan_choice_finish(&given);
    mt_plan_choice_finish(&s.c);
    tear_down(&s);
}

/* Bound by compute with any amount of host memory: drives and host memory together deliver the base in time. */
TEST(adapters_on_70b)
{
    struct step s;
    set_up(&s, llama_70b, 16384, mt_cut_layer);
    s.r.numerics.micro_batch = 2;
    static const int gib[] = {64, 96, 128, 256};
    for (size_t i = 0; i < MT_ARRAY_LEN(gib); i++)
        assert_true(tokens_per_second(&s, gib[i]) > 320);
    tear_down(&s);
}

int main(int argc, char **argv)
{
    mt_mem_keep_freed();
    profile = argc > 1 ? argv[1] : "";
    return test_run();
}
