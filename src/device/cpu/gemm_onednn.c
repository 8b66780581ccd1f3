/* SPDX-License-Identifier: Apache-2.0 */
/* One-thread products of bf16 by oneDNN's matmul primitives, prepared once for each shape. */
#include <errno.h>
#include <omp.h>
#include <oneapi/dnnl/dnnl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "device/cpu/gemm.h"

/* Version 3 (Debian 13) has descriptions of memory behind pointers, and no operation descriptors. */
#if DNNL_VERSION_MAJOR >= 3
#define DESC(md) (md)
#define ANY_ISA dnnl_cpu_isa_default
#else
#define DESC(md) (&(md))
#define ANY_ISA dnnl_cpu_isa_all
typedef const dnnl_memory_desc_t *const_dnnl_memory_desc_t;
static void dnnl_memory_desc_destroy(dnnl_memory_desc_t)
{
}
#endif

void mt_cpu_bf16_gemm_thread_init(void)
{
    omp_set_num_threads(1); /* for the calling thread: K must never be split over threads */
}

/* All that a primitive depends on. */
struct shape {
    size_t m, n, k, lda, ldb, ldd;
    size_t flags; /* trans_a, trans_b, accumulate */
};

struct product {
    struct shape shape;
    dnnl_primitive_t primitive; /* NULL: the library has none for the shape */
    dnnl_memory_t a, b, d, scratch;
};

/* Ragged batches bring ever new shapes: when there are this many, all are dropped. */
enum { MAX_PRODUCTS = 256 };

struct mt_cpu_bf16_gemm {
    dnnl_engine_t engine;
    dnnl_stream_t stream;
    struct product products[MAX_PRODUCTS];
    size_t n;
    void *scratch;
    size_t scratch_bytes;
    uint16_t *rows; /* of run_row_apart() */
    size_t rows_bytes;
    bool no_memory; /* another product would give other bits */
    float sums[MT_CPU_BF16_TILE * MT_CPU_BF16_TILE];
};

static bool wanted(void)
{
    const char *choice = getenv("MEGATRAIN_CPU_GEMM");
    /* Its kernels for AMX use tiles that were not configured (2.6.3, Sapphire Rapids: illegal instruction). */
    dnnl_set_max_cpu_isa(dnnl_cpu_isa_avx512_core_bf16);
    dnnl_cpu_isa_t isa = dnnl_get_effective_cpu_isa();
    if (choice)
        return !strcmp(choice, "bf16");
    /* Without AVX512_BF16 the library's bf16 products are slower than converting to f32 first. */
    return isa >= dnnl_cpu_isa_avx512_core_bf16 && isa != ANY_ISA;
}

int mt_cpu_bf16_gemm_create(struct mt_cpu_bf16_gemm **out, struct mt_err *err)
{
    *out = NULL;
    if (!wanted())
        return 0;
    struct mt_cpu_bf16_gemm *g = mt_calloc(1, sizeof(*g));
    if (!g)
        return mt_fail_nomem(err, "bf16 products", sizeof(*g));
    if (dnnl_engine_create(&g->engine, dnnl_cpu, 0) ||
        dnnl_stream_create(&g->stream, g->engine, dnnl_stream_default_flags)) {
        mt_cpu_bf16_gemm_destroy(&g);
        return mt_fail(err, MT_ERR_DEVICE, -EIO, "oneDNN cannot create a CPU engine");
    }
    *out = g;
    return 0;
}

static void product_finish(struct product *p)
{
    dnnl_memory_t memories[] = {p->a, p->b, p->d, p->scratch};
    for (size_t i = 0; i < MT_ARRAY_LEN(memories); i++)
        if (memories[i])
            dnnl_memory_destroy(memories[i]);
    if (p->primitive)
        dnnl_primitive_destroy(p->primitive);
    p->a = p->b = p->d = p->scratch = NULL;
    p->primitive = NULL;
}

static void forget_all(struct mt_cpu_bf16_gemm *g)
{
    for (size_t i = 0; i < g->n; i++)
        product_finish(&g->products[i]);
    g->n = 0;
}

