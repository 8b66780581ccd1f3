/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Matrix products, answered by the cpu device's one-thread product: sums in FP32 and in an order that depends on
 * the shape and the algorithm alone, then D = alpha * sum + beta * C + bias with one rounding. Column-major is what it is called
 * with; a column-major matrix is the transpose of a row-major one, so D' = op(B)' op(A)' is computed.
 */
#include <cublasLt.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "device/cpu/cpu.h"
#include "emu.h"
#include "sanitizers.h"

enum { ALGO_MARK = 0x454d55, ALGO_WORKSPACE = 64 << 10 };
enum { BIAS_ALIGN = 16 }; /* nothing is asked about it, and real kernels read so many bytes at once */
enum { ALGO_NUMBER = 6, ALGO_US = 7 };     /* places in an algorithm's data */
#define NEVER_STARTS UINT32_MAX             /* in place of its microseconds */
#define LOSES_TAIL   (UINT32_MAX - 1)       /* likewise */
enum { SPLIT_TILE = 64 };                   /* it splits K, and sums whole tiles of it only */

struct cublasLtContext {
    int device;
};

struct cublasLtMatmulDescOpaque_t {
    cublasOperation_t trans_a, trans_b;
    uint32_t epilogue;
    const void *bias;
    int bias_type; /* -1: D's */
    const float *scale_a, *scale_b; /* of FP8 operands; NULL: 1 */
};

struct cublasLtMatrixLayoutOpaque_t {
    cudaDataType_t type;
    uint64_t rows, cols;
    int64_t ld, stride;
    int32_t batch;
};

struct cublasLtMatmulPreferenceOpaque_t {
    uint64_t workspace_bytes;
    uint32_t align[4]; /* promised of A, B, C and D */
};

size_t cublasLtGetVersion(void)
{
    return 130000;
}

const char *cublasLtGetStatusName(cublasStatus_t s)
{
    switch (s) {
    case CUBLAS_STATUS_SUCCESS: return "CUBLAS_STATUS_SUCCESS";
    case CUBLAS_STATUS_NOT_INITIALIZED: return "CUBLAS_STATUS_NOT_INITIALIZED";
    case CUBLAS_STATUS_ALLOC_FAILED: return "CUBLAS_STATUS_ALLOC_FAILED";
    case CUBLAS_STATUS_INVALID_VALUE: return "CUBLAS_STATUS_INVALID_VALUE";
    case CUBLAS_STATUS_ARCH_MISMATCH: return "CUBLAS_STATUS_ARCH_MISMATCH";
    case CUBLAS_STATUS_MAPPING_ERROR: return "CUBLAS_STATUS_MAPPING_ERROR";
    case CUBLAS_STATUS_EXECUTION_FAILED: return "CUBLAS_STATUS_EXECUTION_FAILED";
    case CUBLAS_STATUS_INTERNAL_ERROR: return "CUBLAS_STATUS_INTERNAL_ERROR";
    case CUBLAS_STATUS_NOT_SUPPORTED: return "CUBLAS_STATUS_NOT_SUPPORTED";
    case CUBLAS_STATUS_LICENSE_ERROR: return "CUBLAS_STATUS_LICENSE_ERROR";
    }
    return "an unknown status";
}

const char *cublasLtGetStatusString(cublasStatus_t s)
{
    return cublasLtGetStatusName(s);
}

const char *cublasGetStatusName(cublasStatus_t s)
{
    return cublasLtGetStatusName(s);
}

const char *cublasGetStatusString(cublasStatus_t s)
{
    return cublasLtGetStatusName(s);
}

/* --- handles and descriptors ---------------------------------------------------------------- */

