/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A stable counting sort by expert: the entries of each block of TOKENS tokens are counted, prefix sums turn the counts
 * into the block's first place in every list, and the blocks store their entries there.
 */
#include <math.h>
#include <string.h>

#include "device/cpu/cpu.h"

enum { TOKENS = 256 };

size_t mt_cpu_route_lists_workspace(const struct mt_device_limits *, const struct mt_route_lists *a)
{
    return (mt_div_up(a->n, TOKENS) * (a->e + 1) + a->e) * sizeof(int32_t);
}

/* Counts of a block: entries of each expert, then rows that are not finite. */
static int32_t *counts_of(const struct mt_route_lists *a, size_t block)
{
    return (int32_t *)a->workspace + block * (a->e + 1);
}

/* How far each expert's places are behind its list, by padding of those before; behind the counts of all blocks. */
static int32_t *shifts_of(const struct mt_route_lists *a)
{
    return counts_of(a, mt_div_up(a->n, TOKENS));
}

static bool row_is_finite(const float *weights, size_t k)
{
    for (size_t j = 0; j < k; j++)
        if (!isfinite(weights[j]))
            return false;
    return true;
}

static void count_block(void *ctx, size_t block, int)
{
    const struct mt_route_lists *a = ctx;
    size_t end = MT_MIN(a->n, (block + 1) * TOKENS);
    int32_t *counts = counts_of(a, block);
    memset(counts, 0, (a->e + 1) * sizeof(*counts));
    for (size_t i = block * TOKENS; i < end; i++) {
        counts[a->e] += !row_is_finite(a->weights + i * a->k, a->k);
        for (size_t j = 0; j < a->k; j++)
            if (a->ids[i * a->k + j] < a->e)
                counts[a->ids[i * a->k + j]]++;
    }
}

static void place_block(void *ctx, size_t block, int)
{
    const struct mt_route_lists *a = ctx;
    size_t end = MT_MIN(a->n, (block + 1) * TOKENS) * a->k;
    int32_t *at = counts_of(a, block), *shift = shifts_of(a);
    for (size_t i = block * TOKENS * a->k; i < end; i++) {
        size_t x = a->ids[i];
        a->places[i] = x < a->e ? at[x] + shift[x] : -1;
        if (x < a->e)
            a->list[at[x]++] = (int32_t)i;
    }
}

/* Turns counts into places: ordered by expert, then by block. */
static void scan(const struct mt_route_lists *a, size_t blocks)
{
    memset(a->counts, 0, (a->e + 1) * sizeof(*a->counts));
    for (size_t b = 0; b < blocks; b++)
        for (size_t x = 0; x <= a->e; x++)
            a->counts[x] += counts_of(a, b)[x];
    a->starts[0] = 0;
    size_t place = 0;
    for (size_t x = 0; x < a->e; x++) {
        a->starts[x + 1] = a->starts[x] + a->counts[x];
        shifts_of(a)[x] = (int32_t)place - a->starts[x];
        place += mt_align_up((size_t)a->counts[x], a->bucket);
    }
    for (size_t x = 0; x < a->e; x++) {
        int32_t at = a->starts[x];
        for (size_t b = 0; b < blocks; b++) {
            int32_t here = counts_of(a, b)[x];
            counts_of(a, b)[x] = at;
            at += here;
        }
    }
}

void mt_cpu_run_route_lists(struct mt_cpu_device *d, const struct mt_route_lists *a)
{
    size_t blocks = mt_div_up(a->n, TOKENS);
    mt_pool_run(d->pool, count_block, (void *)(uintptr_t)a, blocks);
    scan(a, blocks);
    mt_pool_run(d->pool, place_block, (void *)(uintptr_t)a, blocks);
}
