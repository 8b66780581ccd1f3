/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "cuda_emu_block.h"

/**
 * What kernels see: the qualifiers, built-in variables, vector types, barriers, warp collectives and
 * arithmetic of CUDA C++ that megatrain's kernels use, for the host's compiler. Atomics, cooperative
 * groups and tensor cores are left out on purpose: a kernel that uses them does not compile here.
 *
 * __shared__   one copy an OS thread. All threads of a block run on one OS thread, and an OS thread runs
 *              one block at a time, so the copy is the block's. It is not cleared between blocks.
 */
#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __shared__ static thread_local
#define __constant__ static const
#define __align__(n) __attribute__((aligned(n)))
#define __launch_bounds__(...)

#define threadIdx mt_emu_thread_idx
#define blockIdx mt_emu_block_idx
#define blockDim mt_emu_block_dim
#define gridDim mt_emu_grid_dim
#define warpSize 32

struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned vx = 1, unsigned vy = 1, unsigned vz = 1) : x(vx), y(vy), z(vz) {}
    constexpr dim3(struct mt_emu_dim d) : x(d.x), y(d.y), z(d.z) {}
};

#define MT_EMU_VECTORS(T, name)                                                                    \
    struct alignas(2 * sizeof(T)) name##2 { T x, y; };                                             \
    struct name##3 { T x, y, z; };                                                                 \
    struct alignas(4 * sizeof(T)) name##4 { T x, y, z, w; };                                       \
    static inline name##2 make_##name##2(T x, T y) { return {x, y}; }                              \
    static inline name##3 make_##name##3(T x, T y, T z) { return {x, y, z}; }                      \
    static inline name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }
MT_EMU_VECTORS(float, float)
MT_EMU_VECTORS(int, int)
MT_EMU_VECTORS(unsigned, uint)
MT_EMU_VECTORS(short, short)
MT_EMU_VECTORS(unsigned short, ushort)
MT_EMU_VECTORS(unsigned char, uchar)
#undef MT_EMU_VECTORS
struct alignas(16) double2 { double x, y; };
struct alignas(16) longlong2 { long long x, y; };
struct alignas(16) ulonglong2 { unsigned long long x, y; };

/* The line of the caller is what tells barriers and collectives apart. */
#define MT_EMU_HERE const char *file_ = __builtin_FILE(), int line_ = __builtin_LINE()

static inline void __syncthreads(MT_EMU_HERE)
{
    mt_emu_barrier(file_, line_);
}
static inline void __syncwarp(unsigned mask = 0xffffffffu, MT_EMU_HERE)
{
    mt_emu_collective(MT_EMU_SYNCWARP, mask, 0, 0, 32, file_, line_);
}
static inline unsigned __ballot_sync(unsigned mask, int predicate, MT_EMU_HERE)
{
    return (unsigned)mt_emu_collective(MT_EMU_BALLOT, mask, predicate != 0, 0, 32, file_, line_);
}
static inline int __any_sync(unsigned mask, int predicate, MT_EMU_HERE)
{
    return mt_emu_collective(MT_EMU_BALLOT, mask, predicate != 0, 0, 32, file_, line_) != 0;
}
static inline int __all_sync(unsigned mask, int predicate, MT_EMU_HERE)
{
    return mt_emu_collective(MT_EMU_BALLOT, mask, predicate != 0, 0, 32, file_, line_) == mask;
}

template <class T>
static inline T mt_emu_shuffle(enum mt_emu_collective_op op, unsigned mask, T v, int arg, int width,
                               const char *file, int line)
{
    static_assert(std::is_arithmetic<T>::value && (sizeof(T) == 4 || sizeof(T) == 8),
                  "shuffles move 4 or 8 bytes");
    uint64_t bits = 0;
    memcpy(&bits, &v, sizeof(T));
    bits = mt_emu_collective(op, mask, bits, arg, width, file, line);
    memcpy(&v, &bits, sizeof(T));
    return v;
}
template <class T>
static inline T __shfl_sync(unsigned mask, T v, int src, int width = 32, MT_EMU_HERE)
{
    return mt_emu_shuffle(MT_EMU_SHFL, mask, v, src, width, file_, line_);
}
template <class T>
static inline T __shfl_xor_sync(unsigned mask, T v, int lane_mask, int width = 32, MT_EMU_HERE)
{
    return mt_emu_shuffle(MT_EMU_SHFL_XOR, mask, v, lane_mask, width, file_, line_);
}
template <class T>
static inline T __shfl_up_sync(unsigned mask, T v, unsigned delta, int width = 32, MT_EMU_HERE)
{
    return mt_emu_shuffle(MT_EMU_SHFL_UP, mask, v, (int)delta, width, file_, line_);
}
template <class T>
static inline T __shfl_down_sync(unsigned mask, T v, unsigned delta, int width = 32, MT_EMU_HERE)
{
    return mt_emu_shuffle(MT_EMU_SHFL_DOWN, mask, v, (int)delta, width, file_, line_);
}

template <class T> static inline T __ldg(const T *p)
{
    return *p;
}
template <class T> static inline T __ldcs(const T *p)
{
    return *p;
}
template <class T> static inline void __stcs(T *p, T v)
{
    *p = v;
}

static inline uint32_t __float_as_uint(float x)
{
    uint32_t u;
    memcpy(&u, &x, 4);
    return u;
}
static inline float __uint_as_float(uint32_t u)
{
    float x;
    memcpy(&x, &u, 4);
    return x;
}
static inline int __float_as_int(float x)
{
    return (int)__float_as_uint(x);
}
static inline float __int_as_float(int i)
{
    return __uint_as_float((uint32_t)i);
}
static inline float rsqrtf(float x)
{
    return 1.0f / sqrtf(x);
}
static inline float __fadd_rn(float a, float b)
{
    return a + b;
}
static inline float __fsub_rn(float a, float b)
{
    return a - b;
}
static inline float __fmul_rn(float a, float b)
{
    return a * b;
}
static inline float __fdiv_rn(float a, float b)
{
    return a / b;
}
static inline float __fmaf_rn(float a, float b, float c)
{
    return fmaf(a, b, c);
}
static inline float __fsqrt_rn(float x)
{
    return sqrtf(x);
}
static inline float __frcp_rn(float x)
{
    return 1.0f / x;
}
static inline float __fdividef(float a, float b)
{
    return a / b;
}
static inline int __popc(unsigned x)
{
    return __builtin_popcount(x);
}
static inline int __ffs(int x)
{
    return __builtin_ffs(x);
}
static inline int __clz(int x)
{
    return x ? __builtin_clz((unsigned)x) : 32;
}
/* The C library declares functions of these names and does not export them. */
#define __expf(x) expf(x)
#define __logf(x) logf(x)

template <class T> static inline constexpr T min(T a, T b)
{
    return b < a ? b : a;
}
template <class T> static inline constexpr T max(T a, T b)
{
    return a < b ? b : a;
}
