/* SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/fs.h"
#include "base/json.h"
#include "base/strbuf.h"
#include "checkpoint/checkpoint.h"
#include "checkpoint/manifest.h"
#include "checkpoint/seal.h"
#include "hf/safetensors.h"
#include "weights/peft.h"
#include "weights/weights.h"

/* Names of a damaged file's tensors with wrong checksums: "a, b and 3 more". */
static int name_damaged(const char *path, const struct mt_st_model *m, const cJSON *sums,
                        struct mt_str *names, struct mt_err *err)
{
    int n = 0;
    for (const cJSON *s = sums ? sums->child : NULL; s; s = s->next) {
        const struct mt_st_tensor *t = mt_st_find(m, s->string);
        uint64_t sum, size;
        char have[MT_SUM_TEXT];
        if (!t)
            continue; /* the header is damaged, so its name was not found */
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

/* Reports a damaged file, with its damaged tensors. */
static int blame(const char *path, const cJSON *file, const char *what, struct mt_err *err)
{
    struct mt_st_model m;
    struct mt_err inner = {0};
    MT_STR_FREED struct mt_str names = {0};
    const cJSON *sums = mt_json_get(file, "tensors"); /* earlier exports have none */
    if (!sums || !mt_ends_with(path, ".safetensors"))
        return mt_checkpoint_damaged(err, path, what);
    if (mt_st_open_file(&m, path, &inner))
        return mt_fail(err, MT_ERR_CHECKPOINT, -EBADMSG, "%s: %s: %s", path, what, inner.msg);
    int rc = name_damaged(path, &m, sums, &names, err);
    mt_st_close(&m);
    return rc
        ?: mt_fail(err, MT_ERR_CHECKPOINT, -EBADMSG, "%s: %s: damaged: %s%s", path, what,
                   names.p ? "tensor " : "its header", names.p ? names.p : "");
}

static int verify_file(const char *dir, const cJSON *f, struct mt_err *err)
{
    const cJSON *size = mt_json_get(f, "size"), *sum = mt_json_get(f, "xxh3");
    char path[4096], what[128], have[MT_SUM_TEXT];
    bool sized = cJSON_IsNumber(size) && size->valuedouble >= 0 && size->valuedouble < 0x1p63;
    uint64_t have_sum, have_size, most = sized ? (uint64_t)size->valuedouble : 0;
    snprintf(path, sizeof(path), "%.3000s/%.1000s", dir, f->string);
    int rc = mt_sum_file(path, 0, most + 1, &have_sum, &have_size, err); /* a longer one is wrong whatever follows */
    if (rc)
        return rc;
    mt_sum_format(have, have_sum);
    if (!cJSON_IsNumber(size) || (double)have_size != size->valuedouble) {
        struct stat st;
        have_size = !stat(path, &st) && st.st_size > 0 ? (uint64_t)st.st_size : have_size;
        snprintf(what, sizeof(what), "%llu bytes instead of %.0f", (unsigned long long)have_size,
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

/* Is it a file of the folder itself, or of one that a checkpoint may have? */
static bool is_inside(const char *name)
{
    static const char *const own[] = {"megatrain/", MT_MORE_TEMPLATES};
    for (size_t i = 0; i < MT_ARRAY_LEN(own); i++)
        if (!strncmp(name, own[i], strlen(own[i]))) {
            name += strlen(own[i]);
            break;
        }
    return *name && strlen(name) < 256 && !strchr(name, '/') && strcmp(name, ".") && strcmp(name, "..");
}

/* Checks that files that every checkpoint has are in its list: a file that is not listed is not verified. */
static int check_list(const char *dir, const cJSON *files, bool full, struct mt_err *err)
{
    size_t n = 0, states = 0;
    for (const cJSON *f = files ? files->child : NULL; f; f = f->next) {
        if (!is_inside(f->string))
            return mt_checkpoint_damaged(err, dir, "its list of files names one outside the folder");
        states += !strncmp(f->string, "megatrain/state-", 16);
    }
    for (; full && n < states; n++) {
        if (!mt_json_get(files, MT_PATH("megatrain/state-%05zu.safetensors", n)))
            break;
    }
    bool adapter = mt_json_get(files, MT_PEFT_CONFIG);
    bool weights = adapter ? mt_json_get(files, MT_PEFT_WEIGHTS) != NULL
                           : mt_json_get(files, "model.safetensors") || mt_json_get(files, "model.safetensors.index.json");
    if (!weights || (!adapter && !mt_json_get(files, "config.json")) || (full && (!states || n != states)))
        return mt_checkpoint_damaged(err, dir, "its list of files is not complete");
    return 0;
}

static int verify_list(const char *dir, const struct mt_sealed *s, struct mt_err *err)
{
    const cJSON *files = mt_json_get(s->json, "files");
    int rc = cJSON_IsObject(files) && files->child ? 0 : mt_checkpoint_damaged(err, dir, "its state.json lists no files");
    return rc ?: check_list(dir, files, s->full, err);
}

int mt_checkpoint_verify(const char *dir, struct mt_err *err)
{
    MT_SEALED_FREED struct mt_sealed sealed = {.json = NULL};
    int rc = mt_seal_read(dir, &sealed, err)
          ?: verify_list(dir, &sealed, err)
          ?: verify_files(dir, mt_json_get(sealed.json, "files"), err);
    if (!rc && sealed.full) {
        struct mt_train_state st;
        rc = mt_train_state_from_json(&st, sealed.json, dir, err);
        if (!rc)
            mt_train_state_finish(&st);
    }
    return rc;
}

static int fail_sealed(const char *dir, int rc, const struct mt_err *why, struct mt_err *err)
{
    return mt_fail(err, why->kind, rc, "%s (%s/megatrain holds its checksums: remove that folder if the change is intended)",
                   why->msg, dir);
}

/* The seal of a model's folder, with a complete list of files; without any, all 0: it has none. */
static int read_model_seal(const char *dir, struct mt_sealed *out, struct mt_err *err)
{
    if (!mt_path_exists(MT_PATH("%s/megatrain/seal.json", dir)))
        return 0;
    return mt_seal_read(dir, out, err) ?: verify_list(dir, out, err);
}

static const cJSON *first_file(const struct mt_sealed *s)
{
    const cJSON *files = mt_json_get(s->json, "files");
    return files ? files->child : NULL;
}

static bool is_state(const cJSON *f)
{
    return !strncmp(f->string, "megatrain/", 10);
}

static bool has_weights(const cJSON *f)
{
    const char *dot = strrchr(f->string, '.');
    return !is_state(f) && dot && !strcmp(dot, ".safetensors");
}

int mt_checkpoint_verify_model(const char *dir, bool all, bool states, struct mt_err *err)
{
    MT_SEALED_FREED struct mt_sealed sealed = {.json = NULL};
    struct mt_err why = {0};
    int rc = read_model_seal(dir, &sealed, &why);
    for (const cJSON *f = rc ? NULL : first_file(&sealed); f && !rc; f = f->next)
        if (is_state(f) ? states : all || has_weights(f))
            rc = verify_file(dir, f, &why);
    return rc ? fail_sealed(dir, rc, &why, err) : 0;
}

/* A file of tensors without reading these: size and header; its tensors' sums go into `all`. *part false: its sums lack, or
 * something is wrong. */
static int verify_header(const char *dir, const cJSON *f, cJSON *all, bool *part, struct mt_err *err)
{
    const cJSON *size = mt_json_get(f, "size"), *header = mt_json_get(f, "header"), *t;
    char path[4096], have[MT_SUM_TEXT];
    uint64_t len = 0, sum = 0, n = 0;
    struct stat st;
    snprintf(path, sizeof(path), "%.3000s/%.1000s", dir, f->string);
    MT_FD_CLOSED int fd = mt_open_regular(path, NULL);
    *part = fd >= 0 && cJSON_IsString(header) && cJSON_IsNumber(size) && !fstat(fd, &st) &&
            (double)st.st_size == size->valuedouble && pread(fd, &len, sizeof(len), 0) == sizeof(len) &&
            len < (uint64_t)st.st_size; /* little-endian, as all machines of this program */
    if (!*part)
        return 0;
    int rc = mt_sum_file(path, 0, 8 + len, &sum, &n, err);
    mt_sum_format(have, sum);
    *part = !rc && !strcmp(have, header->valuestring);
    cJSON_ArrayForEach(t, mt_json_get(f, "tensors"))
    {
        *part = *part && cJSON_IsString(t); /* a sum of another type is none */
        if (*part)
            mt_json_add(all, t->string, cJSON_Duplicate(t, true));
    }
    return rc;
}

int mt_checkpoint_open_seal(const char *dir, cJSON **out, struct mt_err *err)
{
    MT_SEALED_FREED struct mt_sealed sealed = {.json = NULL};
    bool part;
    struct mt_err why = {0};
    int rc = read_model_seal(dir, &sealed, &why);
    *out = NULL;
    mt_json_begin();
    cJSON *all = cJSON_CreateObject();
    for (const cJSON *f = rc ? NULL : first_file(&sealed); f && !rc; f = f->next) {
        if (!has_weights(f))
            continue;
        rc = verify_header(dir, f, all, &part, &why);
        if (!rc && !part)
            rc = verify_file(dir, f, &why);
    }
    if (!rc && !mt_json_complete())
        rc = mt_fail_nomem(&why, dir, 0);
    if (rc || !all->child) {
        cJSON_Delete(all);
        return rc ? fail_sealed(dir, rc, &why, err) : 0;
    }
    *out = all;
    return 0;
}

int mt_checkpoint_verify_left(const char *dir, const cJSON *sealed, struct mt_err *err)
{
    MT_CLOSED_BY(mt_st_close) struct mt_st_model st = {0};
    struct mt_err why = {0};
    const cJSON *t;
    int rc = sealed ? mt_st_open_dir(&st, dir, err) : 0;
    if (rc || !sealed)
        return rc;
    cJSON_ArrayForEach(t, sealed)
    {
        bool compared = t->valueint == MT_SEAL_COMPARED || !cJSON_IsString(t);
        const struct mt_st_tensor *of = compared ? NULL : mt_st_find(&st, t->string);
        uint64_t sum = 0, n;
        if (!of || rc)
            continue;
        const char *path = st.files[of->file].path;
        rc = mt_sum_file(path, of->offset, of->n_bytes, &sum, &n, &why);
        if (!rc && strtoull(t->valuestring, NULL, 16) != sum)
            rc = mt_checkpoint_damaged(&why, path, t->string);
    }
    return rc ? fail_sealed(dir, rc, &why, err) : 0;
}

int mt_checkpoint_check_whole(const char *dir, struct mt_err *err)
{
    MT_SEALED_FREED struct mt_sealed sealed = {.json = NULL};
    char path[4096];
    int rc = mt_seal_read(dir, &sealed, err) ?: verify_list(dir, &sealed, err);
    for (const cJSON *f = rc ? NULL : first_file(&sealed); f && !rc; f = f->next) {
        const cJSON *size = mt_json_get(f, "size");
        struct stat st;
        snprintf(path, sizeof(path), "%.3000s/%.1000s", dir, f->string);
        bool there = !stat(path, &st);
        if (!there && errno != ENOENT && errno != ENOTDIR)
            rc = mt_fail(err, MT_ERR_CHECKPOINT, -errno, "cannot read %s: %s", path, strerror(errno));
        else if (!there || !cJSON_IsNumber(size) || (double)st.st_size != size->valuedouble)
            rc = mt_checkpoint_damaged(err, path, "is missing or has another size than was written");
    }
    return rc;
}
