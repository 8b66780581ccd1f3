/* SPDX-License-Identifier: Apache-2.0 */
/* What follows from a layout: which units are alike, bytes of records and other values, operations of a token. */
#include <assert.h>
#include <stdio.h>

#include "base/mem.h"
#include "model/layout.h"
#include "model/part.h"
#include "model/rule.h"

static bool same_param(const struct mt_param *a, const struct mt_param *b)
{
    return a->at == b->at && a->n == b->n && a->trainable == b->trainable && a->grad == b->grad;
}

static bool same_adapter(const struct mt_adapter *a, const struct mt_adapter *b)
{
    bool same = a && b && a->in == b->in && a->rank == b->rank && a->n_targets == b->n_targets &&
                a->dora == b->dora && a->dropout == b->dropout && same_param(&a->a, &b->a) &&
                same_adapter(a->next, b->next);
    for (size_t i = 0; same && i < a->n_targets; i++) {
        const struct mt_adapter_target *x = &a->target[i], *y = &b->target[i];
        same = x->col == y->col && x->out == y->out && x->rank == y->rank && same_param(&x->b, &y->b) &&
               same_param(&x->magnitude, &y->magnitude);
    }
    return same || (!a && !b);
}

static bool parts_alike(const struct mt_part *a, const struct mt_part *b)
{
    bool same = a->kind == b->kind && a->spec == b->spec && a->n_experts == b->n_experts;
    for (int i = 0; i < MT_PART_MAX_PARAMS; i++)
        same = same && same_param(&a->param[i], &b->param[i]) && same_adapter(a->param[i].adapter, b->param[i].adapter);
    for (int e = 0; same && e < a->n_experts; e++)
        for (int i = 0; i < MT_EXPERT_MAX_PARAMS; i++)
            same = same && same_param(&a->expert[e][i], &b->expert[e][i]) &&
                   same_adapter(a->expert[e][i].adapter, b->expert[e][i].adapter);
    return same;
}

bool mt_layout_alike(const struct mt_layout *l, size_t a, size_t b)
{
    const struct mt_unit *x = &l->units[a], *y = &l->units[b];
    bool same = x->kind == y->kind && x->n_elems == y->n_elems && x->trainable == y->trainable &&
                x->n_parts == y->n_parts;
    for (int k = 0; k < MT_N_RANGE_KINDS; k++)
        same = same && x->n_in_planes[k] == y->n_in_planes[k];
    for (size_t i = 0; same && i < x->n_parts; i++)
        same = parts_alike(&l->parts[x->first_part + i], &l->parts[y->first_part + i]);
    return same;
}

size_t mt_hidden_bytes(const struct mt_part_shape *s)
{
    return mt_align_up(s->max_tokens * (size_t)s->cfg->hidden * mt_dtype_size(s->dtype), MT_RECORD_ALIGN);
}

static struct mt_port *find_port(struct mt_port *port, size_t n, enum mt_role role)
{
    size_t i = 0;
    while (i < n && port[i].role != role)
        i++;
    return i < n ? &port[i] : NULL;
}

/* Adds a port of one of the unit's parts, unless another has one of that role. */
static size_t add_port(struct mt_port port[MT_MAX_PORTS], size_t n, const struct mt_part_port *p,
                       const struct mt_part_shape *s)
{
    struct mt_port *old = find_port(port, n, p->role);
    size_t bytes = p->bytes ? p->bytes(s) : 0;
    if (p->has && !p->has(s->cfg))
        return n;
    if (old) {
        old->bytes = MT_MAX(old->bytes, bytes);
        return n;
    }
    assert(n < MT_MAX_PORTS);
    port[n] = (struct mt_port){(uint8_t)p->role, (uint8_t)p->forward, (uint8_t)p->backward, bytes};
    return n + 1;
}

/* A part's output that the next part of the unit takes is no value of the unit. */
static size_t drop_output(struct mt_port port[MT_MAX_PORTS], size_t n)
{
    struct mt_port *y = find_port(port, n, MT_ROLE_Y);
    if (y)
        *y = port[n - 1];
    return n - (y != NULL);
}

size_t mt_unit_ports(const struct mt_layout *l, size_t unit, enum mt_dtype dtype, size_t max_tokens, size_t group_rows,
                     struct mt_port port[MT_MAX_PORTS])
{
    const struct mt_unit *u = &l->units[unit];
    size_t n = 0;
    for (size_t i = u->first_part; i < u->first_part + u->n_parts; i++) {
        const struct mt_part_shape shape = {&l->cfg, l->parts[i].spec, dtype, max_tokens, group_rows};
        n = drop_output(port, n);
        for (const struct mt_part_port *p = l->parts[i].kind->port; p->role != MT_ROLE_NONE; p++)
            n = add_port(port, n, p, &shape);
    }
    return n;
}

size_t mt_layout_value_bytes(const struct mt_layout *l, enum mt_role role, enum mt_dtype dtype, size_t max_tokens,
                             size_t group_rows)
{
    size_t bytes = 0;
    for (size_t u = 0; u < l->n_units; u++) {
        struct mt_port port[MT_MAX_PORTS], *p;
        p = find_port(port, mt_unit_ports(l, u, dtype, max_tokens, group_rows, port), role);
        bytes = p ? MT_MAX(bytes, p->bytes) : bytes;
    }
    return bytes;
}

