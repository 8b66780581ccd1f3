/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Causal attention with tensor cores and an online softmax (Dao 2023, "FlashAttention-2"), over packed documents.
 *   forward   O and the log-sum-exps (flash_forward.cu)
 *   delta     rowsum(dO O)
 *   keys      dK and dV (flash_keys.cu)
 *   queries   dQ (flash_queries.cu)
 * The two passes of backward make seven products instead of five (eight with heads of 256) and need neither atomics nor
 * sums in memory.
 */
#include "flash.cuh"

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

/* --- on the host ------------------------------------------------------------------------------------------- */

static bool heads_fit(const struct mt_heads *h)
{
    return reinterpret_cast<uintptr_t>(h->p) % 16 == 0 && h->ld % 8 == 0 && h->ld <= INT_MAX / 128 &&
           h->stride % 8 == 0 && h->stride <= INT_MAX / 128;
}

static bool sums_fit(const struct mt_heads *h)
{
    return h->ld <= INT_MAX && h->stride <= INT_MAX;
}

bool mt_cuda_flash_suits(const struct mt_attention *a)
{
    return mt_cuda_flash_takes(a) && a->scale > 0 && heads_fit(&a->q) && heads_fit(&a->k) && heads_fit(&a->v) &&
           heads_fit(&a->o) && reinterpret_cast<uintptr_t>(a->workspace) % 16 == 0;
}

bool mt_cuda_flash_suits_bwd(const struct mt_attention_bwd *b)
{
    return mt_cuda_flash_suits(&b->fwd) && heads_fit(&b->d_o) && heads_fit(&b->dq) && heads_fit(&b->dk) &&
           heads_fit(&b->dv) && sums_fit(&b->dk_sum) && sums_fit(&b->dv_sum);
}

template <typename T = uint16_t> static flash_rows<T> heads_of(const struct mt_heads &h)
{
    return {static_cast<T *>(h.p), static_cast<int>(h.ld), static_cast<int>(h.stride)};
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
    f.past = static_cast<int>(a->past);
    f.n_q = static_cast<int>(a->q.n);
    f.n_kv = static_cast<int>(a->k.n);
    f.window = a->window < a->n + a->past ? static_cast<int>(a->window) : 0;
    f.scale = a->scale;
    f.cap = a->cap;
    f.scale_over_cap = a->cap > 0 ? a->scale / a->cap : 0.0f;
    return f;
}

cudaError_t mt_cuda_flash(const struct mt_attention *a, cudaStream_t stream)
{
    return mt_cuda_flash_forward(a, args_of(a), stream);
}

cudaError_t mt_cuda_flash_bwd(const struct mt_attention_bwd *b, cudaStream_t stream)
{
    const struct mt_attention *a = &b->fwd;
    flash_args f = args_of(a);
    f.d_o = heads_of(b->d_o);
    f.dq = heads_of(b->dq);
    f.dk = heads_of(b->dk);
    f.dv = heads_of(b->dv);
    f.dk_sum = heads_of<float>(b->dk_sum);
    f.dv_sum = heads_of<float>(b->dv_sum);
    f.sinks = b->sinks;
    dim3 grid(static_cast<unsigned>(ceil_div(a->n, 8)), static_cast<unsigned>(a->q.n));
    cudaError_t rc = MT_LAUNCH(flash_delta, grid, 256, 0, stream, f, static_cast<int>(a->v.dim));
    if (rc == cudaSuccess)
        rc = mt_cuda_flash_keys(a, f, stream);
    return rc == cudaSuccess ? mt_cuda_flash_queries(a, f, stream) : rc;
}
