/* SPDX-License-Identifier: Apache-2.0 */
/*
 * D = op(A) op(B) + bias + C. The output is cut into tiles by shape alone and each is computed by one
 * thread, so the order of every sum, and with it every bit, is the same for any number of threads. K is
 * walked in fixed panels; sums are f32 throughout and rounded once. bf16 operands are multiplied as they
 * are where the CPU can, else they become f32 a panel at a time (exact).
 */
#include <stddef.h>
#include <string.h>

#include "device/cpu/cpu.h"

enum { TILE = 512, SMALL_TILE = 384, MANY_TILES = 16, PANEL = 1024 };

struct job {
    const struct mt_gemm *a;
    char *scratch; /* of thread 0; the others' follow */
    struct mt_cpu_bf16_gemm **bf16;
    size_t tile_m, tile_n, tiles_n;
};

/* A thread's room for one tile. */
struct scratch {
    float a[TILE * PANEL], b[TILE * PANEL], d[TILE * TILE];
};
_Static_assert(offsetof(struct scratch, d) == 2 * sizeof(float) * TILE * PANEL, "a and b are one in mt_cpu_gemm_warm()");

size_t mt_cpu_gemm_scratch_bytes(void)
{
    return sizeof(struct scratch);
}

void mt_cpu_gemm_warm(void *scratch)
{
    struct scratch *s = scratch;
    memset(s, 0, sizeof(*s));
    for (int way = 0; way < 8; way++) { /* every kind of product; the last two as large as they come */
        bool trans_a = way % 3 == 1, trans_b = way % 3 == 2;
        size_t k = way < 6 ? 64 : 2 * PANEL;
        mt_cpu_gemm_tile(&(struct mt_cpu_tile){.m = TILE, .n = TILE, .k = k, .trans_a = trans_a, .trans_b = trans_b,
                                               .alpha = 1, .beta = way < 3 ? 0 : 1, .a = s->a,
                                               .lda = trans_a ? TILE : k, .b = s->a, .ldb = trans_b ? k : TILE,
                                               .d = s->d, .ldd = TILE});
    }
}

/* A panel as f32: `rows` runs of `cols`, tight. */
static void load_panel(float *dst, enum mt_dtype t, const void *src, size_t first, size_t rows,
                       size_t cols, size_t ld)
{
    for (size_t i = 0; i < rows; i++) {
        const float *row = mt_cpu_row_f32(t, src, first + i * ld, cols, dst + i * cols);
        if (row != dst + i * cols)
            memcpy(dst + i * cols, row, cols * sizeof(*row));
    }
}

struct rect {
    size_t i, m, j, n; /* rows [i, i + m), columns [j, j + n) of D */
};

static struct rect rect_of(const struct job *j, size_t chunk)
{
    struct rect r = {chunk / j->tiles_n * j->tile_m, 0, chunk % j->tiles_n * j->tile_n, 0};
    r.m = MT_MIN(j->tile_m, j->a->m - r.i);
    r.n = MT_MIN(j->tile_n, j->a->n - r.j);
    return r;
}

static bool product_f32(const struct mt_gemm *a, const struct rect *r, float *d, size_t ldd,
                        float beta)
{
    const float *pa = a->a, *pb = a->b;
    mt_cpu_gemm_tile(&(struct mt_cpu_tile){
        .m = r->m,
        .n = r->n,
        .k = a->k,
        .trans_a = a->trans_a,
        .trans_b = a->trans_b,
        .alpha = 1,
        .beta = beta,
        .a = pa + (a->trans_a ? r->i : r->i * a->lda),
        .lda = a->lda,
        .b = pb + (a->trans_b ? r->j * a->ldb : r->j),
        .ldb = a->ldb,
        .d = d,
        .ldd = ldd,
    });
    return true;
}

static bool product_bf16(const struct mt_gemm *a, const struct rect *r, float *d, size_t ldd,
                         bool accumulate, struct mt_cpu_bf16_gemm *g)
{
    const uint16_t *pa = a->a, *pb = a->b;
    return g && mt_cpu_bf16_gemm_tile(g, &(struct mt_cpu_bf16_tile){
                                             .m = r->m,
                                             .n = r->n,
                                             .k = a->k,
                                             .trans_a = a->trans_a,
                                             .trans_b = a->trans_b,
                                             .accumulate = accumulate,
                                             .a = pa + (a->trans_a ? r->i : r->i * a->lda),
                                             .lda = a->lda,
                                             .b = pb + (a->trans_b ? r->j * a->ldb : r->j),
                                             .ldb = a->ldb,
                                             .d = d,
                                             .ldd = ldd,
                                         });
}

