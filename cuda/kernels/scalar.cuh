/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include <cuda_runtime.h>

#include "base/dtype.h"
#include "device/heads.h"

/** A function of kernels. */
#define MT_DEVICE static __device__ __forceinline__

/**
 * Elements in memory are float or bf16; arithmetic is in float. A vector is what one 16-byte access has: 4 floats
 * or 8 bf16. All inline assembly of the kernels is here.
 */
struct bf16 {
    uint16_t x;
};

template <typename T> static constexpr int VEC = 16 / static_cast<int>(sizeof(T));

/* --- bits ----------------------------------------------------------------------------------- */

MT_DEVICE float float_of_bits(uint32_t u)
{
#ifdef __CUDA_ARCH__
    return __uint_as_float(u);
#else
    float f;
    memcpy(&f, &u, 4);
    return f;
#endif
}

MT_DEVICE uint32_t bits_of_float(float f)
{
#ifdef __CUDA_ARCH__
    return __float_as_uint(f);
#else
    uint32_t u;
    memcpy(&u, &f, 4);
    return u;
#endif
}

/** Two floats as bf16, to nearest even, `lo` in the low half. A NaN stays NaN. */
MT_DEVICE uint32_t bf16_pair(float lo, float hi)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    uint32_t pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(hi), "f"(lo));
    return pair;
#else
    uint32_t half[2] = {bits_of_float(lo), bits_of_float(hi)};
    for (int i = 0; i < 2; i++) {
        uint32_t u = half[i], even = (u + 0x7fffu + ((u >> 16) & 1)) >> 16;
        half[i] = (u & 0x7fffffffu) > 0x7f800000u ? (u >> 16) | 0x40 : even;
    }
    return half[0] | half[1] << 16;
#endif
}

/* --- one element ---------------------------------------------------------------------------- */

MT_DEVICE float load(const float *p)
{
    return *p;
}

MT_DEVICE float load(const bf16 *p)
{
    return float_of_bits(static_cast<uint32_t>(p->x) << 16);
}

MT_DEVICE void store(float *p, float v)
{
    *p = v;
}

MT_DEVICE void store(bf16 *p, float v)
{
    p->x = static_cast<uint16_t>(bf16_pair(v, 0));
}

/* --- accesses of 8 and 16 bytes of global memory, at aligned addresses ----------------------------- */

template <typename W> MT_DEVICE W load_word(const void *p)
{
#ifdef __CUDA_ARCH__
    return *static_cast<const W *>(p);
#else
    W w;
    if (reinterpret_cast<uintptr_t>(p) % sizeof(W))
        __builtin_trap(); /* a GPU faults too */
    memcpy(&w, p, sizeof(W));
    return w;
#endif
}

template <typename W> MT_DEVICE void store_word(void *p, W w)
{
#ifdef __CUDA_ARCH__
    *static_cast<W *>(p) = w;
#else
    if (reinterpret_cast<uintptr_t>(p) % sizeof(W))
        __builtin_trap();
    memcpy(p, &w, sizeof(W));
#endif
}

#ifdef __CUDA_ARCH__
/* In assembly: the compiler usually splits an assignment into stores of 4 bytes. */
template <> __device__ __forceinline__ void store_word<uint4>(void *p, uint4 w)
{
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(w.x), "r"(w.y), "r"(w.z), "r"(w.w)
                 : "memory");
}

template <> __device__ __forceinline__ void store_word<float4>(void *p, float4 w)
{
    asm volatile("st.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(p), "f"(w.x), "f"(w.y), "f"(w.z), "f"(w.w)
                 : "memory");
}

template <> __device__ __forceinline__ void store_word<uint2>(void *p, uint2 w)
{
    asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(p), "r"(w.x), "r"(w.y) : "memory");
}
#endif

MT_DEVICE uint4 load16(const void *p)
{
    return load_word<uint4>(p);
}

MT_DEVICE void store16(void *p, uint4 w)
{
    store_word<uint4>(p, w);
}

/* --- vectors --------------------------------------------------------------------------- */

MT_DEVICE void pair_floats(uint32_t pair, float *x)
{
    x[0] = float_of_bits(pair << 16);
    x[1] = float_of_bits(pair & 0xffff0000u);
}

template <typename T> struct packing;

