/* SPDX-License-Identifier: Apache-2.0 */
/* The part of the search in which some layers' records are offloaded, and others recomputed. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "engine/records.h"
#include "plan/search_priv.h"

enum {
    MAX_MIXED = 8, /* groups for which mixtures of recomputation and offloading are tried */
    MAX_LARGE = 6, /* the same, of models with many units */
    MANY_UNITS = 512, /* a mixture's: each candidate takes long, so fewer are tried */
    MAX_REFINED = 2, /* the best of those, of which other numbers of records are tried */
    MAX_FINE = 3,  /* the best of those, for which a slot fewer is tried */
};

#define NEARLY 1.01 /* a mixture so near to the best is refined, too */

/* Mixtures of recomputation and offloading for a group, with a number of slots. */
struct mixture {
    struct mt_search *s;
    const struct mt_search_group *g;
    int64_t slots;
    size_t n_open;
    struct open_segment {
        size_t kind;          /* in mt_layout.segment */
        double bytes, worth;  /* of all its records of a row; compute seconds saved a byte */
    } open[MT_MAX_SEGMENT_KINDS]; /* segments that the search decides: what saves most time a byte first */
    bool together;  /* an equal share of all of them is offloaded, not one after the other */
    double seconds; /* of the best so far */
    struct mt_placement best;
};

static int64_t layers_to_send(const struct mt_search_group *g)
{
    return g->r.layout->cfg.n_layers - g->r.placement.keep_layers;
}

/* The group's own records: those that the user has fixed, and none of the others. */
static struct mt_records fixed_records(const struct mt_search_group *g)
{
    struct mt_records r = mt_records_of(g->r.layout, &g->r.placement);
    for (size_t i = 0; i < g->r.layout->n_segments; i++)
        r.layers[i] = MT_MAX(r.layers[i], (int64_t)0);
    return r;
}

/* Offloads that share, in 1/of, of the bytes of the open segments: all of one before any of the next. */
static struct mt_records fill(const struct mixture *m, int64_t n, int64_t of)
{
    struct mt_records r = fixed_records(m->g);
    double layers = (double)layers_to_send(m->g), all = 0;
    for (size_t i = 0; i < m->n_open; i++)
        all += m->open[i].bytes;
    double left = all * (double)n / (double)of;
    for (size_t i = 0; i < m->n_open; i++) {
        double share = m->together ? left / all : MT_CLAMP(left / m->open[i].bytes, 0.0, 1.0);
        r.layers[m->open[i].kind] = llround(share * layers);
        left -= m->together ? 0 : share * m->open[i].bytes;
    }
    return r;
}

/* Tries the group with that placement and so many records offloaded. *seconds, unless it is NULL: of a step; INFINITY
 * if it does not fit. */
static int try_records(struct mixture *m, struct mt_placement p, const struct mt_records *records, double *seconds,
                       struct mt_err *err)
{
    struct mt_plan_request t = m->g->r;
    struct mt_sim_result sim;
    mt_records_place(records, &p);
    t.placement = p;
    int rc = mt_search_try(m->s, &t, m->g->costs, &sim, err);
    double took = sim.seconds > 0 ? mt_search_seconds(m->s, &sim) : INFINITY;
    if (took < m->seconds) {
        m->seconds = took;
        m->best = p;
    }
    if (seconds)
        *seconds = took;
    return rc;
}

/* As many steps between nothing and everything as can be told apart. */
static int64_t all_steps(const struct mixture *m)
{
    return layers_to_send(m->g) * (m->together || m->n_open == 1 ? 1 : 2);
}

static int try_filled(double *seconds, struct mixture *m, int64_t n, struct mt_err *err)
{
    struct mt_placement p = m->g->r.placement;
    struct mt_records r = fill(m, n, all_steps(m));
    p.slots = m->slots;
    return try_records(m, p, &r, seconds, err);
}

/* Whether a few of n records make the step shorter than none, by their share of what is worth refining: if not, more of
 * them are not worth it either. */
