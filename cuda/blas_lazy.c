/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cuBLASLt is half a gigabyte and takes a third of a second to link, so it is loaded when a CUDA device is opened,
 * not when the program starts. Its functions are defined here and call those of the library.
 */
#include <cublasLt.h>
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>

#include "blas.h"
#include "libraries.h"

/* Name, parameters and arguments of every function that gemm.c calls. */
#define STATUS_FUNCTIONS(X)                                                                          \
    X(cublasLtCreate, (cublasLtHandle_t * h), (h))                                                   \
    X(cublasLtDestroy, (cublasLtHandle_t h), (h))                                                    \
    X(cublasLtMatmul,                                                                                \
      (cublasLtHandle_t h, cublasLtMatmulDesc_t d, const void *alpha, const void *a,                 \
       cublasLtMatrixLayout_t la, const void *b, cublasLtMatrixLayout_t lb, const void *beta,        \
       const void *c, cublasLtMatrixLayout_t lc, void *out, cublasLtMatrixLayout_t ld,               \
       const cublasLtMatmulAlgo_t *algo, void *ws, size_t bytes, cudaStream_t stream),               \
      (h, d, alpha, a, la, b, lb, beta, c, lc, out, ld, algo, ws, bytes, stream))                    \
    X(cublasLtMatmulAlgoGetHeuristic,                                                                \
      (cublasLtHandle_t h, cublasLtMatmulDesc_t d, cublasLtMatrixLayout_t a,                         \
       cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t out,               \
       cublasLtMatmulPreference_t p, int want, cublasLtMatmulHeuristicResult_t *r, int *got),        \
      (h, d, a, b, c, out, p, want, r, got))                                                         \
    X(cublasLtMatmulAlgoConfigGetAttribute,                                                          \
      (const cublasLtMatmulAlgo_t *algo, cublasLtMatmulAlgoConfigAttributes_t a, void *v, size_t n,  \
       size_t *written),                                                                             \
      (algo, a, v, n, written))                                                                      \
    X(cublasLtMatrixLayoutDestroy, (cublasLtMatrixLayout_t l), (l))                            \
    X(cublasLtMatrixLayoutSetAttribute,                                                              \
      (cublasLtMatrixLayout_t l, cublasLtMatrixLayoutAttribute_t a, const void *v, size_t n),        \
      (l, a, v, n))                                                                                  \
    X(cublasLtMatmulDescDestroy, (cublasLtMatmulDesc_t d), (d))                                \
    X(cublasLtMatmulDescSetAttribute,                                                                \
      (cublasLtMatmulDesc_t d, cublasLtMatmulDescAttributes_t a, const void *v, size_t n),           \
      (d, a, v, n))                                                                                  \
    X(cublasLtMatmulPreferenceDestroy, (cublasLtMatmulPreference_t p), (p))                    \
    X(cublasLtMatmulPreferenceSetAttribute,                                                          \
      (cublasLtMatmulPreference_t p, cublasLtMatmulPreferenceAttributes_t a, const void *v,          \
       size_t n),                                                                                    \
      (p, a, v, n))                                                                                  \
    X(cublasLtMatrixLayoutCreate,                                                                    \
      (cublasLtMatrixLayout_t * l, cudaDataType t, uint64_t rows, uint64_t cols, int64_t ld),        \
      (l, t, rows, cols, ld))                                                                        \
    X(cublasLtMatmulDescCreate,                                                                      \
      (cublasLtMatmulDesc_t * d, cublasComputeType_t c, cudaDataType_t t), (d, c, t))                \
    X(cublasLtMatmulPreferenceCreate, (cublasLtMatmulPreference_t * p), (p))

/* Filled once, then only read; the library is never unloaded, like CUDA itself. */
static struct {
#define POINTER(name, params, args) __typeof__(&name) name;
    STATUS_FUNCTIONS(POINTER)
#undef POINTER
    __typeof__(&cublasLtGetVersion) get_version;
    __typeof__(&cublasLtGetStatusString) get_status_string;
} lt;
static char why_not[900];
static pthread_once_t once = PTHREAD_ONCE_INIT;

#define MAJOR_OF(major) #major
#define MAJOR(major) MAJOR_OF(major)
#define SONAME(major) "libcublasLt.so." MAJOR(major)

static void *find(void *lib, const char *name)
{
    void *f = dlsym(lib, name);
    if (!f && !why_not[0])
        snprintf(why_not, sizeof(why_not), "cuBLASLt has no %s: another version than at build time",
                 name);
    return f;
}

static void load(void)
{
    char why[700];
    void *lib = mt_cuda_library(SONAME(CUBLAS_VER_MAJOR), MT_CUDA_LIBDIR, why, sizeof(why));
    if (!lib) {
        snprintf(why_not, sizeof(why_not), "%s. Install it (scripts/setup, or pip install nvidia-cublas%s), or put its folder on "
                 "LD_LIBRARY_PATH", why, CUBLAS_VER_MAJOR > 12 ? "" : "-cu" MAJOR(CUBLAS_VER_MAJOR));
        return;
    }
#define FIND(name, params, args) lt.name = (__typeof__(&name))find(lib, #name);
    STATUS_FUNCTIONS(FIND)
#undef FIND
    lt.get_version = (__typeof__(&cublasLtGetVersion))find(lib, "cublasLtGetVersion");
    lt.get_status_string = (__typeof__(&cublasLtGetStatusString))find(lib, "cublasLtGetStatusString");
}

int mt_cuda_blas_load(struct mt_err *err)
{
    pthread_once(&once, load);
    return why_not[0] ? mt_fail(err, MT_ERR_DEVICE, -ENODEV, "cuBLASLt cannot be loaded: %s", why_not)
                      : 0;
}

#define DEFINE(name, params, args)                                                                   \
    cublasStatus_t name params                                                                       \
    {                                                                                                \
        return lt.name args;                                                                         \
    }
STATUS_FUNCTIONS(DEFINE)
#undef DEFINE

size_t cublasLtGetVersion(void)
{
    return lt.get_version();
}

const char *cublasLtGetStatusString(cublasStatus_t status)
{
    return lt.get_status_string(status);
}
