/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Causal attention with tensor cores and an online softmax (Dao 2023, "FlashAttention-2"), over packed documents.
 *   forward   a block has some queries of a head and goes over their keys: O and the log-sum-exps
 *   delta     rowsum(dO O)
 *   dkv       a block has some keys of a key head and goes over the heads of its group and their queries, in order:
 *             S' and dP' have keys as rows, so P' and dS' are fragments of dV += P' dO and dK += dS' Q as they are
 *   dq        a block has some queries of a head and goes over their keys once more
 * The two passes of backward make seven products instead of five and need neither atomics nor sums in memory. Each
 * block takes a tile from a list in the workspace, the longest documents' and the costliest of a document first.
 * Bound by tensor cores: 4 d flops a score forward, 14 d backward. Bytes: each tile of keys once per tile of queries.
 */
#include "flash.h"
#include "mma.cuh"
#include "reduce.cuh"
#include "scalar.cuh"
#include "workspace.h"

static constexpr float LOG2E = 1.44269504f;

/* Rows [row0, ...) of the document [start, start + len). */
struct flash_tile {
    int start, len, row0, unused;
};

struct flash_heads {
    uint16_t *p;
    int ld, stride;
};

struct flash_args {
    flash_heads q, k, v, o, d_o, dq, dk, dv;
    float *lse, *delta;
    const flash_tile *tiles;
    int n, n_q, n_kv, window;
    float scale;
};

static __device__ __forceinline__ uint16_t *rows_from(const flash_heads &h, int row, int head)
{
    return h.p + static_cast<size_t>(row) * static_cast<unsigned>(h.ld) +
           static_cast<size_t>(head) * static_cast<unsigned>(h.stride);
}

static __device__ __forceinline__ bool sees(int query, int key, int len, int window)
{
    return key <= query && query < len && (!window || query - key < window);
}

/* The documents' tiles of `rows` rows; a warp a document. Longer documents come first, equal ones in order; of a
 * document the last tile first (queries, which see more keys), or the first (keys). */
static __global__ void __launch_bounds__(WARP)
    list_tiles(const int32_t *cu, int n_docs, int rows, bool last_first, flash_tile *tiles)
{
    int doc = static_cast<int>(blockIdx.x), start = cu[doc], len = cu[doc + 1] - start, before = 0;
    int lane = static_cast<int>(threadIdx.x);
    for (int i = lane; i < n_docs; i += WARP) {
        int other = cu[i + 1] - cu[i];
        if (other > len || (other == len && i < doc))
            before += (other + rows - 1) / rows;
    }
    for (int d = WARP / 2; d; d /= 2)
        before += __shfl_xor_sync(0xffffffffu, before, d);
    int n = (len + rows - 1) / rows;
    for (int i = lane; i < n; i += WARP)
        tiles[before + i] = {start, len, (last_first ? n - 1 - i : i) * rows, 0};
}

/* The first tile of BN keys that queries from q0 on see. */
template <int BN> static __device__ __forceinline__ int first_keys(int q0, int window)
{
    return window && q0 + 1 > window ? (q0 + 1 - window) / BN : 0;
}

/* Whether some query of BM from q0 on does not see some key of BN from k0 on, which is then masked. */
template <int BM, int BN> static __device__ __forceinline__ bool at_edge(int q0, int k0, int len, int window)
{
    return k0 + BN > q0 + 1 || q0 + BM > len || (window && k0 <= q0 + BM - 1 - window);
}

/* Two rows of a warp's sums of D columns, times `by`, as bf16. */
template <int D>
static __device__ __forceinline__ void store_sums(const flash_heads &h, const flash_tile &t, int row, int head,
                                                  const float (&sum)[D / 8][4], float by0, float by1)
{
    int lane = static_cast<int>(threadIdx.x) % WARP;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int at = row + lane / 4 + 8 * half;
        if (at >= t.len)
            continue;
        uint32_t *to = reinterpret_cast<uint32_t *>(rows_from(h, t.start + at, head));
        float by = half ? by1 : by0;
#pragma unroll
        for (int j = 0; j < D / 8; j++)
            to[4 * j + lane % 4] = rounded_pair(sum[j][2 * half] * by, sum[j][2 * half + 1] * by);
    }
}

