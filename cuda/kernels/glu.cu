/* SPDX-License-Identifier: Apache-2.0 */
/*
 * out = act(g) u; dg = dout u act'(g), du = dout act(g) (glu.cuh); without a gate u is 1. A block takes one or more
 * rows, or a part of one; a thread one vector of the gate and its partner of the up half. Bytes moved per element of
 * the output, of s bytes: forward 3 s, backward 5 s, or 6 s if it also computes the output; without a gate one s less
 * forward, two backward.
 */
#include "glu.cuh"
#include "launch.cuh"
#include "scalar.cuh"

enum { UNROLL = 2 };

template <typename T, int N, int KIND, bool GATED>
static __global__ void __launch_bounds__(256) glu_forward(struct mt_glu a, size_t vecs, unsigned columns)
{
    size_t row, at;
    row_of_tile(columns, UNROLL, &row, &at);
    if (row >= a.n)
        return;
    const T *__restrict__ gates = static_cast<const T *>(a.gate_up) + row * (GATED ? 2 : 1) * a.f;
    const T *__restrict__ ups = gates + a.f;
    T *__restrict__ out = static_cast<T *>(a.out) + row * a.f;
    float g[UNROLL][N], up[UNROLL][N];
    each_vector<UNROLL>(at, vecs, [&](int u, size_t i) {
        load_n<T, N>(gates + i * N, g[u]);
        if constexpr (GATED)
            load_n<T, N>(ups + i * N, up[u]);
    });
    each_vector<UNROLL>(at, vecs, [&](int u, size_t i) {
        for (int k = 0; k < N; k++) {
            glu_terms t = glu_terms_of<T, KIND>({a.alpha, a.limit}, g[u][k], GATED ? up[u][k] : 1.0f);
            g[u][k] = t.act * t.up;
        }
        store_n<T, N>(out + i * N, g[u]);
    });
}

/* A thread writes only where it has read: dgate_up may be gate_up, and out may be dout. */
template <typename T, int N, int KIND, bool GATED>
static __global__ void __launch_bounds__(256) glu_backward(struct mt_glu_bwd a, size_t vecs, unsigned columns)
{
    size_t row, at;
    row_of_tile(columns, 1, &row, &at);
    if (row >= a.n || at >= vecs)
        return;
    size_t i = row * (GATED ? 2 : 1) * a.f + at * N;
    float g[N], up[N], dy[N];
    load_n<T, N>(static_cast<const T *>(a.gate_up) + i, g);
    if constexpr (GATED)
        load_n<T, N>(static_cast<const T *>(a.gate_up) + i + a.f, up);
    load_n<T, N>(static_cast<const T *>(a.dout) + row * a.f + at * N, dy);
    for (int k = 0; k < N; k++) {
        glu_terms t = glu_terms_of<T, KIND>({a.alpha, a.limit}, g[k], GATED ? up[k] : 1.0f);
        g[k] = dy[k] * t.up * t.slope;
        up[k] = dy[k] * t.du;
        dy[k] = t.act * t.up;
    }
    store_n<T, N>(static_cast<T *>(a.dgate_up) + i, g);
    if constexpr (GATED)
        store_n<T, N>(static_cast<T *>(a.dgate_up) + i + a.f, up);
    if (a.out)
        store_n<T, N>(static_cast<T *>(a.out) + row * a.f + at * N, dy);
}

template <int KIND, bool GATED> static cudaError_t forward(const struct mt_glu *a, cudaStream_t stream)
{
    return for_vectors(a->dtype, a->f, [=](auto v) {
        using V = decltype(v);
        row_tiles t = tile_rows(a->n, a->f / V::n, UNROLL);
        return MT_LAUNCH((glu_forward<typename V::type, V::n, KIND, GATED>), grid_of(t.blocks), dim3(t.x, t.y), 0,
                         stream, *a, a->f / V::n, t.columns);
    });
}

template <int KIND, bool GATED> static cudaError_t backward(const struct mt_glu_bwd *a, cudaStream_t stream)
{
    return for_vectors(a->dtype, a->f, [=](auto v) {
        using V = decltype(v);
        row_tiles t = tile_rows(a->n, a->f / V::n, 1);
        return MT_LAUNCH((glu_backward<typename V::type, V::n, KIND, GATED>), grid_of(t.blocks), dim3(t.x, t.y), 0,
                         stream, *a, a->f / V::n, t.columns);
    });
}

cudaError_t mt_cuda_glu(const struct mt_glu *a, cudaStream_t stream)
{
    if (a->kind == MT_GLU_CLAMPED)
        return forward<MT_GLU_CLAMPED, true>(a, stream);
    return a->kind == MT_GLU_SILU ? forward<MT_GLU_SILU, true>(a, stream) : forward<MT_GLU_GELU_TANH, true>(a, stream);
}

cudaError_t mt_cuda_glu_bwd(const struct mt_glu_bwd *a, cudaStream_t stream)
{
    if (a->kind == MT_GLU_CLAMPED)
        return backward<MT_GLU_CLAMPED, true>(a, stream);
    return a->kind == MT_GLU_SILU ? backward<MT_GLU_SILU, true>(a, stream)
                                  : backward<MT_GLU_GELU_TANH, true>(a, stream);
}

cudaError_t mt_cuda_activate(const struct mt_activate *a, cudaStream_t stream)
{
    const struct mt_glu of = {a->n, a->f, a->dtype, MT_GLU_RELU2, a->x, a->out, 0, 0};
    return a->kind == MT_ACTIVATE_RELU2 ? forward<MT_GLU_RELU2, false>(&of, stream)
                                        : forward<MT_GLU_GELU_TANH, false>(&of, stream);
}

cudaError_t mt_cuda_activate_bwd(const struct mt_activate_bwd *a, cudaStream_t stream)
{
    const struct mt_glu_bwd of = {a->n, a->f, a->dtype, MT_GLU_RELU2, a->x, a->dout, a->dx, a->out, 0, 0};
    return a->kind == MT_ACTIVATE_RELU2 ? backward<MT_GLU_RELU2, false>(&of, stream)
                                        : backward<MT_GLU_GELU_TANH, false>(&of, stream);
}
