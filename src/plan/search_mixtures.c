/* SPDX-License-Identifier: Apache-2.0 */
/* The part of the search in which some layers' records are offloaded, and others recomputed. */
#include <math.h>
#include <stdlib.h>

#include "base/mem.h"
#include "plan/search_priv.h"

enum {
    MAX_MIXED = 8, /* groups for which mixtures of recomputation and offloading are tried */
    MANY_UNITS = 512, /* a mixture's: each candidate takes long, so fewer are tried */
    MAX_FINE = 3,  /* the best of those, for which a slot fewer and other orders are tried */
};

/* Which part of the records is offloaded first as their number grows. */
enum order { TOGETHER, REST_FIRST, ATTENTION_FIRST };

/* Mixtures of recomputation and offloading for a group, with a number of slots. */
struct mixture {
    const struct mt_search_group *g;
    int64_t slots;
    enum order order;
    double seconds; /* of the best so far */
};

static int64_t layers_to_send(const struct mt_search_group *g)
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
static int try_offloaded(double *seconds, struct mt_search *s, struct mixture *m, enum order order, int64_t n,
                         struct mt_err *err)
{
    struct mt_plan_request t = m->g->r;
    struct mt_sim_result sim;
    int64_t attention = t.placement.offload_attention;
    send(&t.placement, layers_to_send(m->g), order, n);
    if (attention != MT_AUTO)
        t.placement.offload_attention = attention;
    t.placement.slots = m->slots;
    int rc = mt_search_try(s, &t, m->g->costs, &sim, err);
    *seconds = sim.seconds > 0 ? sim.seconds : INFINITY;
    m->seconds = fmin(m->seconds, *seconds);
    return rc;
}

/* Whether a few of n records make the step shorter than none, by their share of what is worth refining: if not, more of
 * them are not worth it either. */
static int few_help(bool *help, struct mt_search *s, struct mixture *m, enum order order, int64_t n, struct mt_err *err)
{
    enum { OF = 16 };
    double none, few = 0;
    *help = true;
    if (s->r->layout->n_units < MANY_UNITS)
        return 0;
    int rc = try_offloaded(&none, s, m, order, 0, err);
    if (!rc && none < INFINITY)
        rc = try_offloaded(&few, s, m, order, MT_MAX(n / OF, (int64_t)1), err);
    *help = !(none < INFINITY) || few * (1 + (MT_SEARCH_NEAR_ENOUGH - 1) / OF) < none;
    return rc;
}

/*
 * Finds how many of the recomputed layers' records to offload: each makes the step shorter while the link carries them
 * during compute, and longer beyond that. Golden section finds the best number in a few simulations.
 */
static int mix_offloading(struct mt_search *s, struct mixture *m, enum order order, struct mt_err *err)
{
    const double share = 0.6180339887498949;
    int64_t lo = 0, hi = layers_to_send(m->g) * (order == TOGETHER ? 1 : 2), inner = llround((double)hi * share);
    int64_t a = hi - inner, b = inner; /* lo < a < b < hi */
    double at_a = 0, at_b = 0, at_hi;
    bool help;
    int rc = few_help(&help, s, m, order, hi, err);
    if (rc || !help)
        return rc;
    if (order == TOGETHER) /* the same in each order */
        rc = try_offloaded(&at_hi, s, m, order, hi, err);
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
static int find_order(enum order *order, const struct mt_search_group *g, struct mt_err *err)
{
    const enum mt_record_part parts[] = {MT_RECORD_ATTENTION, MT_RECORD_REST};
    const enum order orders[] = {ATTENTION_FIRST, REST_FIRST};
    double per_byte[2];
    int rc = 0;
    *order = TOGETHER;
    for (int i = 0; i < 2 && !rc; i++) {
        struct mt_search_group t = *g;
        double bytes = record_bytes(&g->r, parts[i]);
        if (!(bytes > 0) || g->r.placement.offload_attention != MT_AUTO || mt_search_is_long(g))
            return 0;
        send(&t.r.placement, layers_to_send(g), orders[i], layers_to_send(g));
        rc = mt_search_bound(&t, err);
        per_byte[i] = (g->least - t.least) / bytes;
    }
    if (!rc)
        *order = orders[per_byte[1] >= per_byte[0]];
    return rc;
}

/* Lower bound of the group's time if nothing were recomputed. */
static double least_without_recompute(const struct mt_search_groups *all, const struct mt_search_group *g)
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
static int refine_mixture(struct mt_search *s, const struct mt_search_group *g, struct mt_err *err)
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
                rc = mt_search_try(s, &t, g->costs, &sim, err);
        }
    return rc;
}

