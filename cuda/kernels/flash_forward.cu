/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Forward of attention of our own (flash.cuh): a block has BM queries of a head and goes over their keys, BN at a time.
 * Bound by tensor cores: 2 (DQ + DV) flops a score. Bytes: each tile of keys once per tile of queries.
 */
#include "flash.cuh"

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

template <int DQ, int DV, int BM, int BN>
static __global__ void __launch_bounds__(BM * 2) flash_forward(flash_args a)
{
    constexpr int T = BM * 2, NT = BN / 8;
    MT_SHARED_DYNAMIC(uint16_t, mem);
    shared_address sq = address_in_shared(mem), sk = sq + TILE_BYTES<BM, DQ>, sv = sk + TILE_BYTES<BN, DQ>;
    flash_tile tl = a.tiles[blockIdx.x / a.n_q];
    int h = static_cast<int>(blockIdx.x) % a.n_q, kv = h / (a.n_q / a.n_kv), q0 = tl.row0;
    int len = tl.len, keys = row_of_keys(a, tl);
    int lane = static_cast<int>(threadIdx.x) % WARP, r0 = static_cast<int>(threadIdx.x) / WARP * 16;
    int end = min(q0 + BM, len), first = first_keys<BN>(q0, a.window), tiles = (end + BN - 1) / BN;
    fetch<BM, DQ, T>(sq, rows_from(a.q, tl.start + q0, h), a.q.ld, len - q0);
    fetch<BN, DQ, T>(sk, rows_from(a.k, keys + first * BN, kv), a.k.ld, len - first * BN);
    commit_copies();
    float o[DV / 8][4] = {}, max[2] = {-INFINITY, -INFINITY}, sum[2] = {}, f = scale_of(a) * LOG2E;
    for (int t = first; t < tiles; t++) {
        wait_for_copies<0>();
        __syncthreads();
        fetch<BN, DV, T>(sv, rows_from(a.v, keys + t * BN, kv), a.v.ld, len - t * BN);
        commit_copies();
        float s[NT][4] = {};
        add_product<BM, BN, DQ, NT>(s, sq, r0, sk);
        wait_for_copies<0>();
        __syncthreads();
        if (t + 1 < tiles)
            fetch<BN, DQ, T>(sk, rows_from(a.k, keys + (t + 1) * BN, kv), a.k.ld, len - (t + 1) * BN);
        commit_copies();
        if (a.cap > 0) {
            float slope;
#pragma unroll
            for (int j = 0; j < NT; j++)
#pragma unroll
                for (int e = 0; e < 4; e++)
                    s[j][e] = capped(s[j][e], a, &slope);
        }
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
            a.lse[static_cast<size_t>(h) * a.n + tl.start + row] = max[half] * scale_of(a) + logf(sum[half]);
    }
    store_sums<DV>(a.o, tl, q0 + r0, h, o, 1.0f / sum[0], 1.0f / sum[1]);
}

template <int DQ, int DV, int BM, int BN> static constexpr flash_pass pass()
{
    constexpr int bytes = TILE_BYTES<BM, DQ> + TILE_BYTES<BN, DQ> + TILE_BYTES<BN, DV>;
    static_assert(bytes <= 99 << 10, "the shared memory of sm_86");
    return {flash_forward<DQ, DV, BM, BN>, DQ, BM, bytes, true};
}

static const flash_pass passes[] = {
    pass<64, 64, 128, 64>(),
    pass<96, 96, 128, 32>(),
    pass<128, 128, 128, 32>(),
    pass<192, 128, 128, 32>(),
    pass<256, 256, 128, 32>(),
};

cudaError_t mt_cuda_flash_forward(const struct mt_attention *a, const flash_args &f, cudaStream_t stream)
{
    return mt_cuda_flash_run(passes, sizeof(passes) / sizeof(*passes), a, f, stream);
}
