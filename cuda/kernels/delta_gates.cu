/* SPDX-License-Identifier: Apache-2.0 */
/*
 * beta = sigmoid(b), g = -exp(a_log) softplus(a + dt_bias); plain ones as in src/device/cpu/delta_gates.c. Backward:
 * db = dbeta beta (1 - beta), da = -exp(a_log) dg sigmoid(a + dt_bias), which ddt_bias sums, and da_log = sum of dg g.
 * Forward: a thread has a row's head. Backward: a thread goes down a head of a block of rows; the sums are then folded
 * (fold.cu).
 */
#include "launch.cuh"
#include "reduce.cuh"
#include "scalar.cuh"
#include "workspace.h"

static constexpr unsigned THREADS = 64;

template <typename T> MT_DEVICE T *head_of(const struct mt_heads &h, size_t row, size_t head)
{
    return static_cast<T *>(h.p) + row * h.ld + head / h.dim * h.stride + head % h.dim;
}

/* Above 20 it is x, as in torch. */
MT_DEVICE float softplus(float x)
{
    return x > 20.0f ? x : log1pf(exp_of(x));
}

/* What a head has once: the speed of its decay, and the bias. */
struct decay_of_head {
    float speed, bias;
};

template <typename T> MT_DEVICE decay_of_head gate_of(const struct mt_delta_gates &a, size_t head)
{
    return {-exp_of(load(static_cast<const T *>(a.a_log) + head)), load(static_cast<const T *>(a.dt_bias) + head)};
}

/* The step of a plain rule; a NaN stays. */
MT_DEVICE float limited(const struct mt_delta_gates &a, float step)
{
    return step < a.least ? a.least : step > a.most ? a.most : step;
}

template <typename T> static __global__ void __launch_bounds__(THREADS) gates_forward(struct mt_delta_gates a)
{
    size_t heads = a.a.n * a.a.dim, at = static_cast<size_t>(blockIdx.x) * THREADS + threadIdx.x;
    if (at >= a.n * heads)
        return;
    size_t row = at / heads, head = at % heads;
    decay_of_head gate = gate_of<T>(a, head);
    float step = softplus(load(head_of<T>(a.a, row, head)) + gate.bias);
    if (a.plain) {
        step = limited(a, step);
        a.beta[at] = step;
    } else {
        a.beta[at] = rounded<T>(sigmoid<float>(load(head_of<T>(a.b, row, head))));
    }
    a.g[at] = gate.speed * step;
}

template <typename T>
static __global__ void __launch_bounds__(THREADS)
    gates_backward(struct mt_delta_gates_bwd b, size_t rows, unsigned tiles)
{
    const struct mt_delta_gates &a = b.fwd;
    size_t heads = a.a.n * a.a.dim, head = blockIdx.x % tiles * THREADS + threadIdx.x, block = blockIdx.x / tiles;
    size_t first = block * rows, end = first + rows < a.n ? first + rows : a.n;
    if (head >= heads)
        return;
    decay_of_head gate = gate_of<T>(a, head);
    float of_log = 0, of_bias = 0, of_skip = 0;
    MT_UNROLL(1)
    for (size_t row = first; row < end; row++) {
        size_t at = row * heads + head;
        float x = load(head_of<T>(a.a, row, head)) + gate.bias, dg = b.dg[at], step = softplus(x);
        float da = gate.speed * dg * sigmoid<float>(x);
        if (a.plain) {
            bool cut = step < a.least || step > a.most;
            da = cut ? 0.0f : (b.dbeta[at] + gate.speed * dg) * sigmoid<float>(x);
            step = limited(a, step);
        } else {
            float beta = rounded<T>(sigmoid<float>(load(head_of<T>(a.b, row, head))));
            store(head_of<T>(b.db, row, head), b.dbeta[at] * beta * (1.0f - beta));
        }
        store(head_of<T>(b.da, row, head), da);
        of_bias += da;
        of_log += dg * gate.speed * step;
        of_skip += b.dskip ? b.dskip[at] : 0.0f;
    }
    float *partial = static_cast<float *>(b.workspace) + block * 3 * heads + head;
    partial[0] = of_log;
    partial[heads] = of_bias;
    partial[2 * heads] = of_skip;
}

cudaError_t mt_cuda_delta_gates(const struct mt_delta_gates *a, cudaStream_t stream)
{
    dim3 grid = grid_of(ceil_div(a->n * a->a.n * a->a.dim, THREADS));
    return MT_LAUNCH_OF(a->dtype, gates_forward, grid, THREADS, 0, stream, *a);
}

cudaError_t mt_cuda_delta_gates_bwd(const struct mt_delta_gates_bwd *b, cudaStream_t stream)
{
    size_t heads = b->fwd.a.n * b->fwd.a.dim, rows = mt_cuda_more_sum_rows(b->fwd.n);
    size_t blocks = ceil_div(b->fwd.n, rows);
    unsigned tiles = static_cast<unsigned>(ceil_div(heads, THREADS));
    const float *partials = static_cast<const float *>(b->workspace);
    cudaError_t rc = MT_LAUNCH_OF(b->fwd.dtype, gates_backward, grid_of(blocks * tiles), THREADS, 0, stream, *b, rows,
                                  tiles);
    rc = mt_cuda_fold_after(rc, b->da_log, partials, blocks, 3 * heads, heads, stream);
    rc = mt_cuda_fold_after(rc, b->ddt_bias, partials + heads, blocks, 3 * heads, heads, stream);
    return mt_cuda_fold_after(rc, b->dd, partials + 2 * heads, blocks, 3 * heads, heads, stream);
}
