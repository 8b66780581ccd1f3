/* SPDX-License-Identifier: Apache-2.0 */
#include <fcntl.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/dtype.h"
#include "base/fs.h"
#include "base/json.h"
#include "base/log.h"
#include "base/mem.h"
#include "base/strbuf.h"
#include "checkpoint/checkpoint.h"
#include "checkpoint/hf_dir.h"
#include "checkpoint/manifest.h"
#include "checkpoint/seal.h"
#include "hf/safetensors.h"
#include "model/ranges.h"

static int damaged(struct mt_err *err, const char *path, const char *what)
{
    return mt_fail(err, MT_ERR_CHECKPOINT, -EBADMSG, "%s: %s", path, what);
}

/* Names of a damaged file's tensors whose sums are not those that were written: "a, b and 3 more". */
static int name_damaged(const char *path, const struct mt_st_model *m, const cJSON *sums,
                        struct mt_str *names, struct mt_err *err)
{
    int n = 0;
    for (const cJSON *s = sums ? sums->child : NULL; s; s = s->next) {
        const struct mt_st_tensor *t = mt_st_find(m, s->string);
        uint64_t sum, size;
        char have[MT_SUM_TEXT];
        if (!t)
            continue; /* its name is damaged: the header */
        int rc = mt_sum_file(path, t->offset, t->n_bytes, &sum, &size, err);
        if (rc)
            return rc;
        mt_sum_format(have, sum);
        if (cJSON_IsString(s) && !strcmp(s->valuestring, have))
            continue;
        if (n++ < 3)
            mt_str_printf(names, "%s%s", names->len ? ", " : "", s->string);
    }
    if (n > 3)
        mt_str_printf(names, " and %d more", n - 3);
    return 0;
}

/* What of a file is not as it was written. */
static int blame(const char *path, const cJSON *file, const char *what, struct mt_err *err)
{
    struct mt_st_model m;
    struct mt_err inner = {0};
    struct mt_str names = {0};
    size_t n = strlen(path);
    if (n < 12 || strcmp(path + n - 12, ".safetensors"))
        return damaged(err, path, what);
    if (mt_st_open_file(&m, path, &inner))
        return mt_fail(err, MT_ERR_CHECKPOINT, -EBADMSG, "%s: %s: %s", path, what, inner.msg);
    int rc = name_damaged(path, &m, mt_json_get(file, "tensors"), &names, err);
    mt_st_close(&m);
    if (!rc)
        rc = mt_fail(err, MT_ERR_CHECKPOINT, -EBADMSG, "%s: %s: damaged is %s%s", path, what,
                     names.p ? "tensor " : "its header", names.p ? names.p : "");
    mt_str_finish(&names);
    return rc;
}

static int verify_file(const char *dir, const cJSON *f, struct mt_err *err)
{
    const cJSON *size = mt_json_get(f, "size"), *sum = mt_json_get(f, "xxh3");
    char path[4096], what[128], have[MT_SUM_TEXT];
    uint64_t have_sum, have_size;
    snprintf(path, sizeof(path), "%.3000s/%.1000s", dir, f->string);
    int rc = mt_sum_file(path, 0, UINT64_MAX, &have_sum, &have_size, err);
    if (rc)
        return rc;
    mt_sum_format(have, have_sum);
    if (!cJSON_IsNumber(size) || (double)have_size != size->valuedouble) {
        snprintf(what, sizeof(what), "%llu bytes, %.0f were written", (unsigned long long)have_size,
                 size ? size->valuedouble : 0);
        return blame(path, f, what, err);
    }
    if (!cJSON_IsString(sum) || strcmp(sum->valuestring, have))
        return blame(path, f, "its checksum is wrong", err);
    return 0;
}

static int verify_files(const char *dir, const cJSON *files, struct mt_err *err)
{
    int rc = 0;
    for (const cJSON *f = files->child; f && !rc; f = f->next)
        rc = verify_file(dir, f, err);
    return rc;
}

