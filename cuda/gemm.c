/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cuBLASLt is column-major: it sees a row-major matrix as its transpose, so D = op(A) op(B) is computed as
 * D' = op(B)' op(A)', with B first and m and n exchanged. Our bias of n elements then runs along the rows of D', as
 * the bias epilogue requires.
 */
#include <cublasLt.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/log.h"
#include "blas.h"
#include "choices.h"
#include "kernels.h"
#include "workspace.h"

static const size_t workspace_bytes = MT_CUDA_BLAS_BYTES;
enum { N_CANDIDATES = 8, MAX_PLANS = 8192 };

/* All that the choice of an algorithm depends on. Compared as bytes: padding must be zero. */
struct key {
    struct mt_choice_shape shape; /* what a choice is kept by */
    uint64_t lda, ldb, ldc, ldd, batch, stride_a, stride_b, stride_d;
    uint8_t align_a, align_b, align_c, align_d, unused[4];
};

struct plan {
    struct key key;
    cublasLtMatmulDesc_t desc;
    cublasLtMatrixLayout_t a, b, c, d; /* in cuBLASLt's order: a is our B */
    cublasLtMatmulAlgo_t algo;
    int at;          /* its number among the heuristic's */
    unsigned failed; /* a bit for each of those that did not start */
    bool refused;    /* there is no algorithm: kept, so that it is not searched again */
};

struct mt_cuda_blas {
    cublasLtHandle_t lt;
    void *workspace;
    struct plan **table; /* open addressing; n_slots is a power of two */
    size_t n_slots, n_plans;
    struct mt_choices choices;
    bool tunes; /* products of shapes without a choice are timed */
};

static void destroy_plan(struct plan *p)
{
    if (!p)
        return;
    const cublasLtMatrixLayout_t layouts[] = {p->a, p->b, p->c, p->d};
    for (size_t i = 0; i < MT_ARRAY_LEN(layouts); i++)
        if (layouts[i])
            cublasLtMatrixLayoutDestroy(layouts[i]);
    if (p->desc)
        cublasLtMatmulDescDestroy(p->desc);
    free(p);
}

static void forget_plans(struct mt_cuda_blas *b)
{
    for (size_t i = 0; i < b->n_slots; i++)
        destroy_plan(b->table[i]);
    free(b->table);
    b->table = NULL;
    b->n_slots = b->n_plans = 0;
}

static cudaDataType_t lt_type(enum mt_dtype t)
{
    return t == MT_F32 ? CUDA_R_32F : t == MT_E4M3 ? CUDA_R_8F_E4M3 : CUDA_R_16BF;
}

static cublasStatus_t make_layout(cublasLtMatrixLayout_t *out, enum mt_dtype t, uint64_t rows,
                                  uint64_t cols, uint64_t ld, uint64_t batch, uint64_t stride)
{
    int32_t n = (int32_t)batch;
    int64_t offset = (int64_t)stride;
    cublasStatus_t rc = cublasLtMatrixLayoutCreate(out, lt_type(t), rows, cols, (int64_t)ld);
    if (rc || batch == 1)
        return rc;
    return cublasLtMatrixLayoutSetAttribute(*out, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &n, sizeof(n))
        ?: cublasLtMatrixLayoutSetAttribute(*out, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &offset, sizeof(offset));
}

static cublasStatus_t set_desc(cublasLtMatmulDesc_t d, cublasLtMatmulDescAttributes_t what,
                               const void *value, size_t bytes)
{
    return cublasLtMatmulDescSetAttribute(d, what, value, bytes);
}

