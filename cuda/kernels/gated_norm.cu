/* SPDX-License-Identifier: Apache-2.0 */
/*
 * xhat = u rstd, t = w xhat. With the gate last u = x and y = t silu(z); with the gate first u = x silu(z) and y = t.
 * Backward, with dt = dy silu(z), or dy, and g = w dt: du = rstd (g - xhat mean(g xhat)), dw = sum over rows, and with
 * the gate last heads, of dt xhat; gate last: dx = du, dz = dy t silu'(z); first: dx = du silu(z), dz = du x silu'(z).
 * A warp has a head of a row; with the gate first, where a head may be as wide as the layer, a block. Backward: it
 * takes several, and keeps its sums of dw in the workspace, each lane its own columns; these are then folded (fold.cu).
 * Inputs are read twice, the second time from the cache.
 */
#include <type_traits>

#include "launch.cuh"
#include "reduce.cuh"
#include "scalar.cuh"
#include "workspace.h"

/* A block: threads of a head, and heads side by side. */
template <bool FIRST> static constexpr unsigned LANES = FIRST ? 256 : WARP;
template <bool FIRST> static constexpr unsigned HEADS = FIRST ? 1 : MT_CUDA_GATED_NORM_WARPS;

template <typename T> MT_DEVICE T *head_of(const struct mt_heads &h, size_t row, size_t head)
{
    return static_cast<T *>(h.p) + row * h.ld + head * h.stride;
}

/* Of the gate, which has the same elements in heads of its own width. */
template <typename T> MT_DEVICE T *gate_of(const struct mt_heads &z, size_t dim, size_t row, size_t head)
{
    return head_of<T>(z, row, head * dim / z.dim) + head * dim % z.dim;
}

/* silu(z) = z s. */
template <typename T, bool FIRST> MT_DEVICE float sigmoid_of(float z)
{
    return sigmoid<std::conditional_t<FIRST, float, T>>(z);
}

MT_DEVICE float rstd_of(const struct mt_gated_norm &a, float squares, float *scratch)
{
    return 1.0f / sqrtf(block_sum(squares, scratch) / static_cast<float>(a.x.dim) + a.eps);
}

template <typename T, bool FIRST>
static __global__ void __launch_bounds__(LANES<FIRST> *HEADS<FIRST>) normalise(struct mt_gated_norm a)
{
    __shared__ float scratch[WARP];
    size_t item = static_cast<size_t>(blockIdx.x) * HEADS<FIRST> + threadIdx.y;
    if (item >= a.n * a.x.n)
        return;
    size_t row = item / a.x.n, head = item % a.x.n, n = a.x.dim;
    const T *x = head_of<T>(a.x, row, head), *z = gate_of<T>(a.z, n, row, head);
    const T *w = static_cast<const T *>(a.w) + (FIRST ? head * n : 0);
    T *y = head_of<T>(a.y, row, head);
    auto gate = [&](size_t i) {
        float v = load(z + i);
        return v * sigmoid_of<T, FIRST>(v);
    };
    auto input = [&](size_t i) { return FIRST ? load(x + i) * gate(i) : load(x + i); };
    float squares = 0;
    MT_UNROLL(1)
    for (size_t i = threadIdx.x; i < n; i += LANES<FIRST>) {
        float u = input(i);
        squares = fmaf(u, u, squares);
    }
    float rstd = rstd_of(a, squares, scratch);
    MT_UNROLL(1)
    for (size_t i = threadIdx.x; i < n; i += LANES<FIRST>) {
        float t = load(w + i) * rounded<T>(input(i) * rstd);
        store(y + i, FIRST ? t : rounded<T>(t) * gate(i));
    }
}

