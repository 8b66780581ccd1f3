/* SPDX-License-Identifier: Apache-2.0 */
#include "base/installed.h"

#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <unistd.h>

#include "base/fs.h"
#include "base/mem.h"

bool mt_installed_dir(char *buf, size_t len, const char *name)
{
    static const char *const near[] = {"../../configs", "../share/megatrain", "../configs"};
    char exe[3000];
    ssize_t n = readlink("/proc/self/exe", exe, sizeof(exe) - 1);
    exe[n > 0 ? n : 0] = 0;
    char *slash = strrchr(exe, '/');
    if (slash)
        *slash = 0;
    for (size_t i = 0; i < MT_ARRAY_LEN(near); i++) {
        int chars = snprintf(buf, len, "%s/%s/%s", exe, near[i], name);
        if (chars > 0 && (size_t)chars < len && mt_is_dir(buf))
            return true;
    }
    return false;
}

/* Appends the names that begin with n letters of `like`; how many there are. */
static int add_names(struct mt_str *out, struct dirent **files, int n_files, const char *ending, const char *like,
                     size_t n)
{
    int found = 0;
    for (int i = 0; i < n_files; i++) {
        const char *file = files[i]->d_name;
        size_t len = strlen(file), end = strlen(ending);
        if (len <= end || strcmp(file + len - end, ending) || strncasecmp(file, like, n))
            continue;
        mt_str_printf(out, "%s%.*s", found++ ? ", " : "", (int)(len - end), file);
    }
    return found;
}

void mt_installed_names(struct mt_str *out, const char *name, const char *ending, const char *like)
{
    enum { LEAST = 3 };
    char folder[3200];
    MT_FREED struct dirent **files = NULL;
    int n = mt_installed_dir(folder, sizeof(folder), name) ? scandir(folder, &files, NULL, alphasort) : 0;
    if (!like)
        add_names(out, files, n, ending, "", 0);
    for (size_t len = like ? strlen(like) : 0; len >= LEAST; len--)
        if (add_names(out, files, n, ending, like, len))
            break;
    for (int i = 0; i < n; i++)
        free(files[i]);
}
