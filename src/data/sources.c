/* SPDX-License-Identifier: Apache-2.0 */
#include "data/sources.h"

#include <ctype.h>
#include <dirent.h>
#include <fcntl.h>
#include <glob.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <unistd.h>

#include "base/err.h"
#include "base/fs.h"
#include "base/hub.h"
#include "base/json.h"
#include "base/mem.h"
#include "base/strbuf.h"
#include "config/schema.h"
#include "data/columns.h"
#include "data/samples.h"

/* Whether a data set has it as data. "dataset_infos.json" describes one. */
static bool holds_samples(const char *path)
{
    static const char *const endings[] = {".parquet", ".arrow", ".jsonl", ".ndjson", ".json", ".csv", ".tsv"};
    static const char *const packed[] = {"", ".gz", ".zst"};
    const char *name = strrchr(path, '/') + 1;
    char end[16];
    for (size_t i = 0; strncmp(name, "dataset_info", 12) && i < MT_ARRAY_LEN(endings); i++)
        for (size_t k = 0; k < MT_ARRAY_LEN(packed); k++) {
            snprintf(end, sizeof(end), "%s%s", endings[i], packed[k]);
            if (mt_path_has_extension(path, end))
                return true;
        }
    return false;
}

static bool is_for(const char *path, const char *split)
{
    return !strncasecmp(strrchr(path, '/') + 1, split, strlen(split));
}

static bool is_held_out(const char *path)
{
    return is_for(path, "test") || is_for(path, "val") || is_for(path, "eval") || is_for(path, "dev");
}

/* The pattern of all shards of a file "train-00000-of-00002-1a2b.parquet": "train-*.parquet"; else the file's own path. */
static char *shards_of(const char *path)
{
    for (const char *c = strrchr(path, '/'); (c = strchr(c, '-')); c++) {
        size_t digits = strspn(c + 1, "0123456789");
        if (digits && !strncmp(c + 1 + digits, "-of-", 4) && isdigit((unsigned char)c[digits + 5])) {
            char *out = NULL;
            return asprintf(&out, "%.*s-*%s", (int)(c - path), path, strchr(c, '.')) < 0 ? NULL : out;
        }
    }
    return strdup(path);
}

/* Files in the snapshot and in folders of it. */
static int list(glob_t *g, const char *snapshot)
{
    *g = (glob_t){0};
    int rc = glob(MT_PATH("%s/*.*", snapshot), 0, NULL, g);
    int more = glob(MT_PATH("%s/*/*.*", snapshot), g->gl_pathc ? GLOB_APPEND : 0, NULL, g);
    return rc == GLOB_NOSPACE || more == GLOB_NOSPACE ? -ENOMEM : 0;
}

/* Patterns, each of the shards of one set of files. */
struct sets {
    char **p;
    size_t n, cap;
};

/* Takes the pattern, unless it is known. */
static int add_set(struct sets *s, char *pattern)
{
    for (size_t i = 0; i < s->n && pattern; i++)
        if (!strcmp(s->p[i], pattern)) {
            free(pattern);
            return 0;
        }
    if (!pattern || !mt_grow(&s->p, &s->cap, s->n + 1, sizeof(*s->p))) {
        free(pattern);
        return -ENOMEM;
    }
    s->p[s->n++] = pattern;
    return 0;
}

/* The sets of files to train on. */
static int choose(struct sets *s, const glob_t *g)
{
    bool split = false;
    int rc = 0;
    for (size_t i = 0; i < g->gl_pathc; i++)
        split |= holds_samples(g->gl_pathv[i]) && is_for(g->gl_pathv[i], "train");
    for (size_t i = 0; i < g->gl_pathc && !rc; i++) {
        const char *path = g->gl_pathv[i];
        if (holds_samples(path) && (split ? is_for(path, "train") : !is_held_out(path)))
            rc = add_set(s, shards_of(path));
    }
    return rc;
}

