/* SPDX-License-Identifier: Apache-2.0 */
/* Candidates of a search: trying one, and what it costs at least. */

#include <math.h>
#include <string.h>

#include "base/mem.h"
#include "plan/search_priv.h"
#include "schedule/build.h"

enum {
    MAX_INSTRS = 60000, /* in longer steps fewer candidates are tried */
    OF_A_STEP = 8,
};

static bool remember(struct mt_search *s, const struct mt_plan_request *r, const struct mt_plan_choice *c)
{
    if (!mt_grow(&s->tried, &s->cap_tried, s->n_tried + 1, sizeof(*s->tried)))
        return false;
    struct mt_plan_tried *t = &s->tried[s->n_tried++];
    *t = (struct mt_plan_tried){.numerics = r->numerics, .placement = r->placement, .asked_slots = r->placement.slots};
    if (c) {
        t->placement.slots = c->placement.slots;
        t->seconds = c->sim.seconds;
        t->written = c->sim.bytes[MT_Q_DISK_WRITE];
        t->host_bytes = c->host_bytes;
        t->device_bytes = c->engine.device_bytes;
    }
    return true;
}

/* By which a candidate is chosen: what wears drives more must be worth it. */
static double seconds_of(const struct mt_search *s, const struct mt_sim_result *sim)
{
    bool wears = sim->bytes[MT_Q_DISK_WRITE] > 1.01 * s->lean_writes;
    return sim->seconds * (wears ? MT_SEARCH_WORTH_WEARING : 1);
}

/* On a tie the one with less device memory is better. */
static bool is_better(const struct mt_search *s, const struct mt_plan_choice *c)
{
    const struct mt_sim_result *best = &s->best.sim;
    double seconds = seconds_of(s, &c->sim), least = seconds_of(s, best);
    return !s->found || seconds < least * (1 - 1e-6) ||
           (seconds < least * (1 + 1e-6) && c->engine.device_bytes < s->best.engine.device_bytes);
}

/* Padding may differ where no value does: then a candidate is tried once more. */
static bool has_same_bytes(const void *a, const void *b, size_t n)
{
    return !memcmp(a, b, n);
}

/* Whether the candidate was tried before, and is not the best: then *c has the numbers by which it is judged, or *rc
 * says that it does not fit. Moves of several sizes, and from several groups, come to the same candidates. */
static bool recall(const struct mt_search *s, const struct mt_plan_request *r, struct mt_plan_choice *c, int *rc)
{
    struct mt_placement p = r->placement;
    for (const struct mt_plan_tried *t = s->tried; t < s->tried + s->n_tried; t++) {
        p.slots = t->placement.slots;
        if (t->asked_slots != r->placement.slots || !has_same_bytes(&t->placement, &p, sizeof(p)) ||
            !has_same_bytes(&t->numerics, &r->numerics, sizeof(r->numerics)))
            continue;
        *rc = t->seconds > 0 ? 0 : -ENOSPC;
        c->placement.slots = t->placement.slots;
        c->sim.seconds = t->seconds;
        c->sim.bytes[MT_Q_DISK_WRITE] = t->written;
        c->host_bytes = t->host_bytes;
        c->engine.device_bytes = t->device_bytes;
        return s->found && (*rc || !is_better(s, c));
    }
    return false;
}

/* Is it nearer to fitting than what failed before? One that lacks host memory has enough of the device's. `least`: it is of
 * the modes that take least memory. */
static bool is_nearer(const struct mt_search *s, const struct mt_err *why, bool least)
{
    const struct mt_err *old = &s->err;
    if (!s->has_err)
        return true;
    if (why->short_host || old->short_host)
        return why->short_host && (!old->short_host || why->short_host < old->short_host);
    return why->short_device && old->short_device ? why->short_device < old->short_device : least;
}

int mt_search_try(struct mt_search *s, struct mt_search_group *g, const struct mt_placement *p, double *seconds,
                  struct mt_err *err)
{
    MT_CLOSED_BY(mt_plan_choice_finish) struct mt_plan_choice c = {0};
    struct mt_plan_request r = g->r;
    struct mt_err why = {0};
    r.placement = *p;
    int rc = 0;
    if (!recall(s, &r, &c, &rc))
        rc = mt_plan_with_costs(&c, &r, g->costs, NULL, &why);
    double took = rc ? INFINITY : seconds_of(s, &c.sim);
    if ((!rc || rc == -ENOSPC) && !remember(s, &r, rc ? NULL : &c))
        return mt_fail_nomem(err, "a search", s->n_tried * sizeof(*s->tried));
    if (seconds)
        *seconds = took;
    if (rc == -ENOSPC) {
        bool least = p->activations != MT_ACT_KEEP && p->activations != MT_ACT_OFFLOAD && p->keep_layers <= 0;
        if (!s->found && is_nearer(s, &why, least)) /* else nobody asks */
            s->err = why;
        s->has_err = true;
        return 0;
    }
    if (rc) {
        if (err)
            *err = why;
        return rc;
    }
    if (took < g->seconds * (1 - 1e-6) || (took < g->seconds * (1 + 1e-6) && c.host_bytes < g->host_bytes)) {
        g->seconds = took;
        g->host_bytes = c.host_bytes;
        g->best = *p;
        g->best.slots = c.placement.slots;
    }
    if (is_better(s, &c)) {
        mt_plan_choice_finish(&s->best);
        s->best = MT_GIVE(c);
        s->found = true;
    }
    return 0;
}

int mt_search_bound(struct mt_search_group *g, struct mt_err *err)
{
    MT_CLOSED_BY(mt_device_destroy) mt_device *dev = NULL;
    MT_CLOSED_BY(mt_engine_plan_finish) struct mt_engine_plan plan = {0};
    struct mt_engine_params p;
    struct mt_draft d = {.params = NULL};
    double of_lane[MT_MAX_LANES] = {0};
    int rc = mt_plan_meter(&dev, &g->r, SIZE_MAX / 2, err)
          ?: mt_plan_divide(&plan, &p, &g->r, dev, err)
          ?: mt_draft_write(&d, &plan.program, err);
    g->least = 0;
    for (size_t i = 0; !rc && i < d.prog.n_instrs; i++) {
        const struct mt_instr *in = &d.prog.instrs[i];
        struct mt_cost c = {0};
        if (in->queue == MT_Q_COMPUTE)
            rc = mt_cost_of(g->costs, &d.prog, in, &c, err);
        of_lane[in->lane] += c.seconds;
        g->least = MT_MAX(g->least, of_lane[in->lane]);
    }
    mt_program_finish(&d.prog);
    return rc;
}

/* A unit has some instructions per micro-batch and some per step. */
bool mt_search_is_long(const struct mt_search_group *g)
{
    size_t rows = (size_t)g->r.numerics.rows_per_step, micro = (size_t)MT_MAX(g->r.numerics.micro_batch, 1);
    return g->r.layout->n_units * (mt_div_up(rows, micro) + OF_A_STEP) * 3 > MAX_INSTRS;
}
