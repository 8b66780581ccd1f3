/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the lanes of a warp do together. Each lane brings a struct; the last to arrive computes for all. PTX's rules
 * of shuffles, and the layouts of fragments, are those of the chapters "shfl.sync", "ldmatrix" and "Matrix fragments
 * for mma.m16n8k16 with floating point type" of the PTX ISA.
 */
#include "ptx.h"

namespace ptx {

enum { WARP = 32 };

namespace {

struct shuffled : mt_emu_lane {
    thread *t;
    shuffle how;
    unsigned line;
    uint32_t v, b, c, result;
    bool valid;
};

/* The lane that `lane` asks for, and whether it is within its segment; else it keeps its own value. */
bool source(const shuffled &s, unsigned lane, unsigned *from)
{
    unsigned b = s.b & 31, clamp = s.c & 31, mask = s.c >> 8 & 31;
    unsigned most = (lane & mask) | (clamp & ~mask), least = lane & mask;
    int j = 0;
    bool in = false;
    switch (s.how) {
    case SHFL_UP: j = static_cast<int>(lane - b), in = j >= static_cast<int>(most); break;
    case SHFL_DOWN: j = static_cast<int>(lane + b), in = j <= static_cast<int>(most); break;
    case SHFL_BFLY: j = static_cast<int>(lane ^ b), in = j <= static_cast<int>(most); break;
    case SHFL_IDX: j = static_cast<int>(least | (b & ~mask)), in = j <= static_cast<int>(most); break;
    }
    *from = in ? static_cast<unsigned>(j) : lane;
    return in;
}

void shuffle_all(mt_emu_lane *const lanes[WARP], unsigned mask)
{
    for (unsigned i = 0; i < WARP; i++) {
        shuffled *s = static_cast<shuffled *>(lanes[i]);
        if (!s)
            continue;
        unsigned from;
        s->valid = source(*s, i, &from);
        if (!lanes[from])
            fault(*s->t, s->line, "the shuffle reads from lane %u, which is not in its mask 0x%08x", from, mask);
        s->result = static_cast<shuffled *>(lanes[from])->v;
    }
}

struct voter : mt_emu_lane {
    bool p;
    uint32_t result;
};

void vote_all(mt_emu_lane *const lanes[WARP], unsigned)
{
    uint32_t all = 0;
    for (unsigned i = 0; i < WARP; i++)
        if (lanes[i] && static_cast<voter *>(lanes[i])->p)
            all |= 1u << i;
    for (unsigned i = 0; i < WARP; i++)
        if (lanes[i])
            static_cast<voter *>(lanes[i])->result = all;
}

struct matrix_row : mt_emu_lane {
    thread *t;
    unsigned line, address;
    int n;
    bool trans;
    uint32_t *out;
};

void load_matrices(mt_emu_lane *const lanes[WARP], unsigned)
{
    const matrix_row *any = static_cast<matrix_row *>(lanes[0]);
    for (int m = 0; m < any->n; m++) {
        uint16_t x[8][8];
        for (int row = 0; row < 8; row++) {
            matrix_row *r = static_cast<matrix_row *>(lanes[8 * m + row]);
            memcpy(x[row], shared_at(*r->t, r->address, 16, r->line, READ), 16);
        }
        for (unsigned i = 0; i < WARP; i++) {
            unsigned k = i % 4 * 2, g = i / 4;
            uint32_t lo = any->trans ? x[k][g] : x[g][k], hi = any->trans ? x[k + 1][g] : x[g][k + 1];
            static_cast<matrix_row *>(lanes[i])->out[m] = lo | hi << 16;
        }
    }
}

struct fragment : mt_emu_lane {
    float *d;
    const uint32_t *a, *b;
    const float *c;
};

float half_of(uint32_t pair, unsigned high)
{
    return flt(high ? pair & 0xffff0000u : pair << 16);
}

void multiply(mt_emu_lane *const lanes[WARP], unsigned)
{
    float a[16][16], b[8][16], d[WARP][4];
    for (unsigned i = 0; i < WARP; i++) {
        const fragment *f = static_cast<fragment *>(lanes[i]);
        unsigned g = i / 4, k = i % 4 * 2;
        for (unsigned h = 0; h < 2; h++) {
            a[g][k + h] = half_of(f->a[0], h);
            a[g + 8][k + h] = half_of(f->a[1], h);
            a[g][k + 8 + h] = half_of(f->a[2], h);
            a[g + 8][k + 8 + h] = half_of(f->a[3], h);
            b[g][k + h] = half_of(f->b[0], h);
            b[g][k + 8 + h] = half_of(f->b[1], h);
        }
    }
    for (unsigned i = 0; i < WARP; i++)
        for (unsigned e = 0; e < 4; e++) {
            unsigned row = i / 4 + e / 2 * 8, col = i % 4 * 2 + e % 2;
            double sum = static_cast<double>(static_cast<fragment *>(lanes[i])->c[e]);
            for (unsigned k = 0; k < 16; k++)
                sum += static_cast<double>(a[row][k]) * static_cast<double>(b[col][k]);
            d[i][e] = static_cast<float>(sum);
        }
    for (unsigned i = 0; i < WARP; i++)
        memcpy(static_cast<fragment *>(lanes[i])->d, d[i], sizeof(d[i]));
}

} // namespace

uint32_t shfl(thread &t, shuffle how, bool *valid, uint32_t v, uint32_t b, uint32_t c, uint32_t mask,
              const char *file, unsigned line)
{
    shuffled s;
    s.all = shuffle_all;
    s.t = &t;
    s.how = how;
    s.line = line;
    s.v = v;
    s.b = b;
    s.c = c;
    mt_emu_warp_call(mask, &s, file, static_cast<int>(line));
    *valid = s.valid;
    return s.result;
}

uint32_t ballot(thread &, bool p, uint32_t mask, const char *file, unsigned line)
{
    voter s;
    s.all = vote_all;
    s.p = p;
    mt_emu_warp_call(mask, &s, file, static_cast<int>(line));
    return s.result;
}

void ldmatrix(thread &t, uint32_t *out, int n, bool trans, uint32_t address, const char *file, unsigned line)
{
    matrix_row s;
    s.all = load_matrices;
    s.t = &t;
    s.line = line;
    s.address = address;
    s.n = n;
    s.trans = trans;
    s.out = out;
    mt_emu_warp_call(0xffffffffu, &s, file, static_cast<int>(line));
}

void mma_bf16(thread &, float *d, const uint32_t *a, const uint32_t *b, const float *c, const char *file,
              unsigned line)
{
    fragment s;
    s.all = multiply;
    s.d = d;
    s.a = a;
    s.b = b;
    s.c = c;
    mt_emu_warp_call(0xffffffffu, &s, file, static_cast<int>(line));
}

} // namespace ptx
