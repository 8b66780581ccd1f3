/* SPDX-License-Identifier: Apache-2.0 */
/* Copies between packed documents and padded sequences (kernels.h). Each thread moves 16 bytes of a row. */
#include "launch.cuh"
#include "scalar.cuh"

static __global__ void __launch_bounds__(256) fill_tables(mt_docs_tables t)
{
    size_t i = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i > t.batch)
        return;
    size_t doc = i < t.n_docs ? i : t.n_docs;
    int64_t at = t.cu_seqlens[doc];
    if (i < t.batch)
        t.lens[i] = i < t.n_docs ? t.cu_seqlens[i + 1] - t.cu_seqlens[i] : 0;
    for (int k = 0; k < MT_FUSED_N_TABLES; k++)
        t.tables[k * (t.batch + 1) + i] = at * t.multiplier[k];
}

/* A block moves a padded row of a document. */
static __global__ void __launch_bounds__(256) move_rows(mt_docs_rows p)
{
    size_t i = blockIdx.x, doc = blockIdx.y;
    bool real = i < static_cast<size_t>(p.docs.rows[doc]);
    unsigned dim = static_cast<unsigned>(p.packed.dim), width = static_cast<unsigned>(p.packed.n) * dim;
    bf16 *padded = static_cast<bf16 *>(p.padded) + (doc * p.len + i) * width;
    bf16 *packed = static_cast<bf16 *>(p.packed.p) + (p.docs.first[doc] + i) * p.packed.ld;
    if (p.back && !real)
        return;
    for (unsigned c = threadIdx.x * VEC<bf16>; c < width; c += blockDim.x * VEC<bf16>) {
        unsigned head = c / dim;
        bf16 *at = packed + head * p.packed.stride + (c - head * dim);
        if (p.back)
            store16(at, load16(padded + c));
        else
            store16(padded + c, real ? load16(at) : make_uint4(0, 0, 0, 0));
    }
}

/* A thread moves the value of one row of one head; x runs along rows. */
static __global__ void __launch_bounds__(256) move_stats(mt_docs_stats p)
{
    size_t i = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x, head = blockIdx.y;
    size_t row = p.first_row + i, at, rows = p.n;
    if (p.kind == MT_STATS_PADDED) {
        size_t doc = blockIdx.z;
        rows = p.len;
        row = p.docs.first[doc] + i;
        at = (doc * p.n_heads + head) * p.len + i;
    } else if (p.kind == MT_STATS_EVEN) {
        at = (i / p.len * p.n_heads + head) * p.len + i % p.len;
    } else {
        at = i * p.n_heads + head;
    }
    if (i >= rows)
        return;
    bool real = p.kind != MT_STATS_PADDED || i < static_cast<size_t>(p.docs.rows[blockIdx.z]);
    float *lse = p.lse + (p.head0 + head) * p.stride + row;
    if (!p.to_lse)
        p.stats[at] = real ? *lse : 0.0f;
    else if (real)
        *lse = p.stats[at];
}

cudaError_t mt_cuda_docs_tables(const mt_docs_tables *t, cudaStream_t stream)
{
    return MT_LAUNCH(fill_tables, grid_of(ceil_div(t->batch + 1, 256)), 256, 0, stream, *t);
}

cudaError_t mt_cuda_docs_rows(const mt_docs_rows *p, cudaStream_t stream)
{
    unsigned threads = threads_for(p->packed.n * p->packed.dim / VEC<bf16>, 256);
    dim3 grid(static_cast<unsigned>(p->len), static_cast<unsigned>(p->docs.n), 1);
    return MT_LAUNCH(move_rows, grid, threads, 0, stream, *p);
}

cudaError_t mt_cuda_docs_stats(const mt_docs_stats *p, cudaStream_t stream)
{
    bool padded = p->kind == MT_STATS_PADDED;
    size_t rows = padded ? p->len : p->n;
    dim3 grid(static_cast<unsigned>(ceil_div(rows, 256)), static_cast<unsigned>(p->n_heads),
              padded ? static_cast<unsigned>(p->docs.n) : 1u);
    return MT_LAUNCH(move_stats, grid, 256, 0, stream, *p);
}
