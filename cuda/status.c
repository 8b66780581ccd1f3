/* SPDX-License-Identifier: Apache-2.0 */
/* Results of CUDA's calls: their texts, and the first error, which sticks to the device. */
#include <stdarg.h>
#include <stdio.h>

#include "cuda_priv.h"

/* What a call reports that was not at fault. */
static const char earlier[] = "an operation before this one failed: with CUDA_LAUNCH_BLOCKING=1 in the environment, CUDA "
                              "reports it at once";

static const char no_code[] = "this build has no code for the GPU: scripts/build makes it again for this machine's, or give "
                              "-Dgpu-archs";

static const char no_module[] = "the kernel's module nvidia_uvm may not answer: after a suspend load it again (modprobe -r nvidia_uvm, "
                                "modprobe nvidia_uvm), give a container /dev/nvidia-uvm, or reboot";

/* Errors whose texts do not say what to do. */
static const struct {
    cudaError_t rc;
    const char *mend;
} mends[] = {
    {cudaErrorStubLibrary, "take the toolkit's folder `stubs` off LD_LIBRARY_PATH"},
    {cudaErrorDevicesUnavailable, "another program has the GPU for itself"},
    {cudaErrorInvalidDeviceFunction, no_code},
    {cudaErrorNoKernelImageForDevice, no_code},
    {cudaErrorUnsupportedPtxVersion, "this build has no code for the GPU but what a newer driver could compile: update "
                                     "the driver, or build for the GPU with scripts/build, or -Dgpu-archs"},
    {cudaErrorSystemNotReady, "start the service nvidia-fabricmanager, which GPUs behind NVSwitch need"},
    {cudaErrorSystemDriverMismatch, "libcuda and the driver in the kernel are of different versions: reboot after an update"},
    {cudaErrorCompatNotSupportedOnDevice, "this GPU cannot use the libcuda of a newer driver: take the folder `compat` off "
                                          "LD_LIBRARY_PATH"},
    {cudaErrorUnknown, no_module},
    {cudaErrorOperatingSystem, no_module},
    {cudaErrorNotReady, "under WSL Windows had no room for the GPU's memory: lower memory.device_budget, or end what else uses "
                        "the GPU"},
    {cudaErrorECCUncorrectable, "the GPU's memory is faulty: see nvidia-smi -q"},
    {cudaErrorLaunchTimeout, "the GPU has a display, which limits the time of an operation: use a GPU without one, end the "
                             "desktop, or lower train.micro_batch, or train.chunk if rows are long"},
    {cudaErrorIllegalAddress, earlier},
    {cudaErrorIllegalInstruction, earlier},
    {cudaErrorMisalignedAddress, earlier},
    {cudaErrorLaunchFailure, earlier},
};

const char *mt_cuda_error_text(char *buf, size_t len, cudaError_t rc)
{
    const char *mend = NULL;
    for (size_t i = 0; i < MT_ARRAY_LEN(mends); i++)
        if (mends[i].rc == rc)
            mend = mends[i].mend;
    snprintf(buf, len, "%s: %s%s%s%s", cudaGetErrorName(rc), cudaGetErrorString(rc), mend ? " (" : "", mend ? mend : "",
             mend ? ")" : "");
    return buf;
}

const char *mt_cuda_short_of_memory(char *buf, size_t len, bool sure)
{
    enum { LITTLE = 64 << 20 };
    size_t free_bytes = 0, total;
    char left[32];
    *buf = 0;
    if ((cudaMemGetInfo(&free_bytes, &total) == cudaSuccess && free_bytes < LITTLE) || sure)
        snprintf(buf, len, "; %s of the GPU's memory are free beside memory.device_budget: lower that",
                 mt_format_bytes(left, sizeof(left), free_bytes));
    return buf;
}

int mt_cuda_stick(struct mt_cuda_device *d, const struct mt_err *error)
{
    pthread_mutex_lock(&d->lock);
    if (!atomic_load(&d->failed)) {
        d->error = *error;
        atomic_store(&d->failed, true);
    }
    pthread_mutex_unlock(&d->lock);
    return error->code;
}

static int sticky_error(struct mt_cuda_device *d, struct mt_err *err)
{
    pthread_mutex_lock(&d->lock);
    int code = d->error.code;
    if (err)
        *err = d->error;
    pthread_mutex_unlock(&d->lock);
    return code;
}

int mt_cuda_check(struct mt_cuda_device *d, cudaError_t rc, struct mt_err *err, const char *fmt, ...)
{
    if (rc == cudaSuccess)
        return 0;
    struct mt_err e;
    char what[400], text[300], memory[128];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(what, sizeof(what), fmt, ap);
    va_end(ap);
    mt_fail(&e, MT_ERR_DEVICE, -EIO, "GPU %d: %s: %s%s", d->index, what,
            mt_cuda_error_text(text, sizeof(text), rc), mt_cuda_short_of_memory(memory, sizeof(memory), false));
    mt_cuda_stick(d, &e);
    if (err)
        *err = e;
    return e.code;
}

int mt_cuda_enter(struct mt_cuda_device *d, struct mt_err *err)
{
    if (atomic_load_explicit(&d->failed, memory_order_acquire))
        return sticky_error(d, err);
    return mt_cuda_check(d, cudaSetDevice(d->index), err, "cannot be selected");
}
