/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "base/mem.h"
#include "model/layout.h"
#include "model/part.h"
#include "test.h"

static struct mt_hf_config cfg;

static struct mt_layout *layout_as(const char *json, const struct mt_layout_params *p)
{
    struct mt_layout *l = NULL;
    MUST(mt_hf_config_parse, &cfg, json, strlen(json), "config.json");
    MUST(mt_layout_create, &l, &cfg, p);
    return l;
}

static struct mt_layout *layout_in_groups(const char *json, struct mt_cut cut, size_t group)
{
    cut.expert_group = group;
    return layout_as(json, &(struct mt_layout_params){.decay_embeddings = true, .cut = cut});
}

#define QWEN3(hidden, ffn, width, layers, heads)                                                                       \
    "{\"architectures\": [\"Qwen3MoeForCausalLM\"], \"hidden_size\": " hidden ", \"intermediate_size\": " ffn          \
    ", \"moe_intermediate_size\": " width ", \"num_hidden_layers\": " layers ", \"num_attention_heads\": " heads       \
    ", \"num_key_value_heads\": 4, \"head_dim\": 128, \"vocab_size\": 151936, \"num_experts\": 128, "                  \
    "\"num_experts_per_tok\": 8}"
static const char qwen3_235b[] = QWEN3("4096", "12288", "1536", "94", "64");

#define GPT_OSS(layers, experts)                                                                                       \
    "{\"architectures\": [\"GptOssForCausalLM\"], \"hidden_size\": 2880, \"intermediate_size\": 2880, "                \
    "\"num_hidden_layers\": " layers ", \"num_attention_heads\": 64, \"vocab_size\": 201088, "                         \
    "\"num_local_experts\": " experts ", \"rope_scaling\": {\"rope_type\": \"yarn\", \"factor\": 32.0, "               \
    "\"truncate\": false, \"original_max_position_embeddings\": 4096}}"

