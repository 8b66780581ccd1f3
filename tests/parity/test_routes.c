/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The experts that routers choose, token by token, against what transformers chose: of every mixture among the fixtures,
 * in the rows of their first step. Run with the folder of the fixtures.
 */
#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/json.h"
#include "base/mem.h"
#include "kinds/kinds.h"
#include "model/moe.h"
#include "model/part.h"
#include "model/ranges.h"
#include "test.h"
#include "weights/weights.h"

enum { MICRO = 2, PATH = 512 };

static const char *fixtures;

static void sound(int rc, const struct mt_err *err)
{
    if (rc)
        fail_msg("%s", err->msg);
}

/* A model on the cpu device, and buffers for one layer of a step. */
struct rig {
    struct mt_hf_config cfg;
    struct mt_layout *layout;
    mt_plane_set *planes;
    mt_device *dev;
    mt_model *model;
    struct mt_batch micro[MICRO];
    size_t rows[MICRO]; /* of the step's samples */
    void *x[MICRO];     /* hidden states */
    struct mt_unit_run run;
};

/* Samples [first, first + n) of the data, document by document. */
static void fill_batch(struct mt_batch *b, const cJSON *data, int first, int n)
{
    struct mt_err err = {0};
    uint32_t ids[PATH];
    sound(mt_batch_init(b, PATH, (size_t)n, &err), &err);
    for (int i = first; i < first + n; i++) {
        const cJSON *tokens = mt_json_get(cJSON_GetArrayItem(data, i), "input_ids"), *t;
        size_t len = 0;
        cJSON_ArrayForEach(t, tokens)
            ids[len++] = (uint32_t)t->valueint;
        sound(mt_batch_add(b, ids, NULL, len, i, &err), &err);
    }
    mt_batch_seal(b);
}

static void *take(struct rig *r, size_t bytes)
{
    struct mt_err err = {0};
    void *p = NULL;
    sound(mt_device_alloc(r->dev, bytes, "test", &p, &err), &err);
    return p;
}

static void load_weights(struct rig *r, const char *dir)
{
    struct mt_err err = {0};
    struct mt_plane_set_params p;
    sound(mt_hf_config_read(&r->cfg, dir, &err), &err);
    struct mt_layout_params lp = {.decay_embeddings = true, .cut = mt_cut_layer};
    sound(mt_layout_create(&r->layout, &r->cfg, &lp, &err), &err);
    sound(mt_layout_plane_params(&p, r->layout, NULL, MT_F32, &err), &err);
    sound(mt_plane_set_create(&r->planes, &p, &err), &err);
    free(p.elems);
    sound(mt_weights_load(r->layout, r->planes, dir, NULL, &err), &err);
}

static void make_model(struct rig *r)
{
    struct mt_err err = {0};
    struct mt_device_params dp = {.kind = "cpu", .budget_bytes = 64 << 20, .n_threads = 1};
    sound(mt_device_create(&r->dev, &dp, &err), &err);
    struct mt_model_params mp = {.layout = r->layout, .dtype = MT_F32, .max_tokens = PATH, .max_docs = 8, .max_len = PATH,
                                 .max_micro = MICRO, .logits_chunk = 64};
    sound(mt_model_create(&r->model, r->dev, &mp, &err), &err);
    sound(mt_model_load_constants(r->model, r->planes, &err), &err);
    sound(mt_model_upload(r->model, &(struct mt_model_step){.micro = r->micro, .n = MICRO}, &err), &err);
    static const enum mt_role of_step[] = {MT_ROLE_ROWS, MT_ROLE_SUM, MT_ROLE_ROUTING, MT_ROLE_RESIDUAL, MT_ROLE_ROUNDED};
    for (size_t i = 0; i < sizeof(of_step) / sizeof(of_step[0]); i++)
        r->run.at[of_step[i]] = take(r, mt_layout_value_bytes(r->layout, of_step[i], MT_F32, PATH, MICRO * PATH));
    for (int m = 0; m < MICRO; m++)
        r->x[m] = take(r, mt_model_boundary_bytes(r->model));
}

/* The unit's weights on the device; freed by the caller. */
static float *weights_of(struct rig *r, size_t unit)
{
    struct mt_err err = {0};
    const struct mt_unit *u = &r->layout->units[unit];
    float *w = take(r, MT_MAX(u->n_elems, 64) * sizeof(float));
    memset(w, 0, u->n_elems * sizeof(float));
    for (size_t t = u->first_tensor; t < u->first_tensor + u->n_tensors; t++) {
        const struct mt_tensor *ten = &r->layout->tensors[t];
        sound(mt_tensor_read_masters(r->planes, ten, 0, ten->n, w + ten->first, &err), &err);
    }
    return w;
}

