/* SPDX-License-Identifier: Apache-2.0 */
#include "data/chat_template.h"

#include <string.h>

#include "base/fs.h"
#include "config/schema.h"
#include "data/helper.h"

bool mt_chat_template_is_file(const char *name)
{
    const struct mt_key *key = mt_key_find("data", "template");
    return name && mt_key_is_path(key, name, name);
}

int mt_chat_template_read(char **text, const char *name, struct mt_err *err)
{
    char path[4200];
    size_t len;
    *text = NULL;
    if (!name || !strcmp(name, "model"))
        return 0;
    if (mt_chat_template_is_file(name))
        return mt_read_file(name, text, &len, err);
    MT_FREED char *helper = mt_helper_dir();
    int rc = helper ? mt_path_printf(path, sizeof(path), "%s/megatrain_data/templates/%s.jinja", helper, name) : -ENOENT;
    return rc ? mt_fail(err, MT_ERR_RUNTIME, rc, "data.template = %s: the data helper, which has it, is not found", name)
              : mt_read_file(path, text, &len, err);
}
