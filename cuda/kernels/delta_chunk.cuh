/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "launch.cuh"
#include "scalar.cuh"
#include "workspace.h"

/**
 * A chunk of the gated delta rule, or of the plain one, by a block: the equations, and the names of their terms, are
 * those of src/device/cpu/delta_rule.c. A block's matrices lie in its slot of the workspace, with rows padded by zeros;
 * what there is once a row is in shared memory. Every function is called by all threads, and ends with a barrier.
 */
namespace delta {

static constexpr int C = MT_DELTA_CHUNK;
static constexpr unsigned THREADS = 256;

/** A slot of the workspace: mt_cuda_delta_slot_floats() floats. */
struct work {
    int wk, wv, wide;              /* padded widths of heads; wide = wv + wk */
    float *q, *k, *dq, *dk;        /* [C, wk] */
    float *v, *vn, *d_o;           /* [C, wv] */
    float *uw, *yz, *t;            /* [C, wide] */
    float *kk, *qk, *x, *a, *p, *dp, *da; /* [C, C] */
    float *state, *ds;             /* [value heads of a job][wk, wv] */
    int old;                       /* of the chunk's rows, those that are kept from before, and where */
    const char *kept;
    struct mt_delta_kept at;
};

/** A sum in twice the precision of float, hi + lo. In double it would be 64 times slower on GPUs for workstations. */
struct pair {
    float hi, lo;
};

template <typename T = double> MT_DEVICE T value_of(pair x)
{
    return static_cast<T>(x.hi) + static_cast<T>(x.lo);
}

/** s + x, where x is less exact by rest (Knuth 1969, 4.2.2, theorem B). */
MT_DEVICE pair plus(pair s, float x, float rest)
{
    float t = s.hi + x, part = t - s.hi;
    return {t, (s.lo + rest) + ((s.hi - (t - part)) + (x - part))};
}

/** s + x y (Ogita, Rump and Oishi 2005, algorithm 5.3). */
MT_DEVICE pair plus_product(pair s, float x, float y)
{
    float p = x * y;
    return plus(s, p, fmaf(x, y, -p));
}

/** Once a row. */
struct rows {
    double sum[C], dsum[C], dbeta[C], part[C];
    pair of_sum[C]; /* sum[C] */
    float beta[C], decay[C], end[C], rq[C], rk[C];
};

MT_DEVICE float *take(float **at, int floats)
{
    float *here = *at;
    *at += floats;
    return here;
}

MT_DEVICE work work_of(float *at, int wk, int wv, int heads)
{
    work w;
    w.wk = wk;
    w.wv = wv;
    w.wide = wk + wv;
    w.q = take(&at, C * wk);
    w.k = take(&at, C * wk);
    w.dq = take(&at, C * wk);
    w.dk = take(&at, C * wk);
    w.v = take(&at, C * wv);
    w.vn = take(&at, C * wv);
    w.d_o = take(&at, C * wv);
    w.uw = take(&at, C * w.wide);
    w.yz = take(&at, C * w.wide);
    w.t = take(&at, C * w.wide);
    w.kk = take(&at, C * C);
    w.qk = take(&at, C * C);
    w.x = take(&at, C * C);
    w.a = take(&at, C * C);
    w.p = take(&at, C * C);
    w.dp = take(&at, C * C);
    w.da = take(&at, C * C);
    w.state = take(&at, heads * wk * wv);
    w.ds = at;
    w.old = 0;
    w.kept = nullptr;
    w.at = {};
    return w;
}

MT_DEVICE const char *kept_at(const work &w, size_t at)
{
    return w.kept ? w.kept + at : nullptr;
}

/** The value heads [first, first + n) of a document's job, which share a key head. */
struct part {
    size_t key, first;
    int n;
};

MT_DEVICE part part_of(const struct mt_delta_rule &a, const struct mt_cuda_delta_buffers &b, size_t job)
{
    size_t all = a.v.n / a.k.n, key = job / b.jobs.of_key, from = job % b.jobs.of_key * b.jobs.heads;
    size_t rest = all - from, n = rest < b.jobs.heads ? rest : b.jobs.heads;
    return {key, key * all + from, static_cast<int>(n)};
}

/** D = by * B0 + sign * A B, with multiply<false>() without B0: element (i, k) of A is a[i * rs + k * cs], (k, j) of B
 * b[k * rb + j * cb], of which one step is 1. An element's sum is in the order of k. */
struct product {
    int m, n, k; /* multiples of 4, but k where rows of A and columns of B lie side by side */
    const float *a;
    int rs, cs;
    const float *b;
    int rb, cb;
    float *d; /* apart from A and B */
    int ldd;
    float sign;
    const float *add; /* B0; it may be D */
    int ld_add;
    float by;
};

/*
 * A block makes a tile of D of C rows and columns at a time, a thread EACH by EACH of it, and has STEP of k at once in
 * shared memory. There four elements of a row lie in another place for each four of k, swizzled(), so that a warp finds
 * each bank once, whichever way it goes. What the next step needs is on its way while one is computed.
 */
static constexpr int EACH = 4, STEP = 32, FOURS = STEP * C / EACH / static_cast<int>(THREADS);
static_assert(C / EACH * (C / EACH) == THREADS && STEP / EACH == 8, "a thread for each part of a tile");
struct tiles {
    float a[STEP][C], b[STEP][C];
};

MT_DEVICE tiles &shared_tiles()
{
    __shared__ __align__(16) tiles t;
    return t;
}

MT_DEVICE int swizzled(int k, int i)
{
    return i ^ (k / EACH % 8 * EACH);
}

/* Which elements of a step's A^T or B a thread moves: four of k if `by_k`, else of i. */
MT_DEVICE void place_of(int which, bool by_k, int *k, int *i)
{
    int at = static_cast<int>(threadIdx.x) + which * static_cast<int>(THREADS);
    *k = by_k ? at % (STEP / EACH) * EACH : at / (C / EACH);
    *i = by_k ? at / (STEP / EACH) : at % (C / EACH) * EACH;
}

/* Element (k, i) is from[i * along + k * across], i < n and k < depth, else 0. */
MT_DEVICE void fetch(float (&x)[FOURS][EACH], const float *from, int along, int across, int n, int depth)
{
    MT_UNROLL(2)
    for (int which = 0, k, i; which < FOURS; which++) {
        place_of(which, across == 1, &k, &i);
        MT_UNROLL(4)
        for (int e = 0; e < EACH; e++)
            x[which][e] = 0;
        if (i < n && k < depth)
            load_four(from + i * along + k * across, x[which]);
    }
}

MT_DEVICE void put(float (&to)[STEP][C], const float (&x)[FOURS][EACH], bool by_k)
{
    MT_UNROLL(2)
    for (int which = 0, k, i; which < FOURS; which++) {
        place_of(which, by_k, &k, &i);
        float *at = &to[k][swizzled(k, i)];
        if (!by_k)
            *reinterpret_cast<float4 *>(at) = make_float4(x[which][0], x[which][1], x[which][2], x[which][3]);
        MT_UNROLL(4)
        for (int e = 0; e < EACH && by_k; e++)
            at[e * C] = x[which][e];
    }
}

MT_DEVICE void add_product(float (&sum)[EACH][EACH], const float *a, const float *b)
{
    float x[EACH], y[EACH];
    load_four(a, x);
    load_four(b, y);
    MT_UNROLL(4)
    for (int r = 0; r < EACH; r++) {
        MT_UNROLL(4)
        for (int c = 0; c < EACH; c++)
            sum[r][c] = fmaf(x[r], y[c], sum[r][c]);
    }
}

/* A thread's part of D, from row i and column j on. */
template <bool ADD> MT_DEVICE void store_part(const product &x, const float (&sum)[EACH][EACH], int i, int j)
{
    MT_UNROLL(4)
    for (int r = 0; r < EACH; r++) {
        float was[EACH] = {}, is[EACH];
        if (ADD)
            load_four(x.add + (i + r) * x.ld_add + j, was);
        MT_UNROLL(4)
        for (int c = 0; c < EACH; c++)
            is[c] = (ADD ? x.by * was[c] : 0.0f) + x.sign * sum[r][c];
        store_four(x.d + (i + r) * x.ldd + j, is);
    }
}

/* A thread's part of the sums of a tile of D from row i and column j on. */
MT_DEVICE void sum_tile(const product &x, float (&sum)[EACH][EACH], int i, int j, int row, int column)
{
    tiles &t = shared_tiles();
    bool own = i + row < x.m && j + column < x.n;
    float a[FOURS][EACH] = {}, b[FOURS][EACH] = {};
    MT_UNROLL(1)
    for (int k = 0, depth = 0;; k += STEP) { /* fetches a step, computes the one before */
        int left = x.k - k;
        if (left > 0) {
            fetch(a, x.a + i * x.rs + k * x.cs, x.rs, x.cs, x.m - i, left);
            fetch(b, x.b + j * x.cb + k * x.rb, x.cb, x.rb, x.n - j, left);
        }
        MT_UNROLL(4)
        for (int at = 0; own && at < depth; at++)
            add_product(sum, t.a[at] + swizzled(at, row), t.b[at] + swizzled(at, column));
        __syncthreads();
        if (left <= 0)
            return;
        put(t.a, a, x.cs == 1);
        put(t.b, b, x.rb == 1);
        depth = left < STEP ? left : STEP;
        __syncthreads();
    }
}

template <bool ADD = true> MT_DEVICE void multiply(const product &x)
{
    int across = (x.n + C - 1) / C, all = (x.m + C - 1) / C * across;
    int at = static_cast<int>(threadIdx.x), row = at / (C / EACH) * EACH, column = at % (C / EACH) * EACH;
    MT_UNROLL(1)
    for (int tile = 0; tile < all; tile++) {
        int i = tile / across * C, j = tile % across * C;
        float sum[EACH][EACH] = {};
        sum_tile(x, sum, i, j, row, column);
        if (i + row < x.m && j + column < x.n)
            store_part<ADD>(x, sum, i + row, j + column);
    }
    __syncthreads();
}

MT_DEVICE void clear(float *p, int n)
{
    MT_UNROLL(1)
    for (int i = static_cast<int>(threadIdx.x); i < n; i += THREADS)
        p[i] = 0.0f;
    __syncthreads();
}

/** write(i, read(i)) for i < n. A thread reads some before it writes any: a pass waits for memory a few times. */
template <typename F, typename G> MT_DEVICE void for_all(int n, F read, G write)
{
    constexpr int AHEAD = 8, ALL = static_cast<int>(THREADS);
    MT_UNROLL(1)
    for (int first = static_cast<int>(threadIdx.x); first < n; first += AHEAD * ALL) {
        decltype(read(0)) x[AHEAD] = {};
        MT_UNROLL(AHEAD)
        for (int i = 0; i < AHEAD; i++)
            if (first + i * ALL < n)
                x[i] = read(first + i * ALL);
        MT_UNROLL(AHEAD)
        for (int i = 0; i < AHEAD; i++)
            if (first + i * ALL < n)
                write(first + i * ALL, x[i]);
    }
    __syncthreads();
}

/** y = diag(by) x, of m rows. */
MT_DEVICE void scale_rows(float *y, const float *x, const float *by, int wide, int m = C)
{
    for_all(m * wide, [=](int i) { return by[i / wide] * x[i]; }, [=](int i, float v) { y[i] = v; });
}

/** x *= by, of n elements. */
MT_DEVICE void scale_all(float *x, float by, int n)
{
    for_all(n, [=](int i) { return x[i] * by; }, [=](int i, float v) { x[i] = v; });
}

/** An element of rows of heads, which is bf16 or float. */
MT_DEVICE float load_any(const void *p, size_t at, enum mt_dtype type)
{
    return type == MT_BF16 ? load(static_cast<const bf16 *>(p) + at) : load(static_cast<const float *>(p) + at);
}

MT_DEVICE void store_any(void *p, size_t at, enum mt_dtype type, float x)
{
    if (type == MT_BF16)
        store(static_cast<bf16 *>(p) + at, x);
    else
        store(static_cast<float *>(p) + at, x);
}

/** y += skip x, of a value head's rows. */
MT_DEVICE void add_skip(const struct mt_delta_rule &a, size_t head, float *y, const float *x, int n)
{
    if (!a.skip)
        return;
    float by = load_any(a.skip, head, a.dtype);
    for_all(n, [=](int i) { return fmaf(by, x[i], y[i]); }, [=](int i, float v) { y[i] = v; });
}

/** A warp's sum; every lane gets it. */
MT_DEVICE pair warp_total(pair v)
{
    for (int d = WARP / 2; d; d /= 2)
        v = plus(v, __shfl_xor_sync(0xffffffffu, v.hi, d), __shfl_xor_sync(0xffffffffu, v.lo, d));
    return v;
}

MT_DEVICE pair warp_dot(const float *x, const float *y, int n)
{
    pair sum = {};
    MT_UNROLL(4)
    for (int i = static_cast<int>(threadIdx.x) % WARP; i < n; i += WARP)
        sum = plus_product(sum, x[i], y[i]);
    return warp_total(sum);
}

/** Rows of a head as f32: `old` of `kept` (nullptr: zeros), those from `row` on, the rest of m zeros. */
MT_DEVICE void load_rows(float *dst, int wide, const struct mt_heads &h, enum mt_dtype type, size_t row, size_t head,
                         int n, int m = C, int old = 0, const void *kept = nullptr)
{
    int dim = static_cast<int>(h.dim);
    auto element = [&](int at) {
        int i = at / wide, c = at % wide;
        const void *from = i < old ? kept : h.p;
        size_t first = i < old ? (i * h.n + head) * h.dim : (row + (i - old)) * h.ld + head * h.stride;
        return i < n && c < dim && from ? load_any(from, first + c, type) : 0.0f;
    };
    for_all(m * wide, element, [=](int at, float x) { dst[at] = x; });
}

MT_DEVICE void store_rows(const float *src, int wide, const struct mt_heads &h, enum mt_dtype type, size_t row,
                          size_t head, int n)
{
    int dim = static_cast<int>(h.dim);
    auto write = [&](int at, float x) {
        store_any(h.p, (row + static_cast<size_t>(at / dim)) * h.ld + head * h.stride + at % dim, type, x);
    };
    for_all(n * dim, [=](int at) { return src[at / dim * wide + at % dim]; }, write);
}

/** Queries or keys of unit length, times scale; 1 / length to rstd. */
MT_DEVICE void normalise(float *x, float *rstd, int wide, float eps, float scale, int m)
{
    MT_UNROLL(1)
    for (int i = static_cast<int>(threadIdx.x) / WARP; i < m; i += THREADS / WARP) {
        float *row = x + i * wide, r = 1.0f / sqrtf(value_of<float>(warp_dot(row, row, wide)) + eps);
        MT_UNROLL(1)
        for (int c = static_cast<int>(threadIdx.x) % WARP; c < wide; c += WARP)
            row[c] = row[c] * r * scale;
        if (threadIdx.x % WARP == 0)
            rstd[i] = r;
    }
    __syncthreads();
}

/** Rows that products of a chunk of n have: C, or with what is carried those of the chunk, by whole tiles. */
MT_DEVICE int products_of(const struct mt_delta_rule &a, int n)
{
    return a.carried.after ? (n + 3) / 4 * 4 : C;
}

/** What value heads share: q, k, K K^T and Q K^T. */
MT_DEVICE void load_keys(const work &w, rows &r, const struct mt_delta_rule &a, size_t row, size_t head, int n)
{
    int m = products_of(a, n);
    load_rows(w.q, w.wk, a.q, a.dtype, row, head, n, m, w.old);
    load_rows(w.k, w.wk, a.k, a.dtype, row, head, n, m, w.old, kept_at(w, w.at.k));
    if (a.plain) {
        scale_all(w.q, a.scale, m * w.wk);
        multiply<false>({m, m, w.wk, w.q, w.wk, 1, w.k, 1, w.wk, w.qk, C, 1, nullptr, 0, 0});
        return;
    }
    normalise(w.q, r.rq, w.wk, a.eps, a.scale, m);
    normalise(w.k, r.rk, w.wk, a.eps, 1.0f, m);
    multiply<false>({m, m, w.wk, w.k, w.wk, 1, w.k, 1, w.wk, w.kk, C, 1, nullptr, 0, 0});
    multiply<false>({m, m, w.wk, w.q, w.wk, 1, w.k, 1, w.wk, w.qk, C, 1, nullptr, 0, 0});
}

struct between { /* two rows */
    float x, a, p;
};

/** G, D, E, B; X, A and P. */
MT_DEVICE void decays(const work &w, rows &r, const struct mt_delta_rule &a, size_t row, size_t head, int n)
{
    int i = static_cast<int>(threadIdx.x);
    if (i < C) {
        bool old = i < w.old;
        const float *g = old ? reinterpret_cast<const float *>(kept_at(w, w.at.g)) : a.g + row * a.v.n;
        const float *beta = old ? reinterpret_cast<const float *>(kept_at(w, w.at.beta)) : a.beta + row * a.v.n;
        size_t at = static_cast<size_t>(old ? i : i - w.old) * a.v.n + head;
        r.part[i] = i < n ? static_cast<double>(g[at]) : 0.0;
        r.beta[i] = i < n ? beta[at] : 0.0f;
    }
    __syncthreads();
    if (i == 0) {
        double sum = 0;
        MT_UNROLL(1)
        for (int j = 0; j < C; j++) {
            sum += r.part[j];
            r.sum[j] = sum;
            r.of_sum[j].hi = static_cast<float>(sum);
            r.of_sum[j].lo = static_cast<float>(sum - static_cast<double>(r.of_sum[j].hi));
        }
    }
    __syncthreads();
    if (i < C) {
        r.decay[i] = i < n ? exp_of(static_cast<float>(r.sum[i])) : 0.0f;
        r.end[i] = i < n ? exp_of(static_cast<float>(r.sum[C - 1] - r.sum[i])) : 0.0f;
    }
    int m = products_of(a, n);
    auto of = [&](int at) {
        int y = at / C, z = at % C;
        pair before = r.of_sum[z], at_y = r.of_sum[y];
        float x = z <= y && y < n ? exp_of((at_y.hi - before.hi) + (at_y.lo - before.lo)) : 0.0f;
        return between{x, !a.plain && z < y ? r.beta[y] * w.kk[at] * x : 0.0f, z < m ? w.qk[at] * x : 0.0f};
    };
    auto write = [&](int at, between v) {
        if (at % C >= m)
            return;
        w.x[at] = v.x;
        if (!a.plain)
            w.a[at] = v.a;
        w.p[at] = v.p;
    };
    for_all(m * C, of, write);
}

/** Rows that are solved at once, in registers. */
static constexpr int BAND = 16;
static_assert(BAND * BAND == THREADS, "a thread for each element of the triangle");

/** Rows [from, from + rows) of X in (I + A) X = B, or with LAST_FIRST in (I + A)^T X = B; of(row, column): B's elements.
 * If `more` w.t has the sums over the rows that are solved already. A thread has columns. */
template <bool LAST_FIRST, typename F>
MT_DEVICE void solve_band(const work &w, float *x, int from, int rows, bool more, F of)
{
    tiles &t = shared_tiles();
    auto place = [=](int i) { return LAST_FIRST ? rows - 1 - i : i; };
    int row = static_cast<int>(threadIdx.x) / BAND, column = static_cast<int>(threadIdx.x) % BAND;
    if (row < rows && column < rows) {
        int i = from + place(row), j = from + place(column);
        t.a[row][column] = w.a[LAST_FIRST ? j * C + i : i * C + j];
    }
    __syncthreads();
    MT_UNROLL(1)
    for (int c = static_cast<int>(threadIdx.x); c < w.wide; c += THREADS) {
        float y[BAND], sum[BAND];
        MT_UNROLL(16)
        for (int i = 0; i < BAND; i++) {
            y[i] = i < rows ? of(from + place(i), c) : 0.0f;
            sum[i] = i < rows && more ? w.t[place(i) * w.wide + c] : 0.0f;
        }
        MT_UNROLL(16)
        for (int i = 0; i < BAND; i++) {
            MT_UNROLL(16)
            for (int j = 0; j < i; j++)
                sum[i] = fmaf(t.a[i][j], y[j], sum[i]);
            y[i] -= sum[i];
            if (i < rows)
                x[(from + place(i)) * w.wide + c] = y[i];
        }
    }
    __syncthreads();
}

/** All up to V', of a value head whose state before the chunk is s. */
MT_DEVICE void solve(const work &w, rows &r, const struct mt_delta_rule &a, size_t row, size_t head, int n,
                     const float *s)
{
    int m = products_of(a, n);
    load_rows(w.v, w.wv, a.v, a.dtype, row, head, n, m, w.old, kept_at(w, w.at.v));
    decays(w, r, a, row, head, n);
    if (a.plain) {
        scale_rows(w.vn, w.v, r.beta, w.wv, m);
        return;
    }
    auto of = [&](int i, int c) {
        float x = c < w.wv ? w.v[i * w.wv + c] : r.decay[i] * w.k[i * w.wk + c - w.wv];
        return r.beta[i] * x;
    };
    MT_UNROLL(1)
    for (int from = 0; from < m; from += BAND) { /* (I + A) [U | W] = diag(B) [V | diag(D) K] */
        int rows = m - from < BAND ? m - from : BAND;
        if (from)
            multiply<false>({rows, w.wide, from, w.a + from * C, C, 1, w.uw, w.wide, 1, w.t, w.wide, 1, nullptr, 0, 0});
        solve_band<false>(w, w.uw, from, rows, from, of);
    }
    multiply({m, w.wv, w.wk, w.uw + w.wv, w.wide, 1, s, w.wv, 1, w.vn, w.wv, -1, w.uw, w.wide, 1});
}

/** States of a job's value heads, or their gradients, from or to those of all heads, without padding; nullptr: nothing. */
template <bool LEAVE>
MT_DEVICE void hand_over(const struct mt_delta_rule &a, const work &w, const part &own, float *states, const void *all)
{
    int dk = static_cast<int>(a.k.dim), dv = static_cast<int>(a.v.dim), one = dk * dv;
    if (!all)
        return;
    float *at = static_cast<float *>(const_cast<void *>(all)) + own.first * static_cast<size_t>(one);
    MT_UNROLL(1)
    for (int i = static_cast<int>(threadIdx.x); i < own.n * one; i += THREADS) {
        float *state = states + i / one * w.wk * w.wv + i % one / dv * w.wv + i % dv;
        *(LEAVE ? at + i : state) = *(LEAVE ? state : at + i);
    }
    __syncthreads();
}

/** The state after the chunk; `to` may be `s`. m: products_of() it. */
MT_DEVICE void step_state(const work &w, const rows &r, int n, const float *s, float *to, int m = C)
{
    scale_rows(w.t, w.k, r.end, w.wk, m);
    multiply({w.wk, w.wv, m, w.t, 1, w.wk, w.vn, w.wv, 1, to, w.wv, 1, s, w.wv, r.decay[n - 1]});
}

/** Jobs of forward, and of the states that backward makes again: value heads are apart, which moves no bit but has more
 * blocks, where else slots would be left. Their places among the states are the same. */
static inline struct mt_cuda_delta_buffers apart(const struct mt_delta_rule &a, struct mt_cuda_delta_buffers b)
{
    if (a.n_docs * b.n_jobs >= b.n_slots || a.v.n / a.k.n % b.jobs.heads)
        return b;
    b.n_jobs *= b.jobs.heads;
    b.jobs = {b.jobs.of_key * b.jobs.heads, 1};
    return b;
}

/** As many blocks as there are slots, at most. */
static inline dim3 blocks_for(size_t jobs, const struct mt_cuda_delta_buffers &b)
{
    return grid_of(jobs < b.n_slots ? jobs : b.n_slots);
}

} // namespace delta
