/* SPDX-License-Identifier: Apache-2.0 */
#include "hf/safetensors.h"

#include <dirent.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "base/dtype.h"
#include "base/fs.h"
#include "base/json.h"
#include "base/log.h"
#include "base/mem.h"

enum { MAX_HEADER = 100000000 };
#define ONE "model.safetensors"
#define INDEX "model.safetensors.index.json"

static const struct {
    const char *name;
    size_t size;
} dtypes[MT_ST_N_DTYPES] = {
    [MT_ST_BF16] = {"BF16", 2}, [MT_ST_F16] = {"F16", 2},       [MT_ST_F32] = {"F32", 4},
    [MT_ST_F64] = {"F64", 8},   [MT_ST_I8] = {"I8", 1},         [MT_ST_U8] = {"U8", 1},
    [MT_ST_I16] = {"I16", 2},   [MT_ST_I32] = {"I32", 4},       [MT_ST_I64] = {"I64", 8},
    [MT_ST_BOOL] = {"BOOL", 1}, [MT_ST_F8_E4M3] = {"F8_E4M3", 1}, [MT_ST_F8_E5M2] = {"F8_E5M2", 1},
    [MT_ST_F8_E8M0] = {"F8_E8M0", 1},
};

size_t mt_st_dtype_size(enum mt_st_dtype t)
{
    return dtypes[t].size;
}

const char *mt_st_dtype_name(enum mt_st_dtype t)
{
    return dtypes[t].name;
}

static int bad(struct mt_err *err, const char *file, const char *tensor, const char *what)
{
    return mt_fail(err, MT_ERR_INPUT, -EINVAL, "%s: tensor \"%.100s\": %s", file, tensor, what);
}

/* A JSON number that is an integer in [0, 2^53]. */
static bool whole(const cJSON *v, uint64_t *out)
{
    if (!cJSON_IsNumber(v) || !(v->valuedouble >= 0 && v->valuedouble <= 0x1p53) ||
        v->valuedouble != floor(v->valuedouble))
        return false;
    *out = (uint64_t)v->valuedouble;
    return true;
}

static int parse_shape(struct mt_st_tensor *t, const cJSON *shape, const char *file,
                       struct mt_err *err)
{
    if (!cJSON_IsArray(shape))
        return bad(err, file, t->name, "has no shape");
    t->n_elems = 1;
    for (const cJSON *v = shape->child; v; v = v->next) {
        uint64_t dim;
        if (t->n_dims == MT_ST_MAX_DIMS)
            return bad(err, file, t->name, "has more than 8 dimensions");
        if (!whole(v, &dim) || !mt_mul_size(t->n_elems, (size_t)dim, &t->n_elems))
            return bad(err, file, t->name, "has a shape that is not a list of sizes");
        t->shape[t->n_dims++] = (int64_t)dim;
    }
    if (!mt_mul_size(t->n_elems, mt_st_dtype_size(t->dtype), &t->n_bytes))
        return bad(err, file, t->name, "is larger than memory can address");
    return 0;
}

static int parse_tensor(struct mt_st_tensor *t, const cJSON *v, uint64_t data_at, const char *file,
                        struct mt_err *err)
{
    const cJSON *dtype = mt_json_get(v, "dtype"), *off = mt_json_get(v, "data_offsets");
    uint64_t begin, end;
    int d = 0;
    if (!cJSON_IsString(dtype))
        return bad(err, file, t->name, "has no dtype");
    while (d < MT_ST_N_DTYPES && strcmp(dtypes[d].name, dtype->valuestring))
        d++;
    if (d == MT_ST_N_DTYPES)
        return mt_fail(err, MT_ERR_INPUT, -EINVAL, "%s: tensor \"%.100s\": dtype %.20s is not supported",
                       file, t->name, dtype->valuestring);
    t->dtype = d;
    int rc = parse_shape(t, mt_json_get(v, "shape"), file, err);
    if (rc)
        return rc;
    if (!cJSON_IsArray(off) || cJSON_GetArraySize(off) != 2 || !whole(off->child, &begin) ||
        !whole(off->child->next, &end) || end < begin)
        return bad(err, file, t->name, "has no valid data_offsets");
    if (end - begin != t->n_bytes)
        return bad(err, file, t->name, "has data_offsets that do not fit its shape and dtype");
    t->offset = data_at + begin;
    return 0;
}

