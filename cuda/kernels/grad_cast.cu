/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Casts a gradient and sums the squares of the cast values. A block handles MT_SUMSQ_BLOCK elements. Each thread
 * handles the same groups of four elements with or without 16-byte accesses, so that sums do not depend on alignment.
 * Bytes moved per element: 4 and the width of dst_dtype.
 */
#include "launch.cuh"
#include "reduce.cuh"
#include "scalar.cuh"

enum { THREADS = 512, UNROLL = 4, TURNS = MT_SUMSQ_BLOCK / (4 * THREADS * UNROLL) };

/* VECTOR: src and dst are aligned to four of their elements. */
template <typename T, bool VECTOR>
static __global__ void __launch_bounds__(THREADS)
    cast_and_sum(const float *src, T *dst, float *partials, size_t n)
{
    __shared__ float scratch[WARP];
    size_t at = static_cast<size_t>(blockIdx.x) * MT_SUMSQ_BLOCK + threadIdx.x * 4;
    float sum = 0;
    for (int turn = 0; turn < TURNS; turn++, at += 4 * THREADS * UNROLL) {
        float x[UNROLL][4];
        MT_UNROLL(UNROLL)
        for (int u = 0; u < UNROLL; u++) {
            size_t i = at + u * 4 * THREADS;
            if (VECTOR && i + 4 <= n)
                load_four(src + i, x[u]);
            else
                for (int k = 0; k < 4; k++)
                    x[u][k] = i + k < n ? src[i + k] : 0.0f;
        }
        MT_UNROLL(UNROLL)
        for (int u = 0; u < UNROLL; u++) {
            size_t i = at + u * 4 * THREADS;
            for (int k = 0; k < 4; k++) {
                x[u][k] = rounded<T>(x[u][k]);
                sum = fmaf(x[u][k], x[u][k], sum);
            }
            if (!dst)
                continue;
            if (VECTOR && i + 4 <= n)
                store_four(dst + i, x[u]);
            else
                for (int k = 0; k < 4; k++)
                    if (i + k < n)
                        store(dst + i + k, x[u][k]);
        }
    }
    sum = block_sum(sum, scratch);
    if (threadIdx.x == 0 && partials)
        partials[blockIdx.x] = sum;
}

cudaError_t mt_cuda_grad_cast(const struct mt_grad_cast *a, cudaStream_t stream)
{
    bool aligned = aligned_to(a->src, 16) && aligned_to(a->dst, 4 * mt_dtype_size(a->dst_dtype));
    return for_flag(aligned, [=](auto vector) {
        return for_dtype(a->dst_dtype, [=](auto t) {
            using T = decltype(t);
            return MT_LAUNCH((cast_and_sum<T, vector.value>), grid_of(ceil_div(a->n, MT_SUMSQ_BLOCK)), THREADS, 0,
                             stream, a->src, static_cast<T *>(a->dst), a->partials, a->n);
        });
    });
}
