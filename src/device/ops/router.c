/* SPDX-License-Identifier: Apache-2.0 */
#include "device/ops/row.h"

/* NULL, or the condition that the rule violates for k of e experts. */
static const char *check_rule(const struct mt_router_rule *rule, size_t e, size_t k)
{
    MT_OP_NEED(k && k <= e && e <= MT_MAX_EXPERTS);
    MT_OP_NEED(rule->eps >= 0);
    if (rule->n_group <= 1)
        return NULL;
    MT_OP_NEED(e % rule->n_group == 0 && rule->topk_group && rule->topk_group <= rule->n_group);
    MT_OP_NEED(rule->topk_group * (e / rule->n_group) >= k);
    MT_OP_NEED(rule->group == MT_GROUP_MAX || e / rule->n_group >= 2);
    return NULL;
}

static const char *check_router(const struct mt_router *a)
{
    MT_OP_NEED(a->n_padded >= a->n && aligned(a->logits) && a->ids && a->weights);
    MT_OP_NEED(a->logits_dtype == a->dtype || a->logits_dtype == MT_F32);
    return check_rule(&a->rule, a->e, a->k);
}

static void cost_router(const struct mt_router *a, struct mt_metered *out)
{
    mt_op_shape(out, a->logits_dtype, MT_DIMS(a->n, a->e, a->k));
    out->bytes = mt_op_bytes(a->n, a->e, a->logits_dtype) + (double)a->n_padded * (double)a->k * 6;
}

/* The rule of Qwen's mixtures. */
static const struct mt_router_rule softmax_rule = {.score = MT_SCORE_SOFTMAX, .renorm = MT_RENORM_SUM, .scale = 1};

static void fill_router(mt_example *x, const struct mt_metered *shape, struct mt_router *a)
{
    size_t n = (size_t)shape->dim[0], e = (size_t)shape->dim[1], k = (size_t)shape->dim[2];
    *a = (struct mt_router){
        .n = n, .n_padded = n, .e = e, .k = k, .dtype = shape->dtype, .logits_dtype = shape->dtype,
        .rule = softmax_rule, .logits = mt_example_fresh(x, shape->dtype, n * e),
        .ids = mt_example_write(x, MT_BF16, n * k), .weights = mt_example_write(x, MT_F32, n * k)};
}

MT_OP_ROW(router, n_padded, .dim = {MT_SIZE_ROWS, MT_SIZE_EXPERTS, MT_SIZE_TOP_K});

static const char *check_router_bwd(const struct mt_router_bwd *a)
{
    MT_OP_NEED(aligned(a->logits) && a->ids && a->dweights && aligned(a->dlogits) && a->logits != a->dlogits);
    MT_OP_NEED(!a->dscale || a->expert_scale);
    MT_OP_NEED(a->logits_dtype == a->dtype || a->logits_dtype == MT_F32);
    return check_rule(&a->rule, a->e, a->k);
}

static void cost_router_bwd(const struct mt_router_bwd *a, struct mt_metered *out)
{
    mt_op_shape(out, a->dtype, MT_DIMS(a->n, a->e, a->k));
    out->bytes = mt_op_bytes(a->n, a->e, a->logits_dtype) + mt_op_bytes(a->n, a->e, a->dtype) +
                 (double)a->n * (double)a->k * 6;
}

static void fill_router_bwd(mt_example *x, const struct mt_metered *shape, struct mt_router_bwd *a)
{
    size_t n = (size_t)shape->dim[0], e = (size_t)shape->dim[1], k = (size_t)shape->dim[2];
    *a = (struct mt_router_bwd){
        .n = n, .e = e, .k = k, .dtype = shape->dtype, .logits_dtype = shape->dtype, .rule = softmax_rule,
        .logits = mt_example_read(x, shape->dtype, n * e), .ids = mt_example_choices(x, n, e, k),
        .dweights = mt_example_read(x, MT_F32, n * k), .dlogits = mt_example_write(x, shape->dtype, n * e)};
}

MT_OP_ROW(router_bwd, n, .dim = {MT_SIZE_ROWS, MT_SIZE_EXPERTS, MT_SIZE_TOP_K});

static const char *check_router_stats(const struct mt_router_stats *a)
{
    MT_OP_NEED(a->e && a->e <= MT_MAX_EXPERTS && aligned(a->logits) && a->prob_sum && a->workspace);
    return NULL;
}

static void cost_router_stats(const struct mt_router_stats *a, struct mt_metered *out)
{
    mt_op_shape(out, a->dtype, MT_DIMS(a->n, a->e));
    out->bytes = mt_op_bytes(a->n, a->e, a->dtype) + 8 * (double)a->e;
}

static void fill_router_stats(mt_example *x, const struct mt_metered *shape, struct mt_router_stats *a)
{
    size_t n = (size_t)shape->dim[0], e = (size_t)shape->dim[1];
    *a = (struct mt_router_stats){.n = n, .e = e, .dtype = shape->dtype};
    a->logits = mt_example_fresh(x, shape->dtype, n * e);
    a->prob_sum = mt_example_update(x, MT_F32, e);
    a->workspace = mt_example_workspace(x, mt_op_router_stats_workspace(mt_example_device(x), a));
}

MT_OP_ROW(router_stats, n, .dim = {MT_SIZE_ROWS, MT_SIZE_EXPERTS});