cublasStatus_t cublasLtCreate(cublasLtHandle_t *handle)
{
    if (mt_emu_settings()->no_device)
        return CUBLAS_STATUS_NOT_INITIALIZED;
    *handle = calloc(1, sizeof(**handle));
    if (!*handle)
        return CUBLAS_STATUS_ALLOC_FAILED;
    (*handle)->device = mt_emu_device();
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle)
{
    free(handle);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t *desc, cublasComputeType_t compute,
                                        cudaDataType_t scale_type)
{
    if ((compute != CUBLAS_COMPUTE_32F && compute != CUBLAS_COMPUTE_32F_PEDANTIC) ||
        scale_type != CUDA_R_32F)
        return CUBLAS_STATUS_NOT_SUPPORTED;
    *desc = calloc(1, sizeof(**desc));
    if (!*desc)
        return CUBLAS_STATUS_ALLOC_FAILED;
    **desc = (struct cublasLtMatmulDescOpaque_t){.epilogue = CUBLASLT_EPILOGUE_DEFAULT, .bias_type = -1};
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t desc)
{
    free(desc);
    return CUBLAS_STATUS_SUCCESS;
}

/* Copies an attribute of exactly this size. */
static cublasStatus_t set(void *to, size_t size, const void *buf, size_t bytes)
{
    if (!buf || bytes != size)
        return CUBLAS_STATUS_INVALID_VALUE;
    memcpy(to, buf, size);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t d,
                                              cublasLtMatmulDescAttributes_t attr, const void *buf,
                                              size_t bytes)
{
    switch (attr) {
    case CUBLASLT_MATMUL_DESC_TRANSA: return set(&d->trans_a, sizeof(d->trans_a), buf, bytes);
    case CUBLASLT_MATMUL_DESC_TRANSB: return set(&d->trans_b, sizeof(d->trans_b), buf, bytes);
    case CUBLASLT_MATMUL_DESC_EPILOGUE: return set(&d->epilogue, sizeof(d->epilogue), buf, bytes);
    case CUBLASLT_MATMUL_DESC_BIAS_POINTER: return set(&d->bias, sizeof(d->bias), buf, bytes);
    case CUBLASLT_MATMUL_DESC_A_SCALE_POINTER: return set(&d->scale_a, sizeof(d->scale_a), buf, bytes);
    case CUBLASLT_MATMUL_DESC_B_SCALE_POINTER: return set(&d->scale_b, sizeof(d->scale_b), buf, bytes);
    case CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE: return set(&d->bias_type, sizeof(int32_t), buf, bytes);
    default: return CUBLAS_STATUS_NOT_SUPPORTED;
    }
}

cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t *layout, cudaDataType type,
                                          uint64_t rows, uint64_t cols, int64_t ld)
{
    *layout = calloc(1, sizeof(**layout));
    if (!*layout)
        return CUBLAS_STATUS_ALLOC_FAILED;
    **layout = (struct cublasLtMatrixLayoutOpaque_t){type, rows, cols, ld, 0, 1};
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t layout)
{
    free(layout);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t l,
                                                cublasLtMatrixLayoutAttribute_t attr,
                                                const void *buf, size_t bytes)
{
    int32_t order = CUBLASLT_ORDER_COL;
    cublasStatus_t rc;
    switch (attr) {
    case CUBLASLT_MATRIX_LAYOUT_TYPE: return set(&l->type, sizeof(l->type), buf, bytes);
    case CUBLASLT_MATRIX_LAYOUT_ROWS: return set(&l->rows, sizeof(l->rows), buf, bytes);
    case CUBLASLT_MATRIX_LAYOUT_COLS: return set(&l->cols, sizeof(l->cols), buf, bytes);
    case CUBLASLT_MATRIX_LAYOUT_LD: return set(&l->ld, sizeof(l->ld), buf, bytes);
    case CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT: return set(&l->batch, sizeof(l->batch), buf, bytes);
    case CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET: return set(&l->stride, sizeof(l->stride), buf, bytes);
    case CUBLASLT_MATRIX_LAYOUT_ORDER:
        rc = set(&order, sizeof(order), buf, bytes);
        return rc ? rc : order == CUBLASLT_ORDER_COL ? rc : CUBLAS_STATUS_NOT_SUPPORTED;
    default: return CUBLAS_STATUS_NOT_SUPPORTED;
    }
}

cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t *pref)
{
    *pref = calloc(1, sizeof(**pref));
    for (int i = 0; *pref && i < 4; i++)
        (*pref)->align[i] = 256;
    return *pref ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_ALLOC_FAILED;
}

cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t pref)
{
    free(pref);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t pref,
                                                    cublasLtMatmulPreferenceAttributes_t attr,
                                                    const void *buf, size_t bytes)
{
    uint32_t word;
    switch (attr) {
    case CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES:
        return set(&pref->workspace_bytes, sizeof(pref->workspace_bytes), buf, bytes);
    case CUBLASLT_MATMUL_PREF_SEARCH_MODE:
    case CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK: return set(&word, sizeof(word), buf, bytes);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES: return set(&pref->align[0], sizeof(word), buf, bytes);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES: return set(&pref->align[1], sizeof(word), buf, bytes);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES: return set(&pref->align[2], sizeof(word), buf, bytes);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES: return set(&pref->align[3], sizeof(word), buf, bytes);
    default: return CUBLAS_STATUS_NOT_SUPPORTED;
    }
}

/* --- one product ---------------------------------------------------------------------------- */

static atomic_size_t n_products;

size_t mt_emu_products(void)
{
    return atomic_load(&n_products);
}

struct product {
    struct cublasLtMatmulDescOpaque_t desc;
    struct cublasLtMatrixLayoutOpaque_t a, b, c, d;
    float alpha, beta;
    const void *pa, *pb, *pc;
    void *pd, *workspace;
    size_t scribble;
    unsigned parts, sleep_us; /* of the algorithm: parts of K that are summed alone; how much longer it takes */
    bool loses_tail;
};

static size_t size_of(cudaDataType_t t)
{
    return t == CUDA_R_32F ? 4 : t == CUDA_R_8F_E4M3 ? 1 : 2;
}

/* Of FP8 the real library has products of A transposed and B not, from sm_89 on, with rows of 16 bytes. */
static bool fp8_possible(const struct product *p)
{
    const struct cublasLtMatrixLayoutOpaque_t *of[] = {&p->a, &p->b, &p->c, &p->d};
    bool rows = true;
    for (int i = 0; i < 4; i++)
        rows &= of[i]->rows * size_of(of[i]->type) % 16 == 0 && (uint64_t)of[i]->ld * size_of(of[i]->type) % 16 == 0;
    return p->a.type == CUDA_R_8F_E4M3 && p->desc.trans_a == CUBLAS_OP_T && p->desc.trans_b == CUBLAS_OP_N && rows &&
           p->a.cols % 16 == 0 && p->a.batch == 1 && mt_emu_settings()->capability >= 89;
}

/* What the real library's table of types has, as far as we use it. */
static bool types_supported(const struct product *p)
{
    bool fp8 = p->a.type == CUDA_R_8F_E4M3;
    bool in = p->a.type == p->b.type && (p->a.type == CUDA_R_32F || p->a.type == CUDA_R_16BF || fp8_possible(p));
    bool out = p->c.type == p->d.type &&
               (p->d.type == CUDA_R_32F || (p->d.type == CUDA_R_16BF && (p->a.type == CUDA_R_16BF || fp8)));
    bool epilogue = p->desc.epilogue == CUBLASLT_EPILOGUE_DEFAULT ||
                    p->desc.epilogue == CUBLASLT_EPILOGUE_BIAS;
    bool bias = p->desc.epilogue != CUBLASLT_EPILOGUE_BIAS || p->desc.bias_type < 0 ||
                p->desc.bias_type == (int)p->d.type;
    /* the library is choosy about an epilogue's shape; so are we, for the caller's other way to be tested */
    bool shape = p->desc.epilogue != CUBLASLT_EPILOGUE_BIAS || p->d.rows % 2 == 0;
    return in && out && epilogue && bias && shape;
}

