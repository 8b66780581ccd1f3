/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A model as units with values: each unit's operations from its ports. A unit reads the boundary before it and writes
 * the next; backward updates one gradient of a boundary in place, from the head down. An operation names what it reads
 * before what it writes, each in the order of roles.
 */

#include "base/mem.h"
#include "schedule/unit.h"

const struct mt_role_desc mt_roles[MT_N_ROLES] = {
#define ROLE_ROW(role, kind, life, reach) [MT_ROLE_##role] = {MT_OBJ_##kind, MT_LIFE_##life, MT_REACH_##reach},
    MT_ROLES(ROLE_ROW)
#undef ROLE_ROW
};

enum { NONE = -1 };

struct flow {
    struct mt_unit_shape *units;
    size_t n_units, grad_bytes, slot_bytes; /* slot_bytes: of the largest weights of a layer's unit */
    struct mt_value *values;
    size_t n_values;
    int32_t newest[MT_N_ROLES]; /* value of each role, or NONE */
    int32_t owner[MT_N_ROLES];  /* the unit, or the layer, that it belongs to */
    bool seen[MT_N_ROLES];      /* forward uses it */
};

static int32_t add_value(struct flow *d, enum mt_role role, size_t unit, size_t bytes)
{
    const struct mt_role_desc *r = &mt_roles[role];
    d->values[d->n_values] = (struct mt_value){r->kind, r->life, (int32_t)unit, bytes};
    return (int32_t)d->n_values++;
}

static void use(struct mt_call *c, enum mt_role role, int32_t value, enum mt_access access)
{
    c->use[c->n_uses++] = (struct mt_use){value, (uint8_t)access, (uint8_t)role};
}

/* Bytes of a value of the unit, if the unit's sizes say; else 0. */
static size_t own_bytes(const struct flow *d, const struct mt_unit_shape *s, enum mt_role role)
{
    switch (role) {
    case MT_ROLE_WEIGHTS:
    case MT_ROLE_TABLE:
        return s->weight_bytes;
    case MT_ROLE_GRAD:
    case MT_ROLE_TABLE_GRAD:
        return s->grad_elems * sizeof(float);
    case MT_ROLE_CAST:
        return s->grad_elems * d->grad_bytes;
    case MT_ROLE_MOMENTS:
        return s->moment_bytes;
    default:
        return 0;
    }
}

/* Weights that stay have a pool of their own where a slot for any layer would be twice as large. */
static bool is_small(const struct flow *d, const struct mt_unit_shape *s)
{
    return s->size_class == MT_CLASS_LAYER && 2 * s->weight_bytes <= d->slot_bytes;
}

/* The value of an earlier unit. */
static int32_t value_of_unit(const struct flow *d, enum mt_role role, int32_t unit)
{
    int32_t v = (int32_t)d->n_values - 1;
    while (v > 0 && (d->values[v].unit != unit || d->values[v].kind != mt_roles[role].kind))
        v--;
    return v;
}

static int32_t value_of(struct flow *d, size_t u, const struct mt_port *p)
{
    enum mt_role role = (enum mt_role)p->role;
    enum mt_reach reach = mt_roles[role].reach;
    const struct mt_unit_shape *s = &d->units[u];
    if (reach == MT_REACH_UNIT && s->back) {
        d->units[u - (size_t)s->back].shared = true;
        return value_of_unit(d, role, (int32_t)u - s->back);
    }
    int32_t owner = reach == MT_REACH_MODEL ? 0 : reach == MT_REACH_LAYER ? s->layer : (int32_t)u;
    if (d->newest[role] == NONE || d->owner[role] != owner) {
        d->newest[role] = add_value(d, role, u + (reach == MT_REACH_NEXT), own_bytes(d, s, role));
        if (s->weights_stay && mt_roles[role].kind == MT_OBJ_WEIGHTS) {
            struct mt_value *w = &d->values[d->newest[role]];
            w->life = MT_LIFE_RUN;
            w->size = is_small(d, s) ? MT_POOL_ADAPTERS - MT_POOL_WEIGHTS : 0;
        }
        d->owner[role] = owner;
        d->seen[role] = false;
    }
    int32_t v = d->newest[role];
    d->values[v].bytes = p->bytes > d->values[v].bytes ? p->bytes : d->values[v].bytes;
    d->seen[role] |= p->forward != MT_NO_ACCESS;
    if (reach == MT_REACH_LAYER && !d->seen[role])
        d->values[v].unit = (int32_t)u; /* that of the first use in backward */
    if (reach == MT_REACH_NEXT)
        d->newest[MT_ROLE_X] = v;
    return v;
}

