/* SPDX-License-Identifier: Apache-2.0 */
/* Layers whose mixer is another than attention: which they are, and its numbers. */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "hf/hf_config.h"
#include "test.h"

static struct mt_hf_config cfg;

static const char *architecture = "Qwen3_5ForCausalLM";

static int parse(const char *keys, struct mt_err *err)
{
    char text[1024];
    int n = snprintf(text, sizeof(text), "{\"architectures\": [\"%s\"], \"hidden_size\": 64, \"vocab_size\": 300, "
                     "\"intermediate_size\": 176, \"num_hidden_layers\": 8, \"num_attention_heads\": 4%s}", architecture, keys);
    assert_true(n > 0 && (size_t)n < sizeof(text));
    return mt_hf_config_parse(&cfg, text, (size_t)n, "config.json", err);
}

static void take(const char *keys)
{
    struct mt_err err = {0};
    if (parse(keys, &err))
        fail_msg("%s: %s", keys, err.msg);
}

static void refuse(const char *keys, const char *key, const char *why)
{
    struct mt_err err = {0};
    assert_int_equal(parse(keys, &err), -EINVAL);
    assert_int_equal(err.kind, MT_ERR_INPUT);
    if (!strstr(err.msg, key) || !strstr(err.msg, why))
        fail_msg("%s: \"%s\" does not say \"%s\" and \"%s\"", keys, err.msg, key, why);
}

static bool is_mixed(int64_t layer)
{
    return !strcmp(mt_layer_of(&cfg, layer)->parts[0], "delta");
}

TEST(numbers_are_those_of_the_keys_or_the_class)
{
    take("");
    struct mt_delta_spec d = mt_layer_of(&cfg, 0)->delta;
    assert_true(d.k_heads == 16 && d.v_heads == 32 && d.k_dim == 128 && d.v_dim == 128 && d.taps == 4 && !d.joined);
    take(", \"linear_num_key_heads\": 3, \"linear_num_value_heads\": 9, \"linear_key_head_dim\": 8, "
         "\"linear_value_head_dim\": 24, \"linear_conv_kernel_dim\": 8");
    d = mt_layer_of(&cfg, 0)->delta;
    assert_true(d.k_heads == 3 && d.v_heads == 9 && d.k_dim == 8 && d.v_dim == 24 && d.taps == 8);
}

TEST(numbers_that_do_not_fit_are_refused)
{
    refuse(", \"linear_num_key_heads\": 5", "\"linear_num_key_heads\"", "does not divide linear_num_value_heads");
    refuse(", \"linear_key_head_dim\": 12", "\"linear_key_head_dim\"", "multiple of 8");
    refuse(", \"linear_value_head_dim\": 20", "\"linear_value_head_dim\"", "multiple of 8");
    refuse(", \"linear_conv_kernel_dim\": 9", "\"linear_conv_kernel_dim\"", "8");
    refuse(", \"linear_num_value_heads\": 0", "\"linear_num_value_heads\"", "");
    refuse(", \"hidden_act\": \"gelu_pytorch_tanh\"", "\"hidden_act\"", "must be silu");
}

TEST(layers_are_by_interval_or_by_name)
{
    take("");
    for (int64_t i = 0; i < 8; i++)
        assert_int_equal(is_mixed(i), i % 4 != 3);
    take(", \"full_attention_interval\": 3");
    for (int64_t i = 0; i < 8; i++)
        assert_int_equal(is_mixed(i), i % 3 != 2);
    take(", \"full_attention_interval\": 3, \"layer_types\": [\"full_attention\", \"linear_attention\", \"linear_attention\", "
         "\"full_attention\", \"full_attention\", \"full_attention\", \"full_attention\", \"linear_attention\"]");
    for (int64_t i = 0; i < 8; i++)
        assert_int_equal(is_mixed(i), i == 1 || i == 2 || i == 7);
    refuse(", \"layer_types\": [\"linear_attention\"]", "\"layer_types\"", "every layer");
    refuse(", \"layer_types\": [\"linear_attention\", \"linear_attention\", \"linear_attention\", \"sliding_attention\", "
           "\"full_attention\", \"full_attention\", \"full_attention\", \"full_attention\"]", "\"layer_types\"", "not supported");
}

static int granite(void **)
{
    architecture = "GraniteMoeHybridForCausalLM";
    return 0;
}

#define GRANITE(keys) ", \"num_local_experts\": 0, \"shared_intermediate_size\": 40, \"mamba_d_state\": 16, " keys

TEST_WITH(mamba_has_the_numbers_of_its_keys, granite, NULL)
{
    take(GRANITE("\"mamba_n_heads\": 8, \"mamba_n_groups\": 2"));
    struct mt_delta_spec d = mt_layer_of(&cfg, 0)->delta;
    assert_true(d.plain && d.conv_bias && d.k_heads == 2 && d.v_heads == 8 && d.k_dim == 16 && d.v_dim == 16 && d.taps == 4);
    assert_true(d.least == 0 && d.most > 1e300 && is_mixed(0) && is_mixed(7)); /* all layers in the class */
    take(GRANITE("\"mamba_n_heads\": 4, \"mamba_d_head\": \"auto\", \"mamba_conv_bias\": false, \"time_step_limit\": [0.5, 2]"));
    d = mt_layer_of(&cfg, 0)->delta;
    assert_true(d.v_dim == 32 && !d.conv_bias && d.least == 0.5 && d.most == 2);
    take(GRANITE("\"mamba_n_heads\": 4, \"time_step_limit\": [0.001, {\"__float__\": \"Infinity\"}]"));
    assert_true(mt_layer_of(&cfg, 0)->delta.least == 0.001 && mt_layer_of(&cfg, 0)->delta.most > 1e300);
    take(GRANITE("\"layer_types\": [\"attention\", \"attention\", \"attention\", \"attention\", \"attention\", \"attention\", "
                 "\"attention\", \"full_attention\"], \"mamba_n_heads\": 7")); /* numbers of no layer */
    assert_true(!is_mixed(0) && !mt_layer_of(&cfg, 0)->delta.v_heads && cfg.n_specs == 1);
}

