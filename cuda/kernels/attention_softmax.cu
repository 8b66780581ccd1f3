/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The steps between the matrix products of tiled attention (kernels.h). A block handles one row of one head.
 *   softmax      p = exp(s - max) / sum, lse = max + log(sum)
 *   softmax_bwd  p = exp(s - lse), ds = p (dp - rowsum(d_o o)); where a row has one key, that sum is p dp
 * With a cap, s is first replaced by cap tanh(s / cap), and ds multiplied by 1 - tanh(s / cap)^2.
 * Forward reads a score three times (twice from cache) and writes p: 4 + 4 bytes in f32, 4 + 2 in bf16.
 * Backward reads s and dp and writes p and ds: 8 + 8 or 8 + 4.
 */
#include "reduce.cuh"
#include "scalar.cuh"

static constexpr int COLUMNS = 4; /* columns of a thread at once: one 16-byte access of scores */

/* The block's row attends to columns [from, to) of the tile; from >= to: to none. */
struct row {
    size_t at, from, to, lse;
};

static __device__ __forceinline__ row row_of(const mt_cuda_scores &t)
{
    size_t i = blockIdx.x, head = blockIdx.y, q = t.q0 + i;
    size_t first = t.window && q + 1 > t.window ? q + 1 - t.window : 0, end = t.k0 + t.n_keys;
    row r;
    r.at = (head * t.rows + i) * t.ld;
    r.from = (first > t.k0 ? first : t.k0) - t.k0;
    r.to = q < t.k0 ? 0 : (q + 1 < end ? q + 1 : end) - t.k0;
    r.lse = head * t.lse_stride + i;
    return r;
}

/* The cap of scores; none of them pays for it. */
template <bool CAP> struct capped {
    float cap, inverse;
    __device__ __forceinline__ explicit capped(float cap) : cap(cap), inverse(CAP ? 1.0f / cap : 0.0f) {}
    __device__ __forceinline__ float operator()(float x) const { return CAP ? cap * tanhf(x * inverse) : x; }
    /* Of the cap at a score that it gave. */
    __device__ __forceinline__ float slope(float capped) const
    {
        float t = capped * inverse;
        return CAP ? 1.0f - t * t : 1.0f;
    }
};

/* f(x) for each column of this thread's vecs that the row attends to. A thread reads only vecs that it will write,
 * since p may be s. */
template <typename F> static __device__ __forceinline__ void for_seen(const float *s, const row &r, F f)
{
    size_t step = static_cast<size_t>(blockDim.x) * COLUMNS;
    for (size_t c = r.from / step * step + threadIdx.x * COLUMNS; c < r.to; c += step) {
        float x[COLUMNS];
        load_four(s + c, x);
        for (int k = 0; k < COLUMNS; k++)
            if (c + k >= r.from && c + k < r.to)
                f(x[k]);
    }
}

template <typename T, bool CAP>
static __global__ void __launch_bounds__(256) softmax_rows(mt_cuda_scores t)
{
    __shared__ float of_max[WARP], of_sum[WARP];
    row r = row_of(t);
    capped<CAP> cap(t.cap);
    const float *s = t.s + r.at;
    T *p = static_cast<T *>(t.p) + r.at;
    float max = -INFINITY, sum = 0;
    for_seen(s, r, [&](float x) { max = fmaxf(max, cap(x)); });
    max = block_max(max, -INFINITY, of_max);
    for_seen(s, r, [&](float x) { sum += exp_of(cap(x) - max); });
    sum = block_sum(sum, of_sum);
    float inverse = 1.0f / sum;
    for (size_t c = threadIdx.x * COLUMNS; c < t.n_keys;
         c += static_cast<size_t>(blockDim.x) * COLUMNS) {
        float x[COLUMNS];
        load_four(s + c, x);
        for (int k = 0; k < COLUMNS; k++)
            x[k] = c + k >= r.from && c + k < r.to ? exp_of(cap(x[k]) - max) * inverse : 0.0f;
        store_four(p + c, x);
    }
    if (threadIdx.x == 0)
        t.lse[r.lse] = max + logf(sum);
}

template <typename T> static __device__ float row_dot(const T *a, const T *b, size_t n)
{
    float sum = 0;
    for (size_t c = threadIdx.x; c < n; c += blockDim.x)
        sum += load(a + c) * load(b + c);
    return sum;
}

