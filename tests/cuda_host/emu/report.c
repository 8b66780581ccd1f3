/* SPDX-License-Identifier: Apache-2.0 */
/* Settings from the environment, complaints, and CUDA's two kinds of error state. */
#include <errno.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "emu.h"

static struct mt_emu_settings settings;
static pthread_once_t settings_once = PTHREAD_ONCE_INIT;
static _Atomic cudaError_t sticky;
static _Thread_local cudaError_t last_error;
static _Thread_local bool in_host_function;

/* A number with an optional K, M or G; anything else is refused, so that a typo does not pass a test. */
static unsigned long long setting(const char *name, unsigned long long otherwise)
{
    const char *v = getenv(name);
    char *end;
    if (!v || !*v)
        return otherwise;
    errno = 0;
    unsigned long long n = strtoull(v, &end, 0);
    const char *unit = *end ? strchr("KMG", *end) : NULL;
    if (errno || end == v || *v == '-' || (*end && (!unit || end[1])))
        mt_emu_die("%s = \"%s\" is not a number", name, v);
    return unit ? n << (*unit == 'K' ? 10 : *unit == 'M' ? 20 : 30) : n;
}

static void read_settings(void)
{
    settings = (struct mt_emu_settings){
        .seed = setting("MT_EMU_SEED", 1),
        .jitter_us = (unsigned)setting("MT_EMU_JITTER_US", 0),
        .hold_up_us = (unsigned)setting("MT_EMU_HOLD_UP_US", 0),
        .devices = (int)setting("MT_EMU_DEVICES", 1),
        .connections = (unsigned)setting("CUDA_DEVICE_MAX_CONNECTIONS", 8),
        .workers = (unsigned)setting("MT_EMU_WORKERS", 2),
        .memory_bytes = (size_t)setting("MT_EMU_MEMORY", 2ull << 30),
        .pin_bytes = (size_t)setting("MT_EMU_PIN_LIMIT", SIZE_MAX),
        .kernel_bytes = (size_t)setting("MT_EMU_KERNEL", 64 << 10),
        .plan_bytes = (size_t)setting("MT_EMU_PLAN", 1 << 20),
        .no_device = setting("MT_EMU_NO_DEVICE", 0) != 0,
        .name = getenv("MT_EMU_NAME"),
        .capability = (int)setting("MT_EMU_CAPABILITY", 90),
    };
    if (!settings.name)
        settings.name = "host emulation";
    if (setting("MT_EMU_NO_PIN", 0))
        settings.pin_bytes = 0;
    settings.buffer_bytes = setting("MT_EMU_NO_PIN", 0) > 1 ? 16 << 20 : SIZE_MAX;
    if (settings.devices < 1 || settings.devices > MT_EMU_MAX_DEVICES)
        mt_emu_die("MT_EMU_DEVICES = %d (1 to %d)", settings.devices, MT_EMU_MAX_DEVICES);
    if (settings.workers < 1 || settings.workers > 64)
        mt_emu_die("MT_EMU_WORKERS = %u (1 to 64)", settings.workers);
}

const struct mt_emu_settings *mt_emu_settings(void)
{
    pthread_once(&settings_once, read_settings);
    return &settings;
}

static void say(const char *fmt, va_list ap)
{
    char line[1024];
    int n = vsnprintf(line, sizeof(line), fmt, ap);
    if (n > 0)
        fprintf(stderr, "cuda emulation: %s\n", line);
    fflush(stderr);
}

void mt_emu_complain(const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    say(fmt, ap);
    va_end(ap);
}

void mt_emu_die(const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    say(fmt, ap);
    va_end(ap);
    abort();
}

cudaError_t mt_emu_result(cudaError_t e)
{
    if (in_host_function)
        return cudaErrorNotPermitted;
    cudaError_t s = atomic_load(&sticky);
    e = s ? s : e;
    if (e)
        last_error = e;
    return e;
}

cudaError_t mt_emu_make_sticky(cudaError_t e)
{
    cudaError_t none = cudaSuccess;
    atomic_compare_exchange_strong(&sticky, &none, e);
    return mt_emu_result(e);
}

