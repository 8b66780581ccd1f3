/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define MT_ARRAY_LEN(a) (sizeof(a) / sizeof((a)[0]))
#define MT_MIN(a, b) ((a) < (b) ? (a) : (b))
#define MT_MAX(a, b) ((a) > (b) ? (a) : (b))
#define MT_CLAMP(x, lo, hi) MT_MIN(MT_MAX(x, lo), hi)

/** Before the declaration of a pointer with its first value: what it points to is freed where its scope ends. */
#define MT_FREED __attribute__((cleanup(mt_free_at)))
static inline void mt_free_at(void *pointer)
{
    void *p;
    memcpy(&p, pointer, sizeof(p));
    free(p);
}

/** Before the declaration of a variable with its first value: f(&variable) is called where its scope ends, after what a
 * `return` computes. Of several variables, that of the last one comes first. */
#define MT_CLOSED_BY(f) __attribute__((cleanup(f)))

/** A variable's value, which is then all zero: what MT_CLOSED_BY or MT_FREED would end is the receiver's. */
#define MT_GIVE(variable) \
    ({ \
        __typeof__(variable) given_ = (variable); \
        memset(&(variable), 0, sizeof(variable)); \
        given_; \
    })

/** Sets *p to n zeroed items: 0, or -ENOMEM, and *err says of what (base/err.h). */
#define MT_NEW(p, n, what, err) \
    ((*(p) = mt_calloc(n, sizeof(**(p)))) ? 0 : mt_fail_nomem(err, what, (n) * sizeof(**(p))))

/* Of x86-64 and, with pages of 4 KiB, of ARM. */
#define MT_HUGE_PAGE ((size_t)2 << 20)

static inline size_t mt_align_up(size_t n, size_t align)
{
    return (n + align - 1) / align * align;
}

static inline size_t mt_div_up(size_t n, size_t d)
{
    return (n + d - 1) / d;
}

static inline bool mt_ends_with(const char *text, const char *end)
{
    size_t n = strlen(text), k = strlen(end);
    return n >= k && !strcmp(text + n - k, end);
}

/** False if the product or sum does not fit a size_t; *out is then unchanged. */
static inline bool mt_mul_size(size_t a, size_t b, size_t *out)
{
    size_t r;
    if (__builtin_mul_overflow(a, b, &r))
        return false;
    *out = r;
    return true;
}

static inline bool mt_add_size(size_t a, size_t b, size_t *out)
{
    size_t r;
    if (__builtin_add_overflow(a, b, &r))
        return false;
    *out = r;
    return true;
}

/** Bytes of a page of memory, of which protection, locking and advice have whole ones: 4 KiB on x86-64, also 16 or 64
 * on ARM. */
size_t mt_page_bytes(void);

/** Zeroed array; NULL if memory is short or n * size overflows. Freed with free(). */
void *mt_calloc(size_t n, size_t size);
/** Arrays that are freed together. Zeroed: none. */
struct mt_arrays {
    struct mt_array *last; /* owned: mt_arrays_finish() */
    bool failed;           /* memory was short for one of them */
};
/** Adds an array of n zeroed items; NULL if memory is short, which `failed` says from then on. */
void *mt_arrays_add(struct mt_arrays *a, size_t n, size_t item_size);
void mt_arrays_finish(struct mt_arrays *a);
/** 64-byte aligned, not zeroed; freed with free(). */
void *mt_alloc_aligned(size_t bytes);
/** Grows *items to hold `need` elements (doubling); false if memory is short. */
bool mt_grow(void *items, size_t *capacity, size_t need, size_t item_size);

/**
 * From now on freed memory stays with the process: for a program that makes and frees the same large lists over and
 * over, such as a search, where most of its time would go into new pages. Where the C library has no such setting,
 * nothing happens.
 */
void mt_mem_keep_freed(void);

/** "1.50 GiB" into buf; returns buf. */
const char *mt_format_bytes(char *buf, size_t len, uint64_t bytes);
/** The same rounded up: of what is needed, so that the number in the text is enough. */
const char *mt_format_need(char *buf, size_t len, uint64_t bytes);
/** "42s", "7m29s", "4h46m"; returns buf. */
const char *mt_format_seconds(char *buf, size_t len, double seconds);
