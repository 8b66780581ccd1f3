/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Logits to experts and weights, and back. A warp handles a row. Scores, keys (which experts are chosen by) and the
 * chosen experts are in shared memory: lane i % 32 owns expert i, lane j % 32 the j-th chosen one, and mostly only the
 * owner accesses them. Choosing is k times a maximum over the warp; of equals, the smallest index. Bytes moved per row:
 * the logits and 6 k; in backward also the gradient.
 *
 * Backward, with v the scores of the chosen experts (or their softmax) and D the divisor of renorm:
 *
 *   dv = (scale dw - sum(scale dw v) / D) / D;   through softmax_chosen: ds = v (dv - sum(dv v));
 *   dx = p (ds - sum(ds p)) for softmax, ds s (1 - s) for sigmoid, ds for the logits themselves.
 *
 * An expert's own scale multiplies dw, and its gradient is dw times the weight without it.
 */
#include <cfloat>

#include "workspace.h"
#include "launch.cuh"
#include "reduce.cuh"
#include "scalar.cuh"

enum { ROWS = 4 }; /* rows of a block, one per warp; loops over a lane's elements are short, and are not unrolled */

static constexpr unsigned ALL = 0xffffffffu;
static constexpr float MASKED = -FLT_MAX, TAKEN = -INFINITY; /* of experts in other groups; of experts already chosen */

/* A row's shared memory, e floats each. */
struct row_memory {
    float *score, *key, *chosen;
};

MT_DEVICE row_memory memory_of(float *shared, size_t e)
{
    float *mine = shared + threadIdx.y * 3 * e;
    return {mine, mine + e, mine + 2 * e};
}

static size_t shared_bytes(size_t e)
{
    return ROWS * 3 * e * sizeof(float);
}

/* --- scores ----------------------------------------------------------------------------------- */

/* As warp_max(), but a lane's own NaN stays. */
MT_DEVICE float warp_most(float v)
{
    for (int d = WARP / 2; d; d /= 2) {
        float other = __shfl_xor_sync(ALL, v, d);
        v = other > v ? other : v;
    }
    return v;
}

MT_DEVICE bool is_finite(float x)
{
    return (bits_of_float(x) & 0x7f800000u) != 0x7f800000u;
}

template <typename L> static __device__ bool row_is_finite(const L *x, unsigned e)
{
    bool odd = false;
    MT_UNROLL(1)
    for (unsigned i = threadIdx.x; i < e; i += WARP)
        odd |= !is_finite(load(x + i));
    return __any_sync(ALL, odd) == 0;
}

/* Stores this lane's part of softmax(x) in s. */
template <typename L> static __device__ void softmax_row(float *s, const L *x, unsigned e)
{
    float max = -INFINITY, sum = 0;
    MT_UNROLL(1)
    for (unsigned i = threadIdx.x; i < e; i += WARP)
        max = load(x + i) > max ? load(x + i) : max;
    max = warp_most(max);
    MT_UNROLL(1)
    for (unsigned i = threadIdx.x; i < e; i += WARP) {
        s[i] = exp_of(load(x + i) - max);
        sum += s[i];
    }
    sum = warp_sum(sum);
    MT_UNROLL(1)
    for (unsigned i = threadIdx.x; i < e; i += WARP)
        s[i] /= sum;
}

template <typename L> static __device__ void score_row(enum mt_router_score kind, float *s, const L *x, unsigned e)
{
    if (kind == MT_SCORE_SOFTMAX)
        softmax_row(s, x, e);
    MT_UNROLL(1)
    for (unsigned i = threadIdx.x; kind != MT_SCORE_SOFTMAX && i < e; i += WARP)
        s[i] = kind == MT_SCORE_SIGMOID ? sigmoid<float>(load(x + i)) : load(x + i);
}

