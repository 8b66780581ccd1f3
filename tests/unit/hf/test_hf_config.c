/* SPDX-License-Identifier: Apache-2.0 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/fs.h"
#include "base/mem.h"
#include "test.h"
#include "texts.h"

TEST(families_have_their_own_defaults)
{
    take(LLAMA);
    assert_string_equal(cfg.family->model_type, "llama");
    assert_int_equal(layer(0)->n_kv_heads, 4);
    assert_int_equal(layer(0)->head_dim, 16);
    assert_true(layer(0)->norm.eps == 1e-6 && cfg.rope[0].theta == 10000 && !cfg.tied && !layer(0)->qkv_bias && !layer(0)->qk_norm);
    assert_int_equal(cfg.max_pos, 2048);
    assert_int_equal(layer(3)->window, 0);
    take("\"architectures\": [\"MistralForCausalLM\"], \"num_attention_heads\": 8, \"hidden_size\": 64, "
         "\"intermediate_size\": 8, \"num_hidden_layers\": 2, \"vocab_size\": 10");
    assert_int_equal(layer(0)->n_kv_heads, 8);
    assert_int_equal(layer(0)->window, 4096);
    assert_false(layer(0)->qkv_bias);
    take("\"architectures\": [\"Qwen2ForCausalLM\"], \"num_key_value_heads\": 2, " SHAPE);
    assert_true(layer(0)->qkv_bias && !layer(0)->o_bias && !layer(0)->qk_norm && !layer(0)->mlp_bias);
    take("\"model_type\": \"qwen3\", \"num_key_value_heads\": 2, " SHAPE); /* named by model_type alone */
    assert_int_equal(layer(0)->head_dim, 128);
    assert_true(layer(0)->qk_norm && !layer(0)->qkv_bias);
    take("\"model_type\": \"qwen3\", \"num_key_value_heads\": 2, \"attention_bias\": true, " SHAPE);
    assert_true(layer(0)->qkv_bias && layer(0)->o_bias);
    take(LLAMA ", \"attention_bias\": true, \"mlp_bias\": true, \"hidden_act\": \"gelu_pytorch_tanh\"");
    assert_true(layer(0)->qkv_bias && layer(0)->o_bias && layer(0)->mlp_bias && layer(0)->activation == MT_ACTIVATION_GELU_TANH);
}

TEST(an_mlp_may_have_no_gate)
{
    take(LLAMA);
    assert_false(layer(0)->ungated);
    refuse(LLAMA ", \"hidden_act\": \"relu2\"", "must be silu or gelu_pytorch_tanh");
    take("\"model_type\": \"arcee\", " SHAPE);
    assert_true(layer(0)->ungated && layer(0)->activation == MT_ACTIVATION_RELU2 && !layer(0)->mlp_bias);
    assert_true(layer(0)->norm.eps == 1e-5 && cfg.max_pos == 4096 && layer(0)->n_kv_heads == 4);
    take("\"model_type\": \"arcee\", \"hidden_act\": \"gelu_pytorch_tanh\", \"mlp_bias\": true, " SHAPE);
    assert_true(layer(0)->ungated && layer(0)->activation == MT_ACTIVATION_GELU_TANH && layer(0)->mlp_bias);
    refuse("\"model_type\": \"arcee\", \"hidden_act\": \"silu\", " SHAPE, "has no gate");
}

TEST(norms_may_be_centred)
{
    take(LLAMA);
    assert_false(layer(0)->norm.centred || layer(0)->norm.biased);
    take("\"model_type\": \"nemotron\", " SHAPE);
    assert_true(layer(0)->norm.centred && layer(0)->norm.biased && layer(0)->norm.plus_one && layer(0)->norm.eps == 1e-5);
    assert_true(cfg.norm.centred && cfg.norm.biased && layer(0)->ungated && (int64_t)cfg.rope[0].dims == layer(0)->head_dim / 2);
    take("\"model_type\": \"starcoder2\", \"norm_epsilon\": 0.5, \"sliding_window\": 9, " SHAPE);
    assert_true(layer(0)->norm.centred && layer(0)->norm.biased && !layer(0)->norm.plus_one && layer(0)->norm.eps == 0.5);
    assert_true(layer(0)->qkv_bias && layer(0)->o_bias && layer(0)->mlp_bias && layer(0)->window == 9 && cfg.tied);
    take("\"model_type\": \"starcoder2\", \"use_bias\": false, " SHAPE);
    assert_true(layer(0)->norm.biased && !layer(0)->qkv_bias && !layer(0)->mlp_bias);
}

TEST(an_activation_may_be_trained)
{
    refuse("\"model_type\": \"apertus\", " SHAPE, "rope_scaling");
    take("\"model_type\": \"apertus\", \"rope_parameters\": {\"rope_type\": \"default\", \"rope_theta\": 5e5}, " SHAPE);
    assert_true(layer(0)->activation == MT_ACTIVATION_XIELU && layer(0)->ungated && layer(0)->qk_norm == MT_QK_NORM_HEADS);
    assert_string_equal(layer(0)->norms.mlp.before, "feedforward_layernorm.weight");
    refuse(LLAMA ", \"hidden_act\": \"xielu\"", "must be silu or gelu_pytorch_tanh");
}

TEST(llama_has_other_names)
{
    take("\"model_type\": \"internlm3\", \"num_key_value_heads\": 2, \"head_dim\": 16, \"qkv_bias\": true, " SHAPE);
    assert_true(layer(0)->qkv_bias && !layer(0)->o_bias && !layer(0)->mlp_bias && layer(0)->norm.eps == 1e-5);
    take("\"model_type\": \"internlm3\", \"num_key_value_heads\": 2, \"head_dim\": 16, \"bias\": true, " SHAPE);
    assert_true(!layer(0)->qkv_bias && layer(0)->o_bias && layer(0)->mlp_bias);
    refuse("\"model_type\": \"iquestcoder\", \"num_key_value_heads\": 2, \"use_sliding_window\": true, " SHAPE, "use_sliding_window");
    take("\"model_type\": \"youtu\", \"q_lora_rank\": null, " SHAPE);
    assert_true(cfg.tied && layer(0)->kv_latent == 512 && !layer(0)->q_latent && !layer(0)->is_mixture);
}

TEST(documents_may_have_a_limit)
{
    take(LLAMA);
    assert_int_equal(cfg.longest, 0);
    take("\"model_type\": \"deepseek_v32\", \"index_topk\": 512, " SHAPE);
    assert_true(cfg.longest == 512 && !layer(2)->is_mixture && layer(3)->is_mixture && cfg.moe.n_group == 8);
    take("\"model_type\": \"glm_moe_dsa\", \"mlp_layer_types\": [\"sparse\", \"dense\", \"sparse\", \"dense\"], " SHAPE);
    assert_true(cfg.longest == 2048 && layer(0)->is_mixture && !layer(3)->is_mixture && layer(0)->v_dim == 256);
}