static cublasStatus_t describe(struct plan *p)
{
    const struct key *k = &p->key;
    const struct mt_choice_shape *s = &k->shape;
    enum mt_dtype dt = (enum mt_dtype)s->dtype, od = (enum mt_dtype)s->d_dtype;
    cublasOperation_t op_a = s->trans_b ? CUBLAS_OP_T : CUBLAS_OP_N;
    cublasOperation_t op_b = s->trans_a ? CUBLAS_OP_T : CUBLAS_OP_N;
    cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_BIAS;
    cublasStatus_t rc = cublasLtMatmulDescCreate(&p->desc, CUBLAS_COMPUTE_32F, CUDA_R_32F)
                            ?: set_desc(p->desc, CUBLASLT_MATMUL_DESC_TRANSA, &op_a, sizeof(op_a))
                            ?: set_desc(p->desc, CUBLASLT_MATMUL_DESC_TRANSB, &op_b, sizeof(op_b));
    if (!rc && s->bias)
        rc = set_desc(p->desc, CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue, sizeof(epilogue));
    return rc
        ?: make_layout(&p->a, dt, s->trans_b ? s->k : s->n, s->trans_b ? s->n : s->k, k->ldb, k->batch, k->stride_b)
        ?: make_layout(&p->b, dt, s->trans_a ? s->m : s->k, s->trans_a ? s->k : s->m, k->lda, k->batch, k->stride_a)
        ?: make_layout(&p->c, od, s->n, s->m, k->ldc, k->batch, k->stride_d)
        ?: make_layout(&p->d, od, s->n, s->m, k->ldd, k->batch, k->stride_d);
}

/* Names the product's bias and scales: the heuristic and the product read which there are. */
static cublasStatus_t point(struct plan *plan, const struct mt_cuda_product *p)
{
    const void *scale_a = p->b_scale, *scale_b = p->a_scale; /* in cuBLASLt's order */
    cublasStatus_t rc = CUBLAS_STATUS_SUCCESS;
    if (p->bias)
        rc = set_desc(plan->desc, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &p->bias, sizeof(p->bias));
    if (!rc && p->dtype == MT_E4M3)
        rc = set_desc(plan->desc, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, &scale_a, sizeof(scale_a))
            ?: set_desc(plan->desc, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, &scale_b, sizeof(scale_b));
    return rc;
}

static cublasStatus_t set_preference(cublasLtMatmulPreference_t p, cublasLtMatmulPreferenceAttributes_t what,
                                     const void *value, size_t bytes)
{
    return cublasLtMatmulPreferenceSetAttribute(p, what, value, bytes);
}

static cublasStatus_t prefer(cublasLtMatmulPreference_t pref, const struct key *k)
{
    const struct {
        cublasLtMatmulPreferenceAttributes_t what;
        uint32_t bytes;
    } align[] = {{CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, k->align_b},
                 {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, k->align_a},
                 {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, k->align_c},
                 {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, k->align_d}};
    /* with K split, no reduction in the output's type: it would round partial sums to bf16 */
    uint32_t schemes = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
    cublasStatus_t rc =
        set_preference(pref, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace_bytes, sizeof(workspace_bytes))
        ?: set_preference(pref, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &schemes, sizeof(schemes));
    for (size_t i = 0; i < MT_ARRAY_LEN(align) && !rc; i++)
        rc = set_preference(pref, align[i].what, &align[i].bytes, sizeof(align[i].bytes));
    return rc;
}

static bool splits(const cublasLtMatmulAlgo_t *algo)
{
    uint32_t parts = 0;
    size_t written = 0;
    return !cublasLtMatmulAlgoConfigGetAttribute(algo, CUBLASLT_ALGO_CONFIG_SPLITK_NUM, &parts, sizeof(parts),
                                                 &written) &&
           parts > 1;
}

/* Leaves out those that split K where it is no multiple of their tiles, unless there are no others: cuBLASLt 12.8.5
 * and 13.1.1 have some that do not sum its last elements (facebookexperimental/triton#2767). Returns how many stay. */
static int without_tails(const struct plan *p, cublasLtMatmulAlgo_t *algo, int n)
{
    enum { TILE = 128 };
    int kept = 0;
    for (int i = 0; i < n; i++)
        if (p->key.shape.k % TILE == 0 || !splits(&algo[i]))
            algo[kept++] = algo[i];
    return kept ? kept : n;
}

/* The algorithms of the heuristic that run, best first: this depends on the shape and the GPU, not on time or load. */
static cublasStatus_t list_algorithms(struct mt_cuda_blas *b, const struct plan *p, cublasLtMatmulAlgo_t *out,
                                      int *n_out)
{
    cublasLtMatmulHeuristicResult_t found[N_CANDIDATES];
    cublasLtMatmulPreference_t pref = NULL;
    int n = 0;
    cublasStatus_t rc = cublasLtMatmulPreferenceCreate(&pref)
                            ?: prefer(pref, &p->key)
                            ?: cublasLtMatmulAlgoGetHeuristic(b->lt, p->desc, p->a, p->b, p->c, p->d, pref,
                                                              N_CANDIDATES, found, &n);
    *n_out = 0;
    if (pref)
        cublasLtMatmulPreferenceDestroy(pref);
    if (rc)
        return rc;
    for (int i = 0; i < n; i++)
        if (found[i].state == CUBLAS_STATUS_SUCCESS && found[i].workspaceSize <= workspace_bytes)
            out[(*n_out)++] = found[i].algo;
    *n_out = without_tails(p, out, *n_out);
    return *n_out ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_NOT_SUPPORTED;
}

