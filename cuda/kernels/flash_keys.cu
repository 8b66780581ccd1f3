/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The gradients of keys and values in attention of our own (flash.cuh): a block has BN keys of a key head and goes over
 * the heads of its group and their queries, BM at a time, in order. S' and dP' have keys as rows, so P' and dS' are
 * fragments of dV += P' dO and dK += dS' Q as they are. Where both sums have too many registers, each has a launch of
 * its own, which makes S' once more. Bound by tensor cores: 4 (DQ + DV) flops a score; apart 6 DQ + 4 DV.
 */
#include "flash.cuh"

enum flash_sums { SUM_KEYS = 1, SUM_VALUES = 2, SUM_BOTH = 3 };

/* Weights in place of products p, gradients of scores in place of g (not for SUM_VALUES); delta lies behind lse. */
template <bool CAP, int SUMS, int NT>
static __device__ __forceinline__ void weigh(float (&p)[NT][4], float (&g)[NT][4], const flash_args &a,
                                             const float *lse, const flash_place &at)
{
    int lane = static_cast<int>(threadIdx.x) % WARP;
    float f = a.scale * LOG2E, slope = 1;
#pragma unroll
    for (int j = 0; j < NT; j++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            int c = 8 * j + lane % 4 * 2 + e % 2, key = at.key + e / 2 * 8;
            bool on = !at.edge || sees(at.query + c, key, at.len, a.window);
            float w = CAP ? capped_weight(p[j][e], lse[c], a, &slope)
                          : exp2_approx(fmaf(lse[c], -LOG2E, p[j][e] * f));
            p[j][e] = on ? w : 0.0f;
            if (SUMS & SUM_KEYS)
                g[j][e] = score_gradient(p[j][e], g[j][e], lse[8 * NT + c], a.window == 1 || at.query + c == 0,
                                         a.sinks);
            if (CAP && (SUMS & SUM_KEYS))
                g[j][e] *= slope;
        }
}

/* A warp's gradients of 16 keys from position `row` on; the document's first has the row `keys`. */
template <int D>
static __device__ __forceinline__ void store_keys(const flash_heads &h, const flash_added &to, const flash_tile &t,
                                                  int row, int keys, int head, const float (&sum)[D / 8][4], float by)
{
    if (to.p)
        add_sums<D>(h, to, t, row, keys, head, sum, by);
    else
        store_sums<D>(h, t, row, head, sum, by, by);
}