/* Weights under the rows' new maxima; what was summed before shrinks. f: score to log2. */
template <int DV, int NT>
static __device__ __forceinline__ void soften(float (&s)[NT][4], float (&o)[DV / 8][4], float (&max)[2],
                                              float (&sum)[2], float f)
{
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float m = max[half], part = 0;
#pragma unroll
        for (int j = 0; j < NT; j++)
            m = fmaxf(m, fmaxf(s[j][2 * half], s[j][2 * half + 1]));
        m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 1));
        m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 2));
        float base = m == -INFINITY ? 0.0f : m * f, shrink = exp2_approx(fmaf(max[half], f, -base));
#pragma unroll
        for (int j = 0; j < NT; j++)
#pragma unroll
            for (int e = 2 * half; e < 2 * half + 2; e++) {
                s[j][e] = exp2_approx(fmaf(s[j][e], f, -base));
                part += s[j][e];
            }
#pragma unroll
        for (int j = 0; j < DV / 8; j++) {
            o[j][2 * half] *= shrink;
            o[j][2 * half + 1] *= shrink;
        }
        sum[half] = fmaf(sum[half], shrink, part);
        max[half] = m;
    }
}

template <int DQ, int DV, int BM, int BN> static __global__ void __launch_bounds__(BM * 2) flash_forward(flash_args a)
{
    constexpr int T = BM * 2, NT = BN / 8;
    MT_SHARED_DYNAMIC(uint16_t, mem);
    shared_address sq = address_in_shared(mem), sk = sq + TILE_BYTES<BM, DQ>, sv = sk + TILE_BYTES<BN, DQ>;
    flash_tile tl = a.tiles[blockIdx.x / a.n_q];
    int h = static_cast<int>(blockIdx.x) % a.n_q, kv = h / (a.n_q / a.n_kv), q0 = tl.row0, len = tl.len;
    int lane = static_cast<int>(threadIdx.x) % WARP, r0 = static_cast<int>(threadIdx.x) / WARP * 16;
    int end = min(q0 + BM, len), first = first_keys<BN>(q0, a.window), tiles = (end + BN - 1) / BN;
    fetch<BM, DQ, T>(sq, rows_from(a.q, tl.start + q0, h), a.q.ld, len - q0);
    fetch<BN, DQ, T>(sk, rows_from(a.k, tl.start + first * BN, kv), a.k.ld, len - first * BN);
    commit_copies();
    float o[DV / 8][4] = {}, max[2] = {-INFINITY, -INFINITY}, sum[2] = {}, f = a.scale * LOG2E;
    for (int t = first; t < tiles; t++) {
        wait_for_copies<0>();
        __syncthreads();
        fetch<BN, DV, T>(sv, rows_from(a.v, tl.start + t * BN, kv), a.v.ld, len - t * BN);
        commit_copies();
        float s[NT][4] = {};
        add_product<BM, BN, DQ, NT>(s, sq, r0, sk);
        wait_for_copies<0>();
        __syncthreads();
        if (t + 1 < tiles)
            fetch<BN, DQ, T>(sk, rows_from(a.k, tl.start + (t + 1) * BN, kv), a.k.ld, len - (t + 1) * BN);
        commit_copies();
        if (at_edge<BM, BN>(q0, t * BN, len, a.window)) {
#pragma unroll
            for (int j = 0; j < NT; j++)
#pragma unroll
                for (int e = 0; e < 4; e++)
                    if (!sees(q0 + r0 + lane / 4 + e / 2 * 8, t * BN + 8 * j + lane % 4 * 2 + e % 2, len, a.window))
                        s[j][e] = -INFINITY;
        }
        soften<DV, NT>(s, o, max, sum, f);
        add_weighted<BN, DV, NT>(o, s, sv);
    }
    wait_for_copies<0>();
#pragma unroll
    for (int half = 0; half < 2; half++) {
        sum[half] += __shfl_xor_sync(0xffffffffu, sum[half], 1);
        sum[half] += __shfl_xor_sync(0xffffffffu, sum[half], 2);
        int row = q0 + r0 + lane / 4 + 8 * half;
        if (row < len && lane % 4 == 0)
            a.lse[static_cast<size_t>(h) * a.n + tl.start + row] = max[half] * a.scale + logf(sum[half]);
    }
    store_sums<DV>(a.o, tl, q0 + r0, h, o, 1.0f / sum[0], 1.0f / sum[1]);
}

