/* SPDX-License-Identifier: Apache-2.0 */
#include "plan/search.h"

#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "model/model.h"
#include "plan/evaluate.h"

enum { MAX_MICRO_BATCHES = 16, MAX_INSTRS_FOR_SLOTS = 60000 };

struct search {
    const struct mt_plan_request *r;
    struct mt_plan_choice best;
    bool found;
    struct mt_plan_tried *tried;
    size_t n_tried, cap_tried;
    struct mt_err err; /* of the first candidate that does not fit */
    bool has_err;
};

static bool remember(struct search *s, const struct mt_plan_request *r, const struct mt_plan_choice *c)
{
    if (!mt_grow(&s->tried, &s->cap_tried, s->n_tried + 1, sizeof(*s->tried)))
        return false;
    s->tried[s->n_tried++] = (struct mt_plan_tried){r->micro_batch, r->logits_chunk,
                                                    c ? c->slots : r->slots, r->keep_layers,
                                                    r->activations, c ? c->sim.seconds : 0};
    return true;
}

/* Tries one; keeps the better. *sim is its simulation, or all 0 where it does not fit. */
static int try_one(struct search *s, const struct mt_plan_request *r, mt_cost_table *costs,
                   struct mt_sim_result *sim, struct mt_err *err)
{
    struct mt_plan_choice c;
    struct mt_err why = {0};
    *sim = (struct mt_sim_result){0};
    int rc = mt_plan_with_costs(&c, r, costs, NULL, &why);
    if ((!rc || rc == -ENOSPC) && !remember(s, r, rc ? NULL : &c)) {
        if (!rc)
            mt_plan_choice_finish(&c);
        return mt_fail_nomem(err, "a search", s->n_tried * sizeof(*s->tried));
    }
    if (rc == -ENOSPC) {
        if (!s->has_err)
            s->err = why;
        s->has_err = true;
        return 0;
    }
    if (rc) {
        if (err)
            *err = why;
        return rc;
    }
    *sim = c.sim;
    /* a tie goes to the one that takes less of the device */
    bool better = !s->found || c.sim.seconds < s->best.sim.seconds * (1 - 1e-6) ||
                  (c.sim.seconds < s->best.sim.seconds * (1 + 1e-6) &&
                   c.engine.device_bytes < s->best.engine.device_bytes);
    if (better) {
        mt_plan_choice_finish(&s->best);
        s->best = c;
        s->found = true;
    } else {
        mt_plan_choice_finish(&c);
    }
    return 0;
}

/* More layers kept while they fit: the most by bisection. 0 where not one does. */
static int most_kept(const struct mt_plan_request *r)
{
    struct mt_plan_request t = *r;
    int lo = 0, hi = (int)r->layout->n_units - 2;
    mt_device *dev = NULL;
    struct mt_meter_params mp = {.kind = r->machine->cpu ? "cpu" : "cuda", .n_threads = r->threads,
                                 .budget_bytes = (size_t)r->device_budget};
    if (mt_device_create_meter(&dev, &mp, NULL))
        return 0;
    t.activations = MT_ACT_RECOMPUTE;
    while (lo < hi) {
        struct mt_engine_plan plan;
        int mid = (lo + hi + 1) / 2;
        t.keep_layers = mid;
        struct mt_engine_params p = mt_plan_engine_params(&t, dev);
        if (mt_engine_divide(&plan, &p, NULL)) {
            hi = mid - 1;
        } else {
            mt_engine_plan_finish(&plan);
            lo = mid;
        }
    }
    mt_device_destroy(&dev);
    return lo;
}

static int try_slots(struct search *s, const struct mt_plan_request *r, mt_cost_table *costs,
                     struct mt_err *err)
{
    static const int more[] = {2, 4, 3, 6, 8};
    struct mt_plan_request t = *r;
    struct mt_sim_result sim;
    int rc = try_one(s, &t, costs, &sim, err);
    size_t layers = r->layout->n_units - 2;
    size_t instrs = layers * mt_div_up(r->rows_per_step, MT_MAX(r->micro_batch, (size_t)1)) * 3;
    if (rc || r->slots != MT_CFG_AUTO || instrs > MAX_INSTRS_FOR_SLOTS)
        return rc;
    for (size_t i = 0; i < MT_ARRAY_LEN(more) && !rc; i++) {
        /* compute's own time is the group's lower bound: near enough to it, or beaten, is the end */
        double least = sim.busy[MT_SIM_COMPUTE] + (sim.seconds - sim.makespan);
        if (sim.seconds > 0 && (least * 1.003 >= sim.seconds || least >= s->best.sim.seconds))
            return 0;
        struct mt_sim_result other;
        t.slots = more[i];
        if ((size_t)more[i] <= layers)
            rc = try_one(s, &t, costs, &other, err);
    }
    return rc;
}

static int try_activations(struct search *s, const struct mt_plan_request *r, mt_cost_table *costs,
                           struct mt_err *err)
{
    static const enum mt_cfg_activations ways[] = {MT_ACT_KEEP, MT_ACT_RECOMPUTE, MT_ACT_OFFLOAD};
    struct mt_plan_request t = *r;
    int rc = 0;
    for (size_t i = 0; i < MT_ARRAY_LEN(ways) && !rc; i++) {
        if (r->activations != MT_ACT_AUTO && r->activations != ways[i])
            continue;
        t.activations = ways[i];
        t.keep_layers = MT_MAX(r->keep_layers, 0);
        rc = try_slots(s, &t, costs, err);
        if (rc || ways[i] != MT_ACT_RECOMPUTE || r->keep_layers != MT_CFG_AUTO)
            continue;
        int most = most_kept(&t);
        for (int k = most; k > 0 && !rc; k = k > most / 2 && most > 3 ? most / 2 : 0) {
            t.keep_layers = k;
            rc = try_slots(s, &t, costs, err);
        }
    }
    return rc;
}