static const struct {
    const char *json;
    uint64_t n_params; /* as transformers counts them, and biases that choose, which it has as buffers */
    double active;     /* in 1e9, without the embedding */
} published[] = {
    {QWEN3("2048", "6144", "768", "48", "32"), UINT64_C(30532122624), 3.0},
    {qwen3_235b, UINT64_C(235093634560), 21.6},
    {"{\"architectures\": [\"MixtralForCausalLM\"], \"hidden_size\": 4096, \"intermediate_size\": 14336, "
     "\"num_hidden_layers\": 32, \"num_attention_heads\": 32, \"num_key_value_heads\": 8, \"vocab_size\": 32000}",
     UINT64_C(46702792704), 12.75},
    {"{\"architectures\": [\"Qwen2MoeForCausalLM\"], \"hidden_size\": 3584, \"intermediate_size\": 18944, "
     "\"moe_intermediate_size\": 2560, \"shared_expert_intermediate_size\": 20480, \"num_hidden_layers\": 28, "
     "\"num_attention_heads\": 28, \"num_key_value_heads\": 4, \"vocab_size\": 151936, \"num_experts\": 64, "
     "\"num_experts_per_tok\": 8}",
     UINT64_C(57408658944), 13.7},
    {"{\"architectures\": [\"OlmoeForCausalLM\"], \"hidden_size\": 2048, \"intermediate_size\": 1024, "
     "\"num_hidden_layers\": 16, \"num_attention_heads\": 16, \"vocab_size\": 50304}",
     UINT64_C(6919161856), 1.18},
    {GPT_OSS("24", "32"), UINT64_C(20914757184), 3.6},
    {GPT_OSS("36", "128"), UINT64_C(116829156672), 5.13},
    {"{\"architectures\": [\"Glm4MoeForCausalLM\"], \"hidden_size\": 4096, \"intermediate_size\": 10944, "
     "\"num_hidden_layers\": 46, \"num_attention_heads\": 96, \"head_dim\": 128, \"attention_bias\": true, "
     "\"vocab_size\": 151552, \"num_nextn_predict_layers\": 1}",
     UINT64_C(106852245504) + 5760, 12.8},
    {"{\"architectures\": [\"Glm4MoeForCausalLM\"], \"hidden_size\": 5120, \"intermediate_size\": 12288, "
     "\"moe_intermediate_size\": 1536, \"num_hidden_layers\": 92, \"num_attention_heads\": 96, \"head_dim\": 128, "
     "\"attention_bias\": true, \"use_qk_norm\": true, \"vocab_size\": 151552, \"n_routed_experts\": 160, "
     "\"first_k_dense_replace\": 3}",
     UINT64_C(352797814784) + 14240, 32.8},
    {"{\"architectures\": [\"MiniMaxM2ForCausalLM\"], \"hidden_size\": 3072, \"intermediate_size\": 1536, "
     "\"num_hidden_layers\": 62, \"num_attention_heads\": 48, \"vocab_size\": 200064, \"rotary_dim\": 64}",
     UINT64_C(228689748992) + 15872, 10.4},
    {"{\"architectures\": [\"Dots1ForCausalLM\"], \"hidden_size\": 4096, \"intermediate_size\": 10944, "
     "\"num_hidden_layers\": 62, \"num_attention_heads\": 32, \"vocab_size\": 152064, \"n_shared_experts\": 2, "
     "\"n_routed_experts\": 128, \"num_experts_per_tok\": 6, \"first_k_dense_replace\": 1, \"n_group\": null}",
     UINT64_C(142774373888) + 7808, 13.4},
    {"{\"architectures\": [\"SolarOpenForCausalLM\"], \"hidden_size\": 4096, \"num_hidden_layers\": 48, "
     "\"num_attention_heads\": 64, \"vocab_size\": 196608}",
     UINT64_C(102651793408) + 6144, 11.3},
    {"{\"architectures\": [\"HYV3ForCausalLM\"], \"hidden_size\": 4096, \"intermediate_size\": 13312, "
     "\"num_hidden_layers\": 80, \"num_attention_heads\": 64, \"vocab_size\": 120832}",
     UINT64_C(295033528320) + 15168, 20.2},
    {"{\"architectures\": [\"Ernie4_5_MoeForCausalLM\"], \"hidden_size\": 2560, \"intermediate_size\": 12288, "
     "\"num_hidden_layers\": 28, \"num_attention_heads\": 20, \"vocab_size\": 103424}",
     UINT64_C(21825437888), 3.4},
    {"{\"architectures\": [\"HunYuanMoEV1ForCausalLM\"], \"hidden_size\": 4096, \"intermediate_size\": 3072, "
     "\"num_hidden_layers\": 32, \"num_attention_heads\": 32, \"num_key_value_heads\": 8, \"head_dim\": 128, "
     "\"vocab_size\": 128167, \"num_experts\": 64, \"moe_topk\": [8, 8], \"tie_word_embeddings\": true}",
     UINT64_C(80393183232), 12.8},
};

TEST(published_mixtures_have_their_parameter_counts)
{
    for (size_t i = 0; i < MT_ARRAY_LEN(published); i++) {
        struct mt_layout *l = layout_in_groups(published[i].json, mt_cut_layer, 0);
        uint64_t sum = 0;
        for (size_t t = 0; t < l->n_tensors; t++)
            sum += l->tensors[t].n;
        assert_true(l->n_params == published[i].n_params && sum == published[i].n_params);
        if (!(l->n_active > (published[i].active - 0.06) * 1e9 && l->n_active < (published[i].active + 0.06) * 1e9))
            fail_msg("%s: %.2f are active", cfg.family->model_type, (double)l->n_active / 1e9);
        double macs = mt_layout_flops_per_token(l, 1) / 6; /* all weights but norms, and a token's own attention */
        double attention = 2.0 * (double)(cfg.n_layers * mt_layer_of(&cfg, 0)->n_heads * mt_layer_of(&cfg, 0)->head_dim);
        assert_true(macs - attention > 0.999 * (double)l->n_active && macs - attention < (double)l->n_active);
        mt_layout_destroy(&l);
    }
}

