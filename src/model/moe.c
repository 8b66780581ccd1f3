/* SPDX-License-Identifier: Apache-2.0 */
/* Shared by the parts of a mixture of experts: the routing of a group, and its counts on the host. */
#include "model/moe.h"

#include "base/mem.h"
#include "model/part.h"
#include "model/rule.h"

size_t mt_rows_bytes(const struct mt_part_shape *s)
{
    return mt_align_up(s->group_rows * mt_moe_row(s->cfg) * mt_dtype_size(s->dtype), MT_RECORD_ALIGN);
}

size_t mt_sum_bytes(const struct mt_part_shape *s)
{
    return mt_align_up(s->group_rows * mt_moe_row(s->cfg) * sizeof(float), MT_RECORD_ALIGN);
}

size_t mt_residual_bytes(const struct mt_part_shape *s)
{
    return mt_align_up(s->group_rows * (size_t)s->cfg->hidden * mt_dtype_size(s->dtype), MT_RECORD_ALIGN);
}

size_t mt_expert_tile_rows(const struct mt_model_params *p, mt_device *dev)
{
    return mt_align_up(MT_MIN(mt_model_group_rows(p), (size_t)MT_EXPERT_TILE), mt_device_limits(dev)->row_bucket);
}

size_t mt_routing_bytes(const struct mt_part_shape *s)
{
    struct mt_routing t;
    return mt_routing_layout(&t, &s->cfg->moe, s->group_rows, NULL);
}

size_t mt_routing_weights_bytes(const struct mt_part_shape *s)
{
    return mt_align_up(s->group_rows * (size_t)s->cfg->moe.top_k * sizeof(float), MT_RECORD_ALIGN);
}

size_t mt_routing_layout(struct mt_routing *out, const struct mt_moe *moe, size_t rows, void *base)
{
    size_t at = 0, entries = rows * (size_t)moe->top_k, experts = (size_t)moe->n_experts + 1;
    out->weights = mt_take(base, &at, entries * sizeof(float));
    out->ids = mt_take(base, &at, entries * sizeof(uint16_t));
    out->counts = mt_take(base, &at, experts * sizeof(int32_t));
    out->starts = mt_take(base, &at, experts * sizeof(int32_t));
    out->list = mt_take(base, &at, entries * sizeof(int32_t));
    out->places = mt_take(base, &at, entries * sizeof(int32_t));
    return at;
}

size_t mt_model_rows_in_use(const mt_model *m, size_t mb)
{
    size_t group = mt_group_of(m->p.groups, mb), end = MT_MIN(mt_group_first(m->p.groups, group + 1), m->n_micro);
    return m->p.assumed_rows ? m->p.assumed_rows : (end - mt_group_first(m->p.groups, group)) * m->p.max_tokens;
}

/* Elements of a layer: counts, then starts, then places. */
static size_t n_counts(const struct mt_moe *moe)
{
    return 3 * ((size_t)moe->n_experts + 1);
}

size_t mt_model_counts_bytes(const struct mt_model_params *p)
{
    const struct mt_hf_config *c = &p->layout->cfg;
    const struct mt_moe *moe = &c->moe;
    size_t layers = moe->n_experts ? (size_t)c->n_layers : 0;
    size_t of_groups = mt_groups_n(p->groups) * layers * n_counts(moe) * sizeof(int32_t);
    return of_groups + (size_t)moe->n_experts * sizeof(float); /* and shares_host */
}

static int32_t *counts_of(const mt_model *m, int layer, size_t group)
{
    const struct mt_hf_config *c = &m->layout->cfg;
    return m->counts + (group * (size_t)c->n_layers + (size_t)layer) * n_counts(&c->moe);
}

void *mt_model_group_counts(const mt_model *m, size_t group, size_t *bytes)
{
    const struct mt_hf_config *c = &m->layout->cfg;
    *bytes = c->moe.n_experts ? (size_t)c->n_layers * n_counts(&c->moe) * sizeof(int32_t) : 0;
    return *bytes ? counts_of(m, 0, group) : NULL;
}

