/* SPDX-License-Identifier: Apache-2.0 */
/*
 * rmsnorm: y = xhat w, xhat = x rstd (Zhang and Sennrich 2019). layernorm: y = xhat w + b, xhat = (x - mean) rstd (Ba,
 * Kiros and Hinton 2016). Backward, with g = dy w, where rmsnorm has no mean(g) and no db:
 *
 *   dx = rstd (g - mean(g) - xhat mean(g xhat)),   dw = sum over rows of dy xhat,   db = sum over rows of dy
 *
 * Forward: a block (or, for short rows, a warp) holds a row in registers between its sums and its output. Bytes moved
 * per element of s bytes: 2 s. Backward: a block takes a few rows one after the other and holds w and its parts of dw
 * and db in registers; the parts, a row [dw | db] of each block, are then folded (fold.cu). Bytes: 3 s, with dres 4 s,
 * and 8 per partial and sum. Rows that do not divide into vectors, or are too long for the registers (backward above
 * 16,384 elements in bf16, centred above 12,288; forward above 32,768; half of that in f32), are read again for each
 * sum, element by element.
 */
#include "workspace.h"
#include "launch.cuh"
#include "reduce.cuh"
#include "scalar.cuh"

/* Of backward's blocks: a thread holds more there than in forward. */
static constexpr size_t MAX_BACKWARD_THREADS = 512;

/* Either operation's arguments in the form of rmsnorm's. Kernels for layernorm are CENTRED. */
template <typename A> struct norm_of {
    A of;
    bool biased;
};
using row_norm = norm_of<struct mt_rmsnorm>;
using row_norm_bwd = norm_of<struct mt_rmsnorm_bwd>;

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

/* Rounds one or two as a store and a load would. */
template <typename T, int N> MT_DEVICE void round_some(float *x)
{
    if constexpr (N == 1)
        x[0] = rounded<T>(x[0]);
    else
        round_two<T>(x);
}

/* This thread's vector number v of a row of `vecs`, at the distance of the block's size; 0 beyond its end. */
template <typename T> MT_DEVICE uint4 load_vector(const T *row, unsigned vecs, size_t v)
{
    unsigned i = static_cast<unsigned>(v) * blockDim.x + threadIdx.x;
    return row && i < vecs ? load16(row + i * VEC<T>) : make_uint4(0, 0, 0, 0);
}

template <typename T, int V> MT_DEVICE void load_row(const T *row, unsigned vecs, uint4 (&x)[V])
{
    MT_UNROLL(V)
    for (int v = 0; v < V; v++)
        x[v] = load_vector(row, vecs, v);
}

/* --- forward ---------------------------------------------------------------------------------- */

/* A row, of which each() calls f() of this thread's vectors and their numbers: held in registers, or read again. */
template <typename T, int V> struct held {
    static constexpr int N = VEC<T>;
    uint4 x[V];
    template <typename F> __device__ __forceinline__ void each(F f) const
    {
        MT_UNROLL(V)
        for (int v = 0; v < V; v++) {
            float p[N];
            vec_floats<T>(x[v], p);
            f(v * blockDim.x + threadIdx.x, p);
        }
    }
};

template <typename T> struct read_again {
    static constexpr int N = 1;
    const T *x;
    size_t c;
    template <typename F> __device__ __forceinline__ void each(F f) const
    {
        for (size_t i = threadIdx.x; i < c; i += blockDim.x) {
            float p[1] = {load(x + i)};
            f(i, p);
        }
    }
};