static int fail_several(const struct sets *s, size_t folder, const char *address, const char *key, struct mt_err *err)
{
    MT_STR_FREED struct mt_str names = {0};
    for (size_t i = 0; i < s->n; i++)
        mt_str_printf(&names, "%s%s%s", i ? ", " : "", address, s->p[i] + folder);
    return names.failed ? mt_fail_nomem(err, address, strlen(address))
                        : mt_fail(err, MT_ERR_USAGE, -EINVAL, "%s: \"%s\" has several sets of files; name one: %s", key,
                                  address, names.p);
}

static int find_files(char **pattern, const char *snapshot, const char *address, const char *key, struct mt_err *err)
{
    struct sets sets = {0};
    glob_t g;
    int rc = list(&g, snapshot) ?: choose(&sets, &g);
    if (rc)
        rc = mt_fail_nomem(err, address, strlen(address));
    else if (!sets.n)
        rc = mt_fail(err, MT_ERR_INPUT, -ENOENT, "%s: no file of samples in %s, the folder of \"%s\"", key, snapshot, address);
    else if (sets.n > 1)
        rc = fail_several(&sets, strlen(snapshot), address, key, err);
    else
        *pattern = sets.p[--sets.n];
    globfree(&g);
    for (size_t i = 0; i < sets.n; i++)
        free(sets.p[i]);
    free(sets.p);
    return rc;
}

/*
 * The pattern of files of a data set in the Hugging Face hub cache: "hf://datasets/ORG/NAME/PATTERN", or without a
 * pattern, those whose names begin with "train", else the only ones there. The caller frees *pattern. Errors: it is
 * not in the cache (-ENOENT: the message has the command that gets it), or has several sets of files (they are named).
 * Messages begin with `key`, that of the configuration which has the address.
 */
static int mt_hub_files(char **pattern, const char *address, const char *key, struct mt_err *err)
{
    static const char prefix[] = MT_HUB_ADDRESS "datasets/";
    const char *name = address + strlen(prefix), *slash = NULL, *end = NULL;
    if (!strncmp(address, prefix, strlen(prefix)) && (slash = strchr(name, '/')))
        end = strchr(slash + 1, '/');
    size_t len = end ? (size_t)(end - name) : slash ? strlen(name) : 0;
    *pattern = NULL;
    if (!slash || slash == name || len == (size_t)(slash - name) + 1 || strstr(name, ".."))
        return mt_fail(err, MT_ERR_USAGE, -EINVAL, "%s: \"%s\" is not %sORG/NAME or %sORG/NAME/PATTERN", key, address,
                       prefix, prefix);
    MT_FREED char *snapshot = mt_hub_snapshot("datasets", name, len);
    if (!snapshot)
        return mt_fail(err, MT_ERR_INPUT, -ENOENT,
                       "%s: data set \"%.*s\" is not in the Hugging Face cache; get it with: "
                       "hf download --repo-type dataset %.*s",
                       key, (int)len, name, (int)len, name);
    int rc = 0;
    if (!end || !end[1])
        rc = find_files(pattern, snapshot, address, key, err);
    else if (asprintf(pattern, "%s%s", snapshot, end) < 0)
        rc = mt_fail_nomem(err, address, strlen(address));
    if (rc) {
        free(*pattern);
        *pattern = NULL;
    }
    return rc;
}

static const char INFO[] = "dataset_info.json";

/* What `datasets` writes beside the .arrow files of a set: it has no samples. */
static bool is_of_datasets(const char *path)
{
    const char *slash = strrchr(path, '/'), *name = slash ? slash + 1 : path;
    return !strcmp(name, INFO) || !strcmp(name, "state.json") || !strcmp(name, "dataset_dict.json");
}

/* Of a folder that has files to train on and others, the former, by commas; else "". */
static void name_split(struct mt_str *out, const char *path)
{
    struct sets sets = {0};
    glob_t g;
    size_t others = 0;
    int rc = list(&g, path) ?: choose(&sets, &g);
    for (size_t i = 0; i < g.gl_pathc; i++)
        others += holds_samples(g.gl_pathv[i]) && is_held_out(g.gl_pathv[i]);
    for (size_t i = 0; i < sets.n; i++) {
        if (!rc && others)
            mt_str_printf(out, "%s%s", i ? ", " : "", sets.p[i]);
        free(sets.p[i]);
    }
    free(sets.p);
    globfree(&g);
}

