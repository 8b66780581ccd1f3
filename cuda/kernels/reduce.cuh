/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "launch.cuh"

/**
 * Sums and maxima over a warp or a block, in an order fixed by the block's size: butterfly shuffles, in which every lane
 * gets the same bits. All lanes of a warp must call.
 */

/** Over aligned groups of `width` lanes; a power of two up to 32. */
static __device__ __forceinline__ float group_sum(float v, int width)
{
    for (int d = width / 2; d; d /= 2)
        v += __shfl_xor_sync(0xffffffffu, v, d);
    return v;
}

static __device__ __forceinline__ float warp_sum(float v)
{
    return group_sum(v, WARP);
}

/**
 * Sum over blockDim.x threads (whole warps); every thread gets the result. `scratch` is shared memory of WARP floats,
 * and must not be used again before the next barrier. With one warp along x there is no barrier, and warps may call
 * independently.
 */
static __device__ __forceinline__ float block_sum(float v, float *scratch)
{
    unsigned warps = blockDim.x / WARP, lane = threadIdx.x % WARP;
    v = warp_sum(v);
    if (warps == 1)
        return v;
    if (lane == 0)
        scratch[threadIdx.x / WARP] = v;
    __syncthreads();
    return warp_sum(lane < warps ? scratch[lane] : 0.0f);
}

/** As block_sum(): the sum of x[n], of which every blockDim.x-th is a thread's. */
static __device__ __forceinline__ float block_sum_of(const float *x, size_t n, float *scratch)
{
    float sum = 0;
    MT_UNROLL(1) /* few turns */
    for (size_t i = threadIdx.x; i < n; i += blockDim.x)
        sum += x[i];
    return block_sum(sum, scratch);
}

/** As block_sum(): the sum of the squares of f(i), first <= i < end, of which every blockDim.x-th is a thread's. */
template <typename F>
static __device__ __forceinline__ float block_squares(size_t first, size_t end, float *scratch, F f)
{
    float sum = 0;
    for (size_t i = first + threadIdx.x; i < end; i += blockDim.x) {
        float x = f(i);
        sum = fmaf(x, x, sum);
    }
    return block_sum(sum, scratch);
}

/** The same over the block's piece of n elements, of MT_DIRECT_PIECE. */
template <typename F> static __device__ __forceinline__ float piece_squares(size_t n, float *scratch, F f)
{
    size_t first = static_cast<size_t>(blockIdx.x) * MT_DIRECT_PIECE, end = first + MT_DIRECT_PIECE;
    return block_squares(first, end < n ? end : n, scratch, f);
}

static __device__ __forceinline__ float larger(float a, float b)
{
    return fmaxf(a, b);
}

static __device__ __forceinline__ uint32_t larger(uint32_t a, uint32_t b)
{
    return a > b ? a : b;
}

/** Of each `lanes` neighbouring lanes. */
template <typename T> static __device__ __forceinline__ T warp_max(T v, int lanes = WARP)
{
    for (int d = lanes / 2; d; d /= 2)
        v = larger(v, __shfl_xor_sync(0xffffffffu, v, d));
    return v;
}

/** As block_sum(): the largest, of numbers that are `least` or more. */
template <typename T> static __device__ __forceinline__ T block_max(T v, T least, T *scratch)
{
    unsigned warps = blockDim.x / WARP, lane = threadIdx.x % WARP;
    v = warp_max(v);
    if (warps == 1)
        return v;
    if (lane == 0)
        scratch[threadIdx.x / WARP] = v;
    __syncthreads();
    return warp_max(lane < warps ? scratch[lane] : least);
}

/**
 * dst[k] += sum over p of partials[p * ld + k], k < c: the second stage of sums over rows. `partials` is 4-byte
 * aligned.
 */
cudaError_t mt_cuda_fold(float *dst, const float *partials, size_t n_partials, size_t ld, size_t c,
                         cudaStream_t stream);

/** The same after a kernel that returned `rc`; dst NULL: the sums are not wanted. */
cudaError_t mt_cuda_fold_after(cudaError_t rc, float *dst, const void *partials, size_t n_partials, size_t ld, size_t c,
                               cudaStream_t stream);