/* ds of a weight p. A query's lone key has the weight 1, but for sinks: then ds is exactly zero. */
static __device__ __forceinline__ float score_gradient(float p, float dp, float delta, bool lone)
{
    const float rounding = 1e-6f; /* of exp2_approx() near 1 */
    bool exact = lone & (fabsf(p - 1) < rounding); /* not &&: no branch */
    float w = exact ? 1 : p;
    return w * (dp - (lone ? w * dp : delta));
}

/* A warp a row of a head. */
static __global__ void __launch_bounds__(256) flash_delta(flash_args a, int dim)
{
    int h = static_cast<int>(blockIdx.y);
    int lane = static_cast<int>(threadIdx.x) % WARP, row = static_cast<int>(blockIdx.x * 8 + threadIdx.x / WARP);
    if (row >= a.n)
        return;
    const uint16_t *o = rows_from(a.o, row, h), *d_o = rows_from(a.d_o, row, h);
    float sum = 0;
    for (int i = lane; i < dim; i += WARP)
        sum = fmaf(__uint_as_float(static_cast<uint32_t>(o[i]) << 16),
                   __uint_as_float(static_cast<uint32_t>(d_o[i]) << 16), sum);
    sum = warp_sum(sum);
    if (lane == 0)
        a.delta[static_cast<size_t>(h) * a.n + row] = sum;
}