template <typename T, bool CAP>
static __global__ void __launch_bounds__(256) softmax_bwd_rows(mt_cuda_scores t)
{
    __shared__ float of_delta[WARP];
    row r = row_of(t);
    capped<CAP> cap(t.cap);
    float delta = row_dot(static_cast<const T *>(t.o.p) + blockIdx.x * t.o.ld + blockIdx.y * t.o.stride,
                          static_cast<const T *>(t.d_o.p) + blockIdx.x * t.d_o.ld + blockIdx.y * t.d_o.stride, t.o.dim);
    delta = block_sum(delta, of_delta);
    float lse = t.lse[r.lse];
    bool lone = t.window == 1 || t.q0 + blockIdx.x == 0;
    const float *s = t.s + r.at, *dp = t.dp + r.at;
    T *p = static_cast<T *>(t.p) + r.at, *ds = static_cast<T *>(t.ds) + r.at;
    for (size_t c = threadIdx.x * COLUMNS; c < t.n_keys;
         c += static_cast<size_t>(blockDim.x) * COLUMNS) {
        float x[COLUMNS], g[COLUMNS];
        load_four(s + c, x);
        load_four(dp + c, g);
        for (int k = 0; k < COLUMNS; k++) {
            bool seen = c + k >= r.from && c + k < r.to;
            float score = cap(x[k]);
            x[k] = seen ? exp_of(score - lse) : 0.0f;
            g[k] = seen ? x[k] * (g[k] - (lone ? x[k] * g[k] : delta)) : 0.0f;
            if (CAP)
                g[k] = seen ? g[k] * cap.slope(score) : 0.0f;
        }
        store_four(p + c, x);
        store_four(ds + c, g);
    }
}

/* A block handles a row of all heads. Bytes moved per element: 4 in, 4 or 2 out. */
template <typename T>
static __global__ void __launch_bounds__(256)
    store_heads(struct mt_heads dst, const float *__restrict__ src, size_t rows, struct mt_heads add, size_t past)
{
    size_t i = blockIdx.x;
    for (size_t c = threadIdx.x; c < dst.n * dst.dim; c += blockDim.x) {
        size_t head = c / dst.dim, at = c - head * dst.dim;
        float x = src[(head * rows + i) * dst.dim + at];
        if (add.p) {
            float *sum = static_cast<float *>(add.p) + i * add.ld + head * add.stride + at;
            x = *sum += x;
        }
        if (i >= past)
            store(static_cast<T *>(dst.p) + (i - past) * dst.ld + head * dst.stride + at, x);
    }
}

static dim3 grid_of_rows(const mt_cuda_scores *t)
{
    return dim3(static_cast<unsigned>(t->rows), static_cast<unsigned>(t->n_heads), 1);
}

cudaError_t mt_cuda_softmax(const mt_cuda_scores *t, cudaStream_t stream)
{
    unsigned threads = threads_for(ceil_div(t->n_keys, COLUMNS), 256);
    return for_flag(t->cap > 0, [=](auto cap) {
        return for_dtype(t->dtype, [=](auto x) {
            return MT_LAUNCH((softmax_rows<decltype(x), cap.value>), grid_of_rows(t), threads, 0, stream, *t);
        });
    });
}

cudaError_t mt_cuda_softmax_bwd(const mt_cuda_scores *t, cudaStream_t stream)
{
    unsigned threads = threads_for(ceil_div(t->n_keys, COLUMNS), 256);
    return for_flag(t->cap > 0, [=](auto cap) {
        return for_dtype(t->dtype, [=](auto x) {
            return MT_LAUNCH((softmax_bwd_rows<decltype(x), cap.value>), grid_of_rows(t), threads, 0, stream, *t);
        });
    });
}

cudaError_t mt_cuda_store_heads(const struct mt_heads *dst, enum mt_dtype dtype, const float *src, size_t rows,
                                const struct mt_heads *add, size_t past, cudaStream_t stream)
{
    unsigned threads = threads_for(dst->n * dst->dim, 256);
    return MT_LAUNCH_OF(dtype, store_heads, grid_of(rows), threads, 0, stream, *dst, src, rows, *add, past);
}
