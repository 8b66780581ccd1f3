/* SPDX-License-Identifier: Apache-2.0 */
/* y = x s, s = sigmoid(gate); dx = dy s, dgate = dy x s (1 - s). A thread has an element. */
#include "launch.cuh"
#include "scalar.cuh"

static constexpr unsigned THREADS = 256;

template <typename T> MT_DEVICE T *element_of(const struct mt_heads &h, size_t row, size_t column)
{
    return static_cast<T *>(h.p) + row * h.ld + column / h.dim * h.stride + column % h.dim;
}

template <typename T>
static __global__ void __launch_bounds__(THREADS) gate_heads(struct mt_head_gate a, unsigned columns)
{
    size_t at = static_cast<size_t>(blockIdx.x) * THREADS + threadIdx.x, row = at / columns, c = at % columns;
    if (row >= a.n)
        return;
    float x = load(element_of<T>(a.x, row, c));
    store(element_of<T>(a.y, row, c), x * sigmoid<T>(load(element_of<T>(a.gate, row, c))));
}

template <typename T>
static __global__ void __launch_bounds__(THREADS) gate_heads_backward(struct mt_head_gate_bwd b, unsigned columns)
{
    const struct mt_head_gate &a = b.fwd;
    size_t at = static_cast<size_t>(blockIdx.x) * THREADS + threadIdx.x, row = at / columns, c = at % columns;
    if (row >= a.n)
        return;
    float s = sigmoid<T>(load(element_of<T>(a.gate, row, c))), d = load(element_of<T>(b.dy, row, c)) * s;
    float x = load(element_of<T>(a.x, row, c));
    store(element_of<T>(b.dgate, row, c), d * x * (1.0f - s));
    store(element_of<T>(b.dx, row, c), d);
}

cudaError_t mt_cuda_head_gate(const struct mt_head_gate *a, cudaStream_t stream)
{
    unsigned columns = static_cast<unsigned>(a->x.n * a->x.dim);
    dim3 grid = grid_of(ceil_div(a->n * columns, THREADS));
    return MT_LAUNCH_OF(a->dtype, gate_heads, grid, THREADS, 0, stream, *a, columns);
}

cudaError_t mt_cuda_head_gate_bwd(const struct mt_head_gate_bwd *b, cudaStream_t stream)
{
    unsigned columns = static_cast<unsigned>(b->fwd.x.n * b->fwd.x.dim);
    dim3 grid = grid_of(ceil_div(b->fwd.n * columns, THREADS));
    return MT_LAUNCH_OF(b->fwd.dtype, gate_heads_backward, grid, THREADS, 0, stream, *b, columns);
}
