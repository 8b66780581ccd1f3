/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Random signs, a thread an element; and APOLLO's direction: a block does the sums of a channel, then of a row, one block
 * what depends on all, and then threads the elements and the moments. Bytes moved per element of g: 4 for each of two
 * reads and a write; of the projection: 4 for two reads of it and of two moments, and for two writes of these.
 */
#include "launch.cuh"
#include "philox.cuh"
#include "reduce.cuh"

static constexpr unsigned THREADS = 256, WIDE = 1024;

static __global__ void __launch_bounds__(THREADS) signs(struct mt_signs a)
{
    size_t i = static_cast<size_t>(blockIdx.x) * THREADS + threadIdx.x, block = i / 128;
    if (i >= a.n)
        return;
    uint4 r = philox(static_cast<uint32_t>(a.seed), static_cast<uint32_t>(a.seed >> 32),
                     make_uint4(static_cast<uint32_t>(block), static_cast<uint32_t>(block >> 32),
                                static_cast<uint32_t>(a.stream), static_cast<uint32_t>(a.stream >> 32)));
    unsigned which = static_cast<unsigned>(i / 32 % 4);
    uint32_t word = which == 0 ? r.x : which == 1 ? r.y : which == 2 ? r.z : r.w;
    a.x[i] = word >> (i % 32) & 1 ? -a.scale : a.scale;
}

cudaError_t mt_cuda_signs(const struct mt_signs *a, cudaStream_t stream)
{
    return MT_LAUNCH(signs, grid_of(ceil_div(a->n, THREADS)), THREADS, 0, stream, *a);
}

static __device__ float first_moment(const struct mt_apollo &a, size_t i)
{
    return a.beta1 * a.m[i] + (1.0f - a.beta1) * a.low[i];
}

static __device__ float second_moment(const struct mt_apollo &a, size_t i)
{
    return a.beta2 * a.v[i] + (1.0f - a.beta2) * a.low[i] * a.low[i];
}

/* Two sums of each channel, to sums[channels] and behind. */
static __global__ void __launch_bounds__(THREADS) sum_channels(struct mt_apollo a, float *sums)
{
    __shared__ float scratch[WARP];
    size_t channel = blockIdx.x, first = channel * a.rank;
    float low = 0, steps = 0;
    for (size_t i = threadIdx.x; i < a.rank; i += THREADS) {
        float u = first_moment(a, first + i) / (sqrtf(second_moment(a, first + i)) + a.eps);
        low = fmaf(a.low[first + i], a.low[first + i], low);
        steps = fmaf(u, u, steps);
    }
    low = block_sum(low, scratch);
    __syncthreads();
    steps = block_sum(steps, scratch);
    if (threadIdx.x == 0) {
        sums[channel] = low;
        sums[gridDim.x + channel] = steps;
    }
}

/* Infinite if squares overflow: second moments would, too, and stay infinite. */
static __global__ void __launch_bounds__(WIDE) find_scales(float *sums, size_t channels, bool by_tensor)
{
    __shared__ float scratch[WARP];
    float low = block_sum_of(sums, channels, scratch), steps = 0;
    if (by_tensor) {
        __syncthreads();
        steps = block_sum_of(sums + channels, channels, scratch);
    }
    bool finite = isfinite(low);
    MT_UNROLL(1)
    for (size_t c = threadIdx.x; c < channels; c += WIDE) {
        float of_low = by_tensor ? low : sums[c], of_steps = by_tensor ? steps : sums[channels + c];
        sums[c] = finite ? sqrtf(of_steps) / (sqrtf(of_low) + 1e-8f) : INFINITY;
    }
}

static __global__ void __launch_bounds__(THREADS) sum_rows(struct mt_apollo a, const float *scales, float *sums)
{
    __shared__ float scratch[WARP];
    size_t row = blockIdx.x;
    const float *g = a.g + row * a.cols;
    bool tall = a.rows >= a.cols;
    float sum = block_squares(0, a.cols, scratch, [=](size_t i) { return g[i] * scales[tall ? row : i]; });
    if (threadIdx.x == 0)
        sums[row] = sum;
}

/* The factor of what is left, 0 if it is not finite, and the norm. */
static __global__ void __launch_bounds__(WIDE) limit(struct mt_apollo a, const float *sums, float *factor)
{
    __shared__ float scratch[WARP];
    float norm = sqrtf(block_sum_of(sums, a.rows, scratch));
    if (threadIdx.x != 0)
        return;
    float grown = norm / (*a.norm + 1e-8f), f = 1.0f;
    if (a.growth > 0.0f && *a.norm > 0.0f && grown > a.growth)
        f = grown / a.growth;
    *factor = isfinite(norm) ? a.scale / f : 0.0f;
    if (isfinite(norm))
        *a.norm = norm / f;
}

static __global__ void __launch_bounds__(THREADS) write_direction(struct mt_apollo a, const float *scales,
                                                                  const float *factor)
{
    size_t i = static_cast<size_t>(blockIdx.x) * THREADS + threadIdx.x;
    if (i >= a.rows * a.cols)
        return;
    float f = *factor;
    a.g[i] = f > 0.0f ? a.g[i] * scales[a.rows >= a.cols ? i / a.cols : i % a.cols] * f : 0.0f;
}

static __global__ void __launch_bounds__(THREADS) write_moments(struct mt_apollo a, size_t n, const float *factor)
{
    size_t i = static_cast<size_t>(blockIdx.x) * THREADS + threadIdx.x;
    if (i >= n || !(*factor > 0.0f))
        return;
    a.m[i] = first_moment(a, i);
    a.v[i] = second_moment(a, i);
}

cudaError_t mt_cuda_apollo(const struct mt_apollo *a, cudaStream_t stream)
{
    size_t channels = mt_apollo_channels(a), low = channels * a->rank;
    float *scales = a->workspace, *sums = scales + 2 * channels, *factor = sums + a->rows;
    cudaError_t rc = MT_LAUNCH(sum_channels, grid_of(channels), THREADS, 0, stream, *a, scales);
    dim3 elements = grid_of(ceil_div(a->rows * a->cols, THREADS)), moments = grid_of(ceil_div(low, THREADS));
    rc = MT_LAUNCH_NEXT(rc, find_scales, 1, WIDE, 0, stream, scales, channels, a->by_tensor);
    rc = MT_LAUNCH_NEXT(rc, sum_rows, grid_of(a->rows), THREADS, 0, stream, *a, scales, sums);
    rc = MT_LAUNCH_NEXT(rc, limit, 1, WIDE, 0, stream, *a, sums, factor);
    rc = MT_LAUNCH_NEXT(rc, write_direction, elements, THREADS, 0, stream, *a, scales, factor);
    return MT_LAUNCH_NEXT(rc, write_moments, moments, THREADS, 0, stream, *a, low, factor);
}
