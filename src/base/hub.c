/* SPDX-License-Identifier: Apache-2.0 */
#include "base/hub.h"

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/fs.h"

static bool cache_dir(char *buf, size_t len)
{
    const char *cache = getenv("HF_HUB_CACHE"), *home = getenv("HF_HOME"), *user = getenv("HOME");
    int n = cache && *cache ? snprintf(buf, len, "%s", cache)
            : home && *home ? snprintf(buf, len, "%s/hub", home)
                            : snprintf(buf, len, "%s/.cache/huggingface/hub", user ? user : "");
    return n > 0 && (size_t)n < len;
}

/* The commit that a file refs/main names. */
static bool read_commit(char commit[128], const char *path)
{
    MT_STREAM_CLOSED FILE *f = fopen(path, "re");
    bool got = f && fgets(commit, 128, f);
    if (got)
        commit[strcspn(commit, "\r\n")] = 0;
    return got && commit[0] && commit[0] != '.' && !strchr(commit, '/');
}

char *mt_hub_snapshot(const char *kind, const char *name, size_t len)
{
    char cache[1024], path[2048], commit[128];
    const char *slash = memchr(name, '/', len);
    if (!slash || !cache_dir(cache, sizeof(cache)))
        return NULL;
    int org = (int)(slash - name), rest = (int)len - org - 1;
    snprintf(path, sizeof(path), "%s/%s--%.*s--%.*s/refs/main", cache, kind, org, name, rest, slash + 1);
    if (!read_commit(commit, path))
        return NULL;
    snprintf(path, sizeof(path), "%s/%s--%.*s--%.*s/snapshots/%s", cache, kind, org, name, rest, slash + 1, commit);
    return mt_is_dir(path) ? strdup(path) : NULL;
}
