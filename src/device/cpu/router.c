/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A row at a time: scores of all experts, the k best, their weights. Backward, with v the scores of the chosen experts
 * (or their softmax) and D the divisor of renorm:
 *
 *   dv = (scale dw - sum(scale dw v) / D) / D;   through softmax_chosen: ds = v (dv - sum(dv v));
 *   dx = p (ds - sum(ds p)) for softmax, ds s (1 - s) for sigmoid, ds for the logits themselves.
 *
 * An expert's own scale multiplies dw, and its gradient is dw times the weight without it.
 */
#include <float.h>
#include <math.h>
#include <string.h>

#include "device/cpu/cpu.h"
#include "device/cpu/vecmath.h"

/* --- scores ----------------------------------------------------------------------------------- */

/* s = softmax(x); may be x. */
MT_HOT static void softmax(float *s, const float *x, size_t n)
{
    float max = mt_cpu_max(x, n);
    MT_INDEPENDENT
    for (size_t i = 0; i < n; i++)
        s[i] = mt_exp_negative(x[i] - max);
    float sum = mt_cpu_sum(s, n);
    MT_INDEPENDENT
    for (size_t i = 0; i < n; i++)
        s[i] /= sum;
}

MT_HOT static void sigmoids(float *restrict s, const float *restrict x, size_t n)
{
    for (size_t i = 0; i < n; i++)
        s[i] = mt_sigmoidf(x[i]);
}

/* x - x is 0 only for finite values. */
MT_HOT static bool all_finite(const float *x, size_t n)
{
    float lane[MT_LANES] = {0};
    size_t i = 0;
    for (; i + MT_LANES <= n; i += MT_LANES)
        for (int k = 0; k < MT_LANES; k++)
            lane[k] += x[i + (size_t)k] - x[i + (size_t)k];
    for (; i < n; i++)
        lane[0] += x[i] - x[i];
    return mt_cpu_sum(lane, MT_LANES) == 0;
}

static void score(enum mt_router_score kind, float *s, const float *x, size_t e)
{
    if (kind == MT_SCORE_SOFTMAX)
        softmax(s, x, e);
    else if (kind == MT_SCORE_SIGMOID)
        sigmoids(s, x, e);
    else
        memcpy(s, x, e * sizeof(*s));
}

/* --- choosing --------------------------------------------------------------------------------- */

static const float masked = -FLT_MAX, taken = -INFINITY; /* of experts in other groups; of experts already chosen */

/* Index of the largest, the first of equals; marks it as taken. */
MT_HOT static size_t take_best(float *key, size_t n)
{
    float best[MT_LANES];
    int32_t at[MT_LANES];
    size_t i = 0;
    for (int k = 0; k < MT_LANES; k++) {
        best[k] = taken;
        at[k] = INT32_MAX;
    }
    for (; i + MT_LANES <= n; i += MT_LANES)
        for (int k = 0; k < MT_LANES; k++) {
            bool more = key[i + (size_t)k] > best[k];
            best[k] = more ? key[i + (size_t)k] : best[k];
            at[k] = more ? (int32_t)i + k : at[k];
        }
    for (int k = 0; i < n; i++, k++)
        if (key[i] > best[k]) {
            best[k] = key[i];
            at[k] = (int32_t)i;
        }
    for (int k = 1; k < MT_LANES; k++)
        if (best[k] > best[0] || (best[k] == best[0] && at[k] < at[0])) {
            best[0] = best[k];
            at[0] = at[k];
        }
    key[at[0]] = taken;
    return (size_t)at[0];
}

/* The score of a group. */
static float group_key(const struct mt_router_rule *rule, const float *key, size_t n)
{
    float first = masked, second = masked;
    for (size_t i = 0; i < n; i++)
        if (key[i] > first) {
            second = first;
            first = key[i];
        } else if (key[i] > second)
            second = key[i];
    return rule->group == MT_GROUP_MAX ? first : first + second;
}

