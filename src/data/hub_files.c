/* SPDX-License-Identifier: Apache-2.0 */
#include "data/hub_files.h"

#include <ctype.h>
#include <errno.h>
#include <glob.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "base/fs.h"
#include "base/hub.h"
#include "base/mem.h"
#include "base/strbuf.h"
#include "config/schema.h"

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
    char path[2200];
    *g = (glob_t){0};
    snprintf(path, sizeof(path), "%s/*.*", snapshot);
    int rc = glob(path, 0, NULL, g);
    snprintf(path, sizeof(path), "%s/*/*.*", snapshot);
    int more = glob(path, g->gl_pathc ? GLOB_APPEND : 0, NULL, g);
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

int mt_hub_files(char **pattern, const char *address, const char *key, struct mt_err *err)
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
