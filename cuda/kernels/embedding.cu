/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Backward of the embedding; forward gathers rows (moe_rows.cu). A block owns one run of equal tokens and 8 tiles of 32
 * vectors of its columns. In a short run each warp adds up the rows of one tile; in a long run the warps share the rows
 * of one tile after the other and add their sums in order. Moves s bytes per element of dout, and 4 + 4 per element of
 * the run's row of dtable.
 */
#include "launch.cuh"
#include "scalar.cuh"

enum { RUN_WARPS = 8, LONG_RUN = 16 };

/* Adds the vectors at `column` of the run's rows first, first + step, ... to `sum`. */
template <typename T, int N>
static __device__ void sum_rows(const struct mt_embedding_bwd &a, float scale, int first, int end, int step,
                                size_t column, float (&sum)[N])
{
    const T *dout = static_cast<const T *>(a.dout) + column;
    MT_UNROLL(4)
    for (int t = first; t < end; t += step) {
        float x[N];
        load_n<T, N>(dout + static_cast<size_t>(a.order[t]) * a.c, x);
        for (int k = 0; k < N; k++)
            sum[k] += x[k] * scale;
    }
}

template <int N> static __device__ void add_to(float *dst, const float (&sum)[N])
{
    float x[N];
    load_floats<N>(dst, x);
    for (int k = 0; k < N; k++)
        x[k] += sum[k];
    store_floats<N>(dst, x);
}

template <typename T, int N>
static __global__ void __launch_bounds__(WARP *RUN_WARPS)
    add_runs(struct mt_embedding_bwd a, float scale, unsigned groups)
{
    __shared__ float shared[RUN_WARPS][N][WARP];
    unsigned run = blockIdx.x / groups;
    size_t tile = static_cast<size_t>(blockIdx.x % groups) * RUN_WARPS, tiles = ceil_div(a.c, N * WARP);
    int first = a.starts[run], end = a.starts[run + 1], warp = static_cast<int>(threadIdx.y);
    float *row = a.dtable + static_cast<size_t>(a.run_ids[run]) * a.c;
    if (end - first <= LONG_RUN) {
        float sum[N] = {};
        size_t column = ((tile + threadIdx.y) * WARP + threadIdx.x) * N;
        if (column < a.c) {
            sum_rows<T, N>(a, scale, first, end, 1, column, sum);
            add_to<N>(row + column, sum);
        }
        return;
    }
    for (int i = 0; i < RUN_WARPS && tile < tiles; i++, tile++) {
        float sum[N] = {};
        size_t column = (tile * WARP + threadIdx.x) * N;
        if (column < a.c)
            sum_rows<T, N>(a, scale, first + warp, end, RUN_WARPS, column, sum);
        for (int k = 0; k < N; k++)
            shared[warp][k][threadIdx.x] = sum[k];
        __syncthreads();
        if (warp == 0 && column < a.c) {
            for (int w = 1; w < RUN_WARPS; w++)
                for (int k = 0; k < N; k++)
                    sum[k] += shared[w][k][threadIdx.x];
            add_to<N>(row + column, sum);
        }
        __syncthreads(); /* before the next tile's sums */
    }
}

cudaError_t mt_cuda_embedding_bwd(const struct mt_embedding_bwd *a, cudaStream_t stream)
{
    if (!a->n_runs)
        return cudaSuccess;
    return for_vectors(a->dtype, a->c, [=](auto v) {
        using V = decltype(v);
        size_t groups = ceil_div(a->c, static_cast<size_t>(V::n) * WARP * RUN_WARPS);
        return MT_LAUNCH((add_runs<typename V::type, V::n>), grid_of(a->n_runs * groups), dim3(WARP, RUN_WARPS), 0,
                         stream, *a, scale_in(a->dtype, a->scale), static_cast<unsigned>(groups));
    });
}
