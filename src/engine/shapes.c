/* SPDX-License-Identifier: Apache-2.0 */
#include "engine/shapes.h"

#include "base/mem.h"
#include "engine/map.h"
#include "engine/records.h"
#include "engine/share.h"
#include "model/direct.h"
#include "model/packing.h"
#include "model/ranges.h"

/* Number of last layers whose records stay on the device: the last layers' are needed for the shortest time. */
static int64_t kept_layers(const struct mt_engine_params *p)
{
    return MT_CLAMP(p->placement.keep_layers, 0, p->layout->cfg.n_layers);
}

/*
 * The micro-batches for which a layer's forward records a segment for backward. With recomputation: all of the kept
 * layers; of the others as many records as are to be offloaded, spread evenly over layers and micro-batches, so that
 * one crosses the link while the next ones compute.
 */
static struct mt_share recorded(const struct mt_engine_plan *plan, const struct mt_engine_params *p, int layer,
                                int64_t offloaded)
{
    int64_t others = p->layout->cfg.n_layers - kept_layers(p), out = MT_CLAMP(offloaded, 0, others);
    if (plan->activations != MT_ACT_RECOMPUTE || layer < 0 || layer >= others)
        return (struct mt_share){.of = 0};
    return (struct mt_share){.some = (int32_t)out, .of = (int32_t)others, .before = layer};
}

static bool is_empty(struct mt_share s)
{
    return s.of && !s.some;
}

bool mt_engine_is_record_pool(int pool)
{
    return pool >= MT_POOL_RECORD && pool <= MT_POOL_RECORD_LAST;
}

/* Micro-batches that a unit's records on the lane are of: all of them, if the unit is there. */
static size_t micro_on(const struct mt_program_params *g, size_t unit, int lane)
{
    size_t n = 0;
    for (size_t mb = 0; mb < g->n_micro; mb++)
        n += g->by_data ? mt_micro_lane(g, mb) == lane : g->units[unit].lane == lane;
    return n;
}

size_t mt_engine_kept_records(const struct mt_engine_plan *plan, const struct mt_engine_params *p, int lane, int pool)
{
    const struct mt_layout *l = p->layout;
    size_t n = 0;
    for (size_t u = 0; u < l->n_units; u++)
        for (int i = 0; i < MT_MAX_SEGMENTS && l->units[u].layer >= l->cfg.n_layers - kept_layers(p); i++) {
            const struct mt_unit_record *r = &plan->units[u].record[i];
            n += r->bytes && MT_POOL_RECORD + r->size == pool ? micro_on(&plan->program, u, lane) : 0;
        }
    return n;
}

static bool adapters_stay(const struct mt_engine_params *p, const struct mt_unit *u)
{
    return p->placement.adapters == MT_ADAPTERS_RESIDENT && u->adapters_alone;
}

/* Bytes of a load: hi, in f32 also lo if there is one, and packed ranges as stored; without adapters that stay. */
static size_t link_bytes(const struct mt_engine_params *p, const struct mt_unit *u)
{
    const struct mt_layout *l = p->layout;
    enum mt_dtype dtype = p->numerics.dtype;
    size_t elems = 0;
    for (const struct mt_range *r = &l->ranges[u->first_range], *end = r + u->n_ranges; r < end; r++)
        if (r->kind != MT_RANGE_PACKED && !(r->kind == MT_RANGE_TRAINED && adapters_stay(p, u)))
            elems += mt_plane_is_loaded(mt_range_planes(r->kind).lo, dtype) ? 2 * r->n : r->n;
    const struct mt_tensor *f32 = mt_unit_f32_tensor(l, (size_t)(u - l->units), dtype);
    elems += !f32 ? 0 : mt_device_planes(l, f32->kind).lo != MT_NO_PLANE ? 2 * f32->n : f32->n;
    return elems * mt_dtype_size(MT_BF16) + u->n_in_planes[MT_RANGE_PACKED];
}