/* Enqueues the product by an algorithm. */
static cublasStatus_t run(struct mt_cuda_device *d, struct plan *plan, const struct mt_cuda_product *p,
                          const cublasLtMatmulAlgo_t *algo)
{
    return point(plan, p)
        ?: cublasLtMatmul(d->blas->lt, plan->desc, &p->alpha, p->b, plan->a, p->a, plan->b, &p->beta,
                          p->beta != 0 ? p->c : p->d, plan->c, p->d, plan->d, algo,
                          d->turned ? d->side_memory[d->turned - 1] : d->blas->workspace, workspace_bytes,
                          mt_cuda_stream(d, MT_STREAM_COMPUTE));
}

/* Seconds of one of `reps` runs, or infinity if it does not run. */
static double time_runs(struct mt_cuda_device *d, struct plan *plan, const struct mt_cuda_product *p,
                        const cublasLtMatmulAlgo_t *algo, int reps)
{
    int64_t begin = mt_now_ns();
    cublasStatus_t rc = CUBLAS_STATUS_SUCCESS;
    for (int i = 0; i < reps && !rc; i++)
        rc = run(d, plan, p, algo);
    bool done = cudaStreamSynchronize(mt_cuda_stream(d, MT_STREAM_COMPUTE)) == cudaSuccess && !rc;
    return done ? (double)(mt_now_ns() - begin) * 1e-9 / reps : (double)INFINITY;
}

/* The algorithm that takes least time, by the best of several rounds in turn; the first if none is clearly faster. */
static int fastest(struct mt_cuda_device *d, struct plan *plan, const struct mt_cuda_product *p,
                   const cublasLtMatmulAlgo_t *algo, int n)
{
    enum { ROUNDS = 5, MOST_REPS = 64 };
    const double round_seconds = 1e-3, clearly = 0.99;
    double best[N_CANDIDATES], once = INFINITY;
    int at = 0;
    for (int i = 0; i < n; i++) { /* the first run of a kernel loads it */
        best[i] = time_runs(d, plan, p, &algo[i], 1);
        if (isfinite(best[i]))
            best[i] = time_runs(d, plan, p, &algo[i], 1);
        once = fmin(once, best[i]);
    }
    int reps = isfinite(once) ? (int)fmin(fmax(round_seconds / once, 1), MOST_REPS) : 0;
    for (int r = 0; r < ROUNDS && reps; r++)
        for (int i = 0; i < n; i++)
            if (isfinite(best[i]))
                best[i] = fmin(r ? best[i] : (double)INFINITY, time_runs(d, plan, p, &algo[i], reps));
    for (int i = 1; i < n; i++)
        if (best[i] < best[at] * (at ? 1 : clearly))
            at = i;
    return at;
}

static void read_config(uint32_t *out, const cublasLtMatmulAlgo_t *algo)
{
    static const struct {
        cublasLtMatmulAlgoConfigAttributes_t what;
        size_t bytes;
    } part[MT_CHOICE_PARTS] = {{CUBLASLT_ALGO_CONFIG_ID, 4}, {CUBLASLT_ALGO_CONFIG_TILE_ID, 4},
                               {CUBLASLT_ALGO_CONFIG_STAGES_ID, 4}, {CUBLASLT_ALGO_CONFIG_SPLITK_NUM, 4},
                               {CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME, 4}, {CUBLASLT_ALGO_CONFIG_CTA_SWIZZLING, 4},
                               {CUBLASLT_ALGO_CONFIG_CUSTOM_OPTION, 4}, {CUBLASLT_ALGO_CONFIG_INNER_SHAPE_ID, 2},
                               {CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID, 2}};
    for (int i = 0; i < MT_CHOICE_PARTS; i++) {
        uint32_t word = 0;
        uint16_t half = 0;
        size_t written = 0;
        bool whole = part[i].bytes == sizeof(word);
        void *value = whole ? (void *)&word : (void *)&half;
        cublasStatus_t rc = cublasLtMatmulAlgoConfigGetAttribute(algo, part[i].what, value, part[i].bytes, &written);
        out[i] = rc ? 0 : whole ? word : half; /* not all algorithms have all of them */
    }
}