/* Logits chunks worth a look: the model's own, and larger ones where the product is long enough. */
static size_t chunk_choices(const struct mt_plan_request *r, size_t chunk[2])
{
    chunk[0] = r->logits_chunk ? r->logits_chunk : mt_model_auto_logits_chunk(r->layout);
    chunk[1] = chunk[0] * 8;
    return r->logits_chunk || chunk[1] > 8192 ? 1 : 2;
}

static int try_micro_batch(struct search *s, const struct mt_plan_request *r, struct mt_err *err)
{
    size_t chunk[2];
    int rc = 0;
    size_t n = chunk_choices(r, chunk);
    for (size_t i = 0; i < n && !rc; i++) {
        struct mt_plan_request t = *r;
        mt_cost_table *costs = NULL;
        t.logits_chunk = chunk[i];
        rc = mt_plan_costs(&costs, &t, err);
        if (!rc)
            rc = try_activations(s, &t, costs, err);
        mt_cost_table_destroy(&costs);
    }
    return rc;
}

/* Scratch grows with the micro-batch: the largest that fits at all, by doubling. */
static bool fits_at_all(const struct mt_plan_request *r)
{
    struct mt_plan_request t = *r;
    struct mt_engine_plan plan;
    mt_device *dev = NULL;
    struct mt_meter_params mp = {.kind = r->machine->cpu ? "cpu" : "cuda", .n_threads = r->threads,
                                 .budget_bytes = (size_t)r->device_budget};
    if (mt_device_create_meter(&dev, &mp, NULL))
        return false;
    if (t.activations == MT_ACT_AUTO)
        t.activations = MT_ACT_RECOMPUTE;
    struct mt_engine_params p = mt_plan_engine_params(&t, dev);
    bool fits = !mt_engine_divide(&plan, &p, NULL);
    if (fits)
        mt_engine_plan_finish(&plan);
    mt_device_destroy(&dev);
    return fits;
}

/* Micro-batches to look at: the one that is asked for, or 1, 2, 4 ... as far as they fit. */
static size_t list_micro_batches(const struct mt_plan_request *r, size_t list[MAX_MICRO_BATCHES])
{
    struct mt_plan_request t = *r;
    size_t n = 0;
    if (r->micro_batch) {
        list[0] = r->micro_batch;
        return 1;
    }
    for (size_t mb = 1; mb < r->rows_per_step * 2 && n < MAX_MICRO_BATCHES; mb *= 2) {
        t.micro_batch = MT_MIN(mb, r->rows_per_step);
        if (n && !fits_at_all(&t))
            break;
        list[n++] = t.micro_batch;
    }
    return n;
}

static int add_operations(struct mt_metered **ops, size_t *n, size_t *cap, const struct mt_plan_request *r,
                          struct mt_err *err)
{
    mt_cost_table *costs = NULL;
    struct mt_plan_choice c;
    int rc = mt_plan_costs(&costs, r, err);
    if (!rc)
        rc = mt_plan_with_costs(&c, r, costs, NULL, err);
    if (!rc) {
        size_t k;
        const struct mt_metered *more = mt_cost_operations(costs, &k);
        mt_plan_choice_finish(&c);
        if (mt_grow(ops, cap, *n + k, sizeof(**ops)))
            memcpy(*ops + *n, more, k * sizeof(**ops));
        else
            rc = mt_fail_nomem(err, "operations", k * sizeof(**ops));
        *n += rc ? 0 : k;
    }
    mt_cost_table_destroy(&costs);
    return rc == -ENOSPC ? 0 : rc;
}

int mt_plan_operations(struct mt_metered **ops, size_t *n, const struct mt_plan_request *r,
                       struct mt_err *err)
{
    size_t list[MAX_MICRO_BATCHES], chunk[2], n_mb = list_micro_batches(r, list), cap = 0;
    size_t n_chunks = chunk_choices(r, chunk);
    int rc = 0;
    *ops = NULL;
    *n = 0;
    for (size_t i = 0; i < n_mb * n_chunks && !rc; i++) {
        struct mt_plan_request t = *r;
        t.micro_batch = list[i / n_chunks];
        t.logits_chunk = chunk[i % n_chunks];
        rc = add_operations(ops, n, &cap, &t, err);
    }
    if (rc) {
        free(*ops);
        *ops = NULL;
    }
    return rc;
}

int mt_plan_search(struct mt_plan_choice *out, const struct mt_plan_request *r, struct mt_err *err)
{
    struct search s = {.r = r};
    struct mt_plan_request t = *r;
    size_t choices[MAX_MICRO_BATCHES], n = list_micro_batches(r, choices);
    int rc = 0;
    for (size_t i = n; i-- > 0 && !rc;) { /* large first: fewer instructions, and mostly the best */
        t.micro_batch = choices[i];
        rc = try_micro_batch(&s, &t, err);
    }
    if (!rc && !s.found) {
        if (err)
            *err = s.err;
        rc = -ENOSPC;
    }
    s.best.tried = s.tried;
    s.best.n_tried = s.n_tried;
    if (rc) {
        mt_plan_choice_finish(&s.best);
        return rc;
    }
    *out = s.best;
    return 0;
}
