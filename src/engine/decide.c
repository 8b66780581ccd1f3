/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What is done with a step's gradient: its norm, clipping, and what is skipped. With a norm of the
 * whole gradient all of it is clipped or skipped; else each block is, by itself. Blocks, not units:
 * they are the same however layers are cut.
 */
#include <math.h>
#include <stdio.h>

#include "base/mem.h"
#include "engine/state.h"
#include "optim/lr.h"

typedef double square_sum_fn(const void *ctx, size_t tensor);

static double tensor_square_sum(const void *ctx, size_t t)
{
    const mt_engine *e = ctx;
    size_t n;
    const float *part =
        mt_model_partials(mt_engine_gradient_model_of(e, e->b.layout->tensors[t].unit), t, &n);
    double sum = 0;
    for (size_t i = 0; i < n; i++)
        sum += (double)part[i];
    return sum;
}

/* A sum of squares; bad: the first tensor whose own are not finite, or NULL. */
struct squares {
    double sum;
    const struct mt_tensor *bad;
};

/* Adds those of a learner's tensors in units [first, end). */
static void add_squares(struct squares *to, const struct mt_layout *l, int learner, size_t first, size_t end,
                        square_sum_fn *square_sum, const void *ctx)
{
    const struct mt_unit *last = &l->units[end - 1];
    for (size_t i = l->units[first].first_tensor; i < last->first_tensor + last->n_tensors; i++) {
        if (!l->tensors[i].trainable || l->tensors[i].learner != learner)
            continue;
        double s = square_sum(ctx, i);
        if (!isfinite(s) && !to->bad)
            to->bad = &l->tensors[i];
        to->sum += s;
    }
}

/* The first unit of a unit's block. */
static size_t block_first(const struct mt_layout *l, size_t unit)
{
    while (unit > 0 && l->units[unit - 1].block == l->units[unit].block)
        unit--;
    return unit;
}

double mt_grad_norm(const struct mt_layout *l, int learner, square_sum_fn *square_sum,
                    const void *ctx, const struct mt_tensor **bad)
{
    struct squares all = {0, NULL};
    for (size_t end = l->n_units, first; end > 0; end = first) {
        first = block_first(l, end - 1);
        add_squares(&all, l, learner, first, end, square_sum, ctx);
    }
    *bad = all.bad;
    return sqrt(all.sum);
}

/* The router of the units whose logits were not finite; NULL: none. */
static const char *bad_router(const mt_engine *e, size_t first, size_t end)
{
    const char *bad = NULL;
    const struct mt_unit *unit = e->b.layout->units;
    for (size_t u = first; u < end; u++) {
        if (u > first && unit[u].layer == unit[u - 1].layer)
            continue;
        for (size_t i = 0; i < e->n_lanes && !bad; i++) /* those that do not route its rows have none at fault */
            bad = mt_model_bad_router(e->lane[i].b.model, unit[u].layer);
    }
    return bad;
}

static bool has_tensors(const struct mt_layout *l, int learner, size_t first, size_t end)
{
    const struct mt_unit *last = &l->units[end - 1];
    bool any = false;
    for (size_t i = l->units[first].first_tensor; i < last->first_tensor + last->n_tensors; i++)
        any |= l->tensors[i].trainable && l->tensors[i].learner == learner;
    return any;
}

static void set_clip(struct mt_learner *l, size_t first, size_t end, float clip)
{
    for (size_t u = first; u < end; u++)
        l->clip[u] = clip;
}

void mt_engine_decide_block(mt_engine *e, size_t learner, size_t first, size_t end)
{
    struct mt_learner *l = &e->learner[learner];
    struct squares own = {0, NULL};
    add_squares(&own, e->b.layout, (int)learner, first, end, tensor_square_sum, e);
    double norm = sqrt(own.sum);
    bool skip = !isfinite(norm) || bad_router(e, first, end);
    set_clip(l, first, end, skip ? MT_CLIP_SKIP : mt_clip_factor(norm, l->numerics.grad_clip));
}