static bool layout_possible(const struct cublasLtMatrixLayoutOpaque_t *l)
{
    return l->rows && l->cols && l->ld >= (int64_t)l->rows && l->batch >= 1 && l->batch <= 65535;
}

static cublasStatus_t check_shapes(const struct product *p)
{
    bool ta = p->desc.trans_a != CUBLAS_OP_N, tb = p->desc.trans_b != CUBLAS_OP_N;
    uint64_t m = p->d.rows, n = p->d.cols, k = ta ? p->a.rows : p->a.cols;
    if (!types_supported(p))
        return CUBLAS_STATUS_NOT_SUPPORTED;
    bool ok = layout_possible(&p->a) && layout_possible(&p->b) && layout_possible(&p->c) &&
              layout_possible(&p->d) && (ta ? p->a.cols : p->a.rows) == m &&
              (tb ? p->b.rows : p->b.cols) == n && (tb ? p->b.cols : p->b.rows) == k &&
              p->c.rows == m && p->c.cols == n && p->a.batch == p->d.batch &&
              p->b.batch == p->d.batch && p->c.batch == p->d.batch;
    return ok ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_INVALID_VALUE;
}

static void *batch_of(const void *p, const struct cublasLtMatrixLayoutOpaque_t *l, int32_t b)
{
    return (char *)(uintptr_t)p + b * l->stride * (int64_t)size_of(l->type);
}

/* One matrix, or a batch: in device memory, wholly and outside poisoned gaps (the read of a poisoned byte is
 * reported), each as aligned as the algorithm was promised. */
static bool check_matrix(const char *what, const void *p, const struct cublasLtMatrixLayoutOpaque_t *l,
                         uint64_t align)
{
    size_t e = size_of(l->type), run = l->rows * e;
    for (int32_t b = 0; b < l->batch; b++) {
        const char *first = batch_of(p, l, b);
        if ((uintptr_t)first % align) {
            mt_emu_complain("%s: %p is not a multiple of the %d bytes that the algorithm was promised", what,
                            (const void *)first, (int)align);
            return false;
        }
        if ((uintptr_t)first % e || !mt_emu_check_device(what, mt_emu_device(), first,
                                                         (l->cols - 1) * (size_t)l->ld * e + run))
            return false;
        for (uint64_t c = 0; c < l->cols; c++) {
            const volatile char *bad = mt_asan_poisoned(first + c * (size_t)l->ld * e, run);
            if (bad)
                (void)*bad;
        }
    }
    return true;
}

/* As NVIDIA's documentation wants it. */
static bool check_workspace(const void *p, size_t bytes)
{
    if ((uintptr_t)p % 256 == 0)
        return !bytes || mt_emu_check_device("cublasLtMatmul, workspace", mt_emu_device(), p, bytes);
    mt_emu_complain("cublasLtMatmul, workspace: %p is not a multiple of 256 bytes", p);
    return false;
}

static bool check_scale(const char *what, const float *scale)
{
    return !scale || mt_emu_check_device(what, mt_emu_device(), scale, sizeof(*scale));
}

static float to_float(cudaDataType_t t, const void *base, size_t i)
{
    return t == CUDA_R_32F ? ((const float *)base)[i] : mt_bf16_to_f32(((const uint16_t *)base)[i]);
}

static void finish(const struct product *p, const float *sum, const void *c, void *d)
{
    uint64_t m = p->d.rows;
    float scale = (p->desc.scale_a ? *p->desc.scale_a : 1) * (p->desc.scale_b ? *p->desc.scale_b : 1);
    for (uint64_t j = 0; j < p->d.cols; j++)
        for (uint64_t i = 0; i < m; i++) {
            float v = p->alpha * scale * sum[j * m + i];
            if (p->beta != 0)
                v += p->beta * to_float(p->c.type, c, j * (size_t)p->c.ld + i);
            if (p->desc.epilogue == CUBLASLT_EPILOGUE_BIAS)
                v += to_float(p->d.type, p->desc.bias, i);
            size_t at = j * (size_t)p->d.ld + i;
            if (p->d.type == CUDA_R_32F)
                ((float *)d)[at] = v;
            else
                ((uint16_t *)d)[at] = mt_f32_to_bf16(v);
        }
}

