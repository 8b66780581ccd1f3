/* SPDX-License-Identifier: Apache-2.0 */
/*
 * y = xhat w, xhat = x rstd (Zhang and Sennrich 2019). Backward, with g = dy w:
 *
 *   dx = rstd (g - xhat mean(g xhat)),   dw = sum over rows of dy xhat
 *
 * Forward: a block (or, for short rows, a warp) holds a row in registers between its sum of squares and
 * its output. Bytes moved per element of s bytes: 2 s.
 * Backward: a block takes a few rows one after the other and holds w and its part of dw in registers; the
 * parts are then folded (fold.cu). Bytes: 3 s, with dres 4 s, and 8 per partial.
 * Rows that do not divide into vectors, or are too long for the registers, are read twice, element by element.
 */
#include "workspace.h"
#include "launch.cuh"
#include "norm.cuh"
#include "reduce.cuh"
#include "scalar.cuh"

/* The first element of a row. Kernels for rows side by side (not APART) are made without the division. */
template <bool APART> MT_DEVICE size_t row_at(const struct mt_row_groups &g, size_t c, size_t row)
{
    if (!APART || !g.group)
        return row * c;
    size_t outer = row / g.group;
    return outer * g.ld + (row - outer * g.group) * g.stride;
}

/* Can rows be read by vectors? Those that lie side by side can, if their length can. */
template <typename T> static bool vecs_fit(const void *p, const struct mt_row_groups &g)
{
    return !g.group || (rows_aligned<T>(p, g.ld) && (g.group == 1 || g.stride % VEC<T> == 0));
}

/* --- forward ---------------------------------------------------------------------------------- */

template <typename T> MT_DEVICE float weigh(const struct mt_rmsnorm &a, float x, float rstd, float w)
{
    float xhat = x * rstd;
    return a.plus_one ? xhat * (w + 1.0f) : (a.round_once ? xhat : rounded<T>(xhat)) * w;
}

/* The same for a vector, in place of x. */
template <typename T>
MT_DEVICE void weigh_pack(const struct mt_rmsnorm &a, float (&x)[VEC<T>], float rstd, const float (&w)[VEC<T>])
{
    float plus = a.plus_one ? 1.0f : 0.0f;
    for (int k = 0; k < VEC<T>; k += 2) {
        x[k] *= rstd;
        x[k + 1] *= rstd;
        if (!a.plus_one && !a.round_once)
            round_two<T>(x + k);
        x[k] *= w[k] + plus;
        x[k + 1] *= w[k + 1] + plus;
    }
}

template <typename T, int V> MT_DEVICE float square_sum(const uint4 (&x)[V])
{
    float sum = 0;
    MT_UNROLL(V)
    for (int v = 0; v < V; v++) {
        float p[VEC<T>];
        vec_floats<T>(x[v], p);
        for (int k = 0; k < VEC<T>; k++)
            sum = fmaf(p[k], p[k], sum);
    }
    return sum;
}

/* A block has several rows only if a row is one warp: then there is no barrier, and warps may return early. */
template <typename T, int V, bool APART>
static __global__ void __launch_bounds__(1024) rmsnorm_forward(struct mt_rmsnorm a, unsigned vecs)
{
    constexpr int N = VEC<T>;
    __shared__ float scratch[WARP];
    size_t row = static_cast<size_t>(blockIdx.x) * blockDim.y + threadIdx.y;
    if (row >= a.n)
        return;
    uint4 x[V];
    load_row<T, V>(static_cast<const T *>(a.x) + row_at<APART>(a.x_at, a.c, row), vecs, x);
    float rstd;
    if (a.use_rstd) {
        rstd = a.rstd[row];
    } else {
        rstd = rstd_of(block_sum(square_sum<T, V>(x), scratch), a.c, a.eps);
        if (threadIdx.x == 0)
            a.rstd[row] = rstd;
    }
    const T *w = static_cast<const T *>(a.w);
    T *y = static_cast<T *>(a.y) + row_at<APART>(a.y_at, a.c, row);
    MT_UNROLL(V)
    for (int v = 0; v < V; v++) {
        unsigned i = v * blockDim.x + threadIdx.x;
        if (i < vecs) {
            float p[N], q[N];
            vec_floats<T>(x[v], p);
            vec_floats<T>(load16(w + i * N), q);
            weigh_pack<T>(a, p, rstd, q);
            store16(y + i * N, vec_of<T>(p));
        }
    }
}

/* For any length: a thread reads its elements twice. */
template <typename T>
static __global__ void __launch_bounds__(256) rmsnorm_forward_any(struct mt_rmsnorm a)
{
    __shared__ float scratch[WARP];
    const T *x = static_cast<const T *>(a.x) + row_at<true>(a.x_at, a.c, blockIdx.x), *w = static_cast<const T *>(a.w);
    T *y = static_cast<T *>(a.y) + row_at<true>(a.y_at, a.c, blockIdx.x);
    float squares = 0;
    if (!a.use_rstd) {
        for (size_t i = threadIdx.x; i < a.c; i += blockDim.x)
            squares = fmaf(load(x + i), load(x + i), squares);
        float rstd = rstd_of(block_sum(squares, scratch), a.c, a.eps);
        for (size_t i = threadIdx.x; i < a.c; i += blockDim.x)
            store(y + i, weigh<T>(a, load(x + i), rstd, load(w + i)));
        if (threadIdx.x == 0)
            a.rstd[blockIdx.x] = rstd;
        return;
    }
    for (size_t i = threadIdx.x; i < a.c; i += blockDim.x)
        store(y + i, weigh<T>(a, load(x + i), a.rstd[blockIdx.x], load(w + i)));
}

