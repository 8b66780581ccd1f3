/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Attention of new tokens over blocks of keys and values (Kwon et al. 2023), after the new ones have been added there.
 * A block of threads has a token and up to HEADS query heads of a key head. Its warps take KEYS of the keys that the
 * token sees in turn, each against the largest score that it has met (Milakov and Gimelshein 2018), and are added up in
 * their order. A lane has EACH keys and all heads for the scores, and then COLUMNS columns of all heads for the sums.
 * Of a key and its value s bytes an element are read once for HEADS heads: with one new token a document that is the
 * bound. So keys are read 16 bytes at a time, values of a row by a warp at once and of AHEAD keys before any is used,
 * and what heads multiply lies side by side in shared memory.
 */
#include "documents.cuh"
#include "launch.cuh"
#include "reduce.cuh"
#include "scalar.cuh"
#include "workspace.h"

static constexpr unsigned WARPS = 4, THREADS = WARPS * WARP, EACH = 2, KEYS = EACH * WARP, AHEAD = 8, WIDEST = 512;
static constexpr unsigned COLUMNS = 4, ROW = COLUMNS * WARP; /* of values: a lane's, and a warp's at once */

/* Elements of the cache: where the keys of a position begin, and its values, of all key heads. */
struct place {
    size_t keys, values;
};

static __device__ __forceinline__ place place_of(const mt_attention_cached &a, size_t doc, unsigned position)
{
    unsigned size = static_cast<unsigned>(a.block), row = position % size;
    size_t keys = a.of.k.n * a.of.k.dim, values = a.of.v.n * a.of.v.dim;
    size_t block = static_cast<size_t>(a.table[doc * a.table_ld + position / size % static_cast<unsigned>(a.table_ld)]);
    size_t at = block * a.block * (keys + values);
    return {at + row * keys, at + a.block * keys + row * values};
}

static __device__ __forceinline__ unsigned position_of(const mt_attention_cached &a, size_t doc, size_t token)
{
    return static_cast<unsigned>(static_cast<size_t>(a.past[doc]) + token - static_cast<size_t>(a.of.cu_seqlens[doc]));
}

template <typename T> static __device__ __forceinline__ void append(T *to, const struct mt_heads &from, size_t token)
{
    const T *x = static_cast<const T *>(from.p) + token * from.ld;
    unsigned dim = static_cast<unsigned>(from.dim), n = static_cast<unsigned>(from.n) * dim;
    MT_UNROLL(1)
    for (unsigned i = threadIdx.x; i < n; i += THREADS)
        to[i] = x[i / dim * from.stride + i % dim];
}

template <typename T> static __global__ void __launch_bounds__(THREADS) append_rows(mt_attention_cached a)
{
    size_t token = blockIdx.x, doc = document_of(a.of.cu_seqlens, a.of.n_docs, token);
    place at = place_of(a, doc, position_of(a, doc, token));
    append(static_cast<T *>(a.cache) + at.keys, a.of.k, token);
    append(static_cast<T *>(a.cache) + at.values, a.of.v, token);
}

/* What a warp has of the result: of HEADS heads ITEMS rows of columns. Each lane knows the scores' figures. */
template <unsigned HEADS, unsigned ITEMS> struct share {
    float max[HEADS], sum[HEADS], acc[ITEMS][COLUMNS][HEADS];
};

/* The scores of a lane's keys, N elements at a time. */
template <typename T, int N, unsigned HEADS>
static __device__ __forceinline__ void score(float (&dot)[EACH][HEADS], const float (&q)[WIDEST][HEADS],
                                             const T *const (&key)[EACH], unsigned d)
{
    MT_UNROLL(2)
    for (unsigned c = 0; c < d; c += N) {
        float x[EACH][N];
        MT_UNROLL(2)
        for (unsigned j = 0; j < EACH; j++)
            load_n<T, N>(key[j] + c, x[j]);
        MT_UNROLL(8)
        for (int i = 0; i < N; i++) {
            MT_UNROLL(8)
            for (unsigned h = 0; h < HEADS; h++) {
                float of_q = q[c + i][h];
                MT_UNROLL(2)
                for (unsigned j = 0; j < EACH; j++)
                    dot[j][h] = fmaf(of_q, x[j][i], dot[j][h]);
            }
        }
    }
}

