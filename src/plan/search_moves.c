/* SPDX-License-Identifier: Apache-2.0 */
/* The part of the search that begins with a group's candidate: records are shared out, then one thing is changed at a
 * time for as long as steps become shorter. */
#include <math.h>
#include <stdlib.h>

#include "base/mem.h"
#include "engine/records.h"
#include "plan/search_priv.h"

enum {
    MAX_MIXED = 6,  /* groups for which mixtures of recomputation and offloading are tried */
    MAX_CLIMBS = 3, /* the best groups, which small changes are made to */
};

#define NEARLY 1.09 /* a group so near to the best is refined, too */

/* Kinds of records whose numbers the search decides: what saves most compute a byte first. */
struct open_records {
    size_t n;
    struct open_kind {
        size_t kind;         /* in mt_layout.segment */
        double bytes, worth; /* of all its records of a row; compute seconds saved a byte */
    } of[MT_MAX_SEGMENT_KINDS + 1]; /* and none */
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

/* Lists what is open in the order of its worth: this is a knapsack whose items can be divided. */
static int find_open(struct open_records *open, const struct mt_search *s, const struct mt_search_group *g,
                     struct mt_err *err)
{
    const struct mt_layout *l = g->r.layout;
    int rc = 0;
    for (size_t kind = 0; kind < l->n_segments && layers_to_send(g) > 0 && !rc; kind++) {
        struct mt_search_group t = *g;
        struct mt_records r = fixed_records(g);
        double bytes = record_bytes(&g->r, kind);
        size_t at = open->n;
        if (mt_records_of(l, &s->r->placement).layers[kind] != MT_AUTO)
            continue;
        r.layers[kind] = layers_to_send(g);
        mt_records_place(&r, &t.r.placement);
        rc = mt_search_bound(&t, err);
        struct open_kind own = {kind, bytes, (g->least - t.least) / bytes};
        for (; at > 0 && open->of[at - 1].worth < own.worth; at--)
            open->of[at] = open->of[at - 1];
        open->of[at] = own;
        open->n++;
    }
    return rc;
}

/* Offloads that share of the bytes of the open records: all of one kind before any of the next. */
static int try_share(double *seconds, struct mt_search *s, struct mt_search_group *g, const struct open_records *open,
                     double share, struct mt_err *err)
{
    struct mt_placement p = g->r.placement;
    struct mt_records r = fixed_records(g);
    double left = 0;
    for (size_t i = 0; i < open->n; i++)
        left += share * open->of[i].bytes;
    for (size_t i = 0; i < open->n; i++) {
        double part = MT_CLAMP(left / open->of[i].bytes, 0.0, 1.0);
        r.layers[open->of[i].kind] = llround(part * (double)layers_to_send(g));
        left -= part * open->of[i].bytes;
    }
    mt_records_place(&r, &p);
    return mt_search_try(s, g, &p, seconds, err);
}

/*
 * Finds what share of the recomputed layers' records to offload: each makes the step shorter while the link carries them
 * during compute, and longer beyond that. Golden section finds the best share in a few simulations.
 */
static int mix(struct mt_search *s, struct mt_search_group *g, const struct open_records *open, struct mt_err *err)
{
    const double golden = 0.6180339887498949, close = MT_MAX(1.0 / (double)layers_to_send(g), 0.04);
    double lo = 0, hi = 1, a = 1 - golden, b = golden, at_a, at_b, none = 0;
    int rc = try_share(&at_a, s, g, open, a, err)
          ?: try_share(&at_b, s, g, open, b, err);
    if (!rc && open->n == 1)
        rc = try_share(NULL, s, g, open, 1, err);
    if (!rc && !(at_a < INFINITY))
        rc = try_share(&none, s, g, open, 0, err);
    while (!rc && none < INFINITY && hi - lo > close) {
        if (at_a <= at_b) {
            hi = b, b = a, at_b = at_a, a = hi - (hi - lo) * golden;
            rc = try_share(&at_a, s, g, open, a, err);
        } else {
            lo = a, a = b, at_a = at_b, b = lo + (hi - lo) * golden;
            rc = try_share(&at_b, s, g, open, b, err);
        }
    }
    return rc;
}

/* Lower bound of the group's time if nothing were recomputed. */
static double least_without_recompute(const struct mt_search *s, const struct mt_search_group *g)
{
    for (size_t i = 0; i < s->n; i++) {
        const struct mt_plan_request *r = &s->g[i].r;
        if (r->placement.activations == MT_ACT_OFFLOAD && r->numerics.micro_batch == g->r.numerics.micro_batch &&
            r->numerics.logits_chunk == g->r.numerics.logits_chunk)
            return s->g[i].least;
    }
    return 0;
}

/* Mixtures for groups that recompute everything, in order of their bounds. */
static int mix_groups(struct mt_search *s, struct open_records *open, struct mt_err *err)
{
    const struct mt_placement *p = &s->r->placement;
    int rc = 0, left = MAX_MIXED;
    for (struct mt_search_group *g = s->g; g < s->g + s->n && left && !rc; g++) {
        bool skip = g->r.placement.activations != MT_ACT_RECOMPUTE ||
                    g->r.placement.keep_layers != MT_MAX(p->keep_layers, (int64_t)0);
        if (skip || (s->found && least_without_recompute(s, g) * MT_SEARCH_NEAR_ENOUGH >= s->best.sim.makespan))
            continue;
        if (!open->n) /* what a record saves a byte hardly depends on the group */
            rc = find_open(open, s, g, err);
        if (!rc && open->n)
            rc = mix(s, g, open, err);
        left = mt_search_is_long(g) ? 0 : left - 1;
    }
    return rc;
}

/* What is changed at once; behind them, of each kind of records as many bytes as of another, or of none. */
enum move {
    MORE_SLOTS, FEWER_SLOTS, N_SLOT_MOVES,
    SLOT_FOR_RECORDS = N_SLOT_MOVES, KEEP, GATHER, GATHER_FOR_RECORDS, STAY, NONE_PENDING, MORE_PENDING, N_MOVES
};

static size_t n_moves(const struct open_records *open)
{
    return N_MOVES + (open->n + 1) * (open->n + 1) - 1;
}

/* Adds n layers' records of each open kind, as far as there are. */
static void add_records(struct mt_records *r, const struct open_records *open, int64_t n, int64_t most)
{
    for (size_t i = 0; i < open->n; i++)
        r->layers[open->of[i].kind] = MT_CLAMP(r->layers[open->of[i].kind] + n, (int64_t)0, most);
}

/* Offloads k layers' records fewer of one kind, and as many more of another as have the same bytes; one of the two may be
 * none. false: there are no such records. */
static bool exchange(struct mt_records *r, const struct open_records *open, size_t pair, int64_t k, int64_t most)
{
    const struct open_kind *from = &open->of[pair / (open->n + 1)], *to = &open->of[pair % (open->n + 1)];
    const struct open_kind *none = &open->of[open->n];
    if (from == to)
        return false;
    int64_t fewer = from == none ? 0 : MT_MIN(k, r->layers[from->kind]);
    int64_t more = from == none || to == none ? k : llround((double)fewer * from->bytes / to->bytes);
    if (from != none)
        r->layers[from->kind] -= fewer;
    if (to != none) {
        more = MT_MIN(more, most - r->layers[to->kind]);
        r->layers[to->kind] += more;
    }
    return (from == none || fewer > 0) && more > 0;
}

/* Makes a change of size k to *p, of a group's candidate; false: it cannot be, or is fixed. */
static bool make_move(struct mt_placement *p, const struct mt_search *s, const struct mt_search_group *g,
                      const struct open_records *open, size_t move, int64_t k)
{
    const struct mt_placement *asked = &s->r->placement, old = *p;
    struct mt_records r = mt_records_of(g->r.layout, p);
    int64_t layers = g->r.layout->cfg.n_layers;
    switch (move) {
    case MORE_SLOTS:
    case FEWER_SLOTS:
        p->slots = MT_MAX(p->slots + (move == MORE_SLOTS ? k : -k), 2);
        return asked->slots == MT_AUTO && p->slots != old.slots;
    case SLOT_FOR_RECORDS:
        p->slots--;
        add_records(&r, open, k, layers - p->keep_layers);
        mt_records_place(&r, p);
        return open->n && asked->slots == MT_AUTO && p->slots >= 2 && p->activations == MT_ACT_RECOMPUTE;
    case KEEP:
        p->keep_layers += k;
        add_records(&r, open, -k, layers);
        mt_records_place(&r, p);
        return asked->keep_layers == MT_AUTO && p->activations == MT_ACT_RECOMPUTE && p->keep_layers <= layers;
    case GATHER: /* takes host memory for the first boundaries where those did not leave the device before */
    case GATHER_FOR_RECORDS:
        p->embedding = MT_EMBEDDING_HOST;
        add_records(&r, open, move == GATHER ? 0 : -k, layers);
        mt_records_place(&r, p);
        return (move == GATHER || open->n) && s->r->train && asked->embedding == MT_EMBEDDING_AUTO &&
               old.embedding != p->embedding;
    case STAY:
        p->adapters = MT_ADAPTERS_RESIDENT;
        return s->r->train && asked->adapters == MT_ADAPTERS_AUTO && g->r.layout->n_adapters &&
               old.adapters != p->adapters;
    case NONE_PENDING: /* the embedding's update alone is left to the next forward */
    case MORE_PENDING: /* gradients take host memory, and updates no longer delay the end of the step */
        p->update_pending = move == NONE_PENDING ? 0 : MT_MIN(MT_MAX(old.update_pending, 1) + k, layers / 2);
        return asked->update == MT_UPDATE_BACKWARD && asked->update_pending == MT_AUTO &&
               old.update_pending != p->update_pending;
    default:
        if (p->activations != MT_ACT_RECOMPUTE || !exchange(&r, open, move - N_MOVES, k, layers - p->keep_layers))
            return false;
        mt_records_place(&r, p);
        return true;
    }
}

/* Makes each change to the group's best for as long as it becomes better, large ones first; in a long step of slots
 * alone. */
static int climb(struct mt_search *s, struct mt_search_group *g, const struct open_records *open, struct mt_err *err)
{
    const size_t moves = mt_search_is_long(g) ? N_SLOT_MOVES : n_moves(open);
    double begin = INFINITY, alone[N_MOVES] = {0}; /* seconds of the best that a change without a size was tried on */
    int rc = 0;
    for (int64_t k = 4; k && !rc; k = g->seconds < begin * 0.999 ? k : k / 2) {
        begin = g->seconds;
        for (size_t move = 0; move < moves && !rc; move++) {
            bool sized = move >= N_MOVES || (move != GATHER && move != STAY && move != NONE_PENDING);
            double before = sized ? INFINITY : alone[move];
            while (!rc && g->seconds != before) {
                struct mt_placement p = g->best;
                before = g->seconds;
                if (make_move(&p, s, g, open, move, k))
                    rc = mt_search_try(s, g, &p, NULL, err);
            }
            if (!sized)
                alone[move] = g->seconds;
        }
    }
    return rc;
}

static int compare_seconds(const void *a, const void *b)
{
    const struct mt_search_group *x = a, *y = b;
    return (x->seconds > y->seconds) - (x->seconds < y->seconds);
}

int mt_search_refine(struct mt_search *s, struct mt_err *err)
{
    const struct mt_placement *p = &s->r->placement;
    bool recomputes = p->activations == MT_ACT_AUTO || p->activations == MT_ACT_RECOMPUTE;
    struct open_records open = {0};
    int rc = 0;
    s->lean_writes = s->found ? s->best.sim.bytes[MT_Q_DISK_WRITE] : INFINITY;
    if (s->r->train && recomputes && p->offload_layers == MT_AUTO)
        rc = mix_groups(s, &open, err);
    if (s->n)
        qsort(s->g, s->n, sizeof(*s->g), compare_seconds);
    for (size_t i = 0; i < MT_MIN(s->n, (size_t)MAX_CLIMBS) && s->found && !rc; i++)
        if (s->g[i].seconds <= NEARLY * s->g[0].seconds && (!i || !mt_search_is_long(&s->g[i])))
            rc = climb(s, &s->g[i], &open, err);
    return rc;
}