template <typename T, int V>
static cudaError_t launch_forward(const struct mt_rmsnorm *a, cudaStream_t stream)
{
    size_t vecs = a->c / VEC<T>;
    unsigned x = threads_for(ceil_div(vecs, V), 1024), y = x == WARP ? 4 : 1;
    dim3 grid = grid_of(ceil_div(a->n, y)), block(x, y);
    if (a->x_at.group || a->y_at.group)
        return MT_LAUNCH((rmsnorm_forward<T, V, true>), grid, block, 0, stream, *a, static_cast<unsigned>(vecs));
    return MT_LAUNCH((rmsnorm_forward<T, V, false>), grid, block, 0, stream, *a, static_cast<unsigned>(vecs));
}

template <typename T> static cudaError_t run_forward(const struct mt_rmsnorm *a, cudaStream_t stream)
{
    size_t vecs = a->c / VEC<T>;
    if (a->c % VEC<T> || vecs > 4 * 1024 || !vecs_fit<T>(a->x, a->x_at) || !vecs_fit<T>(a->y, a->y_at))
        return MT_LAUNCH(rmsnorm_forward_any<T>, grid_of(a->n), 256, 0, stream, *a);
    if (vecs <= 2 * 512)
        return launch_forward<T, 2>(a, stream);
    return launch_forward<T, 4>(a, stream);
}

cudaError_t mt_cuda_rmsnorm(const struct mt_rmsnorm *a, cudaStream_t stream)
{
    return a->dtype == MT_BF16 ? run_forward<bf16>(a, stream) : run_forward<float>(a, stream);
}

/* --- backward --------------------------------------------------------------------------------- */

template <typename T, int V, bool APART>
static __global__ void __launch_bounds__(MAX_BACKWARD_THREADS)
    rmsnorm_backward(struct mt_rmsnorm_bwd a, size_t rows, unsigned vecs)
{
    constexpr int N = VEC<T>;
    __shared__ float scratch[2][WARP]; /* used alternately, so that one barrier per row is enough */
    size_t row = blockIdx.x * rows, end = row + rows < a.n ? row + rows : a.n;
    const T *weights = static_cast<const T *>(a.w);
    float dw[V][N] = {}, plus = a.plus_one ? 1.0f : 0.0f;
    uint4 w[V];
    load_row<T, V>(weights, vecs, w);
    for (int turn = 0; row < end; row++, turn ^= 1) {
        size_t at = row_at<APART>(a.dx_at, a.c, row);
        const T *px = static_cast<const T *>(a.x) + row_at<APART>(a.x_at, a.c, row);
        const T *pdy = static_cast<const T *>(a.dy) + row_at<APART>(a.dy_at, a.c, row);
        const T *pres = static_cast<const T *>(a.dres) + (a.dres ? at : 0);
        T *pdx = static_cast<T *>(a.dx) + at;
        uint4 x[V], dy[V], res[V];
        MT_UNROLL(V)
        for (int v = 0; v < V; v++) {
            unsigned i = v * blockDim.x + threadIdx.x;
            x[v] = i < vecs ? load16(px + i * N) : make_uint4(0, 0, 0, 0);
            dy[v] = i < vecs ? load16(pdy + i * N) : make_uint4(0, 0, 0, 0);
            res[v] = a.dres && i < vecs ? load16(pres + i * N) : make_uint4(0, 0, 0, 0);
        }
        float rstd = a.rstd[row], dot = 0;
        MT_UNROLL(V)
        for (int v = 0; v < V; v++) {
            float fx[N], fdy[N], fw[N];
            vec_floats<T>(x[v], fx);
            vec_floats<T>(dy[v], fdy);
            vec_floats<T>(w[v], fw);
            for (int k = 0; k < N; k++)
                dot = fmaf(fdy[k] * (fw[k] + plus), fx[k], dot);
        }
        float mean = block_sum(dot, scratch[turn]) * rstd / static_cast<float>(a.c);
        MT_UNROLL(V)
        for (int v = 0; v < V; v++) {
            unsigned i = v * blockDim.x + threadIdx.x;
            float fx[N], fdy[N], fw[N], fres[N];
            hold_packed(x[v]);
            hold_packed(dy[v]);
            hold_packed(w[v]);
            vec_floats<T>(x[v], fx);
            vec_floats<T>(dy[v], fdy);
            vec_floats<T>(w[v], fw);
            vec_floats<T>(res[v], fres);
            for (int k = 0; k < N; k += 2) {
                fx[k] *= rstd;
                fx[k + 1] *= rstd;
                fres[k] += rstd * (fdy[k] * (fw[k] + plus) - fx[k] * mean);
                fres[k + 1] += rstd * (fdy[k + 1] * (fw[k + 1] + plus) - fx[k + 1] * mean);
                if (!a.plus_one && !a.round_once)
                    round_two<T>(fx + k); /* the value that was multiplied by w */
                dw[v][k] = fmaf(fdy[k], fx[k], dw[v][k]);
                dw[v][k + 1] = fmaf(fdy[k + 1], fx[k + 1], dw[v][k + 1]);
            }
            if (i < vecs)
                store16(pdx + i * N, vec_of<T>(fres));
        }
    }
    if (!a.dw)
        return;
    float *partial = static_cast<float *>(a.workspace) + blockIdx.x * a.c;
    MT_UNROLL(V)
    for (int v = 0; v < V; v++) {
        unsigned i = v * blockDim.x + threadIdx.x;
        if (i < vecs)
            store_floats<N>(partial + i * N, dw[v]);
    }
}