/* From scores to weights; what there was is scaled to the new largest score. */
template <unsigned HEADS, unsigned ITEMS>
static __device__ __forceinline__ void soften(share<HEADS, ITEMS> *w, float (&dot)[EACH][HEADS])
{
    MT_UNROLL(8)
    for (unsigned h = 0; h < HEADS; h++) {
        float most = larger(w->max[h], warp_max(larger(dot[0][h], dot[1][h]))), scale = expf(w->max[h] - most);
        dot[0][h] = expf(dot[0][h] - most);
        dot[1][h] = expf(dot[1][h] - most);
        w->sum[h] = w->sum[h] * scale + warp_sum(dot[0][h] + dot[1][h]);
        w->max[h] = most;
        MT_UNROLL(4)
        for (unsigned i = 0; i < ITEMS; i++) {
            MT_UNROLL(4)
            for (unsigned c = 0; c < COLUMNS; c++)
                w->acc[i][c][h] *= scale;
        }
    }
}

/* A lane's columns of a value; of the last row some may be missing where they are read one by one. */
template <typename T, int N>
static __device__ __forceinline__ void load_columns(const T *p, unsigned left, float (&x)[COLUMNS])
{
    if constexpr (N > 1) {
        load_four(p, x);
    } else {
        MT_UNROLL(4)
        for (unsigned c = 0; c < COLUMNS; c++)
            x[c] = c < left ? load(p + c) : 0.0f;
    }
}

template <unsigned HEADS>
static __device__ __forceinline__ void add_value(float (&acc)[COLUMNS][HEADS], const float (&s)[HEADS],
                                                 const float (&x)[COLUMNS])
{
    MT_UNROLL(8)
    for (unsigned h = 0; h < HEADS; h++) {
        MT_UNROLL(4)
        for (unsigned c = 0; c < COLUMNS; c++)
            acc[c][h] = fmaf(s[h], x[c], acc[c][h]);
    }
}

/* Adds a lane's columns of the values of n keys, in their order; `left` of them are there. */
template <typename T, int N, unsigned HEADS>
static __device__ __forceinline__ void add_values(float (&acc)[COLUMNS][HEADS], const float (&s)[KEYS][HEADS],
                                                  const size_t (&at)[KEYS], unsigned n, const T *columns, unsigned left)
{
    unsigned k = 0;
    MT_UNROLL(1)
    for (; k + AHEAD <= n; k += AHEAD) {
        float x[AHEAD][COLUMNS];
        MT_UNROLL(AHEAD)
        for (unsigned i = 0; i < AHEAD; i++)
            load_columns<T, N>(columns + at[k + i], left, x[i]);
        MT_UNROLL(AHEAD)
        for (unsigned i = 0; i < AHEAD; i++)
            add_value<HEADS>(acc, s[k + i], x[i]);
    }
    MT_UNROLL(1)
    for (; k < n; k++) {
        float x[COLUMNS];
        load_columns<T, N>(columns + at[k], left, x);
        add_value<HEADS>(acc, s[k], x);
    }
}

/* The shares of all warps, in their order: of each head the largest score and the sum, and the sums of columns, which
 * of a row lie as lanes have them: the first of each, then the second. And of each head the largest score and the sum
 * of all warps. */
template <unsigned HEADS, unsigned ITEMS> struct merged {
    float total[ITEMS * ROW][HEADS], max[WARPS][HEADS], sum[WARPS][HEADS], whole_max[HEADS], whole_sum[HEADS];
};

template <unsigned HEADS, unsigned ITEMS>
static __device__ __forceinline__ float largest(const merged<HEADS, ITEMS> &m, unsigned head)
{
    float most = m.max[0][head];
    MT_UNROLL(4)
    for (unsigned i = 1; i < WARPS; i++)
        most = larger(most, m.max[i][head]);
    return most;
}

/* The largest score and the sum of a head's weights, of all warps. */
template <unsigned HEADS, unsigned ITEMS>
static __device__ __forceinline__ void merge_sums(merged<HEADS, ITEMS> *m, unsigned head)
{
    float most = largest(*m, head), all = 0;
    MT_UNROLL(4)
    for (unsigned i = 0; i < WARPS; i++)
        all += m->sum[i][head] * expf(m->max[i][head] - most);
    m->whole_max[head] = most;
    m->whole_sum[head] = all;
}