/* Elements of the gradient's plane up to the end of the last trained range: where others lie between, there are gaps. */
static size_t trained_end(const struct mt_layout *l, const struct mt_unit *u)
{
    size_t end = 0;
    for (size_t i = u->first_range; i < u->first_range + u->n_ranges; i++)
        end = l->ranges[i].kind == MT_RANGE_TRAINED ? l->ranges[i].at + l->ranges[i].n : end;
    return end;
}

/* Bytes of a row of the embedding's gradient, as cast; 0: it is dense, as a tied head's part is, or it has no rows alone. */
static size_t grad_row_bytes(const struct mt_layout *l, const struct mt_unit *u, enum mt_dtype dtype)
{
    bool rows = u->kind == MT_UNIT_EMBED && !l->tied && u->n_tensors == 1 && u->trainable;
    return rows ? (size_t)l->cfg.hidden * mt_dtype_size(dtype) : 0;
}

static enum mt_size_class class_of(const struct mt_layout *l, const struct mt_unit *u)
{
    bool vocab = u->kind == MT_UNIT_EMBED || (u->kind == MT_UNIT_HEAD && !l->tied);
    return vocab ? MT_CLASS_VOCAB : u->kind == MT_UNIT_HEAD ? MT_CLASS_NORM : MT_CLASS_LAYER;
}

static void describe_records(struct mt_engine_plan *plan, const struct mt_engine_params *p, size_t unit,
                             const struct mt_records *records)
{
    const struct mt_layout *l = p->layout;
    struct mt_segment segment[MT_MAX_SEGMENTS];
    size_t n = mt_unit_segments(l, unit, p->numerics.dtype, p->max_tokens, segment);
    for (size_t i = 0; i < n; i++) {
        size_t kind = mt_segment_find(l, &segment[i]);
        int64_t offloaded = kind < l->n_segments ? records->layers[kind] : 0;
        struct mt_share share = recorded(plan, p, l->units[unit].layer, offloaded);
        plan->units[unit].record[i] = (struct mt_unit_record){is_empty(share) ? 0 : segment[i].bytes, share};
    }
}

/* Whether the unit's weights need a JOIN after each load. */
static bool is_prepared(const struct mt_engine_params *p, size_t unit)
{
    const struct mt_layout *l = p->layout;
    return mt_unit_f32_tensor(l, unit, p->numerics.dtype) || mt_unit_is_decoded(l, unit, p->numerics.dtype) ||
           (mt_engine_codes_weights(p) && mt_unit_becomes_codes(l, unit));
}

/* The first block with trained parameters, after which so many more have their update under the next forward. */
static int first_trained_block(const struct mt_layout *l)
{
    size_t u = 0;
    while (u + 1 < l->n_units && !l->units[u].trainable)
        u++;
    return l->units[u].block;
}

static bool is_updated_under_backward(const struct mt_engine_params *p, const struct mt_unit *u, int first)
{
    int64_t pending = p->placement.update_pending == MT_AUTO ? 1 : p->placement.update_pending;
    return p->train && p->placement.update == MT_UPDATE_BACKWARD && u->trainable && u->block > first + pending;
}

/* Experts cast what they sum, or a direction of it; with several groups, or layers, these sums are added first. */
static void sum_before_cast(struct mt_unit_shape *s)
{
    for (struct mt_port *port = s->port; port < s->port + s->n_ports; port++)
        if (port->role == MT_ROLE_MOMENTS) {
            port->backward = MT_NO_ACCESS;
        } else if (port->role == MT_ROLE_CAST) {
            port->role = MT_ROLE_GRAD;
            port->backward = MT_SUM;
        }
}

/* Whether the unit is among `some` of all, spread evenly, so that loads of the others are, too. */
static bool is_among(size_t some, size_t u, size_t all)
{
    return (u + 1) * some / all > u * some / all;
}

