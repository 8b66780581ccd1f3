/* SPDX-License-Identifier: Apache-2.0 */
/*
 * For each head of q and k: u = x, or with QK-norm xhat w; then the pair (u_i, u_j), j = i + r/2, is rotated by the
 * position's angle i (Su et al. 2021): (u_i cos - u_j sin, u_j cos + u_i sin). Backward rotates back, then goes
 * through the norm.
 *
 * A head belongs to a group of lanes, a power of two: a lane owns one vector of the lower half and its partner of the
 * upper half, or one vector of the tail that is not rotated. Forward, and backward without norm: each group handles one
 * head, 2 s bytes per element of s bytes. Backward with norm: a block takes a few rows, first all their q heads, then
 * their k heads, and adds up the weights' gradients over its groups in order; 3 s bytes. Head sizes that do not divide
 * into vectors: a warp handles a head element by element. Backward where heads share their input: a warp sums a token's
 * heads in order, and rotates the sum.
 */
#include "workspace.h"
#include "launch.cuh"
#include "reduce.cuh"
#include "scalar.cuh"

static constexpr unsigned THREADS = 256;

/* How a head is divided over lanes. */
struct cut {
    int lanes, pairs, vecs; /* numbers of lanes: in a group; that own a pair; that own anything */
    int shift;               /* lanes is 1 << shift */
};

template <typename T> MT_DEVICE unsigned first_of(const cut &c, int lane, size_t rot)
{
    int first = lane * VEC<T>;
    return lane < c.pairs ? first : first + static_cast<unsigned>(rot) - c.pairs * VEC<T>;
}

/* The part of a head that a lane owns. */
template <typename T> struct part {
    float lo[VEC<T>], hi[VEC<T>]; /* hi is 0 in the tail, both in idle lanes */
};

struct packed_part {
    uint4 lo, hi;
};

template <typename T> MT_DEVICE packed_part load_packed(const T *head, const cut &c, int lane, size_t rot, bool active)
{
    packed_part p = {};
    unsigned first = first_of<T>(c, lane, rot);
    if (active)
        p.lo = load16(head + first);
    if (active && lane < c.pairs)
        p.hi = load16(head + first + static_cast<unsigned>(rot) / 2);
    return p;
}

MT_DEVICE void hold(packed_part &p)
{
    hold_packed(p.lo);
    hold_packed(p.hi);
}

template <typename T> MT_DEVICE part<T> unpacked(const packed_part &p)
{
    part<T> u;
    vec_floats<T>(p.lo, u.lo);
    vec_floats<T>(p.hi, u.hi);
    return u;
}

template <typename T> MT_DEVICE part<T> load_part(const T *head, const cut &c, int lane, size_t rot, bool active)
{
    return unpacked<T>(load_packed(head, c, lane, rot, active));
}

template <typename T> MT_DEVICE void store_part(T *head, const cut &c, int lane, size_t rot, const part<T> &p)
{
    unsigned first = first_of<T>(c, lane, rot);
    store_n<T, VEC<T>>(head + first, p.lo);
    if (lane < c.pairs)
        store_n<T, VEC<T>>(head + first + static_cast<unsigned>(rot) / 2, p.hi);
}

/* The norm's output, and its product with w, each rounded. */
template <typename T> MT_DEVICE void scale_and_round(float (&x)[VEC<T>], float rstd, const float (&w)[VEC<T>])
{
    for (int k = 0; k < VEC<T>; k += 2) {
        x[k] *= rstd;
        x[k + 1] *= rstd;
        round_two<T>(x + k);
        x[k] *= w[k];
        x[k + 1] *= w[k + 1];
        round_two<T>(x + k);
    }
}

