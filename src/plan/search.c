/* SPDX-License-Identifier: Apache-2.0 */
#include "plan/search.h"

#include <math.h>
#include <stdlib.h>

#include "base/mem.h"
#include "kinds/kinds.h"
#include "model/packing.h"
#include "plan/search_priv.h"

#define WORTH_READING 1.05 /* reading the model's files in every step must make it this much faster */
#define WORTH_UPDATING 1.02 /* the same of updates under backward, with which a device that fails costs more */
#define WORTH_SPARING 0.95 /* or they must write at most this share to drives */
#define WORTH_CUTTING 1.01 /* halves must be this much faster: they have twice as many boundaries */

/* Whether it fits the device with so many layers kept. *separate: gradients then have separate cast buffers. */
static bool fits_kept(mt_device *dev, const struct mt_plan_request *r, int keep, bool *separate)
{
    struct mt_plan_request t = *r;
    MT_CLOSED_BY(mt_engine_plan_finish) struct mt_engine_plan plan = {0};
    struct mt_engine_params p;
    t.placement.keep_layers = keep;
    bool fits = !mt_plan_divide(&plan, &p, &t, dev, NULL);
    *separate = plan.program.cast;
    return fits;
}

/* The most layers that can be kept (by bisection) without giving up separate cast buffers. */
static int most_kept(const struct mt_plan_request *r)
{
    int lo = 0, hi = (int)r->layout->cfg.n_layers;
    bool separate, separate_at_none;
    MT_CLOSED_BY(mt_device_destroy) mt_device *dev = NULL;
    if (mt_plan_meter(&dev, r, r->placement.device_budget.bytes, NULL))
        return 0;
    bool fits = fits_kept(dev, r, 0, &separate_at_none);
    while (fits && lo < hi) {
        int mid = (lo + hi + 1) / 2;
        if (fits_kept(dev, r, mid, &separate) && separate == separate_at_none)
            lo = mid;
        else
            hi = mid - 1;
    }
    return lo;
}

static int add_group(struct mt_search *s, const struct mt_plan_request *r, mt_cost_table *costs, struct mt_err *err)
{
    if (s->n == MT_SEARCH_MAX_GROUPS)
        return 0;
    struct mt_search_group *g = &s->g[s->n++];
    *g = (struct mt_search_group){.r = *r, .costs = costs, .seconds = INFINITY};
    return mt_search_bound(g, err);
}

static int add_activations(struct mt_search *s, const struct mt_plan_request *r, mt_cost_table *costs,
                           struct mt_err *err)
{
    /* records go to the disk only if configured: they would wear drives out within weeks */
    static const enum mt_activations modes[] = {MT_ACT_KEEP, MT_ACT_RECOMPUTE, MT_ACT_OFFLOAD, MT_ACT_DISK};
    bool generates = r->cache.slots && !r->train; /* a pass has no records: one mode is as good as another */
    int rc = 0;
    for (size_t i = 0; i < MT_ARRAY_LEN(modes) && !rc; i++) {
        struct mt_plan_request t = *r;
        bool open = generates ? modes[i] == MT_ACT_RECOMPUTE : modes[i] != MT_ACT_DISK;
        if (r->placement.activations == MT_ACT_AUTO ? !open : r->placement.activations != modes[i])
            continue;
        t.placement.activations = modes[i];
        t.placement.keep_layers = MT_MAX(r->placement.keep_layers, 0);
        rc = add_group(s, &t, costs, err);
        if (rc || modes[i] != MT_ACT_RECOMPUTE || r->placement.keep_layers != MT_AUTO || generates)
            continue;
        t.placement.keep_layers = most_kept(&t);
        for (int n = 0; n < MT_SEARCH_MAX_KEPT && t.placement.keep_layers > 0 && !rc; n++) {
            rc = add_group(s, &t, costs, err);
            t.placement.keep_layers = t.placement.keep_layers * 2 / 3;
        }
    }
    return rc;
}

static int add_micro_batch(struct mt_search *s, const struct mt_plan_request *r, struct mt_err *err)
{
    int64_t chunk[MT_PLAN_MAX_CHUNKS];
    int rc = 0;
    size_t n = mt_plan_chunks(r, chunk);
    for (size_t i = 0; i < n && !rc; i++) {
        struct mt_plan_request t = *r;
        mt_cost_table **costs = &s->costs[s->n_costs++];
        mt_plan_take_chunk(&t, chunk[i]);
        rc = mt_plan_costs(costs, &t, err) ?: add_activations(s, &t, *costs, err);
    }
    return rc;
}