static int by_offset(const void *a, const void *b)
{
    const struct mt_st_tensor *x = a, *y = b;
    if (x->offset != y->offset)
        return x->offset < y->offset ? -1 : 1;
    return (x->n_bytes > y->n_bytes) - (x->n_bytes < y->n_bytes);
}

static int by_name(const void *a, const void *b)
{
    return strcmp(((const struct mt_st_tensor *)a)->name, ((const struct mt_st_tensor *)b)->name);
}

/* Tensors must cover the data exactly: no holes, no overlaps, nothing after the last. */
static int check_cover(struct mt_st_tensor *t, size_t n, uint64_t data_at, uint64_t file_size,
                       const char *file, struct mt_err *err)
{
    uint64_t at = data_at;
    qsort(t, n, sizeof(*t), by_offset);
    for (size_t i = 0; i < n; i++) {
        if (t[i].offset != at)
            return bad(err, file, t[i].name,
                       t[i].offset > at ? "leaves a hole before it" : "overlaps another tensor");
        at += t[i].n_bytes;
        if (at > file_size)
            return bad(err, file, t[i].name, "ends beyond the file: it is truncated");
    }
    if (at != file_size)
        return mt_fail(err, MT_ERR_INPUT, -EINVAL, "%s: %llu bytes after the last tensor", file,
                       (unsigned long long)(file_size - at));
    qsort(t, n, sizeof(*t), by_name);
    for (size_t i = 1; i < n; i++)
        if (!strcmp(t[i - 1].name, t[i].name))
            return bad(err, file, t[i].name, "appears twice");
    return 0;
}

static void free_tensors(struct mt_st_tensor *t, size_t n)
{
    for (size_t i = 0; i < n; i++)
        free(t[i].name);
    free(t);
}

static int collect(struct mt_st_tensor **out, size_t *n_out, const cJSON *root, uint64_t data_at,
                   uint64_t file_size, const char *name, struct mt_err *err)
{
    size_t n = 0, cap = 0;
    struct mt_st_tensor *t = NULL;
    int rc = 0;
    for (const cJSON *v = root->child; v && !rc; v = v->next) {
        if (!strcmp(v->string, "__metadata__"))
            continue;
        if (!mt_grow(&t, &cap, n + 1, sizeof(*t))) {
            rc = mt_fail_nomem(err, name, n * sizeof(*t));
            break;
        }
        t[n] = (struct mt_st_tensor){.name = strdup(v->string)};
        if (!t[n++].name)
            rc = mt_fail_nomem(err, name, strlen(v->string));
        else
            rc = parse_tensor(&t[n - 1], v, data_at, name, err);
    }
    if (!rc && n)
        rc = check_cover(t, n, data_at, file_size, name, err);
    else if (!rc && file_size != data_at)
        rc = mt_fail(err, MT_ERR_INPUT, -EINVAL, "%s: it has data but no tensors", name);
    if (rc) {
        free_tensors(t, n);
        return rc;
    }
    *out = t;
    *n_out = n;
    return 0;
}

/* Parses a header of `len` bytes of a file of `file_size` bytes. */
static int parse_header(struct mt_st_tensor **tensors, size_t *n, const char *header, size_t len,
                        uint64_t file_size, const char *name, struct mt_err *err)
{
    MT_JSON_FREED cJSON *root = NULL;
    if (len < 2 || header[0] != '{')
        return mt_fail(err, MT_ERR_INPUT, -EINVAL, "%s: not a safetensors file", name);
    int rc = mt_json_parse(&root, header, len, name, MT_ERR_INPUT, err);
    if (!rc && !cJSON_IsObject(root))
        rc = mt_fail(err, MT_ERR_INPUT, -EINVAL, "%s: the header is not a JSON object", name);
    return rc ?: collect(tensors, n, root, 8 + (uint64_t)len, file_size, name, err);
}