/* Host memory for a few layers' records of the rest may hold more of attention's: tries to fill it. */
static int fill_memory(struct mt_search *s, const struct mt_search_group *g, struct mt_err *err)
{
    enum { SPARE = 2, TRIES = 3 };
    const struct mt_placement best = s->best.placement;
    double attention = record_bytes(&g->r, MT_RECORD_ATTENTION), rest = record_bytes(&g->r, MT_RECORD_REST);
    int rc = 0;
    if (s->r->placement.offload_attention != MT_AUTO || !(attention > 0) || mt_search_is_long(g))
        return 0;
    for (int fewer = 1; fewer <= 3 && fewer <= best.offload_layers && !rc; fewer++) {
        int64_t more = (int64_t)(fewer * rest / attention) + SPARE, least = MT_MAX(more - TRIES, (int64_t)0);
        struct mt_sim_result sim = {0};
        for (; more > least && !(sim.seconds > 0) && !rc; more--) {
            struct mt_plan_request t = g->r;
            t.placement.slots = best.slots;
            t.placement.offload_layers = best.offload_layers - fewer;
            t.placement.offload_attention = MT_MIN(best.offload_attention + more, layers_to_send(g));
            rc = mt_search_try(s, &t, g->costs, &sim, err);
        }
    }
    return rc;
}

static int compare_mixtures(const void *a, const void *b)
{
    const struct mixture *x = a, *y = b;
    return (x->seconds > y->seconds) - (x->seconds < y->seconds);
}

/* Tries mixtures for groups that recompute everything, in order of their bounds. */
static int mix_groups(struct mixture mix[MAX_MIXED], size_t *n, struct mt_search *s, const struct mt_search_groups *all,
                      struct mt_err *err)
{
    const struct mt_placement *p = &s->r->placement;
    int rc = 0;
    for (size_t i = 0; i < all->n && *n < MAX_MIXED && !rc; i++) {
        const struct mt_search_group *g = &all->g[i];
        bool skip = g->r.placement.activations != MT_ACT_RECOMPUTE ||
                    g->r.placement.keep_layers != MT_MAX(p->keep_layers, (int64_t)0);
        if (skip || (s->found && least_without_recompute(all, g) * MT_SEARCH_NEAR_ENOUGH >= s->best.sim.makespan))
            continue;
        struct mixture *m = &mix[(*n)++];
        *m = (struct mixture){.g = g, .slots = p->slots == MT_AUTO ? 3 : p->slots, .seconds = INFINITY};
        rc = find_order(&m->order, g, err);
        if (!rc)
            rc = mix_offloading(s, m, m->order, err);
        if (mt_search_is_long(g))
            break;
    }
    if (*n)
        qsort(mix, *n, sizeof(*mix), compare_mixtures);
    return rc;
}

/* Tries the best of them with a slot fewer, which leaves more memory for records. */
static int mix_with_fewer_slots(struct mixture mix[MAX_MIXED], size_t n, struct mt_search *s, struct mt_err *err)
{
    int rc = 0;
    for (size_t i = 0; i < MT_MIN(n, (size_t)MAX_FINE) && s->r->placement.slots == MT_AUTO && !rc; i++) {
        struct mixture few = mix[i];
        if (mt_search_is_long(few.g))
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

int mt_search_mixtures(struct mt_search *s, const struct mt_search_groups *all, struct mt_err *err)
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
    if (!rc && better)
        rc = refine_mixture(s, mix[0].g, err);
    return rc || !better ? rc : fill_memory(s, mix[0].g, err);
}
