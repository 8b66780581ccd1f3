/* SPDX-License-Identifier: Apache-2.0 */
#include "device/cpu/arena.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "base/mem.h"

struct mt_cpu_arena {
    struct mt_arena *arena;
    void *base;
    size_t mapped;
};

int mt_cpu_arena_create(struct mt_cpu_arena **out, size_t budget, struct mt_err *err)
{
    struct mt_cpu_arena *a = mt_calloc(1, sizeof(*a));
    if (!a)
        return mt_fail_nomem(err, "the device arena", sizeof(*a));
    a->mapped = mt_arena_span(budget);
    a->base = mmap(NULL, a->mapped, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    int rc;
    if (a->base == MAP_FAILED) {
        rc = mt_fail(err, MT_ERR_NO_FIT, -ENOMEM, "cannot map a device arena of %zu bytes: %s",
                     a->mapped, strerror(errno));
        a->base = NULL;
    } else {
        rc = mt_arena_create(&a->arena, a->base, budget, err);
    }
    if (rc) {
        mt_cpu_arena_destroy(&a);
        return rc;
    }
    *out = a;
    return 0;
}

void mt_cpu_arena_destroy(struct mt_cpu_arena **arena)
{
    struct mt_cpu_arena *a = *arena;
    if (!a)
        return;
    mt_arena_destroy(&a->arena);
    if (a->base)
        munmap(a->base, a->mapped);
    free(a);
    *arena = NULL;
}

/* Maps the pages now: no page faults during steps, and a lack of memory shows at once. Older kernels, which do not know
 * this advice, map them later. */
static void touch(void *p, size_t bytes)
{
#ifdef MADV_POPULATE_WRITE
    const uintptr_t page = 4096, from = (uintptr_t)p & ~(page - 1), to = (uintptr_t)p + bytes;
    madvise((void *)from, to - from, MADV_POPULATE_WRITE);
#else
    (void)p;
    (void)bytes;
#endif
}

int mt_cpu_arena_alloc(struct mt_cpu_arena *a, size_t bytes, const char *tag, void **out,
                       struct mt_err *err)
{
    int rc = mt_arena_alloc(a->arena, bytes, tag, out, err);
    if (!rc)
        touch(*out, bytes);
    return rc;
}

void mt_cpu_arena_free(struct mt_cpu_arena *a, void *ptr)
{
    mt_arena_free(a->arena, ptr);
}

size_t mt_cpu_arena_used(const struct mt_cpu_arena *a)
{
    return mt_arena_used(a->arena);
}