/* Columns of a tile: queries; rows: keys. */
template <int DQ, int DV, int BM, int BN> static __global__ void __launch_bounds__(BN * 2) flash_dkv(flash_args a)
{
    constexpr int T = BN * 2, NT = BM / 8, QB = TILE_BYTES<BM, DQ>, OB = TILE_BYTES<BM, DV>;
    constexpr int STAGE = QB + OB + 2 * BM * 4;
    MT_SHARED_DYNAMIC(char, mem);
    shared_address sk = address_in_shared(mem), sv = sk + TILE_BYTES<BN, DQ>;
    constexpr int STAGES = TILE_BYTES<BN, DQ> + TILE_BYTES<BN, DV>;
    flash_tile tl = a.tiles[blockIdx.x / a.n_kv];
    int kv = static_cast<int>(blockIdx.x) % a.n_kv, k0 = tl.row0, len = tl.len, group = a.n_q / a.n_kv;
    int tid = static_cast<int>(threadIdx.x), lane = tid % WARP, r0 = tid / WARP * 16;
    fetch<BN, DQ, T>(sk, rows_from(a.k, tl.start + k0, kv), a.k.ld, len - k0);
    fetch<BN, DV, T>(sv, rows_from(a.v, tl.start + k0, kv), a.v.ld, len - k0);
    int from = k0 / BM, to = (len + BM - 1) / BM;
    if (a.window)
        to = min(to, (k0 + BN - 2 + a.window) / BM + 1);
    int per = to - from, all = per * group;
    auto load = [&](int i) {
        int h = kv * group + i / per, q0 = (from + i % per) * BM;
        shared_address s = sk + STAGES + (i & 1) * STAGE;
        fetch<BM, DQ, T>(s, rows_from(a.q, tl.start + q0, h), a.q.ld, len - q0);
        fetch<BM, DV, T>(s + QB, rows_from(a.d_o, tl.start + q0, h), a.d_o.ld, len - q0);
        if (tid < 2 * BM) {
            int r = q0 + tid % BM;
            const float *p = (tid < BM ? a.lse : a.delta) + static_cast<size_t>(h) * a.n + tl.start;
            copy_4_async(s + QB + OB + tid * 4, p + (r < len ? r : 0), r < len ? 4 : 0);
        }
    };
    load(0);
    commit_copies();
    float dk[DQ / 8][4] = {}, dv[DV / 8][4] = {}, f = a.scale * LOG2E;
    for (int i = 0; i < all; i++) {
        if (i + 1 < all)
            load(i + 1);
        commit_copies();
        wait_for_copies<1>();
        __syncthreads();
        shared_address s = sk + STAGES + (i & 1) * STAGE;
        const float *lse = reinterpret_cast<const float *>(mem + STAGES + (i & 1) * STAGE + QB + OB), *delta = lse + BM;
        int q0 = (from + i % per) * BM;
        float p[NT][4] = {}, g[NT][4] = {};
        add_product<BN, BM, DQ, NT>(p, sk, r0, s);
        bool edge = at_edge<BM, BN>(q0, k0, len, a.window);
#pragma unroll
        for (int j = 0; j < NT; j++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                int c = 8 * j + lane % 4 * 2 + e % 2;
                bool on = !edge || sees(q0 + c, k0 + r0 + lane / 4 + e / 2 * 8, len, a.window);
                p[j][e] = on ? exp2_approx(fmaf(lse[c], -LOG2E, p[j][e] * f)) : 0.0f;
            }
        add_weighted<BM, DV, NT>(dv, p, s + QB);
        add_product<BN, BM, DV, NT>(g, sv, r0, s + QB);
#pragma unroll
        for (int j = 0; j < NT; j++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                int c = 8 * j + lane % 4 * 2 + e % 2;
                g[j][e] = score_gradient(p[j][e], g[j][e], delta[c], a.window == 1 || q0 + c == 0);
            }
        add_weighted<BM, DQ, NT>(dk, g, s);
        __syncthreads();
    }
    wait_for_copies<0>();
    store_sums<DQ>(a.dk, tl, k0 + r0, kv, dk, a.scale, a.scale);
    store_sums<DV>(a.dv, tl, k0 + r0, kv, dv, 1, 1);
}

