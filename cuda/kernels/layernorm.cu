/* SPDX-License-Identifier: Apache-2.0 */
/*
 * y = xhat w + b, xhat = (x - mean) rstd (Ba, Kiros and Hinton 2016). Backward, with g = dy w:
 *
 *   dx = rstd (g - mean(g) - xhat mean(g xhat)),   dw = sum over rows of dy xhat,   db = sum over rows of dy
 *
 * Forward: a block (or, for short rows, a warp) holds a row in registers between its sums and its output. Bytes moved
 * per element of s bytes: 2 s. Backward: a block takes a few rows one after the other and holds w and its parts of dw
 * and db in registers; the parts, a row [dw | db] of each block, are then folded (fold.cu). Bytes: 3 s, with dres 4 s,
 * and 16 per partial. The mean is computed from the row in registers. Rows that do not divide into vectors, or are too
 * long for the registers (backward above 12,288 elements in bf16 and 6,144 in f32, forward above 32,768 and 16,384),
 * are read again for each sum, element by element.
 */
#include "workspace.h"
#include "launch.cuh"
#include "norm.cuh"
#include "reduce.cuh"
#include "scalar.cuh"

/* --- forward ---------------------------------------------------------------------------------- */

template <typename T, int V> MT_DEVICE float sum_of(const uint4 (&x)[V])
{
    float sum = 0;
    MT_UNROLL(V)
    for (int v = 0; v < V; v++) {
        float p[VEC<T>];
        vec_floats<T>(x[v], p);
        for (int k = 0; k < VEC<T>; k++)
            sum += p[k];
    }
    return sum;
}

/* Of the distances from the mean, within the row alone. */
template <typename T, int V> MT_DEVICE float square_sum(const uint4 (&x)[V], float mean, unsigned vecs)
{
    float sum = 0;
    MT_UNROLL(V)
    for (int v = 0; v < V; v++) {
        float p[VEC<T>];
        vec_floats<T>(x[v], p);
        if (v * blockDim.x + threadIdx.x < vecs)
            for (int k = 0; k < VEC<T>; k++)
                sum = fmaf(p[k] - mean, p[k] - mean, sum);
    }
    return sum;
}

/* A block has several rows only if a row is one warp: then there is no barrier, and warps may return early. */
template <typename T, int V>
static __global__ void __launch_bounds__(1024) layernorm_forward(struct mt_layernorm a, unsigned vecs)
{
    constexpr int N = VEC<T>;
    __shared__ float scratch[2][WARP];
    size_t row = static_cast<size_t>(blockIdx.x) * blockDim.y + threadIdx.y;
    if (row >= a.n)
        return;
    uint4 x[V];
    load_row<T, V>(static_cast<const T *>(a.x) + row * a.c, vecs, x);
    float mean = block_sum(sum_of<T, V>(x), scratch[0]) / static_cast<float>(a.c), rstd;
    if (a.use_rstd) {
        rstd = a.rstd[row];
    } else {
        rstd = rstd_of(block_sum(square_sum<T, V>(x, mean, vecs), scratch[1]), a.c, a.eps);
        if (threadIdx.x == 0)
            a.rstd[row] = rstd;
    }
    const T *w = static_cast<const T *>(a.w);
    T *y = static_cast<T *>(a.y) + row * a.c;
    float plus = a.plus_one ? 1.0f : 0.0f;
    MT_UNROLL(V)
    for (int v = 0; v < V; v++) {
        unsigned i = v * blockDim.x + threadIdx.x;
        if (i < vecs) {
            float p[N], q[N], b[N] = {};
            vec_floats<T>(x[v], p);
            vec_floats<T>(load16(w + i * N), q);
            if (a.biased)
                vec_floats<T>(load16(w + a.c + i * N), b);
            for (int k = 0; k < N; k++)
                p[k] = fmaf((p[k] - mean) * rstd, q[k] + plus, b[k]);
            store16(y + i * N, vec_of<T>(p));
        }
    }
}

/* Sums over a row that is read from memory; every thread gets them. */
template <typename T> MT_DEVICE float mean_any(const T *x, size_t c, float *scratch)
{
    float sum = 0;
    for (size_t i = threadIdx.x; i < c; i += blockDim.x)
        sum += load(x + i);
    return block_sum(sum, scratch) / static_cast<float>(c);
}

/* For any length. */
template <typename T>
static __global__ void __launch_bounds__(256) layernorm_forward_any(struct mt_layernorm a)
{
    __shared__ float scratch[2][WARP];
    const T *x = static_cast<const T *>(a.x) + blockIdx.x * a.c, *w = static_cast<const T *>(a.w);
    T *y = static_cast<T *>(a.y) + blockIdx.x * a.c;
    float mean = mean_any(x, a.c, scratch[0]), plus = a.plus_one ? 1.0f : 0.0f, squares = 0, rstd;
    if (a.use_rstd) {
        rstd = a.rstd[blockIdx.x];
    } else {
        for (size_t i = threadIdx.x; i < a.c; i += blockDim.x)
            squares = fmaf(load(x + i) - mean, load(x + i) - mean, squares);
        rstd = rstd_of(block_sum(squares, scratch[1]), a.c, a.eps);
        if (threadIdx.x == 0)
            a.rstd[blockIdx.x] = rstd;
    }
    for (size_t i = threadIdx.x; i < a.c; i += blockDim.x)
        store(y + i, fmaf((load(x + i) - mean) * rstd, load(w + i) + plus, a.biased ? load(w + a.c + i) : 0.0f));
}