static int compare_groups(const void *a, const void *b)
{
    const struct mt_search_group *x = a, *y = b;
    return (x->least > y->least) - (x->least < y->least);
}

/* Tries groups in order of their bounds; skips those whose bound is no better than the best step found. */
static int try_groups(struct mt_search *s, struct mt_err *err)
{
    int rc = 0;
    qsort(s->g, s->n, sizeof(*s->g), compare_groups);
    for (struct mt_search_group *g = s->g; g < s->g + s->n && !rc; g++)
        if (!s->found || g->least * MT_SEARCH_NEAR_ENOUGH < s->best.sim.makespan)
            rc = mt_search_try(s, g, &g->r.placement, NULL, err);
    return rc;
}

/* Evaluates again with the chosen values fixed, so that the result equals the plan of a run with these values. */
static int fix_choice(struct mt_plan_choice *c, const struct mt_plan_request *r, struct mt_err *err)
{
    struct mt_plan_request t = mt_plan_request_as(r, c);
    struct mt_plan_choice fixed;
    int rc = mt_plan_evaluate(&fixed, &t, NULL, err);
    if (rc)
        return rc;
    fixed.tried = MT_GIVE(c->tried);
    fixed.n_tried = fixed.n_searched = c->n_tried;
    mt_plan_choice_finish(c);
    *c = fixed;
    return 0;
}

static int search_layout(struct mt_plan_choice *out, const struct mt_plan_request *r, struct mt_err *err)
{
    MT_FREED struct mt_search *s = NULL;
    int64_t choices[MT_PLAN_MAX_MICRO_BATCHES];
    size_t n = mt_plan_micro_batches(r, choices);
    int rc = MT_NEW(&s, 1, "a search", err);
    if (rc)
        return rc;
    s->r = r;
    s->lean_writes = INFINITY;
    for (size_t i = n; i-- > 0 && !rc;) {
        struct mt_plan_request t = *r;
        t.numerics.micro_batch = choices[i];
        rc = add_micro_batch(s, &t, err);
    }
    rc = rc ?: try_groups(s, err) ?: mt_search_refine(s, err);
    for (size_t i = 0; i < s->n_costs; i++)
        mt_cost_table_destroy(&s->costs[i]);
    if (!rc && !s->found) {
        if (err)
            *err = s->err;
        rc = -ENOSPC;
    }
    s->best.tried = s->tried;
    s->best.n_tried = s->n_tried;
    rc = rc ?: fix_choice(&s->best, r, err);
    if (rc)
        mt_plan_choice_finish(&s->best);
    else
        *out = s->best;
    return rc;
}

bool mt_plan_wants_codes(const struct mt_plan_choice *c, const struct mt_plan_request *r, size_t coded_rows)
{
    bool codes = r->halves && r->halves->cut.n_units == r->layout->cut.n_units;
    bool few = r->numerics.rows_per_step <= (int64_t)coded_rows && r->numerics.compute != MT_COMPUTE_FP8;
    return codes && r->cache.slots && !r->train &&
           (c->engine.n_stay < c->layout->n_units || (few && mt_layout_codes_multiply(r->halves)));
}

static size_t coded_rows(const struct mt_plan_request *r)
{
    const struct mt_device_kind *kind = mt_device_kind(mt_machine_device_kind(r->machine));
    return kind ? kind->coded_rows : 0;
}

/* Whether halves of layers may be faster: their smaller buffers leave memory for records and separate cast buffers. */
static bool wants_memory(const struct mt_plan_choice *c, const struct mt_plan_request *r)
{
    bool in_place = r->numerics.grad_dtype != MT_F32 && !c->engine.program.cast;
    bool gives_up = r->placement.activations == MT_ACT_AUTO && c->placement.activations != MT_ACT_KEEP;
    bool keeps_fewer = r->placement.keep_layers == MT_AUTO && c->placement.activations == MT_ACT_RECOMPUTE;
    bool all_kept = c->placement.activations == MT_ACT_RECOMPUTE && c->placement.keep_layers >= r->layout->cfg.n_layers;
    return in_place || (!all_kept && (gives_up || keeps_fewer));
}

/* Takes another choice instead, or not; consumes it, and counts the candidates of both. */
static void choose(struct mt_plan_choice *out, struct mt_plan_choice *other, bool take)
{
    size_t n = out->n_searched + other->n_searched;
    mt_plan_choice_finish(take ? out : other);
    if (take)
        *out = MT_GIVE(*other);
    out->n_searched = n;
}

