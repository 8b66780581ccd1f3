/* SPDX-License-Identifier: Apache-2.0 */
#include "checkpoint/hf_dir.h"

#include <dirent.h>
#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <xxhash.h>

#include "base/fs.h"
#include "base/json.h"
#include "base/log.h"
#include "base/mem.h"
#include "checkpoint/manifest.h"
#include "checkpoint/quantization.h"
#include "weights/peft.h"

enum { PIECE = 1 << 18, MOST_ELEM_BYTES = 8 }; /* elements; bytes of an element */
enum { MOST_BYTES = 256 << 20 }; /* of a small file */

/* Writes a tensor; its sum is added to `sums`, unless that is NULL. */
static int write_tensor(struct mt_out_file *f, const struct mt_source *s, void *buf, cJSON *sums, struct mt_err *err)
{
    size_t size = mt_st_dtype_size(s->decl.dtype), total = mt_st_decl_bytes(&s->decl) / size;
    XXH3_state_t *hash = sums ? XXH3_createState() : NULL;
    char text[MT_SUM_TEXT];
    int rc = hash || !sums ? 0 : mt_fail_nomem(err, "a checksum", 576);
    if (hash)
        XXH3_64bits_reset(hash);
    for (size_t at = 0; at < total && !rc; at += PIECE) {
        size_t n = MT_MIN((size_t)PIECE, total - at);
        rc = s->read(s, at, n, buf, err) ?: mt_out_write(f, buf, n * size, err);
        if (!rc && hash)
            XXH3_64bits_update(hash, buf, n * size);
    }
    if (!rc && hash) {
        mt_sum_format(text, XXH3_64bits_digest(hash));
        cJSON_AddStringToObject(sums, s->decl.name, text);
    }
    XXH3_freeState(hash);
    return rc;
}

/* s: in file order. */
static int write_sorted(struct mt_out_file *f, const struct mt_source *s, size_t n, cJSON *sums, struct mt_err *err)
{
    MT_FREED struct mt_st_decl *decls = mt_calloc(n, sizeof(*decls));
    MT_FREED void *buf = malloc((size_t)PIECE * MOST_ELEM_BYTES);
    MT_FREED char *header = NULL;
    size_t len = 0;
    int rc = decls && buf ? 0 : mt_fail_nomem(err, "writing tensors", (size_t)PIECE * MOST_ELEM_BYTES);
    for (size_t i = 0; i < n && !rc; i++)
        decls[i] = s[i].decl;
    rc = rc ?: mt_st_build_header(&header, &len, decls, n, err)
            ?: mt_out_write(f, header, len, err);
    f->header = XXH3_64bits_digest(f->hash);
    for (size_t i = 0; i < n && !rc; i++)
        rc = write_tensor(f, &s[i], buf, sums, err);
    return rc;
}

/* sums: of its tensors, consumed. */
static int finish_file(const struct mt_hf_dir *h, const char *name, struct mt_out_file *f, cJSON *sums, int rc,
                       struct mt_err *err)
{
    rc = rc ?: mt_out_commit(f, err);
    if (!rc && h->done)
        rc = h->done(h->ctx, name, f, err);
    if (!rc && h->listed)
        mt_manifest_add_file(h->listed, name, f, sums);
    else
        cJSON_Delete(sums);
    mt_out_abort(f);
    return rc;
}

int mt_hf_write_file(const struct mt_hf_dir *h, const char *name, const struct mt_source *s, size_t n,
                     struct mt_err *err)
{
    struct mt_out_file f = {.fd = -1};
    MT_FREED struct mt_source *sorted = mt_calloc(n, sizeof(*sorted));
    cJSON *sums = h->listed && n ? cJSON_CreateObject() : NULL;
    int rc = sorted ? 0 : mt_fail_nomem(err, name, n * sizeof(*sorted));
    if (!rc) {
        for (size_t i = 0; i < n; i++)
            sorted[i] = s[i];
        qsort(sorted, n, sizeof(*sorted), mt_st_file_order);
        rc = mt_out_open(&f, h->vfs, MT_PATH("%s/%s", h->dir, name), err);
    }
    rc = rc ?: write_sorted(&f, sorted, n, sums, err);
    return finish_file(h, name, &f, sums, rc, err);
}

static int write_bytes(const struct mt_hf_dir *h, const char *name, const void *data, size_t len,
                       struct mt_err *err)
{
    struct mt_out_file f = {.fd = -1};
    int rc = mt_out_make_folder(h->vfs, h->dir, name, err)
          ?: mt_out_open(&f, h->vfs, MT_PATH("%s/%s", h->dir, name), err)
          ?: mt_out_write(&f, data, len, err);
    rc = finish_file(h, name, &f, NULL, rc, err);
    return rc ?: mt_out_sync_folder(h->vfs, h->dir, name, err);
}