template <typename T, int V>
static cudaError_t launch_forward(const struct mt_layernorm *a, cudaStream_t stream)
{
    size_t vecs = a->c / VEC<T>;
    unsigned x = threads_for(ceil_div(vecs, V), 1024), y = x == WARP ? 4 : 1;
    return MT_LAUNCH((layernorm_forward<T, V>), grid_of(ceil_div(a->n, y)), dim3(x, y), 0, stream, *a,
                     static_cast<unsigned>(vecs));
}

template <typename T> static cudaError_t run_forward(const struct mt_layernorm *a, cudaStream_t stream)
{
    size_t vecs = a->c / VEC<T>;
    if (a->c % VEC<T> || vecs > 4 * 1024)
        return MT_LAUNCH(layernorm_forward_any<T>, grid_of(a->n), 256, 0, stream, *a);
    return vecs <= 2 * 512 ? launch_forward<T, 2>(a, stream) : launch_forward<T, 4>(a, stream);
}

cudaError_t mt_cuda_layernorm(const struct mt_layernorm *a, cudaStream_t stream)
{
    return a->dtype == MT_BF16 ? run_forward<bf16>(a, stream) : run_forward<float>(a, stream);
}

/* --- backward --------------------------------------------------------------------------------- */

/* Of wide rows the registers do not hold w and dres: they are loaded where they are used. */
template <int V> static constexpr bool WIDE = V > 2;

template <typename T, int V> MT_DEVICE uint4 vector_of(const uint4 (&held)[V], const T *row, int v, unsigned vecs)
{
    unsigned i = v * blockDim.x + threadIdx.x;
    if (WIDE<V>)
        return row && i < vecs ? load16(row + i * VEC<T>) : make_uint4(0, 0, 0, 0);
    return held[v];
}

template <typename T, int V>
static __global__ void __launch_bounds__(MAX_BACKWARD_THREADS)
    layernorm_backward(struct mt_layernorm_bwd a, size_t rows, unsigned vecs)
{
    constexpr int N = VEC<T>;
    __shared__ float scratch[3][WARP]; /* one a sum: the barriers of the other sums keep two uses of one apart */
    size_t row = blockIdx.x * rows, end = row + rows < a.n ? row + rows : a.n;
    float dw[V][N] = {}, db[V][N] = {}, plus = a.plus_one ? 1.0f : 0.0f, over = 1.0f / static_cast<float>(a.c);
    const T *weights = static_cast<const T *>(a.w);
    uint4 w[V] = {};
    if (!WIDE<V>)
        load_row<T, V>(weights, vecs, w);
    for (; row < end; row++) {
        uint4 x[V], dy[V], res[V] = {};
        load_row<T, V>(static_cast<const T *>(a.x) + row * a.c, vecs, x);
        load_row<T, V>(static_cast<const T *>(a.dy) + row * a.c, vecs, dy);
        const T *residual = a.dres ? static_cast<const T *>(a.dres) + row * a.c : nullptr;
        if (a.dres && !WIDE<V>)
            load_row<T, V>(residual, vecs, res);
        float rstd = a.rstd[row], mean = block_sum(sum_of<T, V>(x), scratch[0]) / static_cast<float>(a.c);
        float sum = 0, dot = 0;
        MT_UNROLL(V)
        for (int v = 0; v < V; v++) {
            float fx[N], fdy[N], fw[N];
            vec_floats<T>(x[v], fx);
            vec_floats<T>(dy[v], fdy);
            vec_floats<T>(vector_of<T, V>(w, weights, v, vecs), fw);
            for (int k = 0; k < N; k++) { /* beyond the end dy is 0 */
                float g = fdy[k] * (fw[k] + plus);
                sum += g;
                dot = fmaf(g, fx[k] - mean, dot);
            }
        }
        float mean_g = block_sum(sum, scratch[1]) * over;
        float mean_gx = block_sum(dot, scratch[2]) * rstd * over;
        T *pdx = static_cast<T *>(a.dx) + row * a.c;
        MT_UNROLL(V)
        for (int v = 0; v < V; v++) {
            unsigned i = v * blockDim.x + threadIdx.x;
            float fx[N], fdy[N], fw[N], fres[N];
            hold_packed(x[v]);
            hold_packed(dy[v]);
            uint4 own = vector_of<T, V>(w, weights, v, vecs);
            hold_packed(own);
            vec_floats<T>(x[v], fx);
            vec_floats<T>(dy[v], fdy);
            vec_floats<T>(own, fw);
            vec_floats<T>(vector_of<T, V>(res, residual, v, vecs), fres);
            for (int k = 0; k < N; k++) {
                float xhat = (fx[k] - mean) * rstd;
                fres[k] += rstd * (fdy[k] * (fw[k] + plus) - mean_g - xhat * mean_gx);
                dw[v][k] = fmaf(fdy[k], xhat, dw[v][k]);
                db[v][k] += fdy[k];
            }
            if (i < vecs)
                store16(pdx + i * N, vec_of<T>(fres));
        }
    }
    if (!a.dw)
        return;
    float *partial = static_cast<float *>(a.workspace) + blockIdx.x * (a.biased ? 2 * a.c : a.c);
    MT_UNROLL(V)
    for (int v = 0; v < V; v++) {
        unsigned i = v * blockDim.x + threadIdx.x;
        if (i < vecs) {
            store_floats<N>(partial + i * N, dw[v]);
            if (a.biased)
                store_floats<N>(partial + a.c + i * N, db[v]);
        }
    }
}

