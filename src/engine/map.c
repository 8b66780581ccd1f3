/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The map of units over lanes. Micro-batches follow each other from lane to lane: a lane works on a layer for all of
 * them while the next lane does so on the next layer. The layers' forward passes, the head and the layers' backward passes
 * are a chain of stages, each of which goes to the lane that has the least to do so far; as every weight is loaded
 * twice a step in any case, backward may be elsewhere than forward. The head takes as long as several layers, so its
 * lane has fewer of them.
 */
#include "engine/map.h"

#include "base/mem.h"
#include "schedule/tables.h"

struct map {
    struct mt_unit_shape *units;
    const struct mt_layout *l;
    int n_lanes;
    int64_t first_kept;
    uint64_t load[MT_MAX_LANES];
};

static bool is_layer(const struct map *m, size_t unit)
{
    return m->l->units[unit].layer >= 0 && m->l->units[unit].layer < m->l->cfg.n_layers;
}

/* The unit behind those of the same layer. */
static size_t end_of_layer(const struct map *m, size_t unit)
{
    size_t end = unit;
    while (end < m->l->n_units && m->l->units[end].layer == m->l->units[unit].layer && is_layer(m, end))
        end++;
    return end;
}

static int least_loaded(const struct map *m)
{
    int least = 0;
    for (int lane = 1; lane < m->n_lanes; lane++)
        if (m->load[lane] < m->load[least])
            least = lane;
    return least;
}

static uint64_t bytes_of(const struct map *m, size_t first, size_t end)
{
    uint64_t bytes = 0;
    for (size_t u = first; u < end; u++)
        bytes += m->units[u].weight_bytes;
    return bytes;
}

/* Records that stay on the device are used where they were made, as are adapters that do. */
static bool stays(const struct map *m, size_t first, size_t end)
{
    bool stay = m->l->units[first].layer >= m->first_kept;
    for (size_t u = first; u < end; u++)
        stay |= m->units[u].adapter_bytes > 0;
    return stay;
}

/* Backward is twice as long as forward, with recomputation, of what is not recorded, three times. */
static uint64_t back_time(const struct map *m, size_t first, size_t end)
{
    uint64_t time = 0;
    for (size_t u = first; u < end; u++) {
        double recorded = 0;
        for (size_t i = 0; i < MT_MAX_SEGMENTS; i++) {
            const struct mt_unit_record *r = &m->units[u].record[i];
            double share = !r->bytes ? 0 : r->share.of ? (double)r->share.some / (double)r->share.of : 1;
            recorded += share / (double)MT_MAX(m->l->n_segments, (size_t)1);
        }
        time += (uint64_t)((3 - recorded) * (double)m->units[u].weight_bytes);
    }
    return time;
}

static void map_forward(struct map *m, size_t first, size_t end)
{
    int lane = least_loaded(m);
    bool stay = stays(m, first, end);
    for (size_t u = first; u < end; u++)
        m->units[u].lane = m->units[u].lane_back = (uint8_t)lane;
    m->load[lane] += bytes_of(m, first, end) + (stay ? back_time(m, first, end) : 0);
}

static void map_back(struct map *m, size_t first, size_t end)
{
    int lane = least_loaded(m);
    if (stays(m, first, end))
        return;
    for (size_t u = first; u < end; u++)
        m->units[u].lane_back = (uint8_t)lane;
    m->load[lane] += back_time(m, first, end);
}

/* Layers in turn, forward and back, where experts run once a step: their layers do not overlap. */
static void map_in_turn(struct map *m)
{
    for (size_t u = 0; u < m->l->n_units; u++)
        if (is_layer(m, u))
            m->units[u].lane = m->units[u].lane_back = (uint8_t)(m->l->units[u].layer % m->n_lanes);
}

static int map_chain(struct map *m)
{
    size_t n = m->l->n_units;
    for (size_t u = 0; u < n; u = is_layer(m, u) ? end_of_layer(m, u) : u + 1)
        if (is_layer(m, u))
            map_forward(m, u, end_of_layer(m, u));
    int head = least_loaded(m);
    m->load[head] += 3 * bytes_of(m, n - 1, n);
    for (size_t end = n, u; end > 0; end = u) {
        for (u = end - 1; u > 0 && is_layer(m, u) && m->l->units[u - 1].layer == m->l->units[u].layer;)
            u--;
        if (is_layer(m, u))
            map_back(m, u, end);
    }
    return head;
}

/* The embedding and the head have tables of their own on different lanes; a tied table stays on one. */
void mt_map_units(struct mt_unit_shape *units, const struct mt_layout *l, int n_lanes, int64_t first_kept)
{
    struct map m = {units, l, n_lanes, first_kept, {0}};
    bool once = false;
    for (size_t u = 0; u < l->n_units; u++)
        once |= units[u].scope == MT_SCOPE_STEP;
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