template <unsigned HEADS, unsigned ITEMS>
static __device__ __forceinline__ void merge(merged<HEADS, ITEMS> *m, const share<HEADS, ITEMS> &w)
{
    unsigned warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    float scale[HEADS];
    if (lane == 0) {
        MT_UNROLL(8)
        for (unsigned h = 0; h < HEADS; h++) {
            m->max[warp][h] = w.max[h];
            m->sum[warp][h] = w.sum[h];
        }
    }
    __syncthreads();
    if (threadIdx.x < HEADS)
        merge_sums(m, threadIdx.x); /* what follows ends with a barrier */
    MT_UNROLL(8)
    for (unsigned h = 0; h < HEADS; h++)
        scale[h] = expf(w.max[h] - largest(*m, h));
    MT_UNROLL(1)
    for (unsigned turn = 0; turn < WARPS; turn++) {
        MT_UNROLL(4)
        for (unsigned i = 0; i < ITEMS && turn == warp; i++) {
            MT_UNROLL(4)
            for (unsigned c = 0; c < COLUMNS; c++) {
                float *to = m->total[i * ROW + c * WARP + lane];
                MT_UNROLL(8)
                for (unsigned h = 0; h < HEADS; h++)
                    to[h] = (turn ? to[h] : 0.0f) + w.acc[i][c][h] * scale[h];
            }
        }
        __syncthreads();
    }
}

/* The scores of a warp's next n keys, of which a lane has those that are EACH apart; -infinity beyond them. */
template <typename T, int N, unsigned HEADS>
static __device__ __forceinline__ void score_keys(float (&dot)[EACH][HEADS], size_t (&values_at)[KEYS],
                                                  const mt_attention_cached &a, const float (&q)[WIDEST][HEADS],
                                                  size_t doc, size_t kv, unsigned base, unsigned n)
{
    const T *key[EACH];
    MT_UNROLL(2)
    for (unsigned j = 0; j < EACH; j++) {
        unsigned i = j * WARP + threadIdx.x % WARP;
        place at = place_of(a, doc, base + (i < n ? i : n - 1));
        values_at[i] = at.values;
        key[j] = static_cast<const T *>(a.cache) + at.keys + kv * a.of.k.dim;
    }
    score<T, N, HEADS>(dot, q, key, static_cast<unsigned>(a.of.k.dim));
    MT_UNROLL(2)
    for (unsigned j = 0; j < EACH; j++) {
        MT_UNROLL(8)
        for (unsigned h = 0; h < HEADS; h++) {
            float x = a.of.cap > 0 ? a.of.cap * tanhf(dot[j][h] / a.of.cap) : dot[j][h];
            dot[j][h] = j * WARP + threadIdx.x % WARP < n ? x : -INFINITY;
        }
    }
}

