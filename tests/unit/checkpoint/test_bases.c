/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a checkpoint names instead of holding comes back as the model's files have it: of every fixture's family, of a run by
 * blocks in its first phase and over an overlay, with files in bf16 and in f32 (there under shorter names), and of one that
 * freezes a layer, named or copied. Read as a model, resumed, and exported in both dtypes. Run with the folder of the fixtures.
 */
#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "../model/planes_of.h"
#include "base/fs.h"
#include "base/log.h"
#include "base/mem.h"
#include "checkpoint/checkpoint.h"
#include "checkpoint/overlay.h"
#include "model/ranges.h"
#include "model/stored.h"
#include "test.h"
#include "weights/packed_files.h"
#include "weights/weights.h"

static const char *fixtures;
static char tmp[32];

static void sound(const char *what, int rc, const struct mt_err *err)
{
    if (rc)
        fail_msg("%s: %s", what, err->msg);
}

/* --- models ---------------------------------------------------------------------------------------- */

/* Some exporters leave "model." out. */
static const char *shorter(const char *name, bool shortens)
{
    return name + (shortens && !strncmp(name, "model.", 6) ? 6 : 0);
}

/* Writes the fixture's tensors that are BF16 as F32, with bits that bf16 does not have. */
static void write_wide(const char *from, const char *to, bool shortens)
{
    struct mt_st_model st;
    struct mt_err err = {0};
    char path[400], *header = NULL;
    size_t len = 0, at, bytes = 0;
    sound(from, mt_st_open_dir(&st, from, &err), &err);
    struct mt_st_decl *d = mt_calloc(st.n_tensors, sizeof(*d));
    for (size_t i = 0; i < st.n_tensors; i++) {
        const struct mt_st_tensor *t = &st.tensors[i];
        d[i] = (struct mt_st_decl){.name = shorter(t->name, shortens), .dtype = t->dtype == MT_ST_BF16 ? MT_ST_F32 : t->dtype, .n_dims = t->n_dims};
        memcpy(d[i].shape, t->shape, sizeof(d[i].shape));
        bytes += mt_st_decl_bytes(&d[i]);
    }
    qsort(d, st.n_tensors, sizeof(*d), mt_st_file_order);
    sound(from, mt_st_build_header(&header, &len, d, st.n_tensors, &err), &err);
    char *raw = mt_calloc(len + bytes, 1);
    memcpy(raw, header, len);
    at = len;
    for (size_t i = 0; i < st.n_tensors; at += mt_st_decl_bytes(&d[i++])) {
        const struct mt_st_tensor *t = NULL;
        for (size_t k = 0; !t; k++)
            t = strcmp(shorter(st.tensors[k].name, shortens), d[i].name) ? NULL : &st.tensors[k];
        float *w = (float *)(void *)(raw + at);
        if (t->dtype != MT_ST_BF16) {
            sound(from, mt_st_read_raw(&st, t, 0, t->n_bytes, w, &err), &err);
            continue;
        }
        sound(from, mt_st_read_f32(&st, t, 0, t->n_elems, w, &err), &err);
        for (size_t k = 0; k < t->n_elems; k++)
            w[k] *= 1 + (float)(k % 97) * 0x1p-16f;
    }
    mt_path_printf(path, sizeof(path), "%s/model.safetensors", to);
    sound(path, mt_write_file(path, raw, at, &err), &err);
    free(raw);
    free(header);
    free(d);
    mt_st_close(&st);
}

/* A fixture as it is, or wide; the text's tensors of nested models have no other names. */
static void make_model(char dir[300], const char *fixture, bool wide)
{
    char path[400], *text, *at;
    size_t len;
    struct mt_err err = {0};
    mt_path_printf(dir, 300, "%s/%s", fixtures, fixture);
    if (!wide)
        return;
    mt_path_printf(path, sizeof(path), "%s/config.json", dir);
    sound(path, mt_read_file(path, &text, &len, &err), &err);
    while ((at = strstr(text, "\"bfloat16\"")))
        memcpy(at, "\"float32\" ", 10);
    mt_path_printf(path, sizeof(path), "%s/model", tmp);
    sound(path, mt_mkdir_p(path, &err), &err);
    write_wide(dir, path, !strstr(text, "text_config"));
    mt_path_printf(dir, 300, "%s", path);
    mt_path_printf(path, sizeof(path), "%s/config.json", dir);
    sound(path, mt_write_file(path, text, len, &err), &err);
    free(text);
}