static enum mt_dtype dtype_of(cudaDataType_t t)
{
    return t == CUDA_R_32F ? MT_F32 : t == CUDA_R_8F_E4M3 ? MT_E4M3 : MT_BF16;
}

/* D = op(A) op(B) by the cpu device's products, one at a time. */
static void multiply(const struct mt_cpu_tile *t)
{
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    static struct mt_cpu_gemm *gemm;
    pthread_mutex_lock(&lock);
    if (!gemm && mt_cpu_gemm_create(&gemm, 1, NULL))
        mt_emu_die("no memory for matrix products");
    mt_cpu_gemm_tile(gemm, 0, t);
    pthread_mutex_unlock(&lock);
}

/* Sums a part of K, from `at` on, of a product of a batch. */
static void sum_part(const struct product *p, int32_t batch, uint64_t at, uint64_t k, float *sum)
{
    bool ta = p->desc.trans_a != CUBLAS_OP_N, tb = p->desc.trans_b != CUBLAS_OP_N;
    const char *a = batch_of(p->pa, &p->a, batch), *b = batch_of(p->pb, &p->b, batch);
    size_t lda = (size_t)p->a.ld, ldb = (size_t)p->b.ld;
    multiply(&(struct mt_cpu_tile){.m = p->d.cols, .n = p->d.rows, .k = k, .trans_a = tb, .trans_b = ta,
                                   .dtype = dtype_of(p->a.type), .a = b + at * (tb ? ldb : 1) * size_of(p->b.type),
                                   .lda = ldb, .b = a + at * (ta ? 1 : lda) * size_of(p->a.type), .ldb = lda,
                                   .d = sum, .ldd = p->d.rows});
}

/* Of sums of FP8's products a tensor core of Ada or Hopper keeps 13 bits of the fraction (SageAttention2, arXiv:2411.10958; of
 * Blackwell all). What it has of 128 of K is added in FP32: so often the real library does it, unless it is to be fast. */
static float sum_kept(float x)
{
    uint32_t word;
    memcpy(&word, &x, sizeof(word));
    word &= ~0x3ffu;
    memcpy(&x, &word, sizeof(word));
    return x;
}

/* sum_part(), as the matrix units of the GPU have it; spare: two such sums. */
static void sum_in_units(const struct product *p, int32_t batch, uint64_t at, uint64_t k, float *sum, float *spare)
{
    enum { STEP = 32, EXACT = 128 };
    int capability = mt_emu_settings()->capability;
    uint64_t n = p->d.rows * p->d.cols;
    if (p->a.type != CUDA_R_8F_E4M3 || (capability != 89 && capability != 90)) {
        sum_part(p, batch, at, k, sum);
        return;
    }
    float *step = spare, *kept = spare + n;
    for (uint64_t i = 0; i < k; i += STEP) {
        sum_part(p, batch, at + i, MT_MIN((uint64_t)STEP, k - i), step);
        bool first = i % EXACT == 0, last = (i + STEP) % EXACT == 0 || i + STEP >= k;
        for (uint64_t j = 0; j < n; j++) {
            kept[j] = sum_kept(first ? step[j] : kept[j] + step[j]);
            if (last)
                sum[j] = i < EXACT ? kept[j] : sum[j] + kept[j];
        }
    }
}

