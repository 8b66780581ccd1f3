/* SPDX-License-Identifier: Apache-2.0 */
#include "plan/search.h"

#include <math.h>
#include <stdlib.h>

#include "base/mem.h"
#include "schedule/build.h"
#include "plan/evaluate.h"

enum {
    MAX_KEPT = 5, /* numbers of kept layers to try */
    MAX_MIXED = 8, /* groups for which mixtures of recomputation and offloading are tried */
    MAX_FINE = 3, /* the best of those, for which a slot fewer and other orders are tried */
    MAX_GROUPS = MT_PLAN_MAX_CHUNKS * MT_PLAN_MAX_MICRO_BATCHES * (3 + MAX_KEPT),
    MAX_INSTRS = 60000, /* in longer steps fewer candidates are tried */
    OF_A_STEP = 8,
};
#define NEAR_ENOUGH 1.002  /* a group this close to its bound is not refined */
#define WORTH_WEARING 1.05 /* a candidate that writes more to drives must be this much faster */
#define WORTH_CUTTING 1.01 /* halves must be this much faster: they have twice as many boundaries */

struct search {
    const struct mt_plan_request *r;
    struct mt_plan_choice best;
    bool found;
    struct mt_plan_tried *tried;
    size_t n_tried, cap_tried;
    struct mt_err err; /* why nothing fits: of the newest memory-saving candidate, else of the first one */
    bool has_err;
    bool mixing; /* candidates trade host memory for time: some write more to drives */
};

static bool remember(struct search *s, const struct mt_plan_request *r, const struct mt_plan_choice *c)
{
    if (!mt_grow(&s->tried, &s->cap_tried, s->n_tried + 1, sizeof(*s->tried)))
        return false;
    struct mt_plan_tried *t = &s->tried[s->n_tried++];
    *t = (struct mt_plan_tried){r->numerics, r->placement, c ? c->sim.seconds : 0};
    if (c)
        t->placement.slots = c->placement.slots;
    return true;
}

/* On a tie the one with less device memory is better. One that writes more to drives must be worth the wear. */
static bool is_better(const struct search *s, const struct mt_plan_choice *c)
{
    const struct mt_sim_result *best = &s->best.sim;
    bool wears = s->mixing && c->sim.bytes[MT_SIM_DISK_WRITE] > 1.01 * best->bytes[MT_SIM_DISK_WRITE];
    double seconds = c->sim.seconds * (wears ? WORTH_WEARING : 1);
    return !s->found || seconds < best->seconds * (1 - 1e-6) ||
           (seconds < best->seconds * (1 + 1e-6) && c->engine.device_bytes < s->best.engine.device_bytes);
}

/* Tries a candidate and keeps the better one. *sim is its simulation, or all 0 if it does not fit. */
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
        const struct mt_placement *p = &r->placement;
        bool least = p->activations != MT_ACT_KEEP && p->activations != MT_ACT_OFFLOAD && p->keep_layers <= 0;
        if (least || !s->has_err) /* the newest memory-saving one has the smallest micro-batch */
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
    if (is_better(s, &c)) {
        mt_plan_choice_finish(&s->best);
        s->best = c;
        s->found = true;
    } else {
        mt_plan_choice_finish(&c);
    }
    return 0;
}

/* Whether it fits the device with so many layers kept. *separate: gradients then have separate cast buffers. */
static bool fits_kept(mt_device *dev, const struct mt_plan_request *r, int keep, bool *separate)
{
    struct mt_plan_request t = *r;
    struct mt_engine_plan plan;
    t.placement.keep_layers = keep;
    struct mt_engine_params p = mt_plan_engine_params(&t, dev);
    if (mt_engine_divide(&plan, &p, NULL))
        return false;
    *separate = plan.program.cast;
    mt_engine_plan_finish(&plan);
    return true;
}

/* The most layers that can be kept (by bisection) without giving up separate cast buffers. */
static int most_kept(const struct mt_plan_request *r)
{
    int lo = 0, hi = (int)r->layout->cfg.n_layers;
    bool separate, separate_at_none;
    mt_device *dev = NULL;
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
    mt_device_destroy(&dev);
    return lo;
}

/* Candidates with the same compute work, which is a lower bound of their time. */
struct group {
    struct mt_plan_request r;
    mt_cost_table *costs; /* borrowed */
    double least;         /* seconds of compute, without any waiting */
};

struct groups {
    struct group g[MAX_GROUPS];
    size_t n;
    mt_cost_table *costs[MT_PLAN_MAX_CHUNKS * MT_PLAN_MAX_MICRO_BATCHES];
    size_t n_costs;
};