void mt_cpu_bf16_gemm_destroy(struct mt_cpu_bf16_gemm **g)
{
    if (!*g)
        return;
    forget_all(*g);
    if ((*g)->stream)
        dnnl_stream_destroy((*g)->stream);
    if ((*g)->engine)
        dnnl_engine_destroy((*g)->engine);
    free((*g)->scratch);
    free((*g)->rows);
    free(*g);
    *g = NULL;
}

/* A matrix [rows, cols]; `trans`: stored as its transpose. */
static dnnl_memory_desc_t matrix(size_t rows, size_t cols, size_t ld, bool trans,
                                 dnnl_data_type_t type)
{
    dnnl_memory_desc_t md;
    dnnl_dims_t dims = {(dnnl_dim_t)rows, (dnnl_dim_t)cols};
    dnnl_dims_t strides = {trans ? 1 : (dnnl_dim_t)ld, trans ? (dnnl_dim_t)ld : 1};
#if DNNL_VERSION_MAJOR >= 3
    if (dnnl_memory_desc_create_with_strides(&md, 2, dims, type, strides))
        md = NULL; /* a description of nothing: no product is made of it */
#else
    dnnl_memory_desc_init_by_strides(&md, 2, dims, type, strides);
#endif
    return md;
}

static bool describe(dnnl_primitive_desc_t *out, struct mt_cpu_bf16_gemm *g, dnnl_memory_desc_t a, dnnl_memory_desc_t b,
                     dnnl_memory_desc_t d, dnnl_primitive_attr_t attr)
{
#if DNNL_VERSION_MAJOR >= 3
    return !dnnl_matmul_primitive_desc_create(out, g->engine, a, b, NULL, d, attr);
#else
    dnnl_matmul_desc_t matmul;
    return !dnnl_matmul_desc_init(&matmul, &a, &b, NULL, &d) &&
           !dnnl_primitive_desc_create(out, &matmul, attr, g->engine, NULL);
#endif
}

static dnnl_primitive_attr_t attributes(bool accumulate)
{
    dnnl_primitive_attr_t attr;
    dnnl_post_ops_t ops;
    if (dnnl_primitive_attr_create(&attr))
        return NULL;
    dnnl_primitive_attr_set_scratchpad_mode(attr, dnnl_scratchpad_mode_user);
    if (accumulate && !dnnl_post_ops_create(&ops)) {
#if DNNL_VERSION_MAJOR >= 3
        dnnl_post_ops_append_sum(ops, 1.0f, 0, dnnl_data_type_undef);
#else
        dnnl_post_ops_append_sum(ops, 1.0f);
#endif
        dnnl_primitive_attr_set_post_ops(attr, ops);
        dnnl_post_ops_destroy(ops);
    }
    return attr;
}

static bool grow(struct mt_cpu_bf16_gemm *g, void **buffer, size_t *has, size_t bytes)
{
    if (bytes <= *has)
        return true;
    free(*buffer);
    *buffer = mt_alloc_aligned(bytes);
    *has = *buffer ? bytes : 0;
    g->no_memory |= !*buffer;
    return *buffer;
}

/* On failure the product is kept without a primitive, so that it is not tried again. */
static void prepare(struct mt_cpu_bf16_gemm *g, struct product *p, const struct mt_cpu_tile *t)
{
    dnnl_memory_desc_t a = matrix(t->m, t->k, t->lda, t->trans_a, dnnl_bf16);
    dnnl_memory_desc_t b = matrix(t->k, t->n, t->ldb, t->trans_b, dnnl_bf16);
    dnnl_memory_desc_t d = matrix(t->m, t->n, t->ldd, false, dnnl_f32);
    dnnl_primitive_attr_t attr = attributes(t->accumulate);
    dnnl_primitive_desc_t desc = NULL;
    bool ok = attr && describe(&desc, g, a, b, d, attr);
    if (ok) {
        const_dnnl_memory_desc_t s = dnnl_primitive_desc_query_md(desc, dnnl_query_scratchpad_md, 0);
        ok = grow(g, &g->scratch, &g->scratch_bytes, dnnl_memory_desc_get_size(s)) &&
             !dnnl_primitive_create(&p->primitive, desc) &&
             !dnnl_memory_create(&p->a, DESC(a), g->engine, DNNL_MEMORY_NONE) &&
             !dnnl_memory_create(&p->b, DESC(b), g->engine, DNNL_MEMORY_NONE) &&
             !dnnl_memory_create(&p->d, DESC(d), g->engine, DNNL_MEMORY_NONE) &&
             !dnnl_memory_create(&p->scratch, s, g->engine, DNNL_MEMORY_NONE);
    }
    if (desc)
        dnnl_primitive_desc_destroy(desc);
    if (attr)
        dnnl_primitive_attr_destroy(attr);
    dnnl_memory_desc_destroy(a);
    dnnl_memory_desc_destroy(b);
    dnnl_memory_desc_destroy(d);
    if (!ok)
        product_finish(p);
}