/* Element i of an array that is distributed over lanes, for every lane. */
MT_DEVICE float element(const float *v, unsigned i)
{
    return __shfl_sync(ALL, i % WARP == threadIdx.x ? v[i] : 0.0f, static_cast<int>(i % WARP));
}

/* --- choosing --------------------------------------------------------------------------------- */

/* Index of the largest, the first of equals; marks it as taken. */
static __device__ unsigned take_best(float *key, unsigned n)
{
    float best = TAKEN;
    unsigned at = UINT_MAX;
    MT_UNROLL(1)
    for (unsigned i = threadIdx.x; i < n; i += WARP)
        if (key[i] > best) {
            best = key[i];
            at = i;
        }
    for (int d = WARP / 2; d; d /= 2) {
        float other = __shfl_xor_sync(ALL, best, d);
        unsigned other_at = __shfl_xor_sync(ALL, at, d);
        if (other > best || (other == best && other_at < at)) {
            best = other;
            at = other_at;
        }
    }
    if (at % WARP == threadIdx.x)
        key[at] = TAKEN;
    return at;
}

/* The score of a group of n keys. */
static __device__ float group_key(const struct mt_router_rule &rule, const float *key, unsigned n)
{
    float first = MASKED, second = MASKED;
    MT_UNROLL(1)
    for (unsigned i = 0; i < n; i++)
        if (key[i] > first) {
            second = first;
            first = key[i];
        } else if (key[i] > second) {
            second = key[i];
        }
    float sum = rule.group == MT_GROUP_MAX ? first : first + second;
    return sum > MASKED ? sum : MASKED;
}

/* Masks all experts but those of the best groups. The whole block must call: lanes read values of other lanes. */
static __device__ void mask_groups(const struct mt_router_rule &rule, const row_memory &m, unsigned e)
{
    unsigned n = static_cast<unsigned>(rule.n_group), per = e / n;
    __syncthreads();
    MT_UNROLL(1)
    for (unsigned g = threadIdx.x; g < n; g += WARP)
        m.chosen[g] = group_key(rule, m.key + g * per, per);
    MT_UNROLL(1)
    for (unsigned i = 0; i < rule.topk_group; i++)
        (void)take_best(m.chosen, n);
    __syncthreads();
    MT_UNROLL(1)
    for (unsigned i = threadIdx.x; i < e; i += WARP)
        if (m.chosen[i / per] != TAKEN)
            m.key[i] = MASKED;
    __syncthreads();
}

/* --- weights ---------------------------------------------------------------------------------- */

/* v = (softmax_chosen ? e^(s - max) / sum : s); by: the divisor of renorm; open: the divisor is the sum. */
struct blend {
    float max, sum, by;
    bool softmax, open;
};

MT_DEVICE unsigned id_of(const row_memory &m, unsigned j)
{
    return bits_of_float(element(m.chosen, j));
}

MT_DEVICE float value_of(const blend &b, float s)
{
    return b.softmax ? exp_of(s - b.max) / b.sum : s;
}

/* m.chosen holds the ids as the bits of floats. */
static __device__ blend blend_of(const struct mt_router_rule &rule, const row_memory &m, unsigned k)
{
    blend b = {-INFINITY, 0, 1, rule.softmax_chosen, false};
    MT_UNROLL(1)
    for (unsigned j = 0; b.softmax && j < k; j++) {
        float s = element(m.score, id_of(m, j));
        b.max = s > b.max ? s : b.max;
    }
    MT_UNROLL(1)
    for (unsigned j = 0; b.softmax && j < k; j++)
        b.sum += exp_of(element(m.score, id_of(m, j)) - b.max);
    if (rule.renorm == MT_RENORM_NONE)
        return b;
    float sum = 0;
    MT_UNROLL(1)
    for (unsigned j = 0; j < k; j++)
        sum += value_of(b, element(m.score, id_of(m, j)));
    b.open = rule.renorm == MT_RENORM_SUM || sum >= rule.eps;
    b.by = rule.renorm == MT_RENORM_SUM ? sum + rule.eps : b.open ? sum : rule.eps;
    return b;
}