/* The first algorithm, or that of the table of choices, to which this adds if it is to. */
static cublasStatus_t choose(struct mt_cuda_device *d, struct plan *p, const struct mt_cuda_product *product)
{
    struct mt_cuda_blas *b = d->blas;
    cublasLtMatmulAlgo_t algo[N_CANDIDATES];
    struct mt_choice mine = {.shape = p->key.shape};
    int n, at = 0;
    cublasStatus_t rc = point(p, product) ?: list_algorithms(b, p, algo, &n);
    if (rc)
        return rc;
    const struct mt_choice *choice = p->key.batch == 1 ? mt_choices_find(&b->choices, &mine.shape) : NULL;
    if (choice) {
        bool there = false;
        for (int i = 0; i < n && !there; i++) {
            read_config(mine.config, &algo[i]);
            there = !memcmp(mine.config, choice->config, sizeof(mine.config));
            at = there ? i : 0; /* with another leading dimension it may not be there */
        }
    } else if (b->tunes && p->key.batch == 1) {
        at = n > 1 ? fastest(d, p, product, algo, n) : 0;
        read_config(mine.config, &algo[at]);
        mt_choices_add(&b->choices, &mine);
    }
    p->algo = algo[at];
    p->at = at;
    return CUBLAS_STATUS_SUCCESS;
}

/* The next algorithm after one that did not start: the heuristic may name one that does not do the shape, as that of
 * cuBLASLt 13.6.0 does for FP32 operands of 2^31 elements or more (NVIDIA/raft#3097). False: there is none, or the
 * failure may be for lack of memory: bits must not depend on what is free now. */
static bool choose_another(struct mt_cuda_device *d, struct plan *p, const struct mt_cuda_product *product)
{
    cublasLtMatmulAlgo_t algo[N_CANDIDATES];
    char memory[128];
    int n, at = 0;
    p->failed |= 1u << p->at;
    if (*mt_cuda_short_of_memory(memory, sizeof(memory), false) || point(p, product) ||
        list_algorithms(d->blas, p, algo, &n))
        return false;
    while (at < n && p->failed >> at & 1)
        at++;
    if (at == n)
        return false;
    mt_debug("cuBLASLt's algorithm %d did not start for D[%zu, %zu] over %zu: %d is next", p->at, product->m, product->n,
             product->k, at);
    p->algo = algo[at];
    p->at = at;
    return true;
}

static uint64_t hash(const struct key *k)
{
    uint64_t h = 0xcbf29ce484222325u, w;
    for (size_t i = 0; i < sizeof(*k); i += sizeof(w)) {
        memcpy(&w, (const char *)k + i, sizeof(w));
        h = (h ^ w) * 0x9e3779b97f4a7c15u;
        h ^= h >> 29;
    }
    return h;
}

static struct plan **find_slot(struct mt_cuda_blas *b, const struct key *k)
{
    size_t i = hash(k) & (b->n_slots - 1);
    while (b->table[i] && memcmp(&b->table[i]->key, k, sizeof(*k)))
        i = (i + 1) & (b->n_slots - 1);
    return &b->table[i];
}

static bool make_room(struct mt_cuda_blas *b)
{
    if (b->n_plans >= MAX_PLANS) /* documents bring ever new lengths: start again, with the same choices */
        forget_plans(b);
    if (b->n_plans * 2 < b->n_slots)
        return true;
    struct mt_cuda_blas old = *b;
    size_t n = MT_MAX(old.n_slots * 2, (size_t)256);
    struct plan **table = mt_calloc(n, sizeof(struct plan *));
    if (!table)
        return false;
    b->table = table;
    b->n_slots = n;
    for (size_t i = 0; i < old.n_slots; i++)
        if (old.table[i])
            *find_slot(b, &old.table[i]->key) = old.table[i];
    free(old.table);
    return true;
}