TEST(branches_may_be_parallel)
{
    take("\"model_type\": \"cohere\", " SHAPE);
    assert_string_equal(layer(0)->parts[0], "parallel");
    assert_true(!layer(0)->parts[1] && layer(0)->norm.centred && !layer(0)->norm.biased && cfg.tied);
    assert_true(cfg.logit_scale == 0.0625 && cfg.rope[0].theta == 500000 && layer(0)->rope == 0);
    refuse("\"model_type\": \"cohere\", \"use_qk_norm\": true, " SHAPE, "use_qk_norm");
    take("\"model_type\": \"cohere2\", \"sliding_window_pattern\": 2, \"layer_norm_eps\": 0.5, " SHAPE);
    assert_true(layer(0)->window == 4096 && layer(0)->rope == 0 && layer(0)->norm.eps == 0.5);
    assert_true(!layer(1)->window && layer(1)->rope == MT_NO_ROPE);
    take("\"model_type\": \"cohere2\", \"sliding_window\": null, " SHAPE);
    assert_true(!layer(0)->window && layer(0)->rope == MT_NO_ROPE);
}

TEST(null_is_absent_but_for_heads_and_the_window)
{
    take(LLAMA ", \"head_dim\": null, \"num_key_value_heads\": null, \"rope_scaling\": null");
    assert_int_equal(layer(0)->head_dim, 16);
    take("\"architectures\": [\"MistralForCausalLM\"], \"sliding_window\": null, \"num_key_value_heads\": 2, " SHAPE);
    assert_int_equal(layer(0)->window, 0);
    take("\"architectures\": [\"MixtralForCausalLM\"], \"num_key_value_heads\": null, " SHAPE);
    assert_int_equal(layer(0)->n_kv_heads, 4); /* its class has 8 */
    take("\"architectures\": [\"MiniMaxM2ForCausalLM\"], \"num_key_value_heads\": 2, \"head_dim\": null, " SHAPE);
    assert_int_equal(layer(0)->head_dim, 16); /* its class has 128 */
    take(MIXTURE("DeepseekV3ForCausalLM") ", \"norm_topk_prob\": null"); /* Python's None counts as False */
    assert_true(cfg.moe.renorm == MT_MOE_NO_RENORM);
}

TEST(windows_follow_their_family)
{
    const char *qwen = "\"architectures\": [\"Qwen2ForCausalLM\"], \"num_key_value_heads\": 2, \"sliding_window\": 12, " SHAPE;
    char keys[1024];
    snprintf(keys, sizeof(keys), "%s", qwen);
    take(keys); /* use_sliding_window is false by default */
    assert_int_equal(layer(3)->window, 0);
    snprintf(keys, sizeof(keys), "%s, \"use_sliding_window\": true, \"max_window_layers\": 2", qwen);
    take(keys);
    assert_true(!layer(0)->window && !layer(1)->window && layer(2)->window == 12 && layer(3)->window == 12);
    snprintf(keys, sizeof(keys), "%s, \"use_sliding_window\": true, \"max_window_layers\": 2, \"layer_types\": "
             "[\"sliding_attention\", \"full_attention\", \"full_attention\", \"sliding_attention\"]", qwen);
    take(keys); /* layer_types wins */
    assert_true(layer(0)->window == 12 && !layer(1)->window && !layer(2)->window && layer(3)->window == 12);
    snprintf(keys, sizeof(keys), "%s, \"layer_types\": [\"full_attention\"]", qwen);
    refuse(keys, "layer_types");
    snprintf(keys, sizeof(keys), "%s, \"use_sliding_window\": true, \"layer_types\": [\"full_attention\", "
             "\"full_attention\", \"full_attention\", \"linear_attention\"]", qwen);
    refuse(keys, "layer_types");
    snprintf(keys, sizeof(keys), "%s, \"layer_types\": [\"sliding_attention\", \"full_attention\", "
             "\"full_attention\", \"full_attention\"]", qwen);
    refuse(keys, "sliding_window is missing");
}

TEST(layers_that_compute_alike_share_a_specification)
{
    take("\"architectures\": [\"Gemma3ForCausalLM\"], \"sliding_window_pattern\": 3, \"rope_scaling\": "
         "{\"rope_type\": \"linear\", \"factor\": 8}, \"final_logit_softcapping\": 30, " SHAPE);
    assert_true(cfg.n_specs == 2 && cfg.layer[0] == cfg.layer[1] && cfg.layer[1] != cfg.layer[2]);
    assert_true(layer(0)->window == 4096 && layer(0)->rope == 1 && layer(2)->window == 0 && layer(2)->rope == 0);
    assert_true(cfg.rope[0].type == MT_ROPE_LINEAR && cfg.rope[0].theta == 1e6 && cfg.rope[0].dims == 256);
    assert_true(cfg.n_ropes == 2 && cfg.rope[1].type == MT_ROPE_DEFAULT && cfg.rope[1].theta == 1e4);
    assert_true(layer(0)->norm.plus_one && cfg.norm.plus_one && cfg.tied && cfg.embed_scale == 8 && cfg.logit_cap == 30);
    assert_string_equal(layer(0)->norms.mlp.after, "post_feedforward_layernorm.weight");
    assert_true(layer(0)->score_scale == 1.0 / 16 && layer(0)->activation == MT_ACTIVATION_GELU_TANH);
    refuse("\"model_type\": \"gemma3_text\", \"rope_parameters\": {\"rope_type\": \"linear\", \"factor\": 8}, " SHAPE, "full_attention");
    take("\"architectures\": [\"Gemma3ForCausalLM\"], \"query_pre_attn_scalar\": 64, \"rope_parameters\": "
         "{\"full_attention\": {\"rope_theta\": 5000.0}, \"sliding_attention\": {\"rope_theta\": 77.0}}, " SHAPE);
    assert_true(cfg.rope[0].theta == 5000 && cfg.rope[1].theta == 77 && layer(0)->score_scale == 0.125 && !cfg.logit_cap);
    refuse("\"architectures\": [\"Gemma3ForCausalLM\"], \"attn_logit_softcapping\": 50, " SHAPE, "attn_logit_softcapping");
    refuse("\"architectures\": [\"Gemma3ForCausalLM\"], \"query_pre_attn_scalar\": 0, " SHAPE, "query_pre_attn_scalar");
    take(LLAMA);
    assert_true(cfg.n_specs == 1 && cfg.n_ropes == 1 && cfg.embed_scale == 1 && cfg.logit_scale == 1);
}

