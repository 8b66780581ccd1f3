/* SPDX-License-Identifier: Apache-2.0 */
/* Texts of config.json that are read, or refused. */
#pragma once

#include <stdio.h>
#include <string.h>

#include "hf/hf_config.h"
#include "test.h"

static struct mt_hf_config cfg;

static inline const struct mt_layer_spec *layer(int64_t i)
{
    return mt_layer_of(&cfg, i);
}

#define SHAPE                                                                                      \
    "\"hidden_size\": 64, \"intermediate_size\": 176, \"num_hidden_layers\": 4, "                  \
    "\"num_attention_heads\": 4, \"vocab_size\": 300"
#define LLAMA "\"architectures\": [\"LlamaForCausalLM\"], " SHAPE

static int parse(const char *keys, struct mt_err *err)
{
    char text[4096];
    int n = snprintf(text, sizeof(text), "{%s}", keys);
    assert_true(n > 0 && (size_t)n < sizeof(text));
    return mt_hf_config_parse(&cfg, text, (size_t)n, "config.json", err);
}

static void take(const char *keys)
{
    struct mt_err err = {0};
    if (parse(keys, &err))
        fail_msg("%s: %s", keys, err.msg);
}

static void refuse(const char *keys, const char *word)
{
    struct mt_err err = {0};
    cfg.vocab = -7;
    if (!parse(keys, &err))
        fail_msg("accepted: %s", keys);
    assert_int_equal(err.kind, MT_ERR_INPUT);
    assert_int_equal(cfg.vocab, -7); /* written only on success */
    if (!strstr(err.msg, word))
        fail_msg("%s: \"%s\" does not say \"%s\"", keys, err.msg, word);
}

#define MIXTURE(arch) "\"architectures\": [\"" arch "\"], \"num_key_value_heads\": 2, " SHAPE