/* Names that every checkpoint has: one that its list leaves out would not be missed. */
static int check_list(const char *dir, const cJSON *files, bool full, struct mt_err *err)
{
    char name[64];
    size_t n = 0, states = 0;
    for (const cJSON *f = files ? files->child : NULL; f; f = f->next)
        states += !strncmp(f->string, "megatrain/state-", 16);
    for (; full && n < states; n++) {
        snprintf(name, sizeof(name), "megatrain/state-%05zu.safetensors", n);
        if (!mt_json_get(files, name))
            break;
    }
    bool weights = mt_json_get(files, "model.safetensors") || mt_json_get(files, "model.safetensors.index.json");
    if (!weights || !mt_json_get(files, "config.json") || (full && (!states || n != states)))
        return damaged(err, dir, "its list of files is not complete");
    return 0;
}

static int verify_list(const char *dir, const cJSON *sealed, bool full, struct mt_err *err)
{
    const cJSON *files = mt_json_get(sealed, "files");
    int rc = cJSON_IsObject(files) && files->child ? 0 : damaged(err, dir, "its state.json lists no files");
    return rc ? rc : check_list(dir, files, full, err);
}

int mt_checkpoint_verify(const char *dir, struct mt_err *err)
{
    cJSON *sealed = NULL;
    char sum[MT_SUM_TEXT];
    bool full;
    int rc = mt_seal_read(dir, &sealed, sum, &full, err);
    if (!rc)
        rc = verify_list(dir, sealed, full, err);
    if (!rc)
        rc = verify_files(dir, mt_json_get(sealed, "files"), err);
    if (!rc && full) {
        struct mt_train_state st;
        rc = mt_train_state_from_json(&st, sealed, dir, err);
        if (!rc)
            mt_train_state_finish(&st);
    }
    cJSON_Delete(sealed);
    return rc;
}

bool mt_checkpoint_is_whole(const char *dir, struct mt_err *err)
{
    cJSON *sealed = NULL;
    char sum[MT_SUM_TEXT], path[4096];
    bool full;
    int rc = mt_seal_read(dir, &sealed, sum, &full, err);
    if (!rc)
        rc = verify_list(dir, sealed, full, err);
    const cJSON *files = rc ? NULL : mt_json_get(sealed, "files");
    for (const cJSON *f = files ? files->child : NULL; f && !rc; f = f->next) {
        const cJSON *size = mt_json_get(f, "size");
        struct stat st;
        snprintf(path, sizeof(path), "%.3000s/%.1000s", dir, f->string);
        if (stat(path, &st) || !cJSON_IsNumber(size) || (double)st.st_size != size->valuedouble)
            rc = damaged(err, path, "is missing or has another size than was written");
    }
    cJSON_Delete(sealed);
    return !rc;
}

/* --- the newest ----------------------------------------------------------------------------------- */

struct candidate {
    char path[4096];
    struct mt_checkpoint_id id;
    bool known;    /* id is read */
    bool given_up; /* another of the folder went on from before it */
};

/* Bytes that are wrong, against a file that cannot be read now. */
static bool is_damage(int rc)
{
    return rc == -EBADMSG || rc == -ENOENT || rc == -ENOTDIR || rc == -EISDIR || rc == -EINVAL;
}

static int no_good(const char *dir, bool weights, struct mt_err *err)
{
    return mt_fail(err, MT_ERR_CHECKPOINT, -EBADMSG,
                   "%s has checkpoints and none can be resumed (%s): name another folder with --resume=DIR, or start "
                   "anew with --force, which sets them aside",
                   dir, weights ? "there are weights alone: they can be model.path" : "see the warnings above");
}

/* What is newest comes first; what was given up comes last. */
static int compare_candidates(const void *a, const void *b)
{
    const struct candidate *x = *(struct candidate *const *)a, *y = *(struct candidate *const *)b;
    if (x->given_up != y->given_up)
        return x->given_up ? 1 : -1;
    return (x->id.step < y->id.step) - (x->id.step > y->id.step);
}