/* Replaces g by g w; adds g times the normalised value to the weight's gradient. */
template <typename T>
MT_DEVICE void weight_gradient(float (&g)[VEC<T>], const float (&xhat)[VEC<T>],
                               const float (&w)[VEC<T>], float (&dw)[VEC<T>])
{
    for (int k = 0; k < VEC<T>; k += 2) {
        float was[2] = {xhat[k], xhat[k + 1]};
        round_two<T>(was);
        dw[k] = fmaf(g[k], was[0], dw[k]);
        dw[k + 1] = fmaf(g[k + 1], was[1], dw[k + 1]);
        g[k] *= w[k];
        g[k + 1] *= w[k + 1];
    }
}

/* cos_row, sin_row: the position's rows of the tables. */
template <typename T>
MT_DEVICE void rotate(part<T> &p, const float *cos_row, const float *sin_row, int lane, float sign)
{
    for (int i = 0; i < VEC<T>; i += 4) {
        float cosine[4], sine[4];
        load_four(cos_row + lane * VEC<T> + i, cosine);
        load_four(sin_row + lane * VEC<T> + i, sine);
        for (int k = 0; k < 4; k++) {
            float x = p.lo[i + k], y = p.hi[i + k], s = sign * sine[k];
            p.lo[i + k] = x * cosine[k] - y * s;
            p.hi[i + k] = y * cosine[k] + x * s;
        }
    }
}

template <typename T> MT_DEVICE float dot(const part<T> &a, const part<T> &b)
{
    float sum = 0;
    for (int k = 0; k < VEC<T>; k++)
        sum = fmaf(a.lo[k], b.lo[k], fmaf(a.hi[k], b.hi[k], sum));
    return sum;
}

/* 64-bit divisions are slow, and almost all operands fit in 32 bits. */
MT_DEVICE size_t quotient(size_t n, unsigned d)
{
    return n >> 32 ? n / d : static_cast<unsigned>(n) / d;
}

/* A head of a row, where queries are counted before keys. */
template <typename T> MT_DEVICE T *head_of(const struct mt_heads &q, const struct mt_heads &k, size_t row, size_t head)
{
    return head < q.n ? static_cast<T *>(q.p) + row * q.ld + head * q.stride
                      : static_cast<T *>(k.p) + row * k.ld + (head - q.n) * k.stride;
}

/* --- forward ---------------------------------------------------------------------------------- */

template <typename T, bool NORM>
static __global__ void __launch_bounds__(THREADS, 5) rope_forward(struct mt_qk_rope a, cut c, float sign)
{
    unsigned heads = static_cast<unsigned>(a.q.n + a.k.n), groups = THREADS >> c.shift;
    size_t item = static_cast<size_t>(blockIdx.x) * groups + (threadIdx.x >> c.shift);
    size_t row = quotient(item, heads), head = item - row * heads;
    int lane = static_cast<int>(threadIdx.x) & (c.lanes - 1);
    bool active = row < a.n && lane < c.vecs;
    part<T> p = load_part<T>(head_of<T>(a.q, a.k, row, head), c, lane, a.rot, active);
    if constexpr (NORM) {
        float squares = group_sum(dot(p, p), c.lanes);
        float rstd = 1.0f / sqrtf(squares / static_cast<float>(a.q.dim) + a.eps);
        part<T> w = load_part(static_cast<const T *>(head < a.q.n ? a.q_norm : a.k_norm), c, lane, a.rot,
                              active);
        scale_and_round<T>(p.lo, rstd, w.lo);
        scale_and_round<T>(p.hi, rstd, w.hi);
        if (active && lane == 0)
            a.rstd[item] = rstd;
    }
    if (!active)
        return;
    if (lane < c.pairs) {
        size_t at = static_cast<size_t>(a.positions[row]) * (a.rot / 2);
        rotate(p, a.cos_t + at, a.sin_t + at, lane, sign);
    }
    store_part(head_of<T>(a.to_q, a.to_k, row, head), c, lane, a.rot, p);
}