static int few_help(bool *help, struct mixture *m, int64_t n, struct mt_err *err)
{
    enum { OF = 16 };
    double none, few = 0;
    *help = true;
    if (m->s->r->layout->n_units < MANY_UNITS)
        return 0;
    int rc = try_filled(&none, m, 0, err);
    if (!rc && none < INFINITY)
        rc = try_filled(&few, m, MT_MAX(n / OF, (int64_t)1), err);
    *help = !(none < INFINITY) || few * (1 + (MT_SEARCH_NEAR_ENOUGH - 1) / OF) < none;
    return rc;
}

/*
 * Finds how many of the recomputed layers' records to offload: each makes the step shorter while the link carries them
 * during compute, and longer beyond that. Golden section finds the best number in a few simulations.
 */
static int mix_offloading(struct mixture *m, struct mt_err *err)
{
    enum { CLOSE = 24 }; /* the best are refined by shift() */
    const double share = 0.6180339887498949;
    int64_t lo = 0, hi = all_steps(m), inner = llround((double)hi * share);
    int64_t a = hi - inner, b = inner, least = hi / CLOSE; /* lo < a < b < hi */
    double at_a = 0, at_b = 0, at_hi, at_lo = 0;
    bool help;
    int rc = few_help(&help, m, hi, err);
    if (rc || !help)
        return rc;
    if (m->n_open == 1 || m->together)
        rc = try_filled(&at_hi, m, hi, err);
    if (!rc && a < b)
        rc = try_filled(&at_a, m, a, err);
    if (!rc && a < b)
        rc = try_filled(&at_b, m, b, err);
    if (!rc && !(at_a < INFINITY) && !(at_b < INFINITY))
        rc = try_filled(&at_lo, m, lo, err);
    while (!rc && at_lo < INFINITY && lo < a && a < b && b < hi && hi - lo > least) {
        if (at_a <= at_b) {
            hi = b, b = a, at_b = at_a;
            a = hi - llround((double)(hi - lo) * share);
            rc = a < b ? try_filled(&at_a, m, a, err) : 0;
        } else {
            lo = a, a = b, at_a = at_b;
            b = lo + llround((double)(hi - lo) * share);
            rc = a < b && b < hi ? try_filled(&at_b, m, b, err) : 0;
        }
    }
    return rc;
}

/* Bytes of a step's records of one kind of segment, by row. */
static double record_bytes(const struct mt_plan_request *r, size_t kind)
{
    double bytes = 0;
    for (size_t u = 0; u < r->layout->n_units; u++) {
        struct mt_segment segment[MT_MAX_SEGMENTS];
        size_t n = mt_unit_segments(r->layout, u, r->numerics.dtype, (size_t)r->numerics.seq_len, segment);
        for (size_t i = 0; i < n; i++)
            bytes += mt_segment_find(r->layout, &segment[i]) == kind ? (double)segment[i].bytes : 0;
    }
    return bytes;
}

/* Does the search decide how many records of that kind are offloaded? */
static bool is_open(const struct mt_plan_request *r, size_t kind)
{
    return mt_records_of(r->layout, &r->placement).layers[kind] == MT_AUTO;
}

