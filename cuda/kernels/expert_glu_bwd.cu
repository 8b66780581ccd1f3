/* SPDX-License-Identifier: Apache-2.0 */
/*
 * With w the row's weight: dg = w dout u act'(g), du = w dout act(g), out = w act(g) u, and dw = <act(g) u, dout>
 * (+ <down_bias, d_o>). A block handles a row, each thread vectors of it that are a block's width apart; dw is summed
 * over its threads. Bytes moved per element of out, of s bytes: 6 s, or 4 s without a gate, and the row of d_o.
 */
#include "glu.cuh"
#include "launch.cuh"
#include "reduce.cuh"
#include "scalar.cuh"

static constexpr unsigned MAX_THREADS = 256;

/* This thread's part of <down_bias, d_o>. */
template <typename T> MT_DEVICE float bias_part(const struct mt_expert_glu_bwd &a, size_t row)
{
    const T *b = static_cast<const T *>(a.down_bias), *d = static_cast<const T *>(a.d_o) + row * a.c;
    float sum = 0;
    for (size_t i = threadIdx.x; i < a.c; i += blockDim.x)
        sum = fmaf(load(b + i), load(d + i), sum);
    return sum;
}

/* A thread writes only where it has read: dgate_up may be gate_up, and out may be dout. */
template <typename T, int N, int KIND>
static __global__ void __launch_bounds__(MAX_THREADS) expert_glu_backward(struct mt_expert_glu_bwd a, size_t vecs)
{
    __shared__ float scratch[WARP];
    constexpr bool GATED = KIND != MT_GLU_RELU2;
    constexpr size_t INPUTS = GATED ? 2 : 1;
    size_t row = blockIdx.x;
    bool routed = row < a.n;
    size_t entry = routed && a.list ? static_cast<size_t>(a.list[row]) : row;
    float w = routed ? a.weights[entry] : 0.0f, sum = 0;
    const T *gate_up = static_cast<const T *>(a.gate_up) + row * INPUTS * a.f;
    const T *dout = static_cast<const T *>(a.dout) + row * a.f;
    T *dgate_up = static_cast<T *>(a.dgate_up) + row * INPUTS * a.f, *out = static_cast<T *>(a.out) + row * a.f;
    for (size_t i = threadIdx.x; i < vecs; i += blockDim.x) {
        float g[N] = {}, up[N] = {}, dy[N] = {};
        if (routed) {
            load_n<T, N>(gate_up + i * N, g);
            if constexpr (GATED)
                load_n<T, N>(gate_up + i * N + a.f, up);
            load_n<T, N>(dout + i * N, dy);
            for (int k = 0; k < N; k++) {
                glu_terms t = glu_terms_of<T, KIND>({a.alpha, a.limit}, g[k], up[k]);
                float weighted = w * dy[k], y = t.act * t.up;
                sum = fmaf(dy[k], y, sum);
                g[k] = weighted * t.up * t.slope;
                up[k] = weighted * t.du;
                dy[k] = w * y;
            }
        }
        store_n<T, N>(dgate_up + i * N, g);
        if constexpr (GATED)
            store_n<T, N>(dgate_up + i * N + a.f, up);
        store_n<T, N>(out + i * N, dy);
    }
    if (!routed)
        return;
    if (a.down_bias)
        sum += bias_part<T>(a, row);
    sum = block_sum(sum, scratch);
    if (threadIdx.x == 0)
        a.dweights[entry] = sum;
}

template <int KIND> static cudaError_t run(const struct mt_expert_glu_bwd *a, cudaStream_t stream)
{
    return for_vectors(a->dtype, a->f, [=](auto v) {
        using V = decltype(v);
        size_t vecs = a->f / V::n;
        return MT_LAUNCH((expert_glu_backward<typename V::type, V::n, KIND>), grid_of(a->n_padded),
                         threads_for(vecs, MAX_THREADS), 0, stream, *a, vecs);
    });
}

cudaError_t mt_cuda_expert_glu_bwd(const struct mt_expert_glu_bwd *a, cudaStream_t stream)
{
    if (a->kind == MT_GLU_CLAMPED)
        return run<MT_GLU_CLAMPED>(a, stream);
    if (a->kind == MT_GLU_RELU2)
        return run<MT_GLU_RELU2>(a, stream);
    return a->kind == MT_GLU_SILU ? run<MT_GLU_SILU>(a, stream) : run<MT_GLU_GELU_TANH>(a, stream);
}
