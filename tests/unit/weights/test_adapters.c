/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <fnmatch.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../model/param_of.h"
#include "base/fs.h"
#include "base/json.h"
#include "base/mem.h"
#include "model/layout.h"
#include "test.h"
#include "weights/peft.h"

static struct mt_hf_config cfg;

#define MODEL(more)                                                                                \
    "{\"architectures\": [\"Qwen2ForCausalLM\"], \"hidden_size\": 24, \"intermediate_size\": 40, "   \
    "\"num_hidden_layers\": 2, \"num_attention_heads\": 3, \"num_key_value_heads\": 1, \"vocab_size\": 50" more "}"

static struct mt_adapter_spec spec_of(const char *const *targets)
{
    struct mt_adapter_spec s = {.on = true, .rank = 4, .alpha = 8, .lr_ratio_b = 1};
    for (; *targets; targets++)
        assert_true(mt_adapter_list_add(&s.targets, *targets, 0));
    return s;
}

static int lay_out(struct mt_layout **l, struct mt_adapter_spec *s, const char *model, struct mt_cut cut,
                   struct mt_err *err)
{
    assert_int_equal(mt_hf_config_parse(&cfg, model, strlen(model), "config.json", err), 0);
    return mt_layout_create(l, &cfg, &(struct mt_layout_params){.decay_embeddings = true, .cut = cut, .adapter = s}, err);
}

static struct mt_layout *must_lay_out(struct mt_adapter_spec *s, struct mt_cut cut)
{
    struct mt_layout *l = NULL;
    MUST(lay_out, &l, s, MODEL(""), cut);
    return l;
}

/* What a name or glob means, item by item. */
static bool means(const char *item, const char *module)
{
    size_t n = strlen(module), k = strlen(item);
    if (strpbrk(item, "*?["))
        return !fnmatch(item, module, 0);
    return n >= k && !strcmp(module + n - k, item) && (n == k || module[n - k - 1] == '.');
}

TEST(the_first_of_many_items_counts)
{
    static const char *const items[] = {"mlp.experts.3.up_proj", "experts.3.up_proj", "*.2.mlp.*.down_proj", "down_proj",
                                        "model.layers.1.mlp.experts.0.down_proj", "layers.2.mlp.experts.7.gate_proj",
                                        "model.layers.?.mlp.experts.[0-4].gate_proj", "down_proj", "proj", "", "norm"};
    static const char *const kinds[] = {"gate_proj", "up_proj", "down_proj"};
    for (size_t turn = 0; turn < MT_ARRAY_LEN(items); turn++) {
        struct mt_adapter_list l = {0};
        for (size_t i = 0; i < MT_ARRAY_LEN(items); i++)
            assert_true(mt_adapter_list_add(&l, items[(i + turn) % MT_ARRAY_LEN(items)], (double)i));
        for (size_t m = 0; m < 3 * 8 * 3; m++) {
            char module[64];
            size_t want = 0;
            snprintf(module, sizeof(module), "model.layers.%zu.mlp.experts.%zu.%s", m / 24, m / 3 % 8, kinds[m % 3]);
            while (want < l.n && !means(l.items[want].name, module))
                want++;
            assert_ptr_equal(mt_adapter_match(&l, module), want < l.n ? &l.items[want] : NULL);
        }
        assert_ptr_equal(mt_adapter_match(&l, "model.norm.weight"), NULL);
        struct mt_adapter_spec s = {.targets = l};
        mt_adapter_spec_finish(&s);
    }
}

TEST(adapters_alone_are_trained)
{
    MT_CLOSED_BY(mt_adapter_spec_finish) struct mt_adapter_spec s = spec_of((const char *const[]){MT_ALL_LINEAR, NULL});
    MT_CLOSED_BY(mt_layout_destroy) struct mt_layout *l = must_lay_out(&s, mt_cut_layer);
    size_t adapters = 0;
    for (size_t i = 0; i < l->n_tensors; i++) {
        assert_int_equal(l->tensors[i].trainable, l->tensors[i].adapter != NULL);
        assert_true(l->tensors[i].decay || !l->tensors[i].adapter);
        adapters += l->tensors[i].adapter != NULL;
    }
    assert_int_equal(adapters, 2 * 2 * 7); /* A and B of seven matrices of two layers */
    assert_int_equal(l->n_adapters, 2 * 4);
    assert_false(mt_layout_find(l, "lm_head.lora_A.weight"));
    /* q is 24 x 24, k and v 8 x 24, o 24 x 24; gate and up 40 x 24, down 24 x 40 */
    assert_int_equal(l->n_trained, 2 * 4 * (48 + 2 * 32 + 48 + 3 * 64));
    assert_true(mt_layout_alike(l, 1, 2));
}

