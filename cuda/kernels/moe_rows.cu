/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Gathers rows of tokens for an expert, and adds its output to the tokens' sums. A block takes one or more rows, or a
 * part of one; a thread takes vectors at a distance of the block's width, all loaded before the first is stored. Bytes
 * moved per element of s bytes: gather 2 s, combine s + 8.
 */
#include "launch.cuh"
#include "scalar.cuh"

enum { UNROLL = 2 };

template <typename T, int N>
static __global__ void __launch_bounds__(256) gather(struct mt_moe_gather a, size_t vecs, unsigned columns)
{
    size_t row, at;
    row_of_tile(columns, UNROLL, &row, &at);
    if (row >= a.n_padded)
        return;
    bool routed = row < a.n;
    unsigned entry = routed ? static_cast<unsigned>(a.list[row]) : 0u;
    float w = routed && a.weights ? a.weights[entry] : 1.0f, x[UNROLL][N] = {};
    const T *src = static_cast<const T *>(a.x) + entry / static_cast<unsigned>(a.k) * a.c;
    T *dst = static_cast<T *>(a.out) + row * a.c;
    MT_UNROLL(UNROLL)
    for (int u = 0; u < UNROLL; u++)
        if (routed && at + u * blockDim.x < vecs)
            load_n<T, N>(src + (at + u * blockDim.x) * N, x[u]);
    MT_UNROLL(UNROLL)
    for (int u = 0; u < UNROLL; u++)
        if (at + u * blockDim.x < vecs) {
            for (int k = 0; k < N; k++)
                x[u][k] *= w;
            store_n<T, N>(dst + (at + u * blockDim.x) * N, x[u]);
        }
}

template <typename T, int N>
static __global__ void __launch_bounds__(256) combine(struct mt_moe_combine a, size_t vecs, unsigned columns)
{
    size_t row, at;
    row_of_tile(columns, UNROLL, &row, &at);
    if (row >= a.n)
        return;
    unsigned entry = static_cast<unsigned>(a.list[row]);
    float w = a.weights ? a.weights[entry] : 1.0f, x[UNROLL][N], sum[UNROLL][N];
    const T *src = static_cast<const T *>(a.src) + row * a.c;
    float *dst = a.sum + entry / static_cast<unsigned>(a.k) * a.c;
    MT_UNROLL(UNROLL)
    for (int u = 0; u < UNROLL; u++)
        if (at + u * blockDim.x < vecs) {
            load_n<T, N>(src + (at + u * blockDim.x) * N, x[u]);
            load_floats<N>(dst + (at + u * blockDim.x) * N, sum[u]);
        }
    MT_UNROLL(UNROLL)
    for (int u = 0; u < UNROLL; u++)
        if (at + u * blockDim.x < vecs) {
            for (int k = 0; k < N; k++)
                sum[u][k] += w * x[u][k];
            store_floats<N>(dst + (at + u * blockDim.x) * N, sum[u]);
        }
}

template <typename T, int N> static cudaError_t run_gather(const struct mt_moe_gather *a, cudaStream_t stream)
{
    row_tiles t = tile_rows(a->n_padded, a->c / N, UNROLL);
    return MT_LAUNCH((gather<T, N>), grid_of(t.blocks), dim3(t.x, t.y), 0, stream, *a, a->c / N, t.columns);
}

template <typename T, int N> static cudaError_t run_combine(const struct mt_moe_combine *a, cudaStream_t stream)
{
    row_tiles t = tile_rows(a->n, a->c / N, UNROLL);
    return MT_LAUNCH((combine<T, N>), grid_of(t.blocks), dim3(t.x, t.y), 0, stream, *a, a->c / N, t.columns);
}

cudaError_t mt_cuda_moe_gather(const struct mt_moe_gather *a, cudaStream_t stream)
{
    if (a->dtype == MT_BF16)
        return a->c % VEC<bf16> == 0 ? run_gather<bf16, VEC<bf16>>(a, stream) : run_gather<bf16, 1>(a, stream);
    return a->c % VEC<float> == 0 ? run_gather<float, VEC<float>>(a, stream) : run_gather<float, 1>(a, stream);
}

cudaError_t mt_cuda_moe_combine(const struct mt_moe_combine *a, cudaStream_t stream)
{
    if (a->dtype == MT_BF16)
        return a->c % VEC<bf16> == 0 ? run_combine<bf16, VEC<bf16>>(a, stream) : run_combine<bf16, 1>(a, stream);
    return a->c % VEC<float> == 0 ? run_combine<float, VEC<float>>(a, stream) : run_combine<float, 1>(a, stream);
}
