/* SPDX-License-Identifier: Apache-2.0 */
/*
 * out = act(x); dx = dout act'(x). A block takes one or more rows, or a part of one; a thread
 * vectors at a distance of the block's width. Bytes moved per element, of s bytes: forward 2 s,
 * backward 3 s, or 4 s if it also computes the output.
 */
#include "launch.cuh"
#include "scalar.cuh"

enum { UNROLL = 2 };

struct activated {
    float y, slope;
};

/* gelu is x s with s = (1 + tanh(z)) / 2 = 1 / (1 + e^-2z). */
template <typename T, int KIND> static __device__ __forceinline__ activated activated_of(float x)
{
    if constexpr (KIND == MT_ACTIVATE_RELU2) {
        float r = x < 0.0f ? 0.0f : x; /* a NaN stays one */
        return {r * r, 2.0f * r};
    } else {
        auto [s, rest] = logistic_of<T>(2.0f * 0.7978845608f * (x + 0.044715f * x * x * x));
        return {x * s, s + x * (2.0f * s * rest * 0.7978845608f *
                                (1.0f + 3.0f * 0.044715f * x * x))};
    }
}

template <typename T, int N, int KIND>
static __global__ void __launch_bounds__(256)
    activate_forward(struct mt_activate a, size_t vecs, unsigned columns)
{
    size_t row, at;
    row_of_tile(columns, UNROLL, &row, &at);
    if (row >= a.n)
        return;
    const T *__restrict__ x = static_cast<const T *>(a.x) + row * a.f;
    T *__restrict__ out = static_cast<T *>(a.out) + row * a.f;
    float v[UNROLL][N];
    MT_UNROLL(UNROLL)
    for (int u = 0; u < UNROLL; u++)
        if (at + u * blockDim.x < vecs)
            load_n<T, N>(x + (at + u * blockDim.x) * N, v[u]);
    MT_UNROLL(UNROLL)
    for (int u = 0; u < UNROLL; u++) {
        if (at + u * blockDim.x < vecs) {
            for (int k = 0; k < N; k++)
                v[u][k] = activated_of<T, KIND>(v[u][k]).y;
            store_n<T, N>(out + (at + u * blockDim.x) * N, v[u]);
        }
    }
}

/* A thread writes only where it has read: dx may be x, and out may be dout. */
template <typename T, int N, int KIND>
static __global__ void __launch_bounds__(256)
    activate_backward(struct mt_activate_bwd a, size_t vecs, unsigned columns)
{
    size_t row, at;
    row_of_tile(columns, 1, &row, &at);
    if (row >= a.n || at >= vecs)
        return;
    size_t i = row * a.f + at * N;
    float x[N], dy[N];
    load_n<T, N>(static_cast<const T *>(a.x) + i, x);
    load_n<T, N>(static_cast<const T *>(a.dout) + i, dy);
    for (int k = 0; k < N; k++) {
        activated v = activated_of<T, KIND>(x[k]);
        x[k] = dy[k] * v.slope;
        dy[k] = v.y;
    }
    store_n<T, N>(static_cast<T *>(a.dx) + i, x);
    if (a.out)
        store_n<T, N>(static_cast<T *>(a.out) + i, dy);
}

template <typename T, int N, int KIND>
static cudaError_t launch(const struct mt_activate *a, cudaStream_t stream)
{
    row_tiles t = tile_rows(a->n, a->f / N, UNROLL);
    return MT_LAUNCH((activate_forward<T, N, KIND>), grid_of(t.blocks), dim3(t.x, t.y), 0, stream,
                     *a, a->f / N, t.columns);
}

template <typename T, int N, int KIND>
static cudaError_t launch(const struct mt_activate_bwd *a, cudaStream_t stream)
{
    row_tiles t = tile_rows(a->n, a->f / N, 1);
    return MT_LAUNCH((activate_backward<T, N, KIND>), grid_of(t.blocks), dim3(t.x, t.y), 0, stream,
                     *a, a->f / N, t.columns);
}

template <typename T, int N, typename A>
static cudaError_t launch_kind(const A *a, cudaStream_t stream)
{
    return a->kind == MT_ACTIVATE_RELU2 ? launch<T, N, MT_ACTIVATE_RELU2>(a, stream)
                                        : launch<T, N, MT_ACTIVATE_GELU_TANH>(a, stream);
}

template <typename T, typename A> static cudaError_t run(const A *a, cudaStream_t stream)
{
    return a->f % VEC<T> == 0 ? launch_kind<T, VEC<T>>(a, stream) : launch_kind<T, 1>(a, stream);
}

cudaError_t mt_cuda_activate(const struct mt_activate *a, cudaStream_t stream)
{
    return a->dtype == MT_BF16 ? run<bf16>(a, stream) : run<float>(a, stream);
}

cudaError_t mt_cuda_activate_bwd(const struct mt_activate_bwd *a, cudaStream_t stream)
{
    return a->dtype == MT_BF16 ? run<bf16>(a, stream) : run<float>(a, stream);
}