size_t mt_model_prob_sum_bytes(const struct mt_model_params *p)
{
    return mt_align_up((size_t)p->layout->cfg.moe.n_experts * sizeof(float), MT_RECORD_ALIGN);
}

float *mt_model_prob_sum(const mt_model *m, char *base, size_t group)
{
    size_t back = (mt_groups_n(m->p.groups) - group) * mt_model_prob_sum_bytes(&m->p);
    return (float *)(void *)(base + m->stats_bytes - back);
}

static size_t groups_in_use(const mt_model *m)
{
    return mt_groups_in_use(m->p.groups, m->n_micro);
}

/* Rows of the step without padding, times the number of layers with routers. */
static double routed_rows(const mt_model *m)
{
    double rows = 0, layers = 0;
    for (size_t i = 0; i < m->n_micro; i++)
        rows += (double)(m->inputs[i].n_tokens - m->inputs[i].n_padding);
    for (int64_t i = 0; i < m->layout->cfg.n_layers; i++)
        layers += mt_layer_of(&m->layout->cfg, i)->is_mixture;
    return rows * layers;
}

/* Of all rows the share that an expert had; a row is counted for each of its top_k experts. */
static float share_of(int64_t rows, double routed)
{
    return (float)((double)rows / routed);
}

void mt_model_add_routed(const mt_model *m, size_t group, int64_t *rows)
{
    const struct mt_hf_config *c = &m->layout->cfg;
    for (int i = 0; i < (int)c->n_layers; i++)
        for (int64_t e = 0; e < c->moe.n_experts && mt_layer_of(c, i)->is_mixture; e++)
            rows[e] += counts_of(m, i, group)[e];
}

void mt_model_set_routed(mt_model *m, const int64_t *rows)
{
    double routed = routed_rows(m);
    for (int64_t e = 0; e < m->layout->cfg.moe.n_experts; e++)
        m->shares_host[e] = share_of(rows[e], routed);
}

int mt_model_balance(mt_model *m, struct mt_err *err)
{
    size_t bytes = (size_t)m->layout->cfg.moe.n_experts * sizeof(float);
    return mt_device_copy(m->dev, MT_STREAM_COMPUTE,
                          &(struct mt_copy){m->shares, bytes, m->shares_host, bytes, bytes, 1}, err);
}

float mt_model_balance_scale(const mt_model *m)
{
    return (float)(m->p.router_aux_loss * (double)m->layout->cfg.moe.n_experts / routed_rows(m));
}

void mt_model_add_probabilities(const mt_model *m, size_t group, double *sum)
{
    const float *own = mt_model_prob_sum(m, m->stats_host, group);
    for (int64_t e = 0; e < m->layout->cfg.moe.n_experts; e++)
        sum[e] += (double)own[e];
}

double mt_model_aux_loss(const mt_model *m, const int64_t *rows, const double *probabilities)
{
    double sum = 0, n = (double)m->layout->cfg.moe.n_experts, routed = routed_rows(m);
    for (int64_t e = 0; e < m->layout->cfg.moe.n_experts; e++)
        sum += (double)share_of(rows[e], routed) * probabilities[e];
    return n * sum / routed;
}

int mt_model_take_counts(mt_model *m, int layer, size_t mb, const struct mt_routing *t, struct mt_err *err)
{
    size_t n = (size_t)m->layout->cfg.moe.n_experts + 1;
    size_t group = mt_group_of(m->p.groups, mb), bucket = mt_device_limits(m->dev)->row_bucket;
    int32_t *counts = counts_of(m, layer, group), *starts = counts + n, *places = starts + n;
    if (m->p.assumed_rows)
        return 0;
    int rc = mt_model_copy(m, counts, t->counts, n * sizeof(int32_t), err)
          ?: mt_event_record(m->dev, m->counts_ready, MT_STREAM_COMPUTE, err)
          ?: mt_event_sync(m->dev, m->counts_ready, err);
    for (size_t i = 0; i < n && !rc; i++) {
        starts[i] = i ? starts[i - 1] + counts[i - 1] : 0;
        places[i] = i ? places[i - 1] + (int32_t)mt_align_up((size_t)counts[i - 1], bucket) : 0;
    }
    return rc;
}