/* For any head size: a warp handles a head. */
template <typename T>
static __global__ void __launch_bounds__(WARP) rope_forward_any(struct mt_qk_rope a, float sign)
{
    unsigned heads = static_cast<unsigned>(a.q.n + a.k.n);
    size_t row = blockIdx.x / heads, head = blockIdx.x % heads, half = a.rot / 2, d = a.q.n ? a.q.dim : a.k.dim;
    size_t at = half ? static_cast<size_t>(a.positions[row]) * half : 0;
    const T *x = head_of<T>(a.q, a.k, row, head);
    const T *w = static_cast<const T *>(head < a.q.n ? a.q_norm : a.k_norm);
    T *y = head_of<T>(a.to_q, a.to_k, row, head);
    float rstd = 1, squares = 0;
    if (w) {
        for (size_t i = threadIdx.x; i < d; i += WARP)
            squares = fmaf(load(x + i), load(x + i), squares);
        rstd = 1.0f / sqrtf(warp_sum(squares) / static_cast<float>(d) + a.eps);
        if (threadIdx.x == 0)
            a.rstd[blockIdx.x] = rstd;
    }
    auto value = [&](size_t i) {
        return w ? rounded<T>(rounded<T>(load(x + i) * rstd) * load(w + i)) : load(x + i);
    };
    for (size_t i = threadIdx.x; i < half; i += WARP) {
        size_t lo = a.pairs ? 2 * i : i, hi = a.pairs ? lo + 1 : i + half;
        float p = value(lo), q = value(hi), cosine = a.cos_t[at + i], s = sign * a.sin_t[at + i];
        store(y + lo, p * cosine - q * s);
        store(y + hi, q * cosine + p * s);
    }
    for (size_t i = a.rot + threadIdx.x; i < d; i += WARP)
        store(y + i, value(i));
}

/* Are these heads aligned for vectors, or are there none? */
template <typename T> static bool fits(const struct mt_heads &h)
{
    return !h.n || heads_aligned<T>(h);
}

/* False if heads do not divide into vectors, or have more than a warp's lanes can own. */
template <typename T> static bool cut_head(size_t d, size_t rot, cut *c)
{
    size_t n = VEC<T>, pairs = rot / 2 / n, vecs = pairs + (d - rot) / n;
    if (d % n || rot % (2 * n) || vecs > WARP)
        return false;
    int shift = 0;
    while ((static_cast<size_t>(1) << shift) < vecs)
        shift++;
    *c = {1 << shift, static_cast<int>(pairs), static_cast<int>(vecs), shift};
    return true;
}

template <typename T>
static cudaError_t run_forward(const struct mt_qk_rope *a, float sign, cudaStream_t stream)
{
    size_t items = a->n * (a->q.n + a->k.n);
    cut c;
    if (a->pairs || !cut_head<T>(a->q.n ? a->q.dim : a->k.dim, a->rot, &c) || !fits<T>(a->q) || !fits<T>(a->k) ||
        !fits<T>(a->to_q) || !fits<T>(a->to_k) || !aligned_to(a->cos_t, 16) || !aligned_to(a->sin_t, 16) ||
        !aligned_to(a->q_norm, 16) || !aligned_to(a->k_norm, 16))
        return MT_LAUNCH(rope_forward_any<T>, grid_of(items), WARP, 0, stream, *a, sign);
    dim3 grid = grid_of(ceil_div(items * static_cast<size_t>(c.lanes), THREADS));
    if (a->q_norm)
        return MT_LAUNCH((rope_forward<T, true>), grid, THREADS, 0, stream, *a, c, sign);
    return MT_LAUNCH((rope_forward<T, false>), grid, THREADS, 0, stream, *a, c, sign);
}

cudaError_t mt_cuda_qk_rope(const struct mt_qk_rope *a, cudaStream_t stream)
{
    return a->dtype == MT_BF16 ? run_forward<bf16>(a, 1, stream) : run_forward<float>(a, 1, stream);
}

/* --- backward through the norm ---------------------------------------------------------------- */

