/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The budget is one cudaMalloc, divided by an arena. For compute-sanitizer, which only knows the boundaries of
 * cudaMalloc blocks, each allocation can be a block of its own; the arena then does the book-keeping, on addresses that
 * nobody uses.
 */
#include <stdlib.h>

#include "cuda_priv.h"

struct block {
    void *real, *account;
    size_t bytes;
};

struct mt_cuda_apart {
    struct block *blocks;
    size_t n, cap;
};

static int fail_free_memory(struct mt_cuda_device *d, size_t budget, struct mt_err *err)
{
    size_t free_bytes = 0, total = 0;
    char want[32], have[32], all[32];
    (void)cudaGetLastError();
    cudaMemGetInfo(&free_bytes, &total);
    return mt_fail(err, MT_ERR_NO_FIT, -ENOMEM,
                   "GPU %d cannot give the device budget of %s: %s of its %s are free; lower "
                   "memory.device_budget or end what else uses the GPU",
                   d->index, mt_format_bytes(want, sizeof(want), budget),
                   mt_format_bytes(have, sizeof(have), free_bytes),
                   mt_format_bytes(all, sizeof(all), total));
}

int mt_cuda_memory_create(struct mt_cuda_device *d, size_t budget, struct mt_err *err)
{
    void *memory = NULL;
    d->span = mt_arena_span(budget);
    if (d->apart) {
        d->apart_blocks = mt_calloc(1, sizeof(*d->apart_blocks));
        if (!d->apart_blocks)
            return mt_fail_nomem(err, "the device memory's table", sizeof(*d->apart_blocks));
        /* addresses from page 1 on: none is NULL, and none is accessed */
        return mt_arena_create(&d->arena, (void *)(uintptr_t)4096, budget, err);
    }
    cudaError_t rc = cudaMalloc(&memory, d->span);
    if (rc == cudaErrorMemoryAllocation)
        return fail_free_memory(d, budget, err);
    if (rc != cudaSuccess)
        return mt_cuda_check(d, rc, err, "cannot allocate the device budget of %zu bytes", budget);
    d->memory = memory;
    return mt_arena_create(&d->arena, d->memory, budget, err);
}

void mt_cuda_memory_destroy(struct mt_cuda_device *d)
{
    mt_arena_destroy(&d->arena);
    for (size_t i = 0; d->apart_blocks && i < d->apart_blocks->n; i++)
        cudaFree(d->apart_blocks->blocks[i].real);
    if (d->apart_blocks)
        free(d->apart_blocks->blocks);
    free(d->apart_blocks);
    if (d->memory)
        cudaFree(d->memory);
}

static int alloc_apart(struct mt_cuda_device *d, size_t bytes, void **ptr, struct mt_err *err)
{
    struct mt_cuda_apart *t = d->apart_blocks;
    struct block b = {NULL, *ptr, bytes};
    if (!mt_grow(&t->blocks, &t->cap, t->n + 1, sizeof(*t->blocks)))
        return mt_fail_nomem(err, "the device memory's table", (t->n + 1) * sizeof(*t->blocks));
    if (cudaMalloc(&b.real, MT_MAX(bytes, (size_t)1)) != cudaSuccess)
        return fail_free_memory(d, bytes, err);
    t->blocks[t->n++] = b;
    *ptr = b.real;
    return 0;
}

int mt_cuda_alloc(mt_device *dev, size_t bytes, const char *tag, void **out, struct mt_err *err)
{
    struct mt_cuda_device *d = mt_cuda(dev);
    void *p = NULL;
    int rc = mt_cuda_enter(d, err) ?: mt_arena_alloc(d->arena, bytes, tag, &p, err);
    if (!rc && d->apart) {
        void *account = p;
        rc = alloc_apart(d, bytes, &p, err);
        if (rc)
            mt_arena_free(d->arena, account);
    }
    if (!rc)
        *out = p;
    return rc;
}

void mt_cuda_free(mt_device *dev, void *ptr)
{
    struct mt_cuda_device *d = mt_cuda(dev);
    struct mt_cuda_apart *t = d->apart_blocks;
    for (size_t i = 0; t && i < t->n; i++) {
        if (t->blocks[i].real != ptr)
            continue;
        cudaSetDevice(d->index);
        cudaFree(ptr);
        ptr = t->blocks[i].account;
        t->blocks[i] = t->blocks[--t->n];
        break;
    }
    mt_arena_free(d->arena, ptr);
}

size_t mt_cuda_bytes_used(const mt_device *dev)
{
    return mt_arena_used(((const struct mt_cuda_device *)dev)->arena);
}

bool mt_cuda_is_device_memory(const struct mt_cuda_device *d, const void *ptr)
{
    const struct mt_cuda_apart *t = d->apart_blocks;
    uintptr_t p = (uintptr_t)ptr, base = (uintptr_t)d->memory;
    for (size_t i = 0; t && i < t->n; i++)
        if (p - (uintptr_t)t->blocks[i].real < t->blocks[i].bytes)
            return true;
    return !t && p - base < d->span;
}