/*
 * Rows of an expert where routing is not known: an equal share of them, padded as in a step. A count ends anywhere in a
 * bucket, so that half a bucket is padding on average: some experts have a bucket more than others.
 */
static size_t assumed_rows(size_t rows, const struct mt_moe *moe, size_t bucket, int expert)
{
    size_t mean = mt_div_up(rows * (size_t)moe->top_k, (size_t)moe->n_experts) + bucket / 2, at = (size_t)expert;
    bool more = (at + 1) * (mean % bucket) / bucket > at * (mean % bucket) / bucket;
    return MT_MIN(MT_MAX(mean / bucket + more, (size_t)1) * bucket, mt_align_up(rows, bucket));
}

struct mt_expert_list mt_model_expert_list(const mt_model *m, int layer, int expert, size_t mb)
{
    const struct mt_moe *moe = &m->layout->cfg.moe;
    size_t rows = m->p.assumed_rows, bucket = mt_device_limits(m->dev)->row_bucket;
    const int32_t *counts = counts_of(m, layer, mt_group_of(m->p.groups, mb)), *starts = counts + moe->n_experts + 1;
    const int32_t *places = starts + moe->n_experts + 1;
    if (!rows)
        return (struct mt_expert_list){(size_t)starts[expert], (size_t)counts[expert], (size_t)places[expert]};
    return (struct mt_expert_list){0, MT_MIN(assumed_rows(rows, moe, bucket, expert), rows), 0};
}

bool mt_model_experts_have_rows(const mt_model *m, int layer, int first, int end, size_t mb)
{
    bool any = false;
    for (int e = first; e < end; e++)
        any |= mt_model_expert_list(m, layer, e, mb).n > 0;
    return any;
}

void mt_model_add_expert_rows(const mt_model *m, int layer, size_t group, int32_t *rows)
{
    const struct mt_hf_config *c = &m->layout->cfg;
    for (int64_t e = 0; e < c->moe.n_experts && mt_layer_of(c, layer)->is_mixture; e++)
        rows[e] += counts_of(m, layer, group)[e];
}

/* Of all groups of the step. */
static bool has_rows(const mt_model *m, int layer, int expert)
{
    bool any = false;
    for (size_t group = 0; group < groups_in_use(m); group++)
        any |= mt_model_expert_list(m, layer, expert, mt_group_first(m->p.groups, group)).n > 0;
    return any;
}

bool mt_model_unit_is_idle(const mt_model *m, size_t unit)
{
    const struct mt_unit *u = &m->layout->units[unit];
    for (const struct mt_part *p = &m->layout->parts[u->first_part], *end = p + u->n_parts; p < end; p++) {
        if (!p->kind->per_group)
            return false;
        for (int e = p->first_expert; e < p->first_expert + p->n_experts; e++)
            if (has_rows(m, p->layer, e))
                return false;
    }
    return u->n_parts > 0;
}

static bool has_bad_rows(const mt_model *m, int layer)
{
    bool any = false;
    for (size_t group = 0; group < groups_in_use(m); group++)
        any |= counts_of(m, layer, group)[m->layout->cfg.moe.n_experts] != 0;
    return any;
}

const char *mt_model_bad_router(const mt_model *m, int layer)
{
    const struct mt_layout *l = m->layout;
    for (const struct mt_part *p = l->parts; p < l->parts + l->n_parts; p++) {
        if (!p->kind->routes || p->layer != mt_layer_sharing(layer, l->share) || !has_bad_rows(m, layer))
            continue;
        for (size_t t = 0; t < l->n_tensors; t++)
            if (l->tensors[t].param == &p->param[MT_ROUTER_WEIGHT])
                return l->tensors[t].name;
    }
    return NULL;
}
