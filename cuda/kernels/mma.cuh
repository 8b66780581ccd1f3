/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "launch.cuh"

/**
 * Tensor cores from sm_80 on: products of fragments, their loads from shared memory, asynchronous copies to it. Layouts
 * of fragments are those of the PTX ISA, "mma.m16n8k16 with floating point type".
 *
 * A tile of ROWS rows is kept in panels of 64 columns, a row of a panel in 128 bytes whose eight 16-byte chunks are
 * swizzled by the row: eight rows' chunks of one column, and eight chunks of one row, lie in different banks.
 */
#ifdef MT_CUDA_EMU
#include <cuda_emu_mma.h>
#else
using shared_address = unsigned;

static __device__ __forceinline__ shared_address address_in_shared(const void *p)
{
    return static_cast<unsigned>(__cvta_generic_to_shared(p));
}
/* Copies `bytes` of 16 (of 4) and fills up with zeros. */
static __device__ __forceinline__ void copy_16_async(shared_address to, const void *from, int bytes)
{
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
static __device__ __forceinline__ void copy_4_async(shared_address to, const void *from, int bytes)
{
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
static __device__ __forceinline__ void commit_copies()
{
    asm volatile("cp.async.commit_group;" ::: "memory");
}
/* Waits for this thread's copies, but the last N groups. */
template <int N> static __device__ __forceinline__ void wait_for_copies()
{
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}
static __device__ __forceinline__ void load_matrices(uint32_t (&r)[4], shared_address row)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(row) : "memory");
}
static __device__ __forceinline__ void load_transposed(uint32_t (&r)[4], shared_address row)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(row) : "memory");
}
static __device__ __forceinline__ void multiply_add(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1)
{
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
static __device__ __forceinline__ float exp2_approx(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
static __device__ __forceinline__ uint32_t rounded_pair(float lo, float hi)
{
    uint32_t p;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(p) : "f"(hi), "f"(lo));
    return p;
}
#endif

template <int ROWS, int D> static constexpr int TILE_BYTES = ROWS * ((D + 63) / 64) * 128;

/* Chunk c (of 8 columns) of a row of a tile. */
template <int ROWS> static __device__ __forceinline__ shared_address chunk_at(shared_address tile, int row, int c)
{
    return tile + (c >> 3) * (ROWS * 128) + row * 128 + (((c & 7) ^ (row & 7)) << 4);
}

/* What lies 16 k columns on from an address of the first 16 columns of its row (16 rows on: 2048 bytes): one register
 * for all of them. Tiles begin at multiples of 128. */
template <int ROWS> static __device__ __forceinline__ shared_address columns_on(shared_address first, int k)
{
    return (first ^ static_cast<shared_address>((k & 3) << 5)) + (k >> 2) * (ROWS * 128);
}

/* Which chunk of a tile is the i-th to fetch: along rows; half a panel comes last, eight lanes taking four chunks of a
 * row and four of the row four below: whoever writes shared memory at once writes different banks. */
template <int ROWS, int D> static __device__ __forceinline__ void chunk_of(int i, int *row, int *c)
{
    constexpr int WHOLE = D / 64 * 8;
    static_assert(D % 64 == 0 || (D % 64 == 32 && ROWS % 8 == 0), "whole panels and half a one");
    int rest = i - ROWS * WHOLE;
    if (D % 64 && rest >= 0) {
        *row = rest / 32 * 8 + rest / 8 % 4 + rest / 4 % 2 * 4;
        *c = WHOLE + rest % 4;
    } else {
        *row = i / WHOLE;
        *c = i % WHOLE;
    }
}

/* Rows [0, ROWS) of D columns, ld elements apart; those from `limit` on become zeros. ROWS * ld fits an int. */
template <int ROWS, int D, int THREADS>
static __device__ __forceinline__ void fetch(shared_address tile, const uint16_t *p, int ld, int limit)
{
    constexpr int ALL = ROWS * (D / 8);
#pragma unroll
    for (int u = 0; u < (ALL + THREADS - 1) / THREADS; u++) {
        int i = u * THREADS + static_cast<int>(threadIdx.x), row, c;
        if (ALL % THREADS && i >= ALL)
            break;
        chunk_of<ROWS, D>(i, &row, &c);
        bool there = row < limit;
        copy_16_async(chunk_at<ROWS>(tile, row, c), p + (there ? row * ld + c * 8 : 0), there ? 16 : 0);
    }
}

/* acc += A B' over D columns: 16 rows of tile `a` from r0 on, the 8 NT rows of tile `b`. */
template <int AR, int BR, int D, int NT>
static __device__ __forceinline__ void add_product(float (&acc)[NT][4], shared_address a, int r0, shared_address b)
{
    int lane = static_cast<int>(threadIdx.x) % WARP;
    shared_address a0 = chunk_at<AR>(a, r0 + lane % 16, lane / 16);
    shared_address b0 = chunk_at<BR>(b, lane / 16 * 8 + lane % 8, lane / 8 % 2);
#pragma unroll
    for (int k = 0; k < D / 16; k++) {
        uint32_t fa[4], fb[4];
        load_matrices(fa, columns_on<AR>(a0, k));
#pragma unroll
        for (int j = 0; j < NT / 2; j++) {
            load_matrices(fb, columns_on<BR>(b0, k) + j * 2048);
            multiply_add(acc[2 * j], fa, fb[0], fb[1]);
            multiply_add(acc[2 * j + 1], fa, fb[2], fb[3]);
        }
    }
}

/* acc += P B: P as the sums of a product left it, rounded to bf16; B the 8 NT rows of tile `b`, of D columns. */
template <int BR, int D, int NT>
static __device__ __forceinline__ void add_weighted(float (&acc)[D / 8][4], const float (&p)[NT][4], shared_address b)
{
    int lane = static_cast<int>(threadIdx.x) % WARP;
    shared_address b0 = chunk_at<BR>(b, lane % 16, lane / 16);
#pragma unroll
    for (int j = 0; j < NT / 2; j++) {
        const float(&x)[4] = p[2 * j], (&y)[4] = p[2 * j + 1];
        uint32_t fa[4] = {rounded_pair(x[0], x[1]), rounded_pair(x[2], x[3]), rounded_pair(y[0], y[1]),
                          rounded_pair(y[2], y[3])};
#pragma unroll
        for (int d = 0; d < D / 16; d++) {
            uint32_t fb[4];
            load_transposed(fb, columns_on<BR>(b0, d) + j * 2048);
            multiply_add(acc[2 * d], fa, fb[0], fb[1]);
            multiply_add(acc[2 * d + 1], fa, fb[2], fb[3]);
        }
    }
}