TEST_WITH(mamba_that_is_not_supported_is_refused, granite, NULL)
{
    refuse(GRANITE("\"mamba_n_heads\": 8, \"mamba_n_groups\": 3"), "\"mamba_n_groups\"", "does not divide");
    refuse(GRANITE("\"mamba_n_heads\": 8, \"mamba_d_head\": 24"), "\"mamba_expand\"", "width of all heads");
    refuse(GRANITE("\"mamba_n_heads\": 8, \"mamba_proj_bias\": true"), "\"mamba_proj_bias\"", "must not be true");
    refuse(GRANITE("\"mamba_n_heads\": 8, \"hidden_act\": \"gelu_pytorch_tanh\""), "\"hidden_act\"", "must be silu");
    refuse(GRANITE("\"mamba_n_heads\": 8, \"time_step_limit\": [0.1]"), "\"time_step_limit\"", "two numbers");
    refuse(GRANITE("\"mamba_n_heads\": 8, \"time_step_limit\": [3, 2]"), "\"time_step_limit\"", "two numbers");
    refuse(GRANITE("\"mamba_n_heads\": 32"), "\"mamba_d_head\"", "multiple of 8");
}

static int nemotron(void **)
{
    architecture = "NemotronHForCausalLM";
    return 0;
}

#define NEMOTRON(keys) ", \"num_key_value_heads\": 2, \"mamba_num_heads\": 6, \"n_groups\": 2, \"ssm_state_size\": 8, \"n_routed_experts\": 128" keys

TEST_WITH(layers_of_one_branch_are_by_letter_or_by_name, nemotron, NULL)
{
    static const char *const want[] = {"delta", "mlp", "attention", "delta", "mlp", "delta", "attention", "mlp"};
    static const char *const keys[] = {
        NEMOTRON(", \"hybrid_override_pattern\": \"M-*M-M*-\", \"time_step_limit\": [0.0, Infinity], \"a\": \"\\\"Infinity\""),
        NEMOTRON(", \"layers_block_type\": [\"linear_attention\", \"mlp\", \"attention\", \"mamba\", \"mlp\", \"mamba\", "
                 "\"full_attention\", \"mlp\"]")};
    for (int k = 0; k < 2; k++) {
        take(keys[k]);
        assert_int_equal(cfg.moe.n_experts, 0);
        for (int64_t i = 0; i < 8; i++) {
            const char *const *parts = mt_layer_of(&cfg, i)->parts;
            assert_true(!strcmp(parts[0], want[i]) && !parts[1] && mt_layer_of(&cfg, i)->rope == MT_NO_ROPE);
        }
        assert_true(mt_layer_of(&cfg, 0)->delta.least == 0.001 && mt_layer_of(&cfg, 0)->delta.v_dim == 64);
    }
    take(NEMOTRON(", \"hybrid_override_pattern\": \"M-*\"")); /* as many layers as it has letters */
    assert_int_equal(cfg.n_layers, 3);
    refuse(NEMOTRON(", \"hybrid_override_pattern\": \"ME*\", \"moe_latent_size\": 36"), "\"moe_latent_size\"", "multiple of 8");
    refuse(NEMOTRON(", \"hybrid_override_pattern\": \"MX*\""), "\"hybrid_override_pattern\"", "not supported");
    refuse(NEMOTRON(", \"hybrid_override_pattern\": \"M\", \"use_bias\": true"), "\"use_bias\"", "must not be true");
    refuse(NEMOTRON(", \"hybrid_override_pattern\": \"M\", \"tie_word_embeddings\": true"), "\"tie_word_embeddings\"", "must not be true");
}

TEST_WITH(experts_are_in_layers_of_their_kind_alone, nemotron, NULL)
{
    take(NEMOTRON(", \"hybrid_override_pattern\": \"ME*-\", \"moe_shared_expert_intermediate_size\": 40, \"moe_latent_size\": null, "
                  "\"moe_intermediate_size\": 24, \"num_experts_per_tok\": 6, \"routed_scaling_factor\": 2.5"));
    for (int64_t i = 0; i < 4; i++)
        assert_true(mt_layer_of(&cfg, i)->is_mixture == (i == 1));
    assert_string_equal(mt_layer_of(&cfg, 1)->parts[0], "router");
    assert_string_equal(mt_layer_of(&cfg, 1)->parts[3], "combine");
    assert_true(cfg.moe.ungated && cfg.moe.n_experts == 128 && cfg.moe.top_k == 6 && cfg.moe.width == 24);
    assert_true(cfg.moe.shared_width == 40 && cfg.moe.scale == 2.5 && cfg.moe.n_group == 1 && cfg.moe.select_bias);
    take(NEMOTRON(", \"hybrid_override_pattern\": \"ME*-\", \"moe_latent_size\": 32")); /* Super */
    assert_true(cfg.moe.latent == 32 && !strcmp(mt_layer_of(&cfg, 1)->parts[3], "latent"));
    refuse(NEMOTRON(", \"hybrid_override_pattern\": \"ME*-\", \"mlp_hidden_act\": \"gelu_pytorch_tanh\""), "\"mlp_hidden_act\"", "must be relu2");
}
