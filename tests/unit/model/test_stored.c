/* SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/fs.h"
#include "base/mem.h"
#include "model/ranges.h"
#include "model/stored.h"
#include "test.h"
#include "weights/weights.h"

static struct mt_hf_config cfg;

#define SHAPE                                                                                                          \
    "\"hidden_size\": 16, \"intermediate_size\": 24, \"num_hidden_layers\": 2, \"num_attention_heads\": 4, "           \
    "\"num_key_value_heads\": 2, \"head_dim\": 8, \"vocab_size\": 20"
#define GPT_OSS                                                                                                        \
    "{\"architectures\": [\"GptOssForCausalLM\"], " SHAPE ", \"num_local_experts\": 5, \"num_experts_per_tok\": 2, "   \
    "\"rope_scaling\": {\"rope_type\": \"yarn\", \"factor\": 2.0}}"
#define ERNIE                                                                                                          \
    "{\"architectures\": [\"Ernie4_5_MoeForCausalLM\"], " SHAPE ", \"moe_num_experts\": 5, \"moe_k\": 2, "             \
    "\"moe_intermediate_size\": 24}"
#define GLM                                                                                                            \
    "{\"architectures\": [\"Glm4MoeForCausalLM\"], " SHAPE ", \"n_routed_experts\": 5, \"num_experts_per_tok\": 2, "   \
    "\"moe_intermediate_size\": 24, \"num_nextn_predict_layers\": 1}"

static struct mt_layout *layout_of(const char *json, size_t group)
{
    struct mt_layout *l = NULL;
    struct mt_layout_params p = {.cut = mt_cut_layer};
    p.cut.expert_group = group;
    MUST(mt_hf_config_parse, &cfg, json, strlen(json), "config.json");
    MUST(mt_layout_create, &l, &cfg, &p);
    return l;
}

/* Of element (r, c) of a tensor: another one for each, exact in bf16 for a small tensor's. */
static float value(const struct mt_tensor *t, size_t r, size_t c)
{
    size_t h = 5381;
    for (const char *p = t->name; *p; p++)
        h = h * 33 + (size_t)*p;
    return (float)((h + r * 37 + c * 101) % 251) - 125;
}

static const struct mt_tensor *tensor_of(const struct mt_layout *l, const char *format, int layer, size_t expert)
{
    char name[128];
    snprintf(name, sizeof(name), format, layer, (int)expert);
    const struct mt_tensor *t = mt_layout_find(l, name);
    if (!t)
        fail_msg("there is no %s", name);
    return t;
}

/* A fused tensor of gpt-oss as its code indexes it: [e][h][2 i] is gate, [e][h][2 i + 1] is up; and so on. */
static float gpt_oss_value(const struct mt_layout *l, const struct mt_stored *s, size_t i)
{
    int layer = atoi(s->name + strlen("model.layers."));
    size_t h = 16, f = 24;
    if (strstr(s->name, "gate_up_proj_bias")) {
        size_t e = i / (2 * f), k = i % (2 * f);
        return value(tensor_of(l, k % 2 ? "model.layers.%d.mlp.experts.%d.up_proj.bias"
                                        : "model.layers.%d.mlp.experts.%d.gate_proj.bias", layer, e), k / 2, 0);
    }
    if (strstr(s->name, "down_proj_bias"))
        return value(tensor_of(l, "model.layers.%d.mlp.experts.%d.down_proj.bias", layer, i / h), i % h, 0);
    if (strstr(s->name, "gate_up_proj")) {
        size_t e = i / (h * 2 * f), in = i / (2 * f) % h, k = i % (2 * f);
        return value(tensor_of(l, k % 2 ? "model.layers.%d.mlp.experts.%d.up_proj.weight"
                                        : "model.layers.%d.mlp.experts.%d.gate_proj.weight", layer, e), k / 2, in);
    }
    return value(tensor_of(l, "model.layers.%d.mlp.experts.%d.down_proj.weight", layer, i / (f * h)), i % h, i / h % f);
}

/* ERNIE's query rows: pair j of a head is rows 2 j and 2 j + 1, which are rows j and j + 4 here. */
static float paired_value(const struct mt_tensor *t, size_t i)
{
    size_t cols = (size_t)t->shape[1], r = i / cols, head = r / 8, in = r % 8;
    return value(t, head * 8 + in / 2 + (in % 2) * 4, i % cols);
}

static float file_value(const struct mt_layout *l, const struct mt_stored *s, size_t i)
{
    const struct mt_tensor *t = &l->tensors[l->pieces[s->first_piece]];
    if (s->fused)
        return gpt_oss_value(l, s, i);
    if (cfg.family->rope_pairs && (strstr(s->name, "q_proj") || strstr(s->name, "k_proj")))
        return paired_value(t, i);
    return value(t, t->n_dims == 2 ? i / (size_t)t->shape[1] : i, t->n_dims == 2 ? i % (size_t)t->shape[1] : 0);
}