/* dw: sums of heads before; NULL: not wanted. */
template <typename T, bool FIRST>
MT_DEVICE void head_backward(const struct mt_gated_norm_bwd &b, size_t row, size_t head, float *dw, float *scratch)
{
    const struct mt_gated_norm &a = b.fwd;
    size_t n = a.x.dim;
    const T *x = head_of<T>(a.x, row, head), *z = gate_of<T>(a.z, n, row, head), *dy = head_of<T>(b.dy, row, head);
    const T *w = static_cast<const T *>(a.w) + (FIRST ? head * n : 0);
    T *dx = head_of<T>(b.dx, row, head), *dz = gate_of<T>(b.dz, n, row, head);
    float squares = 0, along = 0;
    MT_UNROLL(1)
    for (size_t i = threadIdx.x; i < n; i += LANES<FIRST>) {
        float gate = load(z + i), silu = gate * sigmoid_of<T, FIRST>(gate), d = load(dy + i), v = load(x + i);
        float u = FIRST ? v * silu : v, dt = FIRST ? d : d * silu;
        squares = fmaf(u, u, squares);
        along = fmaf(dt * load(w + i), u, along);
    }
    float rstd = rstd_of(a, squares, scratch);
    float mean = block_sum(along, scratch + WARP) * rstd / static_cast<float>(n);
    MT_UNROLL(1)
    for (size_t i = threadIdx.x; i < n; i += LANES<FIRST>) {
        float gate = load(z + i), d = load(dy + i), v = load(x + i), weight = load(w + i);
        float s = sigmoid_of<T, FIRST>(gate), silu = gate * s, slope = s * (1.0f + gate * (1.0f - s));
        float u = FIRST ? v * silu : v, dt = FIRST ? d : d * silu, xhat = rounded<T>(u * rstd);
        float du = rstd * (dt * weight - u * rstd * mean);
        store(dx + i, FIRST ? du * silu : du);
        store(dz + i, (FIRST ? du * v : d * rounded<T>(weight * xhat)) * slope);
        if (dw)
            dw[i] += dt * xhat;
    }
    if (FIRST)
        __syncthreads(); /* scratch is used again */
}

template <typename T, bool FIRST>
static __global__ void __launch_bounds__(LANES<FIRST> *HEADS<FIRST>)
    normalise_backward(struct mt_gated_norm_bwd b, size_t rows)
{
    __shared__ float scratch[2 * WARP];
    const struct mt_gated_norm &a = b.fwd;
    size_t first = blockIdx.x * rows, end = first + rows < a.n ? first + rows : a.n;
    size_t sums = FIRST ? a.x.n * a.x.dim : a.x.dim; /* a thread has the same columns throughout */
    float *dw = static_cast<float *>(b.workspace) + (blockIdx.x * HEADS<FIRST> + threadIdx.y) * sums;
    if (!b.dw)
        dw = nullptr;
    MT_UNROLL(1)
    for (size_t head = 0; dw && head < sums; head += a.x.dim)
        for (size_t i = threadIdx.x; i < a.x.dim; i += LANES<FIRST>)
            dw[head + i] = 0.0f;
    MT_UNROLL(1)
    for (size_t item = first * a.x.n + threadIdx.y; item < end * a.x.n; item += HEADS<FIRST>) {
        size_t head = item % a.x.n;
        head_backward<T, FIRST>(b, item / a.x.n, head, dw && FIRST ? dw + head * a.x.dim : dw, scratch);
    }
}

cudaError_t mt_cuda_gated_norm(const struct mt_gated_norm *a, cudaStream_t stream)
{
    return for_flag(a->gate_first, [=](auto first) {
        constexpr bool FIRST = first.value;
        dim3 grid = grid_of(ceil_div(a->n * a->x.n, HEADS<FIRST>)), threads(LANES<FIRST>, HEADS<FIRST>);
        return for_dtype(a->dtype, [=](auto t) {
            return MT_LAUNCH((normalise<decltype(t), FIRST>), grid, threads, 0, stream, *a);
        });
    });
}

cudaError_t mt_cuda_gated_norm_bwd(const struct mt_gated_norm_bwd *b, cudaStream_t stream)
{
    size_t rows = mt_cuda_sum_rows(b->fwd.n), blocks = ceil_div(b->fwd.n, rows), n = mt_gated_norm_weights(&b->fwd);
    return for_flag(b->fwd.gate_first, [=](auto first) {
        constexpr bool FIRST = first.value;
        cudaError_t rc = for_dtype(b->fwd.dtype, [=](auto t) {
            dim3 threads(LANES<FIRST>, HEADS<FIRST>);
            return MT_LAUNCH((normalise_backward<decltype(t), FIRST>), grid_of(blocks), threads, 0, stream, *b, rows);
        });
        return mt_cuda_fold_after(rc, b->dw, b->workspace, blocks * HEADS<FIRST>, n, n, stream);
    });
}