template <int DQ, int DV, int BM, int BN> static __global__ void __launch_bounds__(BM * 2) flash_dq(flash_args a)
{
    constexpr int T = BM * 2, NT = BN / 8, KB = TILE_BYTES<BN, DQ>, STAGE = KB + TILE_BYTES<BN, DV>;
    MT_SHARED_DYNAMIC(uint16_t, mem);
    shared_address sq = address_in_shared(mem), so = sq + TILE_BYTES<BM, DQ>, st = so + TILE_BYTES<BM, DV>;
    flash_tile tl = a.tiles[blockIdx.x / a.n_q];
    int h = static_cast<int>(blockIdx.x) % a.n_q, kv = h / (a.n_q / a.n_kv), q0 = tl.row0, len = tl.len;
    int lane = static_cast<int>(threadIdx.x) % WARP, r0 = static_cast<int>(threadIdx.x) / WARP * 16;
    int end = min(q0 + BM, len), first = first_keys<BN>(q0, a.window), tiles = (end + BN - 1) / BN;
    fetch<BM, DQ, T>(sq, rows_from(a.q, tl.start + q0, h), a.q.ld, len - q0);
    fetch<BM, DV, T>(so, rows_from(a.d_o, tl.start + q0, h), a.d_o.ld, len - q0);
    auto load = [&](int t) {
        shared_address s = st + (t & 1) * STAGE;
        fetch<BN, DQ, T>(s, rows_from(a.k, tl.start + t * BN, kv), a.k.ld, len - t * BN);
        fetch<BN, DV, T>(s + KB, rows_from(a.v, tl.start + t * BN, kv), a.v.ld, len - t * BN);
    };
    load(first);
    commit_copies();
    float lse[2], delta[2], dq[DQ / 8][4] = {}, f = a.scale * LOG2E;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int row = q0 + r0 + lane / 4 + 8 * half;
        size_t at = static_cast<size_t>(h) * a.n + tl.start + row;
        lse[half] = row < len ? a.lse[at] * LOG2E : 0.0f;
        delta[half] = row < len ? a.delta[at] : 0.0f;
    }
    for (int t = first; t < tiles; t++) {
        if (t + 1 < tiles)
            load(t + 1);
        commit_copies();
        wait_for_copies<1>();
        __syncthreads();
        shared_address s = st + (t & 1) * STAGE;
        float p[NT][4] = {}, g[NT][4] = {};
        add_product<BM, BN, DQ, NT>(p, sq, r0, s);
        add_product<BM, BN, DV, NT>(g, so, r0, s + KB);
        bool edge = at_edge<BM, BN>(q0, t * BN, len, a.window);
#pragma unroll
        for (int j = 0; j < NT; j++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                int query = q0 + r0 + lane / 4 + e / 2 * 8, key = t * BN + 8 * j + lane % 4 * 2 + e % 2;
                bool on = !edge || sees(query, key, len, a.window);
                float w = on ? exp2_approx(fmaf(p[j][e], f, -lse[e / 2])) : 0.0f;
                g[j][e] = score_gradient(w, g[j][e], delta[e / 2], a.window == 1 || query == 0);
            }
        add_weighted<BN, DQ, NT>(dq, g, s);
        __syncthreads();
    }
    wait_for_copies<0>();
    store_sums<DQ>(a.dq, tl, q0 + r0, h, dq, a.scale, a.scale);
}

/* --- on the host ------------------------------------------------------------------------------------------- */

static bool heads_fit(const struct mt_heads *h)
{
    return reinterpret_cast<uintptr_t>(h->p) % 16 == 0 && h->ld % 8 == 0 && h->ld <= INT_MAX / 128 &&
           h->stride % 8 == 0 && h->stride <= INT_MAX / 128;
}

bool mt_cuda_flash_suits(const struct mt_attention *a)
{
    return mt_cuda_flash_takes(a) && a->scale > 0 && heads_fit(&a->q) && heads_fit(&a->k) && heads_fit(&a->v) &&
           heads_fit(&a->o) && reinterpret_cast<uintptr_t>(a->workspace) % 16 == 0;
}

bool mt_cuda_flash_suits_bwd(const struct mt_attention_bwd *b)
{
    return mt_cuda_flash_suits(&b->fwd) && heads_fit(&b->d_o) && heads_fit(&b->dq) && heads_fit(&b->dk) &&
           heads_fit(&b->dv);
}

static flash_heads heads_of(const struct mt_heads &h)
{
    return {static_cast<uint16_t *>(h.p), static_cast<int>(h.ld), static_cast<int>(h.stride)};
}

static flash_args args_of(const struct mt_attention *a)
{
    struct mt_cuda_flash_buffers r = mt_cuda_flash_buffers_of(a);
    flash_args f = {};
    f.q = heads_of(a->q);
    f.k = heads_of(a->k);
    f.v = heads_of(a->v);
    f.o = heads_of(a->o);
    f.lse = a->lse;
    f.delta = r.delta;
    f.tiles = static_cast<const flash_tile *>(r.tiles);
    f.n = static_cast<int>(a->n);
    f.n_q = static_cast<int>(a->q.n);
    f.n_kv = static_cast<int>(a->k.n);
    f.window = a->window < a->n ? static_cast<int>(a->window) : 0;
    f.scale = a->scale;
    return f;
}

