/* SPDX-License-Identifier: Apache-2.0 */
/* cuDNN's engine is a module beside the program: where it or cuDNN is missing, attention is tiled. */
#include <dlfcn.h>
#include <stdio.h>

#include "fused.h"

typedef const struct mt_fused_engine *(*engine_fn)(void);

const struct mt_fused_engine *mt_cuda_fused_engine(char *why, size_t why_len)
{
    /* in the build's folder, or where it was installed; never closed, as CUDA's libraries are not */
    void *lib = dlopen(MT_CUDNN_MODULE_INSTALLED, RTLD_NOW | RTLD_LOCAL);
    if (!lib)
        lib = dlopen(MT_CUDNN_MODULE_BUILT, RTLD_NOW | RTLD_LOCAL);
    engine_fn get = lib ? (engine_fn)dlsym(lib, "mt_cudnn_engine") : NULL;
    if (!get) {
        snprintf(why, why_len, "%s", dlerror());
        return NULL;
    }
    return get();
}