static struct product *product_for(struct mt_cpu_bf16_gemm *g, const struct mt_cpu_tile *t)
{
    struct shape s = {t->m, t->n, t->k, t->lda, t->ldb, t->ldd,
                      (size_t)t->trans_a | (size_t)t->trans_b << 1 | (size_t)t->accumulate << 2};
    for (size_t i = 0; i < g->n; i++)
        if (!memcmp(&g->products[i].shape, &s, sizeof(s)))
            return &g->products[i];
    if (g->n == MAX_PRODUCTS)
        forget_all(g);
    struct product *p = &g->products[g->n++];
    *p = (struct product){.shape = s};
    prepare(g, p, t);
    return p;
}

static int run(struct mt_cpu_bf16_gemm *g, const struct mt_cpu_tile *t)
{
    struct product *p = product_for(g, t);
    if (g->no_memory)
        return -ENOMEM;
    if (!p->primitive)
        return 0;
    dnnl_memory_set_data_handle(p->a, (void *)(uintptr_t)t->a);
    dnnl_memory_set_data_handle(p->b, (void *)(uintptr_t)t->b);
    dnnl_memory_set_data_handle(p->d, t->d);
    dnnl_memory_set_data_handle(p->scratch, g->scratch);
    dnnl_exec_arg_t args[] = {{DNNL_ARG_SRC, p->a},
                              {DNNL_ARG_WEIGHTS, p->b},
                              {DNNL_ARG_DST, p->d},
                              {DNNL_ARG_SCRATCHPAD, p->scratch}};
    return !dnnl_primitive_execute(p->primitive, g->stream, MT_ARRAY_LEN(args), args);
}

/* Where rows of D lie apart the library takes other kernels, which add in another order (2.6.3), and it does not see
 * that of one row: it gets two, so that a row has the bits that it has among others. */
static int run_row_apart(struct mt_cpu_bf16_gemm *g, const struct mt_cpu_tile *t)
{
    enum { APART = MT_CPU_BF16_TILE + 16 };
    float sums[2 * APART] = {0};
    const uint16_t *a = t->a;
    struct mt_cpu_tile two = *t;
    if (!grow(g, (void **)&g->rows, &g->rows_bytes, 2 * t->k * sizeof(*a)))
        return -ENOMEM;
    for (size_t i = 0; i < t->k; i++)
        g->rows[i] = g->rows[t->k + i] = a[t->trans_a ? i * t->lda : i];
    memcpy(sums, t->d, t->accumulate ? t->n * sizeof(float) : 0);
    two.m = 2;
    two.trans_a = false;
    two.a = g->rows;
    two.lda = t->k;
    two.d = sums;
    two.ldd = APART;
    int done = run(g, &two);
    memcpy(t->d, sums, done > 0 ? t->n * sizeof(float) : 0);
    return done;
}

int mt_cpu_bf16_gemm_tile(struct mt_cpu_bf16_gemm *g, const struct mt_cpu_tile *t)
{
    return t->m == 1 && t->ldd != t->n ? run_row_apart(g, t) : run(g, t);
}

float *mt_cpu_bf16_gemm_sums(struct mt_cpu_bf16_gemm *g)
{
    return g->sums;
}

void mt_cpu_bf16_gemm_describe(char *buf, size_t len)
{
    const dnnl_version_t *v = dnnl_version();
    if (wanted())
        snprintf(buf, len, "oneDNN %d.%d.%d", v->major, v->minor, v->patch);
    else if (len)
        *buf = '\0';
}
