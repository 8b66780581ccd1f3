/* SPDX-License-Identifier: Apache-2.0 */
/* Sizes of pools, from the units: bytes of a buffer, the fewest buffers that work, the most that are useful. */
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "schedule/build.h"

enum { PAGE = 4096 };

static enum mt_pool_id pool_of(const struct mt_program_params *p, const struct mt_use *u)
{
    return mt_program_pool_of(p, &p->values[u->value]);
}

static bool is_on(const struct mt_program_params *p, size_t unit, int lane)
{
    return lane == MT_ALL_LANES || p->by_data || p->units[unit].lane == lane;
}

static bool is_back_on(const struct mt_program_params *p, size_t unit, int lane)
{
    return lane == MT_ALL_LANES || p->by_data || p->units[unit].lane_back == lane;
}

/* Makes the buffers of the unit's pool for that kind at least as large as the object. */
static void hold(const struct mt_program_params *p, size_t bytes[MT_N_POOLS], enum mt_object_kind kind, size_t unit,
                 size_t object_bytes)
{
    size_t *b = &bytes[mt_program_pool(p, kind, unit)];
    *b = MT_MAX(*b, object_bytes);
}

static void hold_values(const struct mt_program_params *p, size_t bytes[MT_N_POOLS], const struct mt_call *c)
{
    for (int k = 0; k < c->n_uses; k++) {
        const struct mt_value *v = &p->values[c->use[k].value];
        size_t *b = &bytes[mt_program_pool_of(p, v)];
        if (mt_use_is_made(p, &c->use[k]))
            *b = MT_MAX(*b, v->bytes);
    }
}

/* All are multiples of a page, as the disk requires. */
void mt_program_host_buffer_bytes(const struct mt_program_params *p, size_t bytes[MT_N_POOLS])
{
    for (size_t u = 0; u < p->n_units; u++) {
        const struct mt_unit_shape *s = &p->units[u];
        hold(p, bytes, MT_OBJ_STAGED, u, s->staged_bytes);
        if (s->trainable && s->state_bytes)
            hold(p, bytes, MT_OBJ_STATE, u,
                 mt_div_up(MT_MIN(p->piece_elems, s->update_elems), p->piece_align) * s->state_bytes);
        if (s->trainable && s->grad_on_disk)
            hold(p, bytes, MT_OBJ_GRAD_OUT, u, mt_align_up(s->update_elems * p->grad_bytes, PAGE));
        if (s->grad_in_ring)
            hold(p, bytes, MT_OBJ_GRAD_RING, u, mt_align_up(s->update_elems * p->grad_bytes, PAGE));
    }
    for (int i = 0; p->spill_disk && i < MT_N_POOLS; i++)
        if (mt_pools[i].spilled != MT_NO_POOL)
            bytes[mt_pools[i].spilled] = mt_align_up(bytes[i], PAGE);
}

static void device_bytes(const struct mt_program_params *p, int lane, size_t bytes[MT_N_POOLS])
{
    bool train = p->mode == MT_MODE_TRAIN;
    memset(bytes, 0, MT_N_POOLS * sizeof(bytes[0]));
    for (size_t u = 0; u < p->n_units; u++) {
        bool back = train && is_back_on(p, u, lane);
        if (is_on(p, u, lane)) {
            hold_values(p, bytes, mt_perturb_call(p, u));
            hold_values(p, bytes, mt_forward_call(p, u));
        }
        if (back)
            hold_values(p, bytes, &p->units[u].backward);
        if ((back || is_on(p, u, lane)) && train && p->cast && p->units[u].trainable)
            hold(p, bytes, MT_OBJ_CAST, u, p->units[u].grad_elems * p->grad_bytes);
        if ((back || is_on(p, u, lane)) && train && p->units[u].moment_bytes) {
            hold(p, bytes, MT_OBJ_MOMENTS, u, p->units[u].moment_bytes);
            hold(p, bytes, MT_OBJ_WEIGHTS, u, p->units[u].weight_bytes);
        }
    }
    for (const struct mt_value *v = p->values; p->draws_apart && v < p->values + p->n_values; v++)
        if (v->kind == MT_OBJ_CACHE)
            bytes[mt_program_pool_of(p, v)] = MT_MAX(bytes[mt_program_pool_of(p, v)], v->bytes);
}

