/* SPDX-License-Identifier: Apache-2.0 */
#include "base/mem.h"

#include <stdio.h>
#ifdef __GLIBC__
#include <malloc.h>
#endif
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

size_t mt_page_bytes(void)
{
    return (size_t)sysconf(_SC_PAGESIZE);
}

void *mt_calloc(size_t n, size_t size)
{
    size_t bytes;
    if (!mt_mul_size(n, size, &bytes))
        return NULL;
    return calloc(bytes ? bytes : 1, 1);
}

struct mt_array {
    struct mt_array *before;
    max_align_t items[];
};

void *mt_arrays_add(struct mt_arrays *a, size_t n, size_t item_size)
{
    size_t bytes;
    bool fits = mt_mul_size(n, item_size, &bytes) && mt_add_size(bytes, sizeof(struct mt_array), &bytes);
    struct mt_array *added = fits ? calloc(bytes, 1) : NULL;
    a->failed |= !added;
    if (!added)
        return NULL;
    added->before = a->last;
    a->last = added;
    return added->items;
}

void mt_arrays_finish(struct mt_arrays *a)
{
    while (a->last) {
        struct mt_array *last = a->last;
        a->last = last->before;
        free(last);
    }
}

void *mt_alloc_aligned(size_t bytes)
{
    if (bytes > SIZE_MAX - 64)
        return NULL;
    return aligned_alloc(64, mt_align_up(bytes ? bytes : 1, 64));
}

bool mt_grow(void *items, size_t *capacity, size_t need, size_t item_size)
{
    if (need <= *capacity)
        return true;
    size_t n = MT_MAX(need, *capacity * 2 + 8), bytes;
    void *old, *p;
    memcpy(&old, items, sizeof(old));
    if (!mt_mul_size(n, item_size, &bytes) || !(p = realloc(old, bytes)))
        return false;
    memcpy(items, &p, sizeof(p));
    *capacity = n;
    return true;
}

void mt_mem_keep_freed(void)
{
#ifdef M_TRIM_THRESHOLD
    mallopt(M_TRIM_THRESHOLD, 1 << 30);
    mallopt(M_MMAP_THRESHOLD, 1 << 30);
#endif
}

static const char *format_bytes(char *buf, size_t len, uint64_t bytes, bool up)
{
    static const char *const unit[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB"};
    double v = (double)bytes;
    size_t u = 0;
    while (v >= 1024 && u + 1 < MT_ARRAY_LEN(unit)) {
        v /= 1024;
        u++;
    }
    snprintf(buf, len, u ? "%.2f %s" : "%.0f %s", up ? ceil(v * 100) / 100 : v, unit[u]);
    return buf;
}

const char *mt_format_bytes(char *buf, size_t len, uint64_t bytes)
{
    return format_bytes(buf, len, bytes, false);
}

const char *mt_format_need(char *buf, size_t len, uint64_t bytes)
{
    return format_bytes(buf, len, bytes, true);
}

const char *mt_format_seconds(char *buf, size_t len, double seconds)
{
    static const double most = 1e9; /* 30 years; also catches values that are not finite */
    long long s = (long long)(seconds < most ? MT_MAX(seconds, 0.0) + 0.5 : most);
    if (s < 100)
        snprintf(buf, len, "%llds", s);
    else if (s < 6000)
        snprintf(buf, len, "%lldm%02llds", s / 60, s % 60);
    else
        snprintf(buf, len, "%lldh%02lldm", s / 3600, s / 60 % 60);
    return buf;
}
