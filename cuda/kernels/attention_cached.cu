/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Attention of new tokens over blocks of keys and values (Kwon et al. 2023), after the new ones have been added there.
 * A block of threads has a token and up to HEADS query heads of a key head. It goes over the keys that the token sees,
 * CHUNK at a time: a thread has a key and all heads for the scores, a warp a head for the softmax, which is rescaled as
 * the largest score grows (Milakov and Gimelshein 2018), and a thread some dimensions of all heads for the sums. Of a
 * key and its value s bytes an element are read once for HEADS heads: with one new token a document that is the bound.
 * So keys are read 16 bytes at a time, values of AHEAD keys before any is used, and what heads multiply lies side by
 * side in shared memory, for one access to four of them.
 */
#include "launch.cuh"
#include "reduce.cuh"
#include "scalar.cuh"
#include "workspace.h"

static constexpr unsigned CHUNK = 128, WIDEST = 512, ITEMS = WIDEST / CHUNK, AHEAD = 8;
/* Floats from a key's scores to the next's: whole accesses, of which the same head's are in eight banks. */
template <unsigned HEADS> static constexpr unsigned LINE = HEADS + 4;

/* The document of a new token. */
static __device__ size_t document_of(const mt_attention_cached &a, size_t token)
{
    size_t lo = 0, hi = a.of.n_docs;
    while (hi - lo > 1) {
        size_t mid = (lo + hi) / 2;
        if (static_cast<size_t>(a.of.cu_seqlens[mid]) <= token)
            lo = mid;
        else
            hi = mid;
    }
    return lo;
}

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
    for (unsigned i = threadIdx.x; i < n; i += CHUNK)
        to[i] = x[i / dim * from.stride + i % dim];
}

template <typename T> static __global__ void __launch_bounds__(CHUNK) append_rows(mt_attention_cached a)
{
    size_t token = blockIdx.x, doc = document_of(a, token);
    place at = place_of(a, doc, position_of(a, doc, token));
    append(static_cast<T *>(a.cache) + at.keys, a.of.k, token);
    append(static_cast<T *>(a.cache) + at.values, a.of.v, token);
}

/* The products of a key, N elements at a time, and the queries of all heads. */
template <typename T, int N, unsigned HEADS>
static __device__ __forceinline__ void score(float (&dot)[HEADS], const float (&q)[WIDEST][HEADS], const T *key,
                                             unsigned d)
{
    MT_UNROLL(2)
    for (unsigned c = 0; c < d; c += N) {
        float x[N];
        load_n<T, N>(key + c, x);
        MT_UNROLL(8)
        for (int i = 0; i < N; i++) {
            MT_UNROLL(8)
            for (unsigned h = 0; h < HEADS; h++)
                dot[h] = fmaf(q[c + i][h], x[i], dot[h]);
        }
    }
}

/* What a warp does with a head's scores of a chunk: from scores to weights, against the largest score so far. */
template <unsigned HEADS>
static __device__ void soften(float (*s)[LINE<HEADS>], unsigned head, float *max, float *sum, float *rescale)
{
    unsigned lane = threadIdx.x % WARP;
    float most = *max, part = 0;
    for (unsigned i = lane; i < CHUNK; i += WARP)
        most = larger(most, s[i][head]);
    most = warp_max(most);
    for (unsigned i = lane; i < CHUNK; i += WARP) {
        s[i][head] = expf(s[i][head] - most);
        part += s[i][head];
    }
    part = warp_sum(part);
    __syncwarp();
    if (lane == 0) {
        *rescale = expf(*max - most);
        *sum = *sum * *rescale + part;
        *max = most;
    }
}

template <unsigned HEADS>
static __device__ __forceinline__ void add_value(float (&acc)[HEADS], const float (&s)[LINE<HEADS>], float x)
{
    MT_UNROLL(8)
    for (unsigned h = 0; h < HEADS; h++)
        acc[h] = fmaf(s[h], x, acc[h]);
}

/* Adds a column of the values of n keys, in their order. */
template <typename T, unsigned HEADS>
static __device__ __forceinline__ void add_values(float (&acc)[HEADS], const float (&s)[CHUNK][LINE<HEADS>],
                                                  const size_t (&at)[CHUNK], unsigned n, const T *column)
{
    unsigned k = 0;
    MT_UNROLL(1)
    for (; k + AHEAD <= n; k += AHEAD) {
        float x[AHEAD];
        MT_UNROLL(AHEAD)
        for (unsigned i = 0; i < AHEAD; i++)
            x[i] = load(column + at[k + i]);
        MT_UNROLL(AHEAD)
        for (unsigned i = 0; i < AHEAD; i++)
            add_value<HEADS>(acc, s[k + i], x[i]);
    }
    MT_UNROLL(1)
    for (; k < n; k++)
        add_value<HEADS>(acc, s[k], load(column + at[k]));
}