static int search_cuts(struct mt_plan_choice *out, const struct mt_plan_request *r, struct mt_err *err)
{
    struct mt_plan_choice cut;
    int rc = search_layout(out, r, err);
    if (!r->halves || (rc && rc != -ENOSPC))
        return rc;
    if (rc ? mt_plan_fits_device(r) : !wants_memory(out, r) && !mt_plan_wants_codes(out, r, coded_rows(r)))
        return rc;
    struct mt_plan_request halves = mt_plan_request_in_halves(r);
    if (rc)
        return search_layout(out, &halves, err);
    if (search_layout(&cut, &halves, NULL))
        return 0;
    bool wears = cut.sim.bytes[MT_Q_DISK_WRITE] > out->sim.bytes[MT_Q_DISK_WRITE];
    cut.whole_seconds = out->sim.seconds;
    choose(out, &cut, cut.sim.seconds * (wears ? MT_SEARCH_WORTH_WEARING : WORTH_CUTTING) < out->sim.seconds);
    return 0;
}

/*
 * A base that may be anywhere stays in host memory, unless it does not fit there or a step is worth reading files in
 * place for: offloaded activations would else take its room for a gain of a per cent. Where the rate of the files'
 * drive is not known, it stays there if it can.
 */
static int search_bases(struct mt_plan_choice *out, const struct mt_plan_request *r, struct mt_err *err)
{
    struct mt_plan_choice held;
    struct mt_err why = {0}, of_held = {0};
    struct mt_plan_request t = *r;
    int rc = search_cuts(out, r, &why);
    bool no_files = rc == -ENOSPC && !(r->machine->rate[MT_RATE_READ].value > 0); /* it lacks more than with files */
    if (rc && err)
        *err = why;
    if (r->placement.base != MT_BASE_AUTO || (rc ? rc != -ENOENT && !no_files : !out->engine.uses_files))
        return rc;
    t.placement.base = MT_BASE_HOST;
    int other = search_cuts(&held, &t, &of_held);
    if (other) {
        if (rc && err)
            *err = of_held;
        return rc ? other : 0;
    }
    if (rc)
        *out = held;
    else
        choose(out, &held, !(out->sim.seconds * WORTH_READING < held.sim.seconds));
    return 0;
}

/* Whether updates under backward are better; writing more to drives must be worth it. */
static bool updates_better(const struct mt_plan_choice *c, const struct mt_plan_choice *than)
{
    double writes = c->sim.bytes[MT_Q_DISK_WRITE], written = than->sim.bytes[MT_Q_DISK_WRITE];
    bool spares = writes < WORTH_SPARING * written;
    bool wears = writes > 1.01 * written;
    return c->sim.seconds * (spares ? 1 : wears ? MT_SEARCH_WORTH_WEARING : WORTH_UPDATING) < than->sim.seconds;
}

/* A step that computes nearly all the time, or whose waits are few, and writes nothing gains nothing. */
static bool may_gain(const struct mt_plan_choice *c)
{
    int lanes = mt_program_own_lanes(&c->engine.program);
    return c->sim.bytes[MT_Q_DISK_WRITE] > 0 ||
           c->sim.busy[MT_Q_COMPUTE] / lanes * WORTH_UPDATING < c->sim.seconds;
}

/* Updates under backward, if they are better than the choice; `found`: there is one. */
static int try_backward(struct mt_plan_choice *out, const struct mt_plan_request *r, bool found, struct mt_err *err)
{
    struct mt_plan_request t = *r;
    MT_CLOSED_BY(mt_plan_choice_finish) struct mt_plan_choice c = {0};
    t.placement.update = MT_UPDATE_BACKWARD;
    int rc = search_bases(&c, &t, err);
    if (!rc && found)
        choose(out, &c, updates_better(&c, out));
    else if (!rc)
        *out = MT_GIVE(c);
    return rc;
}

int mt_plan_search(struct mt_plan_choice *out, const struct mt_plan_request *r, struct mt_err *err)
{
    struct mt_plan_request t = *r;
    t.loading = mt_plan_loading_bytes(r); /* halves have the same tensors */
    if (t.placement.update == MT_UPDATE_BACKWARD)
        return try_backward(out, &t, false, err);
    bool open = mt_plan_orders(&t);
    t.placement.update = MT_UPDATE_FORWARD;
    int rc = search_bases(out, &t, err);
    if (!open || (rc ? rc != -ENOSPC : !may_gain(out)))
        return rc;
    bool found = !rc;
    struct mt_err why = {0};
    int other = try_backward(out, &t, found, &why);
    if (rc && other && err && why.short_host && !(err->short_host && err->short_host < why.short_host))
        *err = why;
    return found || !other ? 0 : rc;
}