/* --- runs ------------------------------------------------------------------------------------------ */

/* A run that has trained: its planes, and what they must be. */
struct rig {
    const char *name, *model, *weights; /* weights: the model's folder, or an overlay */
    struct mt_hf_config cfg;
    struct mt_st_model files;
    struct mt_layout *l;
    mt_plane_set *planes;
    uint64_t *sum;
    float **want; /* [n_tensors] masters; NULL: packed */
    uint64_t step;
};

static float *masters(const struct rig *r, mt_plane_set *planes, const struct mt_tensor *t)
{
    struct mt_err err = {0};
    float *w = mt_calloc(t->n, sizeof(*w));
    sound(r->name, mt_tensor_read_masters(planes, t, 0, t->n, w, &err), &err);
    return w;
}

/* Loads the weights and trains: every trained element becomes another one. */
static void start(struct rig *r, const struct mt_layout_params *p)
{
    struct mt_err err = {0};
    sound(r->name, mt_st_open_dir(&r->files, r->weights, &err), &err);
    sound(r->name, mt_hf_config_read(&r->cfg, r->model, &err), &err);
    sound(r->name, mt_layout_create(&r->l, &r->cfg, p, &err), &err);
    sound(r->name, mt_weights_mark_stored(r->l, r->weights, MT_PACKED_NONE, NULL, NULL, &err), &err);
    r->planes = planes_of(r->l, &mt_adamw, MT_BF16);
    r->sum = mt_calloc(r->l->n_tensors, sizeof(*r->sum));
    r->want = mt_calloc(r->l->n_tensors, sizeof(*r->want));
    const struct mt_base_sums base = {.sum = r->sum};
    sound(r->name, mt_weights_load(r->l, r->planes, r->weights, &base, &err), &err);
    for (size_t i = 0; i < r->l->n_tensors; i++) {
        const struct mt_tensor *t = &r->l->tensors[i];
        if (t->kind == MT_RANGE_PACKED)
            continue;
        r->want[i] = masters(r, r->planes, t);
        for (size_t k = 0; k < t->n && t->trainable; k++)
            r->want[i][k] = r->want[i][k] * 1.25f + (float)(k % 89 + 1) * 0x1.01p-9f;
        if (t->trainable)
            sound(r->name, mt_tensor_write_masters(r->planes, t, 0, t->n, r->want[i], &err), &err);
    }
}

static void finish(struct rig *r)
{
    for (size_t i = 0; i < r->l->n_tensors; i++)
        free(r->want[i]);
    free(r->want);
    free(r->sum);
    mt_plane_set_destroy(&r->planes);
    mt_layout_destroy(&r->l);
    mt_st_close(&r->files);
}

static void save(struct rig *r, bool named, const char *overlay, char checkpoint[300])
{
    struct mt_train_state st = {.step = ++r->step, .updates = r->step, .best_loss = 1};
    struct mt_err err = {0};
    st.config = strdup("[train]\nsteps = 4\n");
    st.blocks.on = r->l->by_blocks;
    st.blocks.overlay = overlay ? strdup(overlay) : NULL;
    assert_int_equal(mt_lineage_begin(&st.lineage, NULL), 0);
    const struct mt_checkpoint_save s = {.dir = tmp, .model_dir = r->model, .base_dir = r->weights, .base = &r->files, .layout = r->l,
                                         .planes = r->planes, .state = &st, .full = true, .named = named ? r->sum : NULL,
                                         .shard_bytes = 20000};
    sound(r->name, mt_checkpoint_save(&s, &err), &err);
    mt_train_state_finish(&st);
    mt_path_printf(checkpoint, 300, "%s/checkpoint-%d", tmp, (int)r->step);
}

/* --- what is compared ------------------------------------------------------------------------------ */

static float rounded(float w)
{
    uint16_t hi, lo;
    mt_master_split(w, &hi, &lo);
    return mt_master_join(hi, 0);
}