/* Masks all experts but those of the best groups. */
static void mask_groups(const struct mt_router_rule *rule, float *key, size_t e)
{
    float groups[MT_MAX_EXPERTS];
    size_t per = e / rule->n_group;
    for (size_t g = 0; g < rule->n_group; g++) {
        float sum = group_key(rule, key + g * per, per);
        groups[g] = sum > masked ? sum : masked;
    }
    for (size_t i = 0; i < rule->topk_group; i++)
        (void)take_best(groups, rule->n_group);
    for (size_t i = 0; i < e; i++)
        key[i] = groups[i / per] == taken ? key[i] : masked;
}

static void choose(const struct mt_router *a, uint16_t *ids, const float *s)
{
    float key[MT_MAX_EXPERTS];
    for (size_t i = 0; i < a->e; i++) {
        key[i] = a->select_bias ? s[i] + a->select_bias[i] : s[i];
        key[i] = key[i] > masked ? key[i] : masked; /* a bias may be anything */
    }
    if (a->rule.n_group > 1)
        mask_groups(&a->rule, key, a->e);
    for (size_t j = 0; j < a->k; j++)
        ids[j] = (uint16_t)take_best(key, a->e);
}

/* --- weights ---------------------------------------------------------------------------------- */

/* v of the chosen experts, before renorm; returns the divisor of renorm. *open: the divisor is the sum. */
static float chosen_scores(const struct mt_router_rule *rule, float *v, const float *s, const uint16_t *ids, size_t k,
                           bool *open)
{
    float sum = 0;
    for (size_t j = 0; j < k; j++)
        v[j] = s[ids[j]];
    if (rule->softmax_chosen)
        softmax(v, v, k);
    for (size_t j = 0; j < k; j++)
        sum += v[j];
    *open = rule->renorm == MT_RENORM_SUM || (rule->renorm == MT_RENORM_MAX && sum >= rule->eps);
    if (rule->renorm == MT_RENORM_NONE)
        return 1;
    if (rule->renorm == MT_RENORM_SUM)
        return sum + rule->eps;
    return *open ? sum : rule->eps;
}

/* The number that an expert's weights are multiplied by. */
static float scale_of(enum mt_dtype dtype, const void *scale, size_t expert)
{
    return scale ? mt_cpu_element(dtype, scale, expert) : 1;
}

static void forward_row(const void *args, size_t row)
{
    const struct mt_router *a = args;
    float tmp[MT_MAX_EXPERTS], s[MT_MAX_EXPERTS], v[MT_MAX_EXPERTS];
    uint16_t *ids = a->ids + row * a->k;
    float *w = a->weights + row * a->k;
    bool open;
    const float *x = row < a->n ? mt_cpu_row_f32(a->logits_dtype, a->logits, row * a->e, a->e, tmp) : NULL;
    if (!x || !all_finite(x, a->e)) {
        for (size_t j = 0; j < a->k; j++) {
            ids[j] = x ? (uint16_t)j : MT_NO_EXPERT;
            w[j] = x ? NAN : 0;
        }
        return;
    }
    score(a->rule.score, s, x, a->e);
    choose(a, ids, s);
    float by = chosen_scores(&a->rule, v, s, ids, a->k, &open);
    for (size_t j = 0; j < a->k; j++)
        w[j] = v[j] / by * a->rule.scale * scale_of(a->dtype, a->expert_scale, ids[j]);
    if (a->rule.round_weights)
        mt_cpu_round_row(a->dtype, w, a->k);
}

void mt_cpu_run_router(struct mt_cpu_device *d, const struct mt_router *a)
{
    mt_cpu_by_rows(d, forward_row, a, a->n_padded, a->e);
}

/* --- backward --------------------------------------------------------------------------------- */

/* Sets dx, the gradient of the logits, from dv, that of the chosen experts' scores. */
static void through_score(const struct mt_router_bwd *a, float *dx, const float *s, const uint16_t *ids,
                          const float *dv)
{
    float dot = 0;
    for (size_t j = 0; j < a->k; j++)
        dot += dv[j] * s[ids[j]];
    for (size_t i = 0; i < a->e; i++)
        dx[i] = a->rule.score == MT_SCORE_SOFTMAX ? -s[i] * dot : 0;
    for (size_t j = 0; j < a->k; j++) {
        float p = s[ids[j]];
        dx[ids[j]] = a->rule.score == MT_SCORE_SOFTMAX   ? p * (dv[j] - dot)
                     : a->rule.score == MT_SCORE_SIGMOID ? dv[j] * (p * (1 - p))
                                                         : dv[j];
    }
}

