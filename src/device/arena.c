/* SPDX-License-Identifier: Apache-2.0 */
#include "device/arena.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
enum { GAP = MT_ARENA_ALIGNMENT, SPREAD = 2 };
#define POISON(p, n) ASAN_POISON_MEMORY_REGION(p, n)
#define UNPOISON(p, n) ASAN_UNPOISON_MEMORY_REGION(p, n)
#else
enum { GAP = 0, SPREAD = 1 };
#define POISON(p, n) ((void)(p), (void)(n))
#define UNPOISON(p, n) ((void)(p), (void)(n))
#endif

struct block {
    size_t at, size; /* size: aligned, without the gap after it */
    const char *tag; /* NULL: a free block */
};

struct mt_arena {
    char *base;
    size_t budget, span, used;
    struct block *blocks; /* by address, covering the span */
    size_t n, cap;
    size_t no_free;       /* none of the first so many blocks is free */
    size_t watched;       /* the address sanitizer knows of the first so many bytes which are allocated */
};

size_t mt_arena_span(size_t budget)
{
    return mt_align_up(MT_MAX(budget, (size_t)1), 4096) * SPREAD + (SPREAD - 1) * ((size_t)1 << 20);
}

/* Has the sanitizer watch the first `end` bytes and some more: all of a large span would take it seconds. */
static void watch(struct mt_arena *a, size_t end)
{
    const size_t step = (size_t)16 << 20, to = MT_MIN(a->span, mt_align_up(end + step, step));
    if (to <= a->watched)
        return;
    POISON(a->base + a->watched, to - a->watched);
    a->watched = to;
}

int mt_arena_create(struct mt_arena **out, void *base, size_t budget, struct mt_err *err)
{
    struct mt_arena *a = mt_calloc(1, sizeof(*a));
    if (!a || !mt_grow(&a->blocks, &a->cap, 1, sizeof(*a->blocks))) {
        free(a);
        return mt_fail_nomem(err, "the device arena", sizeof(*a));
    }
    a->base = base;
    a->budget = budget;
    a->span = mt_arena_span(budget);
    a->blocks[0] = (struct block){0, a->span, NULL};
    a->n = 1;
    watch(a, 0);
    *out = a;
    return 0;
}

void mt_arena_destroy(struct mt_arena **arena)
{
    struct mt_arena *a = *arena;
    if (!a)
        return;
    UNPOISON(a->base, a->watched);
    free(a->blocks);
    free(a);
    *arena = NULL;
}

/* The memory in use by tag: "weights 1.00 GiB, scratch 20.00 MiB". */
static void describe_use(const struct mt_arena *a, char *buf, size_t len)
{
    size_t at = 0;
    char size[32];
    buf[0] = 0;
    for (size_t i = 0; i < a->n && at + 1 < len; i++) {
        const char *tag = a->blocks[i].tag;
        size_t sum = 0, k = 0;
        while (tag && k < i && (!a->blocks[k].tag || strcmp(a->blocks[k].tag, tag)))
            k++;
        if (!tag || k < i)
            continue;
        for (; k < a->n; k++)
            if (a->blocks[k].tag && !strcmp(a->blocks[k].tag, tag))
                sum += a->blocks[k].size;
        int n = snprintf(buf + at, len - at, "%s%s %s", at ? ", " : "", tag,
                         mt_format_bytes(size, sizeof(size), sum));
        at += n > 0 ? (size_t)n : 0;
    }
}

static int fail_budget(const struct mt_arena *a, size_t bytes, const char *tag,
                       struct mt_err *err)
{
    char want[32], have[32], use[400];
    describe_use(a, use, sizeof(use));
    return mt_fail(err, MT_ERR_NO_FIT, -ENOMEM,
                   "the device is out of memory: %s for %s, with a budget of %s, in use: %s",
                   mt_format_bytes(want, sizeof(want), bytes), tag,
                   mt_format_bytes(have, sizeof(have), a->budget), use[0] ? use : "nothing");
}

int mt_arena_alloc(struct mt_arena *a, size_t bytes, const char *tag, void **out,
                       struct mt_err *err)
{
    size_t size = mt_align_up(bytes ? bytes : 1, MT_ARENA_ALIGNMENT);
    if (bytes > a->budget || a->used + size > mt_align_up(a->budget, MT_ARENA_ALIGNMENT))
        return fail_budget(a, bytes, tag, err);
    while (a->no_free < a->n && a->blocks[a->no_free].tag)
        a->no_free++;
    for (size_t i = a->no_free; i < a->n; i++) {
        struct block *b = &a->blocks[i];
        if (b->tag || b->size < size + GAP)
            continue;
        if (!mt_grow(&a->blocks, &a->cap, a->n + 1, sizeof(*a->blocks)))
            return mt_fail_nomem(err, "the arena's table", a->n * sizeof(*a->blocks));
        b = &a->blocks[i];
        size_t rest = b->size - size - GAP;
        memmove(b + 1, b, (a->n - i) * sizeof(*b));
        a->n++;
        b[0] = (struct block){b->at, size, tag};
        b[1] = (struct block){b[0].at + size + GAP, rest, NULL};
        a->used += size;
        *out = a->base + b[0].at;
        watch(a, b[0].at + size);
        UNPOISON(*out, bytes);
        return 0;
    }
    return fail_budget(a, bytes, tag, err);
}

/* Index of the allocation at that place, or n. Free blocks may be empty, and then have the place of the next one. */
static size_t find(const struct mt_arena *a, size_t at)
{
    size_t lo = 0, hi = a->n;
    while (lo < hi) {
        size_t mid = lo + (hi - lo) / 2;
        if (a->blocks[mid].at < at)
            lo = mid + 1;
        else
            hi = mid;
    }
    while (lo < a->n && a->blocks[lo].at == at && !a->blocks[lo].tag)
        lo++;
    return lo < a->n && a->blocks[lo].at == at ? lo : a->n;
}

void mt_arena_free(struct mt_arena *a, void *ptr)
{
    size_t i = find(a, (size_t)((char *)ptr - a->base));
    if (i == a->n)
        return;
    struct block *b = &a->blocks[i];
    a->no_free = MT_MIN(a->no_free, i ? i - 1 : 0);
    POISON(a->base + b->at, b->size);
    a->used -= b->size;
    b->tag = NULL;
    b->size += GAP;
    if (i + 1 < a->n && !b[1].tag) {
        b->size += b[1].size;
        memmove(b + 1, b + 2, (a->n - i - 2) * sizeof(*b));
        a->n--;
    }
    if (i && !b[-1].tag) {
        b[-1].size += b->size;
        memmove(b, b + 1, (a->n - i - 1) * sizeof(*b));
        a->n--;
    }
}

size_t mt_arena_used(const struct mt_arena *a)
{
    return a->used;
}