static cublasStatus_t get_plan(struct mt_cuda_device *d, const struct key *k, const struct mt_cuda_product *product,
                               struct plan **out)
{
    struct mt_cuda_blas *b = d->blas;
    if (!make_room(b))
        return CUBLAS_STATUS_ALLOC_FAILED;
    struct plan **slot = find_slot(b, k);
    if (*slot) {
        *out = *slot;
        return CUBLAS_STATUS_SUCCESS;
    }
    struct plan *p = mt_calloc(1, sizeof(*p));
    if (!p)
        return CUBLAS_STATUS_ALLOC_FAILED;
    p->key = *k;
    cublasStatus_t rc = describe(p) ?: choose(d, p, product);
    p->refused = rc == CUBLAS_STATUS_NOT_SUPPORTED;
    if (rc && !p->refused) {
        destroy_plan(p);
        return rc;
    }
    b->n_plans++;
    *out = *slot = p;
    return CUBLAS_STATUS_SUCCESS;
}

/* The alignment of all matrices of a batch, at most 16, so that a buffer's address does not change bits. */
static uint8_t alignment(const void *p, size_t stride_bytes)
{
    uintptr_t bits = (uintptr_t)p | stride_bytes, low = bits & (~bits + 1);
    return (uint8_t)(!bits || low > 16 ? 16 : low);
}

static struct key key_of(const struct mt_cuda_product *p)
{
    const void *c = p->beta != 0 ? p->c : p->d;
    size_t in = mt_dtype_size(p->dtype), out = mt_dtype_size(p->d_dtype);
    return (struct key){
        .shape = {.m = p->m, .n = p->n, .k = p->k, .dtype = (uint8_t)p->dtype, .d_dtype = (uint8_t)p->d_dtype,
                  .trans_a = p->trans_a, .trans_b = p->trans_b, .bias = p->bias != NULL, .adds = p->beta != 0},
        .lda = p->lda, .ldb = p->ldb, .ldc = p->beta != 0 ? p->ldc : p->ldd, .ldd = p->ldd,
        .batch = MT_MAX(p->batch, (size_t)1), .stride_a = p->stride_a, .stride_b = p->stride_b,
        .stride_d = p->stride_d,
        .align_a = alignment(p->a, p->stride_a * in), .align_b = alignment(p->b, p->stride_b * in),
        .align_c = alignment(c, p->stride_d * out), .align_d = alignment(p->d, p->stride_d * out)};
}

static cublasStatus_t launch(struct mt_cuda_device *d, const struct mt_cuda_product *p)
{
    struct key key = key_of(p);
    struct plan *plan = NULL;
    cublasStatus_t rc = get_plan(d, &key, p, &plan);
    if (!rc && plan->refused)
        rc = CUBLAS_STATUS_NOT_SUPPORTED;
    if (rc)
        return rc;
    rc = run(d, plan, p, &plan->algo);
    while (rc && choose_another(d, plan, p))
        rc = run(d, plan, p, &plan->algo);
    return rc;
}

/* Stores the bias in D and adds the product to it: still one rounding, except with a bf16 C and a bias. */
static cublasStatus_t launch_on_bias(struct mt_cuda_device *d, const struct mt_cuda_product *p)
{
    struct mt_cuda_product rest = *p;
    struct mt_cuda_bias_rows fill = {.m = p->m, .n = p->n, .ldc = p->ldc, .ldd = p->ldd,
                                     .dtype = p->dtype == MT_E4M3 ? p->d_dtype : p->dtype, .d_dtype = p->d_dtype,
                                     .bias = p->bias,
                                     .c = p->beta != 0 ? p->c : NULL, .d = p->d};
    if (mt_cuda_fill_bias(&fill, mt_cuda_stream(d, MT_STREAM_COMPUTE)) != cudaSuccess)
        return CUBLAS_STATUS_EXECUTION_FAILED;
    rest.bias = NULL;
    rest.beta = 1;
    rest.c = p->d;
    rest.ldc = p->ldd;
    return launch(d, &rest);
}

