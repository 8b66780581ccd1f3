/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A stable counting sort by expert, without atomics: a block handles the ids of ROUTE_TOKENS tokens, and each of its
 * threads reads all of them for an expert of its own. Blocks count; one block turns the counts into each block's first
 * place in every list; blocks store their entries there. Bytes moved per entry: 16, mostly from the cache; bound by the
 * threads' reads, ROUTE_TOKENS * k each.
 */
#include "workspace.h"
#include "launch.cuh"
#include "reduce.cuh"
#include "scalar.cuh"

enum { THREADS = MT_CUDA_ROUTE_TOKENS, WARPS = THREADS / WARP };

/* Counts of a block: entries of each expert, then rows that are not finite. */
MT_DEVICE int32_t *counts_of(const struct mt_route_lists &a, size_t block)
{
    return static_cast<int32_t *>(a.workspace) + block * (a.e + 1);
}

MT_DEVICE size_t end_of(const struct mt_route_lists &a, size_t block)
{
    size_t end = (block + 1) * THREADS;
    return (end < a.n ? end : a.n) * a.k;
}

/* Number of threads for which `says` is true; valid in thread 0. */
MT_DEVICE int count_threads(bool says, int *scratch)
{
    unsigned votes = __ballot_sync(0xffffffffu, says);
    if (threadIdx.x % WARP == 0)
        scratch[threadIdx.x / WARP] = __popc(votes);
    __syncthreads();
    int sum = 0;
    for (int w = 0; threadIdx.x == 0 && w < WARPS; w++)
        sum += scratch[w];
    return sum;
}

static __global__ void __launch_bounds__(THREADS) count_entries(struct mt_route_lists a)
{
    __shared__ int scratch[WARPS];
    size_t row = static_cast<size_t>(blockIdx.x) * THREADS + threadIdx.x, end = end_of(a, blockIdx.x);
    int32_t *counts = counts_of(a, blockIdx.x);
    bool odd = false;
    for (size_t j = 0; row < a.n && j < a.k; j++) {
        odd |= (bits_of_float(a.weights[row * a.k + j]) & 0x7f800000u) == 0x7f800000u;
        if (a.ids[row * a.k + j] >= a.e)
            a.places[row * a.k + j] = -1;
    }
    int rows = count_threads(odd, scratch);
    if (threadIdx.x == 0)
        counts[a.e] = rows;
    for (unsigned x = threadIdx.x; x < a.e; x += THREADS) {
        int32_t n = 0;
        MT_UNROLL(8)
        for (size_t i = static_cast<size_t>(blockIdx.x) * THREADS * a.k; i < end; i++)
            n += a.ids[i] == x;
        counts[x] = n;
    }
}

/* How far each expert's places are behind its list, by padding of those before; behind the counts of all blocks. */
MT_DEVICE int32_t *shifts_of(const struct mt_route_lists &a)
{
    return counts_of(a, (a.n + THREADS - 1) / THREADS);
}

/* The sum of v over threads up to this one. */
static __device__ int32_t sum_upto(int32_t (*upto)[MT_MAX_EXPERTS], int32_t v)
{
    unsigned x = threadIdx.x;
    int turn = 0;
    upto[0][x] = v;
    __syncthreads();
    MT_UNROLL(1)
    for (unsigned d = 1; d < blockDim.x; d *= 2, turn ^= 1) {
        upto[turn ^ 1][x] = upto[turn][x] + (x >= d ? upto[turn][x - d] : 0);
        __syncthreads();
    }
    return upto[turn][x];
}

/* One block with a thread per expert: sums over blocks, then over experts, then each block's places. */
static __global__ void __launch_bounds__(1024) scan_counts(struct mt_route_lists a, size_t blocks)
{
    __shared__ int32_t upto[2][MT_MAX_EXPERTS]; /* used alternately: entries of experts up to this one */
    unsigned x = threadIdx.x;
    int32_t sum = 0, odd = 0;
    MT_UNROLL(4)
    for (size_t b = 0; x < a.e && b < blocks; b++)
        sum += counts_of(a, b)[x];
    int32_t bucket = static_cast<int32_t>(a.bucket), padded = (sum + bucket - 1) / bucket * bucket;
    int32_t at = sum_upto(upto, sum) - sum;
    __syncthreads();
    int32_t shift = sum_upto(upto, padded) - padded - at;
    if (x == 0) {
        a.starts[0] = 0;
        MT_UNROLL(1)
        for (size_t b = 0; b < blocks; b++)
            odd += counts_of(a, b)[a.e];
        a.counts[a.e] = odd;
    }
    if (x >= a.e)
        return;
    a.counts[x] = sum;
    shifts_of(a)[x] = shift;
    a.starts[x + 1] = at + sum;
    MT_UNROLL(4)
    for (size_t b = 0; b < blocks; b++) {
        int32_t here = counts_of(a, b)[x];
        counts_of(a, b)[x] = at;
        at += here;
    }
}

static __global__ void __launch_bounds__(THREADS) place_entries(struct mt_route_lists a)
{
    size_t end = end_of(a, blockIdx.x);
    for (unsigned x = threadIdx.x; x < a.e; x += THREADS) {
        int32_t at = counts_of(a, blockIdx.x)[x], shift = shifts_of(a)[x];
        MT_UNROLL(8)
        for (size_t i = static_cast<size_t>(blockIdx.x) * THREADS * a.k; i < end; i++)
            if (a.ids[i] == x) {
                a.places[i] = at + shift;
                a.list[at++] = static_cast<int32_t>(i);
            }
    }
}

cudaError_t mt_cuda_route_lists(const struct mt_route_lists *a, cudaStream_t stream)
{
    size_t blocks = ceil_div(a->n, THREADS);
    cudaError_t rc = MT_LAUNCH(count_entries, grid_of(blocks), THREADS, 0, stream, *a);
    rc = MT_LAUNCH_NEXT(rc, scan_counts, 1, threads_for(a->e, 1024), 0, stream, *a, blocks);
    return MT_LAUNCH_NEXT(rc, place_entries, grid_of(blocks), THREADS, 0, stream, *a);
}
