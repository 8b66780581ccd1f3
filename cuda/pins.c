/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Host memory for copies is locked in pieces, at its exact size. Copies of memory that the system refuses to lock (a
 * limit, a container, WSL) go through the staging ring.
 */
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "base/log.h"
#include "base/pool.h"
#include "cuda_priv.h"

/* If a piece is refused, the others stay locked, and smaller pieces are tried, down to LEAST_BYTES. */
enum { PAGE = 4096, MOST_BYTES = 1 << 28, LEAST_BYTES = 1 << 24, POPULATE_BYTES = 1 << 25 };

struct pin {
    char *p;
    size_t n;
    char *owner; /* start of the range that was registered */
};

struct mt_cuda_pins {
    pthread_rwlock_t lock; /* several threads look up pins for copies */
    struct pin *pins;      /* locked pieces, by address */
    size_t n, cap;
};

int mt_cuda_pins_create(struct mt_cuda_pins **out, struct mt_err *err)
{
    struct mt_cuda_pins *t = mt_calloc(1, sizeof(*t));
    if (!t)
        return mt_fail_nomem(err, "the table of locked memory", sizeof(*t));
    pthread_rwlock_init(&t->lock, NULL);
    *out = t;
    return 0;
}

/*
 * A child of fork() must not share these pages: the next write to a shared page would go to a new copy, and the GPU
 * would keep using the old one. Only whole pages, since the first and the last may hold other data, too.
 */
static void keep_from_children(const struct pin *pin, bool keep)
{
    char *first = (char *)mt_align_up((uintptr_t)pin->p, PAGE);
    char *end = (char *)((uintptr_t)(pin->p + pin->n) / PAGE * PAGE);
    if (first < end) /* advice only */
        madvise(first, (size_t)(end - first), keep ? MADV_DONTFORK : MADV_DOFORK);
}

static void unlock_piece(const struct pin *pin)
{
    cudaHostUnregister(pin->p);
    keep_from_children(pin, false);
}

void mt_cuda_pins_destroy(struct mt_cuda_pins **pins)
{
    struct mt_cuda_pins *t = *pins;
    if (!t)
        return;
    for (size_t i = 0; i < t->n; i++)
        unlock_piece(&t->pins[i]);
    pthread_rwlock_destroy(&t->lock);
    free(t->pins);
    free(t);
    *pins = NULL;
}