struct index_row {
    const char *name;
    size_t shard;
};

static int compare_names(const void *a, const void *b)
{
    return strcmp(((const struct index_row *)a)->name, ((const struct index_row *)b)->name);
}

/* end: [n_shards] where the sources of each shard end. */
static int write_index(const struct mt_hf_dir *h, const size_t *end, size_t n_shards, struct mt_err *err)
{
    cJSON *root = cJSON_CreateObject(), *meta = cJSON_AddObjectToObject(root, "metadata");
    cJSON *map = cJSON_AddObjectToObject(root, "weight_map");
    MT_FREED struct index_row *sorted = mt_calloc(h->n_sources, sizeof(*sorted));
    double size = 0, params = 0;
    char name[64];
    for (size_t i = 0, shard = 0; sorted && i < h->n_sources; i++) {
        const struct mt_st_decl *d = &h->sources[i].decl;
        shard += i == end[shard];
        sorted[i] = (struct index_row){d->name, shard};
        size += (double)mt_st_decl_bytes(d);
        params += (double)(mt_st_decl_bytes(d) / mt_st_dtype_size(d->dtype));
    }
    if (sorted)
        qsort(sorted, h->n_sources, sizeof(*sorted), compare_names);
    for (size_t i = 0; sorted && i < h->n_sources; i++) {
        snprintf(name, sizeof(name), "model-%05zu-of-%05zu.safetensors", sorted[i].shard + 1, n_shards);
        cJSON_AddStringToObject(map, sorted[i].name, name);
    }
    for (size_t i = 0; i < h->n_named; i++)
        cJSON_AddStringToObject(map, h->named[i], MT_ST_IN_BASE);
    if (h->n_named)
        cJSON_AddStringToObject(meta, MT_ST_BASE_KEY, h->base_dir);
    mt_json_put(meta, "total_parameters=%f, total_size=%f", params, size);
    MT_FREED char *text = sorted ? mt_json_print(root, true) : NULL;
    int rc = text && mt_json_complete() ? write_bytes(h, "model.safetensors.index.json", text, strlen(text), err)
                  : mt_fail_nomem(err, "the weight index", h->n_sources);
    cJSON_Delete(root);
    return rc;
}

static int write_weights(const struct mt_hf_dir *h, struct mt_err *err)
{
    size_t *end = mt_calloc(h->n_sources + 1, sizeof(*end)), n_shards = 1;
    uint64_t in_shard = 0;
    char name[64];
    const char *whole = h->adapter_config ? MT_PEFT_WEIGHTS : "model.safetensors";
    int rc = 0;
    if (!end)
        return mt_fail_nomem(err, "the shards", h->n_sources * sizeof(*end));
    for (size_t i = 0; i < h->n_sources; i++) {
        uint64_t bytes = mt_st_decl_bytes(&h->sources[i].decl);
        if (in_shard && in_shard + bytes > h->shard_bytes && !h->adapter_config) {
            n_shards++;
            in_shard = 0;
        }
        in_shard += bytes;
        end[n_shards - 1] = i + 1;
    }
    for (size_t s = 0; s < n_shards && !rc; s++) {
        size_t first = s ? end[s - 1] : 0;
        snprintf(name, sizeof(name), "model-%05zu-of-%05zu.safetensors", s + 1, n_shards);
        rc = mt_hf_write_file(h, n_shards == 1 && !h->n_named ? whole : name, h->sources + first, end[s] - first, err);
    }
    if (!rc && (n_shards > 1 || h->n_named))
        rc = write_index(h, end, n_shards, err);
    free(end);
    return rc;
}

/* Replaces the value behind a key if it names a type of numbers; returns where to go on. NULL: no memory, no text. */
static const char *replace_dtype(char **text, const char *at, const char *dtype)
{
    const char *open = at + strspn(at, " \t\n:"), *end = *open == '"' ? strchr(open + 1, '"') : NULL;
    size_t n = (size_t)(open + 1 - *text);
    char *made = NULL;
    if (!end || strncmp(open + 1 + (open[1] == 'b'), "float", 5) != 0)
        return at;
    if (asprintf(&made, "%.*s%s%s", (int)n, *text, dtype, end) < 0)
        made = NULL;
    free(*text);
    *text = made;
    return made ? made + n : NULL;
}

/* Sets "torch_dtype" and "dtype" wherever they are: of a nested config.json the one at the top counts. All else stays byte
 * for byte. */