TEST(a_nested_decoder_is_read_and_the_top_decides)
{
    take("\"architectures\": [\"Mistral3ForConditionalGeneration\"], \"tie_word_embeddings\": false, \"image_token_index\": 10, "
         "\"vision_config\": {}, \"eos_token_id\": 7, \"dtype\": \"bfloat16\", "
         "\"text_config\": {\"model_type\": \"mistral\", \"num_key_value_heads\": 2, \"tie_word_embeddings\": true, " SHAPE "}");
    assert_string_equal(cfg.family->model_type, "mistral");
    assert_string_equal(cfg.names->in_files, "language_model.model.");
    assert_string_equal(cfg.torch_dtype, "bfloat16");
    assert_true(!cfg.tied && cfg.n_input_tokens == 1 && cfg.input_token[0] == 10 && cfg.eos[0] == 7);
    take("\"model_type\": \"qwen3_vl\", \"text_config\": {\"model_type\": \"qwen3_vl_text\", \"num_key_value_heads\": 2, "
         "\"rope_scaling\": {\"rope_type\": \"default\", \"mrope_section\": [24, 20, 20]}, " SHAPE "}");
    assert_true(cfg.rope[0].type == MT_ROPE_DEFAULT && cfg.rope[0].theta == 500000 && !cfg.tied);
    refuse("\"model_type\": \"mistral3\", \"text_config\": {\"model_type\": \"qwen3\", " SHAPE "}", "text_config");
    static const char *const kimi[] = {"Kimi_K25ForConditionalGeneration\"], \"text_config\": {\"model_type\": \"deepseek_v3\", ",
                                       "KimiK25ForConditionalGeneration\"], \"text_config\": {\"model_type\": \"kimi_k2\", "};
    for (size_t i = 0; i < 2; i++) { /* as transformers has it, and as released */
        char text[1024];
        snprintf(text, sizeof(text), "\"architectures\": [\"%s%s}, \"tie_word_embeddings\": false, "
                 "\"media_placeholder_token_id\": 9", kimi[i], SHAPE);
        take(text);
        assert_string_equal(cfg.family->model_type, "deepseek_v3");
        assert_string_equal(cfg.names->head_in_files, "language_model.lm_head.");
        assert_true(!cfg.tied && cfg.n_input_tokens == 1 && cfg.input_token[0] == 9);
    }
    take("\"model_type\": \"gemma3\", \"text_config\": {\"model_type\": \"gemma3_text\", \"hidden_size\": 2560, \"intermediate_size\": 10240, "
         "\"num_hidden_layers\": 34, \"rope_scaling\": {\"factor\": 8.0, \"rope_type\": \"linear\"}, \"sliding_window\": 1024}"); /* 4B */
    assert_true(layer(0)->n_heads == 8 && layer(0)->n_kv_heads == 4 && layer(0)->head_dim == 256 && cfg.vocab == 262208);
    refuse("\"model_type\": \"gemma3\", \"text_config\": {\"model_type\": \"gemma3_text\", "
           "\"final_logit_softcapping\": 30, " SHAPE "}", "final_logit_softcapping");
    refuse(LLAMA ", \"text_config\": {}", "text_config");
    take(LLAMA);
    assert_true(!cfg.nested && !strcmp(cfg.names->in_files, "model."));
}

#define GEMMA4 "\"model_type\": \"gemma4_text\", \"num_key_value_heads\": 2, \"head_dim\": 16, \"sliding_window\": 5, "             \
               "\"hidden_size_per_layer_input\": 0, \"rope_parameters\": {\"full_attention\": {\"rope_type\": "                 \
               "\"proportional\", \"partial_rotary_factor\": 0.25, \"rope_theta\": 1e6}, \"sliding_attention\": "               \
               "{\"rope_type\": \"default\", \"rope_theta\": 1e4}}, "

TEST(layers_without_a_window_have_other_heads)
{
    take(GEMMA4 "\"attention_k_eq_v\": true, \"num_global_key_value_heads\": 1, \"global_head_dim\": 24, " SHAPE);
    assert_true(layer(0)->window == 5 && layer(0)->head_dim == 16 && layer(0)->n_kv_heads == 2 && !layer(0)->v_is_k);
    assert_true(layer(3)->window == 0 && layer(3)->head_dim == 24 && layer(3)->n_kv_heads == 1 && layer(3)->v_is_k);
    assert_true(layer(3)->v_norm && layer(0)->score_scale == 1 && layer(3)->score_scale == 1 && layer(0)->scalar_name);
    assert_true(cfg.rope[0].dims == 24 && cfg.rope[0].type == MT_ROPE_PROPORTIONAL && cfg.rope[1].dims == 16);
    assert_true(layer(3)->rope == 0 && layer(0)->rope == 1 && cfg.tied && !cfg.moe.n_experts);
    take(GEMMA4 "\"num_global_key_value_heads\": 1, " SHAPE); /* which counts with attention_k_eq_v alone */
    assert_true(layer(3)->head_dim == 512 && layer(3)->n_kv_heads == 2 && !layer(3)->v_is_k);
    take(GEMMA4 "\"attention_k_eq_v\": true, \"per_layer_config\": {\"3\": {\"head_dim\": 32, \"num_key_value_heads\": 4}}, "
         SHAPE); /* as newer versions write it */
    assert_true(layer(3)->head_dim == 32 && layer(3)->n_kv_heads == 4 && layer(2)->head_dim == 16);
    take(GEMMA4 "\"layer_types\": [\"full_attention\", \"sliding_attention\", \"sliding_attention\", \"sliding_attention\"], "
         SHAPE); /* the last is full whatever they say */
    assert_true(!layer(0)->window && layer(2)->window == 5 && !layer(3)->window);
    refuse(GEMMA4 "\"per_layer_config\": {\"3\": {\"head_dim\": 32}, \"1\": {\"head_dim\": 24}}, " SHAPE, "per_layer_config");
    refuse(GEMMA4 "\"num_kv_shared_layers\": 2, " SHAPE, "num_kv_shared_layers");
    refuse("\"model_type\": \"gemma4_text\", " SHAPE, "hidden_size_per_layer_input");
    take("\"model_type\": \"gemma4\", \"text_config\": {" GEMMA4 "\"final_logit_softcapping\": 30, " SHAPE "}");
    assert_true(cfg.logit_cap == 30 && cfg.tied && !strcmp(cfg.names->in_files, "model.language_model."));
    take(GEMMA4 "\"enable_moe_block\": true, \"num_experts\": 8, \"top_k_experts\": 2, \"moe_intermediate_size\": 16, " SHAPE);
    assert_true(layer(0)->is_mixture && cfg.moe.top_k == 2 && cfg.moe.beside && cfg.moe.router_norm);
}

TEST(gates_may_have_a_tensor_of_their_own)
{
    take("\"model_type\": \"muse_glimmer\", \"text_config\": {\"model_type\": \"muse_glimmer_text\", \"qk_scale_factor\": 2, "
         "\"head_dim\": 16, \"output_multiplier\": 0.5, " SHAPE "}");
    assert_true(layer(0)->gate && layer(0)->gate_name && layer(0)->score_scale == 0.5 && cfg.logit_scale == 0.5);
    assert_true(cfg.logit_cap == 20 && layer(0)->qk_norm == MT_QK_NORM_BARE && !cfg.tied && cfg.embed_scale == 1);
    assert_true(layer(0)->norm.eps == 1e-5 && layer(0)->after_eps == 1e-8 && layer(0)->norm.plus_one && !cfg.norm.plus_one);
    assert_true(!layer(3)->window && layer(3)->rope == MT_NO_ROPE && layer(2)->window == 2048 && layer(2)->rope == 0);
    assert_string_equal(layer(0)->parts[0], "embed_norm");
    assert_string_equal(layer(1)->parts[0], "attention");
    take("\"model_type\": \"muse_glimmer_text\", \"layer_rope_theta\": [0, 1e4, 1e4, 1e4], " SHAPE);
    assert_true(layer(0)->rope == MT_NO_ROPE && layer(3)->rope == 0);
    refuse("\"model_type\": \"muse_glimmer_text\", \"attention_bias\": true, " SHAPE, "attention_bias");
    take("\"model_type\": \"afmoe\", \"mup_enabled\": true, \"num_dense_layers\": 2, \"route_scale\": 2.5, "
         "\"global_attn_every_n_layers\": 2, " SHAPE);
    assert_true(cfg.moe.normed && cfg.moe.scale == 2.5 && cfg.moe.select_bias && !layer(1)->is_mixture && layer(2)->is_mixture);
    assert_true(cfg.embed_scale == 8 && layer(0)->window && !layer(1)->window && layer(1)->rope == MT_NO_ROPE);
    assert_string_equal(layer(2)->norms.mlp.after, "post_mlp_layernorm.weight");
    take("\"model_type\": \"afmoe\", " SHAPE);
    assert_true(cfg.embed_scale == 1 && cfg.moe.shared_width == 2816);
}