static void add_aux(const struct mt_router_bwd *a, float *dx, const float *x)
{
    float q[MT_MAX_EXPERTS];
    softmax(q, x, a->e);
    float dot = mt_cpu_dot(q, a->aux, a->e);
    for (size_t i = 0; i < a->e; i++)
        dx[i] += a->aux_scale * (q[i] * (a->aux[i] - dot));
}

static void gradient_of_row(const struct mt_router_bwd *a, float *dx, const float *x, size_t row)
{
    float s[MT_MAX_EXPERTS], v[MT_MAX_EXPERTS], dv[MT_MAX_EXPERTS], dot = 0;
    const uint16_t *ids = a->ids + row * a->k;
    float dw[MT_MAX_EXPERTS];
    bool open;
    score(a->rule.score, s, x, a->e);
    float by = chosen_scores(&a->rule, v, s, ids, a->k, &open);
    for (size_t j = 0; j < a->k; j++)
        dw[j] = a->dweights[row * a->k + j] * scale_of(a->dtype, a->expert_scale, ids[j]);
    for (size_t j = 0; a->dscale && j < a->k; j++)
        a->dscale[row * a->e + ids[j]] = a->dweights[row * a->k + j] * (v[j] / by * a->rule.scale);
    for (size_t j = 0; open && j < a->k; j++)
        dot += a->rule.scale * dw[j] * (v[j] / by);
    for (size_t j = 0; j < a->k; j++)
        dv[j] = (a->rule.scale * dw[j] - dot) / by;
    if (a->rule.softmax_chosen) {
        dot = 0;
        for (size_t j = 0; j < a->k; j++)
            dot += dv[j] * v[j];
        for (size_t j = 0; j < a->k; j++)
            dv[j] = v[j] * (dv[j] - dot);
    }
    through_score(a, dx, s, ids, dv);
    if (a->aux)
        add_aux(a, dx, x);
}

static void backward_row(const void *args, size_t r)
{
    const struct mt_router_bwd *a = args;
    float tmp[MT_MAX_EXPERTS], dx[MT_MAX_EXPERTS];
    const float *x = mt_cpu_row_f32(a->logits_dtype, a->logits, r * a->e, a->e, tmp);
    bool routed = a->ids[r * a->k] < a->e, finite = all_finite(x, a->e);
    if (a->dscale) /* a row that is not finite stops the step by its logits' gradient */
        memset(a->dscale + r * a->e, 0, a->e * sizeof(float));
    if (routed && finite)
        gradient_of_row(a, dx, x, r);
    for (size_t i = 0; !(routed && finite) && i < a->e; i++)
        dx[i] = routed ? NAN : 0;
    mt_cpu_store_row(a->dtype, a->dlogits, r * a->e, a->e, dx);
}

void mt_cpu_run_router_bwd(struct mt_cpu_device *d, const struct mt_router_bwd *a)
{
    mt_cpu_by_rows(d, backward_row, a, a->n, a->e);
}

/* --- probabilities ---------------------------------------------------------------------------- */

enum { STATS_ROWS = 64 }; /* rows of a block, which has a partial sum */

MT_CPU_SUMS(router_stats, n, STATS_ROWS, a->e)

static void stats_row(const void *args, size_t r, float *sum)
{
    const struct mt_router_stats *a = args;
    float tmp[MT_MAX_EXPERTS], p[MT_MAX_EXPERTS];
    softmax(p, mt_cpu_row_f32(a->dtype, a->logits, r * a->e, a->e, tmp), a->e);
    mt_cpu_add_scaled(sum, p, 1, a->e);
}

void mt_cpu_run_router_stats(struct mt_cpu_device *d, const struct mt_router_stats *a)
{
    mt_cpu_sum_rows(d, stats_row, a, a->n, (struct mt_cpu_sums){STATS_ROWS, a->e, a->prob_sum, a->workspace});
}