void mt_program_buffer_bytes(const struct mt_program_params *p, int lane, size_t bytes[MT_N_POOLS])
{
    device_bytes(p, MT_ALL_LANES, bytes);
    mt_program_host_buffer_bytes(p, bytes); /* which hold what any lane stores */
    if (lane == MT_ALL_LANES || mt_program_lanes(p) == 1)
        return;
    size_t own[MT_N_POOLS];
    device_bytes(p, lane, own);
    for (int i = 0; i < MT_N_POOLS; i++)
        bytes[i] = mt_pools[i].device ? own[i] : bytes[i];
}

/* The buffers of each pool that one operation uses at once. */
static void need_for_call(const struct mt_program_params *p, const struct mt_call *c, int n[MT_N_POOLS])
{
    int used[MT_N_POOLS] = {0};
    for (int k = 0; k < c->n_uses; k++) {
        if (!mt_use_is_made(p, &c->use[k]) || p->values[c->use[k].value].life == MT_LIFE_RUN)
            continue;
        enum mt_pool_id pool = pool_of(p, &c->use[k]);
        used[pool]++;
        n[pool] = MT_MAX(n[pool], used[pool]);
    }
}

/* Blocks whose gradients arrive at the same time are on different lanes. */
void mt_program_ring_buffers(const struct mt_program_params *p, int n[MT_N_POOLS])
{
    int all[MT_N_POOLS] = {0}, most[MT_N_POOLS] = {0}, here[MT_N_POOLS] = {0};
    for (size_t u = 0; u < p->n_units; u++) {
        int pool = mt_program_pool(p, MT_OBJ_GRAD_RING, u);
        if (!u || p->units[u].block != p->units[u - 1].block)
            memset(here, 0, sizeof(here));
        here[pool] += p->units[u].grad_in_ring;
        all[pool] += p->units[u].grad_in_ring;
        most[pool] = MT_MAX(most[pool], here[pool]);
    }
    for (int i = 0; i < MT_N_POOLS; i++)
        n[i] = MT_MAX(n[i], MT_MIN(all[i], most[i] * mt_program_lanes(p) + 2));
}

/* Whether sums of groups are added on the lane: two of them at once. */
static bool is_added_on(const struct mt_program_params *p, const struct mt_value *v, int lane)
{
    return v->kind == MT_OBJ_GRAD && p->mode == MT_MODE_TRAIN && p->units[v->unit].trainable &&
           is_back_on(p, (size_t)v->unit, lane);
}

/* Whether all objects of the pool live for the run, and there are any. */
static bool all_stay(const struct mt_program_params *p, int lane, int pool)
{
    bool all = false;
    for (const struct mt_value *x = p->values; x < p->values + p->n_values; x++) {
        if (!x->bytes || (int)mt_program_pool_of(p, x) != pool || !is_on(p, (size_t)x->unit, lane))
            continue;
        if (x->life != MT_LIFE_RUN)
            return false;
        all = true;
    }
    return all;
}

