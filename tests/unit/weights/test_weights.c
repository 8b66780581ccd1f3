/* SPDX-License-Identifier: Apache-2.0 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../model/planes_of.h"
#include "base/fs.h"
#include "base/log.h"
#include "base/mem.h"
#include "hf/safetensors.h"
#include "test.h"
#include "weights/weights.h"

enum { MAX_TENSORS = 64 };

static struct mt_hf_config cfg;

#define SMALL(more)                                                                                \
    "{\"architectures\": [\"Qwen2ForCausalLM\"], \"hidden_size\": 24, \"intermediate_size\": 40, " \
    "\"num_hidden_layers\": 2, \"num_attention_heads\": 3, \"num_key_value_heads\": 1, "           \
    "\"head_dim\": 16, \"vocab_size\": 50" more "}"

struct rig {
    struct mt_layout *layout;
    mt_plane_set *planes;
    char dir[64];
};

static void open_rig(struct rig *r, bool tied)
{
    const char *json = tied ? SMALL(", \"tie_word_embeddings\": true") : SMALL("");
    assert_int_equal(mt_hf_config_parse(&cfg, json, strlen(json), "config.json", NULL), 0);
    struct mt_layout_params lp = {.decay_embeddings = true, .cut = mt_cut_layer};
    assert_int_equal(mt_layout_create(&r->layout, &cfg, &lp, NULL), 0);
    r->planes = planes_of(r->layout, &mt_adamw, MT_BF16);
    snprintf(r->dir, sizeof(r->dir), "/tmp/mt-weights-XXXXXX");
    assert_non_null(mkdtemp(r->dir));
}

static void close_rig(struct rig *r)
{
    mt_plane_set_destroy(&r->planes);
    mt_layout_destroy(&r->layout);
    mt_remove_tree(r->dir, NULL);
}

/* Element k of tensor i: exact in bf16 and f16. */
static float value(size_t i, size_t k)
{
    return (float)((i * 7 + k) % 128) * 0.5f - 20;
}

/* By search, once: the values are few. */
static uint16_t to_f16(float v)
{
    static uint16_t of[256];
    uint16_t *h = &of[(int)((v + 20) * 2) & 255];
    while (mt_f16_to_f32(*h) != v && *h < 65535)
        ++*h;
    return *h;
}

/* What is to be wrong with the file. */
struct wrong {
    const char *leave_out, *rename, *as, *reshape, *poison;
    float with;
    const char *extra;
};

static void write_model(const struct rig *r, const char *prefix, const struct wrong *w)
{
    static const enum mt_st_dtype types[] = {MT_ST_F32, MT_ST_BF16, MT_ST_F16};
    static char names[MAX_TENSORS][160];
    struct mt_st_decl d[MAX_TENSORS];
    size_t n = 0, len = 0, data = 0;
    for (size_t i = 0; i < r->layout->n_tensors; i++) {
        const struct mt_tensor *t = &r->layout->tensors[i];
        if (w->leave_out && !strcmp(t->name, w->leave_out))
            continue;
        bool cut = prefix && !strncmp(t->name, "model.", 6);
        snprintf(names[i], sizeof(names[i]), "%s%s", cut ? prefix : "", t->name + (cut ? 6 : 0));
        if (w->rename && !strcmp(t->name, w->rename))
            snprintf(names[i], sizeof(names[i]), "%s", w->as);
        d[n++] = (struct mt_st_decl){.name = names[i], .dtype = types[i % 3], .n_dims = t->n_dims,
                                     .shape = {t->shape[0], t->shape[1]}};
        if (w->reshape && !strcmp(t->name, w->reshape)) {
            d[n - 1].shape[0] = t->shape[1];
            d[n - 1].shape[1] = t->shape[0];
        }
    }
    if (w->extra)
        d[n++] = (struct mt_st_decl){.name = w->extra, .dtype = MT_ST_F32, .n_dims = 1, .shape = {3}};
    qsort(d, n, sizeof(*d), mt_st_file_order);
    for (size_t i = 0; i < n; i++)
        data += mt_st_decl_bytes(&d[i]);
    MT_FREED char *header = NULL;
    assert_int_equal(mt_st_build_header(&header, &len, d, n, NULL), 0);
    char *raw = calloc(1, len + data), *p = raw + len;
    memcpy(raw, header, len);
    for (size_t k = 0; k < n; k++)
        for (size_t i = 0; i < r->layout->n_tensors; i++) {
            const struct mt_tensor *t = &r->layout->tensors[i];
            if (d[k].name != names[i])
                continue;
            for (size_t e = 0; e < t->n; e++, p += mt_st_dtype_size(d[k].dtype)) {
                float v = value(i, e);
                if (w->poison && !strcmp(t->name, w->poison) && e == 5)
                    v = w->with;
                uint16_t b = mt_f32_to_bf16(v), h = d[k].dtype == MT_ST_F16 ? to_f16(v) : 0;
                memcpy(p, d[k].dtype == MT_ST_F32 ? (void *)&v : d[k].dtype == MT_ST_BF16 ? (void *)&b : (void *)&h,
                       mt_st_dtype_size(d[k].dtype));
            }
        }
    char path[128];
    snprintf(path, sizeof(path), "%s/model.safetensors", r->dir);
    assert_int_equal(mt_write_file(path, raw, len + data, NULL), 0);
    free(raw);
}