/* A panel of an operand as the library wants it; *ld becomes the panel's. */
static const float *panel_of(enum mt_dtype t, const void *src, size_t first, size_t rows, size_t cols,
                             size_t *ld, bool copy, float *dst)
{
    if (t == MT_F32 && !copy)
        return (const float *)src + first;
    load_panel(dst, t, src, first, rows, cols, *ld);
    *ld = cols;
    return dst;
}

static void product_of_panels(const struct mt_gemm *a, const struct rect *r, float *d, size_t ldd,
                              float beta, struct scratch *s)
{
    for (size_t p = 0; p < a->k; p += PANEL) {
        size_t k = MT_MIN((size_t)PANEL, a->k - p), lda = a->lda, ldb = a->ldb;
        /* across a matrix with a large power of two of columns the library crawls: A' is copied, always */
        const float *pa = a->trans_a ? panel_of(a->dtype, a->a, p * lda + r->i, k, r->m, &lda, true, s->a)
                                     : panel_of(a->dtype, a->a, r->i * lda + p, r->m, k, &lda, false, s->a);
        const float *pb = a->trans_b ? panel_of(a->dtype, a->b, r->j * ldb + p, r->n, k, &ldb, false, s->b)
                                     : panel_of(a->dtype, a->b, p * ldb + r->j, k, r->n, &ldb, false, s->b);
        mt_cpu_gemm_tile(&(struct mt_cpu_tile){
            .m = r->m,
            .n = r->n,
            .k = k,
            .trans_a = a->trans_a,
            .trans_b = a->trans_b,
            .alpha = 1,
            .beta = p ? 1 : beta,
            .a = pa,
            .lda = lda,
            .b = pb,
            .ldb = ldb,
            .d = d,
            .ldd = ldd,
        });
    }
}

/* Adds bias and C to a row of sums and stores it. */
static void finish_row(const struct mt_gemm *a, const struct rect *r, size_t i, float *sum)
{
    float tmp[TILE];
    if (a->bias) {
        const float *b = mt_cpu_row_f32(a->dtype, a->bias, r->j, r->n, tmp);
        for (size_t k = 0; k < r->n; k++)
            sum[k] += b[k];
    }
    if (a->c) {
        const float *c = mt_cpu_row_f32(a->d_dtype, a->c, (r->i + i) * a->ldc + r->j, r->n, tmp);
        for (size_t k = 0; k < r->n; k++)
            sum[k] += c[k];
    }
    mt_cpu_store_row(a->d_dtype, a->d, (r->i + i) * a->ldd + r->j, r->n, sum);
}

static void chunk_main(void *ctx, size_t chunk, int thread)
{
    const struct job *j = ctx;
    const struct mt_gemm *a = j->a;
    struct rect r = rect_of(j, chunk);
    struct scratch *s = (struct scratch *)(void *)(j->scratch + (size_t)thread * sizeof(*s));
    bool direct = a->d_dtype == MT_F32 && !a->bias && (!a->c || a->c == a->d);
    float *d = direct ? (float *)a->d + r.i * a->ldd + r.j : s->d;
    size_t ldd = direct ? a->ldd : r.n;
    float beta = direct && a->c ? 1 : 0;
    bool done = false;
    if (a->dtype == MT_BF16)
        done = product_bf16(a, &r, d, ldd, beta != 0, j->bf16[thread]);
    else if (!a->trans_a)
        done = product_f32(a, &r, d, ldd, beta);
    if (!done)
        product_of_panels(a, &r, d, ldd, beta, s);
    if (!direct)
        for (size_t i = 0; i < r.m; i++)
            finish_row(a, &r, i, d + i * ldd);
}

/* Large tiles are the faster ones, where there are enough of them for many threads. */
static size_t choose_side(const struct mt_gemm *a)
{
    return mt_div_up(a->m, TILE) * mt_div_up(a->n, TILE) >= MANY_TILES ? TILE : SMALL_TILE;
}

/* Tiles as equal as may be, so that a few threads end together. */
static size_t even_tile(size_t n, size_t side)
{
    size_t tiles = mt_div_up(n, side);
    return MT_MIN(mt_align_up(mt_div_up(n, tiles), 16), side);
}

void mt_cpu_run_gemm(struct mt_cpu_device *d, const struct mt_gemm *a)
{
    size_t side = choose_side(a);
    struct job j = {a, d->gemm_scratch, d->bf16_gemm, even_tile(a->m, side), even_tile(a->n, side), 0};
    j.tiles_n = mt_div_up(a->n, j.tile_n);
    size_t tiles = mt_div_up(a->m, j.tile_m) * j.tiles_n;
    if (tiles == 1 && a->m >= 32) { /* small outputs of long sums: let two threads have a part */
        j.tile_m = mt_align_up(mt_div_up(a->m, 4), 16);
        tiles = mt_div_up(a->m, j.tile_m);
    }
    mt_pool_run(d->pool, chunk_main, &j, tiles);
}