/* Three layers, of which the second is dense. */
#define SMALL(more)                                                                                                    \
    "{\"architectures\": [\"Qwen3MoeForCausalLM\"], \"hidden_size\": 24, \"intermediate_size\": 40, "                  \
    "\"moe_intermediate_size\": 16, \"num_hidden_layers\": 3, \"num_attention_heads\": 3, "                            \
    "\"num_key_value_heads\": 1, \"head_dim\": 16, \"vocab_size\": 50, \"num_experts\": 12, "                          \
    "\"num_experts_per_tok\": 2, \"mlp_only_layers\": [1]" more "}"

TEST(a_mixture_is_a_unit_by_micro_batch_and_one_for_each_group)
{
    static const struct {
        size_t group;
        const char *names[12]; /* of layers 0 and 1 */
    } cases[] = {
        {5, {"layer 0 attention router", "layer 0 lists", "layer 0 experts 0-4", "layer 0 experts 5-9",
             "layer 0 experts 10-11", "layer 0 combine", "layer 1"}},
        {0, {"layer 0 attention router", "layer 0 lists", "layer 0 experts 0-11", "layer 0 combine", "layer 1"}},
        {99, {"layer 0 attention router", "layer 0 lists", "layer 0 experts 0-11", "layer 0 combine", "layer 1"}},
    };
    for (size_t i = 0; i < MT_ARRAY_LEN(cases); i++) {
        struct mt_layout *l = layout_in_groups(SMALL(""), mt_cut_layer, cases[i].group);
        for (size_t u = 1; cases[i].names[u - 1]; u++) {
            const struct mt_unit *unit = &l->units[u];
            assert_string_equal(unit->name, cases[i].names[u - 1]);
            assert_int_equal(unit->per_step, strstr(unit->name, "lists") || strstr(unit->name, "experts"));
            assert_int_equal(unit->block, unit->layer + 1);
            assert_int_equal(unit->n_elems > 0, !strstr(unit->name, "lists") && !strstr(unit->name, "combine"));
        }
        mt_layout_destroy(&l);
    }
    MT_CLOSED_BY(mt_layout_destroy) struct mt_layout *l = layout_in_groups(SMALL(""), mt_cut_half, 6);
    assert_string_equal(l->units[1].name, "layer 0 attention");
    assert_string_equal(l->units[2].name, "layer 0 router");
    assert_string_equal(l->units[6].name, "layer 0 combine");
    assert_string_equal(l->units[7].name, "layer 1 attention");
    assert_string_equal(l->units[8].name, "layer 1 mlp");
}

/* The parameter's tensors, in order, are the ones of these names. */
static void check_param(const struct mt_layout *l, const struct mt_param *p, size_t unit, const char *a, const char *b)
{
    const struct mt_tensor *t = mt_layout_find(l, a), *next = b ? mt_layout_find(l, b) : NULL;
    assert_true(t && t->param == p && t->unit == unit && t->first == p->at);
    assert_int_equal(p->at % MT_PARAM_ALIGN, 0);
    assert_true(!b || (next && next->param == p && next->first == t->first + t->n));
    assert_int_equal(p->n, t->n + (b ? next->n : 0));
}

TEST(parameters_of_an_expert_are_reached_by_role_and_expert)
{
    for (size_t group = 1; group < 12; group += 3) {
        struct mt_layout *l = layout_in_groups(SMALL(""), mt_cut_layer, group);
        int seen = 0;
        for (size_t u = 0; u < l->n_units; u++) {
            const struct mt_part *p = &l->parts[l->units[u].first_part];
            for (int e = 0; e < p->n_experts; e++) {
                char gate[128], up[128], down[128];
                const char *format = "model.layers.%d.mlp.experts.%d.%s_proj.weight";
                snprintf(gate, sizeof(gate), format, p->layer, p->first_expert + e, "gate");
                snprintf(up, sizeof(up), format, p->layer, p->first_expert + e, "up");
                snprintf(down, sizeof(down), format, p->layer, p->first_expert + e, "down");
                check_param(l, &p->expert[e][MT_EXPERT_GATE_UP], u, gate, up);
                check_param(l, &p->expert[e][MT_EXPERT_DOWN], u, down, NULL);
                assert_int_equal(p->expert[e][MT_EXPERT_GATE_UP_BIAS].n + p->expert[e][MT_EXPERT_DOWN_BIAS].n, 0);
                assert_int_equal(mt_layout_find(l, up)->expert, p->first_expert + e);
                seen++;
            }
        }
        assert_int_equal(seen, 2 * 12);
        assert_int_equal(mt_layout_find(l, "model.layers.1.mlp.gate_proj.weight")->expert, -1);
        assert_null(mt_layout_find(l, "model.layers.1.mlp.gate.weight"));
        assert_null(mt_layout_find(l, "model.layers.0.mlp.experts.12.up_proj.weight"));
        mt_layout_destroy(&l);
    }
}