/* Says by which pattern the files of a folder are named: those of the kind that it has most of, without any that are to
 * be evaluated on. */
static int is_folder(const struct mt_source_list *l, const char *path, struct mt_err *err)
{
    static const char *const kinds[] = {"jsonl", "json", "parquet", "arrow", "csv", "tsv", "ndjson", "txt", "jsonl.gz", "json.gz",
                                        "jsonl.zst"};
    size_t n[MT_ARRAY_LEN(kinds)] = {0}, most = 0;
    MT_DIR_CLOSED DIR *dir = opendir(path);
    for (struct dirent *e; dir && (e = readdir(dir));)
        for (size_t i = 0; i < MT_ARRAY_LEN(kinds); i++) {
            char end[16];
            snprintf(end, sizeof(end), ".%s", kinds[i]);
            n[i] += mt_path_has_extension(e->d_name, end) && !is_of_datasets(e->d_name);
        }
    for (size_t i = 1; i < MT_ARRAY_LEN(kinds); i++)
        most = n[i] > n[most] ? i : most;
    MT_STR_FREED struct mt_str split = {0};
    name_split(&split, path);
    if (split.len && !split.failed)
        return mt_fail(err, MT_ERR_INPUT, -EISDIR, "%s: %s is a folder: name its files, %s", l->key, path, split.p);
    return n[most] ? mt_fail(err, MT_ERR_INPUT, -EISDIR, "%s: %s is a folder: name its files, %s/*.%s", l->key, path, path, kinds[most])
                   : mt_fail(err, MT_ERR_INPUT, -EISDIR, "%s: %s is a folder, without data files right in it: name files, such as %s/*/*.jsonl",
                             l->key, path, path);
}

static int add(struct mt_source_list *l, const char *path, double weight, const char *entry,
               struct mt_err *err)
{
    if (mt_is_dir(path))
        return is_folder(l, path, err);
    MT_FD_CLOSED int fd = mt_open_regular(path, err);
    if (fd == -ENODATA)
        return fd;
    if (!mt_grow(&l->items, &l->cap, l->n + 1, sizeof(*l->items)))
        return mt_fail_nomem(err, "the list of data files", l->n * sizeof(*l->items));
    struct mt_source_file f = {strdup(path), weight, entry ? strdup(entry) : NULL, NULL};
    l->items[l->n++] = f;
    return f.path && (f.entry || !entry) ? 0 : mt_fail_nomem(err, path, strlen(path));
}

static int add_matches(struct mt_source_list *l, const char *pattern, double weight,
                       const char *entry, struct mt_err *err)
{
    MT_CLOSED_BY(globfree) glob_t g = {0};
    int rc = glob(pattern, 0, NULL, &g);
    if (rc)
        rc = mt_fail(err, MT_ERR_INPUT, -ENOENT, "%s: no file matches \"%s\"; a data set of the Hugging Face cache is "
                     MT_HUB_ADDRESS "datasets/ORG/NAME, other names are paths", l->key, pattern);
    bool arrow = false;
    for (size_t i = 0; !rc && i < g.gl_pathc; i++)
        arrow |= mt_path_has_extension(g.gl_pathv[i], ".arrow");
    for (size_t i = 0; !rc && i < g.gl_pathc; i++)
        if (!arrow || !is_of_datasets(g.gl_pathv[i]))
            rc = add(l, g.gl_pathv[i], weight, entry, err);
    return rc;
}