/* y, of a row of `vecs` vectors. */
template <typename T, bool CENTRED, typename R>
MT_DEVICE void normalise(const row_norm &s, size_t row, const R &x, size_t vecs, T *y, float (&scratch)[2][WARP])
{
    constexpr int N = R::N, STEP = N == 1 ? 1 : 2;
    const struct mt_rmsnorm &a = s.of;
    const T *weights = static_cast<const T *>(a.w);
    float mean = 0, sum = 0, squares = 0, rstd, plus = a.plus_one ? 1.0f : 0.0f;
    if constexpr (CENTRED) {
        x.each([&](size_t, const float (&p)[N]) {
            for (int k = 0; k < N; k++)
                sum += p[k];
        });
        mean = block_sum(sum, scratch[0]) / static_cast<float>(a.c);
    }
    if (a.use_rstd) {
        rstd = a.rstd[row];
    } else {
        x.each([&](size_t i, const float (&p)[N]) {
            for (int k = 0; k < N && (!CENTRED || i < vecs); k++)
                squares = fmaf(p[k] - mean, p[k] - mean, squares);
        });
        rstd = 1.0f / sqrtf(block_sum(squares, scratch[1]) / static_cast<float>(a.c) + a.eps);
        if (threadIdx.x == 0)
            a.rstd[row] = rstd;
    }
    x.each([&](size_t i, float (&p)[N]) {
        float w[N], b[N] = {};
        if (i >= vecs)
            return;
        load_n<T, N>(weights + i * N, w);
        if (CENTRED && s.biased)
            load_n<T, N>(weights + a.c + i * N, b);
        for (int k = 0; k < N; k += STEP) {
            for (int j = k; j < k + STEP; j++)
                p[j] = (p[j] - mean) * rstd;
            if (!CENTRED && !a.plus_one && !a.round_once)
                round_some<T, STEP>(p + k);
            for (int j = k; j < k + STEP; j++)
                p[j] = CENTRED ? fmaf(p[j], w[j] + plus, b[j]) : p[j] * (w[j] + plus);
        }
        store_n<T, N>(y + i * N, p);
    });
}

/* A block has several rows only if a row is one warp: then there is no barrier, and warps may return early. */
template <typename T, int V, bool CENTRED, bool APART>
static __global__ void __launch_bounds__(1024) norm_forward(row_norm s, unsigned vecs)
{
    __shared__ float scratch[2][WARP];
    const struct mt_rmsnorm &a = s.of;
    size_t row = static_cast<size_t>(blockIdx.x) * blockDim.y + threadIdx.y;
    if (row >= a.n)
        return;
    held<T, V> x;
    load_row<T, V>(static_cast<const T *>(a.x) + row_at<APART>(a.x_at, a.c, row), vecs, x.x);
    normalise<T, CENTRED>(s, row, x, vecs, static_cast<T *>(a.y) + row_at<APART>(a.y_at, a.c, row), scratch);
}

template <typename T, bool CENTRED> static __global__ void __launch_bounds__(256) norm_forward_any(row_norm s)
{
    __shared__ float scratch[2][WARP];
    const struct mt_rmsnorm &a = s.of;
    read_again<T> x = {static_cast<const T *>(a.x) + row_at<true>(a.x_at, a.c, blockIdx.x), a.c};
    T *y = static_cast<T *>(a.y) + row_at<true>(a.y_at, a.c, blockIdx.x);
    normalise<T, CENTRED>(s, blockIdx.x, x, a.c, y, scratch);
}

template <typename T, int V, bool CENTRED> static cudaError_t launch_forward(const row_norm &s, cudaStream_t stream)
{
    unsigned vecs = static_cast<unsigned>(s.of.c / VEC<T>), x = threads_for(ceil_div(vecs, V), 1024);
    unsigned y = x == WARP ? 4 : 1;
    dim3 grid = grid_of(ceil_div(s.of.n, y)), block(x, y);
    if (!CENTRED && (s.of.x_at.group || s.of.y_at.group))
        return MT_LAUNCH((norm_forward<T, V, CENTRED, !CENTRED>), grid, block, 0, stream, s, vecs);
    return MT_LAUNCH((norm_forward<T, V, CENTRED, false>), grid, block, 0, stream, s, vecs);
}

template <typename T, bool CENTRED> static cudaError_t run_forward(const row_norm &s, cudaStream_t stream)
{
    size_t vecs = s.of.c / VEC<T>;
    if (s.of.c % VEC<T> || vecs > 4 * 1024 || !vecs_fit<T>(s.of.x, s.of.x_at) || !vecs_fit<T>(s.of.y, s.of.y_at))
        return MT_LAUNCH((norm_forward_any<T, CENTRED>), grid_of(s.of.n), 256, 0, stream, s);
    return vecs <= 2 * 512 ? launch_forward<T, 2, CENTRED>(s, stream) : launch_forward<T, 4, CENTRED>(s, stream);
}