/* Lists the tiles, then runs the kernel on them: `heads` blocks a tile, two threads a row of it. */
static cudaError_t run(void (*kernel)(flash_args), const struct mt_attention *a, const flash_args &f, int rows,
                       bool queries, int shared, cudaStream_t stream)
{
    size_t tiles = 0, heads = queries ? a->q.n : a->k.n;
    for (size_t i = 0; i < a->n_docs; i++)
        tiles += ceil_div(static_cast<size_t>(a->cu_seqlens_host[i + 1] - a->cu_seqlens_host[i]),
                          static_cast<size_t>(rows));
    cudaError_t rc = MT_LAUNCH(list_tiles, grid_of(a->n_docs), WARP, 0, stream, a->cu_seqlens,
                               static_cast<int>(a->n_docs), rows, queries, const_cast<flash_tile *>(f.tiles));
    if (rc == cudaSuccess)
        rc = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
    return rc == cudaSuccess ? MT_LAUNCH(kernel, grid_of(tiles * heads), 2 * rows, shared, stream, f) : rc;
}

/* FM x FN: queries and keys of a tile in forward; KM x KN in dkv; QM x QN in dq. */
template <int DQ, int DV, int FM, int FN, int KM, int KN, int QM, int QN> struct flash
{
    static cudaError_t forward(const struct mt_attention *a, const flash_args &f, cudaStream_t stream)
    {
        constexpr int bytes = TILE_BYTES<FM, DQ> + TILE_BYTES<FN, DQ> + TILE_BYTES<FN, DV>;
        return run(flash_forward<DQ, DV, FM, FN>, a, f, FM, true, bytes, stream);
    }
    static cudaError_t backward(const struct mt_attention *a, const flash_args &f, cudaStream_t stream)
    {
        constexpr int keys = TILE_BYTES<KN, DQ> + TILE_BYTES<KN, DV> +
                             2 * (TILE_BYTES<KM, DQ> + TILE_BYTES<KM, DV> + 2 * KM * 4);
        constexpr int queries = TILE_BYTES<QM, DQ> + TILE_BYTES<QM, DV> + 2 * (TILE_BYTES<QN, DQ> + TILE_BYTES<QN, DV>);
        static_assert(keys <= 99 << 10 && queries <= 99 << 10, "the shared memory of sm_86");
        dim3 grid(static_cast<unsigned>(ceil_div(a->n, 8)), static_cast<unsigned>(a->q.n));
        cudaError_t rc = MT_LAUNCH(flash_delta, grid, 256, 0, stream, f, DV);
        if (rc == cudaSuccess)
            rc = run(flash_dkv<DQ, DV, KM, KN>, a, f, KN, false, keys, stream);
        return rc == cudaSuccess ? run(flash_dq<DQ, DV, QM, QN>, a, f, QM, true, queries, stream) : rc;
    }
};
using heads_of_64 = flash<64, 64, 128, 64, 64, 128, 128, 64>;
using heads_of_128 = flash<128, 128, 128, 32, 16, 128, 128, 32>;

cudaError_t mt_cuda_flash(const struct mt_attention *a, cudaStream_t stream)
{
    flash_args f = args_of(a);
    return a->q.dim == 64 ? heads_of_64::forward(a, f, stream) : heads_of_128::forward(a, f, stream);
}

cudaError_t mt_cuda_flash_bwd(const struct mt_attention_bwd *b, cudaStream_t stream)
{
    const struct mt_attention *a = &b->fwd;
    flash_args f = args_of(a);
    f.d_o = heads_of(b->d_o);
    f.dq = heads_of(b->dq);
    f.dk = heads_of(b->dk);
    f.dv = heads_of(b->dv);
    return a->q.dim == 64 ? heads_of_64::backward(a, f, stream) : heads_of_128::backward(a, f, stream);
}