static void run_product(void *args)
{
    const struct product *p = args;
    uint64_t n = p->d.rows * p->d.cols, k = p->desc.trans_a != CUBLAS_OP_N ? p->a.rows : p->a.cols;
    k -= p->loses_tail ? k % SPLIT_TILE : 0;
    uint64_t part = (k + p->parts - 1) / p->parts;
    float *sum = calloc(4 * n, sizeof(float));
    if (!sum || p->a.type != p->b.type)
        mt_emu_die("no memory for a matrix product, or operands of two types");
    if (p->sleep_us)
        usleep(p->sleep_us);
    for (int32_t b = 0; b < p->d.batch; b++) {
        for (uint64_t at = 0; at < k; at += part) {
            sum_in_units(p, b, at, MT_MIN(part, k - at), at ? sum + n : sum, sum + 2 * n);
            for (uint64_t i = 0; at && i < n; i++)
                sum[i] += sum[n + i];
        }
        finish(p, sum, batch_of(p->pc, &p->c, b), batch_of(p->pd, &p->d, b));
    }
    free(sum);
    if (p->scribble) /* nobody else may keep anything there */
        memset(p->workspace, 0xFF, p->scribble);
}

/* MT_EMU_ALGORITHMS: microseconds by which the product takes longer, for each algorithm there is, or x: it does not start,
 * or s: it splits K and loses its tail; else there is one. Number i, from 0, sums i + 1 parts of K. Returns how many. */
static int list_algorithms(unsigned *us, int most)
{
    const char *at = getenv("MT_EMU_ALGORITHMS");
    int n = 0;
    us[0] = 0;
    while (at && *at && n < most) {
        char *end = (char *)(uintptr_t)at + 1;
        us[n++] = *at == 'x' ? NEVER_STARTS : *at == 's' ? LOSES_TAIL : (unsigned)strtoul(at, &end, 10);
        at = *end ? end + 1 : end;
    }
    return n ? n : 1;
}

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(
    cublasLtHandle_t handle, cublasLtMatmulDesc_t desc, cublasLtMatrixLayout_t a,
    cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
    cublasLtMatmulPreference_t pref, int requested, cublasLtMatmulHeuristicResult_t results[],
    int *returned)
{
    struct product p = {.desc = *desc, .a = *a, .b = *b, .c = *c, .d = *d};
    cublasStatus_t rc = handle && requested > 0 ? check_shapes(&p) : CUBLAS_STATUS_INVALID_VALUE;
    unsigned us[8];
    *returned = 0;
    if (!rc && p.a.type == CUDA_R_8F_E4M3 && !(p.desc.scale_a && p.desc.scale_b))
        rc = CUBLAS_STATUS_NOT_SUPPORTED; /* NVIDIA's samples name the scales before they ask */
    if (rc)
        return rc;
    *returned = list_algorithms(us, requested < 8 ? requested : 8);
    for (int k = 0; k < *returned; k++) {
        results[k] = (cublasLtMatmulHeuristicResult_t){.state = CUBLAS_STATUS_SUCCESS, .wavesCount = 1};
        results[k].workspaceSize = pref && pref->workspace_bytes >= ALGO_WORKSPACE ? ALGO_WORKSPACE : 0;
        results[k].algo.data[0] = ALGO_MARK;
        results[k].algo.data[1] = results[k].workspaceSize;
        for (int i = 0; i < 4; i++)
            results[k].algo.data[2 + i] = pref ? pref->align[i] : 256;
        results[k].algo.data[ALGO_NUMBER] = (uint64_t)k;
        results[k].algo.data[ALGO_US] = us[k];
    }
    return rc;
}

