/* SPDX-License-Identifier: Apache-2.0 */
/*
 * D is computed in blocks, and each block in panels of K, in order. A block's columns are divided into parts. A thread
 * that begins a part panels the strips of B for it; they stay in its core's L2 cache while it multiplies them with A, a
 * piece of rows at a time. Threads without work join a part, with packed strips of their own. A is read in place if the
 * cache allows it, or else packed once, by all threads together. How D is divided does not change an element's sum, so
 * it may depend on the number of threads.
 */
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "base/isa.h"
#include "device/cpu/cpu.h"
#include "device/cpu/gemm_kernel.h"

enum { PANEL = 512, MAX_ROWS = MT_CPU_GEMM_ROWS, MAX_COLS = MT_CPU_GEMM_COLS };
/* BLOCK: rows of a block. SUMS: rows and columns of a block whose sums need a buffer, since D is not f32. */
enum { BLOCK = 2048, SUMS = 1024 };
/* PART_STRIPS: strips of B in a part, a quarter of an L2 cache; LEAST_STRIPS: the fewest, if there are more threads
 * than parts. PARTS: most parts in a block. PIECE_STRIPS: strips of A in a piece. WORTH_JOINING: pieces that must be
 * left for a thread to join a part, since it panels the part's B once more. */
enum { PART_STRIPS = 4, LEAST_STRIPS = 2, PARTS = 256, PIECE_STRIPS = 2, WORTH_JOINING = 3 };
enum { PANEL_STRIPS = 4, PANEL_STEPS = 8, LINE = 16 };

struct thread_buffers {
    float a[MAX_ROWS * PANEL + LINE], b[PART_STRIPS * (MAX_COLS * PANEL + LINE)];
};

struct buffers {
    /* a block's rows are whole strips of at least 4 rows */
    float a[(BLOCK + MAX_ROWS) * (PANEL + LINE)], sums[(SUMS + MAX_ROWS) * SUMS];
    atomic_size_t next[PARTS]; /* piece of a part to be done */
    struct thread_buffers thread[];
};

struct mt_cpu_gemm {
    const struct mt_cpu_gemm_isa *isa;
    struct buffers *buffers;
    size_t bytes;
};

static const struct mt_cpu_gemm_isa *const all[] = {
#ifdef __x86_64__
    &mt_cpu_gemm_avx512, &mt_cpu_gemm_avx2,
#endif
    &mt_cpu_gemm_plain};

static bool supported(const struct mt_cpu_gemm_isa *isa)
{
#ifdef __x86_64__
    if (isa == &mt_cpu_gemm_avx512)
        return mt_has_avx512();
    if (isa == &mt_cpu_gemm_avx2)
        return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#endif
    return true;
}

static const struct mt_cpu_gemm_isa *choose_isa(void)
{
    const char *choice = getenv("MEGATRAIN_CPU_GEMM");
    for (size_t i = 0; choice && i < MT_ARRAY_LEN(all); i++)
        if (!strcmp(choice, all[i]->key) && supported(all[i]))
            return all[i];
    size_t i = 0;
    while (!supported(all[i]))
        i++;
    return all[i];
}