int mt_cuda_multiply(struct mt_cuda_device *d, const struct mt_cuda_product *p, const char *op,
                     struct mt_err *err)
{
    /* cuBLASLt accepts only a bias of D's type, and in FP8 only one in bf16. Of its alignment nothing can be promised, and
     * kernels may read 16 bytes at once (pytorch#194497). */
    cublasStatus_t status = CUBLAS_STATUS_NOT_SUPPORTED;
    if (!p->bias || ((p->dtype == MT_E4M3 ? MT_BF16 : p->dtype) == p->d_dtype && alignment(p->bias, 0) == 16))
        status = launch(d, p);
    if (p->bias && status == CUBLAS_STATUS_NOT_SUPPORTED)
        status = launch_on_bias(d, p);
    if (!status)
        return 0;
    struct mt_err e;
    char memory[128];
    mt_fail(&e, MT_ERR_DEVICE, -EIO,
            "GPU %d: %s: cuBLASLt: %s for D[%zu, %zu] = A%s B%s over %zu, %s to %s, ld %zu %zu %zu, "
            "batch %zu%s%s",
            d->index, op, cublasLtGetStatusString(status), p->m, p->n, p->trans_a ? "'" : "",
            p->trans_b ? "'" : "", p->k, mt_dtype_name(p->dtype), mt_dtype_name(p->d_dtype), p->lda,
            p->ldb, p->ldd, MT_MAX(p->batch, (size_t)1), p->bias ? ", bias" : "",
            mt_cuda_short_of_memory(memory, sizeof(memory), false));
    mt_cuda_stick(d, &e);
    if (err)
        *err = e;
    return e.code;
}

int mt_cuda_op_gemm(mt_device *dev, const struct mt_gemm *a, struct mt_err *err)
{
    struct mt_cuda_device *d = mt_cuda(dev);
    struct mt_cuda_product p = {
        .m = a->m, .n = a->n, .k = a->k, .dtype = a->dtype, .d_dtype = a->d_dtype,
        .trans_a = a->trans_a, .trans_b = a->trans_b, .alpha = a->scale != 0 ? a->scale : 1, .beta = a->c ? 1.0f : 0.0f,
        .a = a->a, .b = a->b, .bias = a->bias, .c = a->c, .d = a->d,
        .a_scale = a->a_scale, .b_scale = a->b_scale, .lda = a->lda, .ldb = a->ldb,
        .ldc = a->ldc, .ldd = a->ldd};
    return mt_cuda_enter(d, err) ?: mt_cuda_multiply(d, &p, "gemm", err);
}

int mt_cuda_blas_create(struct mt_cuda_device *d, struct mt_err *err)
{
    struct mt_cuda_blas *b = d->blas = mt_calloc(1, sizeof(*b));
    if (!b)
        return mt_fail_nomem(err, "cuBLASLt's plans", sizeof(*b));
    int rc = mt_cuda_blas_load(err);
    if (rc) {
        free(b);
        d->blas = NULL;
        return rc;
    }
    rc = mt_cuda_alloc(&d->base, workspace_bytes, "cuBLASLt workspace", &b->workspace, err);
    if (rc)
        return rc;
    cublasStatus_t status = cublasLtCreate(&b->lt);
    return status ? mt_fail(err, MT_ERR_DEVICE, -EIO, "cuBLASLt cannot start on GPU %d: %s",
                            d->index, cublasLtGetStatusString(status))
                  : 0;
}

void mt_cuda_blas_destroy(struct mt_cuda_device *d)
{
    if (!d->blas)
        return;
    forget_plans(d->blas);
    if (d->blas->lt)
        cublasLtDestroy(d->blas->lt);
    free(d->blas);
    d->blas = NULL;
}

void mt_cuda_blas_tune(mt_device *dev, bool on)
{
    mt_cuda(dev)->blas->tunes = on;
}

size_t mt_cuda_blas_choices(mt_device *dev, struct mt_str *out)
{
    const struct mt_choices *choices = &mt_cuda(dev)->blas->choices;
    if (out)
        mt_choices_print(choices, out);
    return choices->n;
}

bool mt_cuda_blas_adopt(mt_device *dev, const char *text)
{
    struct mt_cuda_blas *b = mt_cuda(dev)->blas;
    bool changed = false, taken = mt_choices_read(&b->choices, text, &changed);
    if (changed)
        forget_plans(b);
    return taken;
}

void mt_cuda_blas_describe(char *buf, size_t len)
{
    size_t v = cublasLtGetVersion();
    snprintf(buf, len, "cuBLASLt %zu.%zu.%zu", v / 10000, v / 100 % 100, v % 100);
}