template <> struct packing<float> {
    MT_DEVICE void vec_floats(uint4 w, float (&x)[4])
    {
        x[0] = float_of_bits(w.x);
        x[1] = float_of_bits(w.y);
        x[2] = float_of_bits(w.z);
        x[3] = float_of_bits(w.w);
    }
    MT_DEVICE uint4 vec_of(const float (&x)[4])
    {
        return make_uint4(bits_of_float(x[0]), bits_of_float(x[1]), bits_of_float(x[2]),
                          bits_of_float(x[3]));
    }
};

template <> struct packing<bf16> {
    MT_DEVICE void vec_floats(uint4 w, float (&x)[8])
    {
        pair_floats(w.x, x);
        pair_floats(w.y, x + 2);
        pair_floats(w.z, x + 4);
        pair_floats(w.w, x + 6);
    }
    MT_DEVICE uint4 vec_of(const float (&x)[8])
    {
        return make_uint4(bf16_pair(x[0], x[1]), bf16_pair(x[2], x[3]), bf16_pair(x[4], x[5]),
                          bf16_pair(x[6], x[7]));
    }
};

template <typename T> MT_DEVICE void vec_floats(uint4 w, float (&x)[VEC<T>])
{
    packing<T>::vec_floats(w, x);
}

template <typename T> MT_DEVICE uint4 vec_of(const float (&x)[VEC<T>])
{
    return packing<T>::vec_of(x);
}

/** Rounds two values as a store and a load would; both together cost as much as one. */
template <typename T> MT_DEVICE void round_two(float *x)
{
    if constexpr (sizeof(T) == 2)
        pair_floats(bf16_pair(x[0], x[1]), x);
}

/** Forces later code to unpack the values again, so that only half as many registers are held over a barrier. */
MT_DEVICE void hold_packed(uint4 &w)
{
#ifdef __CUDA_ARCH__
    asm volatile("" : "+r"(w.x), "+r"(w.y), "+r"(w.z), "+r"(w.w));
#else
    (void)w;
#endif
}

template <typename T> MT_DEVICE float rounded(float v)
{
    T t;
    store(&t, v);
    return load(&t);
}

/**
 * N elements as floats. N is 1, or VEC<T> with an address that is a multiple of 16; one kernel body serves both.
 */
template <typename T, int N> MT_DEVICE void load_n(const T *p, float (&x)[N])
{
    if constexpr (N == 1)
        x[0] = load(p);
    else
        vec_floats<T>(load16(p), x);
}

template <typename T, int N> MT_DEVICE void store_n(T *p, const float (&x)[N])
{
    if constexpr (N == 1)
        store(p, x[0]);
    else
        store16(p, vec_of<T>(x));
}

/** Four elements, aligned to their size: for kernels whose input and output have different widths. */
MT_DEVICE void load_four(const float *p, float (&x)[4])
{
    vec_floats<float>(load16(p), x);
}

MT_DEVICE void load_four(const bf16 *p, float (&x)[4])
{
    uint2 w = load_word<uint2>(p);
    pair_floats(w.x, x);
    pair_floats(w.y, x + 2);
}

MT_DEVICE void store_four(float *p, const float (&x)[4])
{
    store16(p, vec_of<float>(x));
}

MT_DEVICE void store_four(bf16 *p, const float (&x)[4])
{
    store_word(p, make_uint2(bf16_pair(x[0], x[1]), bf16_pair(x[2], x[3])));
}

/** N floats, for N elements of a vector: 1, 4 or 8. */
template <int N> MT_DEVICE void load_floats(const float *p, float (&x)[N])
{
    if constexpr (N == 1) {
        x[0] = *p;
    } else {
        for (int i = 0; i < N; i += 4) {
            float4 w = load_word<float4>(p + i);
            x[i] = w.x;
            x[i + 1] = w.y;
            x[i + 2] = w.z;
            x[i + 3] = w.w;
        }
    }
}

template <int N> MT_DEVICE void store_floats(float *p, const float (&x)[N])
{
    if constexpr (N == 1)
        *p = x[0];
    else
        for (int i = 0; i < N; i += 4)
            store_word(p + i, make_float4(x[i], x[i + 1], x[i + 2], x[i + 3]));
}