static char *edit_dtype(const char *text, const char *dtype)
{
    static const char *const keys[] = {"\"torch_dtype\"", "\"dtype\""};
    char *out = strdup(text);
    for (size_t i = 0; i < MT_ARRAY_LEN(keys); i++)
        for (const char *key = out; key && (key = strstr(key, keys[i]));)
            key = replace_dtype(&out, key + strlen(keys[i]), dtype);
    return out;
}

static bool goes_along(const char *name)
{
    static const char *const names[] = {
        "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
        "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt",
        "tokenizer.model", "tekken.json", "tiktoken.model", "chat_template.jinja", "chat_template.json",
        "processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json"}; /* of images beside text */
    for (size_t i = 0; i < MT_ARRAY_LEN(names); i++)
        if (!strcmp(name, names[i]))
            return true;
    if (mt_ends_with(name, ".py") || mt_ends_with(name, ".tiktoken")) /* what auto_map names */
        return true;
    return !strncmp(name, "LICENSE", 7) || !strncmp(name, "USE_POLICY", 10);
}

/* Does the path lead to a file in the folder, or in the blobs of the hub's cache, if dir is a snapshots/<revision>? */
static bool stays(const char *path, const char *dir)
{
    char real[PATH_MAX], root[PATH_MAX], blobs[PATH_MAX + 16];
    size_t n;
    if (!realpath(path, real) || !realpath(dir, root))
        return false;
    n = strlen(root);
    if (!strncmp(real, root, n) && real[n] == '/')
        return true;
    snprintf(blobs, sizeof(blobs), "%s/../../blobs", root);
    if (!realpath(blobs, root))
        return false;
    n = strlen(root);
    return !strncmp(real, root, n) && real[n] == '/';
}

/* Reads a file, or sets *why to the reason for leaving it out. */
static int take_file(struct mt_hf_files *f, const char *dir, const char *name, const char **why, struct mt_err *err)
{
    struct stat st;
    struct mt_hf_file *to = &f->p[f->n];
    const char *path = MT_PATH("%s/%s", dir, name);
    int rc = 0;
    *why = NULL;
    if (stat(path, &st))
        *why = strerror(errno);
    else if (!S_ISREG(st.st_mode))
        *why = "it is not a regular file";
    else if (st.st_size > MOST_BYTES)
        *why = "it is larger than 256 MiB";
    else if (strcmp(name, "config.json") && !stays(path, dir)) /* config.json was parsed, so its content is known */
        *why = "it is a link to a file outside the folder";
    else
        rc = mt_read_file(path, &to->text, &to->len, err);
    if (!rc && !*why) {
        snprintf(to->name, sizeof(to->name), "%s", name);
        f->n++;
    }
    return rc;
}

static struct mt_hf_file *find_file(const struct mt_hf_files *f, const char *name)
{
    for (size_t i = 0; i < f->n; i++)
        if (!strcmp(f->p[i].name, name))
            return &f->p[i];
    return NULL;
}

/* folder: within the model's, with a slash at its end; or "". */
static int take_folder(struct mt_hf_files *f, const char *dir, const char *folder, struct mt_err *err)
{
    MT_DIR_CLOSED DIR *d = opendir(MT_PATH("%s/%s", dir, folder));
    size_t cap = f->n;
    int rc = 0;
    if (!d)
        return mt_fail(err, MT_ERR_INPUT, -errno, "cannot open %s/%s: %s", dir, folder, strerror(errno));
    for (struct dirent *e; !rc && (e = readdir(d));) {
        const char *why = NULL, *name = MT_PATH("%s%s", folder, e->d_name);
        if (!(*folder ? mt_ends_with(name, ".jinja") : goes_along(name)))
            continue;
        rc = mt_grow(&f->p, &cap, f->n + 1, sizeof(*f->p)) ? take_file(f, dir, name, &why, err)
                                                           : mt_fail_nomem(err, name, sizeof(*f->p));
        if (!rc && why && !strcmp(name, "config.json"))
            rc = mt_fail(err, MT_ERR_INPUT, -EINVAL, "%s/config.json cannot be used: %s", dir, why);
        else if (!rc && why)
            mt_warn("%s/%s is left out of checkpoints: %s", dir, name, why);
    }
    return rc;
}