static int read_header(int fd, uint64_t size, const char *path, struct mt_st_tensor **t, size_t *n,
                       struct mt_err *err)
{
    unsigned char le[8];
    uint64_t len = 0;
    if (size < 8 || mt_pread_all(fd, le, 8, 0))
        return mt_fail(err, MT_ERR_INPUT, -EINVAL, "%s: too short for a safetensors file", path);
    for (int i = 0; i < 8; i++)
        len |= (uint64_t)le[i] << (8 * i);
    if (len > MAX_HEADER || len > size - 8)
        return mt_fail(err, MT_ERR_INPUT, -EINVAL,
                       "%s: header of %llu bytes in a file of %llu: truncated or not safetensors",
                       path, (unsigned long long)len, (unsigned long long)size);
    MT_FREED char *header = malloc((size_t)len + 1);
    if (!header)
        return mt_fail_nomem(err, path, len);
    int rc = mt_pread_all(fd, header, (size_t)len, 8);
    if (rc)
        rc = mt_fail(err, MT_ERR_RUNTIME, rc, "cannot read %s: %s", path, strerror(-rc));
    else
        rc = parse_header(t, n, header, (size_t)len, size, path, err);
    return rc;
}

/* Opens one file and appends its tensors. */
static int add_file(struct mt_st_model *m, const char *dir, const char *name, struct mt_err *err)
{
    struct stat st;
    char *path = mt_path_join(dir, name);
    size_t cap = (size_t)m->n_files, n = 0;
    struct mt_st_tensor *t = NULL;
    if (!path || !mt_grow(&m->files, &cap, (size_t)m->n_files + 1, sizeof(*m->files))) {
        free(path);
        return mt_fail_nomem(err, name, sizeof(*m->files));
    }
    struct mt_st_file *f = &m->files[m->n_files++];
    *f = (struct mt_st_file){.path = path, .name = strdup(name), .fd = -1};
    f->fd = mt_open_regular(path, err);
    if (f->fd < 0) {
        if (err)
            err->kind = MT_ERR_INPUT;
        return f->fd;
    }
    if (fstat(f->fd, &st))
        return mt_fail(err, MT_ERR_INPUT, -errno, "cannot open %s: %s", path, strerror(errno));
    f->size = (uint64_t)st.st_size;
    int rc = read_header(f->fd, f->size, path, &t, &n, err);
    if (rc)
        return rc;
    struct mt_st_tensor *all = realloc(m->tensors, (m->n_tensors + n + 1) * sizeof(*all));
    if (!all) {
        free_tensors(t, n);
        return mt_fail_nomem(err, path, n * sizeof(*all));
    }
    m->tensors = all;
    for (size_t i = 0; i < n; i++) {
        t[i].file = m->n_files - 1;
        all[m->n_tensors++] = t[i];
    }
    free(t);
    return 0;
}

static int sort_and_check(struct mt_st_model *m, const char *what, struct mt_err *err)
{
    if (m->n_tensors)
        qsort(m->tensors, m->n_tensors, sizeof(*m->tensors), by_name);
    for (size_t i = 1; i < m->n_tensors; i++)
        if (!strcmp(m->tensors[i - 1].name, m->tensors[i].name))
            return mt_fail(err, MT_ERR_INPUT, -EINVAL, "%s: tensor \"%s\" is in %s and in %s", what,
                           m->tensors[i].name, m->files[m->tensors[i - 1].file].name,
                           m->files[m->tensors[i].file].name);
    return 0;
}