/* The gradient of one head's input, and this lane's part of the weight's gradient. */
template <typename T>
MT_DEVICE void norm_backward(const struct mt_qk_rope_bwd &a, const cut &c, int lane,
                             unsigned row, unsigned head, packed_part &weights,
                             bool active, part<T> &dw)
{
    packed_part input = load_packed<T>(head_of<T>(a.fwd.q, a.fwd.k, row, head), c, lane, a.fwd.rot, active);
    part<T> g = load_part<T>(head_of<T>(a.dq, a.dk, row, head), c, lane, a.fwd.rot, active);
    float rstd = active ? a.fwd.rstd[row * (a.dq.n + a.dk.n) + head] : 0.0f;
    if (active && lane < c.pairs) {
        size_t at = static_cast<size_t>(a.fwd.positions[row]) * (a.fwd.rot / 2);
        rotate(g, a.fwd.cos_t + at, a.fwd.sin_t + at, lane, -1.0f);
    }
    hold(input);
    hold(weights);
    part<T> x = unpacked<T>(input), w = unpacked<T>(weights);
    for (int k = 0; k < VEC<T>; k++) {
        x.lo[k] *= rstd;
        x.hi[k] *= rstd;
    }
    weight_gradient<T>(g.lo, x.lo, w.lo, dw.lo);
    weight_gradient<T>(g.hi, x.hi, w.hi, dw.hi);
    float mean = group_sum(dot(g, x), c.lanes) / static_cast<float>(a.dq.dim);
    for (int k = 0; k < VEC<T>; k++) {
        g.lo[k] = rstd * (g.lo[k] - x.lo[k] * mean);
        g.hi[k] = rstd * (g.hi[k] - x.hi[k] * mean);
    }
    if (active)
        store_part(head_of<T>(a.to_dq, a.to_dk, row, head), c, lane, a.fwd.rot, g);
}

/* Sums the groups' parts, in order, into the block's row of the workspace. */
template <typename T>
MT_DEVICE void sum_groups(const cut &c, int lane, size_t d, size_t rot, const part<T> &dw, float *partial)
{
    __shared__ float shared[THREADS * 2 * VEC<T>];
    unsigned groups = THREADS >> c.shift;
    if (lane < c.vecs) {
        float *mine = shared + (threadIdx.x >> c.shift) * d + first_of<T>(c, lane, rot);
        for (int k = 0; k < VEC<T>; k++) {
            mine[k] = dw.lo[k];
            if (lane < c.pairs)
                mine[k + rot / 2] = dw.hi[k];
        }
    }
    __syncthreads();
    for (size_t i = threadIdx.x; i < d; i += THREADS) {
        float sum = 0;
        for (unsigned g = 0; g < groups; g++)
            sum += shared[g * d + i];
        partial[i] = sum;
    }
    __syncthreads(); /* before the next sum */
}

template <typename T>
static __global__ void __launch_bounds__(THREADS, 3)
    rope_norm_backward(struct mt_qk_rope_bwd a, cut c, unsigned rows)
{
    unsigned first = blockIdx.x * rows, n = static_cast<unsigned>(a.fwd.n); /* positions are 32-bit */
    unsigned here = n - first < rows ? n - first : rows;
    unsigned groups = THREADS >> c.shift, group = threadIdx.x >> c.shift;
    int lane = static_cast<int>(threadIdx.x) & (c.lanes - 1);
    unsigned n_q = static_cast<unsigned>(a.dq.n), n_kv = static_cast<unsigned>(a.dk.n);
    MT_UNROLL(1)
    for (int kind = 0; kind < 2; kind++) {
        unsigned heads = kind ? n_kv : n_q, items = here * heads;
        const T *weight = static_cast<const T *>(kind ? a.fwd.k_norm : a.fwd.q_norm);
        packed_part w = load_packed(weight, c, lane, a.fwd.rot, lane < c.vecs);
        part<T> dw = {};
        for (unsigned base = 0; base < items; base += groups) { /* whole warps take part: there are shuffles inside */
            unsigned item = base + group, row = item / heads;
            norm_backward(a, c, lane, first + row, item - row * heads + (kind ? n_q : 0), w,
                          item < items && lane < c.vecs, dw);
        }
        sum_groups(c, lane, a.dq.dim, a.fwd.rot, dw,
                   static_cast<float *>(a.workspace) + (static_cast<size_t>(blockIdx.x) * 2 + kind) * a.dq.dim);
    }
}

