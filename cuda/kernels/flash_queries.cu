/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The gradient of queries in attention of our own (flash.cuh): a block has BM queries of a head and goes over their
 * keys, BN at a time, once more. Bound by tensor cores: 4 DQ + 2 DV flops a score.
 */
#include "flash.cuh"

/* Gradients of scores in place of g; p: products. lse, delta: of a thread's two rows. */
template <bool CAP, int NT>
static __device__ __forceinline__ void weigh(const float (&p)[NT][4], float (&g)[NT][4], const flash_args &a,
                                             const float (&lse)[2], const float (&delta)[2], const flash_place &at)
{
    int lane = static_cast<int>(threadIdx.x) % WARP;
    float f = a.scale * LOG2E, slope = 1;
#pragma unroll
    for (int j = 0; j < NT; j++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            int query = at.query + e / 2 * 8, key = at.key + 8 * j + lane % 4 * 2 + e % 2;
            bool on = !at.edge || sees(query, key, at.len, a.window);
            float w = CAP ? capped_weight(p[j][e], lse[e / 2], a, &slope)
                          : exp2_approx(fmaf(p[j][e], f, -(lse[e / 2] * LOG2E)));
            g[j][e] = score_gradient(on ? w : 0.0f, g[j][e], delta[e / 2], a.window == 1 || query == 0, a.sinks);
            if (CAP)
                g[j][e] *= slope;
        }
}

template <int DQ, int DV, int BM, int BN>
static __global__ void __launch_bounds__(BM * 2) flash_queries(flash_args a)
{
    constexpr int T = BM * 2, NT = BN / 8, KB = TILE_BYTES<BN, DQ>, STAGE = KB + TILE_BYTES<BN, DV>;
    MT_SHARED_DYNAMIC(uint16_t, mem);
    shared_address sq = address_in_shared(mem), so = sq + TILE_BYTES<BM, DQ>, st = so + TILE_BYTES<BM, DV>;
    flash_tile tl = a.tiles[blockIdx.x / a.n_q];
    int h = static_cast<int>(blockIdx.x) % a.n_q, kv = h / (a.n_q / a.n_kv), q0 = tl.row0;
    int len = tl.len, keys = row_of_keys(a, tl);
    int lane = static_cast<int>(threadIdx.x) % WARP, r0 = static_cast<int>(threadIdx.x) / WARP * 16;
    int end = min(q0 + BM, len), first = first_keys<BN>(q0, a.window), tiles = (end + BN - 1) / BN;
    fetch<BM, DQ, T>(sq, rows_from(a.q, tl.start + q0, h), a.q.ld, len - q0);
    fetch<BM, DV, T>(so, rows_from(a.d_o, tl.start + q0, h), a.d_o.ld, len - q0);
    auto load = [&](int t) {
        shared_address s = st + (t & 1) * STAGE;
        fetch<BN, DQ, T>(s, rows_from(a.k, keys + t * BN, kv), a.k.ld, len - t * BN);
        fetch<BN, DV, T>(s + KB, rows_from(a.v, keys + t * BN, kv), a.v.ld, len - t * BN);
    };
    load(first);
    commit_copies();
    float lse[2], delta[2], dq[DQ / 8][4] = {};
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int row = q0 + r0 + lane / 4 + 8 * half;
        size_t at = static_cast<size_t>(h) * a.n + tl.start + row;
        lse[half] = row < len ? a.lse[at] : 0.0f;
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
        flash_place at = {q0 + r0 + lane / 4, t * BN, len, at_edge<BM, BN>(q0, t * BN, len, a.window)};
        if (a.cap > 0)
            weigh<true, NT>(p, g, a, lse, delta, at);
        else
            weigh<false, NT>(p, g, a, lse, delta, at);
        add_weighted<BN, DQ, NT>(dq, g, s);
        __syncthreads();
    }
    wait_for_copies<0>();
    store_sums<DQ>(a.dq, tl, q0 + r0, h, dq, a.scale, a.scale);
}

template <int DQ, int DV, int BM, int BN> static constexpr flash_pass pass()
{
    constexpr int bytes = TILE_BYTES<BM, DQ> + TILE_BYTES<BM, DV> + 2 * (TILE_BYTES<BN, DQ> + TILE_BYTES<BN, DV>);
    static_assert(bytes <= 99 << 10, "the shared memory of sm_86");
    return {flash_queries<DQ, DV, BM, BN>, DQ, BM, bytes, true};
}

static const flash_pass passes[] = {
    pass<64, 64, 128, 64>(),
    pass<96, 96, 128, 32>(),
    pass<128, 128, 128, 32>(),
    pass<192, 128, 64, 32>(),
    pass<256, 256, 64, 16>(),
};

cudaError_t mt_cuda_flash_queries(const struct mt_attention *a, const flash_args &f, cudaStream_t stream)
{
    return mt_cuda_flash_run(passes, sizeof(passes) / sizeof(*passes), a, f, stream);
}
