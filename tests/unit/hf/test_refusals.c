/* SPDX-License-Identifier: Apache-2.0 */
/* What of a config.json is refused, and what the message names. */
#include "base/mem.h"
#include "test.h"
#include "texts.h"

TEST(what_is_not_built_is_refused_by_name)
{
    static const char *const keys[] = {
        "vision_config", "text_config", "audio_config", "num_experts", "num_local_experts", "n_routed_experts",
        "moe_num_experts", "clip_qkv",
        "final_logit_softcapping", "attn_logit_softcapping", "query_pre_attn_scalar",
        "num_nextn_predict_layers", "residual_multiplier", "embedding_multiplier", "logits_scaling",
        "attention_multiplier", "auto_map",
    };
    for (size_t i = 0; i < MT_ARRAY_LEN(keys); i++) {
        char text[512];
        snprintf(text, sizeof(text), LLAMA ", \"%s\": 4", keys[i]);
        refuse(text, keys[i]);
        snprintf(text, sizeof(text), LLAMA ", \"%s\": null", keys[i]);
        take(text);
    }
    refuse(LLAMA ", \"quantization_config\": {\"quant_method\": \"awq\"}", "awq");
    refuse(LLAMA ", \"quantization_config\": 3", "no quant_method");
#define QUANT(method, more) LLAMA ", \"quantization_config\": {\"quant_method\": \"" method "\"" more "}"
    refuse(QUANT("gptq", ""), "gptq");
    refuse(QUANT("compressed-tensors", ""), "compressed-tensors");
    refuse(QUANT("modelopt", ""), "modelopt");
    refuse(QUANT("fp8", ", \"weight_block_size\": [64, 128]"), "this weight_block_size");
    refuse(QUANT("fp8", ", \"weight_block_size\": [0, 0]"), "this weight_block_size");
    refuse(QUANT("fp8", ", \"weight_block_size\": [64]"), "this weight_block_size");
    take(QUANT("fp8", ", \"weight_block_size\": [64, 64]"));
    assert_true(cfg.packed == MT_PACKED_FP8_64 && !cfg.described_anew);
    take(QUANT("fp8", ", \"weight_block_size\": [1, 128]"));
    assert_true(cfg.packed == MT_PACKED_FP8_1X128 && cfg.described_anew);
#define FLOAT8(format, strategy)                                                                                       \
    QUANT("compressed-tensors", ", \"format\": \"" format "\", \"config_groups\": {\"g\": {\"weights\": {\"type\": "       \
                                "\"float\", \"num_bits\": 8, \"symmetric\": true, \"strategy\": " strategy "}}}")
    take(FLOAT8("float-quantized", "\"group\", \"group_size\": 64"));
    assert_true(cfg.packed == MT_PACKED_FP8_1X64);
    take(FLOAT8("mxfp8-quantized", "\"group\", \"group_size\": 32"));
    assert_true(cfg.packed == MT_PACKED_FP8_1X32);
    take(FLOAT8("float-quantized", "\"block\", \"block_structure\": [32, 32]"));
    assert_true(cfg.packed == MT_PACKED_FP8_32);
    refuse(FLOAT8("float-quantized", "\"group\", \"group_size\": 48"), "group");
    refuse(FLOAT8("float-quantized", "\"block\", \"block_structure\": [48, 48]"), "block");
    refuse(FLOAT8("float-quantized", "\"group\""), "group");
    take(QUANT("modelopt", ", \"quant_algo\": \"FP8_PB_WO\""));
    assert_true(cfg.packed == MT_PACKED_FP8);
    take(QUANT("modelopt", ", \"quant_algo\": \"MXFP8\""));
    assert_true(cfg.packed == MT_PACKED_FP8_1X32);
#define FP8(fmt) QUANT("fp8", ", \"weight_block_size\": [128, 128], \"fmt\": \"" fmt "\"")
    refuse(FP8("e5m2"), "e5m2");
    take(FP8("e4m3"));
    take(FP8("float8_e4m3fn"));
    assert_true(cfg.packed == MT_PACKED_FP8);
    take(QUANT("fp8", ", \"weight_block_size\": null, \"activation_scheme\": \"static\""));
    assert_true(cfg.packed == MT_PACKED_FP8T);
#define INT4(format, ignore, weights)                                                                               \
    QUANT("compressed-tensors", ", \"format\": \"" format "\", \"ignore\": [" ignore "], \"config_groups\": "      \
                                "{\"group_0\": {\"targets\": [\"Linear\"], \"input_activations\": null, "          \
                                "\"weights\": {\"type\": \"int\", \"num_bits\": 4, \"strategy\": \"group\", " weights "}}}")
#define GROUPS "\"group_size\": 32, \"symmetric\": true, \"actorder\": null"
    take(INT4("pack-quantized", "\"lm_head\", \"re:.*self_attn.*\", \"re:.*shared_experts.*\", "
              "\"re:.*mlp\\\\.(gate|up|gate_up|down)_proj.*\"", GROUPS));
    assert_true(cfg.packed == MT_PACKED_INT4);
    assert_int_equal(cfg.plain_parts, MT_PLAIN_ATTENTION | MT_PLAIN_SHARED | MT_PLAIN_MLP);
    take(INT4("pack-quantized", "\"lm_head\"", GROUPS));
    assert_int_equal(cfg.plain_parts, 0);
    /* as Python reads them: classes, lazy repeats, assertions; from the name's beginning, not to its end */
    take(INT4("pack-quantized", "\"re:model\\\\.layers\\\\.\\\\d+\\\\.self_attn\", \"re:.*?\\\\.mlp\\\\.(?!experts|shared)\", "
              "\"re:layers\"", GROUPS));
    assert_int_equal(cfg.plain_parts, MT_PLAIN_ATTENTION | MT_PLAIN_MLP);
    take(INT4("pack-quantized", "\"re:^model[.]layers[.]1[.]mlp[.]experts[.]\\\\d+[.](?:gate|up)_proj$\"", GROUPS));
    assert_int_equal(cfg.plain_parts, MT_PLAIN_EXPERTS);
    refuse(INT4("marlin-24", "", GROUPS), "marlin-24");
    refuse(INT4("float-quantized", "", GROUPS), "a type other than");
    refuse(INT4("nvfp4-pack-quantized", "", GROUPS), "a type other than");
    refuse(INT4("mxfp4-pack-quantized", "", GROUPS), "a type other than");
    take(QUANT("modelopt", ", \"quant_algo\": \"NVFP4\", \"exclude_modules\": [\"lm_head\", \"*.self_attn*\"]"));
    assert_true(cfg.packed == MT_PACKED_NVFP4);
    assert_int_equal(cfg.plain_parts, MT_PLAIN_ATTENTION);
    refuse(QUANT("modelopt", ", \"quant_algo\": \"W4A8_AWQ\""), "W4A8_AWQ");
    refuse(INT4("pack-quantized", "\"re:(\"", GROUPS), "re:(");
    take(INT4("pack-quantized", "", "\"group_size\": 128, \"symmetric\": true, \"actorder\": \"weight\""));
    assert_true(cfg.packed == MT_PACKED_INT4_128 && cfg.packed_scale == MT_SCALE_BF16);
    take(INT4("pack-quantized", "", "\"group_size\": 32, \"symmetric\": false"));
    assert_true(cfg.packed == MT_PACKED_INT4 && cfg.packed_scale == MT_SCALE_BF16_ZEROS);
    refuse(INT4("pack-quantized", "", "\"group_size\": 48, \"symmetric\": true"), "groups of other sizes");
    refuse(INT4("pack-quantized", "", "\"group_size\": 32, \"symmetric\": true, \"actorder\": \"group\""), "actorder");
    refuse(INT4("mxfp4-pack-quantized", "", "\"group_size\": 64, \"symmetric\": true"), "a type other");
    take(QUANT("gptq", ", \"bits\": 4, \"group_size\": -1, \"sym\": true, \"desc_act\": true"));
    assert_true(cfg.packed == MT_PACKED_INT4R && cfg.packed_scale == MT_SCALE_F16_ZEROS && cfg.zeros_less_one);
    take(QUANT("gptq", ", \"bits\": 4, \"group_size\": 64, \"checkpoint_format\": \"gptq_v2\""));
    assert_true(cfg.packed == MT_PACKED_INT4_64 && !cfg.zeros_less_one);
    refuse(QUANT("gptq", ", \"bits\": 3, \"group_size\": 64"), "another number of bits than 4");
    refuse(QUANT("gptq", ", \"bits\": 4, \"group_size\": 128, \"checkpoint_format\": \"marlin\""), "marlin");
    take(QUANT("awq", ", \"bits\": 4, \"group_size\": 128, \"version\": \"GEMM\", \"modules_to_not_convert\": [\"self_attn\"]"));
    assert_true(cfg.packed == MT_PACKED_INT4_128 && cfg.plain_parts == MT_PLAIN_ATTENTION && !cfg.zeros_less_one);
    refuse(QUANT("awq", ", \"bits\": 4, \"group_size\": 128, \"version\": \"gemv_fast\""), "gemv_fast");
    refuse(QUANT("awq", ", \"bits\": 4, \"group_size\": 0"), "group_size");
    refuse(QUANT("bitsandbytes", ", \"load_in_8bit\": true"), "int8");
    refuse(QUANT("bitsandbytes", ", \"load_in_4bit\": true, \"bnb_4bit_quant_type\": \"fp4\""), "fp4");
    refuse(QUANT("bitsandbytes", ", \"load_in_4bit\": true, \"bnb_4bit_quant_type\": \"nf4\", "
                 "\"bnb_4bit_quant_storage\": \"bfloat16\""), "uint8");
    refuse(LLAMA ", \"attention_dropout\": 0.1", "attention_dropout");
    refuse(LLAMA ", \"is_encoder_decoder\": true", "is_encoder_decoder");
    refuse(LLAMA ", \"hidden_act\": \"gelu\"", "hidden_act");
    refuse(LLAMA ", \"hidden_act\": 3", "hidden_act");
    refuse("\"architectures\": [\"GPT2LMHeadModel\"], " SHAPE, "GPT2LMHeadModel");
    refuse("\"architectures\": [], " SHAPE, "not supported");
    refuse("\"architectures\": \"LlamaForCausalLM\", " SHAPE, "not supported");
    refuse("\"model_type\": \"Llama\", " SHAPE, "not supported");
    refuse(SHAPE, "not supported");
    refuse("\"model_type\": \"jamba\", " SHAPE, "\"jamba\"");
    refuse("\"architectures\": [\"GPTNeoXForCausalLM\"], " SHAPE, "megatrain help models");
}