TEST(layers_with_a_window_may_have_more_keys)
{
    take("\"model_type\": \"mimo_v2_flash\", \"num_key_value_heads\": 1, \"head_dim\": 24, \"v_head_dim\": 16, "
         "\"routed_scaling_factor\": null, \"sliding_window_size\": 128, " SHAPE);
    assert_true(!layer(0)->window && layer(1)->window == 129 && !layer(0)->sinks && layer(1)->sinks);
    assert_true(layer(0)->n_kv_heads == 1 && layer(1)->n_kv_heads == 2 && layer(1)->v_dim == 16 && layer(1)->o_scale == 0.707);
    assert_true(layer(0)->rope == 0 && layer(1)->rope == 1 && cfg.rope[0].theta == 5e6 && cfg.rope[1].theta == 1e4);
    assert_true(cfg.rope[0].dims == 8 && !layer(0)->is_mixture && layer(1)->is_mixture && cfg.moe.scale == 1);
    refuse("\"model_type\": \"mimo_v2_flash\", \"num_key_value_heads\": 2, \"head_dim\": 16, " SHAPE, "odd number");
    take("\"model_type\": \"mimo_v2_flash\", \"num_key_value_heads\": 2, \"attention_value_scale\": null, " SHAPE);
    assert_true(layer(0)->o_scale == 1 && layer(1)->window == 129 && layer(0)->v_dim == 128);
    refuse("\"model_type\": \"mimo_v2_flash\", \"num_key_value_heads\": 2, \"v_head_dim\": 12, " SHAPE, "v_head_dim");
    refuse("\"model_type\": \"mimo_v2_flash\", \"num_key_value_heads\": 4, " SHAPE, "layers with a window");
    take(LLAMA);
    assert_true(layer(0)->v_dim == layer(0)->head_dim && layer(0)->o_scale == 1);
}

/* Each with a reason and what to do instead, which is another name than its own. */
TEST(families_that_people_try_are_refused_with_a_reason)
{
    static const char *const name[][3] = {
        {"DeepseekV4ForCausalLM", "deepseek_v4", "hyper-connections; train DeepSeek V3.1"},
        {"Glm5NextForConditionalGeneration", "glm5_next", "train GLM-5"},
        {"Qwen4ExpForConditionalGeneration", "qwen4_exp", "train Qwen3.5"},
        {"HYV4ForCausalLM", "hy_v4", "n-grams; train Hunyuan"},
        {"InklingForConditionalGeneration", "inkling_text", "relative position"},
        {"Inkling2ForCausalLM", "inkling2_text", "learned residuals"},
        {"MistralLarge4ForConditionalGeneration", "mistral_large4", "between layers"},
        {"MistralLarge3ForCausalLM", "mistral_large3", "without a config.json"},
        {"MuseSparkForConditionalGeneration", "muse_spark", "train Muse Glimmer"},
        {"KimiK3ForConditionalGeneration", "kimi_k3", "it has no class in transformers, so that"},
        {"BailingMoeV2ForCausalLM", "bailing_moe_v2", "it has no class in transformers, so that"},
        {"MiniMaxM3SparseForConditionalGeneration", "minimax_m3_vl", "train MiniMax-M2"},
        {"Gemma3nForConditionalGeneration", "gemma3n", "AltUp"},
        {"JambaForCausalLM", "jamba", "first kind"},
        {"LongcatFlashForCausalLM", "longcat_flash", "two attentions"},
        {"BitNetForCausalLM", "bitnet", "ternary"},
        {"Llama4ForConditionalGeneration", "llama4", "chunks"},
        {"Lfm2MoeForCausalLM", "lfm2_moe", "short convolutions"},
        {"FalconH1ForCausalLM", "falcon_h1", "beside attention in each layer, and factors of both; train Granite 4.0 H"},
        {"KimiLinearForCausalLM", "kimi_linear", "by channel"},
        {"OlmoHybridForCausalLM", "olmo_hybrid", "train OLMo 3"},
    };
    for (size_t i = 0; i < MT_ARRAY_LEN(name); i++) {
        char text[256];
        snprintf(text, sizeof(text), "\"architectures\": [\"%s\"], \"model_type\": \"%s\"", name[i][0], name[i][1]);
        refuse(text, name[i][2]);
        refuse(text, name[i][0]);
        refuse(text, "; train ");
        snprintf(text, sizeof(text), "\"model_type\": \"%s\"", name[i][1]);
        refuse(text, name[i][2]);
    }
    refuse("\"architectures\": [\"NobodyForCausalLM\"]", "megatrain help models");
    take("\"architectures\": [\"Exaone4ForCausalLM\"], \"sliding_window\": 5, \"sliding_window_pattern\": \"LLLG\", "
         "\"num_key_value_heads\": 2, \"layer_types\": [\"sliding_attention\", \"sliding_attention\", \"full_attention\", "
         "\"full_attention\"], " SHAPE);
    assert_true(layer(1)->window == 5 && !layer(2)->window);
    take("\"model_type\": \"exaone_moe\", \"num_key_value_heads\": 2, \"sliding_window\": 128, " SHAPE);
    assert_true(!layer(0)->is_mixture && layer(1)->is_mixture && layer(0)->window == 128 && layer(3)->rope == MT_NO_ROPE);
}

TEST(queries_may_have_a_table_of_their_own)
{
#define MINISTRAL3(beta)                                                                                                               \
    "\"model_type\": \"ministral3\", \"num_key_value_heads\": 2, \"rope_parameters\": {\"rope_type\": \"yarn\", \"factor\": 16, "         \
    "\"rope_theta\": 1e6, \"mscale\": 1, \"mscale_all_dim\": 1, \"original_max_position_embeddings\": 16384" beta "}, " SHAPE
    take(MINISTRAL3(", \"llama_4_scaling_beta\": 0.1"));
    assert_true(cfg.n_ropes == 2 && layer(0)->rope == 0 && layer(0)->q_rope == 1 && layer(3)->q_rope == 1);
    assert_true(cfg.rope[0].growth == 0 && cfg.rope[1].growth == 0.1 && cfg.rope[1].original_max_pos == 16384);
    refuse(MINISTRAL3(""), "llama_4_scaling_beta");
    refuse("\"model_type\": \"ministral3\", \"num_key_value_heads\": 2, " SHAPE, "rope_scaling");
    take("\"model_type\": \"mistral3\", \"text_config\": {" MINISTRAL3(", \"llama_4_scaling_beta\": 0.1") "}");
    assert_string_equal(cfg.family->model_type, "ministral3");
#define MISTRAL4(more)                                                                                                                 \
    "\"model_type\": \"mistral4\", \"qk_nope_head_dim\": 48, \"qk_rope_head_dim\": 16, \"rope_parameters\": {\"rope_type\": "         \
    "\"yarn\", \"factor\": 128, \"mscale\": 1, \"mscale_all_dim\": 1, \"original_max_position_embeddings\": 8192, "                   \
    "\"llama_4_scaling_beta\": 0.1" more "}, " SHAPE
    take(MISTRAL4(", \"partial_rotary_factor\": 0.25")); /* of whole heads, all of which grow */
    assert_true(cfg.n_ropes == 2 && layer(0)->rope == 0 && layer(0)->q_rope == 1 && cfg.rope[0].dims == 16);
    assert_true(cfg.rope[1].dims == 64 && cfg.rope[1].still == 48 && cfg.rope[1].growth == 0.1 && !cfg.rope[0].still);
    assert_true(layer(0)->is_mixture && cfg.moe.renorm_eps == 1e-20 && cfg.moe.n_experts == 128);
    take(MISTRAL4(""));
    refuse(MISTRAL4(", \"partial_rotary_factor\": 0.5"), "partial_rotary_factor");
    take("\"model_type\": \"mistral3\", \"text_config\": {" MISTRAL4("") "}");
    assert_string_equal(cfg.family->model_type, "mistral4");
    take("\"model_type\": \"qwen3\", \"num_key_value_heads\": 2, " SHAPE);
    assert_true(layer(0)->rope == 0 && layer(0)->q_rope == 0);
}