static int check_weight_map(struct mt_st_model *m, const cJSON *map, const char *index,
                            struct mt_err *err)
{
    for (const cJSON *v = map->child; v; v = v->next) {
        const struct mt_st_tensor *t = mt_st_find(m, v->string);
        if (!t)
            return mt_fail(err, MT_ERR_INPUT, -EINVAL, "%s: tensor \"%.100s\" is not in %s", index,
                           v->string, v->valuestring);
        if (strcmp(v->valuestring, MT_ST_IN_BASE) && strcmp(m->files[t->file].name, v->valuestring))
            return mt_fail(err, MT_ERR_INPUT, -EINVAL, "%s: tensor \"%.100s\" is in %s, not in %s",
                           index, v->string, m->files[t->file].name, v->valuestring);
    }
    return 0;
}

static int open_shards(struct mt_st_model *m, const char *dir, const cJSON *map, const char *index,
                       struct mt_err *err)
{
    int rc = 0;
    if (!cJSON_IsObject(map) || !map->child)
        return mt_fail(err, MT_ERR_INPUT, -EINVAL, "%s: no weight_map", index);
    for (const cJSON *v = map->child; v && !rc; v = v->next) {
        if (!cJSON_IsString(v) || !v->valuestring[0] || strchr(v->valuestring, '/') ||
            strstr(v->valuestring, ".."))
            return mt_fail(err, MT_ERR_INPUT, -EINVAL,
                           "%s: tensor \"%.100s\" names no file of this folder", index, v->string);
        bool known = !strcmp(v->valuestring, MT_ST_IN_BASE);
        for (int i = m->n_files; i-- > 0 && !known;) /* most are in the file of the one before */
            known = !strcmp(m->files[i].name, v->valuestring);
        if (!known)
            rc = add_file(m, dir, v->valuestring, err);
    }
    return rc;
}

static int open_dir(struct mt_st_model *out, const char *dir, int depth, struct mt_err *err);

/* Moves the tensors that the map says are in the base model, and its files, to m. */
static int take_from_base(struct mt_st_model *m, struct mt_st_model *base, const cJSON *map, const char *dir,
                          struct mt_err *err)
{
    size_t n = m->n_tensors, cap = (size_t)m->n_files, first = cap;
    struct mt_st_tensor *all = realloc(m->tensors, (n + base->n_tensors + 1) * sizeof(*all));
    if (!all || !mt_grow(&m->files, &cap, first + (size_t)base->n_files, sizeof(*m->files))) {
        m->tensors = all ? all : m->tensors;
        return mt_fail_nomem(err, dir, base->n_tensors * sizeof(*all));
    }
    m->tensors = all;
    for (const cJSON *v = map->child; v; v = v->next) {
        const struct mt_st_tensor *t = strcmp(v->valuestring, MT_ST_IN_BASE) ? NULL : mt_st_find(base, v->string);
        if (!strcmp(v->valuestring, MT_ST_IN_BASE) && !t)
            return mt_fail(err, MT_ERR_INPUT, -ENOENT, "%s: tensor \"%.100s\" of the base model is missing", dir, v->string);
        if (!t)
            continue;
        all[m->n_tensors] = *t;
        all[m->n_tensors].name = strdup(t->name);
        all[m->n_tensors].file += (int)first;
        if (!all[m->n_tensors++].name)
            return mt_fail_nomem(err, dir, strlen(t->name));
    }
    memcpy(m->files + first, base->files, (size_t)base->n_files * sizeof(*m->files));
    m->n_files += base->n_files;
    base->n_files = 0; /* m owns them now */
    return 0;
}