static void least_buffers(const struct mt_program_params *p, int lane, const size_t bytes[MT_N_POOLS],
                          int n[MT_N_POOLS])
{
    for (int i = 0; i < MT_N_POOLS; i++)
        n[i] = bytes[i] && !all_stay(p, lane, i) ? mt_pools[i].least : 0;
    for (size_t u = 0; u < p->n_units; u++) {
        if (is_on(p, u, lane)) {
            need_for_call(p, mt_perturb_call(p, u), n);
            need_for_call(p, mt_forward_call(p, u), n);
        }
        if (is_back_on(p, u, lane))
            need_for_call(p, &p->units[u].backward, n);
    }
    for (size_t v = 0; v < p->n_values && mt_program_levels(p); v++)
        if (is_added_on(p, &p->values[v], lane))
            n[mt_program_pool_of(p, &p->values[v])] = MT_MAX(n[mt_program_pool_of(p, &p->values[v])], 2);
    for (size_t v = 0; v < p->n_values; v++)
        if (p->values[v].life == MT_LIFE_RUN && is_on(p, (size_t)p->values[v].unit, lane))
            n[mt_program_pool_of(p, &p->values[v])]++;
    mt_program_ring_buffers(p, n);
}

/* When the objects of a value are in use: positions of operations, forward and then back. */
struct span {
    size_t first, last;
};

static void extend_spans(const struct mt_program_params *p, struct span *s, const struct mt_call *c, size_t at)
{
    for (int k = 0; k < c->n_uses; k++) {
        struct span *v = &s[c->use[k].value];
        if (!mt_use_is_made(p, &c->use[k]))
            continue;
        v->first = v->last ? v->first : at;
        v->last = at;
    }
}

static struct span *find_spans(const struct mt_program_params *p, int lane)
{
    struct span *s = mt_calloc(p->n_values, sizeof(*s));
    for (size_t u = 0; s && u < p->n_units; u++)
        if (is_on(p, u, lane)) {
            extend_spans(p, s, mt_perturb_call(p, u), 1 + u);
            extend_spans(p, s, mt_forward_call(p, u), 1 + u);
        }
    for (size_t u = p->n_units; s && p->mode == MT_MODE_TRAIN && u-- > 0;)
        if (is_back_on(p, u, lane))
            extend_spans(p, s, &p->units[u].backward, 2 * p->n_units - u);
    return s;
}

/* Those of the lane, of micro-batches that it has if lanes share these. */
static int32_t count_objects(const struct mt_program_params *p, int lane, const struct mt_value *v)
{
    bool by_group = v->life == MT_LIFE_GROUP, each = by_group || v->life == MT_LIFE_MICROBATCH;
    bool rows = v->life == MT_LIFE_ONE_ROW;
    int32_t n = !each && !rows;
    for (size_t mb = 0; rows && mb < p->n_micro; mb += p->chunks)
        n += lane == MT_ALL_LANES || !p->by_data || mt_micro_lane(p, mb) == lane;
    const struct mt_call once = {.scope = by_group ? MT_SCOPE_GROUP : MT_SCOPE_MICROBATCH};
    for (size_t mb = 0; each && mb < p->n_micro; mb = mt_call_next(p, &once, mb))
        n += (lane == MT_ALL_LANES || !p->by_data || mt_micro_lane(p, mb) == lane) &&
             (by_group || mt_share_has(&v->share, p->n_micro, mb));
    return n;
}

/* change[at][pool]: objects whose use begins with operation `at`, less those whose last use was the one before. */
static void count_changes(const struct mt_program_params *p, int lane, const struct span *s,
                          int32_t (*change)[MT_N_POOLS])
{
    for (size_t i = 0; i < p->n_values; i++) {
        const struct mt_value *v = &p->values[i];
        enum mt_pool_id pool = mt_program_pool_of(p, v);
        int32_t n = s[i].last ? count_objects(p, lane, v) : 0;
        change[s[i].first][pool] += n;
        change[s[i].last + 1][pool] -= n;
    }
}

