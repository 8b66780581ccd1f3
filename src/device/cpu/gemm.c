/* SPDX-License-Identifier: Apache-2.0 */
/*
 * D = op(A) op(B) + bias + C. Sums are f32 throughout and rounded once. On CPUs with bf16 instructions, the output of
 * bf16 products is divided into tiles by shape alone, each computed by one thread, so that the order of every sum is
 * the same for any number of threads; all others are products of packed strips (gemm_panels.c).
 */
#include <float.h>

#include "device/cpu/cpu.h"

enum { TILE = MT_CPU_BF16_TILE, SMALL_TILE = 384, MANY_TILES = 16 };

struct job {
    const struct mt_gemm *a;
    struct mt_cpu_device *d;
    size_t tile_m, tile_n, tiles_n;
};

static void tile_main(void *ctx, size_t chunk, int thread)
{
    const struct job *j = ctx;
    const struct mt_gemm *a = j->a;
    struct mt_cpu_bf16_gemm *g = j->d->bf16_gemm[thread];
    const uint16_t *pa = a->a, *pb = a->b;
    size_t row = chunk / j->tiles_n * j->tile_m, col = chunk % j->tiles_n * j->tile_n;
    bool scaled = a->scale != 0 && a->scale != 1;
    bool direct = a->d_dtype == MT_F32 && !a->bias && !scaled && (!a->c || a->c == a->d);
    struct mt_cpu_tile t = {.m = MT_MIN(j->tile_m, a->m - row),
                            .n = MT_MIN(j->tile_n, a->n - col),
                            .k = a->k,
                            .trans_a = a->trans_a,
                            .trans_b = a->trans_b,
                            .accumulate = direct && a->c,
                            .dtype = MT_BF16,
                            .a = pa + (a->trans_a ? row : row * a->lda),
                            .lda = a->lda,
                            .b = pb + (a->trans_b ? col * a->ldb : col),
                            .ldb = a->ldb};
    t.d = direct ? (float *)a->d + row * a->ldd + col : mt_cpu_bf16_gemm_sums(g);
    t.ldd = direct ? a->ldd : t.n;
    int done = mt_cpu_bf16_gemm_tile(g, &t);
    if (done < 0)
        atomic_store(&j->d->no_memory, true);
    if (!done)
        mt_cpu_gemm_tile(j->d->gemm, thread, &t);
    for (size_t i = 0; scaled && i < t.m * t.ldd; i++)
        t.d[i] *= a->scale;
    if (!direct)
        for (size_t i = 0; i < t.m; i++)
            mt_cpu_gemm_finish_row(a, row + i, col, t.n, t.d + i * t.ldd);
}

/* Large tiles are faster, as long as there are enough of them for many threads. */
static size_t choose_side(const struct mt_gemm *a)
{
    return mt_div_up(a->m, TILE) * mt_div_up(a->n, TILE) >= MANY_TILES ? TILE : SMALL_TILE;
}

/* Tiles of nearly equal size, so that threads end together. */
static size_t even_tile(size_t n, size_t side)
{
    size_t tiles = mt_div_up(n, side);
    return MT_MIN(mt_align_up(mt_div_up(n, tiles), 16), side);
}

static void run_tiles(struct mt_cpu_device *d, const struct mt_gemm *a)
{
    size_t side = choose_side(a);
    struct job j = {a, d, even_tile(a->m, side), even_tile(a->n, side), 0};
    j.tiles_n = mt_div_up(a->n, j.tile_n);
    size_t tiles = mt_div_up(a->m, j.tile_m) * j.tiles_n;
    if (tiles == 1 && a->m >= 32) { /* a small output with long sums: give a part to two threads */
        j.tile_m = mt_align_up(mt_div_up(a->m, 4), 16);
        tiles = mt_div_up(a->m, j.tile_m);
    }
    mt_pool_run(d->pool, tile_main, &j, tiles);
}

void mt_cpu_run_gemm(struct mt_cpu_device *d, const struct mt_gemm *a)
{
    struct mt_gemm codes = *a;
    if (a->dtype == MT_E4M3) { /* products of codes are exact, and scales are powers of two */
        codes.scale = *a->a_scale * *a->b_scale * (a->scale != 0 ? a->scale : 1);
        if (codes.scale == 0) /* which would be read as 1 */
            codes.scale = FLT_TRUE_MIN;
        mt_cpu_gemm_run(d->gemm, d->pool, &codes);
        return;
    }
    if (a->dtype == MT_BF16 && d->base.limits.native_bf16)
        run_tiles(d, a);
    else
        mt_cpu_gemm_run(d->gemm, d->pool, a);
}
