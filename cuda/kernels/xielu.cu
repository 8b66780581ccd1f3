/* SPDX-License-Identifier: Apache-2.0 */
/*
 * xIELU (Huang and Schlag 2024), and its gradient. A thread takes vectors at a distance of the block's width. Bytes moved
 * per element, of s bytes: forward 2 s, backward 3 s, or 4 s if it also computes the output. A block of backward has a
 * few rows and stores its two sums, for the gradients of the alphas, which are then folded (fold.cu).
 */
#include "workspace.h"
#include "launch.cuh"
#include "reduce.cuh"
#include "scalar.cuh"

static constexpr unsigned THREADS = 256;

struct curve {
    float p, n, beta, eps;
};

MT_DEVICE float softplus(float x)
{
    return x > 20.0f ? x : log1pf(expf(x));
}

template <typename T> MT_DEVICE curve curve_of(const void *shape)
{
    const T *s = static_cast<const T *>(shape);
    float beta = load(s + 2);
    return {softplus(load(s)), beta + softplus(load(s + 1)), beta, load(s + 3)};
}

template <typename T, int N>
static __global__ void __launch_bounds__(THREADS) xielu_forward(struct mt_xielu a, size_t vecs)
{
    size_t at = static_cast<size_t>(blockIdx.x) * THREADS + threadIdx.x;
    if (at >= vecs)
        return;
    curve c = curve_of<T>(a.shape);
    float x[N];
    load_n<T, N>(static_cast<const T *>(a.x) + at * N, x);
    for (int k = 0; k < N; k++) {
        float bent = expm1f(x[k] < c.eps ? x[k] : c.eps) - x[k];
        x[k] = (x[k] > 0.0f ? c.p * x[k] * x[k] : c.n * bent) + c.beta * x[k];
    }
    store_n<T, N>(static_cast<T *>(a.out) + at * N, x);
}

/* A thread writes only where it has read: dx may be x, and out may be dout. */
template <typename T, int N>
static __global__ void __launch_bounds__(THREADS) xielu_backward(struct mt_xielu_bwd a, size_t vecs, size_t per_block)
{
    __shared__ float scratch[2][WARP];
    size_t first = blockIdx.x * per_block, end = first + per_block < vecs ? first + per_block : vecs;
    curve c = curve_of<T>(a.shape);
    float of_p = 0, of_n = 0;
    for (size_t at = first + threadIdx.x; at < end; at += THREADS) {
        float x[N], dy[N];
        load_n<T, N>(static_cast<const T *>(a.x) + at * N, x);
        load_n<T, N>(static_cast<const T *>(a.dout) + at * N, dy);
        for (int k = 0; k < N; k++) {
            float v = x[k], d = dy[k], e = expm1f(v < c.eps ? v : c.eps);
            bool above = v > 0.0f;
            float slope = above ? 2.0f * c.p * v : c.n * ((v < c.eps ? e + 1.0f : 0.0f) - 1.0f);
            of_p += above ? d * v * v : 0.0f;
            of_n += above ? 0.0f : d * (e - v);
            dy[k] = (above ? c.p * v * v : c.n * (e - v)) + c.beta * v;
            x[k] = d * (slope + c.beta);
        }
        store_n<T, N>(static_cast<T *>(a.dx) + at * N, x);
        if (a.out)
            store_n<T, N>(static_cast<T *>(a.out) + at * N, dy);
    }
    if (!a.dshape)
        return;
    of_p = block_sum(of_p, scratch[0]);
    of_n = block_sum(of_n, scratch[1]);
    if (threadIdx.x == 0) {
        const T *s = static_cast<const T *>(a.shape);
        float *partial = static_cast<float *>(a.workspace) + 2 * static_cast<size_t>(blockIdx.x);
        partial[0] = of_p * sigmoid<float>(load(s)); /* the slope of softplus */
        partial[1] = of_n * sigmoid<float>(load(s + 1));
    }
}

cudaError_t mt_cuda_xielu(const struct mt_xielu *a, cudaStream_t stream)
{
    return for_vectors(a->dtype, a->f, [=](auto v) {
        using V = decltype(v);
        size_t vecs = a->n * a->f / V::n;
        return MT_LAUNCH((xielu_forward<typename V::type, V::n>), grid_of(ceil_div(vecs, THREADS)), THREADS, 0, stream,
                         *a, vecs);
    });
}

cudaError_t mt_cuda_xielu_bwd(const struct mt_xielu_bwd *a, cudaStream_t stream)
{
    size_t rows = mt_cuda_sum_rows(a->n), blocks = ceil_div(a->n, rows);
    cudaError_t rc = for_vectors(a->dtype, a->f, [=](auto v) {
        using V = decltype(v);
        return MT_LAUNCH((xielu_backward<typename V::type, V::n>), grid_of(blocks), THREADS, 0, stream, *a,
                         a->n * a->f / V::n, rows * a->f / V::n);
    });
    return mt_cuda_fold_after(rc, a->dshape, a->workspace, blocks, 2, 2, stream);
}
