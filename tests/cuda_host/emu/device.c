/* SPDX-License-Identifier: Apache-2.0 */
/* The devices, which one a thread has chosen, and launches. */
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "emu.h"

enum { VERSION = CUDART_VERSION, DEFAULT_SHARED = 48 << 10 };

/* Most shared memory of a block, by compute capability (CUDA programming guide, "technical specifications"). */
static int max_shared(void)
{
    switch (mt_emu_settings()->capability) {
    case 80:
    case 87:
        return 163 << 10;
    case 86:
    case 89:
    case 120:
    case 121:
        return 99 << 10;
    default:
        return 227 << 10;
    }
}

/* MT_EMU_DRIVER: the newest CUDA that the driver supports. */
static int driver_version(void)
{
    const char *driver = getenv("MT_EMU_DRIVER");
    return mt_emu_settings()->no_device ? 0 : driver ? atoi(driver) : VERSION;
}

static cudaError_t result(cudaError_t e)
{
    const char *broken = getenv("MT_EMU_ERROR");
    return mt_emu_result(broken                        ? (cudaError_t)atoi(broken)
                         : mt_emu_settings()->no_device ? cudaErrorNoDevice
                         : driver_version() < VERSION ? cudaErrorInsufficientDriver
                                                      : e);
}

static _Thread_local int current;

int mt_emu_device(void)
{
    return current;
}

static bool is_device(int device)
{
    return device >= 0 && device < mt_emu_settings()->devices;
}

/* The device's part of "A;B", or the last one. */
static void product_name(char *out, size_t len, int device)
{
    const char *at = mt_emu_settings()->name, *end;
    while (device-- > 0 && (end = strchr(at, ';')))
        at = end + 1;
    snprintf(out, len, "%.*s", (int)strcspn(at, ";"), at);
}

cudaError_t cudaDriverGetVersion(int *version)
{
    *version = driver_version();
    return mt_emu_result(cudaSuccess);
}

cudaError_t cudaRuntimeGetVersion(int *version)
{
    *version = VERSION;
    return mt_emu_result(cudaSuccess);
}

cudaError_t cudaGetDeviceCount(int *count)
{
    *count = mt_emu_settings()->no_device ? 0 : mt_emu_settings()->devices;
    return result(cudaSuccess);
}

cudaError_t cudaGetDevice(int *device)
{
    *device = mt_emu_device();
    return result(cudaSuccess);
}

cudaError_t cudaSetDevice(int device)
{
    cudaError_t e = result(is_device(device) ? cudaSuccess : cudaErrorInvalidDevice);
    if (!e)
        current = device;
    return e;
}

cudaError_t cudaSetDeviceFlags(unsigned flags)
{
    (void)flags;
    return result(cudaSuccess);
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *prop, int device)
{
    cudaError_t e = result(is_device(device) ? cudaSuccess : cudaErrorInvalidDevice);
    if (e)
        return e;
    *prop = (struct cudaDeviceProp){
        .totalGlobalMem = mt_emu_settings()->memory_bytes,
        .sharedMemPerBlock = DEFAULT_SHARED,
        .sharedMemPerBlockOptin = max_shared(),
        .warpSize = MT_EMU_WARP,
        .maxThreadsPerBlock = MT_EMU_MAX_THREADS,
        .maxGridSize = {2147483647, 65535, 65535},
        .major = mt_emu_settings()->capability / 10,
        .minor = mt_emu_settings()->capability % 10,
        .multiProcessorCount = 2,
        .asyncEngineCount = 2,
        .memoryBusWidth = 64,
        .l2CacheSize = 1 << 20,
        .integrated = getenv("MT_EMU_INTEGRATED") != NULL,
        .pciBusID = device,
        .uuid = {{0x4d, 0x54, [15] = (char)device}},
    };
    product_name(prop->name, sizeof(prop->name), device);
    return e;
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attr, int device)
{
    struct cudaDeviceProp p;
    cudaError_t e = cudaGetDeviceProperties(&p, device);
    if (e)
        return e;
    switch (attr) {
    case cudaDevAttrMaxThreadsPerBlock: *value = p.maxThreadsPerBlock; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = DEFAULT_SHARED; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = max_shared(); break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = max_shared() + 1024; break;
    case cudaDevAttrWarpSize: *value = MT_EMU_WARP; break;
    case cudaDevAttrKernelExecTimeout: *value = getenv("MT_EMU_DISPLAY") && atoi(getenv("MT_EMU_DISPLAY")); break;
    case cudaDevAttrClockRate:
    case cudaDevAttrMemoryClockRate: *value = 1000000; break;
    case cudaDevAttrMultiProcessorCount: *value = p.multiProcessorCount; break;
    case cudaDevAttrGlobalMemoryBusWidth: *value = p.memoryBusWidth; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = 2048; break;
    case cudaDevAttrAsyncEngineCount: *value = p.asyncEngineCount; break;
    case cudaDevAttrComputeCapabilityMajor: *value = p.major; break;
    case cudaDevAttrComputeCapabilityMinor: *value = p.minor; break;
    case cudaDevAttrHostRegisterSupported: *value = 1; break;
    default: return mt_emu_result(cudaErrorInvalidValue);
    }
    return e;
}

cudaError_t cudaDeviceGetPCIBusId(char *id, int len, int device)
{
    if (!is_device(device) || !id || len < 13)
        return result(!is_device(device) ? cudaErrorInvalidDevice : cudaErrorInvalidValue);
    snprintf(id, (size_t)len, "0000:%02x:00.0", (unsigned)device);
    return result(cudaSuccess);
}

cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest)
{
    *least = 0;
    *greatest = -5;
    return result(cudaSuccess);
}

/* --- launches ------------------------------------------------------------------------------- */

/* Kernels that may have more than 48 KiB of dynamic shared memory, by device. */
struct allowance {
    int device;
    const void *kernel;
    size_t bytes;
};
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct allowance allowances[1024];
static size_t n_allowances;

static struct allowance *find_allowance(const void *kernel)
{
    for (size_t i = 0; i < n_allowances; i++)
        if (allowances[i].kernel == kernel && allowances[i].device == current)
            return &allowances[i];
    return NULL;
}

cudaError_t cudaFuncSetAttribute(const void *func, enum cudaFuncAttribute attr, int value)
{
    cudaError_t e = cudaSuccess;
    if (attr == cudaFuncAttributePreferredSharedMemoryCarveout)
        return mt_emu_result(e);
    if (attr != cudaFuncAttributeMaxDynamicSharedMemorySize || value < 0 || value > max_shared())
        return mt_emu_result(cudaErrorInvalidValue);
    pthread_mutex_lock(&lock);
    struct allowance *a = find_allowance(func);
    if (!a && n_allowances < sizeof(allowances) / sizeof(allowances[0])) {
        a = &allowances[n_allowances++];
        a->kernel = func;
        a->device = current;
    }
    if (a)
        a->bytes = (size_t)value;
    else
        e = cudaErrorUnknown;
    pthread_mutex_unlock(&lock);
    return mt_emu_result(e);
}

/* MT_EMU_LAUNCH_ERROR: what every launch returns, and every question about a kernel. */
static cudaError_t launch_error(void)
{
    const char *broken = getenv("MT_EMU_LAUNCH_ERROR");
    return broken ? (cudaError_t)atoi(broken) : cudaSuccess;
}

cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *attributes, const void *func)
{
    (void)func;
    attributes->maxThreadsPerBlock = MT_EMU_MAX_THREADS;
    return result(launch_error());
}

static bool shared_fits(const void *kernel, size_t bytes)
{
    if (bytes <= DEFAULT_SHARED)
        return true;
    pthread_mutex_lock(&lock);
    const struct allowance *a = find_allowance(kernel);
    bool ok = a && bytes <= a->bytes;
    pthread_mutex_unlock(&lock);
    return ok;
}

/* Kernels are loaded as they are first launched on a device. */
static bool load(const void *kernel)
{
    enum { MOST = 512 };
    static const void *loaded[MT_EMU_MAX_DEVICES][MOST];
    static size_t n_loaded[MT_EMU_MAX_DEVICES];
    pthread_mutex_lock(&lock);
    size_t i = 0, n = n_loaded[current];
    while (i < n && loaded[current][i] != kernel)
        i++;
    bool ok = i < n || (n < MOST && mt_emu_driver_take(mt_emu_settings()->kernel_bytes));
    if (ok && i == n)
        loaded[current][n_loaded[current]++] = kernel;
    pthread_mutex_unlock(&lock);
    return ok;
}

struct launch {
    struct mt_emu_launch launch;
    uint64_t seed;
    int device;
};

static void run_launch(void *args)
{
    const struct launch *l = args;
    mt_emu_run_grid(&l->launch, l->device, l->seed);
}

static void done_launch(void *args)
{
    const struct launch *l = args;
    l->launch.free_args(l->launch.args);
}

static _Atomic uint64_t n_launches;

size_t mt_emu_launches(void)
{
    return atomic_load(&n_launches);
}

cudaError_t mt_emu_launch(const struct mt_emu_launch *l)
{
    struct mt_emu_dim g = l->grid, b = l->block;
    uint64_t threads = (uint64_t)b.x * b.y * b.z;
    cudaError_t e = launch_error();
    if (e) {
        ;
    } else if (!g.x || !g.y || !g.z || !threads || threads > MT_EMU_MAX_THREADS || b.z > 64 ||
        g.x > 2147483647 || g.y > 65535 || g.z > 65535) {
        mt_emu_complain("kernel %s: a grid of (%u, %u, %u) blocks of (%u, %u, %u) threads is not possible",
                        l->name, g.x, g.y, g.z, b.x, b.y, b.z);
        e = cudaErrorInvalidConfiguration;
    } else if (!shared_fits(l->kernel, l->shared_bytes)) {
        mt_emu_complain("kernel %s: %zu bytes of shared memory are more than it was allowed", l->name,
                        l->shared_bytes);
        e = cudaErrorInvalidValue;
    } else if (mt_emu_device_of_stream(l->stream) != current) {
        mt_emu_complain("kernel %s: its stream is of device %d, and device %d is current", l->name,
                        mt_emu_device_of_stream(l->stream), current);
        e = cudaErrorInvalidResourceHandle;
    } else if (!load(l->kernel)) {
        e = cudaErrorMemoryAllocation;
    }
    struct launch args = {*l, 0, current};
    uint64_t seed = mt_emu_settings()->seed;
    uint64_t number = atomic_fetch_add_explicit(&n_launches, 1, memory_order_relaxed) + 1;
    if (seed) {
        seed += number * 0xd1b54a32d192ed03u;
        args.seed = mt_emu_random(&seed) | 1;
    }
    e = e ? mt_emu_result(e) : mt_emu_submit(l->stream, run_launch, done_launch, &args, sizeof(args));
    if (e)
        l->free_args(l->args);
    return e;
}