/* Compute seconds of the step's draft, which has no buffers yet. */
static int bound_group(struct group *g, struct mt_err *err)
{
    mt_device *dev = NULL;
    struct mt_engine_plan plan;
    struct mt_draft d;
    int rc = mt_plan_meter(&dev, &g->r, SIZE_MAX / 2, err);
    if (rc)
        return rc;
    struct mt_engine_params p = mt_plan_engine_params(&g->r, dev);
    rc = mt_engine_divide(&plan, &p, err);
    if (!rc) {
        rc = mt_draft_write(&d, &plan.program, err);
        g->least = 0;
        for (size_t i = 0; !rc && i < d.prog.n_instrs; i++) {
            struct mt_cost c = {0};
            if (d.prog.instrs[i].queue == MT_Q_COMPUTE)
                rc = mt_cost_of(g->costs, &d.prog, &d.prog.instrs[i], &c, err);
            g->least += c.seconds;
        }
        mt_program_finish(&d.prog);
        mt_engine_plan_finish(&plan);
    }
    mt_device_destroy(&dev);
    return rc;
}

static int add_group(struct groups *all, const struct mt_plan_request *r, mt_cost_table *costs,
                     struct mt_err *err)
{
    if (all->n == MAX_GROUPS)
        return 0;
    struct group *g = &all->g[all->n++];
    *g = (struct group){.r = *r, .costs = costs};
    return bound_group(g, err);
}

static int add_activations(struct groups *all, const struct mt_plan_request *r, mt_cost_table *costs,
                           struct mt_err *err)
{
    /* records go to the disk only if configured: they would wear drives out within weeks */
    static const enum mt_activations modes[] = {MT_ACT_KEEP, MT_ACT_RECOMPUTE, MT_ACT_OFFLOAD, MT_ACT_DISK};
    int rc = 0;
    for (size_t i = 0; i < MT_ARRAY_LEN(modes) && !rc; i++) {
        struct mt_plan_request t = *r;
        if (r->placement.activations == MT_ACT_AUTO ? modes[i] == MT_ACT_DISK : r->placement.activations != modes[i])
            continue;
        t.placement.activations = modes[i];
        t.placement.keep_layers = MT_MAX(r->placement.keep_layers, 0);
        rc = add_group(all, &t, costs, err);
        if (rc || modes[i] != MT_ACT_RECOMPUTE || r->placement.keep_layers != MT_AUTO)
            continue;
        t.placement.keep_layers = most_kept(&t);
        for (int n = 0; n < MAX_KEPT && t.placement.keep_layers > 0 && !rc; n++) {
            rc = add_group(all, &t, costs, err);
            t.placement.keep_layers = t.placement.keep_layers * 2 / 3;
        }
    }
    return rc;
}

static int add_micro_batch(struct groups *all, const struct mt_plan_request *r, struct mt_err *err)
{
    int64_t chunk[MT_PLAN_MAX_CHUNKS];
    int rc = 0;
    size_t n = mt_plan_chunks(r, chunk);
    for (size_t i = 0; i < n && !rc; i++) {
        struct mt_plan_request t = *r;
        mt_cost_table **costs = &all->costs[all->n_costs++];
        mt_plan_take_chunk(&t, chunk[i]);
        rc = mt_plan_costs(costs, &t, err);
        if (!rc)
            rc = add_activations(all, &t, *costs, err);
    }
    return rc;
}

/* Whether a step takes long to simulate. A unit has some instructions per micro-batch and some per step. */
static bool is_long(const struct group *g)
{
    size_t rows = (size_t)g->r.numerics.rows_per_step, micro = (size_t)MT_MAX(g->r.numerics.micro_batch, 1);
    return g->r.layout->n_units * (mt_div_up(rows, micro) + OF_A_STEP) * 3 > MAX_INSTRS;
}

/* Tries the group with several numbers of slots, while that may help. */
static int try_group(struct search *s, const struct group *g, struct mt_err *err)
{
    static const int more[] = {2, 4, 3, 6, 8};
    struct mt_plan_request t = g->r;
    struct mt_sim_result sim;
    size_t between = t.layout->n_units - 2; /* without embedding and head */
    int rc = try_one(s, &t, g->costs, &sim, err);
    bool fits = sim.seconds > 0;
    if (rc || !fits || t.placement.slots != MT_AUTO || is_long(g))
        return rc;
    int64_t tried = s->tried[s->n_tried - 1].placement.slots; /* the number chosen for auto */
    for (size_t i = 0; i < MT_ARRAY_LEN(more) && !rc; i++) {
        struct mt_sim_result other;
        double near = s->found ? s->best.sim.makespan : 0;
        if (s->found && g->least * NEAR_ENOUGH >= near)
            return 0;
        t.placement.slots = more[i];
        if ((size_t)more[i] <= between && more[i] != tried)
            rc = try_one(s, &t, g->costs, &other, err);
    }
    return rc;
}