/* For any head size, with a warp; a lane keeps its elements of the weights' gradients in the workspace. */
template <typename T>
static __global__ void __launch_bounds__(WARP)
    rope_norm_backward_any(struct mt_qk_rope_bwd a, unsigned rows)
{
    size_t first = static_cast<size_t>(blockIdx.x) * rows, half = a.fwd.rot / 2, d = a.dq.dim, n_q = a.dq.n;
    size_t end = first + rows < a.fwd.n ? first + rows : a.fwd.n;
    float *partial = static_cast<float *>(a.workspace) + static_cast<size_t>(blockIdx.x) * 2 * d;
    for (size_t row = first; row < end; row++)
        for (size_t head = 0; head < n_q + a.dk.n; head++) {
            bool query = head < n_q, fresh = row == first && (head == 0 || head == n_q);
            const T *w = static_cast<const T *>(query ? a.fwd.q_norm : a.fwd.k_norm);
            const T *dy = head_of<T>(a.dq, a.dk, row, head), *x = head_of<T>(a.fwd.q, a.fwd.k, row, head);
            T *dx = head_of<T>(a.to_dq, a.to_dk, row, head);
            size_t at = half ? static_cast<size_t>(a.fwd.positions[row]) * half : 0;
            const float *cos_row = a.fwd.cos_t + at, *sin_row = a.fwd.sin_t + at;
            float *dw = partial + (query ? 0 : d), rstd = a.fwd.rstd[row * (n_q + a.dk.n) + head], sum = 0;
            auto turned_lo = [&](size_t i) {
                return load(dy + i) * cos_row[i] + load(dy + i + half) * sin_row[i];
            };
            auto turned_hi = [&](size_t i) {
                return load(dy + i + half) * cos_row[i] - load(dy + i) * sin_row[i];
            };
            auto add = [&](size_t i, float g) {
                float xhat = load(x + i) * rstd, one = g * rounded<T>(xhat);
                dw[i] = fresh ? one : dw[i] + one;
                sum = fmaf(g * load(w + i), xhat, sum);
            };
            for (size_t i = threadIdx.x; i < half; i += WARP) {
                add(i, turned_lo(i));
                add(i + half, turned_hi(i));
            }
            for (size_t i = a.fwd.rot + threadIdx.x; i < d; i += WARP)
                add(i, load(dy + i));
            float mean = warp_sum(sum) / static_cast<float>(d);
            auto through = [&](size_t i, float g) {
                return rstd * (g * load(w + i) - load(x + i) * rstd * mean);
            };
            for (size_t i = threadIdx.x; i < half; i += WARP) {
                float lo = through(i, turned_lo(i)), hi = through(i + half, turned_hi(i));
                store(dx + i, lo);
                store(dx + i + half, hi);
            }
            for (size_t i = a.fwd.rot + threadIdx.x; i < d; i += WARP)
                store(dx + i, through(i, load(dy + i)));
        }
}

template <typename T>
static cudaError_t run_norm_backward(const struct mt_qk_rope_bwd *a, size_t rows, cudaStream_t stream)
{
    dim3 grid = grid_of(ceil_div(a->fwd.n, rows));
    unsigned few = static_cast<unsigned>(rows);
    cut c;
    if (!cut_head<T>(a->dq.dim, a->fwd.rot, &c) || !fits<T>(a->fwd.q) || !fits<T>(a->fwd.k) || !fits<T>(a->dq) ||
        !fits<T>(a->dk) || !fits<T>(a->to_dq) || !fits<T>(a->to_dk) || !aligned_to(a->fwd.cos_t, 16) ||
        !aligned_to(a->fwd.sin_t, 16) || !aligned_to(a->fwd.q_norm, 16) || !aligned_to(a->fwd.k_norm, 16))
        return MT_LAUNCH(rope_norm_backward_any<T>, grid, WARP, 0, stream, *a, few);
    return MT_LAUNCH(rope_norm_backward<T>, grid, THREADS, 0, stream, *a, c, few);
}

