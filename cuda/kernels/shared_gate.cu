/* SPDX-License-Identifier: Apache-2.0 */
/*
 * gate = sigmoid(<x, w>), act *= gate; backward with d = dgate gate (1 - gate): dx += d w, dw += sum over rows of d x.
 * Forward: a block handles a row. Backward: a block takes a few rows and stores a partial sum of dw; these are then
 * folded (fold.cu). Bytes moved with s bytes per element: forward s (c + 2 f) per row; backward c (s + 8) per row, and
 * 4 c per partial.
 */
#include "workspace.h"
#include "launch.cuh"
#include "reduce.cuh"
#include "scalar.cuh"

static constexpr unsigned THREADS = 256;

template <typename T, int N>
static __global__ void __launch_bounds__(THREADS) scale_by_gate(struct mt_shared_gate a)
{
    __shared__ float scratch[WARP];
    size_t row = blockIdx.x;
    const T *x = static_cast<const T *>(a.x) + row * a.c, *w = static_cast<const T *>(a.w);
    T *act = static_cast<T *>(a.act) + row * a.f;
    float dot = 0;
    MT_UNROLL(1)
    for (size_t i = threadIdx.x * static_cast<size_t>(N); i < a.c; i += THREADS * N) {
        float p[N], q[N];
        load_n<T, N>(x + i, p);
        load_n<T, N>(w + i, q);
        for (int k = 0; k < N; k++)
            dot = fmaf(p[k], q[k], dot);
    }
    float gate = sigmoid<float>(block_sum(dot, scratch));
    if (threadIdx.x == 0)
        a.gate[row] = gate;
    MT_UNROLL(1)
    for (size_t i = threadIdx.x * static_cast<size_t>(N); i < a.f; i += THREADS * N) {
        float p[N];
        load_n<T, N>(act + i, p);
        for (int k = 0; k < N; k++)
            p[k] *= gate;
        store_n<T, N>(act + i, p);
    }
}

template <typename T, int N>
static __global__ void __launch_bounds__(THREADS) gate_backward(struct mt_shared_gate_bwd a, size_t rows)
{
    size_t first = blockIdx.x * rows, end = first + rows < a.n ? first + rows : a.n;
    const T *x = static_cast<const T *>(a.x), *weights = static_cast<const T *>(a.w);
    for (size_t i = threadIdx.x * static_cast<size_t>(N); i < a.c; i += THREADS * N) {
        float w[N], dw[N] = {};
        load_n<T, N>(weights + i, w);
        MT_UNROLL(2)
        for (size_t row = first; row < end; row++) {
            float g = a.gate[row], d = a.dgate[row] * (g * (1.0f - g)), p[N], dx[N];
            load_n<T, N>(x + row * a.c + i, p);
            load_floats<N>(a.dx + row * a.c + i, dx);
            for (int k = 0; k < N; k++) {
                dx[k] += d * w[k];
                dw[k] = fmaf(d, p[k], dw[k]);
            }
            store_floats<N>(a.dx + row * a.c + i, dx);
        }
        if (a.dw)
            store_floats<N>(static_cast<float *>(a.workspace) + blockIdx.x * a.c + i, dw);
    }
}

cudaError_t mt_cuda_shared_gate(const struct mt_shared_gate *a, cudaStream_t stream)
{
    return for_vectors(a->dtype, a->c | a->f, [=](auto v) { /* vectors are powers of two */
        using V = decltype(v);
        return MT_LAUNCH((scale_by_gate<typename V::type, V::n>), grid_of(a->n), THREADS, 0, stream, *a);
    });
}

cudaError_t mt_cuda_shared_gate_bwd(const struct mt_shared_gate_bwd *a, cudaStream_t stream)
{
    size_t rows = mt_cuda_sum_rows(a->n), blocks = ceil_div(a->n, rows);
    cudaError_t rc = for_vectors(a->dtype, a->c, [=](auto v) {
        using V = decltype(v);
        return MT_LAUNCH((gate_backward<typename V::type, V::n>), grid_of(blocks), THREADS, 0, stream, *a, rows);
    });
    return mt_cuda_fold_after(rc, a->dw, a->workspace, blocks, a->c, a->c, stream);
}
