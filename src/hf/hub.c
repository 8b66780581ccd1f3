/* SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>
#include <string.h>
#include <strings.h>

#include "base/fs.h"
#include "base/hub.h"
#include "base/installed.h"
#include "base/mem.h"
#include "hf/hf_config.h"

int mt_hf_find_model(char **dir, const char *model, struct mt_err *err)
{
    const char *slash = strchr(model, '/');
    bool hub_name = slash && slash != model && slash[1] && !strchr(slash + 1, '/') && model[0] != '.';
    bool is_there = !hub_name || mt_path_exists(MT_PATH("%s/config.json", model)); /* another folder of that name hides none */
    char *found = is_there ? NULL : mt_hub_snapshot("models", model, strlen(model));
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
    return mt_fail(err, MT_ERR_INPUT, -ENOENT,
                   mt_path_exists(model) ? "model \"%s\" is a file: name a folder with config.json and safetensors, from which GGUF is made, too"
                                         : "model \"%s\": no such folder", model);
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
