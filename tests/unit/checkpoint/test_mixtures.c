/* SPDX-License-Identifier: Apache-2.0 */
/* Checkpoints of mixtures of experts are in the form of their releases, and are what a run goes on from. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../model/planes_of.h"
#include "base/fs.h"
#include "base/mem.h"
#include "base/philox.h"
#include "checkpoint/checkpoint.h"
#include "model/ranges.h"
#include "test.h"
#include "weights/weights.h"

#define SHAPE                                                                                                          \
    "\"hidden_size\": 16, \"intermediate_size\": 24, \"num_hidden_layers\": 2, \"num_attention_heads\": 2, "           \
    "\"num_key_value_heads\": 1, \"head_dim\": 8, \"vocab_size\": 20, \"torch_dtype\": \"bfloat16\""
static const char gpt_oss[] =
    "{\"architectures\": [\"GptOssForCausalLM\"], " SHAPE ", \"num_local_experts\": 5, \"num_experts_per_tok\": 2, "
    "\"rope_scaling\": {\"rope_type\": \"yarn\", \"factor\": 2.0}}";
static const char glm[] =
    "{\"architectures\": [\"Glm4MoeForCausalLM\"], " SHAPE ", \"n_routed_experts\": 5, \"num_experts_per_tok\": 2, "
    "\"moe_intermediate_size\": 24, \"num_nextn_predict_layers\": 1}";

struct rig {
    struct mt_layout *l;
    mt_plane_set *planes;
    char dir[32], model[64], checkpoint[64];
};

static struct mt_hf_config cfg;

static float master(const struct mt_tensor *t, size_t i)
{
    return (float)mt_philox_uniform(7, (size_t)t->name[13] * 1000 + strlen(t->name), t->first + i) - 0.5f;
}

static struct mt_layout *lay_out(size_t group)
{
    struct mt_layout *l = NULL;
    struct mt_layout_params p = {.cut = mt_cut_layer};
    p.cut.expert_group = group;
    assert_int_equal(mt_layout_create(&l, &cfg, &p, NULL), 0);
    return l;
}

static void open_rig(struct rig *r, const char *json)
{
    char path[96];
    snprintf(r->dir, sizeof(r->dir), "/tmp/mt-mixtures-XXXXXX");
    assert_non_null(mkdtemp(r->dir));
    snprintf(r->model, sizeof(r->model), "%s/model", r->dir);
    snprintf(r->checkpoint, sizeof(r->checkpoint), "%s/checkpoint-4", r->dir);
    snprintf(path, sizeof(path), "%s/config.json", r->model);
    assert_int_equal(mt_mkdir_p(r->model, NULL), 0);
    assert_int_equal(mt_write_file(path, json, strlen(json), NULL), 0);
    assert_int_equal(mt_hf_config_read(&cfg, r->model, NULL), 0);
    r->l = lay_out(2);
    r->planes = planes_of(r->l, &mt_adamw, MT_BF16);
    for (size_t i = 0; i < r->l->n_tensors; i++) {
        const struct mt_tensor *t = &r->l->tensors[i];
        for (size_t k = 0; k < t->n; k++) {
            float w = master(t, k);
            assert_int_equal(mt_tensor_write_masters(r->planes, t, k, 1, &w, NULL), 0);
            for (int s = 0; s < 2 && t->trainable; s++)
                assert_int_equal(mt_planes_write(r->planes, t->unit, MT_PLANE_STATE + s, t->at + k, 1, &w, NULL), 0);
        }
    }
}

static void close_rig(struct rig *r)
{
    mt_plane_set_destroy(&r->planes);
    mt_layout_destroy(&r->l);
    mt_remove_tree(r->dir, NULL);
}

/* The model's own file: only what its decoder does not have is of interest. */
static void write_extra(const struct rig *r)
{
    struct mt_st_decl d[] = {{"model.layers.2.eh_proj.weight", MT_ST_BF16, 2, {2, 3}},
                             {"model.layers.2.mlp.gate.e_score_correction_bias", MT_ST_F32, 1, {3}},
                             {"model.layers.1.mlp.gate.weight", MT_ST_BF16, 2, {1, 2}}};
    static const unsigned char bytes[] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16,
                                          17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28};
    char *header = NULL, path[96], *raw;
    size_t len = 0;
    qsort(d, 3, sizeof(*d), mt_st_file_order);
    assert_int_equal(mt_st_build_header(&header, &len, d, 3, NULL), 0);
    raw = malloc(len + sizeof(bytes));
    memcpy(raw, header, len);
    memcpy(raw + len, bytes, sizeof(bytes));
    snprintf(path, sizeof(path), "%s/model.safetensors", r->model);
    assert_int_equal(mt_write_file(path, raw, len + sizeof(bytes), NULL), 0);
    free(raw);
    free(header);
}

static void save(struct rig *r)
{
    MT_CLOSED_BY(mt_train_state_finish) struct mt_train_state st = {.step = 4, .updates = 4, .best_loss = 1};
    st.config = strdup("[train]\nsteps = 4\n");
    assert_int_equal(mt_lineage_begin(&st.lineage, NULL), 0);
    MT_CLOSED_BY(mt_st_close) struct mt_st_model files = {0};
    bool has = !mt_st_open_dir(&files, r->model, NULL);
    struct mt_checkpoint_save s = {.dir = r->dir, .model_dir = r->model, .base = has ? &files : NULL, .layout = r->l,
                                   .planes = r->planes, .state = &st, .full = true, .shard_bytes = 5000};
    MUST(mt_checkpoint_save, &s);
}

