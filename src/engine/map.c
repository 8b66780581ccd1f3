/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The map of units over lanes. Micro-batches follow each other from lane to lane: a lane works on a layer for all of
 * them while the next lane does so on the next layer. The layers' forward passes, the head and the layers' backward
 * passes are a chain of stages, each of which goes to the lane that has the least to do so far; as every weight is
 * loaded twice a step in any case, backward may be elsewhere than forward. The head takes as long as several layers,
 * so its lane has fewer of them. While it is under way the other lanes follow it, micro-batch by micro-batch, each with
 * as many layers as it can have under way: none of these ends before the head does. (Of two lanes the other one is not
 * ahead for long: there it makes no difference.)
 */
#include "engine/map.h"

#include "base/mem.h"
#include "schedule/tables.h"
#include "schedule/turns.h"

struct map {
    struct mt_unit_shape *units;
    const struct mt_layout *l;
    int n_lanes;
    int64_t first_kept;
    uint64_t load[MT_MAX_LANES];
    int head;          /* its lane, or -1: it has none yet */
    uint64_t head_end; /* what its lane has to do up to its end */
    int under_way[MT_MAX_LANES]; /* backward passes that the lane begins while the head is under way */
    struct mt_map_room *room;    /* NULL: any unit may go to any lane */
};

static bool is_layer(const struct map *m, size_t unit)
{
    return m->l->units[unit].layer >= 0 && m->l->units[unit].layer < m->l->cfg.n_layers;
}

/* Of equal ones, the next at or after `first`. */
static int least_loaded(const struct map *m, int first)
{
    int least = first;
    for (int i = 1; i < m->n_lanes; i++) {
        int lane = (first + i) % m->n_lanes;
        if (m->load[lane] < m->load[least])
            least = lane;
    }
    return least;
}

/* Records that stay on the device are used where they were made, as are adapters that do. */
static bool stays(const struct map *m, size_t unit)
{
    return m->l->units[unit].layer >= m->first_kept || m->units[unit].adapter_bytes;
}

/* The unit whose weights it has. */
static const struct mt_unit_shape *weights_of(const struct map *m, size_t unit)
{
    return &m->units[m->l->units[unit].weights];
}

/* Backward is twice as long as forward, with recomputation, of what is not recorded, three times. */
static uint64_t back_time(const struct map *m, size_t unit)
{
    double recorded = 0;
    for (size_t i = 0; i < MT_MAX_SEGMENTS; i++) {
        const struct mt_unit_record *r = &m->units[unit].record[i];
        double share = !r->bytes ? 0 : r->share.of ? (double)r->share.some / (double)r->share.of : 1;
        recorded += share / (double)MT_MAX(m->l->n_segments, (size_t)1);
    }
    return (uint64_t)((3 - recorded) * (double)weights_of(m, unit)->weight_bytes);
}

/* Where weights are shared, they are loaded on one lane, and their gradient is summed there. */
static void map_forward(struct map *m, size_t unit)
{
    int lane = weights_of(m, unit) == &m->units[unit] ? least_loaded(m, 0) : weights_of(m, unit)->lane;
    m->units[unit].lane = m->units[unit].lane_back = (uint8_t)lane;
    m->load[lane] += weights_of(m, unit)->weight_bytes + (stays(m, unit) ? back_time(m, unit) : 0);
}

static void map_back(struct map *m, size_t unit)
{
    int lane = m->l->share > 1 ? m->units[unit].lane : least_loaded(m, 0);
    if (stays(m, unit))
        return;
    m->units[unit].lane_back = (uint8_t)lane;
    m->load[lane] += back_time(m, unit);
    if (m->n_lanes > 2 && lane != m->head && ++m->under_way[lane] == MT_TURNS_OPEN)
        m->load[lane] = MT_MAX(m->load[lane], m->head_end + 1);
}

/* Layers in turn, forward and back, where experts run over all rows at once: their layers do not overlap. */
static void map_in_turn(struct map *m)
{
    for (size_t u = 0; u < m->l->n_units; u++)
        if (is_layer(m, u))
            m->units[u].lane = m->units[u].lane_back = (uint8_t)(m->l->units[u].layer / m->l->share % m->n_lanes);
}

static int map_chain(struct map *m)
{
    size_t n = m->l->n_units;
    for (size_t u = 0; u < n; u++)
        if (is_layer(m, u))
            map_forward(m, u);
    int head = m->head = least_loaded(m, 0);
    m->head_end = m->load[head] += 3 * m->units[n - 1].weight_bytes;
    for (size_t u = n; u-- > 0;)
        if (is_layer(m, u))
            map_back(m, u);
    return head;
}

/* The embedding and the head have tables of their own on different lanes; a tied table stays on one. */
void mt_map_units(struct mt_unit_shape *units, const struct mt_layout *l, int n_lanes, int64_t first_kept)
{
    struct map m = {.units = units, .l = l, .n_lanes = n_lanes, .first_kept = first_kept, .head = -1};
    bool once = false;
    for (size_t u = 0; u < l->n_units; u++)
        once |= units[u].scope == MT_SCOPE_GROUP;
    int head = (int)(l->cfg.n_layers % n_lanes);
    if (once)
        map_in_turn(&m);
    else
        head = map_chain(&m);
    for (size_t u = 0; u < l->n_units; u++)
        if (!is_layer(&m, u)) {
            bool apart = l->units[u].kind == MT_UNIT_EMBED && !l->tied;
            units[u].lane = units[u].lane_back = (uint8_t)((apart ? head + n_lanes - 1 : head) % n_lanes);
        }
}

/* In the first n places. */
static bool has_room(const uint64_t *room, const uint64_t *bytes, int n)
{
    bool has = true;
    for (int i = 0; i < n; i++)
        has &= room[i] >= bytes[i];
    return has;
}

/* The least loaded lane of the hosts that have room for so many bytes, of which it takes them; if none has, of those
 * with drives for them; if none has, of all. */
static int with_room(struct map *m, int first, const uint64_t *bytes)
{
    int best = -1;
    for (int n = MT_N_MAP_PLACES; best < 0; n--)
        for (int i = 0; i < m->n_lanes; i++) {
            int lane = (first + i) % m->n_lanes;
            const uint64_t *room = m->room->of[lane / m->room->own_lanes];
            if (has_room(room, bytes, n) && (best < 0 || m->load[lane] < m->load[best]))
                best = lane;
        }
    for (int i = 0; i < MT_N_MAP_PLACES; i++) {
        uint64_t *room = &m->room->of[best / m->room->own_lanes][i];
        *room -= MT_MIN(*room, bytes[i]);
    }
    return best;
}

/* Units are dealt out one by one, and of layers the lane that has least takes the next in backward: where attention and
 * MLPs are units by themselves, one host of two would otherwise add up, and receive, all MLPs. Where units have owners,
 * the embedding and the head count, too, and come first, as they may be the largest. */
void mt_map_gradients(struct mt_unit_shape *units, const struct mt_layout *l, int n_lanes, bool owned,
                      struct mt_map_room *room)
{
    struct map m = {.l = l, .n_lanes = n_lanes, .room = room};
    for (int layers = 0; layers < 2; layers++)
        for (size_t u = l->n_units; u-- > 0;) {
            int lane = (int)(u % (size_t)n_lanes);
            if (is_layer(&m, u) != layers)
                continue;
            if (layers || owned) {
                lane = room ? with_room(&m, lane, room->bytes[u]) : least_loaded(&m, lane);
                m.load[lane] += units[u].grad_elems;
            }
            units[u].lane = units[u].lane_back = (uint8_t)lane;
        }
}
