/* SPDX-License-Identifier: Apache-2.0 */
/* What scripts/gpu-check asks of a driver's libcuda.so.1 where there is no nvidia-smi, with one GPU. */
#include <stddef.h>
#include <stdio.h>

int cuInit(unsigned flags);
int cuDriverGetVersion(int *version);
int cuDeviceGet(int *device, int index);
int cuDeviceGetAttribute(int *value, int attribute, int device);
int cuDeviceGetName(char *name, int len, int device);
int cuDeviceTotalMem_v2(size_t *bytes, int device);

static int is_ready;

int cuInit(unsigned flags)
{
    is_ready = !flags;
    return 0;
}

int cuDriverGetVersion(int *version)
{
    *version = 13000;
    return !is_ready;
}

int cuDeviceGet(int *device, int index)
{
    *device = 0;
    return index || !is_ready;
}

int cuDeviceGetAttribute(int *value, int attribute, int device)
{
    *value = attribute == 75 ? 12 : 1;
    return device || attribute < 75 || attribute > 76;
}

int cuDeviceGetName(char *name, int len, int device)
{
    snprintf(name, (size_t)len, "GPU of a driver alone");
    return device;
}

int cuDeviceTotalMem_v2(size_t *bytes, int device)
{
    *bytes = (size_t)3 << 30;
    return device;
}