/* Lists the open segments by the compute that they save a byte: this is a knapsack whose items can be divided. */
static int find_open(struct mixture *m, const struct mt_plan_request *asked, struct mt_err *err)
{
    const struct mt_layout *l = m->g->r.layout;
    int rc = 0;
    for (size_t kind = 0; kind < l->n_segments && !rc; kind++) {
        struct mt_search_group t = *m->g;
        struct mt_records r = fixed_records(m->g);
        double bytes = record_bytes(&m->g->r, kind);
        size_t at = m->n_open;
        if (!is_open(asked, kind) || layers_to_send(m->g) <= 0)
            continue;
        r.layers[kind] = layers_to_send(m->g);
        mt_records_place(&r, &t.r.placement);
        rc = mt_search_bound(&t, err);
        struct open_segment own = {kind, bytes, (m->g->least - t.least) / bytes};
        for (; at > 0 && m->open[at - 1].worth < own.worth; at--)
            m->open[at] = m->open[at - 1];
        m->open[at] = own;
        m->n_open++;
    }
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

/* Tries variants of a mixture's best placement: another number of slots, and some records kept instead of offloaded. */
static int refine_mixture(struct mixture *m, struct mt_err *err)
{
    const struct mt_placement *asked = &m->s->r->placement, best = m->best;
    int rc = 0, most_slots = asked->slots == MT_AUTO ? 4 : 2, most_kept = asked->keep_layers == MT_AUTO ? 2 : 0;
    for (int slots = 2; slots <= most_slots && !rc; slots++)
        for (int keep = 0; keep <= most_kept && !rc; keep++) {
            struct mt_placement p = best;
            struct mt_records r = mt_records_of(m->g->r.layout, &best);
            p.slots = asked->slots == MT_AUTO ? slots : asked->slots;
            p.keep_layers = asked->keep_layers == MT_AUTO ? keep : asked->keep_layers;
            for (size_t i = 0; i < m->n_open; i++)
                r.layers[m->open[i].kind] = MT_MAX(r.layers[m->open[i].kind] - keep, (int64_t)0);
            if (keep || (p.slots != best.slots && slots == 4))
                rc = try_records(m, p, &r, NULL, err);
        }
    return rc;
}

static int64_t most_layers(const struct mixture *m)
{
    return m->g->r.layout->cfg.n_layers - m->best.keep_layers;
}

/* Tries k layers' records more or fewer of each segment. */
static int shift(struct mixture *m, int64_t k, struct mt_err *err)
{
    int rc = 0;
    for (size_t i = 0; i < 2 * m->n_open && !rc; i++) {
        struct mt_records records = mt_records_of(m->g->r.layout, &m->best);
        int64_t *n = &records.layers[m->open[i / 2].kind], had = *n;
        *n = MT_CLAMP(had + (i & 1 ? -k : k), (int64_t)0, most_layers(m));
        if (*n != had)
            rc = try_records(m, m->best, &records, NULL, err);
    }
    return rc;
}

/* Tries k layers' records fewer of one segment, and as many more of another as have the same bytes, or a few less if
 * these do not fit. */
static int exchange(struct mixture *m, const struct open_segment *from, const struct open_segment *to, int64_t k,
                    struct mt_err *err)
{
    enum { SPARE = 2, TRIES = 3 };
    struct mt_records records = mt_records_of(m->g->r.layout, &m->best);
    int64_t had = records.layers[to->kind], more = (int64_t)((double)k * from->bytes / to->bytes) + SPARE;
    double seconds = INFINITY;
    int rc = 0;
    if (records.layers[from->kind] < k || had >= most_layers(m))
        return 0;
    records.layers[from->kind] -= k;
    for (int i = 0; i < TRIES && more > 0 && !(seconds < INFINITY) && !rc; i++, more--) {
        records.layers[to->kind] = MT_MIN(had + more, most_layers(m));
        rc = try_records(m, m->best, &records, &seconds, err);
    }
    return rc;
}

/* Memory and the link are filled in whole records, and a step is more than its compute: tries a few other numbers. */
static int polish(struct mixture *m, struct mt_err *err)
{
    enum { MOST = 3 };
    bool large = m->s->r->layout->n_units >= MANY_UNITS;
    int rc = 0;
    for (int64_t k = large ? 2 : 4; k && !rc && !mt_search_is_long(m->g); k /= large ? 4 : 2)
        rc = shift(m, k, err);
    for (size_t a = 0; a < m->n_open && !large; a++)
        for (size_t b = 0; b < m->n_open; b++) {
            double before = INFINITY;
            for (int64_t k = 1; k <= MOST && a != b && m->seconds < before && !rc; k++) {
                before = m->seconds;
                rc = exchange(m, &m->open[a], &m->open[b], k, err);
            }
        }
    return rc;
}

/* Whether a mixture gathers the embedding's rows on the host decides between some that are nearly equal. */
static int try_gathered(struct mixture *m, struct mt_err *err)
{
    struct mt_placement p = m->best;
    struct mt_records same = mt_records_of(m->g->r.layout, &p);
    p.embedding = MT_EMBEDDING_HOST;
    bool open = m->s->r->placement.embedding == MT_EMBEDDING_AUTO && !mt_search_is_long(m->g);
    return open ? try_records(m, p, &same, NULL, err) : 0;
}

/* Refines the best mixtures, if they are better than what was found before. */
static int refine_best(struct mixture *mix, size_t n, struct mt_err *err)
{
    int rc = 0;
    for (size_t i = 0; i < n && mix[i].seconds <= NEARLY * mix[0].seconds && !rc; i++)
        rc = refine_mixture(&mix[i], err)
          ?: polish(&mix[i], err)
          ?: try_gathered(&mix[i], err);
    return rc;
}

/* Tries an equal share of all segments for the best mixtures: in some it meets the link's pauses better. */
static int mix_together(struct mixture *mix, size_t n, struct mt_search *s, struct mt_err *err)
{
    int rc = 0;
    if (s->r->layout->n_units >= MANY_UNITS)
        return 0;
    for (size_t i = 0; i < n && !rc; i++) {
        struct mixture other = mix[i];
        other.together = true;
        if (other.n_open < 2 || mt_search_is_long(other.g))
            continue;
        rc = mix_offloading(&other, err);
        other.together = false;
        mix[i] = other;
    }
    return rc;
}

static int compare_mixtures(const void *a, const void *b)
{
    const struct mixture *x = a, *y = b;
    return (x->seconds > y->seconds) - (x->seconds < y->seconds);
}

/* Several lanes have up to three units under way, and the next one's weights. */
static int64_t usual_slots(const struct mt_plan_request *r)
{
    return r->placement.lanes > 1 ? 4 : 3;
}

/* Tries mixtures for groups that recompute everything, in order of their bounds. */
static int mix_groups(struct mixture mix[MAX_MIXED], size_t *n, struct mt_search *s, const struct mt_search_groups *all,
                      struct mt_err *err)
{
    const struct mt_placement *p = &s->r->placement;
    int rc = 0;
    size_t most = s->r->layout->n_units < MANY_UNITS ? MAX_MIXED : MAX_LARGE;
    for (const struct mt_search_group *g = all->g; g < all->g + all->n && *n < most && !rc; g++) {
        bool skip = g->r.placement.activations != MT_ACT_RECOMPUTE ||
                    g->r.placement.keep_layers != MT_MAX(p->keep_layers, (int64_t)0);
        if (skip || (s->found && least_without_recompute(all, g) * MT_SEARCH_NEAR_ENOUGH >= s->best.sim.makespan))
            continue;
        struct mixture *m = &mix[(*n)++];
        *m = (struct mixture){.s = s, .g = g, .slots = p->slots == MT_AUTO ? usual_slots(s->r) : p->slots,
                              .seconds = INFINITY};
        if (m > mix) { /* what a segment saves a byte hardly depends on the group */
            memcpy(m->open, mix->open, sizeof(m->open));
            m->n_open = mix->n_open;
        } else {
            rc = find_open(m, s->r, err);
        }
        rc = rc ?: mix_offloading(m, err);
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
    size_t most = s->r->layout->n_units < MANY_UNITS ? MAX_FINE : 1;
    for (size_t i = 0; i < MT_MIN(n, most) && s->r->placement.slots == MT_AUTO && !rc; i++) {
        struct mixture few = mix[i];
        if (mt_search_is_long(few.g))
            continue;
        few.slots = usual_slots(s->r) - 1;
        few.seconds = INFINITY;
        rc = mix_offloading(&few, err);
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
    s->lean_writes = s->found ? s->best.sim.bytes[MT_SIM_DISK_WRITE] : INFINITY;
    double before = s->found ? s->best.sim.seconds : INFINITY;
    int rc = mix_groups(mix, &n, s, all, err)
          ?: mix_with_fewer_slots(mix, n, s, err)
          ?: mix_together(mix, MT_MIN(n, (size_t)MAX_FINE), s, err);
    bool better = n && s->found && s->best.sim.seconds < before;
    if (n)
        qsort(mix, n, sizeof(*mix), compare_mixtures);
    return rc || !better ? rc : refine_best(mix, MT_MIN(n, (size_t)MAX_REFINED), err);
}