static int compare_groups(const void *a, const void *b)
{
    const struct group *x = a, *y = b;
    return (x->least > y->least) - (x->least < y->least);
}

/* Tries groups in order of their bounds; skips those whose bound is no better than the best step found. */
static int try_groups(struct search *s, struct groups *all, struct mt_err *err)
{
    int rc = 0;
    qsort(all->g, all->n, sizeof(*all->g), compare_groups);
    for (size_t i = 0; i < all->n && !rc; i++)
        if (!s->found || all->g[i].least * NEAR_ENOUGH < s->best.sim.makespan)
            rc = try_group(s, &all->g[i], err);
    return rc;
}

/* Which part of the records is offloaded first as their number grows. */
enum order { TOGETHER, REST_FIRST, ATTENTION_FIRST };

/* Mixtures of recomputation and offloading for a group, with a number of slots. */
struct mixture {
    const struct group *g;
    int64_t slots;
    enum order order;
    double seconds; /* of the best so far */
};

static int64_t layers_to_send(const struct group *g)
{
    return g->r.layout->cfg.n_layers - g->r.placement.keep_layers;
}

/* Offloads n layers' records of `layers`; with an order, n counts both parts: the second begins after the first. */
static void send(struct mt_placement *p, int64_t layers, enum order order, int64_t n)
{
    int64_t first = MT_MIN(n, layers), second = order == TOGETHER ? first : n - first;
    p->offload_layers = order == ATTENTION_FIRST ? second : first;
    p->offload_attention = order == ATTENTION_FIRST ? first : second;
}

/* Seconds of a step with n records offloaded (see send()); INFINITY if it does not fit. */
static int try_offloaded(double *seconds, struct search *s, struct mixture *m, enum order order, int64_t n,
                         struct mt_err *err)
{
    struct mt_plan_request t = m->g->r;
    struct mt_sim_result sim;
    int64_t attention = t.placement.offload_attention;
    send(&t.placement, layers_to_send(m->g), order, n);
    if (attention != MT_AUTO)
        t.placement.offload_attention = attention;
    t.placement.slots = m->slots;
    int rc = try_one(s, &t, m->g->costs, &sim, err);
    *seconds = sim.seconds > 0 ? sim.seconds : INFINITY;
    m->seconds = fmin(m->seconds, *seconds);
    return rc;
}

/*
 * Finds how many of the recomputed layers' records to offload: each makes the step shorter while the link carries them
 * during compute, and longer beyond that. Golden section finds the best number in a few simulations.
 */
static int mix_offloading(struct search *s, struct mixture *m, enum order order, struct mt_err *err)
{
    const double share = 0.6180339887498949;
    int64_t lo = 0, hi = layers_to_send(m->g) * (order == TOGETHER ? 1 : 2), inner = llround((double)hi * share);
    int64_t a = hi - inner, b = inner; /* lo < a < b < hi */
    double at_a = 0, at_b = 0, at_hi;
    int rc = order == TOGETHER ? try_offloaded(&at_hi, s, m, order, hi, err) : 0; /* the same in each order */
    if (!rc && a < b)
        rc = try_offloaded(&at_a, s, m, order, a, err);
    if (!rc && a < b)
        rc = try_offloaded(&at_b, s, m, order, b, err);
    while (!rc && lo < a && a < b && b < hi) {
        if (at_a <= at_b) {
            hi = b, b = a, at_b = at_a;
            a = hi - llround((double)(hi - lo) * share);
            rc = a < b ? try_offloaded(&at_a, s, m, order, a, err) : 0;
        } else {
            lo = a, a = b, at_a = at_b;
            b = lo + llround((double)(hi - lo) * share);
            rc = a < b && b < hi ? try_offloaded(&at_b, s, m, order, b, err) : 0;
        }
    }
    return rc;
}

static double record_bytes(const struct mt_plan_request *r, enum mt_record_part part)
{
    double bytes = 0;
    for (size_t u = 0; u < r->layout->n_units; u++)
        bytes += (double)mt_unit_record_bytes(r->layout, u, part, r->numerics.dtype, (size_t)r->numerics.seq_len);
    return bytes;
}