/* For any length: a thread keeps its columns of the block's part of dw in the workspace. */
template <typename T>
static __global__ void __launch_bounds__(256) rmsnorm_backward_any(struct mt_rmsnorm_bwd a, size_t rows)
{
    __shared__ float scratch[2][WARP];
    size_t first = blockIdx.x * rows, end = first + rows < a.n ? first + rows : a.n;
    const T *w = static_cast<const T *>(a.w);
    float plus = a.plus_one ? 1.0f : 0.0f;
    float *dw = static_cast<float *>(a.workspace) + (a.dw ? blockIdx.x * a.c : 0);
    int turn = 0;
    for (size_t row = first; row < end; row++, turn ^= 1) {
        size_t at = row_at<true>(a.dx_at, a.c, row);
        const T *x = static_cast<const T *>(a.x) + row_at<true>(a.x_at, a.c, row);
        const T *dy = static_cast<const T *>(a.dy) + row_at<true>(a.dy_at, a.c, row);
        const T *res = static_cast<const T *>(a.dres) + (a.dres ? at : 0);
        T *dx = static_cast<T *>(a.dx) + at;
        float rstd = a.rstd[row], dot = 0;
        for (size_t i = threadIdx.x; i < a.c; i += blockDim.x)
            dot = fmaf(load(dy + i) * (load(w + i) + plus), load(x + i), dot);
        float mean = block_sum(dot, scratch[turn]) * rstd / static_cast<float>(a.c);
        for (size_t i = threadIdx.x; i < a.c; i += blockDim.x) {
            float xhat = load(x + i) * rstd, d = load(dy + i), g = d * (load(w + i) + plus);
            float part = d * (a.plus_one || a.round_once ? xhat : rounded<T>(xhat));
            store(dx + i, (a.dres ? load(res + i) : 0.0f) + rstd * (g - xhat * mean));
            if (a.dw)
                dw[i] = row == first ? part : dw[i] + part;
        }
    }
}

template <typename T, int V>
static cudaError_t launch_backward(const struct mt_rmsnorm_bwd *a, size_t rows, cudaStream_t stream)
{
    size_t vecs = a->c / VEC<T>;
    unsigned threads = threads_for(ceil_div(vecs, V), MAX_BACKWARD_THREADS);
    dim3 grid = grid_of(ceil_div(a->n, rows));
    if (a->x_at.group || a->dy_at.group || a->dx_at.group)
        return MT_LAUNCH((rmsnorm_backward<T, V, true>), grid, threads, 0, stream, *a, rows,
                         static_cast<unsigned>(vecs));
    return MT_LAUNCH((rmsnorm_backward<T, V, false>), grid, threads, 0, stream, *a, rows,
                     static_cast<unsigned>(vecs));
}

template <typename T> static cudaError_t run_backward(const struct mt_rmsnorm_bwd *a, cudaStream_t stream)
{
    size_t vecs = a->c / VEC<T>, rows = mt_cuda_sum_rows(a->n);
    if (a->c % VEC<T> || vecs > 4 * MAX_BACKWARD_THREADS || !vecs_fit<T>(a->x, a->x_at) ||
        !vecs_fit<T>(a->dy, a->dy_at) || !vecs_fit<T>(a->dx, a->dx_at) ||
        (a->dres && !vecs_fit<T>(a->dres, a->dx_at)))
        return MT_LAUNCH(rmsnorm_backward_any<T>, grid_of(ceil_div(a->n, rows)), 256, 0, stream, *a, rows);
    return vecs <= 2 * MAX_BACKWARD_THREADS ? launch_backward<T, 2>(a, rows, stream)
                                             : launch_backward<T, 4>(a, rows, stream);
}

cudaError_t mt_cuda_rmsnorm_bwd(const struct mt_rmsnorm_bwd *a, cudaStream_t stream)
{
    cudaError_t rc = a->dtype == MT_BF16 ? run_backward<bf16>(a, stream) : run_backward<float>(a, stream);
    return mt_cuda_fold_after(rc, a->dw, a->workspace, ceil_div(a->n, mt_cuda_sum_rows(a->n)), a->c, a->c, stream);
}