cudaError_t mt_cuda_rmsnorm(const struct mt_rmsnorm *a, cudaStream_t stream)
{
    row_norm s = {*a, false};
    return a->dtype == MT_BF16 ? run_forward<bf16, false>(s, stream) : run_forward<float, false>(s, stream);
}

cudaError_t mt_cuda_layernorm(const struct mt_layernorm *a, cudaStream_t stream)
{
    row_norm s = {{a->n, a->c, a->dtype, a->eps, a->plus_one, true, a->x, a->w, a->y, a->rstd, a->use_rstd, {}, {}},
              a->biased};
    return a->dtype == MT_BF16 ? run_forward<bf16, true>(s, stream) : run_forward<float, true>(s, stream);
}

/* --- backward --------------------------------------------------------------------------------- */

/* Where the rows of backward's arrays begin. */
template <typename T> struct row_places {
    const T *x, *dy, *res; /* res: NULL: 0 */
    T *dx;
    bool first; /* of the block's rows */
};

/* A block's rows, one after the other; each() calls f() of this thread's part: its place, x, dy and w. */
template <typename T, int V, bool CENTRED> struct held_bwd {
    static constexpr int N = VEC<T>;
    static constexpr bool WIDE = CENTRED && V > 2; /* registers do not hold w and dres: they are loaded where used */
    const T *weights;
    unsigned vecs;
    row_places<T> at;
    uint4 w[V] = {}, x[V], dy[V], res[V] = {};
    float dw[V][N] = {}, db[V][N] = {};
    __device__ __forceinline__ held_bwd(const T *weights, unsigned vecs) : weights(weights), vecs(vecs)
    {
        if (!WIDE)
            load_row<T, V>(weights, vecs, w);
    }
    __device__ __forceinline__ void load(const row_places<T> &from)
    {
        at = from;
        load_row<T, V>(at.x, vecs, x);
        load_row<T, V>(at.dy, vecs, dy);
        if (!WIDE)
            load_row<T, V>(at.res, vecs, res);
    }
    /* HOLD: after a barrier. */
    template <bool HOLD, typename F> __device__ __forceinline__ void each(F f)
    {
        MT_UNROLL(V)
        for (int v = 0; v < V; v++) {
            float fx[N], fdy[N], fw[N];
            if (WIDE)
                w[v] = load_vector(weights, vecs, v);
            if (HOLD) {
                hold_packed(x[v]);
                hold_packed(dy[v]);
                hold_packed(w[v]);
            }
            vec_floats<T>(x[v], fx);
            vec_floats<T>(dy[v], fdy);
            vec_floats<T>(w[v], fw);
            f(static_cast<size_t>(v), fx, fdy, fw);
        }
    }
    __device__ __forceinline__ void residual(size_t v, float (&to)[N]) const
    {
        vec_floats<T>(WIDE ? load_vector(at.res, vecs, v) : res[v], to);
    }
    __device__ __forceinline__ void add(size_t v, int k, float d, float xhat)
    {
        dw[v][k] = fmaf(d, xhat, dw[v][k]);
        db[v][k] += d;
    }
    __device__ __forceinline__ void store(size_t v, const float (&dx)[N])
    {
        unsigned i = static_cast<unsigned>(v) * blockDim.x + threadIdx.x;
        if (i < vecs)
            store16(at.dx + i * N, vec_of<T>(dx));
    }
    __device__ __forceinline__ void leave(float *partial, float *bias) const
    {
        MT_UNROLL(V)
        for (int v = 0; v < V; v++) {
            unsigned i = v * blockDim.x + threadIdx.x;
            if (partial && i < vecs)
                store_floats<N>(partial + i * N, dw[v]);
            if (bias && i < vecs)
                store_floats<N>(bias + i * N, db[v]);
        }
    }
};

