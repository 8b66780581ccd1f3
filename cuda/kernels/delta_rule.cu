/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The gated delta rule, forward: a block takes a key head of a document, chunk by chunk, and its value heads in order.
 * There are at most MT_CUDA_DELTA_SLOTS blocks, which take the documents' heads in turn.
 */
#include "delta_chunk.cuh"

using namespace delta;

template <typename T>
static __global__ void __launch_bounds__(THREADS) delta_forward(struct mt_delta_rule a, struct mt_cuda_delta_buffers b)
{
    __shared__ rows r;
    int heads = static_cast<int>(a.v.n / a.k.n), one = b.wk * b.wv;
    work w = work_of(b.slots + blockIdx.x * b.slot_floats, b.wk, b.wv, heads);
    MT_UNROLL(1)
    for (size_t job = blockIdx.x; job < a.n_docs * a.k.n; job += gridDim.x) {
        size_t doc = job / a.k.n, head = job % a.k.n;
        size_t end = static_cast<size_t>(a.cu_seqlens[doc + 1]);
        clear(w.state, heads * one);
        MT_UNROLL(1)
        for (size_t row = static_cast<size_t>(a.cu_seqlens[doc]); row < end; row += C) {
            int n = end - row < C ? static_cast<int>(end - row) : C;
            load_keys<T>(w, r, a, row, head, n);
            MT_UNROLL(1)
            for (int i = 0; i < heads; i++) {
                float *s = w.state + i * one;
                solve<T>(w, r, a, row, head * heads + i, n, s);
                scale_rows(w.t, w.q, r.decay, w.wk);
                multiply<false>({C, w.wv, w.wk, w.t, w.wk, 1, s, w.wv, 1, w.d_o, w.wv, 1, nullptr, 0, 0});
                multiply({C, w.wv, C, w.p, C, 1, w.vn, w.wv, 1, w.d_o, w.wv, 1, w.d_o, w.wv, 1});
                store_rows<T>(w.d_o, w.wv, a.o, row, head * heads + i, n);
                step_state(w, r, n, s, s);
            }
        }
    }
}

cudaError_t mt_cuda_delta_rule(const struct mt_delta_rule *a, cudaStream_t stream)
{
    struct mt_cuda_delta_buffers b = mt_cuda_delta_buffers_of(a);
    struct mt_delta_rule args = *a;
    args.cu_seqlens_host = nullptr; /* kernels get no host memory */
    size_t jobs = a->n_docs * a->k.n;
    dim3 grid = blocks_for(jobs, b);
    if (a->dtype == MT_BF16)
        return MT_LAUNCH(delta_forward<bf16>, grid, THREADS, 0, stream, args, b);
    return MT_LAUNCH(delta_forward<float>, grid, THREADS, 0, stream, args, b);
}
