/* SPDX-License-Identifier: Apache-2.0 */
/* Host memory that copies may reach without a detour: registered, or allocated so. */
#include <pthread.h>
#include <stdlib.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/utsname.h>
#include <unistd.h>

#include "emu.h"

enum { EVERY = -1 };

struct range {
    char *base;
    size_t bytes;
    bool owned; /* by cudaMallocHost */
    int device; /* that it is locked for; EVERY: for all (portable) */
    bool mapped; /* kernels may have it: its address on the device was asked for */
};

static pthread_rwlock_t lock = PTHREAD_RWLOCK_INITIALIZER;
static struct range *ranges; /* by address, apart */
static bool spent; /* MT_EMU_WSL: once it has refused, until all is unlocked */
static size_t n_ranges, capacity, n_twice, bytes_of[2]; /* registered, allocated */

/* The first range that ends behind p. */
static size_t first_behind(const char *p)
{
    size_t lo = 0, hi = n_ranges;
    while (lo < hi) {
        size_t mid = (lo + hi) / 2;
        if (ranges[mid].base + ranges[mid].bytes <= p)
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo;
}

enum mt_emu_pin mt_emu_pin_state(int device, const void *ptr, size_t bytes)
{
    const char *p = ptr, *end = p + bytes;
    bool some = false, all = false;
    pthread_rwlock_rdlock(&lock);
    for (size_t i = first_behind(p); i < n_ranges && ranges[i].base < end; i++)
        if (ranges[i].device == EVERY || ranges[i].device == device) {
            some = true;
            all = ranges[i].base <= p && ranges[i].base + ranges[i].bytes >= end;
        }
    pthread_rwlock_unlock(&lock);
    return all ? MT_EMU_PINNED : some ? MT_EMU_PARTLY_PINNED : MT_EMU_PAGEABLE;
}

static bool refuses(size_t bytes, bool owned)
{
    size_t most = owned ? mt_emu_settings()->buffer_bytes : mt_emu_settings()->pin_bytes;
    bool over = bytes_of[owned] + bytes > most;
    spent |= over && getenv("MT_EMU_WSL");
    return over || spent;
}

static cudaError_t add(char *p, size_t bytes, bool owned, bool portable)
{
    size_t i = first_behind(p);
    if (i < n_ranges && ranges[i].base < p + bytes)
        return cudaErrorHostMemoryAlreadyRegistered;
    if (refuses(bytes, owned))
        return cudaErrorMemoryAllocation;
    if (n_ranges == capacity) {
        size_t n = capacity ? 2 * capacity : 64;
        struct range *r = realloc(ranges, n * sizeof(*r));
        if (!r)
            return cudaErrorMemoryAllocation;
        ranges = r;
        capacity = n;
    }
    memmove(ranges + i + 1, ranges + i, (n_ranges - i) * sizeof(*ranges));
    ranges[i] = (struct range){p, bytes, owned, portable ? EVERY : mt_emu_device(), false};
    n_ranges++;
    bytes_of[owned] += bytes;
    return cudaSuccess;
}

/* Takes the range that begins at p out of the table. */
static bool take_out(const char *p, bool owned)
{
    size_t i = first_behind(p);
    if (i == n_ranges || ranges[i].base != p || ranges[i].owned != owned)
        return false;
    bytes_of[owned] -= ranges[i].bytes;
    memmove(ranges + i, ranges + i + 1, (n_ranges - i - 1) * sizeof(*ranges));
    n_ranges--;
    spent &= n_ranges > 0;
    return true;
}

cudaError_t cudaHostRegister(void *ptr, size_t bytes, unsigned flags)
{
    if (!ptr || !bytes || flags & ~(unsigned)(cudaHostRegisterPortable | cudaHostRegisterMapped | cudaHostRegisterReadOnly) ||
        mt_emu_is_device(ptr))
        return mt_emu_result(cudaErrorInvalidValue);
    const char *ms = getenv("MT_EMU_PIN_MS");
    if (ms)
        usleep((useconds_t)atoi(ms) * 1000);
    pthread_rwlock_wrlock(&lock);
    cudaError_t e = add(ptr, bytes, false, flags & cudaHostRegisterPortable);
    n_twice += e == cudaErrorHostMemoryAlreadyRegistered;
    pthread_rwlock_unlock(&lock);
    return mt_emu_result(e);
}

/* The address is the same, but only what was asked for may be in a kernel's arguments. */
cudaError_t cudaHostGetDevicePointer(void **device, void *host, unsigned flags)
{
    pthread_rwlock_wrlock(&lock);
    size_t i = first_behind(host);
    bool there = i < n_ranges && ranges[i].base <= (char *)host && !flags;
    if (there)
        ranges[i].mapped = true;
    pthread_rwlock_unlock(&lock);
    *device = there ? host : NULL;
    return mt_emu_result(there ? cudaSuccess : cudaErrorInvalidValue);
}

bool mt_emu_mapped(const void *p, uintptr_t *base, size_t *bytes)
{
    pthread_rwlock_rdlock(&lock);
    size_t i = first_behind(p);
    bool ok = i < n_ranges && ranges[i].base <= (const char *)p && ranges[i].mapped;
    *base = ok ? (uintptr_t)ranges[i].base : 0;
    *bytes = ok ? ranges[i].bytes : 0;
    pthread_rwlock_unlock(&lock);
    return ok;
}

size_t mt_emu_registered_twice(void)
{
    pthread_rwlock_rdlock(&lock);
    size_t n = n_twice;
    pthread_rwlock_unlock(&lock);
    return n;
}

cudaError_t cudaHostUnregister(void *ptr)
{
    mt_emu_drain_all();
    pthread_rwlock_wrlock(&lock);
    bool found = take_out(ptr, false);
    pthread_rwlock_unlock(&lock);
    return mt_emu_result(found ? cudaSuccess : cudaErrorHostMemoryNotRegistered);
}

cudaError_t cudaHostAlloc(void **ptr, size_t bytes, unsigned flags)
{
    if (!ptr || flags & ~(unsigned)cudaHostAllocPortable)
        return mt_emu_result(cudaErrorInvalidValue);
    *ptr = NULL;
    if (!bytes)
        return mt_emu_result(cudaSuccess);
    void *p = NULL;
    cudaError_t e = posix_memalign(&p, 4096, bytes) ? cudaErrorMemoryAllocation : cudaSuccess;
    if (!e) {
        pthread_rwlock_wrlock(&lock);
        e = add(p, bytes, true, flags & cudaHostAllocPortable);
        pthread_rwlock_unlock(&lock);
    }
    if (e) {
        free(p);
        return mt_emu_result(e);
    }
    *ptr = p;
    return mt_emu_result(cudaSuccess);
}

cudaError_t cudaMallocHost(void **ptr, size_t bytes)
{
    return cudaHostAlloc(ptr, bytes, cudaHostAllocDefault);
}

cudaError_t cudaFreeHost(void *ptr)
{
    if (!ptr)
        return mt_emu_result(cudaSuccess);
    mt_emu_drain_all();
    pthread_rwlock_wrlock(&lock);
    bool found = take_out(ptr, true);
    pthread_rwlock_unlock(&lock);
    if (found)
        free(ptr);
    return mt_emu_result(found ? cudaSuccess : cudaErrorInvalidValue);
}

/* In place of libc's: with MT_EMU_WSL the kernel is that of Windows' subsystem. */
int uname(struct utsname *u)
{
    long rc = syscall(SYS_uname, u);
    if (!rc && getenv("MT_EMU_WSL"))
        snprintf(u->release, sizeof(u->release), "5.15.167.4-microsoft-standard-WSL2");
    return (int)rc;
}