/** N elements of an O, which is float or the type whose vector has N, from element `at` on. */
template <typename O, int N> MT_DEVICE void load_either(const void *p, size_t at, float (&x)[N])
{
    if constexpr (sizeof(O) == sizeof(float))
        load_floats<N>(static_cast<const float *>(p) + at, x);
    else
        load_n<O, N>(static_cast<const O *>(p) + at, x);
}

template <typename O, int N> MT_DEVICE void store_either(void *p, size_t at, const float (&x)[N])
{
    if constexpr (sizeof(O) == sizeof(float))
        store_floats<N>(static_cast<float *>(p) + at, x);
    else
        store_n<O, N>(static_cast<O *>(p) + at, x);
}

/* --- functions ------------------------------------------------------------------------------ */

/** e^x; error at most 2 ulp. */
MT_DEVICE float exp_of(float x)
{
    return expf(x);
}

/** 1 / x; error at most 1 ulp. */
MT_DEVICE float reciprocal(float x)
{
#ifdef __CUDA_ARCH__
    float y;
    asm("rcp.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#else
    return 1.0f / x;
#endif
}

/** s = 1 / (1 + e^-x) and rest = 1 - s, without cancellation: derivatives multiply that by large numbers. */
struct logistic {
    float s, rest;
};

/** For results that are rounded to bf16, with the fast exponential. */
template <typename T> MT_DEVICE logistic logistic_of(float x)
{
    float e = sizeof(T) == 2 ? __expf(-x) : expf(-x), s = reciprocal(1.0f + e);
    return {s, x < 0.0f ? 1.0f - s : e * s};
}

/** Its s alone. */
template <typename T> MT_DEVICE float sigmoid(float x)
{
    return logistic_of<T>(x).s;
}

/* --- on the host ---------------------------------------------------------------------------- */

/** A factor as it is in the dtype. */
static inline float scale_in(enum mt_dtype t, float scale)
{
    return t == MT_BF16 ? mt_bf16_to_f32(mt_f32_to_bf16(scale)) : scale;
}

/** f() of a value of the dtype's type, which a lambda names by decltype(). */
template <typename F> static inline cudaError_t for_dtype(enum mt_dtype t, F f)
{
    return t == MT_BF16 ? f(bf16()) : f(float());
}

/** f() of values of two types: that of the dtype, and that of another one, which is the same or f32. */
template <typename F> static inline cudaError_t for_dtypes(enum mt_dtype t, enum mt_dtype other, F f)
{
    if (t != MT_BF16)
        return f(float(), float());
    return other == MT_BF16 ? f(bf16(), bf16()) : f(bf16(), float());
}

/** f() of std::true_type or std::false_type. */
template <typename F> static inline cudaError_t for_flag(bool flag, F f)
{
    return flag ? f(std::true_type()) : f(std::false_type());
}

/** A type and how many of it a thread takes at once, as a value. */
template <typename T, int N> struct vectors {
    using type = T;
    static constexpr int n = N;
};

/** f() of vectors of T; of single elements where what it takes is not in whole vectors. */
template <typename T, typename F> static inline cudaError_t for_widths(bool whole, F f)
{
    return whole ? f(vectors<T, VEC<T>>()) : f(vectors<T, 1>());
}

/** The same by the dtype, for rows of c. */
template <typename F> static inline cudaError_t for_vectors(enum mt_dtype t, size_t c, F f)
{
    return for_dtype(t, [=](auto x) { return for_widths<decltype(x)>(c % VEC<decltype(x)> == 0, f); });
}

static inline bool aligned_to(const void *p, size_t bytes)
{
    return reinterpret_cast<uintptr_t>(p) % bytes == 0;
}

/** Whether all rows of `ld` elements, from p on, start at multiples of 16 bytes. */
template <typename T> static inline bool rows_aligned(const void *p, size_t ld)
{
    return aligned_to(p, 16) && ld % VEC<T> == 0;
}

/** Whether vectors divide a view's heads, and each begins at a multiple of 16 bytes. */
template <typename T> static inline bool heads_aligned(const struct mt_heads &h)
{
    return h.dim % VEC<T> == 0 && rows_aligned<T>(h.p, h.ld) && (h.n <= 1 || h.stride % VEC<T> == 0);
}