cudaError_t mt_emu_fail_launch(void)
{
    return mt_emu_make_sticky(cudaErrorIllegalAddress);
}

void mt_emu_enter_host_function(void)
{
    in_host_function = true;
}

void mt_emu_leave_host_function(void)
{
    in_host_function = false;
}

cudaError_t cudaPeekAtLastError(void)
{
    cudaError_t s = atomic_load(&sticky);
    return s ? s : last_error;
}

cudaError_t cudaGetLastError(void)
{
    cudaError_t e = cudaPeekAtLastError();
    last_error = cudaSuccess;
    return e;
}

cudaError_t cudaDeviceReset(void)
{
    mt_emu_drain_all();
    atomic_store(&sticky, cudaSuccess);
    last_error = cudaSuccess;
    return cudaSuccess;
}

static const struct {
    cudaError_t code;
    const char *name, *text;
} errors[] = {
#define E(name, text) {name, #name, text}
    E(cudaSuccess, "no error"),
    E(cudaErrorInvalidValue, "invalid argument"),
    E(cudaErrorMemoryAllocation, "out of memory"),
    E(cudaErrorInitializationError, "initialization error"),
    E(cudaErrorInvalidConfiguration, "invalid configuration argument"),
    E(cudaErrorInvalidPitchValue, "invalid pitch argument"),
    E(cudaErrorInvalidHostPointer, "invalid host pointer"),
    E(cudaErrorInvalidDevicePointer, "invalid device pointer"),
    E(cudaErrorInvalidMemcpyDirection, "invalid copy direction for memcpy"),
    E(cudaErrorStubLibrary, "CUDA driver is a stub library"),
    E(cudaErrorInsufficientDriver, "CUDA driver version is insufficient for CUDA runtime version"),
    E(cudaErrorDevicesUnavailable, "CUDA-capable device(s) is/are busy or unavailable"),
    E(cudaErrorInvalidDeviceFunction, "invalid device function"),
    E(cudaErrorNoDevice, "no CUDA-capable device is detected"),
    E(cudaErrorInvalidDevice, "invalid device ordinal"),
    E(cudaErrorNoKernelImageForDevice, "no kernel image is available for execution on the device"),
    E(cudaErrorUnsupportedPtxVersion, "the provided PTX was compiled with an unsupported toolchain."),
    E(cudaErrorOperatingSystem, "OS call failed or operation not supported on this OS"),
    E(cudaErrorInvalidResourceHandle, "invalid resource handle"),
    E(cudaErrorNotReady, "device not ready"),
    E(cudaErrorIllegalAddress, "an illegal memory access was encountered"),
    E(cudaErrorLaunchOutOfResources, "too many resources requested for launch"),
    E(cudaErrorHostMemoryAlreadyRegistered, "part or all of the requested memory range is already mapped"),
    E(cudaErrorHostMemoryNotRegistered, "pointer does not correspond to a registered memory region"),
    E(cudaErrorLaunchFailure, "unspecified launch failure"),
    E(cudaErrorNotPermitted, "operation not permitted"),
    E(cudaErrorNotSupported, "operation not supported"),
    E(cudaErrorSystemNotReady, "system not yet initialized"),
    E(cudaErrorSystemDriverMismatch, "system has unsupported display driver / cuda driver combination"),
    E(cudaErrorCompatNotSupportedOnDevice, "forward compatibility was attempted on non supported HW"),
    E(cudaErrorUnknown, "unknown error"),
#undef E
};

const char *cudaGetErrorName(cudaError_t e)
{
    for (size_t i = 0; i < sizeof(errors) / sizeof(errors[0]); i++)
        if (errors[i].code == e)
            return errors[i].name;
    return "unrecognized error code";
}

const char *cudaGetErrorString(cudaError_t e)
{
    for (size_t i = 0; i < sizeof(errors) / sizeof(errors[0]); i++)
        if (errors[i].code == e)
            return errors[i].text;
    return "unrecognized error code";
}