static float loaded(const struct rig *r, const struct mt_tensor *t, size_t k)
{
    const uint16_t *hi = mt_plane(r->planes, t->unit, MT_PLANE_HI), *lo = mt_plane(r->planes, t->unit, MT_PLANE_LO);
    return mt_master_join(hi[t->at + k], lo[t->at + k]);
}

TEST(every_value_arrives_from_any_dtype_and_prefix)
{
    static const char *const prefixes[] = {NULL, "", "language_model.model.", "model.language_model."};
    for (size_t v = 0; v < 2 * MT_ARRAY_LEN(prefixes); v++) {
        struct rig r;
        struct wrong none = {0};
        open_rig(&r, v & 1);
        write_model(&r, prefixes[v / 2], &none);
        MUST(mt_weights_load, r.layout, r.planes, r.dir, NULL);
        for (size_t i = 0; i < r.layout->n_tensors; i++)
            for (size_t k = 0; k < r.layout->tensors[i].n; k++)
                assert_true(loaded(&r, &r.layout->tensors[i], k) == value(i, k));
        close_rig(&r);
    }
}

TEST(wrong_files_are_refused_by_tensor)
{
    static const struct {
        struct wrong w;
        const char *words[2];
    } cases[] = {
        {{.leave_out = "model.layers.1.mlp.up_proj.weight"}, {"model.layers.1.mlp.up_proj.weight", "missing"}},
        {{.rename = "model.norm.weight", .as = "model.normal.weight"}, {"model.norm.weight", "missing"}},
        {{.reshape = "model.layers.0.mlp.down_proj.weight"}, {"model.layers.0.mlp.down_proj.weight", "[40, 24]"}},
        {{.extra = "model.layers.0.self_attn.o_proj.bias"}, {"model.layers.0.self_attn.o_proj.bias", "not part of"}},
        {{.poison = "model.embed_tokens.weight", .with = NAN}, {"model.embed_tokens.weight", "element 5"}},
        {{.poison = "model.embed_tokens.weight", .with = -INFINITY}, {"model.embed_tokens.weight", "finite"}},
        {{.poison = "model.embed_tokens.weight", .with = 3.4e38f}, {"model.embed_tokens.weight", "3.39e38"}},
    };
    for (size_t i = 0; i < MT_ARRAY_LEN(cases); i++) {
        struct rig r;
        struct mt_err err = {0};
        open_rig(&r, false);
        write_model(&r, NULL, &cases[i].w);
        assert_true(mt_weights_load(r.layout, r.planes, r.dir, NULL, &err) < 0);
        assert_int_equal(err.kind, MT_ERR_INPUT);
        for (int k = 0; k < 2; k++)
            if (!strstr(err.msg, cases[i].words[k]))
                fail_msg("\"%s\" does not say \"%s\"", err.msg, cases[i].words[k]);
        close_rig(&r);
    }
}

static void quiet(enum mt_log_level level, const char *line)
{
    (void)level;
    (void)line;
}

TEST(harmless_extras_are_passed_over)
{
    static const char *const extra[] = {"lm_head.weight", "model.layers.0.self_attn.rotary_emb.inv_freq"};
    mt_log_set_sink(quiet);
    for (int i = 0; i < 2; i++) {
        struct rig r;
        struct wrong w = {.extra = extra[i]};
        open_rig(&r, true);
        write_model(&r, NULL, &w);
        assert_int_equal(mt_weights_load(r.layout, r.planes, r.dir, NULL, NULL), 0);
        close_rig(&r);
    }
    mt_log_set_sink(NULL);
}

TEST(a_random_start_depends_on_seed_and_name_alone)
{
    struct rig a, b;
    open_rig(&a, false);
    open_rig(&b, true); /* another layout: the tensors that are in both are the same */
    assert_int_equal(mt_weights_init_random(a.layout, a.planes, 7, 1, NULL), 0);
    assert_int_equal(mt_weights_init_random(b.layout, b.planes, 7, 3, NULL), 0);
    double sum = 0, sq = 0;
    size_t n = 0, other = 0;
    for (size_t i = 0; i < b.layout->n_tensors; i++) {
        const struct mt_tensor *t = &b.layout->tensors[i], *s = mt_layout_find(a.layout, t->name);
        for (size_t k = 0; k < t->n; k++) {
            float v = loaded(&b, t, k);
            assert_true(v == loaded(&a, s, k));
            if (t->n_dims == 1) {
                assert_true(v == (strstr(t->name, "norm") ? 1 : 0));
            } else {
                sum += (double)v;
                sq += (double)v * (double)v;
                n++;
            }
        }
    }
    double std = sqrt(sq / (double)n);
    assert_true(fabs(sum / (double)n) <= 5 * 0.02 / sqrt((double)n));
    assert_true(fabs(std / 0.02 - 1) <= 5 / sqrt(2.0 * (double)n));
    assert_int_equal(mt_weights_init_random(a.layout, a.planes, 8, 2, NULL), 0);
    const struct mt_tensor *t = mt_layout_find(a.layout, "model.embed_tokens.weight");
    for (size_t k = 0; k < t->n; k++)
        other += loaded(&a, t, k) != loaded(&b, mt_layout_find(b.layout, t->name), k);
    assert_true(other > t->n / 2);
    close_rig(&a);
    close_rig(&b);
}
