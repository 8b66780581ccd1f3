/* SPDX-License-Identifier: Apache-2.0 */
/* cuDNN's engine is a module beside the program: if it or cuDNN is missing, attention is tiled. */
#include <dlfcn.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "fused.h"
#include "libraries.h"

typedef const struct mt_fused_engine *(*engine_fn)(void);

#define IN_BUILD "cuda/megatrain-cudnn.so"

/*
 * The module of the build folder that the program runs in, wherever that folder is now: a build may be carried to
 * another machine. Programs are one folder (cli) or two (tests/device) below it. False: it runs elsewhere.
 */
static bool module_of_build(char *path, size_t len)
{
    ssize_t n = readlink("/proc/self/exe", path, len - sizeof(IN_BUILD));
    path[n > 0 ? n : 0] = 0;
    for (int up = 0; up < 3; up++) {
        char *slash = strrchr(path, '/');
        if (!slash)
            return false;
        slash[1] = 0;
        if (up > 0) {
            memcpy(slash + 1, IN_BUILD, sizeof(IN_BUILD));
            if (!access(path, R_OK))
                return true;
        }
        *slash = 0;
    }
    return false;
}

bool mt_cuda_fused_built(void)
{
    return true;
}

static void *open_module(char *why, size_t why_len)
{
    char built[4096];
    bool build = module_of_build(built, sizeof(built)); /* not an older installed one */
    /* never closed, like CUDA's libraries */
    void *lib = dlopen(build ? built : MT_CUDNN_MODULE_INSTALLED, RTLD_NOW | RTLD_LOCAL);
    if (!lib) { /* reports why this place failed: the other place is often empty */
        snprintf(why, why_len, "%s", dlerror());
        lib = dlopen(build ? MT_CUDNN_MODULE_INSTALLED : MT_CUDNN_MODULE_BUILT, RTLD_NOW | RTLD_LOCAL);
    }
    return lib;
}

const struct mt_fused_engine *mt_cuda_fused_engine(char *why, size_t why_len)
{
    char unheard[256];
    void *lib = open_module(why, why_len);
    /* What it needs may lie where the loader does not look by itself; once opened, a library is found by its name. */
    if (!lib && mt_cuda_library(MT_CUDNN_NEEDS, "", unheard, sizeof(unheard)) &&
        mt_cuda_library(MT_NVRTC_NEEDS, "", unheard, sizeof(unheard)))
        lib = open_module(why, why_len);
    if (!lib)
        return NULL;
    engine_fn get = (engine_fn)dlsym(lib, "mt_cudnn_engine");
    if (!get) {
        snprintf(why, why_len, "%s", dlerror());
        return NULL;
    }
    return get();
}