static int identify(struct candidate *c, const char *dir, uint64_t step, bool pass, bool *weights, struct mt_err *err)
{
    struct mt_err why = {0};
    snprintf(c->path, sizeof(c->path), "%.4000s/checkpoint-%llu", dir, (unsigned long long)step);
    int rc = mt_checkpoint_identify(c->path, &c->id, &why);
    if (!rc && c->id.step != step) {
        mt_warn("passing over %s: it is of step %llu", c->path, (unsigned long long)c->id.step);
    } else if (!rc && !c->id.full) {
        *weights = true;
    } else if (!rc) {
        c->known = true;
    } else if (pass || is_damage(rc)) {
        mt_warn("passing over %s: %s", c->path, why.msg);
        rc = 0;
    } else if (err) {
        *err = why;
    }
    c->id.step = step;
    return rc;
}

/* *path: the first that verifies. */
static int first_good(struct candidate **list, size_t n, bool pass, char **path, struct mt_err *err)
{
    for (size_t i = 0; i < n; i++) {
        struct mt_err why = {0};
        int rc = list[i]->known ? mt_checkpoint_verify(list[i]->path, &why) : -EBADMSG;
        if (!rc) {
            *path = strdup(list[i]->path);
            return *path ? 0 : mt_fail_nomem(err, list[i]->path, strlen(list[i]->path));
        }
        if (!pass && !is_damage(rc))
            return mt_fail(err, MT_ERR_CHECKPOINT, rc,
                           "%s cannot be read (%s), which says nothing about its bytes: try again, name another with "
                           "--resume=DIR, or pass over it with --force",
                           list[i]->path, why.msg);
        if (list[i]->known)
            mt_warn("passing over %s: %s", list[i]->path, why.msg);
    }
    return 0;
}

int mt_checkpoint_find_newest(const char *dir, bool pass, char **path, struct mt_err *err)
{
    uint64_t *steps;
    size_t n;
    bool weights = false;
    *path = NULL;
    int rc = mt_checkpoint_list(dir, &steps, &n, err);
    if (rc || !n)
        return rc;
    struct candidate *c = mt_calloc(n, sizeof(*c)), **order = mt_calloc(n, sizeof(*order));
    rc = c && order ? 0 : mt_fail_nomem(err, dir, n * sizeof(*c));
    for (size_t i = 0; i < n && !rc; i++) {
        order[i] = &c[i];
        rc = identify(&c[i], dir, steps[i], pass, &weights, err);
    }
    for (size_t i = 0; i < n && !rc; i++)
        for (size_t k = 0; k < n && c[i].known; k++)
            c[i].given_up |= c[k].known && mt_lineage_gave_up(&c[k].id.lineage, c[i].id.lineage.run, c[i].id.step);
    if (!rc) {
        qsort(order, n, sizeof(*order), compare_candidates);
        rc = first_good(order, n, pass, path, err);
    }
    if (!rc && !*path && !pass)
        rc = no_good(dir, weights, err);
    for (size_t i = 0; i < n && c; i++)
        mt_checkpoint_id_finish(&c[i].id);
    free(c);
    free(order);
    free(steps);
    return rc;
}

int mt_checkpoint_read_state(const char *dir, struct mt_train_state *out, struct mt_err *err)
{
    cJSON *state = NULL;
    char sum[MT_SUM_TEXT];
    bool full;
    int rc = mt_seal_read(dir, &state, sum, &full, err);
    if (!rc && !full)
        rc = mt_fail(err, MT_ERR_CHECKPOINT, -ENOENT,
                     "%s holds weights alone and no training state: it cannot be resumed, but it can be model.path", dir);
    if (!rc)
        rc = mt_train_state_from_json(out, state, dir, err);
    if (!rc)
        memcpy(out->sum, sum, sizeof(sum));
    cJSON_Delete(state);
    return rc;
}

/* A tensor of a state file, as it is read and where it goes. */
struct part {
    const struct mt_tensor *t;
    const struct mt_plane_desc *state; /* NULL: the FP32 master */
    enum mt_plane_kind kind;
};

static int load_piece(const struct mt_st_model *st, const struct mt_st_tensor *src, const struct part *p, size_t at,
                      size_t n, float *buf, mt_plane_set *planes, struct mt_err *err)
{
    size_t size = mt_st_dtype_size(src->dtype);
    int rc = mt_st_read_raw(st, src, at * size, n * size, buf, err);
    if (rc)
        return rc;
    return p->state ? mt_planes_write(planes, p->t->unit, p->kind, p->t->at + at, n, buf, err)
                    : mt_tensor_write_masters(planes, p->t, at, n, buf, err);
}