TEST(windows_and_rotations_by_rule)
{
    take("\"architectures\": [\"SmolLM3ForCausalLM\"], \"num_key_value_heads\": 2, \"no_rope_layers\": [1, 0, 1, 0], "
         "\"pretraining_tp\": 2, " SHAPE); /* of which transformers reads nothing */
    assert_true(layer(0)->rope == 0 && layer(1)->rope == MT_NO_ROPE && layer(2)->rope == 0 && cfg.n_specs == 2);
    take("\"architectures\": [\"SmolLM3ForCausalLM\"], \"num_key_value_heads\": 2, " SHAPE);
    assert_true(layer(2)->rope == 0 && layer(3)->rope == MT_NO_ROPE);
    refuse("\"architectures\": [\"SmolLM3ForCausalLM\"], \"num_key_value_heads\": 2, \"no_rope_layers\": [1], " SHAPE,
           "no_rope_layers");
    refuse("\"model_type\": \"smollm3\", \"use_sliding_window\": true, \"sliding_window\": 5, " SHAPE, "use_sliding_window");
    take("\"architectures\": [\"Exaone4ForCausalLM\"], \"num_key_value_heads\": 2, \"sliding_window\": 5, " SHAPE);
    assert_true(layer(2)->rope == 0 && layer(2)->window == 5 && layer(3)->rope == MT_NO_ROPE && !layer(3)->window);
    take("\"architectures\": [\"Exaone4ForCausalLM\"], \"num_key_value_heads\": 2, \"sliding_window\": null, " SHAPE);
    assert_true(layer(0)->rope == 0 && layer(3)->rope == 0 && !layer(0)->window);
    take("\"model_type\": \"exaone4\", \"num_key_value_heads\": 2, \"sliding_window\": 5, \"sliding_window_pattern\": 1, " SHAPE);
    assert_true(layer(0)->rope == MT_NO_ROPE && !layer(0)->window); /* no layer has a window, though there is one */
    take("\"architectures\": [\"GraniteForCausalLM\"], \"residual_multiplier\": 0.22, \"logits_scaling\": 8, "
         "\"embedding_multiplier\": 12, \"attention_multiplier\": 0.015625, " SHAPE);
    assert_true(layer(0)->residual == 0.22 && cfg.logit_scale == 0.125 && cfg.embed_scale == 12);
    assert_true(layer(0)->score_scale == 0.015625);
}

TEST(a_class_of_two_mixers_takes_models_with_and_without_experts)
{
#define HYBRID(keys) "\"model_type\": \"granitemoehybrid\", \"shared_intermediate_size\": 40, \"residual_multiplier\": 0.22, " keys SHAPE
#define OF_ATTENTION "\"layer_types\": [\"attention\", \"full_attention\", \"attention\", \"attention\"], "
    take(HYBRID(OF_ATTENTION "\"num_local_experts\": 0, \"position_embedding_type\": \"rope\", "));
    assert_true(layer(0)->ffn == 40 && layer(0)->residual == 0.22 && layer(0)->rope == 0 && cfg.n_specs == 1);
    take(HYBRID(OF_ATTENTION "\"num_local_experts\": 0, \"position_embedding_type\": \"nope\", "));
    assert_true(layer(0)->rope == MT_NO_ROPE && layer(3)->rope == MT_NO_ROPE);
    take(HYBRID("\"num_local_experts\": 0, \"layers_block_type\": [\"attention\", \"attention\", \"attention\", "
                "\"attention\"], \"position_embedding_type\": null, "));
    assert_true(layer(0)->rope == MT_NO_ROPE);
    refuse(HYBRID(OF_ATTENTION "\"num_local_experts\": 0, \"position_embedding_type\": \"alibi\", "),
           "position_embedding_type");
    assert_int_equal(cfg.moe.n_experts, 0);
    take(HYBRID(OF_ATTENTION)); /* 8 experts of intermediate_size in the class */
    assert_true(cfg.moe.n_experts == 8 && cfg.moe.width == 176 && cfg.moe.shared_width == 40 && cfg.moe.scale == 0.22);
    refuse(HYBRID("\"num_local_experts\": 0, \"layer_types\": [\"attention\"], "), "does not name every layer");
    refuse(HYBRID("\"num_local_experts\": 0, \"layer_types\": [\"attention\", \"mlp\", \"mamba\", \"attention\"], "),
           "not supported");
    refuse("\"model_type\": \"granitemoehybrid\", \"num_local_experts\": 0, " OF_ATTENTION SHAPE, "shared_intermediate_size");
    refuse("\"model_type\": \"granite\", \"num_local_experts\": 0, " SHAPE, "num_local_experts");
}

TEST(stop_tokens_are_a_set_of_both_files)
{
    char dir[64] = "/tmp/mt-hf-XXXXXX", path[128];
    const char *config = "{" LLAMA ", \"eos_token_id\": [5, 6, 5], \"bos_token_id\": 1, \"torch_dtype\": \"float16\"}";
    const char *generation = "{\"eos_token_id\": [6, 9, 1e300, -1e300, \"x\"]}";
    struct mt_err err = {0};
    assert_non_null(mkdtemp(dir));
    snprintf(path, sizeof(path), "%s/config.json", dir);
    assert_int_equal(mt_hf_config_read(&cfg, dir, &err), -ENOENT);
    assert_int_equal(err.kind, MT_ERR_INPUT);
    assert_int_equal(mt_write_file(path, config, strlen(config), NULL), 0);
    snprintf(path, sizeof(path), "%s/generation_config.json", dir);
    assert_int_equal(mt_write_file(path, generation, strlen(generation), NULL), 0);
    assert_int_equal(mt_hf_config_read(&cfg, dir, &err), 0);
    assert_int_equal(cfg.n_eos, 3);
    assert_true(cfg.eos[0] == 5 && cfg.eos[1] == 6 && cfg.eos[2] == 9);
    assert_true(cfg.bos == 1 && cfg.pad == -1);
    assert_string_equal(cfg.torch_dtype, "float16");
    mt_remove_tree(dir, NULL);
    take(LLAMA ", \"eos_token_id\": [0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17], \"dtype\": \"bfloat16\"");
    assert_int_equal(cfg.n_eos, MT_MAX_EOS);
    assert_string_equal(cfg.torch_dtype, "bfloat16");
}