TEST(groups_are_the_same_model)
{
    MT_CLOSED_BY(mt_layout_destroy) struct mt_layout *whole = layout_in_groups(SMALL(""), mt_cut_layer, 12);
    for (size_t group = 1; group < 12; group += 2) {
        struct mt_layout *l = layout_in_groups(SMALL(""), group % 4 == 1 ? mt_cut_half : mt_cut_layer, group);
        assert_int_equal(l->n_tensors, whole->n_tensors);
        for (size_t i = 0; i < l->n_tensors; i++) {
            assert_string_equal(l->tensors[i].name, whole->tensors[i].name);
            assert_int_equal(l->units[l->tensors[i].unit].block, whole->units[whole->tensors[i].unit].block);
        }
        assert_true(l->n_params == whole->n_params && l->n_active == whole->n_active);
        assert_true(mt_layout_flops_per_token(l, 64) == mt_layout_flops_per_token(whole, 64));
        mt_layout_destroy(&l);
    }
}

TEST(groups_of_experts_are_alike_unless_frozen_otherwise)
{
    const char *const globs[] = {"*.experts.5.*", "model.layers.2.mlp.gate.weight"};
    struct mt_layout_params p = {.freeze = globs, .n_freeze = 2, .decay_embeddings = true, .cut = mt_cut_layer};
    p.cut.expert_group = 4;
    MT_CLOSED_BY(mt_layout_destroy) struct mt_layout *l = layout_as(SMALL(""), &p);
    /* embed, attention and router, lists, three groups, combine, layer 1, ... */
    assert_true(mt_layout_alike(l, 3, 5) && !mt_layout_alike(l, 3, 4) && !mt_layout_alike(l, 2, 3));
    assert_true(mt_layout_alike(l, 3, 10) && !mt_layout_alike(l, 1, 8));
    const struct mt_part *group = &l->parts[l->units[4].first_part];
    assert_int_equal(group->first_expert, 4);
    for (int e = 0; e < 4; e++)
        for (int role = 0; role < MT_EXPERT_MAX_PARAMS; role++)
            assert_int_equal(group->expert[e][role].trainable, group->expert[e][role].n && e != 1);
    mt_layout_destroy(&l);
    const char *const all[] = {"*.experts.*"};
    p.freeze = all;
    p.n_freeze = 1;
    l = layout_as(SMALL(""), &p);
    for (size_t u = 0; u < l->n_units; u++)
        assert_int_equal(l->units[u].trainable, !l->units[u].per_step && l->units[u].n_elems);
}