int mt_hf_files_read(struct mt_hf_files *out, const char *model_dir, struct mt_err *err)
{
    struct mt_hf_files f = {0};
    int rc = take_folder(&f, model_dir, "", err);
    if (!rc && mt_is_dir(MT_PATH("%s/" MT_MORE_TEMPLATES, model_dir)))
        rc = take_folder(&f, model_dir, MT_MORE_TEMPLATES, err);
    if (!rc && !find_file(&f, "config.json") && !mt_peft_is_folder(model_dir))
        rc = mt_fail(err, MT_ERR_INPUT, -ENOENT, "%s has no config.json", model_dir);
    if (rc)
        mt_hf_files_finish(&f);
    else
        *out = f;
    return rc;
}

void mt_hf_files_finish(struct mt_hf_files *f)
{
    for (size_t i = 0; i < f->n; i++)
        free(f->p[i].text);
    free(f->p);
    *f = (struct mt_hf_files){0};
}

/* Jinja drops a line feed at the end. */
static bool is_same_template(const char *a, const char *b)
{
    size_t n = strlen(a), m = strlen(b);
    n -= n && a[n - 1] == '\n';
    m -= m && b[m - 1] == '\n';
    return n == m && !strncmp(a, b, n);
}

static int set_text(struct mt_hf_file *f, char *text, struct mt_err *err)
{
    if (!text)
        return mt_fail_nomem(err, f->name, f->len);
    free(f->text);
    f->text = text;
    f->len = strlen(text);
    return 0;
}

/* Some programs take the template in tokenizer_config.json before chat_template.jinja. */
static void leave_out_template(cJSON *config, const void *)
{
    cJSON_DeleteItemFromObjectCaseSensitive(config, "chat_template");
}

int mt_hf_files_set_template(struct mt_hf_files *f, const char *text, bool *other, struct mt_err *err)
{
    struct mt_hf_file *file = find_file(f, "chat_template.jinja"), *config = find_file(f, "tokenizer_config.json"), *p;
    MT_JSON_FREED cJSON *o = NULL;
    int rc = config ? mt_json_parse(&o, config->text, config->len, config->name, MT_ERR_INPUT, err) : 0;
    if (rc)
        return rc;
    const cJSON *own = mt_json_get(o, "chat_template");
    bool same = file ? is_same_template(file->text, text)
                     : cJSON_IsString(own) && is_same_template(own->valuestring, text);
    *other = !same && (file || own);
    if (!same && own) {
        rc = mt_json_edit(&config->text, config->name, leave_out_template, NULL, MT_ERR_INPUT, err);
        config->len = strlen(config->text);
    }
    if (!same && !file && !rc) {
        p = realloc(f->p, (f->n + 1) * sizeof(*p));
        if (p) {
            f->p = p;
            file = &p[f->n++];
            *file = (struct mt_hf_file){.name = "chat_template.jinja"};
        } else {
            rc = mt_fail_nomem(err, "a chat template", sizeof(*p));
        }
    }
    if (!same && !rc)
        rc = set_text(file, strdup(text), err);
    for (size_t i = *other ? f->n : 0; i-- > 0;)
        if (!strncmp(f->p[i].name, MT_MORE_TEMPLATES, strlen(MT_MORE_TEMPLATES))) {
            free(f->p[i].text);
            f->p[i] = f->p[--f->n];
        }
    return rc;
}

static int write_other(const struct mt_hf_dir *h, const struct mt_hf_file *f, struct mt_err *err)
{
    if (strcmp(f->name, "config.json"))
        return write_bytes(h, f->name, f->text, f->len, err);
    MT_FREED char *typed = edit_dtype(f->text, h->torch_dtype);
    MT_FREED char *edited = typed ? mt_quantization_edit(typed, h->quantization) : NULL;
    return edited ? write_bytes(h, f->name, edited, strlen(edited), err) : mt_fail_nomem(err, f->name, f->len);
}

/* Files of the model itself: an adapter's folder names the model instead. */
static bool is_of_model(const char *name)
{
    return !strcmp(name, "config.json") || !strcmp(name, "generation_config.json");
}

static int write_others(const struct mt_hf_dir *h, struct mt_err *err)
{
    MT_CLOSED_BY(mt_hf_files_finish) struct mt_hf_files own = {0};
    const struct mt_hf_files *f = h->files ? h->files : &own;
    int rc = h->files ? 0 : mt_hf_files_read(&own, h->model_dir, err);
    for (size_t i = 0; i < f->n && !rc; i++)
        if (!h->adapter_config || !is_of_model(f->p[i].name))
            rc = write_other(h, &f->p[i], err);
    if (!rc && h->adapter_config)
        rc = write_bytes(h, MT_PEFT_CONFIG, h->adapter_config, strlen(h->adapter_config), err);
    return rc;
}

int mt_hf_dir_write(const struct mt_hf_dir *h, struct mt_err *err)
{
    return write_others(h, err) ?: write_weights(h, err);
}
