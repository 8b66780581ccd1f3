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

static const char *check(const void *args)
{
    const struct mt_router *a = args;
    MT_OP_NEED(a->n_padded >= a->n && aligned(a->logits) && a->ids && a->weights);
    MT_OP_NEED(a->logits_dtype == a->dtype || a->logits_dtype == MT_F32);
    return check_rule(&a->rule, a->e, a->k);
}

static void cost(const void *args, struct mt_metered *out)
{
    const struct mt_router *a = args;
    out->dtype = a->logits_dtype;
    out->dim[0] = a->n;
    out->dim[1] = a->e;
    out->dim[2] = a->k;
    out->bytes = mt_op_bytes(a->n, a->e, a->logits_dtype) + (double)a->n_padded * (double)a->k * 6;
}

/* The rule of Qwen's mixtures. */
static const struct mt_router_rule softmax_rule = {.score = MT_SCORE_SOFTMAX, .renorm = MT_RENORM_SUM, .scale = 1};

static void fill(mt_example *x, const struct mt_metered *shape, void *args)
{
    size_t n = (size_t)shape->dim[0], e = (size_t)shape->dim[1], k = (size_t)shape->dim[2];
    *(struct mt_router *)args = (struct mt_router){
        .n = n, .n_padded = n, .e = e, .k = k, .dtype = shape->dtype, .logits_dtype = shape->dtype,
        .rule = softmax_rule, .logits = mt_example_fresh(x, shape->dtype, n * e),
        .ids = mt_example_write(x, MT_BF16, n * k), .weights = mt_example_write(x, MT_F32, n * k)};
}

const struct mt_op mt_op_row_router = {
    .name = {"router"},
    .dim = {MT_SIZE_ROWS, MT_SIZE_EXPERTS, MT_SIZE_TOP_K},
    .args_bytes = sizeof(struct mt_router),
    .count = offsetof(struct mt_router, n_padded),
    .check = check,
    .cost = cost,
    .fill = fill,
};

static const char *check_bwd(const void *args)
{
    const struct mt_router_bwd *a = args;
    MT_OP_NEED(aligned(a->logits) && a->ids && a->dweights && aligned(a->dlogits) && a->logits != a->dlogits);
    MT_OP_NEED(!a->dscale || a->expert_scale);
    MT_OP_NEED(a->logits_dtype == a->dtype || a->logits_dtype == MT_F32);
    return check_rule(&a->rule, a->e, a->k);
}

static void cost_bwd(const void *args, struct mt_metered *out)
{
    const struct mt_router_bwd *a = args;
    out->dtype = a->dtype;
    out->dim[0] = a->n;
    out->dim[1] = a->e;
    out->dim[2] = a->k;
    out->bytes = mt_op_bytes(a->n, a->e, a->logits_dtype) + mt_op_bytes(a->n, a->e, a->dtype) +
                 (double)a->n * (double)a->k * 6;
}

static void fill_bwd(mt_example *x, const struct mt_metered *shape, void *args)
{
    size_t n = (size_t)shape->dim[0], e = (size_t)shape->dim[1], k = (size_t)shape->dim[2];
    *(struct mt_router_bwd *)args = (struct mt_router_bwd){
        .n = n, .e = e, .k = k, .dtype = shape->dtype, .logits_dtype = shape->dtype, .rule = softmax_rule,
        .logits = mt_example_read(x, shape->dtype, n * e), .ids = mt_example_choices(x, n, e, k),
        .dweights = mt_example_read(x, MT_F32, n * k), .dlogits = mt_example_write(x, shape->dtype, n * e)};
}

const struct mt_op mt_op_row_router_bwd = {
    .name = {"router_bwd"},
    .dim = {MT_SIZE_ROWS, MT_SIZE_EXPERTS, MT_SIZE_TOP_K},
    .args_bytes = sizeof(struct mt_router_bwd),
    .count = offsetof(struct mt_router_bwd, n),
    .check = check_bwd,
    .cost = cost_bwd,
    .fill = fill_bwd,
};

static const char *check_stats(const void *args)
{
    const struct mt_router_stats *a = args;
    MT_OP_NEED(a->e && a->e <= MT_MAX_EXPERTS && aligned(a->logits) && a->prob_sum && a->workspace);
    return NULL;
}

static void cost_stats(const void *args, struct mt_metered *out)
{
    const struct mt_router_stats *a = args;
    out->dtype = a->dtype;
    out->dim[0] = a->n;
    out->dim[1] = a->e;
    out->bytes = mt_op_bytes(a->n, a->e, a->dtype) + 8 * (double)a->e;
}

static void fill_stats(mt_example *x, const struct mt_metered *shape, void *args)
{
    size_t n = (size_t)shape->dim[0], e = (size_t)shape->dim[1];
    struct mt_router_stats a = {.n = n, .e = e, .dtype = shape->dtype};
    a.logits = mt_example_fresh(x, shape->dtype, n * e);
    a.prob_sum = mt_example_update(x, MT_F32, e);
    a.workspace = mt_example_workspace(x, mt_op_router_stats_workspace(mt_example_device(x), &a));
    *(struct mt_router_stats *)args = a;
}

const struct mt_op mt_op_row_router_stats = {
    .name = {"router_stats"},
    .dim = {MT_SIZE_ROWS, MT_SIZE_EXPERTS},
    .args_bytes = sizeof(struct mt_router_stats),
    .count = offsetof(struct mt_router_stats, n),
    .check = check_stats,
    .cost = cost_stats,
    .fill = fill_stats,
};
