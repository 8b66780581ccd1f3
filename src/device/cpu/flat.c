/* SPDX-License-Identifier: Apache-2.0 */
/* Flat arrays: add, cast, zero, join. */
#include <string.h>

#include "device/cpu/pointwise.h"

static void add(const void *args, const struct mt_cpu_piece *p)
{
    const struct mt_add *a = args;
    float scale = a->scale == 0 ? 1.0f : a->scale;
    for (size_t i = 0; i < p->n; i++)
        p->out[0][i] = p->in[1] ? p->in[1][i] + scale * p->in[0][i] : scale * p->in[0][i];
}

void mt_cpu_run_add(struct mt_cpu_device *d, const struct mt_add *a)
{
    mt_cpu_run_pointwise(d, &(struct mt_cpu_pointwise){
        .f = add, .args = a, .n = 1, .heads = 1, .dim = a->n,
        .in = {mt_cpu_flat(a->dtype, a->b, a->n), mt_cpu_flat(a->dtype, a->a, a->n)},
        .out = {mt_cpu_flat(a->dtype, a->out, a->n)}});
}

static void copy(const void *, const struct mt_cpu_piece *p)
{
    memcpy(p->out[0], p->in[0], p->n * sizeof(float));
}

void mt_cpu_run_cast(struct mt_cpu_device *d, const struct mt_cast *a)
{
    mt_cpu_run_pointwise(d, &(struct mt_cpu_pointwise){
        .f = copy, .n = 1, .heads = 1, .dim = a->n, .in = {mt_cpu_flat(a->src_dtype, a->src, a->n)},
        .out = {mt_cpu_flat(a->dst_dtype, a->dst, a->n)}});
}

enum { FLAT_CHUNK = 65536 };

static void zero_chunk(void *ctx, size_t chunk, int)
{
    const struct mt_zero *a = ctx;
    size_t at = chunk * ((size_t)FLAT_CHUNK * 4);
    memset((char *)a->ptr + at, 0, MT_MIN((size_t)FLAT_CHUNK * 4, a->bytes - at));
}

void mt_cpu_run_zero(struct mt_cpu_device *d, const struct mt_zero *a)
{
    mt_pool_run(d->pool, zero_chunk, (void *)(uintptr_t)a,
                mt_div_up(a->bytes, (size_t)FLAT_CHUNK * 4));
}

MT_HOT static void join_block(float *restrict dst, const uint16_t *restrict halves)
{
    for (size_t i = 0; i < MT_JOIN_BLOCK; i++)
        dst[i] = mt_master_join(halves[i], halves[MT_JOIN_BLOCK + i]);
}

static void join_chunk(void *ctx, size_t chunk, int)
{
    const struct mt_join *a = ctx;
    uint16_t halves[2 * MT_JOIN_BLOCK]; /* 32 KiB: the block is overwritten as it is read */
    float *block = (float *)a->buf + chunk * MT_JOIN_BLOCK;
    memcpy(halves, block, sizeof(halves));
    if (a->no_lo)
        memset(halves + MT_JOIN_BLOCK, 0, sizeof(halves) / 2);
    join_block(block, halves);
}

void mt_cpu_run_join(struct mt_cpu_device *d, const struct mt_join *a)
{
    mt_pool_run(d->pool, join_chunk, (void *)(uintptr_t)a, a->n / MT_JOIN_BLOCK);
}