/* Every weight of a folder, in whatever order its files have it, is the run's; rounded where they are bf16. */
static void check_folder(const struct rig *r, const char *dir, bool f32)
{
    struct mt_st_model st;
    struct mt_layout *l = NULL;
    struct mt_err err = {0};
    struct mt_hf_config cfg;
    sound(r->name, mt_hf_config_read(&cfg, dir, &err), &err);
    sound(r->name, mt_layout_create(&l, &cfg, &(struct mt_layout_params){.cut = mt_cut_layer}, &err), &err);
    sound(dir, mt_st_open_dir(&st, dir, &err), &err);
    mt_plane_set *planes = planes_of(l, &mt_adamw, MT_BF16);
    sound(dir, mt_weights_load(l, planes, dir, NULL, &err), &err);
    for (size_t i = 0; i < l->n_tensors; i++) {
        const struct mt_tensor *t = &l->tensors[i];
        const struct mt_st_tensor *file = mt_stored_find(&st, l->stored[t->place.stored].name);
        if (!r->want[i])
            continue;
        if (f32 && !(file && file->dtype == MT_ST_F32))
            fail_msg("%s, %s: %s is not f32", r->name, dir, t->name);
        float *got = masters(r, planes, t);
        for (size_t k = 0; k < t->n; k++) {
            float want = file && file->dtype == MT_ST_F32 ? r->want[i][k] : rounded(r->want[i][k]);
            if (got[k] != want)
                fail_msg("%s, %s: %s, element %zu is %.9g, not %.9g", r->name, dir, t->name, k, (double)got[k], (double)want);
        }
        free(got);
    }
    mt_plane_set_destroy(&planes);
    mt_layout_destroy(&l);
    mt_st_close(&st);
}

/* The model's other tensors, and packed ones, are in the export byte for byte; those that became plain are there as such. */
static void check_rest(const struct rig *r, const char *dir)
{
    struct mt_st_model of, to;
    struct mt_err err = {0};
    sound(r->name, mt_st_open_dir(&of, r->model, &err), &err);
    sound(dir, mt_st_open_dir(&to, dir, &err), &err);
    for (size_t i = 0; i < of.n_tensors; i++) {
        const struct mt_st_tensor *a = &of.tensors[i], *b = mt_st_find(&to, a->name);
        bool piece = mt_packed_is_piece(a->name);
        if (!b && !piece)
            fail_msg("%s, %s: %s is missing", r->name, dir, a->name);
        if (!b || (!piece && !mt_stored_goes_along(r->l, a->name)))
            continue;
        char *x = mt_calloc(a->n_bytes, 1), *y = mt_calloc(a->n_bytes, 1);
        assert_true(b->dtype == a->dtype && b->n_bytes == a->n_bytes);
        sound(dir, mt_st_read_raw(&of, a, 0, a->n_bytes, x, &err) || mt_st_read_raw(&to, b, 0, a->n_bytes, y, &err), &err);
        assert_memory_equal(x, y, a->n_bytes);
        free(x);
        free(y);
    }
    mt_st_close(&of);
    mt_st_close(&to);
}

static void check_exports(const struct rig *r, const char *checkpoint)
{
    for (int f32 = 0; f32 < 2; f32++) {
        struct mt_err err = {0};
        char to[64];
        mt_path_printf(to, sizeof(to), "%s/export", tmp);
        const struct mt_export e = {.from = checkpoint, .to = to, .f32 = f32, .shard_bytes = 20000};
        sound(checkpoint, mt_checkpoint_export(&e, &err), &err);
        check_folder(r, to, f32);
        check_rest(r, to);
        sound(to, mt_remove_tree(to, &err), &err);
    }
}

/* Planes that are filled from the checkpoint and the files it names have the run's bits. */
static void check_resumed(const struct rig *r, const char *checkpoint)
{
    struct mt_train_state st = {.step = 0};
    struct mt_err err = {0};
    MT_CLOSED_BY(mt_plane_set_destroy) mt_plane_set *planes = planes_of(r->l, &mt_adamw, MT_BF16);
    sound(checkpoint, mt_checkpoint_read_state(checkpoint, &st, &err), &err);
    sound(checkpoint, mt_checkpoint_load(checkpoint, r->l, planes, &err), &err);
    uint64_t *sum = mt_calloc(r->l->n_tensors, sizeof(*sum));
    const struct mt_base_sums base = {.sum = sum, .want = st.frozen};
    sound(checkpoint, mt_weights_load_base(r->l, planes, r->weights, &base, &err), &err);
    for (size_t i = 0; i < r->l->n_tensors; i++) {
        float *got = r->want[i] ? masters(r, planes, &r->l->tensors[i]) : NULL;
        if (got && memcmp(got, r->want[i], r->l->tensors[i].n * sizeof(*got)))
            fail_msg("%s: %s comes back as another one", checkpoint, r->l->tensors[i].name);
        free(got);
    }
    free(sum);
    mt_train_state_finish(&st);
}

