/* SPDX-License-Identifier: Apache-2.0 */
/*
 * y = t silu(z), t = w xhat, xhat = x rstd. Backward: dz = dy t silu'(z), and with dt = dy silu(z), g = w dt:
 * dx = rstd (g - xhat mean(g xhat)), dw = sum over rows and heads of dt xhat. A warp has a head of a row. Backward: a
 * warp takes several, and keeps its sums of dw in the workspace, each lane its own columns; these are then folded
 * (fold.cu). Inputs are read twice, the second time from the cache. With the gate first, where a head may be as wide
 * as the layer, it is a block instead of a warp: u = x silu(z) is normalised, dx = du silu(z), dz = du x silu'(z).
 */
#include "launch.cuh"
#include "reduce.cuh"
#include "scalar.cuh"
#include "workspace.h"

static constexpr unsigned THREADS = 32 * MT_CUDA_GATED_NORM_WARPS;

template <typename T> MT_DEVICE T *head_of(const struct mt_heads &h, size_t row, size_t head)
{
    return static_cast<T *>(h.p) + row * h.ld + head * h.stride;
}

/* Of the gate, which has the same elements in heads of its own width. */
template <typename T> MT_DEVICE T *gate_of(const struct mt_heads &z, size_t dim, size_t row, size_t head)
{
    return head_of<T>(z, row, head * dim / z.dim) + head * dim % z.dim;
}

template <typename T> MT_DEVICE float rstd_of(const struct mt_gated_norm &a, const T *x)
{
    float squares = 0;
    MT_UNROLL(1)
    for (size_t i = threadIdx.x % WARP; i < a.x.dim; i += WARP) {
        float v = load(x + i);
        squares = fmaf(v, v, squares);
    }
    return 1.0f / sqrtf(warp_sum(squares) / static_cast<float>(a.x.dim) + a.eps);
}

template <typename T> static __global__ void __launch_bounds__(THREADS) normalise(struct mt_gated_norm a)
{
    size_t item = static_cast<size_t>(blockIdx.x) * MT_CUDA_GATED_NORM_WARPS + threadIdx.x / WARP;
    if (item >= a.n * a.x.n)
        return;
    size_t row = item / a.x.n, head = item % a.x.n;
    const T *x = head_of<T>(a.x, row, head), *z = gate_of<T>(a.z, a.x.dim, row, head), *w = static_cast<const T *>(a.w);
    T *y = head_of<T>(a.y, row, head);
    float rstd = rstd_of(a, x);
    MT_UNROLL(1)
    for (size_t i = threadIdx.x % WARP; i < a.x.dim; i += WARP) {
        float t = rounded<T>(load(w + i) * rounded<T>(load(x + i) * rstd)), gate = load(z + i);
        store(y + i, t * (gate * sigmoid<T>(gate)));
    }
}

/* dw: the warp's sums, of heads before; NULL: not wanted. */
template <typename T>
MT_DEVICE void head_backward(const struct mt_gated_norm_bwd &b, size_t row, size_t head, float *dw)
{
    const struct mt_gated_norm &a = b.fwd;
    const T *x = head_of<T>(a.x, row, head), *z = gate_of<T>(a.z, a.x.dim, row, head), *w = static_cast<const T *>(a.w);
    const T *dy = head_of<T>(b.dy, row, head);
    T *dx = head_of<T>(b.dx, row, head), *dz = gate_of<T>(b.dz, a.x.dim, row, head);
    float rstd = rstd_of(a, x), dot = 0;
    MT_UNROLL(1)
    for (size_t i = threadIdx.x % WARP; i < a.x.dim; i += WARP) {
        float gate = load(z + i);
        dot = fmaf(load(dy + i) * (gate * sigmoid<T>(gate)) * load(w + i), load(x + i), dot);
    }
    float mean = warp_sum(dot) * rstd / static_cast<float>(a.x.dim);
    MT_UNROLL(1)
    for (size_t i = threadIdx.x % WARP; i < a.x.dim; i += WARP) {
        float gate = load(z + i), s = sigmoid<T>(gate), d = load(dy + i), weight = load(w + i), v = load(x + i) * rstd;
        float xhat = rounded<T>(v), dt = d * (gate * s);
        store(dz + i, d * rounded<T>(weight * xhat) * (s * (1.0f + gate * (1.0f - s))));
        store(dx + i, rstd * (weight * dt - v * mean));
        if (dw)
            dw[i] += dt * xhat;
    }
}

template <typename T>
static __global__ void __launch_bounds__(THREADS) normalise_backward(struct mt_gated_norm_bwd b, size_t rows)
{
    const struct mt_gated_norm &a = b.fwd;
    size_t warp = threadIdx.x / WARP, first = blockIdx.x * rows, end = first + rows < a.n ? first + rows : a.n;
    float *dw = static_cast<float *>(b.workspace) + (blockIdx.x * MT_CUDA_GATED_NORM_WARPS + warp) * a.x.dim;
    if (!b.dw)
        dw = nullptr;
    MT_UNROLL(1)
    for (size_t i = threadIdx.x % WARP; dw && i < a.x.dim; i += WARP)
        dw[i] = 0.0f;
    MT_UNROLL(1)
    for (size_t item = first * a.x.n + warp; item < end * a.x.n; item += MT_CUDA_GATED_NORM_WARPS)
        head_backward<T>(b, item / a.x.n, item % a.x.n, dw);
}

/* --- the gate first ---------------------------------------------------------------------------- */