/* Of fewer heads than HEADS the others' queries are zeros. */
template <typename T, int N, unsigned HEADS>
static __global__ void __launch_bounds__(CHUNK, HEADS > 4 || sizeof(T) > 2 ? 4 : 5) attend_rows(mt_attention_cached a)
{
    __shared__ __align__(16) float q[WIDEST][HEADS], s[CHUNK][LINE<HEADS>];
    __shared__ float max[HEADS], sum[HEADS], rescale[HEADS];
    __shared__ size_t values_at[CHUNK];
    size_t token = blockIdx.x, doc = document_of(a, token), d_v = a.of.v.dim;
    size_t group = a.of.q.n / a.of.k.n, parts = ceil_div(group, HEADS);
    size_t kv = blockIdx.y / parts, first = kv * group + blockIdx.y % parts * HEADS;
    unsigned heads = static_cast<unsigned>(first + HEADS < (kv + 1) * group ? HEADS : (kv + 1) * group - first);
    unsigned position = position_of(a, doc, token), d = static_cast<unsigned>(a.of.q.dim);
    unsigned from = a.of.window && position + 1 > a.of.window ? position + 1 - static_cast<unsigned>(a.of.window) : 0;
    const T *queries = static_cast<const T *>(a.of.q.p) + token * a.of.q.ld;
    const T *cache = static_cast<const T *>(a.cache);
    T *out = static_cast<T *>(a.of.o.p) + token * a.of.o.ld;
    float acc[ITEMS][HEADS] = {{0}};
    for (unsigned i = threadIdx.x; i < d * HEADS; i += CHUNK) {
        unsigned c = i / HEADS, h = i % HEADS;
        q[c][h] = h < heads ? load(queries + (first + h) * a.of.q.stride + c) * a.of.scale : 0.0f;
    }
    if (threadIdx.x < HEADS) {
        max[threadIdx.x] = -INFINITY;
        sum[threadIdx.x] = rescale[threadIdx.x] = 0;
    }
    __syncthreads();
    for (unsigned base = from; base <= position; base += CHUNK) {
        unsigned key = base + threadIdx.x, n = position + 1 - base < CHUNK ? position + 1 - base : CHUNK;
        float dot[HEADS] = {0};
        if (key <= position) {
            place at = place_of(a, doc, key);
            values_at[threadIdx.x] = at.values;
            score<T, N>(dot, q, cache + at.keys + kv * d, d);
        }
        MT_UNROLL(8)
        for (unsigned h = 0; h < HEADS; h++) {
            float x = a.of.cap > 0 ? a.of.cap * tanhf(dot[h] / a.of.cap) : dot[h];
            s[threadIdx.x][h] = key <= position ? x : -INFINITY;
        }
        __syncthreads();
        for (unsigned h = threadIdx.x / WARP; h < heads; h += CHUNK / WARP)
            soften<HEADS>(s, h, &max[h], &sum[h], &rescale[h]);
        __syncthreads();
        MT_UNROLL(ITEMS)
        for (unsigned i = 0; i < ITEMS; i++) {
            size_t c = threadIdx.x + i * CHUNK;
            if (c >= d_v)
                continue;
            MT_UNROLL(8)
            for (unsigned h = 0; h < HEADS; h++)
                acc[i][h] *= rescale[h];
            add_values(acc[i], s, values_at, n, cache + kv * d_v + c);
        }
        __syncthreads();
    }
    MT_UNROLL(ITEMS)
    for (unsigned i = 0; i < ITEMS; i++) {
        size_t c = threadIdx.x + i * CHUNK;
        MT_UNROLL(8)
        for (unsigned h = 0; h < HEADS; h++)
            if (c < d_v && h < heads)
                store(out + (first + h) * a.of.o.stride + c, acc[i][h] / sum[h]);
    }
    if (threadIdx.x < heads)
        a.of.lse[(first + threadIdx.x) * a.of.n + token] = max[threadIdx.x] + logf(sum[threadIdx.x]);
}

template <typename T, int N, unsigned HEADS>
static cudaError_t attend(const struct mt_attention_cached &a, cudaStream_t stream)
{
    size_t parts = ceil_div(a.of.q.n / a.of.k.n, HEADS);
    dim3 grid(static_cast<unsigned>(a.of.n), static_cast<unsigned>(a.of.k.n * parts));
    return MT_LAUNCH((attend_rows<T, N, HEADS>), grid, CHUNK, 0, stream, a);
}

cudaError_t mt_cuda_attention_cached(const struct mt_attention_cached *args, cudaStream_t stream)
{
    if (args->of.q.dim > WIDEST || args->of.v.dim > WIDEST)
        return cudaErrorInvalidValue;
    mt_attention_cached a = *args; /* kernels read no memory of the host */
    a.of.cu_seqlens_host = a.past_host = a.table_host = nullptr;
    cudaError_t rc = MT_LAUNCH_OF(a.of.dtype, append_rows, grid_of(a.of.n), CHUNK, 0, stream, a);
    return rc != cudaSuccess ? rc : for_dtype(a.of.dtype, [=](auto x) {
        using T = decltype(x);
        bool whole = aligned_to(a.cache, 16) && a.of.k.dim % VEC<T> == 0 && mt_cache_block_elems(&a) % VEC<T> == 0;
        return for_widths<T>(whole, [=](auto v) {
            constexpr int n = decltype(v)::n;
            return n > 1 && a.of.q.n / a.of.k.n <= 4 ? attend<T, VEC<T>, 4>(a, stream) : attend<T, n, 8>(a, stream);
        });
    });
}
