/* SPDX-License-Identifier: Apache-2.0 */
/*
 * List scheduling (Graham 1969) of a step's operations over lanes: of those that may run, the one that can begin first
 * is next. Lengths are in bytes of weights, which products take as time for each micro-batch.
 */
#include "schedule/turns.h"

#include <string.h>

#include "base/mem.h"
#include "schedule/objects.h"

/* Forward or backward of a unit for all micro-batches: turns that are next to each other on entry. */
struct stage {
    size_t first, end, next; /* turns; next: the first that has not been taken */
    bool back;
};

struct order {
    const struct mt_program_params *p;
    const struct mt_turns *t;
    size_t *first_object;   /* [n_values] of the value's objects */
    int32_t *ahead;         /* [n, MT_MAX_OPERANDS] operations before a turn that use the operand's object */
    int32_t *done;          /* [n_objects] of these, how many have been taken */
    uint64_t *free_at;      /* [n_objects] when the last of them ends */
    int8_t *lane_of;        /* [n_objects] on which it runs */
    struct stage *stages;   /* by lane, in order */
    size_t n_of[MT_MAX_LANES], first_of[MT_MAX_LANES]; /* stages of a lane; the first that is not complete */
    struct stage *of[MT_MAX_LANES];
    uint64_t time[MT_MAX_LANES];
};

static size_t object_at(const struct order *o, const struct mt_turn *x, int use)
{
    int32_t v = x->call->use[use].value;
    return o->first_object[v] + mt_value_object(o->p, &o->p->values[v], x->mb);
}

static uint64_t records_of(const struct mt_program_params *p, const struct mt_turn *x)
{
    uint64_t n = 0;
    for (int k = 0; k < x->call->n_uses; k++) {
        const struct mt_value *v = &p->values[x->call->use[k].value];
        n += v->kind == MT_OBJ_RECORD && mt_share_has(&v->share, p->n_micro, x->mb);
    }
    return n;
}

static bool is_back(const struct mt_program_params *p, const struct mt_turn *x)
{
    return x->call == &p->units[x->unit].backward;
}

/* In eighths of forward: backward takes it twice, recomputation up to once more; the head has both. */
static uint64_t length_of(const struct mt_program_params *p, const struct mt_turn *x)
{
    uint64_t bytes = 1;
    for (int k = 0; k < x->call->n_uses; k++) {
        const struct mt_value *v = &p->values[x->call->use[k].value];
        bytes += v->kind == MT_OBJ_WEIGHTS ? v->bytes : 0;
    }
    bool back = is_back(p, x), head = x->call->op == MT_OP_HEAD;
    uint64_t times = head ? 24 : back ? 24 - MT_MIN(3 * records_of(p, x), (uint64_t)8) : 8;
    if (x->call->scope == MT_SCOPE_GROUP)
        times *= mt_div_up(p->n_micro, mt_groups_n(p->groups));
    return x->call->op == MT_OP_EMBED || x->call->op == MT_OP_EMBED_BWD ? 1 : bytes * times;
}

/* Units that the lane has under way: one buffer of weights is for what is next. Experts run over all of a group. */
static size_t most_open(const struct mt_program_params *p, int lane, bool back)
{
    const int *n = p->n_buffers[lane];
    int open = n[MT_POOL_WEIGHTS] - 1;
    for (size_t u = 0; u < p->n_units; u++)
        if (p->units[u].scope == MT_SCOPE_GROUP)
            return 1;
    if (back)
        open = MT_MIN(open, n[MT_POOL_GRAD] - mt_program_levels(p));
    return (size_t)MT_MAX(1, MT_MIN(open, MT_TURNS_OPEN));
}

/* When it can begin; UINT64_MAX: something before it has not been taken. */
static uint64_t begin_of(const struct order *o, size_t turn)
{
    const struct mt_turn *x = &o->t->of[turn];
    uint64_t begin = o->time[x->lane], hop = length_of(o->p, x) / 8;
    for (int k = 0; k < x->call->n_uses; k++) {
        size_t at = object_at(o, x, k);
        if (o->done[at] < o->ahead[turn * MT_MAX_OPERANDS + (size_t)k])
            return UINT64_MAX;
        bool comes = o->done[at] && o->lane_of[at] != x->lane; /* through host memory */
        begin = MT_MAX(begin, o->free_at[at] + (comes ? hop : 0));
    }
    return begin;
}

static void take(struct order *o, struct stage *s, uint64_t begin)
{
    const struct mt_turn *x = &o->t->of[s->next++];
    o->time[x->lane] = begin + length_of(o->p, x);
    for (int k = 0; k < x->call->n_uses; k++) {
        size_t at = object_at(o, x, k);
        o->done[at]++;
        o->free_at[at] = o->time[x->lane];
        o->lane_of[at] = (int8_t)x->lane;
    }
}