static constexpr unsigned WIDE = 256;

MT_DEVICE float gated(float x, float z)
{
    return x * (z * sigmoid<float>(z));
}

template <typename T> static __global__ void __launch_bounds__(WIDE) normalise_gated(struct mt_gated_norm a)
{
    __shared__ float scratch[WARP];
    size_t row = blockIdx.x / a.x.n, head = blockIdx.x % a.x.n, n = a.x.dim;
    const T *x = head_of<T>(a.x, row, head), *z = gate_of<T>(a.z, n, row, head);
    const T *w = static_cast<const T *>(a.w) + head * n;
    T *y = head_of<T>(a.y, row, head);
    float squares = 0;
    MT_UNROLL(1)
    for (size_t i = threadIdx.x; i < n; i += WIDE) {
        float u = gated(load(x + i), load(z + i));
        squares = fmaf(u, u, squares);
    }
    float rstd = 1.0f / sqrtf(block_sum(squares, scratch) / static_cast<float>(n) + a.eps);
    MT_UNROLL(1)
    for (size_t i = threadIdx.x; i < n; i += WIDE)
        store(y + i, load(w + i) * rounded<T>(gated(load(x + i), load(z + i)) * rstd));
}

/* dw: of the head, of rows before; NULL: not wanted. */
template <typename T>
MT_DEVICE void gated_backward(const struct mt_gated_norm_bwd &b, size_t row, size_t head, float *dw, float *scratch)
{
    const struct mt_gated_norm &a = b.fwd;
    size_t n = a.x.dim;
    const T *x = head_of<T>(a.x, row, head), *z = gate_of<T>(a.z, n, row, head);
    const T *w = static_cast<const T *>(a.w) + head * n, *dy = head_of<T>(b.dy, row, head);
    T *dx = head_of<T>(b.dx, row, head), *dz = gate_of<T>(b.dz, n, row, head);
    float squares = 0, along = 0;
    MT_UNROLL(1)
    for (size_t i = threadIdx.x; i < n; i += WIDE) {
        float u = gated(load(x + i), load(z + i));
        squares = fmaf(u, u, squares);
        along = fmaf(load(dy + i) * load(w + i), u, along);
    }
    float rstd = 1.0f / sqrtf(block_sum(squares, scratch) / static_cast<float>(n) + a.eps);
    float mean = block_sum(along, scratch + WARP) * rstd / static_cast<float>(n);
    MT_UNROLL(1)
    for (size_t i = threadIdx.x; i < n; i += WIDE) {
        float v = load(x + i), gate = load(z + i), s = sigmoid<float>(gate), u = gated(v, gate), d = load(dy + i);
        float du = rstd * (d * load(w + i) - u * rstd * mean);
        store(dx + i, du * (gate * s));
        store(dz + i, du * v * (s * (1.0f + gate * (1.0f - s))));
        if (dw)
            dw[i] += d * rounded<T>(u * rstd);
    }
    __syncthreads(); /* scratch is used again */
}

template <typename T>
static __global__ void __launch_bounds__(WIDE) normalise_gated_backward(struct mt_gated_norm_bwd b, size_t rows)
{
    __shared__ float scratch[2 * WARP];
    const struct mt_gated_norm &a = b.fwd;
    size_t first = blockIdx.x * rows, end = first + rows < a.n ? first + rows : a.n, all = a.x.n * a.x.dim;
    float *dw = b.dw ? static_cast<float *>(b.workspace) + blockIdx.x * all : nullptr;
    MT_UNROLL(1)
    for (size_t head = 0; head < a.x.n; head++) {
        float *own = dw ? dw + head * a.x.dim : nullptr; /* a thread has the same columns throughout */
        MT_UNROLL(1)
        for (size_t i = threadIdx.x; own && i < a.x.dim; i += WIDE)
            own[i] = 0.0f;
        MT_UNROLL(1)
        for (size_t row = first; row < end; row++)
            gated_backward<T>(b, row, head, own, scratch);
    }
}

cudaError_t mt_cuda_gated_norm(const struct mt_gated_norm *a, cudaStream_t stream)
{
    if (a->gate_first)
        return MT_LAUNCH_OF(a->dtype, normalise_gated, grid_of(a->n * a->x.n), WIDE, 0, stream, *a);
    dim3 grid = grid_of(ceil_div(a->n * a->x.n, MT_CUDA_GATED_NORM_WARPS));
    return MT_LAUNCH_OF(a->dtype, normalise, grid, THREADS, 0, stream, *a);
}

cudaError_t mt_cuda_gated_norm_bwd(const struct mt_gated_norm_bwd *b, cudaStream_t stream)
{
    size_t rows = mt_cuda_sum_rows(b->fwd.n), blocks = ceil_div(b->fwd.n, rows), n = mt_gated_norm_weights(&b->fwd);
    dim3 grid = grid_of(blocks);
    if (b->fwd.gate_first) {
        cudaError_t rc = MT_LAUNCH_OF(b->fwd.dtype, normalise_gated_backward, grid, WIDE, 0, stream, *b, rows);
        return mt_cuda_fold_after(rc, b->dw, b->workspace, blocks, n, n, stream);
    }
    cudaError_t rc = MT_LAUNCH_OF(b->fwd.dtype, normalise_backward, grid, THREADS, 0, stream, *b, rows);
    return mt_cuda_fold_after(rc, b->dw, b->workspace, blocks * MT_CUDA_GATED_NORM_WARPS, n, n, stream);
}