static int load_part(const struct mt_st_model *st, const struct part *p, float *buf, size_t piece, mt_plane_set *planes,
                     struct mt_err *err)
{
    char name[192];
    enum mt_dtype dtype = p->state ? p->state->dtype : MT_F32;
    snprintf(name, sizeof(name), "%s.%s", p->t->name, p->state ? p->state->saved_as : "master");
    const struct mt_st_tensor *src = mt_st_find(st, name);
    if (!src || src->dtype != (dtype == MT_F32 ? MT_ST_F32 : MT_ST_BF16) || src->n_elems != p->t->n)
        return mt_fail(err, MT_ERR_CHECKPOINT, -EBADMSG, "%s: tensor \"%s\" is missing or has "
                       "another shape or dtype than the model and its optimizer", st->files[0].path, name);
    int rc = 0;
    for (size_t at = 0; at < p->t->n && !rc; at += piece)
        rc = load_piece(st, src, p, at, MT_MIN(piece, p->t->n - at), buf, planes, err);
    return rc;
}

static int load_tensor(const struct mt_st_model *st, const struct mt_tensor *t, float *buf, size_t piece,
                       mt_plane_set *planes, struct mt_err *err)
{
    int rc = load_part(st, &(struct part){.t = t}, buf, piece, planes, err);
    for (int k = 0; k < MT_N_PLANES && t->trainable && !rc; k++) {
        struct part p = {t, mt_plane_desc_of(planes, (enum mt_plane_kind)k), (enum mt_plane_kind)k};
        if (p.state->saved_as)
            rc = load_part(st, &p, buf, piece, planes, err);
    }
    return rc;
}

int mt_checkpoint_load(const char *dir, const struct mt_layout *l, mt_plane_set *planes,
                       struct mt_err *err)
{
    enum { PIECE = 1 << 20 };
    float *buf = mt_calloc(PIECE, sizeof(float));
    char path[4096];
    int rc = buf ? 0 : mt_fail_nomem(err, "loading a checkpoint", PIECE * sizeof(float));
    for (size_t u = 0; u < l->n_units && !rc; u++) {
        struct mt_st_model st;
        snprintf(path, sizeof(path), "%.4000s/megatrain/state-%05d.safetensors", dir, l->units[u].block);
        rc = mt_st_open_file(&st, path, err);
        if (rc) {
            if (err)
                err->kind = MT_ERR_CHECKPOINT;
            break;
        }
        for (size_t i = 0; i < l->units[u].n_tensors && !rc; i++)
            rc = load_tensor(&st, &l->tensors[l->units[u].first_tensor + i], buf, PIECE, planes, err);
        mt_st_close(&st);
    }
    free(buf);
    return rc ? rc : mt_planes_settle(planes, err);
}

int mt_checkpoint_lock(const char *dir, int *fd, struct mt_err *err)
{
    char path[4096], pid[32] = "";
    snprintf(path, sizeof(path), "%.4000s/.lock", dir);
    int f = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    if (f < 0)
        return mt_fail(err, MT_ERR_RUNTIME, -errno, "cannot create %s: %s", path, strerror(errno));
    int rc = flock(f, LOCK_EX | LOCK_NB) ? -errno : 0;
    if (rc && rc != -EWOULDBLOCK)
        mt_warn("%s cannot be locked (%s): see to it that no other run writes to this folder", path, strerror(-rc));
    if (rc == -EWOULDBLOCK) {
        ssize_t n = read(f, pid, sizeof(pid) - 1);
        close(f);
        pid[n > 0 ? strcspn(pid, "\n") : 0] = 0;
        return mt_fail(err, MT_ERR_USAGE, -EBUSY,
                       "%s is in use by another run (process %s): choose another checkpoint.dir", dir,
                       pid[0] ? pid : "unknown");
    }
    int n = snprintf(pid, sizeof(pid), "%d\n", (int)getpid());
    if (ftruncate(f, 0) || pwrite(f, pid, (size_t)n, 0) != n)
        mt_debug("the lock file does not name its holder");
    *fd = f;
    return 0;
}

