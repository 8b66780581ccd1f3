/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "cuda_runtime.h"

/**
 * What cuda/kernels/mma.cuh takes of tensor cores, for the host emulation: an address in shared memory is a pointer, a
 * copy is done at once (tests/cuda_ptx checks the waits), and a warp's lanes bring what they have to a call of the warp.
 */
using shared_address = uintptr_t;

static inline shared_address address_in_shared(const void *p)
{
    return reinterpret_cast<shared_address>(p);
}
static inline void mt_emu_copy(shared_address to, const void *from, int bytes, size_t all)
{
    memset(reinterpret_cast<void *>(to), 0, all);
    memcpy(reinterpret_cast<void *>(to), from, static_cast<size_t>(bytes));
}
static inline void copy_16_async(shared_address to, const void *from, int bytes)
{
    mt_emu_copy(to, from, bytes, 16);
}
static inline void copy_4_async(shared_address to, const void *from, int bytes)
{
    mt_emu_copy(to, from, bytes, 4);
}
static inline void commit_copies() {}
template <int N> static inline void wait_for_copies() {}

struct mt_emu_matrix_row : mt_emu_lane {
    shared_address row;
    bool trans;
    uint32_t *out;
};

static inline void mt_emu_load_all(mt_emu_lane *const lanes[32], unsigned)
{
    for (int m = 0; m < 4; m++) {
        uint16_t x[8][8];
        for (int row = 0; row < 8; row++)
            memcpy(x[row], reinterpret_cast<const void *>(static_cast<mt_emu_matrix_row *>(lanes[8 * m + row])->row), 16);
        for (int i = 0; i < 32; i++) {
            auto *r = static_cast<mt_emu_matrix_row *>(lanes[i]);
            int k = i % 4 * 2, g = i / 4;
            uint32_t lo = r->trans ? x[k][g] : x[g][k], hi = r->trans ? x[k + 1][g] : x[g][k + 1];
            r->out[m] = lo | hi << 16;
        }
    }
}
static inline void mt_emu_load_matrices(uint32_t (&r)[4], shared_address row, bool trans, const char *file, int line)
{
    mt_emu_matrix_row s;
    s.all = mt_emu_load_all;
    s.row = row;
    s.trans = trans;
    s.out = r;
    mt_emu_warp_call(0xffffffffu, &s, file, line);
}
static inline void load_matrices(uint32_t (&r)[4], shared_address row, MT_EMU_HERE)
{
    mt_emu_load_matrices(r, row, false, file_, line_);
}
static inline void load_transposed(uint32_t (&r)[4], shared_address row, MT_EMU_HERE)
{
    mt_emu_load_matrices(r, row, true, file_, line_);
}

struct mt_emu_fragment : mt_emu_lane {
    float *d;
    const uint32_t *a;
    uint32_t b[2];
};

static inline float mt_emu_half(uint32_t pair, int high)
{
    return __uint_as_float(high ? pair & 0xffff0000u : pair << 16);
}
static inline void mt_emu_multiply_all(mt_emu_lane *const lanes[32], unsigned)
{
    float a[16][16], b[8][16], sums[32][4];
    for (int i = 0; i < 32; i++) {
        const auto *f = static_cast<mt_emu_fragment *>(lanes[i]);
        int g = i / 4, k = i % 4 * 2;
        for (int part = 0; part < 4; part++)
            for (int h = 0; h < 2; h++)
                a[g + part % 2 * 8][k + part / 2 * 8 + h] = mt_emu_half(f->a[part], h);
        for (int part = 0; part < 2; part++)
            for (int h = 0; h < 2; h++)
                b[g][k + part * 8 + h] = mt_emu_half(f->b[part], h);
    }
    for (int i = 0; i < 32; i++)
        for (int e = 0; e < 4; e++) {
            int row = i / 4 + e / 2 * 8, col = i % 4 * 2 + e % 2;
            double sum = static_cast<double>(static_cast<mt_emu_fragment *>(lanes[i])->d[e]);
            for (int k = 0; k < 16; k++)
                sum += static_cast<double>(a[row][k]) * static_cast<double>(b[col][k]);
            sums[i][e] = static_cast<float>(sum);
        }
    for (int i = 0; i < 32; i++)
        memcpy(static_cast<mt_emu_fragment *>(lanes[i])->d, sums[i], sizeof(sums[i]));
}
static inline void multiply_add(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, MT_EMU_HERE)
{
    mt_emu_fragment s;
    s.all = mt_emu_multiply_all;
    s.d = d;
    s.a = a;
    s.b[0] = b0;
    s.b[1] = b1;
    mt_emu_warp_call(0xffffffffu, &s, file_, line_);
}

static inline float exp2_approx(float x)
{
    return exp2f(x);
}
static inline uint32_t mt_emu_to_bf16(float f)
{
    uint32_t u = __float_as_uint(f);
    return f != f ? 0x7fff : (u + 0x7fff + (u >> 16 & 1)) >> 16;
}
static inline uint32_t rounded_pair(float lo, float hi)
{
    return mt_emu_to_bf16(hi) << 16 | mt_emu_to_bf16(lo);
}