static const struct mt_port *port_of(const struct mt_unit_shape *s, enum mt_role role)
{
    for (int i = 0; i < s->n_ports; i++)
        if (s->port[i].role == role)
            return &s->port[i];
    return NULL;
}

static bool is_asked(uint8_t access, bool written)
{
    return access != MT_NO_ACCESS && (access != MT_READ) == written;
}

/* What the unit's operations only read, or what they write; its ports are in the order of roles. */
static void use_ports(struct flow *d, size_t u, bool written)
{
    struct mt_unit_shape *s = &d->units[u];
    for (const struct mt_port *p = s->port; p < s->port + s->n_ports; p++) {
        if (!is_asked(p->forward, written) && !is_asked(p->backward, written))
            continue;
        int32_t v = value_of(d, u, p);
        if (is_asked(p->forward, written))
            use(&s->forward, (enum mt_role)p->role, v, (enum mt_access)p->forward);
        if (is_asked(p->backward, written))
            use(&s->backward, (enum mt_role)p->role, v, (enum mt_access)p->backward);
    }
}

static void sort_ports(struct mt_unit_shape *s)
{
    for (int i = 1; i < s->n_ports; i++)
        for (int k = i; k > 0 && s->port[k - 1].role > s->port[k].role; k--) {
            struct mt_port other = s->port[k];
            s->port[k] = s->port[k - 1];
            s->port[k - 1] = other;
        }
}

static void add_records(struct flow *d, size_t u, int32_t record[MT_MAX_SEGMENTS])
{
    struct mt_unit_shape *s = &d->units[u];
    for (size_t i = 0; i < MT_MAX_SEGMENTS; i++) {
        record[i] = NONE;
        if (!s->record[i].bytes)
            continue;
        record[i] = add_value(d, mt_record_role(i), u, s->record[i].bytes);
        d->values[record[i]].share = s->record[i].share;
        d->values[record[i]].size = s->record[i].size;
    }
}

static void use_records(struct mt_call *c, const int32_t record[MT_MAX_SEGMENTS], enum mt_access access)
{
    for (size_t i = 0; i < MT_MAX_SEGMENTS; i++)
        if (record[i] != NONE)
            use(c, mt_record_role(i), record[i], access);
}

/* The largest sizes of records, descending. */
static void note_size(size_t size[MT_RECORD_SIZES], size_t bytes)
{
    for (int i = 0; i < MT_RECORD_SIZES && bytes; i++) {
        size_t here = size[i];
        if (here == bytes)
            return;
        if (here < bytes) {
            size[i] = bytes;
            bytes = here;
        }
    }
}

/* Gives each record one of the pools: the one with the smallest buffers that hold it. */
static void divide_records(struct flow *d)
{
    size_t size[MT_RECORD_SIZES] = {0};
    for (size_t u = 0; u < d->n_units; u++)
        for (int i = 0; i < MT_MAX_SEGMENTS; i++)
            note_size(size, d->units[u].record[i].bytes);
    for (size_t u = 0; u < d->n_units; u++)
        for (int i = 0; i < MT_MAX_SEGMENTS; i++) {
            struct mt_unit_record *r = &d->units[u].record[i];
            for (r->size = 0; r->bytes && r->size + 1 < MT_RECORD_SIZES && size[r->size + 1] >= r->bytes;)
                r->size++;
        }
}

/* The unit's adapters, if they stay on the device. */
static void use_adapters(struct flow *d, size_t u)
{
    struct mt_unit_shape *s = &d->units[u];
    if (!s->adapter_bytes)
        return;
    int32_t adapters = add_value(d, MT_ROLE_ADAPTERS, u, s->adapter_bytes);
    use(&s->forward, MT_ROLE_ADAPTERS, adapters, MT_READ);
    if (s->backward.n_uses)
        use(&s->backward, MT_ROLE_ADAPTERS, adapters, MT_READ);
}

/* What the unit has of earlier tokens, to which it adds. */
static void use_cache(struct flow *d, size_t u)
{
    struct mt_unit_shape *s = &d->units[u];
    if (!s->cache_bytes)
        return;
    int32_t cache = add_value(d, MT_ROLE_CACHE, u, s->cache_bytes);
    d->values[cache].life = s->cache_stays ? MT_LIFE_RUN : MT_LIFE_STEP;
    d->values[cache].size = s->cache_kind;
    use(&s->forward, MT_ROLE_CACHE, cache, MT_UPDATE);
}