/* One entry of a dataset_info.json: a file or a folder beside it. */
static int add_entry(struct mt_source_list *l, const char *info, const cJSON *e, double weight,
                     struct mt_err *err)
{
    const cJSON *name = mt_json_get(e, "file_name");
    if (!cJSON_IsString(name))
        return mt_fail(err, MT_ERR_INPUT, -ENOTSUP,
                       "%s: \"%s\" has no \"file_name\": data sets are not downloaded, so get its files and "
                       "name them there",
                       info, e->string);
    MT_FREED char *dir = strndup(info, strlen(info) - strlen(INFO));
    MT_FREED char *path = dir ? mt_path_join(dir, name->valuestring) : NULL;
    MT_FREED char *text = mt_json_print(e, false), *all = NULL;
    int rc = 0;
    if (!path || !text || asprintf(&all, "%s/*", path) < 0)
        rc = mt_fail_nomem(err, info, strlen(info));
    else
        rc = add_matches(l, mt_is_dir(path) ? all : path, weight, text, err);
    return rc ? mt_fail_prefix(err, rc, "%s: \"%s\"", info, e->string) : 0;
}

static int add_info(struct mt_source_list *l, const char *info, const char *name, double weight,
                    struct mt_err *err)
{
    MT_JSON_FREED cJSON *root = NULL;
    bool found = false;
    int rc = mt_json_read_file(&root, info, MT_ERR_INPUT, err);
    const cJSON *features = rc || name ? NULL : mt_json_get(root, "features");
    if (features && !mt_json_get(features, "file_name"))
        rc = mt_fail(err, MT_ERR_INPUT, -ENOTSUP, "%s describes a folder that `datasets` saved, and lists no files: name them, %.*s*.arrow",
                     info, (int)(strlen(info) - strlen(INFO)), info);
    for (const cJSON *e = rc ? NULL : root->child; e && !rc; e = e->next)
        if (cJSON_IsObject(e) && (!name || !strcmp(e->string, name))) {
            found = true;
            rc = add_entry(l, info, e, weight, err);
        }
    if (!rc && !found)
        rc = mt_fail(err, MT_ERR_INPUT, -ENOENT, "%s has no entry \"%s\"", info, name ? name : "");
    return rc;
}

/* Removes ":weight" from a pattern, unless the pattern with it is a file. */
static int cut_weight(char *pattern, double *weight, const char *key, struct mt_err *err)
{
    char *colon = strrchr(pattern, ':'), *end = NULL;
    double w = colon ? strtod(colon + 1, &end) : 0;
    *weight = 1;
    if (!colon || end == colon + 1 || *end || mt_path_exists(pattern))
        return 0;
    if (!(w > 0 && w <= 1000))
        return mt_fail(err, MT_ERR_USAGE, -EINVAL,
                       "%s: \"%s\": a weight must be above 0 and at most 1000", key, pattern);
    *colon = 0;
    *weight = w;
    return 0;
}

static int add_hub(struct mt_source_list *l, const char *address, double weight, struct mt_err *err)
{
    MT_FREED char *pattern = NULL;
    int rc = mt_hub_files(&pattern, address, l->key, err)
          ?: add_matches(l, pattern, weight, NULL, err);
    return rc;
}

static int add_item(struct mt_source_list *l, const char *item, struct mt_err *err)
{
    double weight;
    MT_FREED char *pattern = strdup(item);
    int rc = pattern ? cut_weight(pattern, &weight, l->key, err) : mt_fail_nomem(err, item, strlen(item));
    char *hash = rc ? NULL : strrchr(pattern, '#');
    if (hash && (size_t)(hash - pattern) >= strlen(INFO) &&
        !strncmp(hash - strlen(INFO), INFO, strlen(INFO)))
        *hash++ = 0;
    else
        hash = NULL;
    if (!rc && !strncmp(pattern, MT_HUB_ADDRESS, strlen(MT_HUB_ADDRESS)))
        rc = add_hub(l, pattern, weight, err);
    else if (!rc)
        rc = mt_path_has_extension(pattern, INFO) ? add_info(l, pattern, hash, weight, err)
                                      : add_matches(l, pattern, weight, NULL, err);
    return rc;
}