/* A model's file made by file_value(), element by element, with `extra` tensors of three elements. */
static void write_model(const struct mt_layout *l, const char *dir, const char *const *extra, size_t n_extra)
{
    size_t n = l->n_stored + n_extra, len = 0, data = 0;
    MT_FREED struct mt_st_decl *d = calloc(n, sizeof(*d));
    MT_FREED char *header = NULL;
    char path[128];
    for (size_t i = 0; i < l->n_stored; i++) {
        const struct mt_stored *s = &l->stored[i];
        d[i] = (struct mt_st_decl){.name = s->name, .dtype = s->is_f32 ? MT_ST_F32 : MT_ST_BF16, .n_dims = s->n_dims,
                                   .shape = {s->shape[0], s->shape[1], s->shape[2]}};
        assert_int_equal(mt_st_decl_bytes(&d[i]) / mt_st_dtype_size(d[i].dtype), s->n);
    }
    for (size_t i = 0; i < n_extra; i++)
        d[l->n_stored + i] = (struct mt_st_decl){.name = extra[i], .dtype = MT_ST_F32, .n_dims = 1, .shape = {3}};
    qsort(d, n, sizeof(*d), mt_st_file_order);
    for (size_t i = 0; i < n; i++)
        data += mt_st_decl_bytes(&d[i]);
    assert_int_equal(mt_st_build_header(&header, &len, d, n, NULL), 0);
    char *raw = calloc(1, len + data), *p = raw + len;
    memcpy(raw, header, len);
    for (size_t k = 0; k < n; k++) {
        const struct mt_stored *s = NULL;
        for (size_t i = 0; i < l->n_stored && !s; i++)
            s = strcmp(l->stored[i].name, d[k].name) ? NULL : &l->stored[i];
        for (size_t i = 0; i < (s ? s->n : 3); i++, p += mt_st_dtype_size(d[k].dtype)) {
            float v = s ? file_value(l, s, i) : 7;
            uint16_t b = mt_f32_to_bf16(v);
            memcpy(p, d[k].dtype == MT_ST_F32 ? (void *)&v : (void *)&b, mt_st_dtype_size(d[k].dtype));
        }
    }
    snprintf(path, sizeof(path), "%s/model.safetensors", dir);
    assert_int_equal(mt_write_file(path, raw, len + data, NULL), 0);
    free(raw);
}

struct planes_of {
    mt_plane_set *planes;
    int reads;
};

static int read_masters(void *ctx, const struct mt_values *v, void *dst, struct mt_err *err)
{
    struct planes_of *p = ctx;
    p->reads++;
    assert_int_equal(v->size, 4);
    return mt_tensor_read_masters(p->planes, v->t, v->first, v->n, dst, err);
}

/* From the file to planes, every element where it belongs; and from planes to what the file has, in any pieces. */
TEST(tensors_come_from_their_place_in_a_file_and_go_back_there)
{
    static const char *const models[] = {GPT_OSS, ERNIE, GLM};
    for (size_t m = 0; m < MT_ARRAY_LEN(models); m++) {
        struct mt_layout *l = layout_of(models[m], 2);
        struct mt_plane_set_params pp;
        struct planes_of p = {0};
        char dir[] = "/tmp/mt-stored-XXXXXX";
        float got[700];
        assert_non_null(mkdtemp(dir));
        assert_int_equal(mt_layout_plane_params(&pp, l, &mt_adamw, MT_BF16, NULL), 0);
        assert_int_equal(mt_plane_set_create(&p.planes, &pp, NULL), 0);
        free(pp.elems);
        write_model(l, dir, NULL, 0);
        MUST(mt_weights_load, l, p.planes, dir, NULL);
        for (size_t i = 0; i < l->n_tensors; i++) {
            const struct mt_tensor *t = &l->tensors[i];
            size_t cols = t->n_dims == 2 ? (size_t)t->shape[1] : 1;
            for (size_t at = 0, n; at < t->n; at += n) {
                n = MT_MIN(MT_ARRAY_LEN(got), t->n - at);
                assert_int_equal(mt_tensor_read_masters(p.planes, t, at, n, got, NULL), 0);
                for (size_t k = 0; k < n; k++)
                    if (got[k] != value(t, (at + k) / cols, (at + k) % cols))
                        fail_msg("%s: element %zu", t->name, at + k);
            }
        }
        struct mt_stored_writer w = {.l = l, .read = read_masters, .ctx = &p};
        for (size_t s = 0; s < l->n_stored; s++)
            for (size_t at = 0, n; at < l->stored[s].n; at += n) {
                n = MT_MIN(m ? MT_ARRAY_LEN(got) : 613 /* across experts */, l->stored[s].n - at);
                assert_int_equal(mt_stored_gather(&w, (struct mt_stored_part){s, 0, 4}, at, n, got, NULL), 0);
                for (size_t k = 0; k < n; k++)
                    if (got[k] != file_value(l, &l->stored[s], at + k))
                        fail_msg("%s: element %zu", l->stored[s].name, at + k);
            }
        mt_stored_writer_finish(&w);
        mt_plane_set_destroy(&p.planes);
        mt_layout_destroy(&l);
        mt_remove_tree(dir, NULL);
    }
}

