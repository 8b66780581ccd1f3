/* SPDX-License-Identifier: Apache-2.0 */
/* cuDNN's engine is a module beside the program: if it or cuDNN is missing, attention is tiled. */
#include <dlfcn.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "fused.h"

typedef const struct mt_fused_engine *(*engine_fn)(void);

/* Whether the program runs in its build folder; then it uses the module there, not an older installed one. */
static bool runs_in_build(void)
{
    char exe[4096];
    ssize_t n = readlink("/proc/self/exe", exe, sizeof(exe));
    size_t root = strlen(MT_CUDNN_MODULE_BUILT) - strlen("cuda/megatrain-cudnn.so");
    return n > (ssize_t)root && !memcmp(exe, MT_CUDNN_MODULE_BUILT, root);
}

bool mt_cuda_fused_built(void)
{
    return true;
}

const struct mt_fused_engine *mt_cuda_fused_engine(char *why, size_t why_len)
{
    bool build = runs_in_build();
    /* never closed, like CUDA's libraries */
    void *lib = dlopen(build ? MT_CUDNN_MODULE_BUILT : MT_CUDNN_MODULE_INSTALLED, RTLD_NOW | RTLD_LOCAL);
    if (!lib) { /* reports why this place failed: the other place is often empty */
        snprintf(why, why_len, "%s", dlerror());
        lib = dlopen(build ? MT_CUDNN_MODULE_INSTALLED : MT_CUDNN_MODULE_BUILT, RTLD_NOW | RTLD_LOCAL);
    }
    if (!lib)
        return NULL;
    engine_fn get = (engine_fn)dlsym(lib, "mt_cudnn_engine");
    if (!get) {
        snprintf(why, why_len, "%s", dlerror());
        return NULL;
    }
    return get();
}