/* Of fewer heads than HEADS the others' queries are zeros. */
template <typename T, int N, unsigned HEADS, unsigned ITEMS>
static __global__ void __launch_bounds__(THREADS, (HEADS * ITEMS > 4 ? 3 : 5) - (sizeof(T) > 2))
    attend_rows(mt_attention_cached a)
{
    __shared__ __align__(16) float q[WIDEST][HEADS], s[WARPS][KEYS][HEADS];
    __shared__ size_t values_at[WARPS][KEYS];
    __shared__ merged<HEADS, ITEMS> all;
    unsigned warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    size_t token = blockIdx.x, doc = document_of(a.of.cu_seqlens, a.of.n_docs, token);
    size_t group = a.of.q.n / a.of.k.n, parts = ceil_div(group, HEADS);
    size_t kv = blockIdx.y / parts, first = kv * group + blockIdx.y % parts * HEADS;
    unsigned heads = static_cast<unsigned>(first + HEADS < (kv + 1) * group ? HEADS : (kv + 1) * group - first);
    unsigned position = position_of(a, doc, token), d_v = static_cast<unsigned>(a.of.v.dim);
    unsigned from = a.of.window && position + 1 > a.of.window ? position + 1 - static_cast<unsigned>(a.of.window) : 0;
    const T *queries = static_cast<const T *>(a.of.q.p) + token * a.of.q.ld;
    const T *values = static_cast<const T *>(a.cache) + kv * d_v;
    T *out = static_cast<T *>(a.of.o.p) + token * a.of.o.ld;
    for (unsigned i = threadIdx.x; i < static_cast<unsigned>(a.of.q.dim) * HEADS; i += THREADS) {
        unsigned c = i / HEADS, h = i % HEADS;
        q[c][h] = h < heads ? load(queries + (first + h) * a.of.q.stride + c) * a.of.scale : 0.0f;
    }
    __syncthreads();
    share<HEADS, ITEMS> w = {{0}, {0}, {{{0}}}};
    MT_UNROLL(8)
    for (unsigned h = 0; h < HEADS; h++)
        w.max[h] = -INFINITY;
    MT_UNROLL(1)
    for (unsigned base = from + warp * KEYS; base <= position; base += WARPS * KEYS) {
        unsigned n = position + 1 - base < KEYS ? position + 1 - base : KEYS;
        float dot[EACH][HEADS] = {{0}};
        score_keys<T, N, HEADS>(dot, values_at[warp], a, q, doc, kv, base, n);
        soften(&w, dot);
        MT_UNROLL(2)
        for (unsigned j = 0; j < EACH; j++) {
            MT_UNROLL(8)
            for (unsigned h = 0; h < HEADS; h++)
                s[warp][j * WARP + lane][h] = dot[j][h];
        }
        __syncwarp();
        MT_UNROLL(4)
        for (unsigned i = 0; i < ITEMS; i++) {
            unsigned c = i * ROW + lane * COLUMNS;
            if (c < d_v)
                add_values<T, N, HEADS>(w.acc[i], s[warp], values_at[warp], n, values + c, d_v - c);
        }
        __syncwarp();
    }
    merge(&all, w);
    MT_UNROLL(1)
    for (unsigned i = threadIdx.x; i < heads * d_v; i += THREADS) {
        unsigned h = i / d_v, c = i % d_v, at = c / ROW * ROW + c % COLUMNS * WARP + c % ROW / COLUMNS;
        store(out + (first + h) * a.of.o.stride + c, all.total[at][h] / all.whole_sum[h]);
    }
    if (threadIdx.x < heads)
        a.of.lse[(first + threadIdx.x) * a.of.n + token] =
            all.whole_max[threadIdx.x] + logf(all.whole_sum[threadIdx.x]);
}

template <typename T, int N, unsigned HEADS, unsigned ITEMS>
static cudaError_t attend(const struct mt_attention_cached &a, cudaStream_t stream)
{
    size_t parts = ceil_div(a.of.q.n / a.of.k.n, HEADS);
    dim3 grid(static_cast<unsigned>(a.of.n), static_cast<unsigned>(a.of.k.n * parts));
    return MT_LAUNCH((attend_rows<T, N, HEADS, ITEMS>), grid, THREADS, 0, stream, a);
}

cudaError_t mt_cuda_attention_cached(const struct mt_attention_cached *args, cudaStream_t stream)
{
    if (args->of.q.dim > WIDEST || args->of.v.dim > WIDEST)
        return cudaErrorInvalidValue;
    mt_attention_cached a = *args; /* kernels read no memory of the host */
    a.of.cu_seqlens_host = a.past_host = a.table_host = nullptr;
    cudaError_t rc = MT_LAUNCH_OF(a.of.dtype, append_rows, grid_of(a.of.n), THREADS, 0, stream, a);
    return rc != cudaSuccess ? rc : for_dtype(a.of.dtype, [=](auto x) {
        using T = decltype(x);
        bool whole = aligned_to(a.cache, 16) && a.of.k.dim % VEC<T> == 0 && a.of.v.dim % VEC<T> == 0;
        return !whole                          ? attend<T, 1, 4, 4>(a, stream)
               : a.of.v.dim > ROW              ? attend<T, VEC<T>, 4, 4>(a, stream)
               : a.of.q.n / a.of.k.n > 4       ? attend<T, VEC<T>, 8, 1>(a, stream)
                                               : attend<T, VEC<T>, 4, 1>(a, stream);
    });
}
