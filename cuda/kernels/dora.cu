/* SPDX-License-Identifier: Apache-2.0 */
/*
 * DoRA: a row's norm |W + s B A| from |W|, W A^T and A A^T, and columns scaled by magnitude / norm. The norm: a block
 * does a row, c s bytes of W and 4 r^2 of A A^T, which stay in the cache. Columns: a thread takes 16 bytes; 2 s bytes
 * an element, with `add` 3 s.
 */
#include "launch.cuh"
#include "reduce.cuh"
#include "scalar.cuh"

static constexpr unsigned THREADS = 256;

template <typename T, int N> static __global__ void __launch_bounds__(THREADS) dora_scale(struct mt_dora_scale a)
{
    __shared__ float scratch[WARP];
    size_t row = blockIdx.x;
    const T *w = static_cast<const T *>(a.w) + row * a.c, *b = static_cast<const T *>(a.b) + row * a.r;
    float sum = 0;
    MT_UNROLL(1)
    for (size_t i = threadIdx.x * static_cast<size_t>(N); i < a.c; i += THREADS * N) {
        float x[N];
        load_n<T, N>(w + i, x);
        for (int k = 0; k < N; k++)
            sum = fmaf(x[k], x[k], sum);
    }
    MT_UNROLL(1)
    for (size_t k = threadIdx.x; k < a.r; k += THREADS) {
        float product = 0; /* A A^T is symmetric: neighbouring threads read neighbouring elements */
        MT_UNROLL(4)
        for (size_t l = 0; l < a.r; l++)
            product = fmaf(a.gram[l * a.r + k], load(b + l), product);
        sum = fmaf(load(b + k), fmaf(2.0f * a.s, a.wa[row * a.r + k], a.s * a.s * product), sum);
    }
    float inverse = 1.0f / sqrtf(block_sum(sum, scratch));
    if (threadIdx.x == 0) {
        a.inverse[row] = inverse;
        a.scale[row] = load(static_cast<const T *>(a.magnitude) + row) * inverse;
    }
}

static __global__ void __launch_bounds__(THREADS) no_scale(struct mt_dora_scale a)
{
    size_t i = static_cast<size_t>(blockIdx.x) * THREADS + threadIdx.x;
    if (i >= a.n)
        return;
    a.scale[i] = 1.0f;
    a.inverse[i] = 0.0f;
}

cudaError_t mt_cuda_dora_scale(const struct mt_dora_scale *a, cudaStream_t stream)
{
    if (!a->magnitude)
        return MT_LAUNCH(no_scale, grid_of(ceil_div(a->n, THREADS)), THREADS, 0, stream, *a);
    return for_dtype(a->dtype, [=](auto t) {
        using T = decltype(t);
        return for_widths<T>(rows_aligned<T>(a->w, a->c), [=](auto v) {
            return MT_LAUNCH((dora_scale<T, v.n>), grid_of(a->n), THREADS, 0, stream, *a);
        });
    });
}

/* O is T, or float. */
template <typename T, typename O, int N>
static __global__ void __launch_bounds__(256) scale_columns(struct mt_scale_columns a, unsigned columns)
{
    size_t row, at;
    row_of_tile(columns, 1, &row, &at);
    at *= N;
    if (row >= a.n || at >= a.c)
        return;
    size_t i = row * a.c + at;
    float x[N], y[N];
    load_n<T, N>(static_cast<const T *>(a.x) + i, x);
    for (int k = 0; k < N; k++)
        x[k] *= a.scale[at + k];
    if (a.bias)
        for (int k = 0; k < N; k++)
            x[k] += load(static_cast<const T *>(a.bias) + at + k);
    if (a.add) {
        load_either<O, N>(a.add, i, y);
        for (int k = 0; k < N; k++)
            x[k] += y[k];
    }
    store_either<O, N>(a.out, i, x);
}

cudaError_t mt_cuda_scale_columns(const struct mt_scale_columns *a, cudaStream_t stream)
{
    return for_dtypes(a->dtype, a->out_dtype, [=](auto x, auto out) {
        return for_widths<decltype(x)>(a->c % VEC<decltype(x)> == 0, [=](auto v) {
            row_tiles t = tile_rows(a->n, a->c / v.n, 1);
            return MT_LAUNCH((scale_columns<decltype(x), decltype(out), v.n>), grid_of(t.blocks), dim3(t.x, t.y), 0,
                             stream, *a, t.columns);
        });
    });
}