/* --- backward without a norm ------------------------------------------------------------------ */

/* The sum of element i of all heads at x. */
template <typename T> MT_DEVICE float sum_heads_at(const T *x, const struct mt_heads &h, size_t i)
{
    float s = 0;
    MT_UNROLL(4)
    for (size_t head = 0; head < h.n; head++)
        s += load(x + head * h.stride + i);
    return s;
}

/* The sum of a row's heads in `from`, rotated back, into the one place that `to` has for them. */
template <typename T>
static __global__ void __launch_bounds__(WARP)
    rope_shared_backward(struct mt_qk_rope_bwd a, struct mt_heads from, struct mt_heads to)
{
    size_t row = blockIdx.x, half = a.fwd.rot / 2, at = half ? static_cast<size_t>(a.fwd.positions[row]) * half : 0;
    const T *x = static_cast<const T *>(from.p) + row * from.ld;
    T *y = static_cast<T *>(to.p) + row * to.ld;
    for (size_t i = threadIdx.x; i < half; i += WARP) {
        size_t lo = a.fwd.pairs ? 2 * i : i, hi = a.fwd.pairs ? lo + 1 : i + half;
        float p = sum_heads_at(x, from, lo), q = sum_heads_at(x, from, hi);
        float cosine = a.fwd.cos_t[at + i], sine = a.fwd.sin_t[at + i];
        store(y + lo, p * cosine + q * sine);
        store(y + hi, q * cosine - p * sine);
    }
    for (size_t i = a.fwd.rot + threadIdx.x; i < from.dim; i += WARP)
        store(y + i, sum_heads_at(x, from, i));
}

/* Takes a side whose heads share their input out of the rotation *from -> *to, and does it. */
static cudaError_t sum_shared(const struct mt_qk_rope_bwd *a, struct mt_heads *from, struct mt_heads *to,
                              cudaStream_t stream)
{
    if (to->n <= 1 || to->stride)
        return cudaSuccess;
    struct mt_heads x = *from;
    from->n = to->n = 0;
    return MT_LAUNCH_OF(a->fwd.dtype, rope_shared_backward, grid_of(a->fwd.n), WARP, 0, stream, *a, x, *to);
}

/* Where heads have inputs of their own, backward is the inverse rotation. */
static cudaError_t rotate_back(const struct mt_qk_rope_bwd *a, cudaStream_t stream)
{
    struct mt_qk_rope f = a->fwd;
    f.q = a->dq;
    f.k = a->dk;
    f.to_q = a->to_dq;
    f.to_k = a->to_dk;
    cudaError_t rc = sum_shared(a, &f.q, &f.to_q, stream);
    if (rc == cudaSuccess)
        rc = sum_shared(a, &f.k, &f.to_k, stream);
    if (rc != cudaSuccess || !(f.q.n + f.k.n))
        return rc;
    return f.dtype == MT_BF16 ? run_forward<bf16>(&f, -1, stream) : run_forward<float>(&f, -1, stream);
}

cudaError_t mt_cuda_qk_rope_bwd(const struct mt_qk_rope_bwd *a, cudaStream_t stream)
{
    if (!a->fwd.q_norm)
        return rotate_back(a, stream);
    if (a->fwd.n > INT_MAX)
        return cudaErrorInvalidValue;
    size_t rows = mt_cuda_sum_rows(a->fwd.n), blocks = ceil_div(a->fwd.n, rows), d = a->dq.dim;
    const float *partials = static_cast<const float *>(a->workspace);
    cudaError_t rc = a->fwd.dtype == MT_BF16 ? run_norm_backward<bf16>(a, rows, stream)
                                         : run_norm_backward<float>(a, rows, stream);
    rc = mt_cuda_fold_after(rc, a->dq_norm, partials, blocks, 2 * d, d, stream);
    return mt_cuda_fold_after(rc, a->dk_norm, partials + d, blocks, 2 * d, d, stream);
}