/* For any length: a thread keeps its columns of the block's part of dw and db in the workspace. */
template <typename T>
static __global__ void __launch_bounds__(256) layernorm_backward_any(struct mt_layernorm_bwd a, size_t rows)
{
    __shared__ float scratch[3][WARP];
    size_t first = blockIdx.x * rows, end = first + rows < a.n ? first + rows : a.n;
    const T *w = static_cast<const T *>(a.w);
    float plus = a.plus_one ? 1.0f : 0.0f, over = 1.0f / static_cast<float>(a.c);
    float *dw = static_cast<float *>(a.workspace) + (a.dw ? blockIdx.x * (a.biased ? 2 * a.c : a.c) : 0);
    for (size_t row = first; row < end; row++) {
        const T *x = static_cast<const T *>(a.x) + row * a.c, *dy = static_cast<const T *>(a.dy) + row * a.c;
        const T *res = static_cast<const T *>(a.dres) + (a.dres ? row * a.c : 0);
        T *dx = static_cast<T *>(a.dx) + row * a.c;
        float rstd = a.rstd[row], mean = mean_any(x, a.c, scratch[0]), sum = 0, dot = 0;
        for (size_t i = threadIdx.x; i < a.c; i += blockDim.x) {
            float g = load(dy + i) * (load(w + i) + plus);
            sum += g;
            dot = fmaf(g, load(x + i) - mean, dot);
        }
        float mean_g = block_sum(sum, scratch[1]) * over;
        float mean_gx = block_sum(dot, scratch[2]) * rstd * over;
        for (size_t i = threadIdx.x; i < a.c; i += blockDim.x) {
            float xhat = (load(x + i) - mean) * rstd, d = load(dy + i), g = d * (load(w + i) + plus);
            store(dx + i, (a.dres ? load(res + i) : 0.0f) + rstd * (g - mean_g - xhat * mean_gx));
            if (a.dw)
                dw[i] = row == first ? d * xhat : dw[i] + d * xhat;
            if (a.dw && a.biased)
                dw[a.c + i] = row == first ? d : dw[a.c + i] + d;
        }
    }
}

template <typename T, int V>
static cudaError_t launch_backward(const struct mt_layernorm_bwd *a, size_t rows, cudaStream_t stream)
{
    size_t vecs = a->c / VEC<T>;
    unsigned threads = threads_for(ceil_div(vecs, V), MAX_BACKWARD_THREADS);
    return MT_LAUNCH((layernorm_backward<T, V>), grid_of(ceil_div(a->n, rows)), threads, 0, stream, *a, rows,
                     static_cast<unsigned>(vecs));
}

template <typename T> static cudaError_t run_backward(const struct mt_layernorm_bwd *a, cudaStream_t stream)
{
    size_t vecs = a->c / VEC<T>, rows = mt_cuda_sum_rows(a->n);
    if (a->c % VEC<T> || vecs > 3 * MAX_BACKWARD_THREADS)
        return MT_LAUNCH(layernorm_backward_any<T>, grid_of(ceil_div(a->n, rows)), 256, 0, stream, *a, rows);
    return vecs <= 2 * MAX_BACKWARD_THREADS ? launch_backward<T, 2>(a, rows, stream)
                                             : launch_backward<T, 3>(a, rows, stream);
}

cudaError_t mt_cuda_layernorm_bwd(const struct mt_layernorm_bwd *a, cudaStream_t stream)
{
    cudaError_t rc = a->dtype == MT_BF16 ? run_backward<bf16>(a, stream) : run_backward<float>(a, stream);
    size_t sums = (a->biased ? 2 : 1) * a->c;
    return mt_cuda_fold_after(rc, a->dw, a->workspace, ceil_div(a->n, mt_cuda_sum_rows(a->n)), sums, sums, stream);
}
