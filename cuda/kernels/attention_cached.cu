/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Attention of new tokens over blocks of keys and values (Kwon et al. 2023), after the new ones have been added there.
 * A block of threads has a token and up to HEADS query heads of a key head. It goes over the keys that the token sees,
 * CHUNK at a time: a thread has a key and all heads for the scores, a warp a head for the softmax, which is rescaled as
 * the largest score grows (Milakov and Gimelshein 2018), and a thread some dimensions of all heads for the sums. Of a
 * key and its value s bytes an element are read once for HEADS heads: with one new token a document that is the bound.
 */
#include "launch.cuh"
#include "reduce.cuh"
#include "scalar.cuh"
#include "workspace.h"

static constexpr unsigned CHUNK = 128, HEADS = 8, WIDEST = 512, ITEMS = WIDEST / CHUNK;

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

/* The place of a key head's keys at a position; its values are `values` further on, with rows of their own. */
struct place {
    size_t block, row;
};

static __device__ __forceinline__ place place_of(const mt_attention_cached &a, size_t doc, size_t position)
{
    size_t keys = a.of.k.n * a.of.k.dim, values = a.of.v.n * a.of.v.dim;
    size_t at = static_cast<size_t>(a.table[doc * a.table_ld + position / a.block % a.table_ld]);
    return {at * a.block * (keys + values), position % a.block};
}

template <typename T> static __global__ void __launch_bounds__(CHUNK) append_rows(mt_attention_cached a)
{
    size_t keys = a.of.k.n * a.of.k.dim, values = a.of.v.n * a.of.v.dim;
    size_t token = blockIdx.x, doc = document_of(a, token);
    size_t position = static_cast<size_t>(a.past[doc]) + token - static_cast<size_t>(a.of.cu_seqlens[doc]);
    place at = place_of(a, doc, position);
    T *cache = static_cast<T *>(a.cache) + at.block;
    const T *k = static_cast<const T *>(a.of.k.p) + token * a.of.k.ld;
    const T *v = static_cast<const T *>(a.of.v.p) + token * a.of.v.ld;
    for (size_t i = threadIdx.x; i < keys; i += CHUNK)
        cache[at.row * keys + i] = k[i / a.of.k.dim * a.of.k.stride + i % a.of.k.dim];
    for (size_t i = threadIdx.x; i < values; i += CHUNK)
        cache[a.block * keys + at.row * values + i] = v[i / a.of.v.dim * a.of.v.stride + i % a.of.v.dim];
}

/* What a warp does with a head's scores of a chunk: from scores to weights, against the largest score so far. */
static __device__ void soften(float *s, float *max, float *sum, float *rescale)
{
    unsigned lane = threadIdx.x % WARP;
    float most = *max, part = 0;
    for (unsigned i = lane; i < CHUNK; i += WARP)
        most = larger(most, s[i]);
    most = warp_max(most);
    for (unsigned i = lane; i < CHUNK; i += WARP) {
        s[i] = expf(s[i] - most);
        part += s[i];
    }
    part = warp_sum(part);
    __syncwarp();
    if (lane == 0) {
        *rescale = expf(*max - most);
        *sum = *sum * *rescale + part;
        *max = most;
    }
}