/* The number that an expert's weights are multiplied by. */
template <typename T> MT_DEVICE float scale_of(const void *scale, unsigned expert)
{
    return scale ? load(static_cast<const T *>(scale) + expert) : 1.0f;
}

template <typename T, typename L> static __global__ void __launch_bounds__(ROWS *WARP) route(struct mt_router a)
{
    MT_SHARED_DYNAMIC(float, shared);
    row_memory m = memory_of(shared, a.e);
    size_t row = static_cast<size_t>(blockIdx.x) * ROWS + threadIdx.y;
    unsigned e = static_cast<unsigned>(a.e), k = static_cast<unsigned>(a.k);
    const L *x = static_cast<const L *>(a.logits) + (row < a.n ? row : 0) * e; /* barriers: every warp needs a row */
    uint16_t *ids = a.ids + row * k;
    float *weights = a.weights + row * k;
    bool finite = a.n && row_is_finite(x, e);
    if (a.n)
        score_row(a.rule.score, m.score, x, e);
    MT_UNROLL(1)
    for (unsigned i = threadIdx.x; i < e; i += WARP) {
        float key = a.n ? m.score[i] + (a.select_bias ? a.select_bias[i] : 0.0f) : 0.0f;
        m.key[i] = key > MASKED ? key : MASKED; /* a bias may be anything */
    }
    if (a.rule.n_group > 1)
        mask_groups(a.rule, m, e);
    if (row >= a.n_padded)
        return;
    if (row >= a.n || !finite) {
        MT_UNROLL(1)
        for (unsigned j = threadIdx.x; j < k; j += WARP) {
            ids[j] = row < a.n ? static_cast<uint16_t>(j) : static_cast<uint16_t>(MT_NO_EXPERT);
            weights[j] = row < a.n ? NAN : 0.0f;
        }
        return;
    }
    MT_UNROLL(1)
    for (unsigned j = 0; j < k; j++) {
        unsigned id = take_best(m.key, e);
        if (j % WARP == threadIdx.x) {
            m.chosen[j] = float_of_bits(id);
            ids[j] = static_cast<uint16_t>(id);
        }
    }
    blend b = blend_of(a.rule, m, k);
    MT_UNROLL(1)
    for (unsigned j = 0; j < k; j++) {
        unsigned id = id_of(m, j);
        float w = value_of(b, element(m.score, id)) / b.by * a.rule.scale * scale_of<T>(a.expert_scale, id);
        if (j % WARP == threadIdx.x)
            weights[j] = a.rule.round_weights ? rounded<T>(w) : w;
    }
}

/* --- backward --------------------------------------------------------------------------------- */

/* The sums in the gradient of a chosen expert's score from dw, the gradient of its weight. */
struct slope {
    float through_renorm, through_softmax;
};

MT_DEVICE float chosen_gradient(const struct mt_router_bwd &a, const blend &b, const slope &d, float dw, float v)
{
    float dv = (a.rule.scale * dw - d.through_renorm) / b.by;
    return b.softmax ? v * (dv - d.through_softmax) : dv;
}

/* The gradient of a chosen expert's weight without its own scale. */
template <typename T>
MT_DEVICE float unscaled(const struct mt_router_bwd &a, const row_memory &m, const float *dweights, unsigned j)
{
    return dweights[j] * scale_of<T>(a.expert_scale, id_of(m, j));
}

