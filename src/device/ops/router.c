/* SPDX-License-Identifier: Apache-2.0 */
#include "device/ops/row.h"

/* The rule for k of e experts. */
static void need_rule(struct mt_op_walk *w, const struct mt_router_rule *rule, size_t e, size_t k)
{
    MT_NEED(w, k && k <= e && e <= MT_MAX_EXPERTS && rule->eps >= 0);
    if (rule->n_group <= 1)
        return;
    MT_NEED(w, e % rule->n_group == 0 && rule->topk_group && rule->topk_group <= rule->n_group);
    MT_NEED(w, rule->topk_group * (e / rule->n_group) >= k);
    MT_NEED(w, rule->group == MT_GROUP_MAX || e / rule->n_group >= 2);
}

/* That of Qwen's mixtures. */
static const struct mt_router_rule softmax_rule = {.score = MT_SCORE_SOFTMAX, .renorm = MT_RENORM_SUM, .scale = 1};

static void router(struct mt_op_walk *w, struct mt_router *a)
{
    size_t n = mt_op_dim(w, &a->n), e = mt_op_dim(w, &a->e), k = mt_op_dim(w, &a->k);
    enum mt_dtype t = mt_op_dtype(w, &a->logits_dtype);
    MT_FILL(w, a->n_padded = n; a->dtype = t; a->rule = softmax_rule);
    MT_ARRAY(w, a->logits, FRESH, t, n * e, 1);
    MT_ARRAY(w, a->ids, WRITE | LOOSE, MT_BF16, a->n_padded * k, 1);
    MT_ARRAY(w, a->weights, WRITE | LOOSE, MT_F32, a->n_padded * k, 1);
    MT_NEED(w, a->n_padded >= a->n && (a->logits_dtype == a->dtype || a->logits_dtype == MT_F32));
    need_rule(w, &a->rule, e, k);
}

MT_OP_WALK(router, n_padded, .dim = {MT_SIZE_ROWS, MT_SIZE_EXPERTS, MT_SIZE_TOP_K});

static void router_bwd(struct mt_op_walk *w, struct mt_router_bwd *a)
{
    size_t n = mt_op_dim(w, &a->n), e = mt_op_dim(w, &a->e), k = mt_op_dim(w, &a->k);
    enum mt_dtype t = mt_op_dtype(w, &a->dtype);
    MT_FILL(w, a->logits_dtype = t; a->rule = softmax_rule);
    MT_ARRAY(w, a->logits, READ, a->logits_dtype, n * e, 1);
    MT_FILL(w, a->ids = mt_example_choices(w->x, n, e, k));
    MT_ARRAY(w, a->ids, READ | LOOSE, MT_BF16, n * k, 1);
    MT_ARRAY(w, a->dweights, READ | LOOSE, MT_F32, n * k, 1);
    MT_ARRAY(w, a->dlogits, WRITE, t, n * e, 1);
    MT_NEED(w, a->logits != a->dlogits && (!a->dscale || a->expert_scale));
    MT_NEED(w, a->logits_dtype == a->dtype || a->logits_dtype == MT_F32);
    need_rule(w, &a->rule, e, k);
}

MT_OP_WALK(router_bwd, n, .dim = {MT_SIZE_ROWS, MT_SIZE_EXPERTS, MT_SIZE_TOP_K});

static void router_stats(struct mt_op_walk *w, struct mt_router_stats *a)
{
    size_t n = mt_op_dim(w, &a->n), e = mt_op_dim(w, &a->e);
    MT_ARRAY(w, a->logits, FRESH, mt_op_dtype(w, &a->dtype), n * e, 1);
    MT_ARRAY(w, a->prob_sum, UPDATE | LOOSE, MT_F32, e, 2);
    MT_NEED(w, a->e && a->e <= MT_MAX_EXPERTS);
    MT_WORKSPACE(w, a, true);
}

MT_OP_WALK(router_stats, n, .dim = {MT_SIZE_ROWS, MT_SIZE_EXPERTS});
