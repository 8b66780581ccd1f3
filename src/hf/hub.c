/* SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "base/fs.h"
#include "base/installed.h"
#include "hf/hf_config.h"

/* The hub cache's folder: $HF_HUB_CACHE, $HF_HOME/hub, ~/.cache/huggingface/hub. */
static bool cache_dir(char *buf, size_t len)
{
    const char *cache = getenv("HF_HUB_CACHE"), *home = getenv("HF_HOME"), *user = getenv("HOME");
    int n = cache && *cache  ? snprintf(buf, len, "%s", cache)
            : home && *home ? snprintf(buf, len, "%s/hub", home)
                            : snprintf(buf, len, "%s/.cache/huggingface/hub", user ? user : "");
    return n > 0 && (size_t)n < len;
}

static char *snapshot(const char *model)
{
    char cache[1024], path[2048], commit[128] = "";
    const char *slash = strchr(model, '/');
    if (!cache_dir(cache, sizeof(cache)))
        return NULL;
    snprintf(path, sizeof(path), "%s/models--%.*s--%s/refs/main", cache, (int)(slash - model), model,
             slash + 1);
    FILE *f = fopen(path, "re");
    if (!f)
        return NULL;
    bool got = fgets(commit, sizeof(commit), f) != NULL;
    fclose(f);
    commit[strcspn(commit, "\r\n")] = 0;
    if (!got || !commit[0] || commit[0] == '.' || strchr(commit, '/'))
        return NULL;
    snprintf(path, sizeof(path), "%s/models--%.*s--%s/snapshots/%s", cache, (int)(slash - model),
             model, slash + 1, commit);
    return mt_is_dir(path) ? strdup(path) : NULL;
}

static bool holds_model(const char *dir)
{
    char *path = mt_path_join(dir, "config.json");
    bool is = path && mt_path_exists(path);
    free(path);
    return is;
}

int mt_hf_find_model(char **dir, const char *model, struct mt_err *err)
{
    const char *slash = strchr(model, '/');
    bool hub_name = slash && slash != model && slash[1] && !strchr(slash + 1, '/') && model[0] != '.';
    char *found = hub_name && !holds_model(model) ? snapshot(model) : NULL; /* another folder of that name hides none */
    if (!found && mt_is_dir(model)) {
        found = strdup(model);
        if (!found)
            return mt_fail_nomem(err, model, strlen(model));
    }
    if (found) {
        *dir = found;
        return 0;
    }
    if (hub_name)
        return mt_fail(err, MT_ERR_INPUT, -ENOENT,
                       "model \"%s\": neither a folder nor in the Hugging Face cache; get it with: "
                       "hf download %s",
                       model, model);
    return mt_fail(err, MT_ERR_INPUT, -ENOENT, "model \"%s\": no such folder", model);
}

/* What follows the organisation in a name that repeats it: "nvidia/NVIDIA-NAME"; else NULL. slash: in the model's name. */
static const char *without_organisation(const char *model, const char *slash)
{
    size_t n = slash ? (size_t)(slash - model) : 0;
    return n && !strncasecmp(slash + 1, model, n) && slash[1 + n] == '-' ? slash + n + 2 : NULL;
}

static bool find_named(char *path, size_t len, const char *folder, const char *name)
{
    for (size_t n = strlen(name); n; n--) /* the longest name that is stored */
        if (!name[n] || name[n] == '-') {
            int chars = snprintf(path, len, "%s/%.*s.json", folder, (int)n, name);
            if (chars > 0 && (size_t)chars < len && mt_path_exists(path))
                return true;
        }
    return false;
}

bool mt_hf_find_stored(char *path, size_t len, const char *model)
{
    const char *slash = strrchr(model, '/'), *rest = without_organisation(model, slash);
    char folder[3200];
    if (!mt_installed_dir(folder, sizeof(folder), "models"))
        return false;
    return find_named(path, len, folder, slash ? slash + 1 : model) || (rest && find_named(path, len, folder, rest));
}
