/* SPDX-License-Identifier: Apache-2.0 */
#include "base/installed.h"

#include <stdio.h>
#include <string.h>
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
