/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The gated delta rule, forward: a block takes a job (mt_delta_jobs()), chunk by chunk, and its value heads in order.
 * There are at most MT_CUDA_DELTA_SLOTS blocks, which take the documents' jobs in turn.
 */
#include "delta_chunk.cuh"

using namespace delta;

template <typename T>
static __global__ void __launch_bounds__(THREADS) delta_forward(struct mt_delta_rule a, struct mt_cuda_delta_buffers b)
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
        MT_UNROLL(1)
        for (size_t row = static_cast<size_t>(a.cu_seqlens[doc]); row < end; row += C) {
            int n = end - row < C ? static_cast<int>(end - row) : C;
            load_keys<T>(w, r, a, row, own.key, n);
            MT_UNROLL(1)
            for (int i = 0; i < own.n; i++) {
                float *s = w.state + i * one;
                solve<T>(w, r, a, row, own.first + i, n, s);
                scale_rows(w.t, w.q, r.decay, w.wk);
                multiply<false>({C, w.wv, w.wk, w.t, w.wk, 1, s, w.wv, 1, w.d_o, w.wv, 1, nullptr, 0, 0});
                multiply({C, w.wv, C, w.p, C, 1, w.vn, w.wv, 1, w.d_o, w.wv, 1, w.d_o, w.wv, 1});
                add_skip<T>(a, own.first + i, w.d_o, w.v, C * w.wv);
                store_rows<T>(w.d_o, w.wv, a.o, row, own.first + i, n);
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
    dim3 grid = blocks_for(a->n_docs * b.n_jobs, b);
    if (a->dtype == MT_BF16)
        return MT_LAUNCH(delta_forward<bf16>, grid, THREADS, 0, stream, args, b);
    return MT_LAUNCH(delta_forward<float>, grid, THREADS, 0, stream, args, b);
}