/* Stores the row's gradient in m.key, from that of the weights. */
template <typename T>
static __device__ void gradient_of_row(const struct mt_router_bwd &a, const row_memory &m, const float *dweights)
{
    unsigned e = static_cast<unsigned>(a.e), k = static_cast<unsigned>(a.k);
    blend b = blend_of(a.rule, m, k);
    slope d = {0, 0};
    float dot = 0;
    MT_UNROLL(1)
    for (unsigned j = 0; b.open && j < k; j++)
        d.through_renorm +=
            a.rule.scale * unscaled<T>(a, m, dweights, j) * (value_of(b, element(m.score, id_of(m, j))) / b.by);
    MT_UNROLL(1)
    for (unsigned j = 0; b.softmax && j < k; j++) {
        float v = value_of(b, element(m.score, id_of(m, j)));
        d.through_softmax += (a.rule.scale * unscaled<T>(a, m, dweights, j) - d.through_renorm) / b.by * v;
    }
    bool softmax = a.rule.score == MT_SCORE_SOFTMAX;
    MT_UNROLL(1)
    for (unsigned j = 0; softmax && j < k; j++) {
        float s = element(m.score, id_of(m, j));
        dot += chosen_gradient(a, b, d, unscaled<T>(a, m, dweights, j), value_of(b, s)) * s;
    }
    MT_UNROLL(1)
    for (unsigned i = threadIdx.x; i < e; i += WARP)
        m.key[i] = softmax ? -m.score[i] * dot : 0.0f;
    MT_UNROLL(1)
    for (unsigned j = 0; j < k; j++) {
        unsigned id = id_of(m, j);
        float s = element(m.score, id);
        float ds = chosen_gradient(a, b, d, unscaled<T>(a, m, dweights, j), value_of(b, s));
        if (id % WARP == threadIdx.x)
            m.key[id] = softmax ? s * (ds - dot) : a.rule.score == MT_SCORE_SIGMOID ? ds * (s * (1.0f - s)) : ds;
    }
}

/* The row of dscale: zero but for the chosen experts. */
static __device__ void scale_gradient(const struct mt_router_bwd &a, const row_memory &m, size_t row)
{
    unsigned e = static_cast<unsigned>(a.e), k = static_cast<unsigned>(a.k);
    float *out = a.dscale + row * e;
    const float *dweights = a.dweights + row * k;
    blend b = blend_of(a.rule, m, k);
    MT_UNROLL(1)
    for (unsigned i = threadIdx.x; i < e; i += WARP)
        out[i] = 0;
    MT_UNROLL(1)
    for (unsigned j = 0; j < k; j++) {
        unsigned id = id_of(m, j);
        float w = value_of(b, element(m.score, id)) / b.by * a.rule.scale;
        if (id % WARP == threadIdx.x)
            out[id] = dweights[j] * w;
    }
}

/* Overwrites the scores with q = softmax(x). */
template <typename L> static __device__ void add_aux(const struct mt_router_bwd &a, const row_memory &m, const L *x)
{
    unsigned e = static_cast<unsigned>(a.e);
    float dot = 0;
    softmax_row(m.score, x, e);
    MT_UNROLL(1)
    for (unsigned i = threadIdx.x; i < e; i += WARP)
        dot = fmaf(m.score[i], a.aux[i], dot);
    dot = warp_sum(dot);
    MT_UNROLL(1)
    for (unsigned i = threadIdx.x; i < e; i += WARP)
        m.key[i] += a.aux_scale * (m.score[i] * (a.aux[i] - dot));
}