/* Each block by itself; the step is skipped if all are. */
static void decide_blocks(mt_engine *e, size_t learner, struct mt_step_result *res)
{
    const struct mt_layout *l = e->b.layout;
    const float *clip = e->learner[learner].clip;
    size_t n = 0;
    for (size_t end = l->n_units, first; end > 0; end = first) {
        first = block_first(l, end - 1);
        if (!has_tensors(l, (int)learner, first, end))
            continue;
        mt_engine_decide_block(e, learner, first, end);
        n++;
        res->n_skipped += clip[first] < 0;
        if (clip[first] >= 0)
            res->clip = MT_MIN(res->clip, clip[first]);
    }
    res->skipped = res->n_skipped == n;
}

/* A variant of the weights of which all rollouts are left out says nothing of them: advantages are 0 on average. */
static double mean_or_none(const struct mt_measure *m)
{
    return m->n > 0 ? mt_measure_mean(m) : 0;
}

/* Measures the step, and the slope of its loss along each sample's noise: the mean of all is the step's. */
static struct mt_along measure_along(mt_engine *e, struct mt_learner *l, const struct mt_step_data *data,
                                     struct mt_step_result *res)
{
    const struct mt_mezo_keys *keys = &l->numerics.mezo;
    struct mt_along along = {.kind = keys->noise, .seed = l->numerics.seed, .n = (size_t)keys->samples};
    double loss[2], squares = 0;
    for (size_t i = 0; i < mt_mezo_variants(keys); i++, l->first_micro += data->n) {
        struct mt_measure own[MT_MAX_MEASURES] = {{0}};
        l->objective.variant = (int)i;
        mt_engine_measure(e, l, data, own);
        mt_engine_measure(e, l, data, res->measures);
        loss[i % 2] = mean_or_none(&own[0]);
        if (i % 2 == 0)
            continue;
        double slope = (loss[0] - loss[1]) / (2 * keys->eps);
        squares += slope * slope;
        along.g[i / 2] = (float)(slope / (double)along.n);
    }
    res->loss = mean_or_none(&res->measures[0]);
    res->grad_norm = sqrt(squares / (double)along.n);
    return along;
}

void mt_engine_decide_along(mt_engine *e, size_t learner, const struct mt_learner_step *of, struct mt_step_result *res)
{
    struct mt_learner *l = &e->learner[learner];
    const struct mt_layout *layout = e->b.layout;
    struct mt_along along = measure_along(e, l, of->data, res);
    res->clip = 1;
    res->skipped = !isfinite(res->grad_norm);
    res->n_skipped = res->skipped ? mt_layout_n_blocks(layout) : 0;
    if (res->skipped) {
        snprintf(res->bad_tensor, sizeof(res->bad_tensor), "the losses of perturbed weights");
        return;
    }
    set_clip(l, 0, layout->n_units, 1);
    mt_learner_decide(l, of->lr);
    l->pending.step = of->data->step;
    l->pending.along = along;
}

void mt_engine_decide(mt_engine *e, size_t learner, double lr, struct mt_step_result *res)
{
    struct mt_learner *l = &e->learner[learner];
    const struct mt_tensor *bad;
    const char *router = bad_router(e, 0, e->b.layout->n_units);
    res->grad_norm = mt_grad_norm(e->b.layout, (int)learner, tensor_square_sum, e, &bad);
    res->clip = 1;
    res->n_skipped = 0;
    if (mt_clips_by_block(&l->numerics)) {
        decide_blocks(e, learner, res);
    } else {
        res->skipped = !isfinite(res->grad_norm) || router;
        res->n_skipped = res->skipped ? mt_layout_n_blocks(e->b.layout) : 0;
        res->clip = res->skipped ? 1 : mt_clip_factor(res->grad_norm, l->numerics.grad_clip);
        set_clip(l, 0, e->b.layout->n_units, res->clip);
    }
    res->bad_router = res->n_skipped && router;
    if (res->n_skipped && (router || bad))
        snprintf(res->bad_tensor, sizeof(res->bad_tensor), "%s", router ? router : bad->name);
    if (!res->skipped)
        mt_learner_decide(l, lr);
}