static void check_run(struct rig *r, bool named, const char *overlay)
{
    char checkpoint[300];
    struct mt_err err = {0};
    save(r, named, overlay, checkpoint);
    sound(checkpoint, mt_checkpoint_verify(checkpoint, &err), &err);
    sound(checkpoint, mt_checkpoint_verify_model(checkpoint, true, true, &err), &err);
    if (named)
        check_folder(r, checkpoint, false); /* read as a model: what eval and sample do */
    check_resumed(r, checkpoint);
    check_exports(r, checkpoint);
    sound(checkpoint, mt_remove_tree(checkpoint, &err), &err);
}

/* The first layer is trained, then, over an overlay, the last. */
static void by_blocks(const char *name, const char *model)
{
    struct rig first = {.name = name, .model = model, .weights = model}, last = {.name = name, .model = model};
    struct mt_layout_params p = {.cut = mt_cut_layer, .by_blocks = true, .end_layer = 1};
    struct mt_err err = {0};
    char *overlay = NULL, path[300];
    start(&first, &p);
    check_run(&first, true, NULL);
    const struct mt_overlay_write o = {.dir = tmp, .base_dir = model, .base = &first.files, .phase = 1,
                                       .layout = first.l, .planes = first.planes};
    sound(name, mt_overlay_write(&o, &overlay, &err), &err);
    mt_path_printf(path, sizeof(path), "%s/%s", tmp, overlay);
    last.weights = path;
    last.step = first.step;
    p.end_layer = first.l->cfg.n_layers;
    p.first_layer = p.end_layer - 1;
    start(&last, &p);
    check_run(&last, true, overlay);
    sound(path, mt_remove_tree(path, &err), &err);
    free(overlay);
    finish(&first);
    finish(&last);
}

/* The last layer is frozen: a checkpoint names it, or has a copy. */
static void with_a_frozen_layer(const char *name, const char *model)
{
    char glob[64];
    const char *freeze[] = {glob};
    struct mt_err err = {0};
    for (int named = 0; named < 2; named++) {
        struct rig r = {.name = name, .model = model, .weights = model};
        sound(name, mt_hf_config_read(&r.cfg, model, &err), &err);
        snprintf(glob, sizeof(glob), "*layers.%d.*", (int)r.cfg.n_layers - 1);
        start(&r, &(struct mt_layout_params){.cut = mt_cut_layer, .freeze = freeze, .n_freeze = 1});
        check_run(&r, named, NULL);
        finish(&r);
    }
}

static bool is_model(const char *name)
{
    char path[400];
    mt_path_printf(path, sizeof(path), "%s/%s/config.json", fixtures, name);
    bool config = *name != '.' && mt_path_exists(path);
    mt_path_printf(path, sizeof(path), "%s/%s/model.safetensors", fixtures, name);
    return config && mt_path_exists(path);
}

TEST(what_is_named_comes_back_in_every_family)
{
    size_t n = 0;
    DIR *d = opendir(fixtures);
    assert_non_null(d);
    for (struct dirent *e; (e = readdir(d));) {
        for (int wide = 0; wide < 2 && is_model(e->d_name); wide++, n++) {
            char model[300];
            make_model(model, e->d_name, wide);
            by_blocks(e->d_name, model);
            if (!wide)
                with_a_frozen_layer(e->d_name, model);
        }
    }
    closedir(d);
    assert_true(n > 100);
}

int main(int argc, char **argv)
{
    assert_int_equal(argc, 2);
    mt_path_printf(tmp, sizeof(tmp), "%s/mt-bases-XXXXXX", access("/dev/shm", W_OK) ? "/tmp" : "/dev/shm"); /* syncs take long */
    assert_non_null(mkdtemp(tmp));
    mt_log_set_level(MT_LOG_ERROR);
    fixtures = argv[1];
    int rc = test_run();
    mt_remove_tree(tmp, NULL);
    return rc;
}