TEST(mixtures_have_their_families_rules)
{
    take(LLAMA);
    assert_true(!cfg.moe.n_experts && !layer(0)->is_mixture);
    take(MIXTURE("Qwen3MoeForCausalLM"));
    assert_true(cfg.moe.n_experts == 128 && cfg.moe.top_k == 8 && cfg.moe.width == 768 && !cfg.moe.shared_width);
    assert_true(cfg.moe.score == MT_MOE_SOFTMAX && cfg.moe.renorm == MT_MOE_NO_RENORM && cfg.moe.weights_rounded);
    assert_true(layer(0)->qk_norm == MT_QK_NORM_HEADS && layer(0)->head_dim == 16 && cfg.max_pos == 32768 && cfg.moe.scale == 1);
    take(MIXTURE("Qwen3MoeForCausalLM") ", \"norm_topk_prob\": true, \"output_router_logits\": true, "
         "\"router_aux_loss_coef\": 0.9");
    assert_true(cfg.moe.renorm == MT_MOE_RENORM_SUM && cfg.moe.renorm_eps == 0);
    take(MIXTURE("Qwen3MoeForCausalLM") ", \"num_local_experts\": 16"); /* as newer versions write it */
    assert_int_equal(cfg.moe.n_experts, 16);
    take(MIXTURE("Qwen2MoeForCausalLM"));
    assert_true(cfg.moe.n_experts == 60 && cfg.moe.shared_width == 5632 && cfg.moe.shared_gate && layer(0)->qkv_bias && !layer(0)->o_bias);
    assert_true(cfg.moe.renorm == MT_MOE_NO_RENORM);
    take(MIXTURE("Qwen2MoeForCausalLM") ", \"qkv_bias\": false");
    assert_false(layer(0)->qkv_bias);
    take(MIXTURE("MixtralForCausalLM") ", \"norm_topk_prob\": false"); /* not a key of its class */
    assert_true(cfg.moe.renorm == MT_MOE_RENORM_SUM && !cfg.moe.weights_rounded && cfg.moe.width == 176);
    assert_true(layer(0)->norm.eps == 1e-5 && cfg.rope[0].theta == 1e6 && cfg.max_pos == 131072 && layer(0)->window == 0);
    take(MIXTURE("OlmoeForCausalLM") ", \"clip_qkv\": null");
    assert_true(cfg.moe.n_experts == 64 && cfg.moe.width == 176 && layer(0)->qk_norm == MT_QK_NORM_PROJECTION);
    refuse(MIXTURE("OlmoeForCausalLM") ", \"clip_qkv\": 8.0", "clip_qkv");
    refuse(MIXTURE("MixtralForCausalLM") ", \"router_jitter_noise\": 0.1", "router_jitter_noise");
    take(MIXTURE("Glm4MoeForCausalLM") ", \"scoring_func\": \"sigmoid\"");
    take(MIXTURE("Glm4MoeForCausalLM") ", \"scoring_func\": \"noaux_tc\"");
    refuse(MIXTURE("Glm4MoeForCausalLM") ", \"scoring_func\": \"softmax\"", "scoring_func");
    refuse(MIXTURE("MixtralForCausalLM") ", \"scoring_func\": \"sigmoid\"", "scoring_func");
    refuse(MIXTURE("MixtralForCausalLM") ", \"num_experts_per_tok\": 9", "num_experts_per_tok");
    refuse(MIXTURE("MixtralForCausalLM") ", \"num_local_experts\": 1025", "num_local_experts");
    refuse(MIXTURE("MixtralForCausalLM") ", \"num_local_experts\": 0", "num_local_experts");
    refuse(MIXTURE("Qwen3MoeForCausalLM") ", \"moe_intermediate_size\": 12", "moe_intermediate_size");
}

TEST(routers_by_sigmoid_have_groups_scale_and_bias)
{
    take(MIXTURE("Glm4MoeForCausalLM"));
    assert_true(cfg.moe.n_experts == 128 && cfg.moe.shared_width == 1408 && cfg.moe.select_bias && cfg.moe.router_f32);
    assert_true(cfg.moe.score == MT_MOE_SIGMOID && cfg.moe.renorm == MT_MOE_RENORM_SUM && cfg.moe.renorm_eps == 1e-20);
    assert_true(cfg.moe.scale == 1 && cfg.moe.n_group == 1 && cfg.moe.topk_group == 1 && !layer(0)->qk_norm && !layer(0)->qkv_bias);
    assert_true(!layer(0)->is_mixture && layer(1)->is_mixture && cfg.rope[0].dims == 8 && layer(0)->head_dim == 16);
    take(MIXTURE("Glm4MoeForCausalLM") ", \"use_qk_norm\": true, \"attention_bias\": true, \"n_group\": 8, "
         "\"topk_group\": 4, \"routed_scaling_factor\": 2.5, \"norm_topk_prob\": false, \"first_k_dense_replace\": 3, "
         "\"num_nextn_predict_layers\": 1, \"partial_rotary_factor\": 0.25, \"n_shared_experts\": 2");
    assert_true(layer(0)->qk_norm == MT_QK_NORM_HEADS && layer(0)->qkv_bias && !layer(0)->o_bias && cfg.moe.n_group == 8);
    assert_true(cfg.moe.topk_group == 4 && cfg.moe.scale == 2.5 && cfg.moe.renorm == MT_MOE_NO_RENORM);
    assert_true(!layer(2)->is_mixture && layer(3)->is_mixture && cfg.rope[0].dims == 4 && cfg.moe.shared_width == 2816);
    refuse(MIXTURE("Glm4MoeForCausalLM") ", \"n_group\": 7", "n_group");
    refuse(MIXTURE("Glm4MoeForCausalLM") ", \"n_group\": 8, \"topk_group\": 9", "topk_group");
    refuse(MIXTURE("Glm4MoeForCausalLM") ", \"n_group\": 64", "topk_group"); /* two experts to choose eight from */
    refuse(MIXTURE("Glm4MoeForCausalLM") ", \"n_group\": 128", "n_group");
    refuse(MIXTURE("Glm4MoeForCausalLM") ", \"partial_rotary_factor\": 0", "partial_rotary_factor");
    refuse(MIXTURE("Glm4MoeForCausalLM") ", \"quantization_config\": {\"quant_method\": \"fp8\", \"weight_block_size\": [64, 128]}", "fp8");
    take(MIXTURE("MiniMaxM2ForCausalLM") ", \"rotary_dim\": 64, \"auto_map\": {\"AutoConfig\": \"c.C\"}");
    assert_true(layer(0)->head_dim == 128 && cfg.rope[0].dims == 64 && layer(0)->qk_norm == MT_QK_NORM_PROJECTION);
    assert_true(cfg.moe.width == 176 && cfg.moe.renorm_eps == 0 && !cfg.moe.router_f32 && layer(0)->is_mixture);
    refuse(MIXTURE("Dots1ForCausalLM") ", \"num_experts_per_tok\": 6", "num_experts");
    refuse(MIXTURE("Dots1ForCausalLM") ", \"n_routed_experts\": 8", "num_experts_per_tok");
    take(MIXTURE("Dots1ForCausalLM") ", \"num_experts_per_tok\": 6, \"n_routed_experts\": 8, \"n_group\": null");
    assert_true(!cfg.moe.shared_width && cfg.moe.renorm == MT_MOE_NO_RENORM && layer(0)->is_mixture && layer(3)->window == 0);
    take("\"architectures\": [\"Dots1ForCausalLM\"], \"num_experts_per_tok\": 2, \"n_routed_experts\": 8, "
         "\"hidden_size\": 64, \"intermediate_size\": 64, \"num_hidden_layers\": 64, \"num_attention_heads\": 32, "
         "\"vocab_size\": 96, \"head_dim\": 8");
    assert_true(layer(61)->window == 0 && layer(62)->window == 4096); /* from layer 62 on */
    refuse(MIXTURE("SolarOpenForCausalLM") ", \"partial_rotary_factor\": 0.5", "partial_rotary_factor");
    take(MIXTURE("SolarOpenForCausalLM") ", \"partial_rotary_factor\": 1.0");
    take(MIXTURE("HYV3ForCausalLM"));
    assert_true(!layer(0)->is_mixture && layer(1)->is_mixture && cfg.moe.scale == 2.826 && cfg.rope[0].theta == 11158840);
    take(MIXTURE("HYV3ForCausalLM") ", \"mlp_layer_types\": [\"sparse\", \"dense\", \"dense\", \"sparse\"]");
    assert_true(layer(0)->is_mixture && !layer(1)->is_mixture && !layer(2)->is_mixture && layer(3)->is_mixture);
    refuse(MIXTURE("HYV3ForCausalLM") ", \"mlp_layer_types\": [\"sparse\", \"dense\"]", "mlp_layer_types");
    refuse(MIXTURE("HYV3ForCausalLM") ", \"mlp_layer_types\": [\"sparse\", \"dense\", \"x\", \"dense\"]", "mlp_layer_types");
    refuse(MIXTURE("HYV3ForCausalLM") ", \"mlp_bias\": true", "mlp_bias");
}