template <typename T, typename L>
static __global__ void __launch_bounds__(ROWS *WARP) route_backward(struct mt_router_bwd a)
{
    MT_SHARED_DYNAMIC(float, shared);
    row_memory m = memory_of(shared, a.e);
    size_t row = static_cast<size_t>(blockIdx.x) * ROWS + threadIdx.y;
    unsigned e = static_cast<unsigned>(a.e), k = static_cast<unsigned>(a.k);
    if (row >= a.n)
        return;
    const L *x = static_cast<const L *>(a.logits) + row * e;
    const uint16_t *ids = a.ids + row * k;
    T *dx = static_cast<T *>(a.dlogits) + row * e;
    bool routed = ids[0] < e;
    if (!routed || !row_is_finite(x, e)) {
        MT_UNROLL(1)
        for (unsigned i = threadIdx.x; i < e; i += WARP)
            store(dx + i, routed ? NAN : 0.0f);
        MT_UNROLL(1)
        for (unsigned i = threadIdx.x; a.dscale && i < e; i += WARP)
            a.dscale[row * e + i] = 0;
        return;
    }
    score_row(a.rule.score, m.score, x, e);
    MT_UNROLL(1)
    for (unsigned j = threadIdx.x; j < k; j += WARP)
        m.chosen[j] = float_of_bits(ids[j]);
    if (a.dscale)
        scale_gradient(a, m, row);
    gradient_of_row<T>(a, m, a.dweights + row * k);
    if (a.aux)
        add_aux(a, m, x);
    MT_UNROLL(1)
    for (unsigned i = threadIdx.x; i < e; i += WARP)
        store(dx + i, m.key[i]);
}

/* --- probabilities ---------------------------------------------------------------------------- */

/* A block's warps share its rows; their sums are added in order, and those of blocks are folded (fold.cu). */
template <typename L>
static __global__ void __launch_bounds__(ROWS *WARP) sum_probabilities(struct mt_router_stats a, size_t rows)
{
    MT_SHARED_DYNAMIC(float, shared);
    row_memory m = memory_of(shared, a.e);
    unsigned e = static_cast<unsigned>(a.e);
    size_t end = (blockIdx.x + 1) * rows < a.n ? (blockIdx.x + 1) * rows : a.n;
    MT_UNROLL(1)
    for (unsigned i = threadIdx.x; i < e; i += WARP)
        m.key[i] = 0;
    MT_UNROLL(1)
    for (size_t row = blockIdx.x * rows + threadIdx.y; row < end; row += ROWS) {
        softmax_row(m.score, static_cast<const L *>(a.logits) + row * e, e);
        MT_UNROLL(1)
        for (unsigned i = threadIdx.x; i < e; i += WARP)
            m.key[i] += m.score[i];
    }
    __syncthreads();
    MT_UNROLL(1)
    for (unsigned i = threadIdx.y * WARP + threadIdx.x; i < e; i += ROWS * WARP) {
        float sum = 0;
        for (unsigned w = 0; w < ROWS; w++)
            sum += shared[(3 * w + 1) * e + i];
        static_cast<float *>(a.workspace)[blockIdx.x * a.e + i] = sum;
    }
}

/* --- launchers -------------------------------------------------------------------------------- */

cudaError_t mt_cuda_router(const struct mt_router *a, cudaStream_t stream)
{
    dim3 grid = grid_of(ceil_div(a->n_padded, ROWS)), block(WARP, ROWS);
    return for_dtypes(a->dtype, a->logits_dtype, [=](auto t, auto logit) {
        return MT_LAUNCH((route<decltype(t), decltype(logit)>), grid, block, shared_bytes(a->e), stream, *a);
    });
}

cudaError_t mt_cuda_router_bwd(const struct mt_router_bwd *a, cudaStream_t stream)
{
    dim3 grid = grid_of(ceil_div(a->n, ROWS)), block(WARP, ROWS);
    return for_dtypes(a->dtype, a->logits_dtype, [=](auto t, auto logit) {
        return MT_LAUNCH((route_backward<decltype(t), decltype(logit)>), grid, block, shared_bytes(a->e), stream, *a);
    });
}

cudaError_t mt_cuda_router_stats(const struct mt_router_stats *a, cudaStream_t stream)
{
    size_t rows = mt_cuda_more_sum_rows(a->n), blocks = ceil_div(a->n, rows);
    dim3 block(WARP, ROWS);
    cudaError_t rc = MT_LAUNCH_OF(a->dtype, sum_probabilities, grid_of(blocks), block, shared_bytes(a->e), stream, *a,
                                  rows);
    return mt_cuda_fold_after(rc, a->prob_sum, a->workspace, blocks, a->e, a->e, stream);
}