static void describe_cache(struct mt_unit_shape *s, const struct mt_engine_plan *plan, const struct mt_engine_params *p,
                           size_t unit)
{
    struct mt_unit_cache c = mt_unit_cache(p->layout, unit, p->numerics.dtype, p->cache.block);
    s->weights_stay = is_among(plan->n_stay, unit, p->layout->n_units);
    if (!p->cache.slots || !c.bytes)
        return;
    s->cache_kind = (uint8_t)c.kind;
    s->cache_bytes = p->cache.n[c.kind] * c.bytes;
    s->cache_stays = is_among(plan->n_caches_stay, unit, p->layout->n_units);
}

/* What a row that is computed in chunks keeps. */
static void describe_keys(struct mt_unit_shape *s, const struct mt_engine_params *p, size_t unit)
{
    size_t chunks = mt_row_chunks(&p->numerics);
    struct mt_unit_row row = mt_unit_row(p->layout, unit, p->numerics.dtype, p->max_len, chunks);
    if (chunks == 1)
        return;
    s->key_bytes = row.bytes;
    s->dkey_bytes = row.gradient_bytes;
}

void mt_engine_describe_units(struct mt_engine_plan *plan, const struct mt_engine_params *p)
{
    int first_block = first_trained_block(p->layout);
    const struct mt_layout *l = p->layout;
    const struct mt_records records = mt_records_of(l, &p->placement);
    size_t rows = mt_group_most(mt_engine_groups(p), p->max_micro) * p->max_tokens;
    for (size_t u = 0; u < l->n_units; u++) {
        const struct mt_unit *unit = &l->units[u];
        plan->units[u] = (struct mt_unit_shape){
            .layer = unit->layer,
            .back = (int32_t)(u - unit->weights),
            .block = unit->block,
            .scope = unit->per_step ? MT_SCOPE_GROUP : MT_SCOPE_MICROBATCH,
            .size_class = class_of(l, unit),
            .weight_bytes = mt_unit_slot_bytes(l, u, p->numerics.dtype),
            .prepared = is_prepared(p, u),
            .noisy = p->numerics.mezo.on_load && unit->trainable,
            .link_bytes = link_bytes(p, unit),
            .adapter_bytes = adapters_stay(p, unit) ? mt_unit_adapter_bytes(unit, p->numerics.dtype) : 0,
            .adapter_link_bytes = unit->n_in_planes[MT_RANGE_TRAINED] * mt_dtype_size(p->numerics.dtype),
            .grad_elems = unit->n_grad,
            .grad_out_bytes = trained_end(l, unit) * mt_dtype_size(p->numerics.grad_dtype),
            .grad_row_bytes = grad_row_bytes(l, unit, p->numerics.grad_dtype),
            .update_elems = unit->n_in_planes[MT_RANGE_TRAINED],
            .trainable = unit->trainable,
            .perturbs = mt_engine_variants(p) > 0,
            .moment_bytes = p->train ? mt_unit_moment_bytes(l, u) : 0,
            .grad_in_ring = is_updated_under_backward(p, unit, first_block),
        };
        plan->units[u].n_ports =
            (uint8_t)mt_unit_ports(l, u, p->numerics.dtype, p->max_tokens, rows, plan->units[u].port);
        if (mt_groups_n(mt_engine_groups(p)) > 1 || l->share > 1)
            sum_before_cast(&plan->units[u]);
        describe_cache(&plan->units[u], plan, p, u);
        describe_keys(&plan->units[u], p, u);
        if (!mt_engine_variants(p))
            describe_records(plan, p, u, &records);
    }
    int64_t kept = plan->activations == MT_ACT_KEEP ? l->cfg.n_layers : kept_layers(p);
    if (mt_engine_by_data(p))
        mt_map_gradients(plan->units, l, (int)mt_engine_all_lanes(p), mt_engine_is_owned(p), NULL);
    else
        mt_map_units(plan->units, l, (int)mt_engine_n_lanes(p), l->cfg.n_layers - kept);
    size_t grad_bytes = mt_dtype_size(p->numerics.grad_dtype);
    plan->program.n_values = mt_flow_describe(plan->units, l->n_units, grad_bytes, plan->values);
}