TEST(other_mixtures_have_their_own_keys)
{
#define YARN ", \"rope_scaling\": {\"rope_type\": \"yarn\", \"factor\": 32.0, \"truncate\": false}"
    take(MIXTURE("GptOssForCausalLM") YARN);
    assert_true(cfg.moe.n_experts == 128 && cfg.moe.top_k == 4 && cfg.moe.score == MT_MOE_CHOSEN_SOFTMAX);
    assert_true(cfg.moe.clamped && cfg.moe.alpha == 1.702 && cfg.moe.limit == 7 && cfg.moe.expert_bias && cfg.moe.router_bias);
    assert_true(layer(0)->sinks && layer(0)->norm.round_once && layer(0)->qkv_bias && layer(0)->o_bias && layer(0)->head_dim == 64 && !cfg.rope[0].truncate);
    assert_true(layer(0)->window == 128 && !layer(1)->window && layer(2)->window == 128);
    take(MIXTURE("GptOssForCausalLM") YARN ", \"swiglu_limit\": 5, \"attention_bias\": false");
    assert_true(cfg.moe.limit == 5 && !layer(0)->qkv_bias);
    refuse(MIXTURE("GptOssForCausalLM"), "rope_scaling"); /* its class has a default of its own */
    assert_true(cfg.packed == MT_PACKED_NONE);
    take(MIXTURE("GptOssForCausalLM") YARN ", \"quantization_config\": {\"quant_method\": \"mxfp4\"}");
    assert_true(cfg.packed == MT_PACKED_MXFP4);
    take(MIXTURE("GraniteMoeForCausalLM") ", \"residual_multiplier\": 0.25");
    assert_true(cfg.moe.n_experts == 8 && cfg.moe.top_k == 2 && cfg.moe.width == 176 && cfg.moe.score == MT_MOE_CHOSEN_SOFTMAX);
    assert_true(cfg.moe.scale == 0.25 && cfg.moe.scale_is_residual && layer(0)->residual == 0.25 && layer(3)->is_mixture);
    refuse(MIXTURE("GraniteMoeForCausalLM") ", \"num_local_experts\": 0", "num_local_experts");
    take(MIXTURE("Ernie4_5_MoeForCausalLM"));
    assert_true(cfg.tied && cfg.moe.n_experts == 64 && cfg.moe.top_k == 6 && cfg.moe.shared_width == 3072);
    assert_true(cfg.moe.renorm == MT_MOE_RENORM_MOST && cfg.moe.renorm_eps == 1e-12 && cfg.moe.select_bias);
    assert_true(!layer(0)->is_mixture && layer(1)->is_mixture && layer(3)->is_mixture);
    take(MIXTURE("Ernie4_5_MoeForCausalLM") ", \"moe_layer_interval\": 2, \"moe_layer_start_index\": 0, "
         "\"moe_layer_end_index\": 2, \"moe_norm_min\": 1e-9, \"moe_num_shared_experts\": 0, \"moe_k\": 3");
    assert_true(!layer(0)->is_mixture && layer(1)->is_mixture && !layer(3)->is_mixture && cfg.moe.renorm_eps == 1e-9 && !cfg.moe.shared_width);
    assert_int_equal(cfg.moe.top_k, 3);
    refuse(MIXTURE("Ernie4_5_MoeForCausalLM") ", \"use_bias\": true", "use_bias");
    take(MIXTURE("HunYuanMoEV1ForCausalLM") ", \"num_experts\": [8, 8], \"moe_topk\": [3, 3], \"rope_scaling\": "
         "{\"type\": \"dynamic\", \"alpha\": 1000.0, \"factor\": 1.0}");
    assert_true(cfg.moe.n_experts == 8 && cfg.moe.top_k == 3 && cfg.moe.shared_width == 176 && cfg.moe.router_f32);
    assert_true(layer(0)->qk_norm == MT_QK_NORM_AFTER_ROPE && cfg.rope[0].type == MT_ROPE_DEFAULT);
    assert_true(cfg.rope[0].theta > 1e4 * 2682 && cfg.rope[0].theta < 1e4 * 2683); /* 1000 to the power 16 / 14 */
    refuse(MIXTURE("HunYuanMoEV1ForCausalLM") ", \"num_experts\": [8, 4]", "num_experts");
    refuse(MIXTURE("HunYuanMoEV1ForCausalLM") ", \"num_experts\": []", "num_experts");
    refuse(MIXTURE("HunYuanMoEV1ForCausalLM") ", \"num_experts\": [\"a\"]", "num_experts");
    refuse(LLAMA ", \"rope_scaling\": {\"type\": \"dynamic\", \"alpha\": 1000.0}", "factor");
#define BOTH(older) LLAMA ", \"rope_scaling\": " older ", \"rope_parameters\": {\"rope_type\": \"linear\", \"factor\": 2}"
    take(BOTH("{\"type\": \"linear\", \"factor\": 4}")); /* a file with both: the older name wins */
    assert_true(cfg.rope[0].factor == 4);
    take(BOTH("{}"));
    assert_true(cfg.rope[0].factor == 2);
}

