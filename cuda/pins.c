/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Host memory for copies is locked in pieces, at its exact size, and once for all devices of a run.
 * Copies of memory that the system refuses to lock (a limit, a container, WSL) go through the
 * staging ring.
 */
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "base/log.h"
#include "base/pool.h"
#include "base/read_progress.h"
#include "cuda_priv.h"
#include "hw/gpu.h"

/* If a piece is refused, the others stay locked, and smaller pieces are tried, down to LEAST_BYTES. */
enum { MOST_BYTES = 1 << 28, LEAST_BYTES = 1 << 24, POPULATE_BYTES = 1 << 25 };

struct pin {
    char *p;
    size_t n;
    char *owner; /* start of the range that was registered */
};

/* A range that devices have registered, locked in whole or in part. */
struct registration {
    char *p;
    int n_devices;
};

/* CUDA locks memory for the whole process, and refuses to lock it twice. */
enum { MOST_DEVICES = 64 };
static struct {
    pthread_rwlock_t lock; /* of pins: several threads look them up for copies */
    struct pin *pins;      /* locked pieces, by address */
    size_t n, cap;
    struct registration *ranges;
    size_t n_ranges, ranges_cap;
    struct mt_cuda_device *device[MOST_DEVICES];
    int n_devices;
} table = {.lock = PTHREAD_RWLOCK_INITIALIZER};

int mt_cuda_pins_join(struct mt_cuda_device *d, struct mt_err *err)
{
    if (table.n_devices == MOST_DEVICES)
        return mt_fail(err, MT_ERR_DEVICE, -EINVAL, "more than %d devices in one process",
                       MOST_DEVICES);
    table.device[table.n_devices++] = d;
    return 0;
}

bool mt_cuda_pins_shared(void)
{
    return table.n_devices > 1;
}

/*
 * A child of fork() must not share these pages: the next write to a shared page would go to a new copy, and the GPU
 * would keep using the old one. Only whole pages, since the first and the last may hold other data, too.
 */
static void keep_from_children(const struct pin *pin, bool keep)
{
    size_t page = mt_page_bytes();
    char *first = (char *)mt_align_up((uintptr_t)pin->p, page);
    char *end = (char *)((uintptr_t)(pin->p + pin->n) / page * page);
    if (first < end) /* advice only */
        madvise(first, (size_t)(end - first), keep ? MADV_DONTFORK : MADV_DOFORK);
}

static void unlock_piece(const struct pin *pin)
{
    cudaHostUnregister(pin->p);
    keep_from_children(pin, false);
}

void mt_cuda_pins_leave(struct mt_cuda_device *d)
{
    int kept = 0, n = table.n_devices;
    for (int i = 0; i < n; i++)
        if (table.device[i] != d)
            table.device[kept++] = table.device[i];
    table.n_devices = kept;
    if (kept || kept == n)
        return;
    for (size_t i = 0; i < table.n; i++)
        unlock_piece(&table.pins[i]);
    free(table.pins);
    free(table.ranges);
    table.pins = NULL;
    table.ranges = NULL;
    table.n = table.cap = table.n_ranges = table.ranges_cap = 0;
}