/* Weights of a folder, loaded anew, are the masters, or what bf16 leaves of them where the file is bf16. */
static void check_folder(const struct rig *r, const char *dir, bool f32)
{
    MT_CLOSED_BY(mt_plane_set_destroy) mt_plane_set *planes = planes_of(r->l, &mt_adamw, MT_BF16);
    MUST(mt_weights_load, r->l, planes, dir, NULL);
    for (size_t i = 0; i < r->l->n_tensors; i++) {
        const struct mt_tensor *t = &r->l->tensors[i];
        bool exact = f32 || r->l->stored[t->place.stored].is_f32;
        for (size_t k = 0; k < t->n; k++) {
            float got, want = master(t, k);
            uint16_t hi, lo;
            assert_int_equal(mt_tensor_read_masters(planes, t, k, 1, &got, NULL), 0);
            mt_master_split(want, &hi, &lo);
            if (got != (exact ? want : mt_master_join(hi, 0)))
                fail_msg("%s: %s, element %zu is %g, not %g", dir, t->name, k, (double)got, (double)want);
        }
    }
}

TEST(a_checkpoint_has_the_release_s_tensors_and_comes_back)
{
    static const char *const models[] = {gpt_oss, glm};
    for (size_t m = 0; m < 2; m++) {
        struct rig r;
        struct mt_st_model st;
        char to[64];
        open_rig(&r, models[m]);
        save(&r);
        assert_int_equal(mt_checkpoint_verify(r.checkpoint, NULL), 0);
        assert_int_equal(mt_st_open_dir(&st, r.checkpoint, NULL), 0);
        assert_int_equal(st.n_tensors, r.l->n_stored);
        for (size_t i = 0; i < r.l->n_stored; i++) {
            const struct mt_st_tensor *t = mt_st_find(&st, r.l->stored[i].name);
            assert_non_null(t);
            assert_int_equal(t->dtype, r.l->stored[i].is_f32 ? MT_ST_F32 : MT_ST_BF16);
            assert_int_equal(t->n_dims, r.l->stored[i].n_dims);
            assert_memory_equal(t->shape, r.l->stored[i].shape, (size_t)t->n_dims * sizeof(int64_t));
        }
        mt_st_close(&st);
        check_folder(&r, r.checkpoint, false);
        for (int f32 = 0; f32 < 2; f32++) {
            snprintf(to, sizeof(to), "%s/export-%d", r.dir, f32);
            struct mt_export e = {.from = r.checkpoint, .to = to, .f32 = f32, .shard_bytes = 5000};
            MUST(mt_checkpoint_export, &e);
            check_folder(&r, to, f32);
        }
        close_rig(&r);
    }
}

/* In other groups of experts, too: masters and moments go by tensor. */
TEST(a_run_goes_on_from_it_in_any_groups)
{
    for (size_t group = 1; group <= 5; group += 2) {
        struct rig r;
        open_rig(&r, glm);
        save(&r);
        struct mt_layout *l = lay_out(group);
        mt_plane_set *planes = planes_of(l, &mt_adamw, MT_BF16);
        MUST(mt_checkpoint_load, r.checkpoint, l, planes);
        for (size_t i = 0; i < l->n_tensors; i++) {
            const struct mt_tensor *t = &l->tensors[i], *was = mt_layout_find(r.l, t->name);
            for (size_t k = 0; k < t->n; k++) {
                float got;
                assert_int_equal(mt_tensor_read_masters(planes, t, k, 1, &got, NULL), 0);
                assert_true(got == master(was, k));
                for (int s = 0; s < 2 && t->trainable; s++) {
                    assert_int_equal(mt_planes_read(planes, t->unit, MT_PLANE_STATE + s, t->at + k, 1, &got, NULL), 0);
                    assert_true(got == master(was, k));
                }
            }
        }
        mt_plane_set_destroy(&planes);
        mt_layout_destroy(&l);
        close_rig(&r);
    }
}

TEST(what_predicts_further_tokens_is_copied)
{
    struct rig r;
    struct mt_st_model from, to;
    char path[64];
    open_rig(&r, glm);
    write_extra(&r);
    save(&r);
    snprintf(path, sizeof(path), "%s/export", r.dir);
    struct mt_export e = {.from = r.checkpoint, .to = path, .f32 = true, .shard_bytes = 5000};
    assert_int_equal(mt_checkpoint_export(&e, NULL), 0);
    assert_int_equal(mt_st_open_dir(&from, r.model, NULL), 0);
    for (int exported = 0; exported < 2; exported++) {
        assert_int_equal(mt_st_open_dir(&to, exported ? path : r.checkpoint, NULL), 0);
        assert_int_equal(to.n_tensors, r.l->n_stored + 2);
        for (size_t i = 0; i < from.n_tensors; i++) {
            const struct mt_st_tensor *a = &from.tensors[i], *b = mt_st_find(&to, a->name);
            unsigned char x[16], y[16];
            if (strstr(a->name, "layers.1."))
                continue;
            assert_true(b && b->dtype == a->dtype && b->n_bytes == a->n_bytes && b->n_dims == a->n_dims);
            assert_int_equal(mt_st_read_raw(&from, a, 0, a->n_bytes, x, NULL), 0);
            assert_int_equal(mt_st_read_raw(&to, b, 0, b->n_bytes, y, NULL), 0);
            assert_memory_equal(x, y, a->n_bytes);
        }
        mt_st_close(&to);
    }
    mt_st_close(&from);
    check_folder(&r, r.checkpoint, false); /* which is a model to start from */
    close_rig(&r);
}