/* Most objects of each pool that are in use at once; an upper bound (all of them) if memory runs out here. */
static void count_live(const struct mt_program_params *p, int lane, size_t most[MT_N_POOLS])
{
    size_t n = 2 * p->n_units + 2;
    MT_FREED struct span *s = find_spans(p, lane);
    MT_FREED int32_t(*change)[MT_N_POOLS] = mt_calloc(n, sizeof(*change));
    int32_t live[MT_N_POOLS] = {0}, peak[MT_N_POOLS] = {0};
    if (s && change)
        count_changes(p, lane, s, change);
    for (size_t at = 0; s && change && at < n; at++)
        for (int i = 0; i < MT_N_POOLS; i++) {
            live[i] += change[at][i];
            peak[i] = MT_MAX(peak[i], live[i]);
        }
    for (int i = 0; i < MT_N_POOLS; i++)
        most[i] = MT_MAX(most[i], (size_t)peak[i]);
    for (size_t v = 0; !(s && change) && v < p->n_values; v++)
        most[mt_program_pool_of(p, &p->values[v])] += mt_value_objects(p, &p->values[v]);
}

/* Objects of the kind, one per unit with weights; at most two at once if they leave the device as soon as made, and
 * three where backward of several units is interleaved. */
static void count_units(const struct mt_program_params *p, int lane, enum mt_object_kind kind, bool leave,
                        size_t most[MT_N_POOLS])
{
    size_t count[MT_N_POOLS] = {0};
    for (size_t u = 0; u < p->n_units; u++)
        count[mt_program_pool(p, kind, u)] += p->units[u].weight_bytes > 0 &&
                                              (is_back_on(p, u, lane) || (!leave && is_on(p, u, lane)));
    for (int i = 0; i < MT_N_POOLS; i++)
        if (count[i])
            most[i] = leave ? MT_MIN(count[i], (size_t)(mt_program_lanes(p) > 1 ? 3 : 2)) : count[i];
}

/* n: the fewest on entry. */
static void most_buffers(const struct mt_program_params *p, int lane, const size_t bytes[MT_N_POOLS],
                         int n[MT_N_POOLS])
{
    size_t most[MT_N_POOLS] = {0};
    count_live(p, lane, most);
    count_units(p, lane, MT_OBJ_WEIGHTS, false, most);
    most[MT_POOL_WEIGHTS] += p->mode == MT_MODE_ZEROTH; /* one unit's are perturbed at a time */
    count_units(p, lane, MT_OBJ_GRAD, true, most);
    for (int i = 0; i < MT_N_CLASSES; i++)
        most[mt_kinds[MT_OBJ_GRAD].pool[i]] += (size_t)mt_program_levels(p);
    count_units(p, lane, MT_OBJ_CAST, true, most);
    count_units(p, lane, MT_OBJ_MOMENTS, true, most);
    count_units(p, lane, MT_OBJ_STAGED, false, most);
    count_units(p, lane, MT_OBJ_GRAD_OUT, true, most);
    most[mt_kinds[MT_OBJ_STATE].pool[MT_CLASS_LAYER]] = 6; /* two each being read, updated, written */
    for (int i = 0; i < MT_N_POOLS; i++)
        if (mt_pools[i].spilled != MT_NO_POOL)
            most[mt_pools[i].spilled] = most[i];
    for (int i = 0; i < MT_N_POOLS; i++)
        n[i] = bytes[i] ? MT_MAX(n[i], (int)MT_MIN(most[i], (size_t)MT_MAX_BUFFERS)) : 0;
}

void mt_program_max_buffers(const struct mt_program_params *p, int n[MT_N_POOLS])
{
    size_t bytes[MT_N_POOLS];
    mt_program_buffer_bytes(p, MT_ALL_LANES, bytes);
    least_buffers(p, MT_ALL_LANES, bytes, n);
    most_buffers(p, MT_ALL_LANES, bytes, n);
}

void mt_program_size_pools(const struct mt_program_params *p, int lane, size_t bytes[MT_N_POOLS],
                           int least[MT_N_POOLS], int most[MT_N_POOLS])
{
    mt_program_buffer_bytes(p, lane, bytes);
    least_buffers(p, lane, bytes, least);
    memcpy(most, least, MT_N_POOLS * sizeof(*most));
    most_buffers(p, lane, bytes, most);
}