cublasStatus_t cublasLtMatmulAlgoConfigGetAttribute(const cublasLtMatmulAlgo_t *algo,
                                                    cublasLtMatmulAlgoConfigAttributes_t attr,
                                                    void *buf, size_t bytes, size_t *written)
{
    bool half = attr == CUBLASLT_ALGO_CONFIG_INNER_SHAPE_ID || attr == CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID;
    uint32_t value = attr == CUBLASLT_ALGO_CONFIG_TILE_ID ? (uint32_t)algo->data[ALGO_NUMBER] + 1 : 0;
    if (attr == CUBLASLT_ALGO_CONFIG_SPLITK_NUM)
        value = algo->data[ALGO_US] == LOSES_TAIL ? 2 : 1;
    size_t size = half ? sizeof(uint16_t) : sizeof(uint32_t);
    if (algo->data[0] != ALGO_MARK || bytes != size)
        return CUBLAS_STATUS_INVALID_VALUE;
    memcpy(buf, &value, size);
    if (written)
        *written = size;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc, const void *alpha,
                              const void *a, cublasLtMatrixLayout_t a_layout, const void *b,
                              cublasLtMatrixLayout_t b_layout, const void *beta, const void *c,
                              cublasLtMatrixLayout_t c_layout, void *d,
                              cublasLtMatrixLayout_t d_layout, const cublasLtMatmulAlgo_t *algo,
                              void *workspace, size_t workspace_bytes, cudaStream_t stream)
{
    int device = mt_emu_device();
    struct product p = {.desc = *desc,
                        .a = *a_layout,
                        .b = *b_layout,
                        .c = *c_layout,
                        .d = *d_layout,
                        .pa = a,
                        .pb = b,
                        .pc = c,
                        .pd = d,
                        .workspace = workspace};
    cublasStatus_t rc = handle && alpha && beta ? check_shapes(&p) : CUBLAS_STATUS_INVALID_VALUE;
    if (rc)
        return rc;
    if (handle->device != device || mt_emu_device_of_stream(stream) != device) {
        mt_emu_complain("cublasLtMatmul: a handle of device %d and a stream of device %d, while "
                        "device %d is current",
                        handle->device, mt_emu_device_of_stream(stream), device);
        return CUBLAS_STATUS_INVALID_VALUE;
    }
    memcpy(&p.alpha, alpha, sizeof(float));
    memcpy(&p.beta, beta, sizeof(float));
    p.scribble = algo ? (size_t)algo->data[1] : 0;
    p.parts = algo ? (unsigned)algo->data[ALGO_NUMBER] + 1 : 1;
    p.sleep_us = algo ? (unsigned)algo->data[ALGO_US] : 0;
    p.loses_tail = p.sleep_us == LOSES_TAIL;
    p.sleep_us = p.loses_tail ? 0 : p.sleep_us;
    const uint64_t any[4] = {1, 1, 1, 1}, *align = algo ? algo->data + 2 : any;
    bool ok = (!algo || algo->data[0] == ALGO_MARK) && p.scribble <= workspace_bytes &&
              check_workspace(workspace, p.scribble) &&
              check_matrix("cublasLtMatmul, A", a, &p.a, align[0]) &&
              check_matrix("cublasLtMatmul, B", b, &p.b, align[1]) &&
              check_matrix("cublasLtMatmul, D", d, &p.d, align[3]) &&
              (p.beta == 0 || check_matrix("cublasLtMatmul, C", c, &p.c, align[2])) &&
              (p.beta == 0 || c != d || (p.c.ld == p.d.ld && p.c.stride == p.d.stride));
    if (ok && desc->epilogue == CUBLASLT_EPILOGUE_BIAS) {
        struct cublasLtMatrixLayoutOpaque_t l = {p.d.type, p.d.rows, 1, (int64_t)p.d.rows, 0, 1};
        ok = check_matrix("cublasLtMatmul, bias", desc->bias, &l, BIAS_ALIGN);
    }
    if (ok && p.a.type == CUDA_R_8F_E4M3)
        ok = align[0] >= 16 && align[1] >= 16 && check_scale("cublasLtMatmul, A's scale", desc->scale_a) &&
             check_scale("cublasLtMatmul, B's scale", desc->scale_b);
    if (!ok)
        return CUBLAS_STATUS_INVALID_VALUE;
    if (p.sleep_us == NEVER_STARTS)
        return CUBLAS_STATUS_EXECUTION_FAILED;
    atomic_fetch_add(&n_products, 1);
    return mt_emu_submit(stream, run_product, NULL, &p, sizeof(p)) ? CUBLAS_STATUS_EXECUTION_FAILED
                                                                 : CUBLAS_STATUS_SUCCESS;
}