/* What a row in chunks keeps (struct mt_unit_row): each chunk adds its own, and has a part of the gradients. */
static void use_keys(struct flow *d, size_t u)
{
    struct mt_unit_shape *s = &d->units[u];
    if (!s->key_bytes)
        return;
    int32_t keys = add_value(d, MT_ROLE_KEYS, u, s->key_bytes);
    use(&s->forward, MT_ROLE_KEYS, keys, MT_SUM);
    use(&s->backward, MT_ROLE_KEYS, keys, MT_READ);
    use(&s->backward, MT_ROLE_DKEYS, add_value(d, MT_ROLE_DKEYS, u, s->dkey_bytes), MT_ADD);
}

/* Who decides which experts have rows updates the routing once a group; who has those experts reads it. */
static void mark_lists(struct mt_unit_shape *s)
{
    const struct mt_port *p = port_of(s, MT_ROLE_ROUTING);
    bool once = p && s->scope == MT_SCOPE_GROUP;
    s->makes_lists = once && p->forward & MT_WRITE;
    s->follows_lists = once && p->forward == MT_READ;
}

/* Weights that forward reads and that have trained ones among them, or alone in a buffer of adapters, are replaced by
 * perturbed ones: for each unit that reads them, and of each group. */
static void describe_perturbed(struct flow *d, size_t u)
{
    struct mt_unit_shape *s = &d->units[u];
    s->perturb = (struct mt_call){.op = MT_OP_PERTURB, .scope = MT_SCOPE_GROUP};
    s->perturbed = s->forward;
    for (struct mt_use *k = s->perturbed.use; k < s->perturbed.use + s->perturbed.n_uses; k++) {
        const struct mt_value *v = &d->values[k->value];
        const struct mt_unit_shape *of = &d->units[v->unit];
        bool adapters = v->kind == MT_OBJ_ADAPTERS, weights = v->kind == MT_OBJ_WEIGHTS && !of->adapter_bytes;
        enum mt_role role = adapters ? MT_ROLE_PERTURBED_ADAPTERS : MT_ROLE_PERTURBED;
        if (!of->trainable || !(adapters || weights))
            continue;
        use(&s->perturb, (enum mt_role)k->role, k->value, MT_READ);
        k->value = add_value(d, role, (size_t)v->unit, v->bytes);
        use(&s->perturb, role, k->value, MT_WRITE);
    }
}

static void describe_unit(struct flow *d, size_t u)
{
    struct mt_unit_shape *s = &d->units[u];
    int32_t record[MT_MAX_SEGMENTS];
    s->forward = (struct mt_call){.op = u ? MT_OP_FORWARD : MT_OP_EMBED, .scope = s->scope};
    s->backward = (struct mt_call){.op = u ? MT_OP_BACKWARD : MT_OP_EMBED_BWD, .scope = s->scope};
    s->gather = (struct mt_call){0};
    sort_ports(s);
    add_records(d, u, record);
    use_ports(d, u, false);
    use_records(&s->backward, record, MT_READ);
    use_ports(d, u, true);
    use_records(&s->forward, record, MT_WRITE);
    use_adapters(d, u);
    use_cache(d, u);
    use_keys(d, u);
    mark_lists(s);
}

/* The embedding's rows may be gathered on the host instead. */
static void describe_gather(struct mt_unit_shape *s)
{
    s->gather.op = MT_OP_GATHER;
    for (int k = 0; k < s->forward.n_uses; k++)
        if (s->forward.use[k].role == MT_ROLE_Y)
            s->gather.use[s->gather.n_uses++] = s->forward.use[k];
}

/* What the head reads, without its gradients. */
static void describe_losses(struct mt_unit_shape *head)
{
    head->losses = (struct mt_call){.op = MT_OP_LOSSES};
    for (int k = 0; k < head->forward.n_uses; k++)
        if (head->forward.use[k].access == MT_READ)
            head->losses.use[head->losses.n_uses++] = head->forward.use[k];
}

size_t mt_flow_describe(struct mt_unit_shape *units, size_t n_units, size_t grad_bytes, struct mt_value *values)
{
    struct flow d = {.units = units, .n_units = n_units, .grad_bytes = grad_bytes, .values = values};
    struct mt_unit_shape *head = &units[n_units - 1];
    for (int i = 0; i < MT_N_ROLES; i++)
        d.newest[i] = NONE;
    divide_records(&d);
    for (size_t u = 0; u < n_units; u++)
        d.slot_bytes = MT_MAX(d.slot_bytes, units[u].size_class == MT_CLASS_LAYER ? units[u].weight_bytes : 0);
    for (size_t u = 0; u < n_units; u++)
        describe_unit(&d, u);
    describe_gather(&units[0]);
    describe_losses(head);
    head->forward.op = MT_OP_HEAD; /* it computes the gradients too: logits are too large to keep */
    for (size_t u = 0; u < n_units; u++)
        if (units[u].perturbs)
            describe_perturbed(&d, u);
    return d.n_values;
}
