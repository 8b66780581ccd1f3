/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The gated delta rule, forward: a block takes a job (mt_delta_jobs()), chunk by chunk, and its value heads in order.
 * There are at most MT_CUDA_DELTA_SLOTS blocks, which take the documents' jobs in turn.
 */
#include "delta_chunk.cuh"

using namespace delta;

/* States of a job's value heads, which a document begins with, or leaves. */
MT_DEVICE void carry(const struct mt_delta_rule &a, const struct mt_delta_kept &kept, work &w, const part &own,
                     size_t doc, bool leave)
{
    const struct mt_carried &c = a.carried;
    w.old = 0;
    w.at = kept;
    if (!c.after) {
        hand_over<false>(a, w, own, w.state, doc || leave ? nullptr : a.handed.from);
        hand_over<true>(a, w, own, w.state, leave && doc + 1 == a.n_docs ? a.handed.to : nullptr);
        return;
    }
    size_t place = static_cast<size_t>(c.place[doc]) * c.ld_bytes;
    if (leave) {
        hand_over<true>(a, w, own, w.state, static_cast<char *>(c.after) + place);
    } else if (c.past[doc]) {
        w.old = c.past[doc] % C;
        w.kept = static_cast<const char *>(c.before) + place;
        hand_over<false>(a, w, own, w.state, w.kept);
    }
}

MT_DEVICE void keep(char *to, const struct mt_heads &h, enum mt_dtype type, size_t row)
{
    MT_UNROLL(1)
    for (size_t i = threadIdx.x; i < h.n * h.dim; i += THREADS)
        store_any(to, i, type, load_any(h.p, row * h.ld + i / h.dim * h.stride + i % h.dim, type));
}

/* A block keeps the rows of a document's last chunk that is not whole. */
static __global__ void __launch_bounds__(THREADS) delta_keep(struct mt_delta_rule a, struct mt_delta_kept at)
{
    const struct mt_carried &c = a.carried;
    size_t doc = blockIdx.x, place = static_cast<size_t>(c.place[doc]) * c.ld_bytes, heads = a.v.n;
    size_t element = a.dtype == MT_BF16 ? sizeof(bf16) : sizeof(float);
    size_t end = static_cast<size_t>(a.cu_seqlens[doc + 1]), n = end - static_cast<size_t>(a.cu_seqlens[doc]);
    size_t rows = (static_cast<size_t>(c.past[doc]) + n) % C, old = rows < n ? 0 : rows - n;
    char *to = static_cast<char *>(c.after) + place;
    const char *from = static_cast<const char *>(c.before) + place;
    MT_UNROLL(1)
    for (size_t i = at.k + threadIdx.x; from != to && old && i < at.bytes; i += THREADS)
        to[i] = from[i]; /* the same chunk goes on */
    __syncthreads();
    MT_UNROLL(1)
    for (size_t i = old; i < rows; i++) {
        size_t row = end - rows + i;
        size_t scalars = i * heads * sizeof(float);
        keep(to + at.k + i * a.k.n * a.k.dim * element, a.k, a.dtype, row);
        keep(to + at.v + i * heads * a.v.dim * element, a.v, a.dtype, row);
        keep(to + at.beta + scalars, {const_cast<float *>(a.beta), heads, heads, 1, heads}, MT_F32, row);
        keep(to + at.g + scalars, {const_cast<float *>(a.g), heads, heads, 1, heads}, MT_F32, row);
    }
}

static __global__ void __launch_bounds__(THREADS, 1)
    delta_forward(struct mt_delta_rule a, struct mt_cuda_delta_buffers b)
{
    __shared__ rows r;
    int heads = static_cast<int>(b.jobs.heads), one = b.wk * b.wv;
    work w = work_of(b.slots + blockIdx.x * b.slot_floats, b.wk, b.wv, heads);
    MT_UNROLL(1)
    for (size_t job = blockIdx.x; job < a.n_docs * b.n_jobs; job += gridDim.x) {
        size_t doc = job / b.n_jobs;
        part own = part_of(a, b, job % b.n_jobs);
        size_t end = static_cast<size_t>(a.cu_seqlens[doc + 1]);
        clear(w.state, heads * one);
        carry(a, b.kept, w, own, doc, false);
        MT_UNROLL(1)
        for (size_t row = static_cast<size_t>(a.cu_seqlens[doc]), some; row < end; row += some, w.old = 0) {
            some = C - static_cast<size_t>(w.old);
            some = end - row < some ? end - row : some;
            int n = w.old + static_cast<int>(some), m = products_of(a, n);
            load_keys(w, r, a, row, own.key, n);
            MT_UNROLL(1)
            for (int i = 0; i < own.n; i++) {
                float *s = w.state + i * one;
                solve(w, r, a, row, own.first + i, n, s);
                scale_rows(w.t, w.q, r.decay, w.wk, m);
                multiply<false>({m, w.wv, w.wk, w.t, w.wk, 1, s, w.wv, 1, w.d_o, w.wv, 1, nullptr, 0, 0});
                multiply({m, w.wv, m, w.p, C, 1, w.vn, w.wv, 1, w.d_o, w.wv, 1, w.d_o, w.wv, 1});
                add_skip(a, own.first + i, w.d_o, w.v, m * w.wv);
                store_rows(w.d_o + w.old * w.wv, w.wv, a.o, a.dtype, row, own.first + i, n - w.old);
                if (!a.carried.after || n == C)
                    step_state(w, r, n, s, s, m);
            }
        }
        carry(a, b.kept, w, own, doc, true);
    }
}

cudaError_t mt_cuda_delta_rule(const struct mt_delta_rule *a, cudaStream_t stream)
{
    struct mt_cuda_delta_buffers b = apart(*a, mt_cuda_delta_buffers_of(a));
    struct mt_delta_rule args = *a;
    args.cu_seqlens_host = nullptr; /* kernels get no host memory */
    cudaError_t rc = MT_LAUNCH(delta_forward, blocks_for(a->n_docs * b.n_jobs, b), THREADS, 0, stream, args, b);
    if (rc == cudaSuccess && a->carried.after)
        rc = MT_LAUNCH(delta_keep, grid_of(a->n_docs), THREADS, 0, stream, args, b.kept);
    return rc;
}