/* First the part that saves more compute per byte; TOGETHER: there is only one, or the user has fixed one. */
static int find_order(enum order *order, const struct group *g, struct mt_err *err)
{
    const enum mt_record_part parts[] = {MT_RECORD_ATTENTION, MT_RECORD_REST};
    const enum order orders[] = {ATTENTION_FIRST, REST_FIRST};
    double per_byte[2];
    int rc = 0;
    *order = TOGETHER;
    for (int i = 0; i < 2 && !rc; i++) {
        struct group t = *g;
        double bytes = record_bytes(&g->r, parts[i]);
        if (!(bytes > 0) || g->r.placement.offload_attention != MT_AUTO || is_long(g))
            return 0;
        send(&t.r.placement, layers_to_send(g), orders[i], layers_to_send(g));
        rc = bound_group(&t, err);
        per_byte[i] = (g->least - t.least) / bytes;
    }
    if (!rc)
        *order = orders[per_byte[1] >= per_byte[0]];
    return rc;
}

/* Lower bound of the group's time if nothing were recomputed. */
static double least_without_recompute(const struct groups *all, const struct group *g)
{
    for (size_t i = 0; i < all->n; i++) {
        const struct mt_plan_request *r = &all->g[i].r;
        if (r->placement.activations == MT_ACT_OFFLOAD && r->numerics.micro_batch == g->r.numerics.micro_batch &&
            r->numerics.logits_chunk == g->r.numerics.logits_chunk)
            return all->g[i].least;
    }
    return 0;
}

/* Tries variants of the best mixture: another number of slots, and some records kept instead of offloaded. */
static int refine_mixture(struct search *s, const struct group *g, struct mt_err *err)
{
    const struct mt_placement *p = &s->r->placement, best = s->best.placement;
    int rc = 0, most_slots = p->slots == MT_AUTO ? 4 : 2, most_kept = p->keep_layers == MT_AUTO ? 2 : 0;
    for (int slots = 2; slots <= most_slots && !rc; slots++)
        for (int keep = 0; keep <= most_kept && !rc; keep++) {
            struct mt_plan_request t = g->r;
            struct mt_sim_result sim;
            t.placement.slots = p->slots == MT_AUTO ? slots : p->slots;
            t.placement.keep_layers = p->keep_layers == MT_AUTO ? keep : p->keep_layers;
            t.placement.offload_layers = MT_MAX(best.offload_layers - keep, (int64_t)0);
            if (p->offload_attention == MT_AUTO)
                t.placement.offload_attention = MT_MAX(best.offload_attention - keep, (int64_t)0);
            if (keep || (t.placement.slots != best.slots && slots == 4))
                rc = try_one(s, &t, g->costs, &sim, err);
        }
    return rc;
}

static int compare_mixtures(const void *a, const void *b)
{
    const struct mixture *x = a, *y = b;
    return (x->seconds > y->seconds) - (x->seconds < y->seconds);
}

/* Tries mixtures for groups that recompute everything, in order of their bounds. */
static int mix_groups(struct mixture mix[MAX_MIXED], size_t *n, struct search *s, const struct groups *all,
                      struct mt_err *err)
{
    const struct mt_placement *p = &s->r->placement;
    int rc = 0;
    for (size_t i = 0; i < all->n && *n < MAX_MIXED && !rc; i++) {
        const struct group *g = &all->g[i];
        bool skip = g->r.placement.activations != MT_ACT_RECOMPUTE ||
                    g->r.placement.keep_layers != MT_MAX(p->keep_layers, (int64_t)0);
        if (skip || (s->found && least_without_recompute(all, g) * NEAR_ENOUGH >= s->best.sim.makespan))
            continue;
        struct mixture *m = &mix[(*n)++];
        *m = (struct mixture){.g = g, .slots = p->slots == MT_AUTO ? 3 : p->slots, .seconds = INFINITY};
        rc = find_order(&m->order, g, err);
        if (!rc)
            rc = mix_offloading(s, m, m->order, err);
        if (is_long(g))
            break;
    }
    if (*n)
        qsort(mix, *n, sizeof(*mix), compare_mixtures);
    return rc;
}

/* Tries the best of them with a slot fewer, which leaves more memory for records. */
static int mix_with_fewer_slots(struct mixture mix[MAX_MIXED], size_t n, struct search *s, struct mt_err *err)
{
    int rc = 0;
    for (size_t i = 0; i < MT_MIN(n, (size_t)MAX_FINE) && s->r->placement.slots == MT_AUTO && !rc; i++) {
        struct mixture few = mix[i];
        if (is_long(few.g))
            continue;
        few.slots = 2;
        few.seconds = INFINITY;
        rc = mix_offloading(s, &few, few.order, err);
        if (few.seconds < mix[i].seconds)
            mix[i] = few;
    }
    if (n)
        qsort(mix, n, sizeof(*mix), compare_mixtures);
    return rc;
}

