/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "cuda_emu_block.h"

/**
 * What the C++ that ptx2c.py makes of PTX consists of: a table entry a kernel, instructions as PTX defines them,
 * and checked accesses to memory. A kernel's function is called once a thread, by the fibers of the emulation.
 * NaNs are NaNs; their bits are the host's.
 */
namespace ptx {

/* --- kernels and launches (runtime.cpp) ------------------------------------------------------- */

struct param {
    uint32_t offset, bytes;
};
/** A variable in shared memory. */
struct variable {
    const char *name;
    uint32_t address, bytes;
};
/** Instructions that are executed together: where they begin in the file, how many they are. */
struct block_of_code {
    uint32_t line, instructions;
};

struct kernel {
    const char *name, *file, *path; /* mangled; the PTX file, and where it lies */
    void (*run)(const void *launch);
    const param *params;
    uint32_t n_params, param_bytes;
    uint32_t max_threads[3]; /* .maxntid; 0: none */
    const variable *shared;
    uint32_t n_shared, shared_bytes; /* the variables' own bytes, without the gaps between them */
    uint32_t dynamic_align;          /* of its extern shared array; 0: none */
    const block_of_code *blocks;
    unsigned char *executed; /* a flag a block */
    uint32_t n_blocks;
    kernel *next;
};
/** Called before main, by constructors. */
void add_kernel(kernel *k);

/** Addresses of shared memory begin here, so that none is 0; between variables is a gap. */
enum : uint32_t { SHARED_BASE = 1024, SHARED_GAP = 64 };
/** Where shared memory lies among generic addresses. */
constexpr uint64_t SHARED_WINDOW = uint64_t(1) << 62;

struct launch {
    const kernel *k;
    const char *name; /* demangled */
    uint32_t serial, dynamic_address, dynamic_bytes;
    alignas(16) unsigned char params[4096];
};

/* --- a thread, and what it may touch (checks.cpp) ---------------------------------------------- */

struct range {
    uint64_t lo, hi;
};
/** What an OS thread keeps for the block it runs. */
struct context {
    range near[16]; /* global memory known to be allocated, by the line that touched it */
    uint64_t block_epoch;
    const launch *l;
    char *shared; /* of address SHARED_BASE */
    uint32_t block;
    struct shadow *shadow;
    uint32_t living; /* threads of the block that have not left */
    struct traffic *moved; /* NULL: nothing is counted */
    struct accesses *accesses;
};
struct thread {
    context *c;
    const launch *l;
    uint32_t id;
    explicit thread(const void *launch);
};
enum access { READ, READ_CONSTANT, WRITE };

/** Ends the process with the kernel, the instruction, the block and the thread. */
[[noreturn]] void fault(const thread &t, unsigned line, const char *fmt, ...) __attribute__((format(printf, 3, 4)));
[[noreturn]] void unset(const thread &t, unsigned line, const char *reg);
/** Checked; returns where the bytes are. */
void *global_slow(thread &t, uint64_t a, unsigned bytes, unsigned line, access how);
void *shared_at(thread &t, uint32_t a, unsigned bytes, unsigned line, access how);
void leave(thread &t, unsigned line);
/** All lanes of the warp: orders their accesses. */
void sync_warp(thread &t, unsigned mask, const char *file, unsigned line);
void copy_async(thread &t, uint32_t to, uint64_t from, unsigned bytes, unsigned from_bytes, unsigned line);
void commit_group(thread &t);
/** Completes all committed groups but the last n; n < 0: everything. */
void wait_group(thread &t, int n);
/** y, moved by MT_PTX_APPROX units in the last place, up or down by x. */
float approximate(float y, float x);

template <class V> static inline V *global_at(thread &t, uint64_t a, unsigned line, access how)
{
    const range &r = t.c->near[line % 16];
    if (__builtin_expect((a < r.lo) | (a + sizeof(V) > r.hi) | ((a & (sizeof(V) - 1)) != 0), 0))
        return static_cast<V *>(global_slow(t, a, sizeof(V), line, how));
    return reinterpret_cast<V *>(a);
}

template <class V> static inline V ld_global(thread &t, uint64_t a, unsigned line)
{
    return *global_at<V>(t, a, line, READ);
}
template <class V> static inline V ld_constant(thread &t, uint64_t a, unsigned line)
{
    return *global_at<V>(t, a, line, READ_CONSTANT);
}
template <class V> static inline void st_global(thread &t, uint64_t a, V v, unsigned line)
{
    *global_at<V>(t, a, line, WRITE) = v;
}
template <class V> static inline V ld_shared(thread &t, uint64_t a, unsigned line)
{
    return *static_cast<V *>(shared_at(t, static_cast<uint32_t>(a), sizeof(V), line, READ));
}
template <class V> static inline void st_shared(thread &t, uint64_t a, V v, unsigned line)
{
    *static_cast<V *>(shared_at(t, static_cast<uint32_t>(a), sizeof(V), line, WRITE)) = v;
}
template <class V> static inline V ld_generic(thread &t, uint64_t a, unsigned line)
{
    return a >= SHARED_WINDOW ? ld_shared<V>(t, a - SHARED_WINDOW, line) : ld_global<V>(t, a, line);
}
template <class V> static inline void st_generic(thread &t, uint64_t a, V v, unsigned line)
{
    if (a >= SHARED_WINDOW)
        st_shared(t, a - SHARED_WINDOW, v, line);
    else
        st_global(t, a, v, line);
}
template <class V> static inline V ld_param(thread &t, uint64_t a, unsigned line)
{
    V v;
    if (a % sizeof(V) || a + sizeof(V) > t.l->k->param_bytes)
        fault(t, line, "%zu bytes of the parameters at %llu, of %u", sizeof(V), (unsigned long long)a,
              t.l->k->param_bytes);
    memcpy(&v, t.l->params + a, sizeof(V));
    return v;
}

template <class T> struct alignas(2 * sizeof(T)) v2 {
    T v[2];
};
template <class T> struct alignas(4 * sizeof(T)) v4 {
    T v[4];
};

/* --- numbers ---------------------------------------------------------------------------------- */

static inline float flt(uint32_t u)
{
    float f;
    memcpy(&f, &u, 4);
    return f;
}
static inline uint32_t bits(float f)
{
    uint32_t u;
    memcpy(&u, &f, 4);
    return u;
}
static inline double dbl(uint64_t u)
{
    double d;
    memcpy(&d, &u, 8);
    return d;
}
static inline uint64_t bits(double d)
{
    uint64_t u;
    memcpy(&u, &d, 8);
    return u;
}

/* Shifts by the width and more are defined: nothing is left, or the sign. */
template <class U> static inline U shl(U a, uint32_t n)
{
    return n >= 8 * sizeof(U) ? 0 : static_cast<U>(a << n);
}
template <class T> static inline T shr(T a, uint32_t n)
{
    uint32_t most = 8 * sizeof(T) - 1;
    return n <= most ? static_cast<T>(a >> n) : a < 0 ? static_cast<T>(-1) : 0;
}
template <class T> static inline T lesser(T a, T b)
{
    return b < a ? b : a;
}
template <class T> static inline T greater(T a, T b)
{
    return a < b ? b : a;
}
/* Of a NaN and a number, the number; -0 is less than +0. */
static inline float lesser(float a, float b)
{
    return a != a ? b : b != b ? a : a == b ? flt(bits(a) | bits(b)) : b < a ? b : a;
}
static inline float greater(float a, float b)
{
    return a != a ? b : b != b ? a : a == b ? flt(bits(a) & bits(b)) : a < b ? b : a;
}
template <class T> static inline T quotient(const thread &t, T a, T b, unsigned line)
{
    if (!b)
        fault(t, line, "division by zero");
    return a / b;
}
template <class T> static inline T remainder_of(const thread &t, T a, T b, unsigned line)
{
    if (!b)
        fault(t, line, "division by zero");
    return a % b;
}
template <class T, class W> static inline T mul_hi(T a, T b)
{
    return static_cast<T>((static_cast<W>(a) * static_cast<W>(b)) >> (8 * sizeof(T)));
}
static inline uint32_t bfe_u32(uint32_t a, uint32_t at, uint32_t n)
{
    at &= 255, n &= 255;
    uint64_t rest = at < 32 ? a >> at : 0;
    return static_cast<uint32_t>(n < 32 ? rest & ((uint64_t(1) << n) - 1) : rest);
}
/** b with the n lowest bits of a at bit `at`. */
static inline uint32_t bfi_b32(uint32_t a, uint32_t b, uint32_t at, uint32_t n)
{
    at &= 255, n &= 255;
    if (at >= 32)
        return b;
    uint64_t mask = n < 32 ? ((uint64_t(1) << n) - 1) << at : ~uint64_t(0) << at;
    return static_cast<uint32_t>((b & ~mask) | ((uint64_t(a) << at) & mask));
}
/** Of the eight bytes b:a, the four that c's nibbles name; a nibble's high bit asks for the byte's sign. */
static inline uint32_t prmt(uint32_t a, uint32_t b, uint32_t c)
{
    uint64_t all = static_cast<uint64_t>(b) << 32 | a;
    uint32_t out = 0;
    for (int i = 0; i < 4; i++, c >>= 4) {
        uint32_t byte = (all >> 8 * (c & 7)) & 255;
        out |= (c & 8 ? (byte & 128 ? 255u : 0u) : byte) << 8 * i;
    }
    return out;
}

/** a * b + c rounded down. In double the product is exact; what the sum loses is known. */
static inline float fma_down(float a, float b, float c)
{
    double p = static_cast<double>(a) * b, d = c, s = p + d, q = s - p, lost = (p - (s - q)) + (d - q);
    float r = static_cast<float>(s);
    if (r > s || (r == s && lost < 0))
        r = std::nextafterf(r, -INFINITY);
    return r;
}
/** a + b rounded towards zero. */
static inline float add_to_zero(float a, float b)
{
    double x = a, y = b, s = x + y, q = s - x, lost = (x - (s - q)) + (y - q);
    float r = static_cast<float>(s);
    double over = r == s ? -lost : r - s;
    return (r > 0 && over > 0) || (r < 0 && over < 0) ? std::nextafterf(r, 0.0f) : r;
}
/* Towards zero; beyond the range the nearest number of it, and 0 for a NaN. */
inline int32_t truncated(float x)
{
    return x >= 0x1p31f ? INT32_MAX : x >= -0x1p31f ? static_cast<int32_t>(x) : x < 0 ? INT32_MIN : 0;
}
static inline float saturate(float x)
{
    return x > 0 ? (x < 1 ? x : 1.0f) : 0.0f; /* a NaN becomes 0 */
}
static inline float flush(float x)
{
    return std::fpclassify(x) == FP_SUBNORMAL ? std::copysign(0.0f, x) : x;
}
static inline float ex2(float x) /* 1 exactly, of zeros and of what is flushed to them */
{
    return flush(x) == 0 ? 1.0f : approximate(exp2f(x), x);
}
static inline float ex2_ftz(float x)
{
    return flush(ex2(flush(x)));
}
static inline float rcp_approx(float x)
{
    return approximate(1.0f / x, x);
}
static inline float rcp_ftz(float x)
{
    return flush(approximate(1.0f / flush(x), x));
}
/** To nearest even; every NaN is the same. */
static inline uint32_t bf16_of(float f)
{
    uint32_t u = bits(f);
    return f != f ? 0x7fff : (u + 0x7fff + (u >> 16 & 1)) >> 16;
}
static inline uint32_t bf16x2(float hi, float lo)
{
    return bf16_of(hi) << 16 | bf16_of(lo);
}

/* --- warps (warp.cpp) --------------------------------------------------------------------------- */

enum shuffle { SHFL_UP, SHFL_DOWN, SHFL_BFLY, SHFL_IDX };
uint32_t shfl(thread &t, shuffle how, bool *valid, uint32_t v, uint32_t b, uint32_t c, uint32_t mask,
              const char *file, unsigned line);
/** Bit i: lane i's predicate. */
uint32_t ballot(thread &t, bool p, uint32_t mask, const char *file, unsigned line);
/** ldmatrix: n matrices of 8 x 8 halves; the warp's lanes 8 j to 8 j + 7 bring the rows of matrix j. */
void ldmatrix(thread &t, uint32_t *out, int n, bool trans, uint32_t address, const char *file, unsigned line);
/** mma.m16n8k16.row.col, bf16 to f32: sums in double, rounded once. */
void mma_bf16(thread &t, float *d, const uint32_t *a, const uint32_t *b, const float *c, const char *file,
              unsigned line);

} // namespace ptx