struct exporter {
    struct mt_st_model weights, *states;
    size_t n_states;
    bool f32;
};

/* f32: the master where there is one, else the weight itself, which a bf16 one is exactly. */
static int export_source(void *ctx, size_t i, size_t first, size_t n, void *dst, struct mt_err *err)
{
    struct exporter *x = ctx;
    const struct mt_st_tensor *t = &x->weights.tensors[i];
    char name[512];
    if (!x->f32)
        return mt_st_read_raw(&x->weights, t, first * mt_st_dtype_size(t->dtype),
                              n * mt_st_dtype_size(t->dtype), dst, err);
    snprintf(name, sizeof(name), "%.400s.master", t->name);
    for (size_t s = 0; s < x->n_states; s++) {
        const struct mt_st_tensor *master = mt_st_find(&x->states[s], name);
        if (master)
            return mt_st_read_f32(&x->states[s], master, first, n, dst, err);
    }
    return mt_st_read_f32(&x->weights, t, first, n, dst, err);
}

static int open_states(struct exporter *x, const char *from, struct mt_err *err)
{
    char path[4096];
    size_t n = 0;
    while (snprintf(path, sizeof(path), "%.4000s/megatrain/state-%05zu.safetensors", from, n),
           mt_path_exists(path))
        n++;
    x->states = mt_calloc(n, sizeof(*x->states));
    if (!x->states)
        return mt_fail_nomem(err, "an export", n * sizeof(*x->states));
    for (; x->n_states < n; x->n_states++) {
        snprintf(path, sizeof(path), "%.4000s/megatrain/state-%05zu.safetensors", from, x->n_states);
        int rc = mt_st_open_file(&x->states[x->n_states], path, err);
        if (rc)
            return rc;
    }
    return 0;
}

static int export_to(struct exporter *x, const char *from, const char *tmp, uint64_t shard_bytes,
                     struct mt_err *err)
{
    size_t n = x->weights.n_tensors;
    struct mt_st_decl *decls = mt_calloc(n, sizeof(*decls));
    if (!decls)
        return mt_fail_nomem(err, "an export", n * sizeof(*decls));
    for (size_t i = 0; i < n; i++) {
        const struct mt_st_tensor *t = &x->weights.tensors[i];
        decls[i] = (struct mt_st_decl){.name = t->name, .dtype = x->f32 ? MT_ST_F32 : t->dtype,
                                       .n_dims = t->n_dims};
        memcpy(decls[i].shape, t->shape, sizeof(decls[i].shape));
    }
    int rc = mt_hf_dir_write(&(struct mt_hf_dir){.vfs = &mt_vfs_posix, .dir = tmp, .model_dir = from,
                                                 .decls = decls, .n_decls = n,
                                                 .torch_dtype = x->f32 ? "float32" : "bfloat16",
                                                 .shard_bytes = shard_bytes,
                                                 .source = export_source, .ctx = x},
                             err);
    free(decls);
    return rc;
}

int mt_checkpoint_export(const char *from, const char *to, bool f32, uint64_t shard_bytes,
                         struct mt_err *err)
{
    struct exporter x = {.f32 = f32};
    char tmp[4096];
    if (mt_path_exists(to))
        return mt_fail(err, MT_ERR_USAGE, -EEXIST, "%s exists already: name a new folder", to);
    snprintf(tmp, sizeof(tmp), "%.4000s.tmp", to);
    int rc = mt_st_open_dir(&x.weights, from, err);
    if (!rc)
        rc = open_states(&x, from, err);
    if (!rc)
        rc = mt_remove_tree(tmp, err);
    if (!rc)
        rc = mt_mkdir_p(tmp, err);
    if (!rc)
        rc = export_to(&x, from, tmp, shard_bytes, err);
    if (!rc && rename(tmp, to))
        rc = mt_fail(err, MT_ERR_RUNTIME, -errno, "cannot rename %s to %s: %s", tmp, to,
                     strerror(errno));
    if (rc)
        mt_remove_tree(tmp, NULL);
    for (size_t i = 0; i < x.n_states; i++)
        mt_st_close(&x.states[i]);
    free(x.states);
    mt_st_close(&x.weights);
    return rc;
}