/* two key heads, so that a default shows */
TEST(sizes_must_make_sense)
{
    static const char *const needed[] = {"hidden_size", "intermediate_size", "num_hidden_layers",
                                         "num_attention_heads", "vocab_size"};
    static const char *const wrong[] = {"0", "-8", "2.5", "\"64\"", "1e30", "true", "[64]", "9223372036854775808"};
    for (size_t i = 0; i < MT_ARRAY_LEN(needed); i++)
        for (size_t k = 0; k <= MT_ARRAY_LEN(wrong); k++) {
            char text[1024] = "\"architectures\": [\"LlamaForCausalLM\"]";
            for (size_t j = 0; j < MT_ARRAY_LEN(needed); j++) {
                const char *value = j == i ? k < MT_ARRAY_LEN(wrong) ? wrong[k] : NULL : j == 3 ? "4" : "64";
                if (value)
                    snprintf(text + strlen(text), sizeof(text) - strlen(text), ", \"%s\": %s", needed[j], value);
            }
            refuse(text, needed[i]);
        }
    refuse(LLAMA ", \"num_key_value_heads\": 3", "num_key_value_heads");
    refuse(LLAMA ", \"num_key_value_heads\": 8", "num_key_value_heads");
    refuse(LLAMA ", \"head_dim\": 12", "head_dim");
    refuse(LLAMA ", \"head_dim\": 4096", "head_dim");
    refuse(LLAMA ", \"rms_norm_eps\": \"x\"", "rms_norm_eps");
    refuse(LLAMA ", \"rms_norm_eps\": 1e999", "rms_norm_eps");
    refuse(LLAMA ", \"rms_norm_eps\": -1", "rms_norm_eps");
    refuse(LLAMA ", \"initializer_range\": -1", "initializer_range");
    refuse(LLAMA ", \"tie_word_embeddings\": 1", "tie_word_embeddings");
    refuse(LLAMA ", \"max_position_embeddings\": 0", "max_position_embeddings");
    refuse("\"architectures\": [\"LlamaForCausalLM\"], \"hidden_size\": 8, \"intermediate_size\": 8, "
           "\"num_hidden_layers\": 1, \"num_attention_heads\": 16, \"vocab_size\": 9", "hidden_size");
    refuse("\"architectures\": [\"Qwen2ForCausalLM\"], \"hidden_size\": 6464, \"intermediate_size\": 64, "
           "\"num_hidden_layers\": 2, \"num_attention_heads\": 4, \"num_key_value_heads\": 2, "
           "\"vocab_size\": 300", "head_dim of more than 1024");
    refuse("\"architectures\": [\"LlamaForCausalLM\"], \"hidden_size\": 12, \"head_dim\": 8, \"intermediate_size\": 8, "
           "\"num_hidden_layers\": 1, \"num_attention_heads\": 1, \"vocab_size\": 9", "hidden_size");
}

TEST(what_is_no_object_is_refused)
{
    static const char *const texts[] = {"", "[]", "3", "\"x\"", "null", "{", "{}{}", "{\"a\":}"};
    for (size_t i = 0; i < MT_ARRAY_LEN(texts); i++) {
        struct mt_err err = {0};
        assert_int_equal(mt_hf_config_parse(&cfg, texts[i], strlen(texts[i]), "config.json", &err), -EINVAL);
        assert_int_equal(strncmp(err.msg, "config.json", 11), 0);
    }
}