/* The first piece that ends after p. */
static size_t find(const struct mt_cuda_pins *t, const char *p)
{
    size_t lo = 0, hi = t->n;
    while (lo < hi) {
        size_t mid = (lo + hi) / 2;
        if (t->pins[mid].p + t->pins[mid].n <= p)
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo;
}

static bool insert(struct mt_cuda_pins *t, const struct pin *pin)
{
    pthread_rwlock_wrlock(&t->lock);
    bool ok = mt_grow(&t->pins, &t->cap, t->n + 1, sizeof(*t->pins));
    if (ok) {
        size_t at = find(t, pin->p);
        memmove(t->pins + at + 1, t->pins + at, (t->n - at) * sizeof(*t->pins));
        t->pins[at] = *pin;
        t->n++;
    }
    pthread_rwlock_unlock(&t->lock);
    return ok;
}

static void say_refused(size_t locked, size_t bytes, cudaError_t rc)
{
    char did[32], all[32], text[160];
    mt_warn("only %s of %s of host memory could be locked (%s): copies of the rest go through a "
            "staging buffer and are slower; raise the limit of locked memory (ulimit -l, or "
            "--ulimit memlock=-1 of a container)",
            mt_format_bytes(did, sizeof(did), locked), mt_format_bytes(all, sizeof(all), bytes),
            mt_cuda_error_text(text, sizeof(text), rc));
}

/* Locks the rings' few MiB first, while locking still succeeds: all copies of memory that is not locked need them. */
static void make_rings(struct mt_cuda_device *d)
{
    for (int s = 0; s < MT_N_STREAMS; s++)
        if (!d->rings[s] && mt_cuda_ring_create(&d->rings[s], NULL))
            (void)cudaGetLastError();
}

struct range {
    char *p;
    size_t n;
};

static void populate_part(void *ctx, size_t i, int thread)
{
    const struct range *r = ctx;
    size_t at = i * POPULATE_BYTES;
    (void)thread;
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
    char *first = (char *)((uintptr_t)p / PAGE * PAGE);
    struct range r = {first, (size_t)(p + bytes - first)};
    struct mt_pool_params params = {"populate", MT_MAX(d->n_threads, 1), NULL, NULL};
    mt_pool *pool = NULL;
    if (bytes < MOST_BYTES || mt_pool_create(&pool, &params, NULL))
        return;
    mt_pool_run(pool, populate_part, &r, mt_div_up(r.n, POPULATE_BYTES));
    mt_pool_destroy(&pool);
}

static int lock_piece(struct mt_cuda_device *d, const struct pin *pin, cudaError_t *refusal,
                      struct mt_err *err)
{
    cudaError_t e = cudaHostRegister(pin->p, pin->n, cudaHostRegisterPortable);
    if (e != cudaSuccess) {
        (void)cudaGetLastError();
        *refusal = e;
        return 1;
    }
    keep_from_children(pin, true);
    if (insert(d->pins, pin))
        return 0;
    unlock_piece(pin);
    return mt_fail_nomem(err, "the table of locked memory", sizeof(*pin));
}

int mt_cuda_register_host(mt_device *dev, void *ptr, size_t bytes, struct mt_err *err)
{
    struct mt_cuda_device *d = mt_cuda(dev);
    char *p = ptr, *end = p + bytes;
    size_t most = MOST_BYTES;
    cudaError_t refusal = cudaSuccess;
    int rc = mt_cuda_enter(d, err);
    if (!rc)
        populate(d, ptr, bytes);
    while (rc >= 0 && p < end && most >= LEAST_BYTES) {
        /* pieces end at pages: two locked pieces must not share one */
        char *cut = (char *)(((uintptr_t)p + most) / PAGE * PAGE);
        struct pin pin = {p, (size_t)(MT_MIN(cut, end) - p), ptr};
        rc = lock_piece(d, &pin, &refusal, err);
        if (rc == 0)
            p += pin.n;
        if (rc > 0) {
            make_rings(d);
            most = MT_MIN(most, mt_align_up(pin.n, 2 * PAGE)) / 2;
        }
    }
    if (rc < 0)
        mt_cuda_unregister_host(dev, ptr);
    else if (p < end)
        say_refused((size_t)(p - (char *)ptr), bytes, refusal);
    return rc < 0 ? rc : 0;
}

void mt_cuda_unregister_host(mt_device *dev, void *ptr)
{
    struct mt_cuda_device *d = mt_cuda(dev);
    struct mt_cuda_pins *t = d->pins;
    size_t kept = 0;
    cudaSetDevice(d->index);
    pthread_rwlock_wrlock(&t->lock);
    for (size_t i = 0; i < t->n; i++) {
        if (t->pins[i].owner == ptr)
            unlock_piece(&t->pins[i]);
        else
            t->pins[kept++] = t->pins[i];
    }
    t->n = kept;
    pthread_rwlock_unlock(&t->lock);
}

bool mt_cuda_pinned(struct mt_cuda_device *d, const void *ptr, size_t *run)
{
    struct mt_cuda_pins *t = d->pins;
    const char *p = ptr;
    bool locked = false;
    *run = SIZE_MAX;
    pthread_rwlock_rdlock(&t->lock);
    size_t i = find(t, p);
    if (i < t->n) {
        locked = t->pins[i].p <= p;
        *run = (size_t)((locked ? t->pins[i].p + t->pins[i].n : t->pins[i].p) - p);
    }
    pthread_rwlock_unlock(&t->lock);
    return locked;
}
