/* SPDX-License-Identifier: Apache-2.0 */
#include "libraries.h"

#include <dlfcn.h>
#include <glob.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const char packages[] = "lib/python*/site-packages";

/* Opens it in the first folder that the pattern names and that has one which can be loaded. */
static void *in_packages(const char *folder, const char *below, const char *name)
{
    char pattern[2 * PATH_MAX];
    glob_t found;
    void *lib = NULL;
    snprintf(pattern, sizeof(pattern), "%s/%s/nvidia/*/lib/%s", folder, below, name);
    if (glob(pattern, 0, NULL, &found))
        return NULL;
    for (size_t i = 0; i < found.gl_pathc && !lib; i++)
        lib = dlopen(found.gl_pathv[i], RTLD_NOW | RTLD_LOCAL);
    globfree(&found);
    return lib;
}

/* In the folders above the program: the tree that it was built in, the environment that its wheel is installed in. */
static void *above_program(const char *name)
{
    enum { LEVELS = 4 };
    static const char *const below[] = {".venv-cuda", packages, "."};
    char path[PATH_MAX];
    ssize_t n = readlink("/proc/self/exe", path, sizeof(path) - 1);
    void *lib = NULL;
    path[n > 0 ? n : 0] = 0;
    for (int up = 0; up < LEVELS && !lib && strrchr(path, '/'); up++) {
        *strrchr(path, '/') = 0;
        for (size_t i = 0; i < sizeof(below) / sizeof(*below) && !lib; i++)
            lib = in_packages(path, below[i], name);
    }
    return lib;
}

void *mt_cuda_library(const char *name, const char *toolkit, char *why, size_t len)
{
    const char *active[] = {getenv("VIRTUAL_ENV"), getenv("CONDA_PREFIX")};
    char path[PATH_MAX];
    void *lib = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    const char *error = lib ? NULL : dlerror();
    snprintf(why, len, "%s; looked for in the loader's folders, %s, in nvidia/*/lib of .venv-cuda and the folders above the program%s%s",
             error ? error : "", toolkit, active[0] || active[1] ? ", and of " : "",
             active[0] ? active[0] : active[1] ? active[1] : "");
    snprintf(path, sizeof(path), "%s/%s", toolkit, name);
    if (!lib && *toolkit)
        lib = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!lib)
        lib = above_program(name);
    for (int i = 0; i < 2 && !lib; i++)
        if (active[i])
            lib = in_packages(active[i], packages, name);
    return lib;
}