/* The lane's stage whose next turn can begin first; of those that are under way or could be. */
static struct stage *best_of(struct order *o, int lane, const size_t open[2], uint64_t *begin)
{
    struct stage *best = NULL;
    size_t seen = 0;
    for (size_t i = o->first_of[lane]; i < o->n_of[lane]; i++) {
        struct stage *s = &o->of[lane][i];
        if (s->next == s->end)
            continue;
        if (seen++ >= open[s->back])
            break;
        uint64_t at = begin_of(o, s->next);
        if (at < *begin) {
            *begin = at;
            best = s;
        }
    }
    size_t *first = &o->first_of[lane];
    while (*first < o->n_of[lane] && o->of[lane][*first].next == o->of[lane][*first].end)
        ++*first;
    return best;
}

static void take_all(struct order *o, struct mt_turn *out)
{
    int lanes = mt_program_lanes(o->p);
    size_t open[MT_MAX_LANES][2];
    for (int lane = 0; lane < lanes; lane++)
        for (int back = 0; back < 2; back++)
            open[lane][back] = most_open(o->p, lane, back);
    for (size_t i = 0; i < o->t->n; i++) {
        struct stage *next = NULL;
        uint64_t begin = UINT64_MAX;
        for (int lane = 0; lane < lanes; lane++) {
            uint64_t at = UINT64_MAX;
            struct stage *s = best_of(o, lane, open[lane], &at);
            if (s && (at < begin || (at == begin && s->first < next->first))) {
                next = s;
                begin = at;
            }
        }
        out[i] = o->t->of[next->next]; /* the first turn that is left is never held up */
        take(o, next, begin);
    }
}

/* Stages by lane, each lane's in order. */
static void list_stages(struct order *o)
{
    size_t n = 0;
    for (int lane = 0; lane < mt_program_lanes(o->p); lane++) {
        o->of[lane] = o->stages + n;
        for (size_t i = 0, end; i < o->t->n; i = end) {
            const struct mt_turn *x = &o->t->of[i];
            bool back = is_back(o->p, x);
            for (end = i + 1; end < o->t->n && o->t->of[end].unit == x->unit && is_back(o->p, &o->t->of[end]) == back;)
                end++;
            if (x->lane == lane)
                o->of[lane][o->n_of[lane]++] = (struct stage){i, end, i, back};
        }
        n += o->n_of[lane];
    }
}

static void count_ahead(struct order *o, int32_t *count)
{
    for (size_t i = 0; i < o->t->n; i++) {
        const struct mt_turn *x = &o->t->of[i];
        for (int k = 0; k < x->call->n_uses; k++)
            o->ahead[i * MT_MAX_OPERANDS + (size_t)k] = count[object_at(o, x, k)];
        for (int k = 0; k < x->call->n_uses; k++)
            count[object_at(o, x, k)]++;
    }
}

int mt_turns_order(struct mt_turns *t, const struct mt_program_params *p, struct mt_err *err)
{
    MT_CLOSED_BY(mt_arrays_finish) struct mt_arrays a = {NULL};
    struct order o = {.p = p, .t = t};
    size_t n_objects = 0;
    o.first_object = mt_arrays_add(&a, p->n_values, sizeof(*o.first_object));
    for (size_t v = 0; o.first_object && v < p->n_values; v++) {
        o.first_object[v] = n_objects;
        n_objects += mt_value_objects(p, &p->values[v]);
    }
    struct mt_turn *out = mt_arrays_add(&a, t->n, sizeof(*out));
    int32_t *count = mt_arrays_add(&a, n_objects, sizeof(*count));
    o.ahead = mt_arrays_add(&a, t->n * MT_MAX_OPERANDS, sizeof(*o.ahead));
    o.done = mt_arrays_add(&a, n_objects, sizeof(*o.done));
    o.free_at = mt_arrays_add(&a, n_objects, sizeof(*o.free_at));
    o.lane_of = mt_arrays_add(&a, n_objects, sizeof(*o.lane_of));
    o.stages = mt_arrays_add(&a, 2 * p->n_units, sizeof(*o.stages));
    if (a.failed)
        return mt_fail_nomem(err, "a step's order", t->n * MT_MAX_OPERANDS * sizeof(int32_t));
    list_stages(&o);
    count_ahead(&o, count);
    take_all(&o, out);
    memcpy(t->of, out, t->n * sizeof(*out));
    return 0;
}