TEST(fused_tensors_have_their_release_shape_and_name)
{
    MT_CLOSED_BY(mt_layout_destroy) struct mt_layout *l = layout_of(GPT_OSS, 3);
    static const struct {
        const char *name;
        int n_dims;
        int64_t shape[3];
    } want[] = {
        {"model.layers.1.mlp.experts.gate_up_proj", 3, {5, 16, 48}},
        {"model.layers.1.mlp.experts.gate_up_proj_bias", 2, {5, 48, 0}},
        {"model.layers.1.mlp.experts.down_proj", 3, {5, 24, 16}},
        {"model.layers.1.mlp.experts.down_proj_bias", 2, {5, 16, 0}},
        {"model.layers.1.mlp.router.weight", 2, {5, 16, 0}},
        {"model.layers.1.mlp.router.bias", 1, {5, 0, 0}},
        {"model.layers.1.self_attn.sinks", 1, {4, 0, 0}},
    };
    for (size_t i = 0; i < MT_ARRAY_LEN(want); i++) {
        const struct mt_stored *s = NULL;
        for (size_t k = 0; k < l->n_stored && !s; k++)
            s = strcmp(l->stored[k].name, want[i].name) ? NULL : &l->stored[k];
        if (!s)
            fail_msg("there is no %s", want[i].name);
        assert_int_equal(s->n_dims, want[i].n_dims);
        assert_memory_equal(s->shape, want[i].shape, sizeof(s->shape));
        assert_int_equal(s->n_pieces, strstr(s->name, "gate_up") ? 10 : strstr(s->name, "experts") ? 5 : 1);
    }
    mt_layout_destroy(&l);
    l = layout_of(ERNIE, 3);
    for (size_t k = 0; k < l->n_stored; k++) {
        bool select = strstr(l->stored[k].name, "moe_statics") != NULL;
        assert_int_equal(l->stored[k].is_f32, select || strstr(l->stored[k].name, "mlp.gate.weight"));
        if (select)
            assert_true(l->stored[k].n_dims == 2 && l->stored[k].shape[0] == 1 && l->stored[k].shape[1] == 5);
    }
}

TEST(loading_a_mixture_refuses_what_is_not_it)
{
    static const char *const beyond[] = {"model.layers.2.mlp.experts.0.up_proj.weight", "model.mtp_block.norm.weight"},
                             *const within[] = {"model.layers.1.mlp.experts.5.up_proj.weight"};
    struct mt_layout *l = layout_of(GLM, 2), *other;
    struct mt_plane_set_params pp;
    mt_plane_set *planes = NULL;
    struct mt_err err = {0};
    char dir[] = "/tmp/mt-stored-XXXXXX";
    assert_non_null(mkdtemp(dir));
    assert_int_equal(mt_layout_plane_params(&pp, l, &mt_adamw, MT_BF16, NULL), 0);
    assert_int_equal(mt_plane_set_create(&planes, &pp, NULL), 0);
    free(pp.elems);
    write_model(l, dir, beyond, 2); /* layers that predict further tokens */
    assert_int_equal(mt_weights_load(l, planes, dir, NULL, &err), 0);
    write_model(l, dir, within, 1);
    assert_int_equal(mt_weights_load(l, planes, dir, NULL, &err), -EINVAL);
    assert_non_null(strstr(err.msg, within[0]));
    other = layout_of(GPT_OSS, 2); /* its experts are in another form */
    write_model(other, dir, NULL, 0);
    mt_layout_destroy(&other);
    mt_layout_destroy(&l);
    l = layout_of("{\"architectures\": [\"OlmoeForCausalLM\"], " SHAPE ", \"num_experts\": 5, \"num_experts_per_tok\": 2}", 2);
    assert_int_equal(mt_weights_load(l, planes, dir, NULL, &err), -ENOENT);
    mt_layout_destroy(&l);
    mt_plane_set_destroy(&planes);
    mt_remove_tree(dir, NULL);
}
