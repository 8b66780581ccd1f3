/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <climits>
#include <cstddef>
#include <cstdint>

#include <cuda_runtime.h>

#include "kernels.h"

/**
 * Kernels are launched only by MT_LAUNCH, which evaluates to a cudaError_t, and take dynamic shared memory only by
 * MT_SHARED_DYNAMIC, so that the same sources run on the host emulation of the tests. A template kernel needs
 * parentheses: MT_LAUNCH((add<bf16, 4>), ...).
 */
#ifdef MT_CUDA_EMU
#include <cuda_emu_launch.h>
#else
#define MT_LAUNCH(kernel, grid, block, shared_bytes, stream, ...)                                  \
    (kernel<<<(grid), (block), (shared_bytes), (stream)>>>(__VA_ARGS__), cudaGetLastError())
#define MT_SHARED_DYNAMIC(type, name)                                                              \
    extern __shared__ __align__(128) uint4 mt_shared_dynamic[];                                    \
    type *name = reinterpret_cast<type *>(mt_shared_dynamic)
#endif

/** Launches a kernel template of one type: that of the dtype, bf16 or float. */
#define MT_LAUNCH_OF(dtype, kernel, ...)                                                           \
    ((dtype) == MT_BF16 ? MT_LAUNCH(kernel<bf16>, __VA_ARGS__) : MT_LAUNCH(kernel<float>, __VA_ARGS__))
/** The next kernel of an operation, unless `rc` is the error of one before. */
#define MT_LAUNCH_NEXT(rc, ...) ((rc) == cudaSuccess ? MT_LAUNCH(__VA_ARGS__) : (rc))

/* Before a loop; nothing for the host's compiler. */
#ifdef __CUDACC__
#define MT_PRAGMA(text) _Pragma(#text)
#define MT_UNROLL(n) MT_PRAGMA(unroll n)
#else
#define MT_UNROLL(n)
#endif

static constexpr int WARP = 32;

static inline __host__ __device__ constexpr size_t ceil_div(size_t n, size_t d)
{
    return (n + d - 1) / d;
}

/** A grid of that many blocks; if there are too many it is empty, which makes the launch fail. */
static inline dim3 grid_of(size_t blocks)
{
    return dim3(blocks <= INT_MAX ? static_cast<unsigned>(blocks) : 0u, 1, 1);
}

/** Number of threads for one per item, in whole warps, at most `most`. */
static inline unsigned threads_for(size_t items, unsigned most)
{
    size_t warps = ceil_div(items, WARP);
    return warps * WARP < most ? static_cast<unsigned>(warps * WARP) : most;
}

/**
 * The tiles of kernels that treat each element of [rows, vectors] independently: a block is x threads along a row and y
 * rows, each thread takes `per_thread` vectors of its row at distance x. Depends on the shape alone.
 */
struct row_tiles {
    unsigned x, y;
    unsigned columns; /* blocks along a row */
    size_t blocks;
};

static inline row_tiles tile_rows(size_t rows, size_t vecs, unsigned per_thread)
{
    row_tiles t;
    t.x = threads_for(vecs, 256);
    t.y = 256 / t.x;
    size_t columns = ceil_div(vecs, static_cast<size_t>(t.x) * per_thread);
    t.columns = static_cast<unsigned>(columns);
    t.blocks = ceil_div(rows, t.y) * columns;
    return t;
}

/** f(u, i) for the N vectors u of a thread, of which the first is `at`, where the row of `vecs` has such a vector i. */
template <int N, typename F> static __device__ __forceinline__ void each_vector(size_t at, size_t vecs, F f)
{
    MT_UNROLL(N)
    for (int u = 0; u < N; u++)
        if (at + u * blockDim.x < vecs)
            f(u, at + u * blockDim.x);
}

/** This thread's row and first vector under tile_rows(). */
static inline __device__ void row_of_tile(unsigned columns, unsigned per_thread, size_t *row,
                                          size_t *vec)
{
    unsigned tile = blockIdx.x;
    *row = static_cast<size_t>(tile / columns) * blockDim.y + threadIdx.y;
    *vec = static_cast<size_t>(tile % columns) * blockDim.x * per_thread + threadIdx.x;
}