int mt_cpu_gemm_create(struct mt_cpu_gemm **out, int n_threads, struct mt_err *err)
{
    struct mt_cpu_gemm *g = mt_calloc(1, sizeof(*g));
    if (!g)
        return mt_fail_nomem(err, "matrix products", sizeof(*g));
    g->isa = choose_isa();
    g->bytes = sizeof(struct buffers) + (size_t)n_threads * sizeof(struct thread_buffers);
    g->buffers = mmap(NULL, g->bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (g->buffers == MAP_FAILED) {
        size_t bytes = g->bytes;
        free(g);
        return mt_fail_nomem(err, "matrix products", bytes);
    }
    madvise(g->buffers, g->bytes, MADV_HUGEPAGE); /* advice only */
    *out = g;
    return 0;
}

void mt_cpu_gemm_destroy(struct mt_cpu_gemm **g)
{
    if (!*g)
        return;
    munmap((*g)->buffers, (*g)->bytes);
    free(*g);
    *g = NULL;
}

void mt_cpu_gemm_warm(struct mt_cpu_gemm *g)
{
    memset(g->buffers, 0, g->bytes);
}

const struct mt_cpu_gemm_isa *mt_cpu_gemm_isa(const struct mt_cpu_gemm *g)
{
    return g->isa;
}

void mt_cpu_gemm_describe(char *buf, size_t len)
{
    char bf16[48];
    mt_cpu_bf16_gemm_describe(bf16, sizeof(bf16));
    snprintf(buf, len, "%s%s%s", choose_isa()->name, bf16[0] ? ", bf16 by " : "", bf16);
}

void mt_cpu_gemm_arithmetic(char *buf, size_t len, bool bf16)
{
    char library[48] = "";
    if (bf16)
        mt_cpu_bf16_gemm_describe(library, sizeof(library));
    snprintf(buf, len, "%s", library[0] ? library : choose_isa() == &mt_cpu_gemm_plain ? "plain C" : "fused multiply-adds");
}

/* Strips of k steps: m rows of A and n columns of B, and the place of their products. */
struct panel {
    const struct mt_cpu_gemm_isa *isa;
    size_t m, n, k, pitch_a, pitch_b;
    size_t lda;             /* of A's rows, read in place; 0: A is packed */
    float *edge;            /* buffer for an incomplete strip of rows that are read in place */
    const float *a, *b, *c; /* C is added; may be NULL */
    float *d;
    size_t ldc, ldd;
};

/* The strips `a` and `b`, of which only m rows and n columns exist, at (i, j) of D. */
static void multiply_edge(const struct panel *p, const float *a, const float *b, size_t i, size_t m, size_t j, size_t n)
{
    float tmp[MAX_ROWS * MAX_COLS];
    size_t nr = p->isa->nr;
    p->isa->multiply(p->k, a, b, NULL, 0, tmp, nr);
    for (size_t y = 0; y < m; y++)
        for (size_t x = 0; x < n; x++)
            p->d[(i + y) * p->ldd + j + x] = tmp[y * nr + x] + (p->c ? p->c[(i + y) * p->ldc + j + x] : 0);
}

/* Rows [i, i + m) of D. */
static void multiply_strip(const struct panel *p, const float *a, size_t i, size_t m)
{
    const struct mt_cpu_gemm_isa *isa = p->isa;
    bool packed = !p->lda;
    if (!packed && (m < isa->mr || p->n % isa->nr)) {
        isa->panel_a(&(struct mt_cpu_panel){.dtype = MT_F32, .src = a, .ld = p->lda, .trans = true, .factor = 1,
                                          .lanes = m, .k = p->k, .dst = p->edge});
        a = p->edge;
        packed = true;
    }
    const float *b = p->b;
    for (size_t j = 0; j < p->n; j += isa->nr, b += p->pitch_b) {
        const float *c = p->c ? p->c + i * p->ldc + j : NULL;
        float *d = p->d + i * p->ldd + j;
        size_t n = MT_MIN(isa->nr, p->n - j);
        if (m < isa->mr || n < isa->nr)
            multiply_edge(p, a, b, i, m, j, n);
        else if (packed)
            isa->multiply(p->k, a, b, c, p->ldc, d, p->ldd);
        else
            isa->multiply_rows(p->k, a, p->lda, b, c, p->ldc, d, p->ldd);
    }
}

static void multiply(const struct panel *p)
{
    size_t mr = p->isa->mr, next = p->lda ? mr * p->lda : p->pitch_a;
    const float *a = p->a;
    for (size_t i = 0; i < p->m; i += mr, a += next)
        multiply_strip(p, a, i, MT_MIN(mr, p->m - i));
}

/* A gap between strips: with a distance of a power of two they would share a few sets of the caches. */
static size_t pitch_of(size_t width, size_t k)
{
    return mt_align_up(width * k, LINE) + LINE;
}

struct rect {
    size_t i, m, j, n; /* rows [i, i + m), columns [j, j + n) of D */
};

struct job {
    const struct mt_gemm *g;
    const struct mt_cpu_gemm_isa *isa;
    struct buffers *buffers;
    struct rect block;
    size_t p, k; /* steps [p, p + k) */
    bool direct;   /* sums are stored in D directly */
    bool in_place; /* A is read in place, not packed */
    size_t part_n, parts, shares;
};

/* Lanes [lane, lane + lanes) of an operand, for the panel's steps. */
static struct mt_cpu_panel strips_of(const struct job *j, bool is_a, size_t lane, size_t lanes, float *dst)
{
    const struct mt_gemm *g = j->g;
    size_t ld = is_a ? g->lda : g->ldb;
    bool trans = is_a ? !g->trans_a : g->trans_b;
    float factor = is_a || g->scale == 0 ? 1 : g->scale;
    return (struct mt_cpu_panel){.dtype = g->dtype, .src = is_a ? g->a : g->b, .ld = ld, .trans = trans,
                                .factor = factor, .first = trans ? lane * ld + j->p : j->p * ld + lane,
                                .lanes = lanes, .k = j->k, .dst = dst,
                                .pitch = pitch_of(is_a ? j->isa->mr : j->isa->nr, j->k)};
}

/* All threads panel A: they share its lanes if these are rows of the source, else its steps. */
static size_t panel_chunks(const struct job *j)
{
    return j->g->trans_a ? mt_div_up(j->k, PANEL_STEPS) : mt_div_up(j->block.m, PANEL_STRIPS * j->isa->mr);
}

static void panel_chunk(void *ctx, size_t chunk, int)
{
    const struct job *j = ctx;
    struct mt_cpu_panel p = strips_of(j, true, j->block.i, j->block.m, j->buffers->a);
    if (j->g->trans_a) {
        size_t k = chunk * PANEL_STEPS;
        p.first += k * p.ld;
        p.dst += k * j->isa->mr;
        p.k = MT_MIN(p.k - k, (size_t)PANEL_STEPS);
    } else {
        size_t group = PANEL_STRIPS * j->isa->mr, lane = chunk * group;
        p.first += lane * p.ld;
        p.dst += lane / j->isa->mr * p.pitch;
        p.lanes = MT_MIN(p.lanes - lane, group);
    }
    j->isa->panel_a(&p);
}

void mt_cpu_gemm_finish_row(const struct mt_gemm *a, size_t i, size_t j, size_t n, float *sum)
{
    enum { PIECE = 512 };
    float tmp[PIECE];
    for (size_t k = 0; k < n; k += PIECE) {
        size_t len = MT_MIN(n - k, (size_t)PIECE);
        if (a->bias) {
            const float *b = mt_cpu_row_f32(a->dtype == MT_E4M3 ? a->d_dtype : a->dtype, a->bias, j + k, len, tmp);
            for (size_t l = 0; l < len; l++)
                sum[k + l] += b[l];
        }
        if (a->c) {
            const float *c = mt_cpu_row_f32(a->d_dtype, a->c, i * a->ldc + j + k, len, tmp);
            for (size_t l = 0; l < len; l++)
                sum[k + l] += c[l];
        }
    }
    mt_cpu_store_row(a->d_dtype, a->d, i * a->ldd + j, n, sum);
}

/* A piece of rows, columns [col, col + n) of the block, whose strips of B this thread has packed. */
static void multiply_piece(const struct job *j, size_t piece, size_t col, size_t n, struct thread_buffers *own)
{
    const struct mt_gemm *g = j->g;
    size_t rows = PIECE_STRIPS * j->isa->mr, i = piece * rows, row = j->block.i + i;
    struct panel p = {.isa = j->isa, .m = MT_MIN(rows, j->block.m - i), .n = n, .k = j->k,
                      .pitch_a = pitch_of(j->isa->mr, j->k), .pitch_b = pitch_of(j->isa->nr, j->k),
                      .edge = own->a, .b = own->b,
                      .d = j->direct ? NULL : j->buffers->sums + i * j->block.n + col,
                      .ldc = j->block.n, .ldd = j->block.n};
    if (j->in_place) {
        p.lda = g->lda;
        p.a = (const float *)g->a + row * g->lda + j->p;
    } else {
        p.a = j->buffers->a + piece * PIECE_STRIPS * p.pitch_a;
    }
    col += j->block.j;
    if (j->direct) {
        p.d = (float *)g->d + row * g->ldd + col;
        p.ldd = p.ldc = g->ldd;
    }
    if (j->p) {
        p.c = p.d;
    } else if (j->direct && g->c) {
        p.c = (const float *)g->c + row * g->ldc + col;
        p.ldc = g->ldc;
    }
    multiply(&p);
    if (!j->direct && j->p + j->k == g->k)
        for (size_t r = 0; r < p.m; r++)
            mt_cpu_gemm_finish_row(g, row + r, col, n, p.d + r * p.ldd);
}

static void multiply_part(const struct job *j, size_t part, int thread)
{
    atomic_size_t *next = &j->buffers->next[part];
    size_t pieces = mt_div_up(j->block.m, PIECE_STRIPS * j->isa->mr), begun = atomic_load(next);
    if (begun && begun + WORTH_JOINING > pieces) /* the part ends before B could be packed again */
        return;
    size_t piece = atomic_fetch_add(next, 1), col = part * j->part_n, n = MT_MIN(j->part_n, j->block.n - col);
    if (piece >= pieces)
        return;
    struct thread_buffers *own = &j->buffers->thread[thread];
    struct mt_cpu_panel panel = strips_of(j, false, j->block.j + col, n, own->b);
    j->isa->panel_b(&panel);
    for (; piece < pieces; piece = atomic_fetch_add(next, 1))
        multiply_piece(j, piece, col, n, own);
}

/* Each thread begins with a part of its own, and then goes on to join others. */
static void multiply_share(void *ctx, size_t share, int thread)
{
    const struct job *j = ctx;
    for (size_t i = 0; i < j->parts; i++)
        multiply_part(j, (share * j->parts / j->shares + i) % j->parts, thread);
}

/* The size of parts of n: at most `most`, nearly equal, a multiple of `step`. */
static size_t even(size_t n, size_t most, size_t step)
{
    return mt_align_up(mt_div_up(n, mt_div_up(n, most)), step);
}

/* Parts are as wide as the cache allows, but there is at least one for each thread. */
static void choose_parts(struct job *j)
{
    size_t nr = j->isa->nr;
    j->part_n = PART_STRIPS * nr;
    while (mt_div_up(j->block.n, j->part_n) < j->shares && j->part_n > LEAST_STRIPS * nr)
        j->part_n /= 2;
    j->part_n = even(j->block.n, j->part_n, nr);
    j->parts = mt_div_up(j->block.n, j->part_n);
}

/* Whether A can be read in place: its rows are f32 and share few sets of the L1 cache, where a set has at least 8
 * lines. */
static bool fits_in_place(const struct mt_gemm *g, size_t mr)
{
    enum { WAY = 4096, LINE_BYTES = 64, FEW = 6 };
    if (g->trans_a || g->dtype != MT_F32)
        return false;
    size_t same = 1;
    for (size_t i = 1; i < mr; i++) {
        size_t distance = i * g->lda * sizeof(float) % WAY;
        same += distance < LINE_BYTES || distance > WAY - LINE_BYTES;
    }
    return same <= FEW;
}

static void run_block(mt_pool *pool, struct job *j)
{
    size_t panel = even(j->g->k, PANEL, 1);
    choose_parts(j);
    for (j->p = 0; j->p < j->g->k; j->p += panel) {
        j->k = MT_MIN(panel, j->g->k - j->p);
        if (!j->in_place)
            mt_pool_run(pool, panel_chunk, j, panel_chunks(j));
        for (size_t i = 0; i < j->parts; i++)
            atomic_store(&j->buffers->next[i], 0);
        mt_pool_run(pool, multiply_share, j, j->shares);
    }
}

/* --- products of few rows, in place ------------------------------------------------------------- */

enum { THIN_COLS = 64, MAX_LANES = 16 };

static bool is_thin(const struct mt_cpu_gemm_isa *isa, const struct mt_gemm *g)
{
    bool plain = g->dtype == MT_F32 && !g->trans_a && g->trans_b && (g->scale == 0 || g->scale == 1);
    return plain && g->m <= MT_CPU_GEMM_THIN && g->n % isa->lanes == 0;
}

/* Columns [j, j + lanes): the panels' sums are added as run_block() does. */
static void thin_columns(const struct job *job, size_t j)
{
    const struct mt_gemm *g = job->g;
    size_t lanes = job->isa->lanes, panel = even(g->k, PANEL, 1);
    float total[MT_CPU_GEMM_THIN * MAX_LANES], sum[MT_CPU_GEMM_THIN * MAX_LANES];
    for (size_t p = 0; p < g->k; p += panel) {
        job->isa->multiply_thin(g->m, MT_MIN(panel, g->k - p), (const float *)g->a + p, g->lda,
                                (const float *)g->b + j * g->ldb + p, g->ldb, sum);
        for (size_t i = 0; i < g->m * lanes; i++) {
            const float *c = p ? &total[i] : NULL;
            if (!p && job->direct && g->c)
                c = (const float *)g->c + i / lanes * g->ldc + j + i % lanes;
            total[i] = c ? sum[i] + *c : sum[i];
        }
    }
    for (size_t i = 0; i < g->m; i++)
        if (job->direct)
            memcpy((float *)g->d + i * g->ldd + j, total + i * lanes, lanes * sizeof(float));
        else
            mt_cpu_gemm_finish_row(g, i, j, lanes, total + i * lanes);
}

static void thin_chunk(void *ctx, size_t chunk, int)
{
    const struct job *job = ctx;
    size_t end = MT_MIN((chunk + 1) * THIN_COLS, job->g->n);
    for (size_t j = chunk * THIN_COLS; j < end; j += job->isa->lanes)
        thin_columns(job, j);
}

void mt_cpu_gemm_run(struct mt_cpu_gemm *g, mt_pool *pool, const struct mt_gemm *a)
{
    struct job j = {.g = a, .isa = g->isa, .buffers = g->buffers, .direct = a->d_dtype == MT_F32 && !a->bias,
                    .in_place = fits_in_place(a, g->isa->mr), .shares = (size_t)mt_pool_n_threads(pool)};
    if (is_thin(j.isa, a)) {
        mt_pool_run(pool, thin_chunk, &j, mt_div_up(a->n, THIN_COLS));
        return;
    }
    size_t m = even(a->m, j.direct ? BLOCK : SUMS, j.isa->mr);
    size_t n = even(a->n, j.direct ? PARTS * LEAST_STRIPS * j.isa->nr : SUMS, j.isa->nr);
    for (size_t row = 0; row < a->m; row += m)
        for (size_t col = 0; col < a->n; col += n) {
            j.block = (struct rect){row, MT_MIN(m, a->m - row), col, MT_MIN(n, a->n - col)};
            run_block(pool, &j);
        }
}

/* Columns of `r`, steps [p, p + k), of a product by one thread. */
static void tile_panel(const struct mt_cpu_gemm_isa *isa, struct thread_buffers *own, const struct mt_cpu_tile *t,
                       const struct rect *r, size_t p, size_t k)
{
    isa->panel_b(&(struct mt_cpu_panel){.dtype = t->dtype, .src = t->b, .ld = t->ldb, .trans = t->trans_b, .factor = 1,
                                      .first = t->trans_b ? r->j * t->ldb + p : p * t->ldb + r->j, .lanes = r->n,
                                      .k = k, .dst = own->b, .pitch = pitch_of(isa->nr, k)});
    for (size_t i = 0; i < t->m; i += isa->mr) {
        size_t m = MT_MIN(isa->mr, t->m - i);
        isa->panel_a(&(struct mt_cpu_panel){.dtype = t->dtype, .src = t->a, .ld = t->lda, .trans = !t->trans_a,
                                          .factor = 1, .first = t->trans_a ? p * t->lda + i : i * t->lda + p,
                                          .lanes = m, .k = k, .dst = own->a});
        float *d = t->d + i * t->ldd + r->j;
        multiply(&(struct panel){.isa = isa, .m = m, .n = r->n, .k = k, .pitch_b = pitch_of(isa->nr, k), .a = own->a,
                                 .b = own->b, .c = p || t->accumulate ? d : NULL, .d = d, .ldc = t->ldd,
                                 .ldd = t->ldd});
    }
}

void mt_cpu_gemm_tile(struct mt_cpu_gemm *g, int thread, const struct mt_cpu_tile *t)
{
    size_t cols = PART_STRIPS * g->isa->nr, panel = even(t->k, PANEL, 1);
    for (size_t j = 0; j < t->n; j += cols) {
        struct rect r = {0, t->m, j, MT_MIN(cols, t->n - j)};
        for (size_t p = 0; p < t->k; p += panel)
            tile_panel(g->isa, &g->buffers->thread[thread], t, &r, p, MT_MIN(panel, t->k - p));
    }
}