/* Adds the tensors that the index says are in the model of another folder. */
static int open_base(struct mt_st_model *m, const cJSON *root, const char *of, int depth, struct mt_err *err)
{
    const cJSON *map = mt_json_get(root, "weight_map"), *name = mt_json_get(mt_json_get(root, "metadata"), MT_ST_BASE_KEY);
    struct mt_st_model base = {0};
    struct mt_err why = {0};
    bool any = false;
    for (const cJSON *v = map->child; v; v = v->next)
        any |= !strcmp(v->valuestring, MT_ST_IN_BASE);
    if (!any)
        return 0;
    if (!cJSON_IsString(name) || depth > 3)
        return mt_fail(err, MT_ERR_INPUT, -EINVAL, "%s: metadata.base_model of its index does not name the base model's folder", of);
    MT_FREED char *dir = mt_path_join(of, name->valuestring);
    if (!dir)
        return mt_fail_nomem(err, of, strlen(of));
    int rc = open_dir(&base, dir, depth + 1, &why);
    if (rc)
        mt_fail(err, MT_ERR_INPUT, rc, "%s: frozen tensors are in the model that it was trained from: %s", of, why.msg);
    else
        rc = take_from_base(m, &base, map, dir, err);
    mt_st_close(&base);
    return rc;
}

static int open_indexed(struct mt_st_model *m, const char *dir, const char *index, int depth,
                        struct mt_err *err)
{
    MT_JSON_FREED cJSON *root = NULL;
    return mt_json_read_file(&root, index, MT_ERR_INPUT, err)
        ?: open_shards(m, dir, mt_json_get(root, "weight_map"), index, err)
        ?: open_base(m, root, dir, depth, err)
        ?: sort_and_check(m, index, err)
        ?: check_weight_map(m, mt_json_get(root, "weight_map"), index, err);
}

/* The first of a folder's other files of tensors, by name. */
static bool find_shard(const char *dir, char shard[256])
{
    MT_DIR_CLOSED DIR *d = opendir(dir);
    *shard = 0;
    for (const struct dirent *e; d && (e = readdir(d));) {
        const char *dot = strrchr(e->d_name, '.');
        if (dot && !strcmp(dot, ".safetensors") && (!*shard || strcmp(e->d_name, shard) < 0))
            snprintf(shard, 256, "%s", e->d_name);
    }
    return *shard;
}

static int fail_no_weights(const char *dir, struct mt_err *err)
{
    const char *latest = MT_PATH("%s/latest", dir);
    bool old = mt_path_exists(MT_PATH("%s/pytorch_model.bin", dir)) ||
               mt_path_exists(MT_PATH("%s/pytorch_model.bin.index.json", dir));
    char shard[256] = "";
    if (mt_path_exists(latest))
        return mt_fail(err, MT_ERR_INPUT, -ENOENT, "%s is the folder of a run: name one of its checkpoints, such as %s", dir,
                       latest);
    if (!old && find_shard(dir, shard) && !mt_path_exists(MT_PATH("%s/%s", dir, shard)))
        return mt_fail(err, MT_ERR_INPUT, -ENOENT, "%s/%s is a link to a file that is not there: copy the files that links name, too "
                       "(cp -rL), or get the model anew", dir, shard);
    if (!old && *shard)
        return mt_fail(err, MT_ERR_INPUT, -ENOENT, "%s has %s, but neither " ONE " nor " INDEX ", which names the file of each "
                       "tensor: get it from where the model is from", dir, shard);
    return mt_fail(err, MT_ERR_INPUT, -ENOENT,
                   old ? "%s has only pytorch_model.bin: convert it to safetensors" : "%s has no " ONE " and no " INDEX, dir);
}

void mt_st_warn_of_two(const char *dir)
{
    MT_JSON_FREED cJSON *root = NULL;
    if (mt_path_exists(MT_PATH("%s/" ONE, dir)) &&
        !mt_json_read_file(&root, MT_PATH("%s/" INDEX, dir), MT_ERR_INPUT, NULL)) {
        bool named = false; /* by the index: it is one set */
        const cJSON *v;
        cJSON_ArrayForEach(v, mt_json_get(root, "weight_map"))
            named |= cJSON_IsString(v) && !strcmp(v->valuestring, ONE);
        if (!named)
            mt_warn("%s has two sets of weights: those of " INDEX " are read here, while transformers and PEFT take " ONE ": "
                    "remove one of the two", dir);
    }
}

int mt_st_open_dir(struct mt_st_model *out, const char *dir, struct mt_err *err)
{
    return open_dir(out, dir, 0, err);
}