size_t mt_unit_segments(const struct mt_layout *l, size_t unit, enum mt_dtype dtype, size_t max_tokens,
                        struct mt_segment segment[MT_MAX_SEGMENTS])
{
    const struct mt_unit *u = &l->units[unit];
    void *unused[MT_RECIPE_VALUES];
    size_t n = 0;
    for (size_t i = u->first_part; i < u->first_part + u->n_parts; i++) {
        const struct mt_part_shape shape = {&l->cfg, l->parts[i].spec, dtype, max_tokens, 0, l->parts[i].recipe};
        const struct mt_part_kind *k = l->parts[i].kind;
        struct mt_part_record record = {.bytes = {0}};
        if (shape.recipe)
            mt_recipe_lay_out_record(shape.recipe, &shape, &record, unused);
        else if (k->record_bytes)
            k->record_bytes(&shape, &record);
        if (i > u->first_part) /* the hidden state between two parts */
            record.bytes[0] += mt_hidden_bytes(&shape);
        for (size_t s = 0; s < mt_part_n_segments(k); s++) {
            assert(n < MT_MAX_SEGMENTS);
            segment[n++] = (struct mt_segment){k, s, record.bytes[s]};
        }
    }
    return n;
}

struct mt_unit_cache mt_recipe_cache(const struct mt_recipe *r, enum mt_dtype dtype, size_t block)
{
    struct mt_unit_cache c = {.window = (size_t)r->spec->window};
    struct mt_delta_kept kept = {0};
    size_t keys = 0, channels = 0;
    for (int k = 0; k < r->n_nodes; k++) {
        const struct mt_node *n = &r->node[k];
        if (n->rule == &mt_rule_attend)
            keys += r->spec->latent_cache ? mt_view_width(&n->in[3]) + (size_t)r->spec->rope_dim
                                          : mt_view_width(&n->in[1]) + mt_view_width(&n->in[2]);
        else if (n->rule == &mt_rule_delta)
            kept = mt_delta_kept(&(struct mt_delta_rule){.dtype = dtype, .k = mt_rule_shape(r, &n->in[1]),
                                                         .v = mt_rule_shape(r, &n->in[2])});
        else if (n->rule == &mt_rule_short_conv)
            channels = r->value[n->out[0].value].width;
    }
    size_t states = block ? kept.bytes : kept.k; /* between chunks of a row no rows are kept */
    c.kind = states ? MT_CACHE_STATES : c.window ? MT_CACHE_WINDOW : MT_CACHE_ALL;
    c.inputs = mt_align_up(states, (size_t)64);
    channels *= states ? (size_t)r->spec->delta.taps - 1 : 0;
    c.bytes = states ? mt_align_up(c.inputs + channels * mt_dtype_size(dtype), (size_t)64)
                     : block * keys * mt_dtype_size(dtype);
    c.window = keys ? c.window : 0;
    return c;
}

struct mt_unit_cache mt_unit_cache(const struct mt_layout *l, size_t unit, enum mt_dtype dtype, size_t block)
{
    const struct mt_unit *u = &l->units[unit];
    struct mt_unit_cache c = {.bytes = 0};
    for (size_t i = u->first_part; i < u->first_part + u->n_parts && !c.bytes; i++)
        if (l->parts[i].recipe)
            c = mt_recipe_cache(l->parts[i].recipe, dtype, block);
    return c;
}

struct mt_unit_row mt_unit_row(const struct mt_layout *l, size_t unit, enum mt_dtype dtype, size_t tokens,
                               size_t chunks)
{
    struct mt_unit_cache c = mt_unit_cache(l, unit, dtype, 0), gradient = mt_unit_cache(l, unit, MT_F32, 0);
    if (c.kind == MT_CACHE_STATES)
        return (struct mt_unit_row){(chunks - 1) * c.bytes, 2 * gradient.bytes};
    return (struct mt_unit_row){mt_unit_cache(l, unit, dtype, tokens).bytes,
                                mt_unit_cache(l, unit, MT_F32, tokens).bytes};
}

bool mt_layout_caches(const struct mt_layout *l, size_t max_len)
{
    bool caches = true;
    size_t limit;
    for (int i = 0; i < l->cfg.n_ropes; i++)
        caches &= mt_rope_lengths(&l->cfg.rope[i], max_len, &limit) == MT_ROPE_ONE_TABLE;
    return caches;
}

const char *mt_layout_unchunked(const struct mt_layout *l, size_t max_len)
{
    size_t limit;
    for (int i = 0; i < l->cfg.n_ropes; i++)
        if (mt_rope_lengths(&l->cfg.rope[i], max_len, &limit) == MT_ROPE_A_TABLE_EACH)
            return "a rotary embedding that has other angles for each length";
    return NULL;
}

size_t mt_segment_find(const struct mt_layout *l, const struct mt_segment *s)
{
    size_t i = 0;
    while (i < l->n_segments && (l->segment[i].kind != s->kind || l->segment[i].of_part != s->of_part))
        i++;
    return i;
}

void mt_segment_name(const struct mt_segment *s, char *buf, size_t len)
{
    const char *name = s->kind->segment[s->of_part];
    snprintf(buf, len, "%s%s%s", s->kind->name, name ? "." : "", name ? name : "");
}

bool mt_segment_attends(const struct mt_segment *s)
{
    return s->kind->attends;
}

double mt_layout_flops_per_token(const struct mt_layout *l, size_t seq_len)
{
    double macs = 0;
    for (size_t i = 0; i < l->n_parts; i++)
        if (l->parts[i].recipe)
            macs += mt_recipe_macs(l->parts[i].recipe, seq_len);
        else if (l->parts[i].kind->macs_per_token)
            macs += l->parts[i].kind->macs_per_token(&l->cfg, &l->parts[i], seq_len);
    if (l->n_adapters) /* the base has no weight gradients */
        return 2 * 2 * macs + 3 * 2 * (double)l->n_trained;
    return 3 * 2 * macs; /* backward is twice forward */
}