static int try_mixtures(struct search *s, const struct groups *all, struct mt_err *err)
{
    const struct mt_placement *p = &s->r->placement;
    struct mixture mix[MAX_MIXED];
    size_t n = 0;
    bool open = p->activations == MT_ACT_AUTO || p->activations == MT_ACT_RECOMPUTE;
    if (!s->r->train || !open || p->offload_layers != MT_AUTO)
        return 0;
    s->mixing = true;
    double before = s->found ? s->best.sim.seconds : INFINITY;
    int rc = mix_groups(mix, &n, s, all, err);
    if (!rc)
        rc = mix_with_fewer_slots(mix, n, s, err);
    for (size_t i = 0; i < MT_MIN(n, (size_t)MAX_FINE) && !rc; i++) {
        enum order own = mix[i].order;
        for (int order = TOGETHER; order <= ATTENTION_FIRST && own != TOGETHER && !rc; order++)
            if ((enum order)order != own)
                rc = mix_offloading(s, &mix[i], (enum order)order, err);
    }
    if (n)
        qsort(mix, n, sizeof(*mix), compare_mixtures);
    bool better = n && s->found && s->best.sim.seconds < before;
    return rc || !better ? rc : refine_mixture(s, mix[0].g, err);
}

/* Evaluates again with the chosen values fixed, so that the result equals the plan of a run with these values. */
static int fix_choice(struct mt_plan_choice *c, const struct mt_plan_request *r, struct mt_err *err)
{
    struct mt_plan_request t = mt_plan_request_as(r, c);
    struct mt_plan_choice fixed;
    int rc = mt_plan_evaluate(&fixed, &t, NULL, err);
    if (rc)
        return rc;
    fixed.tried = c->tried;
    fixed.n_tried = fixed.n_searched = c->n_tried;
    c->tried = NULL;
    mt_plan_choice_finish(c);
    *c = fixed;
    return 0;
}

static int search_layout(struct mt_plan_choice *out, const struct mt_plan_request *r, struct mt_err *err)
{
    struct search s = {.r = r};
    struct groups *all = mt_calloc(1, sizeof(*all));
    int64_t choices[MT_PLAN_MAX_MICRO_BATCHES];
    size_t n = mt_plan_micro_batches(r, choices);
    int rc = all ? 0 : mt_fail_nomem(err, "a search", sizeof(*all));
    for (size_t i = n; i-- > 0 && !rc;) {
        struct mt_plan_request t = *r;
        t.numerics.micro_batch = choices[i];
        rc = add_micro_batch(all, &t, err);
    }
    if (!rc)
        rc = try_groups(&s, all, err);
    if (!rc)
        rc = try_mixtures(&s, all, err);
    for (size_t i = 0; all && i < all->n_costs; i++)
        mt_cost_table_destroy(&all->costs[i]);
    free(all);
    if (!rc && !s.found) {
        if (err)
            *err = s.err;
        rc = -ENOSPC;
    }
    s.best.tried = s.tried;
    s.best.n_tried = s.n_tried;
    if (!rc)
        rc = fix_choice(&s.best, r, err);
    if (rc) {
        mt_plan_choice_finish(&s.best);
        return rc;
    }
    *out = s.best;
    return 0;
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

int mt_plan_search(struct mt_plan_choice *out, const struct mt_plan_request *r, struct mt_err *err)
{
    struct mt_plan_choice cut;
    int rc = search_layout(out, r, err);
    if (!r->halves || (rc && rc != -ENOSPC))
        return rc;
    if (rc ? mt_plan_fits_device(r) : !wants_memory(out, r))
        return rc;
    struct mt_plan_request halves = mt_plan_request_in_halves(r);
    if (rc)
        return search_layout(out, &halves, err);
    if (search_layout(&cut, &halves, NULL))
        return 0;
    size_t searched = out->n_searched + cut.n_searched;
    bool wears = cut.sim.bytes[MT_SIM_DISK_WRITE] > out->sim.bytes[MT_SIM_DISK_WRITE];
    if (cut.sim.seconds * (wears ? WORTH_WEARING : WORTH_CUTTING) < out->sim.seconds) {
        cut.whole_seconds = out->sim.seconds;
        mt_plan_choice_finish(out);
        *out = cut;
    } else {
        mt_plan_choice_finish(&cut);
    }
    out->n_searched = searched;
    return 0;
}