static int open_dir(struct mt_st_model *out, const char *dir, int depth, struct mt_err *err)
{
    struct mt_st_model m = {0};
    const char *index = MT_PATH("%s/" INDEX, dir);
    int rc;
    if (mt_path_exists(index))
        rc = open_indexed(&m, dir, index, depth, err);
    else if (mt_path_exists(MT_PATH("%s/" ONE, dir)))
        rc = add_file(&m, dir, ONE, err);
    else
        rc = fail_no_weights(dir, err);
    if (rc)
        mt_st_close(&m);
    else
        *out = m;
    return rc;
}

int mt_st_open_file(struct mt_st_model *out, const char *path, struct mt_err *err)
{
    struct mt_st_model m = {0};
    int rc = add_file(&m, "", path, err);
    if (rc)
        mt_st_close(&m);
    else
        *out = m;
    return rc;
}

void mt_st_close(struct mt_st_model *m)
{
    free_tensors(m->tensors, m->n_tensors);
    for (int i = 0; i < m->n_files; i++) {
        mt_close_fd(&m->files[i].fd);
        free(m->files[i].path);
        free(m->files[i].name);
    }
    free(m->files);
    *m = (struct mt_st_model){0};
}

const struct mt_st_tensor *mt_st_find(const struct mt_st_model *m, const char *name)
{
    struct mt_st_tensor key = {.name = (char *)(uintptr_t)name};
    return m->n_tensors ? bsearch(&key, m->tensors, m->n_tensors, sizeof(key), by_name) : NULL;
}

int mt_st_read_raw(const struct mt_st_model *m, const struct mt_st_tensor *t, size_t first, size_t n,
                   void *dst, struct mt_err *err)
{
    int rc = mt_pread_all(m->files[t->file].fd, dst, n, t->offset + first);
    return rc ? mt_fail(err, MT_ERR_INPUT, rc, "cannot read tensor \"%s\" of %s: %s", t->name,
                        m->files[t->file].path, strerror(-rc))
              : 0;
}

static void to_f32(enum mt_st_dtype t, const void *raw, size_t n, float *dst)
{
    for (size_t i = 0; i < n; i++)
        dst[i] = t == MT_ST_BF16  ? mt_bf16_to_f32(((const uint16_t *)raw)[i])
                 : t == MT_ST_F16 ? mt_f16_to_f32(((const uint16_t *)raw)[i])
                                  : (float)((const double *)raw)[i];
}

int mt_st_read_f32_summed(const struct mt_st_model *m, const struct mt_st_tensor *t, size_t first, size_t n, float *dst,
                          struct mt_summer *summer, struct mt_err *err)
{
    enum { PIECE = 8192 };
    _Alignas(8) char raw[PIECE * 8];
    size_t size = mt_st_dtype_size(t->dtype);
    if (t->dtype == MT_ST_F32) {
        int rc = mt_st_read_raw(m, t, first * 4, n * 4, dst, err);
        if (!rc)
            mt_summer_add(summer, dst, n * 4);
        return rc;
    }
    if (t->dtype > MT_ST_F64)
        return mt_fail(err, MT_ERR_INPUT, -EINVAL, "tensor \"%s\" of %s is %s: expected BF16, F16, F32 or F64",
                       t->name, m->files[t->file].path, mt_st_dtype_name(t->dtype));
    for (size_t i = 0; i < n; i += PIECE) {
        size_t k = MT_MIN((size_t)PIECE, n - i);
        int rc = mt_st_read_raw(m, t, (first + i) * size, k * size, raw, err);
        if (rc)
            return rc;
        mt_summer_add(summer, raw, k * size);
        to_f32(t->dtype, raw, k, dst + i);
    }
    return 0;
}

int mt_st_read_f32(const struct mt_st_model *m, const struct mt_st_tensor *t, size_t first, size_t n, float *dst,
                   struct mt_err *err)
{
    return mt_st_read_f32_summed(m, t, first, n, dst, NULL, err);
}