template <typename T> static __global__ void __launch_bounds__(CHUNK, 4) attend_rows(mt_attention_cached a)
{
    __shared__ float q[HEADS][WIDEST], s[HEADS][CHUNK], max[HEADS], sum[HEADS], rescale[HEADS];
    size_t token = blockIdx.x, doc = document_of(a, token);
    size_t group = a.of.q.n / a.of.k.n, parts = (group + HEADS - 1) / HEADS;
    size_t kv = blockIdx.y / parts, first = kv * group + blockIdx.y % parts * HEADS, d = a.of.q.dim, d_v = a.of.v.dim;
    size_t position = static_cast<size_t>(a.past[doc]) + token - static_cast<size_t>(a.of.cu_seqlens[doc]);
    size_t from = a.of.window && position + 1 > a.of.window ? position + 1 - a.of.window : 0;
    unsigned heads = static_cast<unsigned>(first + HEADS < (kv + 1) * group ? HEADS : (kv + 1) * group - first);
    size_t keys = a.of.k.n * d, values = a.of.v.n * d_v;
    const T *queries = static_cast<const T *>(a.of.q.p) + token * a.of.q.ld;
    T *out = static_cast<T *>(a.of.o.p) + token * a.of.o.ld;
    float acc[HEADS][ITEMS] = {{0}};
    for (size_t i = threadIdx.x; i < heads * d; i += CHUNK)
        q[i / d][i % d] = load(queries + (first + i / d) * a.of.q.stride + i % d) * a.of.scale;
    if (threadIdx.x < HEADS) {
        max[threadIdx.x] = -INFINITY;
        sum[threadIdx.x] = rescale[threadIdx.x] = 0; /* also of heads that are not there */
    }
    __syncthreads();
    for (size_t base = from; base <= position; base += CHUNK) {
        size_t key = base + threadIdx.x;
        float dot[HEADS] = {0};
        if (key <= position) {
            place at = place_of(a, doc, key);
            const T *k = static_cast<const T *>(a.cache) + at.block + at.row * keys + kv * d;
            for (size_t c = 0; c < d; c++) {
                float x = load(k + c);
                MT_UNROLL(HEADS)
                for (unsigned h = 0; h < HEADS; h++)
                    if (h < heads)
                        dot[h] = fmaf(q[h][c], x, dot[h]);
            }
        }
        MT_UNROLL(HEADS)
        for (unsigned h = 0; h < HEADS; h++)
            if (h < heads) {
                float x = a.of.cap > 0 ? a.of.cap * tanhf(dot[h] / a.of.cap) : dot[h];
                s[h][threadIdx.x] = key <= position ? x : -INFINITY;
            }
        __syncthreads();
        for (unsigned h = threadIdx.x / WARP; h < heads; h += CHUNK / WARP)
            soften(s[h], &max[h], &sum[h], &rescale[h]);
        __syncthreads();
        unsigned n = static_cast<unsigned>(position + 1 - base < CHUNK ? position + 1 - base : CHUNK);
        MT_UNROLL(ITEMS)
        for (unsigned i = 0; i < ITEMS; i++) {
            size_t c = threadIdx.x + i * CHUNK;
            if (c >= d_v)
                continue;
            MT_UNROLL(HEADS)
            for (unsigned h = 0; h < HEADS; h++)
                acc[h][i] *= rescale[h];
            for (unsigned k = 0; k < n; k++) {
                place at = place_of(a, doc, base + k);
                const T *row = static_cast<const T *>(a.cache) + at.block + a.block * keys + at.row * values;
                float x = load(row + kv * d_v + c);
                MT_UNROLL(HEADS)
                for (unsigned h = 0; h < HEADS; h++)
                    if (h < heads)
                        acc[h][i] = fmaf(s[h][k], x, acc[h][i]);
            }
        }
        __syncthreads();
    }
    MT_UNROLL(ITEMS)
    for (unsigned i = 0; i < ITEMS; i++) {
        size_t c = threadIdx.x + i * CHUNK;
        MT_UNROLL(HEADS)
        for (unsigned h = 0; h < HEADS; h++)
            if (c < d_v && h < heads)
                store(out + (first + h) * a.of.o.stride + c, acc[h][i] / sum[h]);
    }
    if (threadIdx.x < heads)
        a.of.lse[(first + threadIdx.x) * a.of.n + token] = max[threadIdx.x] + logf(sum[threadIdx.x]);
}

cudaError_t mt_cuda_attention_cached(const struct mt_attention_cached *a, cudaStream_t stream)
{
    size_t group = a->of.q.n / a->of.k.n, parts = (group + HEADS - 1) / HEADS;
    if (a->of.q.dim > WIDEST || a->of.v.dim > WIDEST)
        return cudaErrorInvalidValue;
    mt_attention_cached device = *a; /* kernels read no memory of the host */
    device.of.cu_seqlens_host = device.past_host = device.table_host = nullptr;
    cudaError_t rc = MT_LAUNCH_OF(a->of.dtype, append_rows, grid_of(a->of.n), CHUNK, 0, stream, device);
    dim3 grid(static_cast<unsigned>(a->of.n), static_cast<unsigned>(a->of.k.n * parts));
    return rc == cudaSuccess ? MT_LAUNCH_OF(a->of.dtype, attend_rows, grid, CHUNK, 0, stream, device) : rc;
}
