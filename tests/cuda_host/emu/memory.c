/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Device memory: a region of addresses for each device, and a count of what the driver and
 * libraries take beside it. Allocations begin as NaN patterns (a private mapping of one file of
 * 0xFF bytes), freed ones are unmapped, and under AddressSanitizer the gaps between them are
 * poisoned. Where the CPU has protection keys each region has one of its own, which only the
 * emulation's threads that work for that device open: host code that touches device memory, and a
 * kernel that touches another device's, faults, with a message that says why.
 */
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "emu.h"
#include "sanitizers.h"

enum { PAGE = 4096, ALIGNMENT = 512 };
#define FILL_BYTES ((size_t)16 << 20)

struct allocation {
    char *base;
    size_t bytes, pages_bytes;
};

static pthread_rwlock_t lock = PTHREAD_RWLOCK_INITIALIZER;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static char *region;                    /* of the first device; the others' follow */
static size_t region_bytes;             /* of a device */
static size_t used[MT_EMU_MAX_DEVICES]; /* by the driver and libraries, too */
static struct allocation *table;        /* by address */
static size_t n_allocations, capacity;
static int fill_fd = -1, key[MT_EMU_MAX_DEVICES];
static _Thread_local int open_device = MT_EMU_NO_ACCESS;
static struct sigaction old_action;

static size_t round_up(size_t n, size_t to)
{
    return (n + to - 1) / to * to;
}