int mt_sources_resolve(struct mt_source_list *out, const struct mt_cfg_list *files, const char *key,
                       struct mt_err *err)
{
    struct mt_source_list l = {.key = key};
    int rc = files->n ? 0 : mt_fail(err, MT_ERR_USAGE, -EINVAL, "%s names no file", key);
    for (int i = 0; i < files->n && !rc; i++)
        rc = add_item(&l, files->items[i], err);
    if (rc)
        mt_sources_finish(&l);
    else
        *out = l;
    return rc;
}

void mt_sources_finish(struct mt_source_list *l)
{
    for (size_t i = 0; i < l->n; i++) {
        free(l->items[i].path);
        free(l->items[i].entry);
    }
    free(l->items);
    *l = (struct mt_source_list){0};
}

/* The first record of a .jsonl or .json file, or NULL; reads no more of the file than it needs. */
static cJSON *first_record(const char *path)
{
    cJSON *record = NULL;
    MT_FD_CLOSED int fd = open(path, O_RDONLY | O_CLOEXEC);
    for (size_t size = 1 << 16; fd >= 0 && !record; size *= 4) {
        MT_FREED char *buf = malloc(size);
        ssize_t n = buf ? pread(fd, buf, size, 0) : -1;
        const char *at = buf, *last = buf + MT_MAX(n, (ssize_t)0);
        at += n > 2 && !memcmp(buf, "\xef\xbb\xbf", 3) ? 3 : 0; /* a byte order mark */
        while (at < last && strchr(" \t\r\n[", *at) && *at)
            at++;
        if (at < last)
            record = cJSON_ParseWithLengthOpts(at, (size_t)(last - at), NULL, 0);
        if (n < (ssize_t)size)
            break; /* the whole file has been read */
    }
    return record;
}

bool mt_source_needs_helper(const struct mt_source_file *f, enum mt_cfg_format format,
                            const char *tokenizer)
{
    static const char *const columnar[] = {".gz", ".zst", ".parquet", ".arrow", ".ndjson", ".csv", ".tsv"};
    bool bytes = !strcmp(tokenizer, "byte"), needs;
    for (size_t i = 0; i < MT_ARRAY_LEN(columnar); i++)
        if (mt_path_has_extension(f->path, columnar[i]))
            return true;
    if (f->entry)
        return true;
    if (!mt_path_has_extension(f->path, ".jsonl") && !mt_path_has_extension(f->path, ".json"))
        return !bytes;
    MT_JSON_FREED cJSON *r = first_record(f->path);
    if (!r) /* empty or invalid: the reader reports the place */
        return false;
    mt_columns_rename(r, f->columns);
    bool chat = mt_json_get(r, "messages") || mt_json_get(r, "conversations") ||
                mt_json_get(r, "instruction") || cJSON_IsArray(mt_json_get(r, "prompt")) ||
                cJSON_IsArray(mt_json_get(r, "chosen"));
    bool ids = mt_json_get(r, "input_ids") || mt_json_get(r, "rejected_ids") || mt_json_get(r, "completion_ids") ||
               mt_json_get(r, "token_ids");
    bool requests = mt_json_get(r, "continuation") || mt_json_get(r, "arguments");
    if (format == MT_FORMAT_ROLLOUTS || (format == MT_FORMAT_AUTO && mt_samples_are_rollouts(r)))
        needs = !ids && !mt_json_get(r, "prompt_ids") &&
                (!bytes || chat || !cJSON_IsString(mt_json_get(r, "completion")));
    else if (format == MT_FORMAT_REQUESTS || (format == MT_FORMAT_AUTO && requests))
        needs = true;
    else if (format == MT_FORMAT_AUTO)
        needs = cJSON_IsObject(r) && (chat || !ids) && (chat || !bytes) &&
                (chat || mt_json_get(r, "prompt") || mt_json_get(r, "rejected") || mt_json_get(r, "text"));
    else if (format == MT_FORMAT_INPUT_IDS || ids)
        needs = false;
    else
        needs = !bytes || chat || format == MT_FORMAT_MESSAGES || format == MT_FORMAT_SHAREGPT ||
                format == MT_FORMAT_ALPACA;
    return needs;
}
