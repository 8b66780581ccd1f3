/* SPDX-License-Identifier: Apache-2.0 */
#include "hw/gpu.h"

#include <dlfcn.h>
#include <glob.h>
#include <stdio.h>
#include <string.h>
#include <sys/utsname.h>

#include "base/fs.h"

static bool is_there(const char *root, const char *pattern)
{
    glob_t found;
    bool any = !glob(MT_PATH("%s%s", root, pattern), 0, NULL, &found);
    if (any)
        globfree(&found);
    return any;
}

/* A toolkit's stub of the library, and a driver without a GPU, fail to start. */
static bool driver_has_one(void)
{
    int n = 0;
    void *lib = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    int (*init)(unsigned) = lib ? (int (*)(unsigned))dlsym(lib, "cuInit") : NULL;
    int (*count)(int *) = lib ? (int (*)(int *))dlsym(lib, "cuDeviceGetCount") : NULL;
    return init && count && !init(0) && !count(&n) && n > 0; /* the library stays: CUDA may use it, too */
}

static bool tool_lists_one(void)
{
    char line[16];
    // a constant command. NOLINTNEXTLINE(cert-env33-c)
    FILE *f = popen("timeout 5 nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null", "r");
    if (!f)
        return false;
    bool any = fgets(line, sizeof(line), f) != NULL;
    return !pclose(f) && any;
}

const char *mt_hw_gpu_shown_by(const char *root)
{
    return is_there(root, "/proc/driver/nvidia/gpus/*")      ? "/proc/driver/nvidia"
           : is_there(root, "/usr/lib/wsl/lib/libcuda.so.1") ? "/usr/lib/wsl/lib"
           : *root                                           ? NULL
           : driver_has_one()                                ? "libcuda.so.1"
           : tool_lists_one()                                ? "nvidia-smi"
                                                             : NULL;
}

bool mt_hw_on_wsl(void)
{
    struct utsname u;
    return !uname(&u) && strcasestr(u.release, "microsoft");
}