TEST(factors_of_a_product_lie_together)
{
    MT_CLOSED_BY(mt_adapter_spec_finish) struct mt_adapter_spec s = spec_of((const char *const[]){"q_proj", "v_proj", NULL});
    assert_true(mt_adapter_list_add(&s.ranks, "v_proj", 6));
    MT_CLOSED_BY(mt_layout_destroy) struct mt_layout *l = must_lay_out(&s, mt_cut_layer);
    const struct mt_param qkv = param_of(l, 1, "attention", MT_ATTENTION_QKV);
    const struct mt_adapter *a = qkv.adapter;
    assert_non_null(a);
    assert_int_equal(a->n_targets, 2);
    assert_int_equal(a->rank, 10);
    assert_int_equal(a->a.n, 10 * 24);
    assert_int_equal(a->target[1].col, 24 + 8); /* behind q and k */
    assert_int_equal(a->target[1].row, 4);
    assert_true(a->target[0].scale == 2 && a->target[1].scale == (float)(8.0 / 6));
    const struct mt_tensor *q = mt_layout_find(l, "model.layers.0.self_attn.q_proj.lora_A.weight");
    const struct mt_tensor *v = mt_layout_find(l, "model.layers.0.self_attn.v_proj.lora_A.weight");
    assert_true(q && v && v->first == q->first + q->n && v->grad == q->grad + q->n);
    assert_int_equal(q->first % MT_PARAM_ALIGN, 0);
    assert_null(param_of(l, 1, "attention", MT_ATTENTION_OUT).adapter);
}

TEST(tensors_are_the_same_for_every_cut)
{
    MT_CLOSED_BY(mt_adapter_spec_finish) struct mt_adapter_spec s = spec_of((const char *const[]){MT_ALL_LINEAR, NULL});
    struct mt_layout *whole = must_lay_out(&s, mt_cut_layer), *cut = must_lay_out(&s, mt_cut_half);
    assert_int_equal(whole->n_tensors, cut->n_tensors);
    for (size_t i = 0; i < whole->n_tensors; i++)
        assert_string_equal(whole->tensors[i].name, cut->tensors[i].name);
    mt_layout_destroy(&whole);
    mt_layout_destroy(&cut);
}

TEST(what_cannot_be_is_refused_by_name)
{
    static const struct {
        const char *model, *target, *also, *say;
    } bad[] = {
        {MODEL(""), "qproj", NULL, "\"qproj\" matches nothing"},
        {MODEL(""), "*_proj", "down_proj", "mlp.down_proj is matched by both adapter.targets and adapter.train_also"},
        {MODEL(""), "model.*", NULL, "also matches model.embed_tokens, which cannot have an adapter: to train all of it put it in adapter.train_also"},
        {MODEL(", \"tie_word_embeddings\": true"), "lm_head", NULL, "not supported with tied embeddings"},
        {MODEL(", \"tie_word_embeddings\": true"), "q_proj", "lm_head", "shares with embed_tokens: name both"},
        {MODEL(", \"tie_word_embeddings\": true"), "q_proj", "embed_tokens", "shares with lm_head: name both"},
        {MODEL(""), "q_proj", "final_norm", "adapter.train_also: \"final_norm\" matches nothing"},
    };
    for (size_t i = 0; i < MT_ARRAY_LEN(bad); i++) {
        struct mt_adapter_spec s = spec_of((const char *const[]){bad[i].target, NULL});
        struct mt_layout *l = NULL;
        struct mt_err err = {0};
        if (bad[i].also)
            assert_true(mt_adapter_list_add(&s.train_also, bad[i].also, 0));
        assert_int_equal(lay_out(&l, &s, bad[i].model, mt_cut_layer, &err), -EINVAL);
        assert_int_equal(err.kind, MT_ERR_USAGE);
        if (!strstr(err.msg, bad[i].say))
            fail_msg("case %zu: %s", i, err.msg);
        mt_adapter_spec_finish(&s);
    }
}

static cJSON *written_config(struct mt_adapter_spec *s)
{
    struct mt_layout *l = must_lay_out(s, mt_cut_layer);
    char *text = mt_peft_config_text(l, "org/model");
    cJSON *o = NULL;
    assert_non_null(text);
    assert_int_equal(mt_json_parse(&o, text, strlen(text), "adapter_config.json", MT_ERR_INPUT, NULL), 0);
    free(text);
    mt_layout_destroy(&l);
    mt_adapter_spec_finish(s);
    return o;
}

static bool lists(const cJSON *o, const char *key, const char *const *want)
{
    const cJSON *item = mt_json_get(o, key)->child;
    for (; *want && item; want++, item = item->next)
        if (strcmp(item->valuestring, *want))
            return false;
    return !*want && !item;
}