/* The first piece that ends after p. */
static size_t find(const char *p)
{
    size_t lo = 0, hi = table.n;
    while (lo < hi) {
        size_t mid = (lo + hi) / 2;
        if (table.pins[mid].p + table.pins[mid].n <= p)
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo;
}

static bool insert(const struct pin *pin)
{
    pthread_rwlock_wrlock(&table.lock);
    bool ok = mt_grow(&table.pins, &table.cap, table.n + 1, sizeof(*table.pins));
    if (ok) {
        size_t at = find(pin->p);
        memmove(table.pins + at + 1, table.pins + at, (table.n - at) * sizeof(*table.pins));
        table.pins[at] = *pin;
        table.n++;
    }
    pthread_rwlock_unlock(&table.lock);
    return ok;
}

static void say_refused(size_t locked, size_t bytes, cudaError_t rc)
{
    char did[32], all[32], text[160];
    mt_warn("only %s of %s of host memory could be locked (%s): copies of the rest go through a staging buffer and are slower; %s",
            mt_format_bytes(did, sizeof(did), locked), mt_format_bytes(all, sizeof(all), bytes),
            mt_cuda_error_text(text, sizeof(text), rc),
            mt_hw_on_wsl() ? "the driver locks no more under WSL, whatever the limits are: Linux without Windows copies faster"
                           : "raise the limit of locked memory (ulimit -l, or --ulimit memlock=-1 of a container)");
}

/* Locks all devices' rings of a few MiB first, while locking still succeeds: all copies of memory
 * that is not locked need them. */
static void make_rings(struct mt_cuda_device *d)
{
    for (int i = 0; i < table.n_devices; i++) {
        struct mt_cuda_device *of = table.device[i];
        cudaSetDevice(of->index);
        for (int s = 0; s < MT_N_STREAMS; s++)
            if (!of->rings[s] && mt_cuda_ring_create(&of->rings[s], of->n_threads, NULL))
                (void)cudaGetLastError();
    }
    cudaSetDevice(d->index);
}

struct range {
    char *p;
    size_t n;
};

static void populate_part(void *ctx, size_t i, int)
{
    const struct range *r = ctx;
    size_t at = i * POPULATE_BYTES;
#ifdef MADV_POPULATE_WRITE
    /* advice only: on older kernels locking allocates the pages */
    madvise(r->p + at, MT_MIN((size_t)POPULATE_BYTES, r->n - at), MADV_POPULATE_WRITE);
#else
    (void)r;
    (void)at;
#endif
}

/* Allocates pages with all threads before they are locked: locking allocates them one by one, which is slow. */
static void populate(const struct mt_cuda_device *d, char *p, size_t bytes)
{
    size_t page = mt_page_bytes();
    char *first = (char *)((uintptr_t)p / page * page);
    struct range r = {first, (size_t)(p + bytes - first)};
    struct mt_pool_params params = {"populate", MT_MAX(d->n_threads, 1), NULL, NULL};
    mt_pool *pool = NULL;
    if (bytes < MOST_BYTES || mt_pool_create(&pool, &params, NULL))
        return;
    mt_pool_run(pool, populate_part, &r, mt_div_up(r.n, POPULATE_BYTES));
    mt_pool_destroy(&pool);
}

static int lock_piece(const struct pin *pin, cudaError_t *refusal, struct mt_err *err)
{
    cudaError_t e = cudaHostRegister(pin->p, pin->n, cudaHostRegisterPortable | cudaHostRegisterMapped);
    if (e != cudaSuccess) {
        (void)cudaGetLastError();
        *refusal = e;
        return 1;
    }
    keep_from_children(pin, true);
    if (insert(pin))
        return 0;
    unlock_piece(pin);
    return mt_fail_nomem(err, "the table of locked memory", sizeof(*pin));
}

/* The range that begins there, or NULL. Only registering and unregistering use it, from one thread.
 */
static struct registration *range_of(const char *p)
{
    for (size_t i = 0; i < table.n_ranges; i++)
        if (table.ranges[i].p == p)
            return &table.ranges[i];
    return NULL;
}

/* *first: no other device has registered it. */
static int note_range(char *p, bool *first, struct mt_err *err)
{
    struct registration *r = range_of(p);
    *first = !r;
    if (r)
        r->n_devices++;
    else if (mt_grow(&table.ranges, &table.ranges_cap, table.n_ranges + 1, sizeof(*table.ranges)))
        table.ranges[table.n_ranges++] = (struct registration){p, 1};
    else
        return mt_fail_nomem(err, "the table of locked memory",
                             (table.n_ranges + 1) * sizeof(*table.ranges));
    return 0;
}

int mt_cuda_register_host(mt_device *dev, void *ptr, size_t bytes, struct mt_err *err)
{
    struct mt_cuda_device *d = mt_cuda(dev);
    char *p = ptr, *end = p + bytes;
    size_t most = MOST_BYTES, page = mt_page_bytes();
    cudaError_t refusal = cudaSuccess;
    bool first;
    int rc = mt_cuda_enter(d, err) ?: note_range(ptr, &first, err);
    if (rc || !first)
        return rc;
    populate(d, ptr, bytes);
    if (mt_hw_on_wsl()) /* the driver locks about 1 GiB, and after it has refused once may refuse all */
        make_rings(d);
    struct mt_read_progress progress;
    mt_read_progress_begin(&progress, "locking host memory", bytes);
    while (rc >= 0 && p < end && most >= LEAST_BYTES) {
        /* pieces end at pages: two locked pieces must not share one */
        char *cut = (char *)(((uintptr_t)p + most) / page * page);
        struct pin pin = {p, (size_t)(MT_MIN(cut, end) - p), ptr};
        rc = lock_piece(&pin, &refusal, err);
        if (rc == 0) {
            p += pin.n;
            mt_read_progress_add(&progress, pin.n);
        }
        if (rc > 0) {
            make_rings(d);
            most = MT_MIN(most, mt_align_up(pin.n, 2 * page)) / 2;
        }
    }
    mt_read_progress_end(&progress);
    if (rc < 0)
        mt_cuda_unregister_host(dev, ptr);
    else if (p < end)
        say_refused((size_t)(p - (char *)ptr), bytes, refusal);
    return rc < 0 ? rc : 0;
}

void mt_cuda_unregister_host(mt_device *dev, void *ptr)
{
    size_t kept = 0;
    struct registration *r = range_of(ptr);
    if (!r || --r->n_devices)
        return;
    *r = table.ranges[--table.n_ranges];
    cudaSetDevice(mt_cuda(dev)->index);
    pthread_rwlock_wrlock(&table.lock);
    for (size_t i = 0; i < table.n; i++) {
        if (table.pins[i].owner == ptr)
            unlock_piece(&table.pins[i]);
        else
            table.pins[kept++] = table.pins[i];
    }
    table.n = kept;
    pthread_rwlock_unlock(&table.lock);
}

bool mt_cuda_pinned(const void *ptr, size_t *run)
{
    const char *p = ptr;
    bool locked = false;
    *run = SIZE_MAX;
    pthread_rwlock_rdlock(&table.lock);
    size_t i = find(p);
    if (i < table.n) {
        locked = table.pins[i].p <= p;
        *run = (size_t)((locked ? table.pins[i].p + table.pins[i].n : table.pins[i].p) - p);
    }
    pthread_rwlock_unlock(&table.lock);
    return locked;
}
