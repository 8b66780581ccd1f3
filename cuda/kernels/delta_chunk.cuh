/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "launch.cuh"
#include "scalar.cuh"
#include "workspace.h"

/**
 * A chunk of the gated delta rule, or of the plain one, by a block: the equations, and the names of their terms, are
 * those of src/device/cpu/delta_rule.c. A block's matrices lie in its slot of the workspace, with rows padded by zeros; what
 * there is once a row is in shared memory. Every function is called by all threads, and ends with a barrier.
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

/** Once a row. */
struct rows {
    double sum[C], dsum[C], dbeta[C], part[C];
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
 * b[k * rb + j * cb]. */
struct product {
    int m, n, k; /* m: a multiple of 4 */
    const float *a;
    int rs, cs;
    const float *b;
    int rb, cb;
    float *d;
    int ldd;
    float sign;
    const float *add; /* B0; it may be D */
    int ld_add;
    float by;
};

template <bool ADD = true> MT_DEVICE void multiply(const product &x)
{
    MT_UNROLL(1)
    for (int at = static_cast<int>(threadIdx.x); at < x.m / 4 * x.n; at += THREADS) {
        int i = at / x.n * 4, j = at % x.n;
        const float *a = x.a + i * x.rs, *b = x.b + j * x.cb;
        float sum[4] = {};
        int k = x.k; /* at least 1 */
        MT_UNROLL(1)
        do {
            for (int r = 0; r < 4; r++)
                sum[r] = fmaf(a[r * x.rs], *b, sum[r]);
            a += x.cs;
            b += x.rb;
        } while (--k);
        for (int r = 0; r < 4; r++) {
            float was = ADD ? x.by * x.add[(i + r) * x.ld_add + j] : 0.0f;
            x.d[(i + r) * x.ldd + j] = was + x.sign * sum[r];
        }
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

/** y = diag(by) x, of m rows. */
MT_DEVICE void scale_rows(float *y, const float *x, const float *by, int wide, int m = C)
{
    MT_UNROLL(1)
    for (int i = static_cast<int>(threadIdx.x); i < m * wide; i += THREADS)
        y[i] = by[i / wide] * x[i];
    __syncthreads();
}

/** x *= by, of n elements. */
MT_DEVICE void scale_all(float *x, float by, int n)
{
    MT_UNROLL(1)
    for (int i = static_cast<int>(threadIdx.x); i < n; i += THREADS)
        x[i] *= by;
    __syncthreads();
}

/** y += skip x, of a value head's rows. */
template <typename T>
MT_DEVICE void add_skip(const struct mt_delta_rule &a, size_t head, float *y, const float *x, int n)
{
    if (!a.skip)
        return;
    float by = load(static_cast<const T *>(a.skip) + head);
    MT_UNROLL(1)
    for (int i = static_cast<int>(threadIdx.x); i < n; i += THREADS)
        y[i] = fmaf(by, x[i], y[i]);
    __syncthreads();
}

/** A warp's sum in double; every lane gets it. */
MT_DEVICE double warp_total(double v)
{
    for (int d = WARP / 2; d; d /= 2)
        v += __shfl_xor_sync(0xffffffffu, v, d);
    return v;
}

MT_DEVICE double warp_dot(const float *x, const float *y, int n)
{
    double sum = 0;
    MT_UNROLL(1)
    for (int i = static_cast<int>(threadIdx.x) % WARP; i < n; i += WARP)
        sum += static_cast<double>(x[i]) * static_cast<double>(y[i]);
    return warp_total(sum);
}

/** Rows of a head as f32: `old` of `kept` (nullptr: zeros), those from `row` on, the rest of m zeros. */
template <typename T>
MT_DEVICE void load_rows(float *dst, int wide, const struct mt_heads &h, size_t row, size_t head, int n, int m = C,
                         int old = 0, const char *kept = nullptr)
{
    const T *src = static_cast<const T *>(h.p) + row * h.ld + head * h.stride;
    int dim = static_cast<int>(h.dim);
    MT_UNROLL(1)
    for (int at = static_cast<int>(threadIdx.x); at < m * wide; at += THREADS) {
        int i = at / wide, c = at % wide;
        const T *from = i < n && i >= old ? src + static_cast<size_t>(i - old) * h.ld : nullptr;
        if (i < old && kept)
            from = reinterpret_cast<const T *>(kept) + (i * h.n + head) * h.dim;
        dst[at] = from && c < dim ? load(from + c) : 0.0f;
    }
    __syncthreads();
}

template <typename T>
MT_DEVICE void store_rows(const float *src, int wide, const struct mt_heads &h, size_t row, size_t head, int n)
{
    T *dst = static_cast<T *>(h.p) + row * h.ld + head * h.stride;
    int dim = static_cast<int>(h.dim);
    MT_UNROLL(1)
    for (int at = static_cast<int>(threadIdx.x); at < n * dim; at += THREADS) {
        int i = at / dim, c = at % dim;
        store(dst + static_cast<size_t>(i) * h.ld + c, src[i * wide + c]);
    }
    __syncthreads();
}

/** Queries or keys of unit length, times scale; 1 / length to rstd. */
MT_DEVICE void normalise(float *x, float *rstd, int wide, float eps, float scale, int m)
{
    MT_UNROLL(1)
    for (int i = static_cast<int>(threadIdx.x) / WARP; i < m; i += THREADS / WARP) {
        float *row = x + i * wide, r = 1.0f / sqrtf(static_cast<float>(warp_dot(row, row, wide)) + eps);
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
template <typename T>
MT_DEVICE void load_keys(const work &w, rows &r, const struct mt_delta_rule &a, size_t row, size_t head, int n)
{
    int m = products_of(a, n);
    load_rows<T>(w.q, w.wk, a.q, row, head, n, m, w.old);
    load_rows<T>(w.k, w.wk, a.k, row, head, n, m, w.old, kept_at(w, w.at.k));
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
        }
    }
    __syncthreads();
    if (i < C) {
        r.decay[i] = i < n ? exp_of(static_cast<float>(r.sum[i])) : 0.0f;
        r.end[i] = i < n ? exp_of(static_cast<float>(r.sum[C - 1] - r.sum[i])) : 0.0f;
    }
    MT_UNROLL(1)
    for (int at = i; at < products_of(a, n) * C; at += THREADS) {
        int y = at / C, z = at % C;
        if (z >= products_of(a, n))
            continue;
        float x = z <= y && y < n ? exp_of(static_cast<float>(r.sum[y] - r.sum[z])) : 0.0f;
        w.x[at] = x;
        if (!a.plain)
            w.a[at] = z < y ? r.beta[y] * w.kk[at] * x : 0.0f;
        w.p[at] = w.qk[at] * x;
    }
    __syncthreads();
}

/** All up to V', of a value head whose state before the chunk is s. A thread solves (I + A) for its columns. */
template <typename T>
MT_DEVICE void solve(const work &w, rows &r, const struct mt_delta_rule &a, size_t row,
                     size_t head, int n, const float *s)
{
    int m = products_of(a, n);
    load_rows<T>(w.v, w.wv, a.v, row, head, n, m, w.old, kept_at(w, w.at.v));
    decays(w, r, a, row, head, n);
    if (a.plain) {
        scale_rows(w.vn, w.v, r.beta, w.wv, m);
        return;
    }
    MT_UNROLL(1)
    for (int c = static_cast<int>(threadIdx.x); c < w.wide; c += THREADS)
        MT_UNROLL(1)
        for (int i = 0; i < m; i++) {
            float sum = 0, of = c < w.wv ? w.v[i * w.wv + c] : r.decay[i] * w.k[i * w.wk + c - w.wv];
            MT_UNROLL(1)
            for (int j = 0; j < i; j++)
                sum = fmaf(w.a[i * C + j], w.uw[j * w.wide + c], sum);
            w.uw[i * w.wide + c] = r.beta[i] * of - sum;
        }
    __syncthreads();
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

/** As many blocks as there are slots, at most. */
static inline dim3 blocks_for(size_t jobs, const struct mt_cuda_delta_buffers &b)
{
    return grid_of(jobs < b.n_slots ? jobs : b.n_slots);
}

} // namespace delta
