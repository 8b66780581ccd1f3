/* SPDX-License-Identifier: Apache-2.0 */
/* The list of tiles that a pass of attention of our own (flash.cuh) takes, and its launch on them. */
#include "flash.cuh"

/* The documents' tiles of `rows` rows; a warp a document. Longer documents come first, equal ones in order; of a
 * document the last tile first (queries, which see more keys), or the first (keys). The first document has `past`
 * tokens before the call, which are keys alone. */
static __global__ void __launch_bounds__(WARP)
    list_tiles(const int32_t *cu, int n_docs, int rows, int past, bool queries, flash_tile *tiles)
{
    int doc = static_cast<int>(blockIdx.x), start = cu[doc] - (doc ? 0 : past), len = cu[doc + 1] - start, before = 0;
    int lane = static_cast<int>(threadIdx.x);
    for (int i = lane; i < n_docs; i += WARP) {
        int other = cu[i + 1] - cu[i] + (i ? 0 : past);
        if (other > len || (other == len && i < doc))
            before += (other - (queries && !i ? past : 0) + rows - 1) / rows;
    }
    for (int d = WARP / 2; d; d /= 2)
        before += __shfl_xor_sync(0xffffffffu, before, d);
    int from = queries && !doc ? past : 0, n = (len - from + rows - 1) / rows;
    for (int i = lane; i < n; i += WARP)
        tiles[before + i] = {start, len, from + (queries ? n - 1 - i : i) * rows, 0};
}

/* What a multiprocessor may have to do in a launch whose time is limited, in scores times the widths of a key and a
 * value: cards of 2020 take about a second at most. */
#ifdef MT_CUDA_SMALL_TILES /* for tests: few blocks */
static constexpr size_t LIMITED_WORK = 1 << 20;
#else
static constexpr size_t LIMITED_WORK = static_cast<size_t>(1) << 37;
#endif

/* Blocks of a launch, at most. Where a display is on the GPU, the driver ends what takes some seconds: there as many as
 * are done in time, even if the tiles of all are of the longest document. */
static cudaError_t most_blocks(const flash_pass &p, const struct mt_attention *a, size_t *most)
{
    int device = 0, limited = 0, multiprocessors = 0;
    size_t seen = a->window && a->window < a->max_len ? a->window : a->max_len;
    size_t scores = static_cast<size_t>(p.rows) * seen * (p.queries ? 1 : a->q.n / a->k.n);
    cudaError_t rc = cudaGetDevice(&device);
    if (rc == cudaSuccess)
        rc = cudaDeviceGetAttribute(&limited, cudaDevAttrKernelExecTimeout, device);
    if (rc == cudaSuccess)
        rc = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
    *most = limited ? multiprocessors * ceil_div(LIMITED_WORK, scores * (a->q.dim + a->v.dim)) : INT_MAX;
    return rc;
}

static cudaError_t run_pass(const flash_pass &p, const struct mt_attention *a, flash_args f, cudaStream_t stream)
{
    size_t tiles = 0, heads = p.queries ? a->q.n : a->k.n, most = 0;
    for (size_t i = 0; i < a->n_docs; i++)
        tiles += ceil_div(static_cast<size_t>(a->cu_seqlens_host[i + 1] - a->cu_seqlens_host[i]) +
                              (p.queries || i ? 0 : a->past),
                          static_cast<size_t>(p.rows));
    cudaError_t rc = MT_LAUNCH(list_tiles, grid_of(a->n_docs), WARP, 0, stream, a->cu_seqlens,
                               static_cast<int>(a->n_docs), p.rows, f.past, p.queries,
                               const_cast<flash_tile *>(f.tiles));
    if (rc == cudaSuccess)
        rc = most_blocks(p, a, &most);
    if (rc == cudaSuccess)
        rc = cudaFuncSetAttribute(p.kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, p.shared_bytes);
    for (size_t some; tiles && rc == cudaSuccess; tiles -= some, f.tiles += some) {
        some = tiles * heads <= most ? tiles : most < heads ? 1 : most / heads;
        rc = MT_LAUNCH(p.kernel, grid_of(some * heads), 2 * p.rows, p.shared_bytes, stream, f);
    }
    return rc;
}

cudaError_t mt_cuda_flash_run(const flash_pass *table, size_t n, const struct mt_attention *a, const flash_args &f,
                              cudaStream_t stream)
{
    cudaError_t rc = cudaErrorInvalidValue;
    for (const flash_pass *p = table; p < table + n; p++)
        if (static_cast<size_t>(p->dim) == a->q.dim && (rc = run_pass(*p, a, f, stream)) != cudaSuccess)
            return rc;
    return rc;
}