/* The same of any length: a thread keeps its columns of the block's sums in the workspace. */
template <typename T> struct read_again_bwd {
    static constexpr int N = 1;
    const T *w;
    size_t c;
    float *dw, *db; /* NULL: not wanted */
    row_places<T> at = {};
    __device__ __forceinline__ void load(const row_places<T> &from)
    {
        at = from;
    }
    template <bool, typename F> __device__ __forceinline__ void each(F f)
    {
        for (size_t i = threadIdx.x; i < c; i += blockDim.x) {
            float fx[1] = {::load(at.x + i)}, fdy[1] = {::load(at.dy + i)}, fw[1] = {::load(w + i)};
            f(i, fx, fdy, fw);
        }
    }
    __device__ __forceinline__ void residual(size_t i, float (&to)[1]) const
    {
        to[0] = at.res ? ::load(at.res + i) : 0.0f;
    }
    __device__ __forceinline__ void add(size_t i, int, float d, float xhat)
    {
        if (dw)
            dw[i] = at.first ? d * xhat : dw[i] + d * xhat;
        if (db)
            db[i] = at.first ? d : db[i] + d;
    }
    __device__ __forceinline__ void store(size_t i, const float (&dx)[1])
    {
        ::store(at.dx + i, dx[0]);
    }
};

/* dx of a block's rows, and their part of the sums. */
template <typename T, bool CENTRED, bool APART, typename R>
MT_DEVICE void rows_backward(const struct mt_rmsnorm_bwd &a, size_t rows, R &r)
{
    constexpr int N = R::N, STEP = N == 1 ? 1 : 2;
    __shared__ float scratch[CENTRED ? 3 : 2][WARP]; /* centred, one a sum; else used alternately: one barrier a row */
    size_t first = blockIdx.x * rows, end = first + rows < a.n ? first + rows : a.n;
    float plus = a.plus_one ? 1.0f : 0.0f, c = static_cast<float>(a.c), over = 1.0f / c;
    int turn = 0;
    for (size_t row = first; row < end; row++, turn ^= 1) {
        size_t at = row_at<APART>(a.dx_at, a.c, row);
        r.load({static_cast<const T *>(a.x) + row_at<APART>(a.x_at, a.c, row),
                static_cast<const T *>(a.dy) + row_at<APART>(a.dy_at, a.c, row),
                a.dres ? static_cast<const T *>(a.dres) + at : nullptr, static_cast<T *>(a.dx) + at, row == first});
        float rstd = a.rstd[row], mean = 0, all = 0, sum = 0, dot = 0, mean_g = 0, along;
        if constexpr (CENTRED) {
            r.template each<false>([&](size_t, const float (&x)[N], const float (&)[N], const float (&)[N]) {
                for (int k = 0; k < N; k++)
                    all += x[k];
            });
            mean = block_sum(all, scratch[0]) / c;
        }
        r.template each<false>([&](size_t, const float (&x)[N], const float (&dy)[N], const float (&w)[N]) {
            for (int k = 0; k < N; k++) { /* beyond the end dy is 0 */
                float g = dy[k] * (w[k] + plus);
                sum += g;
                dot = fmaf(g, x[k] - mean, dot);
            }
        });
        if constexpr (CENTRED) {
            mean_g = block_sum(sum, scratch[1]) * over;
            along = block_sum(dot, scratch[2]) * rstd * over;
        } else {
            along = block_sum(dot, scratch[turn]) * rstd / c;
        }
        r.template each<true>([&](size_t i, float (&x)[N], const float (&dy)[N], const float (&w)[N]) {
            float dx[N];
            r.residual(i, dx);
            for (int k = 0; k < N; k += STEP) {
                for (int j = k; j < k + STEP; j++) {
                    x[j] = (x[j] - mean) * rstd;
                    dx[j] += rstd * (dy[j] * (w[j] + plus) - mean_g - x[j] * along);
                }
                if (!CENTRED && !a.plus_one && !a.round_once)
                    round_some<T, STEP>(x + k); /* the values that were multiplied by w */
                for (int j = k; j < k + STEP; j++)
                    r.add(i, j, dy[j], x[j]);
            }
            r.store(i, dx);
        });
    }
}

/* A block's part of dw, with db behind it; NULL: not wanted. */
MT_DEVICE float *partial_of(const row_norm_bwd &s)
{
    size_t sums = s.biased ? 2 * s.of.c : s.of.c;
    return s.of.dw ? static_cast<float *>(s.of.workspace) + blockIdx.x * sums : nullptr;
}

