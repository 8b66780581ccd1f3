/* SPDX-License-Identifier: Apache-2.0 */
/* Rotary tables against numbers that transformers made (rope.json, by scripts/reference/fixtures.py). */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/json.h"
#include "base/log.h"
#include "base/mem.h"
#include "hf/hf_config.h"
#include "test.h"

static struct mt_hf_config cfg;

static void parse(const cJSON *config)
{
    struct mt_err err = {0};
    MT_FREED char *text = cJSON_PrintUnformatted(config);
    if (mt_hf_config_parse(&cfg, text, strlen(text), "fixture", &err))
        fail_msg("%s: %s", text, err.msg);
}

/* An angle is position * frequency in FP32: a frequency off by one unit in the last place is off by
 * position * 2^-24 there, and torch's sine and cosine are good to a few units more. */
static void compare(const cJSON *c, const char *key, const float *table, size_t half)
{
    const char *name = mt_json_get(c, "name")->valuestring;
    const cJSON *v = mt_json_get(c, key)->child;
    for (const cJSON *p = mt_json_get(c, "positions")->child; p; p = p->next)
        for (size_t i = 0; i < half; i++, v = v->next) {
            double got = (double)table[(size_t)p->valueint * half + i];
            double tol = (p->valuedouble + 4) * 0x1p-23;
            if (!(fabs(got - v->valuedouble) <= tol))
                fail_msg("%s: %s[%d][%zu] = %.9g, transformers has %.9g", name, key, p->valueint, i, got,
                         v->valuedouble);
        }
    assert_null(v);
}

TEST(tables_are_those_of_transformers)
{
    MT_JSON_FREED cJSON *root = NULL;
    MUST(mt_json_read_file, &root, FIXTURES "/rope.json", MT_ERR_INPUT);
    int n = 0;
    for (const cJSON *c = mt_json_get(root, "cases")->child; c; c = c->next, n++) {
        size_t seq_len = (size_t)mt_json_get(c, "seq_len")->valueint;
        size_t half = (size_t)mt_json_get(c, "half")->valueint;
        parse(mt_json_get(c, "config"));
        assert_int_equal(cfg.rope[0].dims, 2 * half);
        float *cos_t = calloc(2 * seq_len * half, sizeof(float)), *sin_t = cos_t + seq_len * half;
        mt_rope_tables(&cfg.rope[0], seq_len, seq_len, cos_t, sin_t);
        compare(c, "cos", cos_t, half);
        compare(c, "sin", sin_t, half);
        free(cos_t);
    }
    assert_true(n >= 16);
}

static void quiet(enum mt_log_level level, const char *line)
{
    (void)level;
    (void)line;
}

#define SHAPE                                                                                      \
    "\"architectures\": [\"LlamaForCausalLM\"], \"hidden_size\": 64, \"intermediate_size\": 64, "  \
    "\"num_hidden_layers\": 1, \"num_attention_heads\": 4, \"vocab_size\": 300"

TEST(bad_parameters_are_refused)
{
    static const struct {
        const char *keys, *word;
    } cases[] = {
        {"\"rope_theta\": 0", "rope_theta"},
        {"\"rope_theta\": -5", "rope_theta"},
        {"\"rope_theta\": 1e999", "rope_theta"},
        {"\"rope_scaling\": {\"type\": \"linear\"}", "positive \"factor\""},
        {"\"rope_scaling\": {\"type\": \"linear\", \"factor\": 0}", "positive \"factor\""},
        {"\"rope_scaling\": {\"type\": \"linear\", \"factor\": 1e999}", "positive \"factor\""},
        {"\"rope_scaling\": {\"type\": 3}", "rope type"},
        {"\"rope_scaling\": {\"type\": \"mrope\", \"factor\": 2}", "mrope"},
        {"\"rope_scaling\": {\"rope_type\": \"default\", \"mrope_section\": [1]}", "mrope"},
        {"\"rope_parameters\": {\"full_attention\": {\"rope_type\": \"default\"}}", "layer type"},
        {"\"rope_scaling\": {\"type\": \"llama3\", \"factor\": 8, \"low_freq_factor\": 4, \"high_freq_factor\": 4}",
         "0 < low_freq_factor < high_freq_factor"},
        {"\"rope_scaling\": {\"type\": \"llama3\", \"factor\": 8, \"low_freq_factor\": 0}", "low_freq_factor"},
        {"\"rope_scaling\": {\"type\": \"yarn\", \"factor\": 2, \"original_max_position_embeddings\": 0}",
         "original_max_position_embeddings"},
        {"\"rope_theta\": 1, \"rope_scaling\": {\"type\": \"yarn\", \"factor\": 2}", "rope_theta"},
        {"\"rope_scaling\": {\"type\": \"yarn\", \"factor\": 2, \"beta_fast\": 0}", "beta"},
        {"\"rope_scaling\": {\"type\": \"longrope\", \"short_factor\": [1], \"long_factor\": [1]}", "short_factor needs 8"},
        {"\"rope_scaling\": {\"type\": \"longrope\", \"short_factor\": [1,1,1,1,1,1,1,1], \"long_factor\": "
         "[1,1,1,1,1,1,1,-1]}", "long_factor needs 8 positive"},
        {"\"rope_scaling\": {\"type\": \"longrope\", \"short_factor\": [1,1,1,1,1,1,1,1], \"long_factor\": "
         "[1,1,1,1,1,1,1,\"2\"]}", "long_factor needs 8 positive"},
        {"\"partial_rotary_factor\": 0.5", "partial_rotary_factor"},
        {"\"rope_parameters\": {\"rope_type\": \"default\", \"partial_rotary_factor\": 2}", "partial_rotary_factor"},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        char text[1024];
        struct mt_err err = {0};
        snprintf(text, sizeof(text), "{" SHAPE ", %s}", cases[i].keys);
        if (!mt_hf_config_parse(&cfg, text, strlen(text), "config.json", &err))
            fail_msg("accepted: %s", cases[i].keys);
        assert_int_equal(err.kind, MT_ERR_INPUT);
        if (!strstr(err.msg, cases[i].word))
            fail_msg("%s: \"%s\" does not say \"%s\"", cases[i].keys, err.msg, cases[i].word);
    }
}

