/* SPDX-License-Identifier: Apache-2.0 */
/*
 * db += column sums of dy, or of dy x, scaled. A block adds up 32 vectors of columns over its rows, 8 rows at a time,
 * then over its warps in order; the blocks' sums are folded (fold.cu). Reads s bytes an element of s bytes, 2 s with x.
 */
#include "workspace.h"
#include "launch.cuh"
#include "reduce.cuh"
#include "scalar.cuh"

static constexpr size_t WARPS = 8;

template <typename T, int N, bool PRODUCT>
static __global__ void __launch_bounds__(WARP *WARPS)
    sum_columns(struct mt_bias_bwd a, size_t rows, unsigned tiles)
{
    __shared__ float shared[WARPS][N][WARP];
    size_t block = blockIdx.x / tiles, column = (blockIdx.x % tiles * WARP + threadIdx.x) * static_cast<size_t>(N);
    size_t end = (block + 1) * rows < a.n ? (block + 1) * rows : a.n;
    const T *dy = static_cast<const T *>(a.dy) + column;
    float sum[N] = {};
    if (column < a.c) {
        MT_UNROLL(4)
        for (size_t row = block * rows + threadIdx.y; row < end; row += WARPS) {
            float x[N];
            load_n<T, N>(dy + row * a.ld, x);
            if (PRODUCT) {
                float y[N];
                load_n<T, N>(static_cast<const T *>(a.x) + column + row * a.ld, y);
                for (int k = 0; k < N; k++)
                    x[k] *= y[k];
            }
            for (int k = 0; k < N; k++)
                sum[k] += x[k];
        }
    }
    for (int k = 0; k < N; k++)
        shared[threadIdx.y][k][threadIdx.x] = sum[k];
    __syncthreads();
    if (threadIdx.y || column >= a.c)
        return;
    for (size_t w = 1; w < WARPS; w++)
        for (int k = 0; k < N; k++)
            sum[k] += shared[w][k][threadIdx.x];
    if (PRODUCT && a.scale)
        for (int k = 0; k < N; k++)
            sum[k] *= a.scale[column + k];
    store_floats<N>(static_cast<float *>(a.workspace) + block * a.c + column, sum);
}

template <typename T, bool PRODUCT>
static cudaError_t run(const struct mt_bias_bwd *a, size_t rows, size_t blocks, cudaStream_t stream)
{
    bool vecs = a->c % VEC<T> == 0 && rows_aligned<T>(a->dy, a->ld) && rows_aligned<T>(a->x, a->ld);
    return for_widths<T>(vecs, [=](auto v) {
        size_t tiles = ceil_div(a->c, static_cast<size_t>(v.n) * WARP);
        return MT_LAUNCH((sum_columns<T, v.n, PRODUCT>), grid_of(blocks * tiles), dim3(WARP, WARPS), 0, stream, *a,
                         rows, static_cast<unsigned>(tiles));
    });
}

cudaError_t mt_cuda_bias_bwd(const struct mt_bias_bwd *a, cudaStream_t stream)
{
    size_t rows = mt_cuda_bias_bwd_rows(a->n, a->c), blocks = ceil_div(a->n, rows);
    cudaError_t rc = for_dtype(a->dtype, [=](auto t) {
        using T = decltype(t);
        return a->x ? run<T, true>(a, rows, blocks, stream) : run<T, false>(a, rows, blocks, stream);
    });
    return mt_cuda_fold_after(rc, a->db, a->workspace, blocks, a->c, a->c, stream);
}