TEST(families_name_their_tensors)
{
#define MIXED(arch, more)                                                                                              \
    "{\"architectures\": [\"" arch "\"], \"hidden_size\": 24, \"intermediate_size\": 40, \"num_hidden_layers\": 2, "   \
    "\"num_attention_heads\": 3, \"num_key_value_heads\": 1, \"vocab_size\": 50" more "}"
    static const struct {
        const char *json, *tensor;
        int64_t rows, cols;
    } cases[] = {
        {MIXED("MixtralForCausalLM", ""), "model.layers.1.block_sparse_moe.gate.weight", 8, 24},
        {MIXED("MixtralForCausalLM", ""), "model.layers.1.block_sparse_moe.experts.7.w1.weight", 40, 24},
        {MIXED("MixtralForCausalLM", ""), "model.layers.1.block_sparse_moe.experts.7.w3.weight", 40, 24},
        {MIXED("MixtralForCausalLM", ""), "model.layers.1.block_sparse_moe.experts.7.w2.weight", 24, 40},
        {MIXED("MixtralForCausalLM", ""), "model.layers.1.post_attention_layernorm.weight", 24, 0},
        {MIXED("Qwen2MoeForCausalLM", ""), "model.layers.0.mlp.shared_expert.up_proj.weight", 5632, 24},
        {MIXED("Qwen2MoeForCausalLM", ""), "model.layers.0.mlp.shared_expert.down_proj.weight", 24, 5632},
        {MIXED("Qwen2MoeForCausalLM", ""), "model.layers.0.mlp.shared_expert_gate.weight", 1, 24},
        {MIXED("Qwen2MoeForCausalLM", ""), "model.layers.0.mlp.experts.59.down_proj.weight", 24, 1408},
        {MIXED("Qwen2MoeForCausalLM", ""), "model.layers.0.self_attn.q_proj.bias", 24, 0},
        {MIXED("OlmoeForCausalLM", ""), "model.layers.0.self_attn.q_norm.weight", 24, 0},
        {MIXED("OlmoeForCausalLM", ""), "model.layers.0.self_attn.k_norm.weight", 8, 0},
        {MIXED("OlmoeForCausalLM", ""), "model.layers.0.mlp.experts.63.up_proj.weight", 40, 24},
    };
    for (size_t i = 0; i < MT_ARRAY_LEN(cases); i++) {
        struct mt_layout *l = layout_in_groups(cases[i].json, mt_cut_layer, 0);
        const struct mt_tensor *t = mt_layout_find(l, cases[i].tensor);
        if (!t)
            fail_msg("there is no %s", cases[i].tensor);
        assert_true(t->shape[0] == cases[i].rows && t->shape[1] == cases[i].cols);
        mt_layout_destroy(&l);
    }
}

/* 36,000 tensors: nothing of a layout may take the square of that. */
TEST(a_large_mixture_is_laid_out_at_once)
{
    clock_t start = clock();
    MT_CLOSED_BY(mt_layout_destroy) struct mt_layout *l = layout_in_groups(qwen3_235b, mt_cut_layer, 0);
    assert_true(l->n_tensors > 36000);
    assert_int_equal(l->cut.expert_group, 7); /* 36 MiB each */
    for (size_t i = 0; i < l->n_tensors; i++)
        assert_ptr_equal(mt_layout_find(l, l->tensors[i].name), &l->tensors[i]);
    double seconds = (double)(clock() - start) / CLOCKS_PER_SEC;
    if (seconds > 2) /* not quadratic; the machine may do other things, too */
        fail_msg("laying out %zu tensors took %.2f s", l->n_tensors, seconds);
}

/* What a family's row asks for and a mixture does not compute is refused, not left out. */
TEST(a_norm_or_a_factor_after_a_mixture_is_refused)
{
    MT_CLOSED_BY(mt_layout_destroy) struct mt_layout *l = NULL;
    struct mt_err err = {0};
    const struct mt_layout_params p = {.cut = mt_cut_layer};
    assert_int_equal(mt_hf_config_parse(&cfg, qwen3_235b, strlen(qwen3_235b), "config.json", &err), 0);
    cfg.spec[0].norms.attention.after = "post_attention_layernorm.weight"; /* attention has it */
    assert_int_equal(mt_layout_create(&l, &cfg, &p, &err), 0);
    mt_layout_destroy(&l);
    cfg.spec[0].norms.mlp.after = "post_feedforward_layernorm.weight";
    assert_int_equal(mt_layout_create(&l, &cfg, &p, &err), -EINVAL);
    assert_non_null(strstr(err.msg, "qwen3_moe: the norm post_feedforward_layernorm.weight after a mixture"));
    cfg.spec[0].norms.mlp.after = NULL;
    cfg.spec[0].residual = 0.5;
    assert_int_equal(mt_layout_create(&l, &cfg, &p, &err), -EINVAL);
    assert_non_null(strstr(err.msg, "residual factor"));
    cfg.spec[0].is_mixture = false; /* dense layers compute both */
    cfg.spec[0].parts[1] = "mlp";
    cfg.spec[0].parts[2] = NULL;
    cfg.spec[0].norms.mlp.after = "post_feedforward_layernorm.weight";
    assert_int_equal(mt_layout_create(&l, &cfg, &p, &err), 0);
}