TEST(reach_is_what_scaling_makes_of_it)
{
    static const struct {
        const char *keys;
        int64_t tokens;
    } cases[] = {
        {"\"rope_theta\": 10000", 4096},
        {"\"rope_scaling\": {\"type\": \"linear\", \"factor\": 4}", 16384},
        {"\"rope_scaling\": {\"type\": \"dynamic\", \"factor\": 2}", 8192},
        {"\"rope_scaling\": {\"type\": \"yarn\", \"factor\": 4, \"original_max_position_embeddings\": 3072}", 12288},
        {"\"rope_scaling\": {\"type\": \"yarn\", \"factor\": 4, \"original_max_position_embeddings\": 1024}", 4096},
        {"\"original_max_position_embeddings\": 2048, \"rope_scaling\": {\"type\": \"yarn\", \"factor\": 4, "
         "\"original_max_position_embeddings\": 1024}", 8192}, /* the one beside the object counts */
        {"\"rope_scaling\": {\"type\": \"llama3\", \"factor\": 8, \"original_max_position_embeddings\": 1024}", 4096},
    };
    mt_log_set_sink(quiet);
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        char text[1024];
        snprintf(text, sizeof(text), "{" SHAPE ", \"max_position_embeddings\": 4096, %s}", cases[i].keys);
        MUST(mt_hf_config_parse, &cfg, text, strlen(text), "config.json");
        if (mt_rope_reach(&cfg.rope[0]) != cases[i].tokens)
            fail_msg("%s: %lld", cases[i].keys, (long long)mt_rope_reach(&cfg.rope[0]));
    }
    mt_log_set_sink(NULL);
}

TEST(tables_are_finite_for_extreme_parameters)
{
    static const char *const keys[] = {
        "\"rope_theta\": 1e-30", "\"rope_theta\": 1e300", "\"head_dim\": 8, \"rope_theta\": 1.0000001",
        "\"head_dim\": 1024", "\"rope_scaling\": {\"type\": \"dynamic\", \"factor\": 1e6}",
        "\"rope_scaling\": {\"type\": \"yarn\", \"factor\": 1e-6}",
        "\"rope_scaling\": {\"type\": \"yarn\", \"factor\": 40, \"original_max_position_embeddings\": 1}",
    };
    mt_log_set_sink(quiet);
    for (size_t i = 0; i < sizeof(keys) / sizeof(keys[0]); i++) {
        char text[1024];
        struct mt_err err = {0};
        snprintf(text, sizeof(text), "{" SHAPE ", %s}", keys[i]);
        if (mt_hf_config_parse(&cfg, text, strlen(text), "config.json", &err))
            continue; /* refused is fine too */
        size_t half = cfg.rope[0].dims / 2;
        float *t = malloc(2 * 64 * half * sizeof(float));
        mt_rope_tables(&cfg.rope[0], 64, 100000, t, t + 64 * half);
        for (size_t k = 0; k < 2 * 64 * half; k++)
            if (!isfinite(t[k]))
                fail_msg("%s: entry %zu is %g", keys[i], k, (double)t[k]);
        free(t);
    }
    mt_log_set_sink(NULL);
}