static void run_unit(struct rig *r, size_t unit)
{
    struct mt_err err = {0};
    const struct mt_unit *u = &r->layout->units[unit];
    const struct mt_part_kind *last = r->layout->parts[u->first_part + u->n_parts - 1].kind;
    float *w = weights_of(r, unit);
    for (int m = 0; m < (u->per_step ? 1 : MICRO); m++) {
        r->run.unit = unit;
        r->run.mb = (size_t)m;
        r->run.at[unit ? MT_ROLE_WEIGHTS : MT_ROLE_TABLE] = w;
        r->run.at[MT_ROLE_X] = unit ? r->x[m] : NULL;
        r->run.at[MT_ROLE_Y] = last == &mt_part_router ? NULL : r->x[m];
        sound(mt_model_forward(r->model, &r->run, &err), &err);
    }
    sound(mt_device_sync(r->dev, &err), &err);
    mt_device_free(r->dev, w);
}

static int ascending(const void *a, const void *b)
{
    return (int)*(const uint16_t *)a - (int)*(const uint16_t *)b;
}

/* want: of each token of the step, its experts in ascending order. */
static void compare_layer(struct rig *r, const char *family, int layer, const cJSON *want)
{
    struct mt_routing t;
    size_t k = (size_t)r->cfg.moe.top_k;
    int row = 0;
    mt_routing_layout(&t, &r->cfg.moe, MICRO * PATH, r->run.at[MT_ROLE_ROUTING]);
    for (size_t m = 0; m < MICRO; m++)
        for (size_t i = 0; i < r->micro[m].n_tokens; i++, row++) {
            uint16_t *ids = &t.ids[(m * PATH + i) * k];
            const cJSON *chosen = cJSON_GetArrayItem(want, row);
            assert_int_equal(cJSON_GetArraySize(chosen), k);
            qsort(ids, k, sizeof(*ids), ascending);
            for (size_t e = 0; e < k; e++)
                if (ids[e] != cJSON_GetArrayItem(chosen, (int)e)->valueint)
                    fail_msg("%s: layer %d sends token %d to expert %d, transformers to %d", family, layer, row, ids[e],
                             cJSON_GetArrayItem(chosen, (int)e)->valueint);
        }
    assert_int_equal(row, cJSON_GetArraySize(want));
}

static void check_family(const char *family, const cJSON *expected, const cJSON *data)
{
    char dir[PATH];
    struct rig r = {.run.mb = 0};
    const cJSON *routers = mt_json_get(expected, "experts");
    int samples = mt_json_get(expected, "rows")->valueint, compared = 0;
    snprintf(dir, sizeof(dir), "%s/%s", fixtures, family);
    load_weights(&r, dir);
    for (int m = 0; m < MICRO; m++)
        fill_batch(&r.micro[m], data, m * samples / MICRO, samples / MICRO);
    make_model(&r);
    for (size_t u = 0; r.layout->units[u].kind != MT_UNIT_HEAD; u++) {
        const struct mt_unit *unit = &r.layout->units[u];
        char key[16];
        run_unit(&r, u);
        if (r.layout->parts[unit->first_part].kind != &mt_part_lists)
            continue;
        snprintf(key, sizeof(key), "%d", unit->layer);
        if (!mt_json_get(routers, key))
            fail_msg("%s: nothing is recorded of layer %s", family, key);
        compare_layer(&r, family, unit->layer, mt_json_get(routers, key));
        compared++;
    }
    assert_true(compared && compared == cJSON_GetArraySize(routers));
    mt_model_destroy(&r.model);
    mt_device_destroy(&r.dev);
    mt_plane_set_destroy(&r.planes);
    mt_layout_destroy(&r.layout);
    for (int m = 0; m < MICRO; m++)
        mt_batch_finish(&r.micro[m]);
}

TEST(routers_choose_what_transformers_chooses)
{
    struct mt_err err = {0};
    cJSON *data = NULL;
    char path[PATH];
    int families = 0;
    snprintf(path, sizeof(path), "%s/data.jsonl", fixtures);
    sound(mt_json_read_lines(&data, path, &err), &err);
    DIR *d = opendir(fixtures);
    assert_non_null(d);
    for (const struct dirent *e; (e = readdir(d));) {
        cJSON *expected = NULL;
        struct mt_hf_config cfg;
        snprintf(path, sizeof(path), "%s/%.100s", fixtures, e->d_name);
        if (e->d_name[0] == '.' || mt_hf_config_read(&cfg, path, NULL) || !cfg.moe.n_experts)
            continue;
        snprintf(path, sizeof(path), "%s/%.100s/expected.json", fixtures, e->d_name);
        sound(mt_json_read_file(&expected, path, MT_ERR_INPUT, &err), &err);
        check_family(e->d_name, expected, data);
        cJSON_Delete(expected);
        families++;
    }
    closedir(d);
    cJSON_Delete(data);
    assert_int_equal(families, 30);
}

int main(int argc, char **argv)
{
    fixtures = argc > 1 ? argv[1] : ".";
    return test_run();
}