template <typename T, int V, bool CENTRED, bool APART>
static __global__ void __launch_bounds__(MAX_BACKWARD_THREADS) norm_backward(row_norm_bwd s, size_t rows, unsigned vecs)
{
    held_bwd<T, V, CENTRED> r(static_cast<const T *>(s.of.w), vecs);
    rows_backward<T, CENTRED, APART>(s.of, rows, r);
    float *partial = partial_of(s);
    r.leave(partial, CENTRED && partial && s.biased ? partial + s.of.c : nullptr);
}

template <typename T, bool CENTRED>
static __global__ void __launch_bounds__(256) norm_backward_any(row_norm_bwd s, size_t rows)
{
    float *dw = partial_of(s);
    read_again_bwd<T> r = {static_cast<const T *>(s.of.w), s.of.c, dw, dw && s.biased ? dw + s.of.c : nullptr};
    rows_backward<T, CENTRED, true>(s.of, rows, r);
}

template <typename T, int V, bool CENTRED>
static cudaError_t launch_backward(const row_norm_bwd &s, size_t rows, cudaStream_t stream)
{
    unsigned vecs = static_cast<unsigned>(s.of.c / VEC<T>);
    unsigned threads = threads_for(ceil_div(vecs, V), MAX_BACKWARD_THREADS);
    dim3 grid = grid_of(ceil_div(s.of.n, rows));
    if (!CENTRED && (s.of.x_at.group || s.of.dy_at.group || s.of.dx_at.group))
        return MT_LAUNCH((norm_backward<T, V, CENTRED, !CENTRED>), grid, threads, 0, stream, s, rows, vecs);
    return MT_LAUNCH((norm_backward<T, V, CENTRED, false>), grid, threads, 0, stream, s, rows, vecs);
}

template <typename T, bool CENTRED> static cudaError_t run_backward(const row_norm_bwd &s, cudaStream_t stream)
{
    constexpr int MOST = CENTRED ? 3 : 4;
    const struct mt_rmsnorm_bwd &a = s.of;
    size_t vecs = a.c / VEC<T>, rows = mt_cuda_sum_rows(a.n);
    if (a.c % VEC<T> || vecs > MOST * MAX_BACKWARD_THREADS || !vecs_fit<T>(a.x, a.x_at) ||
        !vecs_fit<T>(a.dy, a.dy_at) || !vecs_fit<T>(a.dx, a.dx_at) || (a.dres && !vecs_fit<T>(a.dres, a.dx_at)))
        return MT_LAUNCH((norm_backward_any<T, CENTRED>), grid_of(ceil_div(a.n, rows)), 256, 0, stream, s, rows);
    return vecs <= 2 * MAX_BACKWARD_THREADS ? launch_backward<T, 2, CENTRED>(s, rows, stream)
                                            : launch_backward<T, MOST, CENTRED>(s, rows, stream);
}

template <bool CENTRED> static cudaError_t backward(const row_norm_bwd &s, cudaStream_t stream)
{
    const struct mt_rmsnorm_bwd &a = s.of;
    size_t sums = s.biased ? 2 * a.c : a.c, blocks = ceil_div(a.n, mt_cuda_sum_rows(a.n));
    cudaError_t rc = a.dtype == MT_BF16 ? run_backward<bf16, CENTRED>(s, stream)
                                        : run_backward<float, CENTRED>(s, stream);
    return mt_cuda_fold_after(rc, a.dw, a.workspace, blocks, sums, sums, stream);
}

cudaError_t mt_cuda_rmsnorm_bwd(const struct mt_rmsnorm_bwd *a, cudaStream_t stream)
{
    return backward<false>({*a, false}, stream);
}

cudaError_t mt_cuda_layernorm_bwd(const struct mt_layernorm_bwd *a, cudaStream_t stream)
{
    const struct mt_rmsnorm_bwd of = {a->n, a->c, a->dtype, a->plus_one, true, a->dy, a->x, a->w, a->rstd, a->dres,
                                      a->dx, a->dw, a->workspace, {}, {}, {}};
    return backward<true>({of, a->biased}, stream);
}