/* DeepSeek's attention: latents instead of heads of keys and values; num_key_value_heads and head_dim are other classes'. */
TEST(latent_attention_is_read)
{
#define LATENTS ", \"q_lora_rank\": 32, \"kv_lora_rank\": 48, \"qk_nope_head_dim\": 24, \"qk_rope_head_dim\": 8, \"v_head_dim\": 16"
    take(MIXTURE("DeepseekV3ForCausalLM") LATENTS ", \"head_dim\": 64, \"rope_scaling\": {\"type\": \"yarn\", \"factor\": 40, "
         "\"mscale\": 1.0, \"mscale_all_dim\": 1.0, \"original_max_position_embeddings\": 4096}");
    assert_true(layer(0)->q_latent == 32 && layer(0)->kv_latent == 48 && layer(0)->head_dim == 32 && layer(0)->v_dim == 16);
    assert_true(layer(0)->n_kv_heads == 4 && cfg.rope[0].dims == 8 && !strcmp(layer(0)->parts[0], "mla"));
    double g = 0.1 * log(40) + 1; /* of scores, and not of the tables: there, one mscale cancels the other */
    assert_true(fabs(layer(0)->score_scale - g * g / sqrt(32)) < 1e-12);
    assert_true(cfg.moe.n_group == 8 && cfg.moe.topk_group == 4 && cfg.moe.scale == 2.5 && !layer(2)->is_mixture);
    take(MIXTURE("DeepseekV3ForCausalLM") ", \"q_lora_rank\": null");
    assert_true(!layer(0)->q_latent && layer(0)->kv_latent == 512 && layer(0)->v_dim == 128);
    assert_true(fabs(layer(0)->score_scale - 1 / sqrt(192)) < 1e-12);
    refuse(MIXTURE("DeepseekV3ForCausalLM") LATENTS ", \"rope_interleave\": false", "rope_interleave");
    refuse(MIXTURE("DeepseekV3ForCausalLM") ", \"q_lora_rank\": null, \"attention_bias\": true", "attention_bias");
    refuse(MIXTURE("DeepseekV3ForCausalLM") ", \"v_head_dim\": 12", "v_head_dim");
#define V2 MIXTURE("DeepseekV2ForCausalLM") ", \"num_experts_per_tok\": 2, \"moe_intermediate_size\": 16, \"n_group\": 8, \"topk_group\": 3"
    take(V2 ", \"topk_method\": \"greedy\"");
    assert_true(cfg.moe.n_group <= 1 && cfg.moe.renorm == MT_MOE_NO_RENORM && cfg.moe.score == MT_MOE_SOFTMAX);
    take(V2 ", \"topk_method\": \"group_limited_greedy\"");
    assert_true(cfg.moe.n_group == 8 && cfg.moe.topk_group == 3 && cfg.moe.group_score == MT_MOE_GROUP_MAX);
    refuse(V2 ", \"topk_method\": \"noaux_tc\"", "topk_method");
    refuse(V2 ", \"norm_topk_prob\": true", "norm_topk_prob");
    take(MIXTURE("Glm4MoeLiteForCausalLM") ", \"mlp_layer_types\": [\"dense\", \"sparse\", \"sparse\", \"sparse\"]");
    assert_true(layer(0)->q_latent == 768 && layer(0)->head_dim == 256 && layer(0)->v_dim == 256 && cfg.moe.scale == 1.8);
}

/* '1': a mixture, for each of the four layers */
static void check_sparse(const char *keys, const char *want)
{
    char text[1024];
    snprintf(text, sizeof(text), MIXTURE("Qwen3MoeForCausalLM") "%s", keys);
    take(text);
    for (int i = 0; i < 4; i++)
        assert_int_equal(layer(i)->is_mixture, want[i] == '1');
}

TEST(layers_are_mixtures_by_step_and_list)
{
    check_sparse("", "1111");
    check_sparse(", \"decoder_sparse_step\": 2", "0101");
    check_sparse(", \"decoder_sparse_step\": 3", "0010");
    check_sparse(", \"mlp_only_layers\": [0, 3, 7, -1]", "0110");
    check_sparse(", \"mlp_only_layers\": [1], \"decoder_sparse_step\": 2", "0001");
    check_sparse(", \"mlp_only_layers\": null, \"decoder_sparse_step\": null", "1111");
    refuse(MIXTURE("Qwen3MoeForCausalLM") ", \"mlp_only_layers\": 3", "mlp_only_layers");
    refuse(MIXTURE("Qwen3MoeForCausalLM") ", \"mlp_only_layers\": [\"a\"]", "mlp_only_layers");
    refuse(MIXTURE("Qwen3MoeForCausalLM") ", \"decoder_sparse_step\": 0", "decoder_sparse_step");
}

TEST(windows_of_mixtures_need_their_flag)
{
    take(MIXTURE("Qwen3MoeForCausalLM") ", \"sliding_window\": 9");
    assert_int_equal(layer(0)->window, 0);
    take(MIXTURE("Qwen3MoeForCausalLM") ", \"sliding_window\": 9, \"use_sliding_window\": true, \"max_window_layers\": 2");
    assert_true(layer(0)->window == 9 && layer(3)->window == 9);
    take(MIXTURE("Qwen2MoeForCausalLM") ", \"sliding_window\": 9, \"use_sliding_window\": true, \"max_window_layers\": 2");
    assert_true(layer(0)->window == 9 && !layer(1)->window && !layer(2)->window && !layer(3)->window);
#define TYPES(other) ", \"sliding_window\": 9, \"layer_types\": [\"sliding_attention\", \"sliding_attention\", " \
    "\"sliding_attention\", \"" other "_attention\"]"
    take(MIXTURE("MixtralForCausalLM") TYPES("sliding"));
    refuse(MIXTURE("MixtralForCausalLM") TYPES("full"), "layer_types"); /* its class has one window for all */
    refuse(MIXTURE("Qwen3MoeForCausalLM") TYPES("full") ", \"use_sliding_window\": true", "layer_types");
}

TEST(models_are_found_as_folders_and_in_the_hub_cache)
{
    char root[64] = "/tmp/mt-hub-XXXXXX", path[256], want[256], *dir = NULL;
    struct mt_err err = {0};
    assert_non_null(mkdtemp(root));
    assert_int_equal(mt_hf_find_model(&dir, root, &err), 0);
    assert_string_equal(dir, root);
    free(dir);
    setenv("HF_HUB_CACHE", root, 1);
    assert_int_equal(mt_hf_find_model(&dir, "org/name", &err), -ENOENT);
    assert_non_null(strstr(err.msg, "hf download org/name"));
    snprintf(want, sizeof(want), "%s/models--org--name/snapshots/abc123", root);
    assert_int_equal(mt_mkdir_p(want, NULL), 0);
    snprintf(path, sizeof(path), "%s/models--org--name/refs", root);
    assert_int_equal(mt_mkdir_p(path, NULL), 0);
    snprintf(path, sizeof(path), "%s/models--org--name/refs/main", root);
    assert_int_equal(mt_write_file(path, "abc123\n", 7, NULL), 0);
    assert_int_equal(mt_hf_find_model(&dir, "org/name", &err), 0);
    assert_string_equal(dir, want);
    free(dir);
    assert_int_equal(mt_write_file(path, "../../../etc", 12, NULL), 0); /* no path out of the cache */
    assert_int_equal(mt_hf_find_model(&dir, "org/name", &err), -ENOENT);
    assert_int_equal(mt_write_file(path, "..", 2, NULL), 0);
    assert_int_equal(mt_hf_find_model(&dir, "org/name", &err), -ENOENT);
    assert_int_equal(mt_write_file(path, "", 0, NULL), 0);
    assert_int_equal(mt_hf_find_model(&dir, "org/name", &err), -ENOENT);
    unsetenv("HF_HUB_CACHE");
    setenv("HF_HOME", root, 1);
    assert_int_equal(mt_hf_find_model(&dir, "org/name", &err), -ENOENT);
    unsetenv("HF_HOME");
    static const char *const no_hub[] = {"a", "/a/b", "a/b/c", "./a", "a/", ""};
    for (size_t i = 0; i < MT_ARRAY_LEN(no_hub); i++) {
        assert_int_equal(mt_hf_find_model(&dir, no_hub[i], &err), -ENOENT);
        assert_null(strstr(err.msg, "hf download"));
    }
    mt_remove_tree(root, NULL);
}
