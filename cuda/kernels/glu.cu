/* SPDX-License-Identifier: Apache-2.0 */
/*
 * out = act(g) u; dg = dout u act'(g), du = dout act(g) (glu.cuh). A block takes one or more rows, or a part of one; a
 * thread one vector of the gate and its partner of the up half. Bytes moved per element of the output, of s bytes:
 * forward 3 s, backward 5 s, or 6 s if it also computes the output.
 */
#include "glu.cuh"
#include "launch.cuh"
#include "scalar.cuh"

enum { UNROLL = 2 };

template <typename T, int N, int KIND>
static __global__ void __launch_bounds__(256) glu_forward(struct mt_glu a, size_t vecs, unsigned columns)
{
    size_t row, at;
    row_of_tile(columns, UNROLL, &row, &at);
    if (row >= a.n)
        return;
    const T *__restrict__ gates = static_cast<const T *>(a.gate_up) + row * 2 * a.f;
    const T *__restrict__ ups = gates + a.f;
    T *__restrict__ out = static_cast<T *>(a.out) + row * a.f;
    float g[UNROLL][N], up[UNROLL][N];
    MT_UNROLL(UNROLL)
    for (int u = 0; u < UNROLL; u++) {
        size_t i = at + u * blockDim.x;
        if (i < vecs) {
            load_n<T, N>(gates + i * N, g[u]);
            load_n<T, N>(ups + i * N, up[u]);
        }
    }
    MT_UNROLL(UNROLL)
    for (int u = 0; u < UNROLL; u++) {
        size_t i = at + u * blockDim.x;
        if (i < vecs) {
            for (int k = 0; k < N; k++) {
                glu_terms t = glu_terms_of<T, KIND>({a.alpha, a.limit}, g[u][k], up[u][k]);
                g[u][k] = t.act * t.up;
            }
            store_n<T, N>(out + i * N, g[u]);
        }
    }
}

/* A thread writes only where it has read: dgate_up may be gate_up, and out may be dout. */
template <typename T, int N, int KIND>
static __global__ void __launch_bounds__(256)
    glu_backward(struct mt_glu_bwd a, size_t vecs, unsigned columns)
{
    size_t row, at;
    row_of_tile(columns, 1, &row, &at);
    if (row >= a.n || at >= vecs)
        return;
    size_t i = row * 2 * a.f + at * N;
    float g[N], up[N], dy[N];
    load_n<T, N>(static_cast<const T *>(a.gate_up) + i, g);
    load_n<T, N>(static_cast<const T *>(a.gate_up) + i + a.f, up);
    load_n<T, N>(static_cast<const T *>(a.dout) + row * a.f + at * N, dy);
    for (int k = 0; k < N; k++) {
        glu_terms t = glu_terms_of<T, KIND>({a.alpha, a.limit}, g[k], up[k]);
        g[k] = dy[k] * t.up * t.slope;
        up[k] = dy[k] * t.du;
        dy[k] = t.act * t.up;
    }
    store_n<T, N>(static_cast<T *>(a.dgate_up) + i, g);
    store_n<T, N>(static_cast<T *>(a.dgate_up) + i + a.f, up);
    if (a.out)
        store_n<T, N>(static_cast<T *>(a.out) + row * a.f + at * N, dy);
}

template <typename T, int N, int KIND>
static cudaError_t run_forward(const struct mt_glu *a, cudaStream_t stream)
{
    row_tiles t = tile_rows(a->n, a->f / N, UNROLL);
    return MT_LAUNCH((glu_forward<T, N, KIND>), grid_of(t.blocks), dim3(t.x, t.y), 0, stream, *a, a->f / N,
                     t.columns);
}

template <typename T, int N, int KIND>
static cudaError_t run_backward(const struct mt_glu_bwd *a, cudaStream_t stream)
{
    row_tiles t = tile_rows(a->n, a->f / N, 1);
    return MT_LAUNCH((glu_backward<T, N, KIND>), grid_of(t.blocks), dim3(t.x, t.y), 0, stream, *a, a->f / N,
                     t.columns);
}

template <typename T, int N> static cudaError_t forward_kind(const struct mt_glu *a, cudaStream_t stream)
{
    if (a->kind == MT_GLU_CLAMPED)
        return run_forward<T, N, MT_GLU_CLAMPED>(a, stream);
    return a->kind == MT_GLU_SILU ? run_forward<T, N, MT_GLU_SILU>(a, stream)
                                  : run_forward<T, N, MT_GLU_GELU_TANH>(a, stream);
}

template <typename T, int N>
static cudaError_t backward_kind(const struct mt_glu_bwd *a, cudaStream_t stream)
{
    if (a->kind == MT_GLU_CLAMPED)
        return run_backward<T, N, MT_GLU_CLAMPED>(a, stream);
    return a->kind == MT_GLU_SILU ? run_backward<T, N, MT_GLU_SILU>(a, stream)
                                  : run_backward<T, N, MT_GLU_GELU_TANH>(a, stream);
}

cudaError_t mt_cuda_glu(const struct mt_glu *a, cudaStream_t stream)
{
    if (a->dtype == MT_BF16)
        return a->f % VEC<bf16> == 0 ? forward_kind<bf16, VEC<bf16>>(a, stream)
                                      : forward_kind<bf16, 1>(a, stream);
    return a->f % VEC<float> == 0 ? forward_kind<float, VEC<float>>(a, stream)
                                   : forward_kind<float, 1>(a, stream);
}

cudaError_t mt_cuda_glu_bwd(const struct mt_glu_bwd *a, cudaStream_t stream)
{
    if (a->dtype == MT_BF16)
        return a->f % VEC<bf16> == 0 ? backward_kind<bf16, VEC<bf16>>(a, stream)
                                      : backward_kind<bf16, 1>(a, stream);
    return a->f % VEC<float> == 0 ? backward_kind<float, VEC<float>>(a, stream)
                                   : backward_kind<float, 1>(a, stream);
}