template <int DQ, int DV, int BM, int BN, int SUMS>
static __global__ void __launch_bounds__(BN * 2) flash_keys(flash_args a)
{
    constexpr int T = BN * 2, NT = BM / 8, QB = TILE_BYTES<BM, DQ>, OB = TILE_BYTES<BM, DV>;
    constexpr int STAGE = QB + OB + 2 * BM * 4;
    constexpr bool K = SUMS & SUM_KEYS, V = SUMS & SUM_VALUES;
    MT_SHARED_DYNAMIC(char, mem);
    shared_address sk = address_in_shared(mem), sv = sk + TILE_BYTES<BN, DQ>;
    constexpr int STAGES = TILE_BYTES<BN, DQ> + (K ? TILE_BYTES<BN, DV> : 0);
    flash_tile tl = a.tiles[blockIdx.x / a.n_kv];
    int kv = static_cast<int>(blockIdx.x) % a.n_kv, k0 = tl.row0, len = tl.len, group = a.n_q / a.n_kv;
    int keys = row_of_keys(a, tl), past = past_of(tl);
    int tid = static_cast<int>(threadIdx.x), lane = tid % WARP, r0 = tid / WARP * 16;
    fetch<BN, DQ, T>(sk, rows_from(a.k, keys + k0, kv), a.k.ld, len - k0);
    if (K)
        fetch<BN, DV, T>(sv, rows_from(a.v, keys + k0, kv), a.v.ld, len - k0);
    int from = max(k0 - past, 0) / BM, to = (len - past + BM - 1) / BM; /* tiles of queries */
    if (a.window)
        to = min(to, (k0 + BN - 2 + a.window - past) / BM + 1);
    int per = max(to - from, 0), all = per * group; /* none: no query sees these keys */
    auto load = [&](int i) {
        int h = kv * group + i / per, q0 = past + (from + i % per) * BM;
        shared_address s = sk + STAGES + (i & 1) * STAGE;
        fetch<BM, DQ, T>(s, rows_from(a.q, tl.start + q0, h), a.q.ld, len - q0);
        fetch<BM, DV, T>(s + QB, rows_from(a.d_o, tl.start + q0, h), a.d_o.ld, len - q0);
        if (tid < 2 * BM) {
            int r = q0 + tid % BM;
            const float *p = (tid < BM ? a.lse : a.delta) + static_cast<size_t>(h) * a.n + tl.start;
            copy_4_async(s + QB + OB + tid * 4, p + (r < len ? r : q0), r < len ? 4 : 0);
        }
    };
    if (all)
        load(0);
    commit_copies();
    float dk[K ? DQ / 8 : 1][4] = {}, dv[V ? DV / 8 : 1][4] = {};
    for (int i = 0; i < all; i++) {
        if (i + 1 < all)
            load(i + 1);
        commit_copies();
        wait_for_copies<1>();
        __syncthreads();
        shared_address s = sk + STAGES + (i & 1) * STAGE;
        const float *lse = reinterpret_cast<const float *>(mem + STAGES + (i & 1) * STAGE + QB + OB);
        int q0 = past + (from + i % per) * BM;
        float p[NT][4] = {}, g[NT][4] = {};
        add_product<BN, BM, DQ, NT>(p, sk, r0, s);
        if constexpr (K)
            add_product<BN, BM, DV, NT>(g, sv, r0, s + QB);
        flash_place at = {q0, k0 + r0 + lane / 4, len, at_edge<BM, BN>(q0, k0, len, a.window)};
        if (a.cap > 0)
            weigh<true, SUMS, NT>(p, g, a, lse, at);
        else
            weigh<false, SUMS, NT>(p, g, a, lse, at);
        if constexpr (V)
            add_weighted<BM, DV, NT>(dv, p, s + QB);
        if constexpr (K)
            add_weighted<BM, DQ, NT>(dk, g, s);
        __syncthreads();
    }
    wait_for_copies<0>();
    if constexpr (K)
        store_keys<DQ>(a.dk, a.dk_sum, tl, k0 + r0, keys, kv, dk, a.scale);
    if constexpr (V)
        store_keys<DV>(a.dv, a.dv_sum, tl, k0 + r0, keys, kv, dv, 1);
}

template <int DQ, int DV, int BM, int BN, int SUMS = SUM_BOTH> static constexpr flash_pass pass()
{
    constexpr int keys = TILE_BYTES<BN, DQ> + (SUMS & SUM_KEYS ? TILE_BYTES<BN, DV> : 0);
    constexpr int bytes = keys + 2 * (TILE_BYTES<BM, DQ> + TILE_BYTES<BM, DV> + 2 * BM * 4);
    static_assert(bytes <= 99 << 10, "the shared memory of sm_86");
    return {flash_keys<DQ, DV, BM, BN, SUMS>, DQ, BN, bytes, false};
}

/* Of heads of 256 a pass for the gradients of keys and one for those of values, else one for both. */
static const flash_pass passes[] = {
    pass<64, 64, 64, 128>(),
    pass<96, 96, 32, 128>(),
    pass<128, 128, 16, 128>(),
    pass<192, 128, 16, 64>(),
    pass<256, 256, 16, 64, SUM_KEYS>(),
    pass<256, 256, 16, 128, SUM_VALUES>(),
};

cudaError_t mt_cuda_flash_keys(const struct mt_attention *a, const flash_args &f, cudaStream_t stream)
{
    return mt_cuda_flash_run(passes, sizeof(passes) / sizeof(*passes), a, f, stream);
}