TEST(modules_are_named_as_shortly_as_they_can)
{
    struct mt_adapter_spec s = spec_of((const char *const[]){"q_proj", "model.layers.*.mlp.down_proj", NULL});
    assert_true(mt_adapter_list_add(&s.ranks, "q_proj", 8));
    assert_true(mt_adapter_list_add(&s.alphas, "model.layers.1.mlp.down_proj", 3));
    assert_true(mt_adapter_list_add(&s.train_also, "model.norm", 0));
    MT_JSON_FREED cJSON *o = written_config(&s);
    assert_true(lists(o, "target_modules", (const char *const[]){"q_proj", "down_proj", NULL}));
    assert_true(lists(o, "modules_to_save", (const char *const[]){"model.norm", NULL}));
    assert_true(mt_json_get(mt_json_get(o, "rank_pattern"), "q_proj")->valuedouble == 8);
    assert_true(mt_json_get(mt_json_get(o, "alpha_pattern"), "model.layers.1.mlp.down_proj")->valuedouble == 3);
    cJSON_Delete(o);
    /* one layer's alone: "q_proj" would be every layer's */
    s = spec_of((const char *const[]){"model.layers.1.self_attn.q_proj", NULL});
    o = written_config(&s);
    assert_true(lists(o, "target_modules", (const char *const[]){"model.layers.1.self_attn.q_proj", NULL}));
}

/* Writes a folder with the adapters of two layers' q_proj, whose configuration has these patterns of alpha. */
static void write_folder(const char *dir, const char *patterns)
{
    char path[300], config[400], header[600], file[700];
    snprintf(config, sizeof(config), "{\"peft_type\": \"LORA\", \"r\": 1, \"lora_alpha\": 2, \"alpha_pattern\": {%s}}", patterns);
    size_t n = 0;
    header[n++] = '{';
    for (int i = 0; i < 4; i++)
        n += (size_t)snprintf(header + n, sizeof(header) - n,
                              "%s\"base_model.model.model.layers.%d.self_attn.q_proj.lora_%c.weight\":{\"dtype\":\"F32\","
                              "\"shape\":[1,1],\"data_offsets\":[%d,%d]}", i ? "," : "", i / 2 * 11, i % 2 ? 'B' : 'A', 4 * i,
                              4 * i + 4);
    header[n++] = '}';
    uint64_t length = n;
    memcpy(file, &length, 8);
    memcpy(file + 8, header, n);
    memset(file + 8 + n, 0, 16);
    snprintf(path, sizeof(path), "%s/" MT_PEFT_CONFIG, dir);
    assert_int_equal(mt_write_file(path, config, strlen(config), NULL), 0);
    snprintf(path, sizeof(path), "%s/" MT_PEFT_WEIGHTS, dir);
    assert_int_equal(mt_write_file(path, file, 8 + n + 16, NULL), 0);
}

/* As Python's re has them: classes, groups without a number, a look ahead. */
TEST(patterns_are_those_of_peft)
{
    static const struct {
        const char *pattern;
        double first, other; /* alpha of layer 0 and of layer 11 */
    } cases[] = {
        {"q_proj", 7, 7}, {"layers\\\\.\\\\d\\\\.self_attn\\\\.q_proj", 7, 2}, {"layers\\\\.\\\\d{2}\\\\..*", 2, 7},
        {"(?:a|layers\\\\.0)\\\\.\\\\w+\\\\.q_proj", 7, 2}, {"layers\\\\.(?!0)\\\\d+.*", 2, 7}, {"proj", 2, 2}, {"q_pro", 2, 2}};
    char dir[] = "/tmp/mt_patterns_XXXXXX", patterns[200];
    assert_non_null(mkdtemp(dir));
    struct mt_adapter_spec s;
    struct mt_err err;
    for (size_t i = 0; i < MT_ARRAY_LEN(cases); i++) {
        snprintf(patterns, sizeof(patterns), "\"%s\": 7", cases[i].pattern);
        write_folder(dir, patterns);
        if (mt_peft_read_spec(&s, dir, &err))
            fail_msg("%s: %s", cases[i].pattern, err.msg);
        for (size_t k = 0; k < s.alphas.n; k++) {
            double want = strstr(s.alphas.items[k].name, "layers.0.") ? cases[i].first : cases[i].other;
            if (s.alphas.items[k].value != want)
                fail_msg("%s: alpha of %s is %g", cases[i].pattern, s.alphas.items[k].name, s.alphas.items[k].value);
        }
        assert_int_equal(s.alphas.n, 2);
        mt_adapter_spec_finish(&s);
    }
    write_folder(dir, "\"q_proj(\": 7");
    assert_int_equal(mt_peft_read_spec(&s, dir, &err), -EINVAL);
    assert_non_null(strstr(err.msg, "\"q_proj(\" cannot be read: missing closing parenthesis"));
    mt_remove_tree(dir, NULL);
}
