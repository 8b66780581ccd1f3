/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Adafactor's direction. Means of squares: a block does a row of g, and a thread a column of a chunk of rows, whose sums
 * another kernel adds in order. One block settles what depends on all: whether g is finite, the rows' moments and their
 * mean, the scale of the weights; later the factor that clips. Then the elements, twice. Bytes moved per element: 4 for
 * each of two reads of g, 8 for each of two times that it is changed, and the width of w.
 */
#include "launch.cuh"
#include "reduce.cuh"
#include "scalar.cuh"

static constexpr unsigned THREADS = 256, WIDE = 1024;

static __global__ void __launch_bounds__(THREADS) row_means(struct mt_adafactor a, float *mean)
{
    __shared__ float scratch[WARP];
    size_t row = blockIdx.x;
    const float *g = a.g + row * a.cols;
    float sum = block_squares(0, a.cols, scratch, [=](size_t i) { return g[i]; });
    if (threadIdx.x == 0)
        mean[row] = sum / static_cast<float>(a.cols) + a.eps;
}

/* Of a vector. */
static __global__ void __launch_bounds__(THREADS) squares(struct mt_adafactor a, float *mean)
{
    size_t i = static_cast<size_t>(blockIdx.x) * THREADS + threadIdx.x;
    if (i < a.rows)
        mean[i] = fmaf(a.g[i], a.g[i], a.eps);
}

static __global__ void __launch_bounds__(THREADS) column_sums(struct mt_adafactor a, float *col, size_t chunk)
{
    size_t k = static_cast<size_t>(blockIdx.x) * THREADS + threadIdx.x, first = blockIdx.y * chunk;
    size_t end = first + chunk < a.rows ? first + chunk : a.rows;
    float sum = 0;
    if (k >= a.cols)
        return;
    for (size_t i = first; i < end; i++)
        sum = fmaf(a.g[i * a.cols + k], a.g[i * a.cols + k], sum);
    col[blockIdx.y * a.cols + k] = sum;
}

template <typename T> static __global__ void __launch_bounds__(THREADS) sum_weights(struct mt_adafactor a, float *sums)
{
    __shared__ float scratch[WARP];
    const T *w = static_cast<const T *>(a.w);
    float sum = piece_squares(a.rows * a.cols, scratch, [=](size_t i) { return load(w + i); });
    if (threadIdx.x == 0)
        sums[blockIdx.x] = sum;
}

static __device__ float blend(float beta2, float old, float mean)
{
    return beta2 * old + (1.0f - beta2) * mean;
}

static __global__ void __launch_bounds__(WIDE) settle(struct mt_adafactor a, struct mt_adafactor_space s)
{
    __shared__ float scratch[WARP];
    bool finite = isfinite(block_sum_of(s.row, a.rows, scratch));
    MT_UNROLL(1)
    for (size_t i = threadIdx.x; finite && i < a.rows; i += WIDE)
        a.row[i] = blend(a.beta2, a.row[i], s.row[i]);
    __syncthreads();
    float rows = block_sum_of(a.row, a.rows, scratch);
    __syncthreads();
    float w = block_sum_of(s.w, s.pieces, scratch);
    if (threadIdx.x)
        return;
    s.scalar[0] = finite ? 1.0f : 0.0f;
    s.scalar[1] = a.col ? rows / static_cast<float>(a.rows) : 1.0f;
    *a.scale = fmaxf(a.least, sqrtf(w / static_cast<float>(a.rows * a.cols)));
}

static __global__ void __launch_bounds__(THREADS) settle_columns(struct mt_adafactor a, struct mt_adafactor_space s)
{
    size_t k = static_cast<size_t>(blockIdx.x) * THREADS + threadIdx.x;
    float sum = 0;
    if (k >= a.cols || s.scalar[0] == 0.0f)
        return;
    for (size_t c = 0; c < s.chunks; c++)
        sum += s.col[c * a.cols + k];
    if (isfinite(sum)) /* else it would be infinite for ever */
        a.col[k] = blend(a.beta2, a.col[k], sum / static_cast<float>(a.rows) + a.eps);
}

static __global__ void __launch_bounds__(THREADS) scale_elements(struct mt_adafactor a, struct mt_adafactor_space s)
{
    __shared__ float scratch[WARP];
    float mean = s.scalar[1];
    float sum = piece_squares(a.rows * a.cols, scratch, [=](size_t i) {
        float u = a.g[i] / sqrtf(a.row[i / a.cols] / mean);
        if (a.col)
            u /= sqrtf(a.col[i % a.cols]);
        return a.g[i] = u;
    });
    if (threadIdx.x == 0)
        s.u[blockIdx.x] = sum;
}

static __global__ void __launch_bounds__(WIDE) find_factor(struct mt_adafactor a, struct mt_adafactor_space s)
{
    __shared__ float scratch[WARP];
    float rms = sqrtf(block_sum_of(s.u, s.pieces, scratch) / static_cast<float>(a.rows * a.cols)) / a.clip;
    if (threadIdx.x)
        return;
    s.scalar[2] = rms > 1.0f ? 1.0f / rms : 1.0f;
    if (!isfinite(rms))
        s.scalar[0] = 0.0f;
}

static __global__ void __launch_bounds__(THREADS) clip_elements(struct mt_adafactor a, const float *scalar)
{
    size_t i = static_cast<size_t>(blockIdx.x) * THREADS + threadIdx.x;
    if (i < a.rows * a.cols)
        a.g[i] = scalar[0] == 0.0f ? 0.0f : a.g[i] * scalar[2];
}

static cudaError_t make_sums(const struct mt_adafactor *a, const struct mt_adafactor_space *s, cudaStream_t stream)
{
    if (!a->col)
        return MT_LAUNCH(squares, grid_of(ceil_div(a->rows, THREADS)), THREADS, 0, stream, *a, s->row);
    dim3 columns(grid_of(ceil_div(a->cols, THREADS)).x, static_cast<unsigned>(s->chunks), 1);
    cudaError_t rc = MT_LAUNCH(row_means, grid_of(a->rows), THREADS, 0, stream, *a, s->row);
    return MT_LAUNCH_NEXT(rc, column_sums, columns, THREADS, 0, stream, *a, s->col, mt_adafactor_chunk(a->rows));
}

cudaError_t mt_cuda_adafactor(const struct mt_adafactor *a, cudaStream_t stream)
{
    const struct mt_adafactor_space s = mt_adafactor_space(a);
    cudaError_t rc = make_sums(a, &s, stream);
    if (rc == cudaSuccess)
        rc = MT_LAUNCH_OF(a->dtype, sum_weights, grid_of(s.pieces), THREADS, 0, stream, *a, s.w);
    rc = MT_LAUNCH_NEXT(rc, settle, 1, WIDE, 0, stream, *a, s);
    if (a->col)
        rc = MT_LAUNCH_NEXT(rc, settle_columns, grid_of(ceil_div(a->cols, THREADS)), THREADS, 0, stream, *a, s);
    rc = MT_LAUNCH_NEXT(rc, scale_elements, grid_of(s.pieces), THREADS, 0, stream, *a, s);
    rc = MT_LAUNCH_NEXT(rc, find_factor, 1, WIDE, 0, stream, *a, s);
    dim3 elements = grid_of(ceil_div(a->rows * a->cols, THREADS));
    return MT_LAUNCH_NEXT(rc, clip_elements, elements, THREADS, 0, stream, *a, s.scalar);
}