/* The allocation that holds p, or ends at it; NULL. The lock is held. */
static const struct allocation *find(const char *p)
{
    size_t lo = 0, hi = n_allocations;
    while (lo < hi) {
        size_t mid = (lo + hi) / 2;
        if (table[mid].base <= p)
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo && p <= table[lo - 1].base + table[lo - 1].bytes ? &table[lo - 1] : NULL;
}

static int device_of(const char *p)
{
    return (int)((size_t)(p - region) / region_bytes);
}

static void on_fault(int sig, siginfo_t *info, void *context)
{
    const char *p = info->si_addr;
    if (mt_emu_is_device(p)) {
        const struct allocation *a = find(p);
        if (!a)
            mt_emu_complain("device memory at %p is not allocated: freed, or never taken",
                            (const void *)p);
        else if (open_device != MT_EMU_NO_ACCESS)
            mt_emu_complain("work of device %d touches memory of device %d at %p, byte %zu of an "
                            "allocation of %zu",
                            open_device, device_of(p), (const void *)p, (size_t)(p - a->base),
                            a->bytes);
        else
            mt_emu_complain("host code touches device memory at %p, byte %zu of an allocation of %zu: it "
                            "must be copied to the host first",
                            (const void *)p, (size_t)(p - a->base), a->bytes);
    }
    if (old_action.sa_flags & SA_SIGINFO && old_action.sa_sigaction) {
        old_action.sa_sigaction(sig, info, context);
        return;
    }
    sigaction(sig, &old_action, NULL); /* and the access faults again */
}

static void make_region(void)
{
    struct sigaction sa = {.sa_sigaction = on_fault, .sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER};
    region_bytes = round_up(mt_emu_settings()->memory_bytes, PAGE) * 2 + ((size_t)64 << 20);
    size_t all = region_bytes * (size_t)mt_emu_settings()->devices;
    region = mmap(NULL, all, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (region == MAP_FAILED)
        mt_emu_die("cannot reserve %zu bytes for device memory: %s", all, strerror(errno));
    mt_asan_poison(region, all);
    for (int d = 0; d < mt_emu_settings()->devices; d++)
        key[d] = pkey_alloc(0, PKEY_DISABLE_ACCESS);
    fill_fd = memfd_create("cuda-emulation", MFD_CLOEXEC);
    char *fill = fill_fd >= 0 && !ftruncate(fill_fd, (off_t)FILL_BYTES)
                     ? mmap(NULL, FILL_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, fill_fd, 0)
                     : MAP_FAILED;
    if (fill == MAP_FAILED)
        mt_emu_die("cannot make the pattern of fresh device memory: %s", strerror(errno));
    memset(fill, 0xFF, FILL_BYTES);
    munmap(fill, FILL_BYTES);
    sigaction(SIGSEGV, &sa, &old_action);
}

void mt_emu_device_access(int device)
{
    pthread_once(&once, make_region);
    open_device = device;
    for (int d = 0; d < mt_emu_settings()->devices; d++)
        if (key[d] >= 0)
            pkey_set(key[d], d == device ? 0 : PKEY_DISABLE_ACCESS);
}

bool mt_emu_is_device(const void *p)
{
    return region && (const char *)p >= region &&
           (const char *)p < region + region_bytes * (size_t)mt_emu_settings()->devices;
}

const char *mt_emu_describe(const void *p)
{
    if (!p)
        return "a null pointer";
    if (mt_emu_is_device(p)) {
        pthread_rwlock_rdlock(&lock);
        bool live = find(p);
        pthread_rwlock_unlock(&lock);
        return live ? "device memory" : "device memory that is not allocated";
    }
    return mt_emu_pin_state(mt_emu_device(), p, 1) == MT_EMU_PINNED ? "pinned host memory"
                                                                    : "host memory";
}

bool mt_emu_check_device(const char *what, int device, const void *p, size_t bytes)
{
    pthread_rwlock_rdlock(&lock);
    const struct allocation *a = find(p);
    bool ok = a && (const char *)p + bytes <= a->base + a->bytes;
    size_t there = a ? (size_t)(a->base + a->bytes - (const char *)p) : 0;
    pthread_rwlock_unlock(&lock);
    if (ok && device_of(p) != device) {
        mt_emu_complain("%s: %p is memory of device %d, and the work of device %d", what, p,
                        device_of(p), device);
        return false;
    }
    if (!ok && a)
        mt_emu_complain("%s: %zu bytes of device memory at %p, where %zu are left of its allocation", what,
                        bytes, p, there);
    else if (!ok)
        mt_emu_complain("%s: %p is %s, where device memory belongs", what, p, mt_emu_describe(p));
    return ok;
}

int mt_emu_allocation_of(const void *p, uintptr_t *base, size_t *bytes)
{
    pthread_rwlock_rdlock(&lock);
    const struct allocation *a = find(p);
    bool ok = a && (const char *)p < a->base + a->bytes;
    *base = ok ? (uintptr_t)a->base : 0;
    *bytes = ok ? a->bytes : 0;
    pthread_rwlock_unlock(&lock);
    return ok || mt_emu_mapped(p, base, bytes);
}

int mt_emu_check_pointer(const char *kernel, int arg, const void *p)
{
    uintptr_t base;
    size_t bytes;
    if (mt_emu_mapped(p, &base, &bytes))
        return 1;
    pthread_rwlock_rdlock(&lock);
    bool ok = !p || find(p);
    pthread_rwlock_unlock(&lock);
    if (ok && p && device_of(p) != mt_emu_device()) {
        mt_emu_complain(
            "kernel %s: argument %d is %p, memory of device %d, and the kernel runs on device %d",
            kernel, arg, p, device_of(p), mt_emu_device());
        return 0;
    }
    if (!ok)
        mt_emu_complain("kernel %s: argument %d is %p, %s, where device memory belongs", kernel, arg, p,
                        mt_emu_describe(p));
    return ok;
}

static bool on_this_stack(const char *p)
{
    static _Thread_local char *bottom;
    static _Thread_local size_t bytes;
    pthread_attr_t attr;
    if (!bottom && !pthread_getattr_np(pthread_self(), &attr)) {
        pthread_attr_getstack(&attr, (void **)&bottom, &bytes);
        pthread_attr_destroy(&attr);
    }
    return p >= bottom && p < bottom + bytes;
}

int mt_emu_check_struct(const char *kernel, int arg, const void *p, size_t bytes)
{
    for (size_t at = 0; at + sizeof(void *) <= bytes; at += sizeof(void *)) {
        const char *word;
        memcpy(&word, (const char *)p + at, sizeof(word));
        if (word && mt_emu_is_device(word) && device_of(word) != mt_emu_device()) {
            mt_emu_complain("kernel %s: argument %d has at byte %zu %p, memory of device %d, and "
                            "the kernel runs on device %d",
                            kernel, arg, at, (const void *)word, device_of(word), mt_emu_device());
            return 0;
        }
        if (!word || mt_emu_is_device(word))
            continue;
        if (on_this_stack(word) || mt_emu_pin_state(mt_emu_device(), word, 1) == MT_EMU_PINNED) {
            mt_emu_complain(
                "kernel %s: argument %d has at byte %zu %p, %s, where device memory belongs",
                kernel, arg, at, (const void *)word, mt_emu_describe(word));
            return 0;
        }
    }
    return 1;
}

/* --- allocation ----------------------------------------------------------------------------- */

/* Fresh pages of the pattern; false when the system gives none. */
static bool map_pattern(char *p, size_t bytes)
{
    for (size_t at = 0; at < bytes; at += FILL_BYTES) {
        size_t n = bytes - at < FILL_BYTES ? bytes - at : FILL_BYTES;
        if (mmap(p + at, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE, fill_fd, 0) ==
            MAP_FAILED)
            return false;
    }
    int k = key[device_of(p)];
    return k < 0 || !pkey_mprotect(p, bytes, PROT_READ | PROT_WRITE, k);
}

static void unmap(char *p, size_t bytes)
{
    mmap(p, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0);
}

static bool grow_table(void)
{
    if (n_allocations < capacity)
        return true;
    size_t n = capacity ? 2 * capacity : 64;
    struct allocation *t = realloc(table, n * sizeof(*t));
    if (!t)
        return false;
    table = t;
    capacity = n;
    return true;
}

static cudaError_t take(void **ptr, size_t bytes)
{
    int device = mt_emu_device();
    size_t pages = round_up(bytes, PAGE), i = 0;
    char *p = region + region_bytes * (size_t)device, *end = p + region_bytes;
    if (used[device] + round_up(bytes, ALIGNMENT) > mt_emu_settings()->memory_bytes ||
        !grow_table())
        return cudaErrorMemoryAllocation;
    while (i < n_allocations && table[i].base < p)
        i++;
    for (; i < n_allocations && (size_t)(table[i].base - p) < pages + 2 * (size_t)MT_EMU_GAP + PAGE;
         i++)
        p = (char *)round_up((size_t)(uintptr_t)(table[i].base + table[i].bytes), PAGE);
    p += MT_EMU_GAP;
    if (p + pages + MT_EMU_GAP > end || !map_pattern(p, pages))
        return cudaErrorMemoryAllocation;
    memmove(table + i + 1, table + i, (n_allocations - i) * sizeof(*table));
    table[i] = (struct allocation){p, bytes, pages};
    n_allocations++;
    used[device] += round_up(bytes, ALIGNMENT);
    mt_asan_unpoison(p, bytes);
    *ptr = p;
    return cudaSuccess;
}

bool mt_emu_driver_take(size_t bytes)
{
    pthread_rwlock_wrlock(&lock);
    size_t *in_use = &used[mt_emu_device()];
    bool fits = bytes <= mt_emu_settings()->memory_bytes - *in_use;
    *in_use += fits ? bytes : 0;
    pthread_rwlock_unlock(&lock);
    return fits;
}

void mt_emu_driver_give(size_t bytes)
{
    pthread_rwlock_wrlock(&lock);
    used[mt_emu_device()] -= bytes;
    pthread_rwlock_unlock(&lock);
}

cudaError_t cudaMalloc(void **ptr, size_t bytes)
{
    if (mt_emu_settings()->no_device)
        return mt_emu_result(cudaErrorNoDevice);
    if (!ptr)
        return mt_emu_result(cudaErrorInvalidValue);
    pthread_once(&once, make_region);
    *ptr = NULL;
    if (!bytes)
        return mt_emu_result(cudaSuccess);
    cudaError_t e = mt_emu_result(cudaSuccess);
    if (e)
        return e;
    pthread_rwlock_wrlock(&lock);
    e = take(ptr, bytes);
    pthread_rwlock_unlock(&lock);
    return mt_emu_result(e);
}

cudaError_t cudaFree(void *ptr)
{
    if (!ptr)
        return mt_emu_result(cudaSuccess);
    mt_emu_drain_all(); /* as the real one does */
    pthread_rwlock_wrlock(&lock);
    size_t i = 0;
    while (i < n_allocations && table[i].base != ptr)
        i++;
    bool found = i < n_allocations;
    if (found) {
        mt_asan_poison(table[i].base, table[i].bytes);
        unmap(table[i].base, table[i].pages_bytes);
        used[device_of(ptr)] -= round_up(table[i].bytes, ALIGNMENT);
        memmove(table + i, table + i + 1, (n_allocations - i - 1) * sizeof(*table));
        n_allocations--;
    }
    pthread_rwlock_unlock(&lock);
    if (!found)
        mt_emu_complain("cudaFree: %p is not the start of an allocation", ptr);
    return mt_emu_result(found ? cudaSuccess : cudaErrorInvalidValue);
}

cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total_bytes)
{
    if (mt_emu_settings()->no_device)
        return mt_emu_result(cudaErrorNoDevice);
    pthread_rwlock_rdlock(&lock);
    *total_bytes = mt_emu_settings()->memory_bytes;
    *free_bytes = *total_bytes - used[mt_emu_device()];
    pthread_rwlock_unlock(&lock);
    return mt_emu_result(cudaSuccess);
}
