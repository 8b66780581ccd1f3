/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A model as units with values. A unit reads the boundary before it and writes the next; backward updates one gradient
 * of a boundary in place, from the head down. In a layer with experts the router fills rows of the whole step, the
 * experts add into a sum, and only the combining unit makes the next boundary, from that sum.
 */
#include <string.h>

#include "schedule/unit.h"

struct flow {
    struct mt_unit_shape *units;
    struct mt_value *values;
    const struct mt_flow *f;
    size_t n_values;
    int32_t x, dx;                            /* newest boundary; the gradient that all boundaries share */
    int32_t table, table_grad;                /* of the embedding */
    int32_t rows, sum, routing;               /* of the layer with experts that is being described */
    int32_t dy, dn, dweights;
};

static int32_t add_value(struct flow *d, enum mt_object_kind kind, enum mt_lifetime life, size_t unit, size_t bytes)
{
    d->values[d->n_values] = (struct mt_value){kind, life, (int32_t)unit, bytes};
    return (int32_t)d->n_values++;
}

static void use(struct mt_call *c, enum mt_use_role role, int32_t value, enum mt_access access)
{
    c->use[c->n_uses++] = (struct mt_use){value, (uint8_t)access, (uint8_t)role};
}

static int32_t weights(struct flow *d, size_t u)
{
    return add_value(d, MT_OBJ_WEIGHTS, MT_LIFE_STEP, u, d->units[u].weight_bytes);
}

/* The unit's adapters, if they stay on the device. */
static void use_adapters(struct flow *d, size_t u)
{
    struct mt_unit_shape *s = &d->units[u];
    if (!s->adapter_bytes)
        return;
    int32_t adapters = add_value(d, MT_OBJ_ADAPTERS, MT_LIFE_RUN, u, s->adapter_bytes);
    use(&s->forward, MT_USE_ADAPTERS, adapters, MT_READ);
    if (s->backward.n_uses)
        use(&s->backward, MT_USE_ADAPTERS, adapters, MT_READ);
}

static int32_t gradient(struct flow *d, size_t u)
{
    return add_value(d, MT_OBJ_GRAD, MT_LIFE_STEP, u, d->units[u].grad_elems * sizeof(float));
}

/* The input of unit u. */
static int32_t boundary(struct flow *d, size_t u)
{
    return add_value(d, MT_OBJ_BOUNDARY, MT_LIFE_MICROBATCH, u, d->f->boundary_bytes);
}

static void describe_embedding(struct flow *d, size_t u)
{
    struct mt_unit_shape *s = &d->units[u];
    s->size_class = MT_CLASS_VOCAB;
    d->table = weights(d, u);
    d->table_grad = gradient(d, u);
    d->x = boundary(d, u + 1);
    s->forward.op = MT_OP_EMBED;
    use(&s->forward, MT_USE_WEIGHTS, d->table, MT_READ);
    use(&s->forward, MT_USE_Y, d->x, MT_WRITE);
    s->gather.op = MT_OP_GATHER;
    use(&s->gather, MT_USE_Y, d->x, MT_WRITE);
    s->backward.op = MT_OP_EMBED_BWD;
    use(&s->backward, MT_USE_DX, d->dx, MT_READ);
    use(&s->backward, MT_USE_GRAD, d->table_grad, MT_ADD);
}

static void use_record(struct flow *d, size_t u)
{
    static const struct {
        enum mt_object_kind kind;
        enum mt_use_role role;
    } of[MT_N_RECORD_PARTS] = {
        [MT_RECORD_ATTENTION] = {MT_OBJ_RECORD_ATTENTION, MT_USE_RECORD_ATTENTION},
        [MT_RECORD_REST] = {MT_OBJ_RECORD, MT_USE_RECORD},
    };
    struct mt_unit_shape *s = &d->units[u];
    for (int i = 0; i < MT_N_RECORD_PARTS; i++) {
        if (!s->record[i].bytes)
            continue;
        int32_t record = add_value(d, of[i].kind, MT_LIFE_MICROBATCH, u, s->record[i].bytes);
        d->values[record].share = s->record[i].share;
        use(&s->forward, of[i].role, record, MT_WRITE);
        use(&s->backward, of[i].role, record, MT_READ);
    }
}

/* A layer or a part of one: from one boundary to the next. */
static void describe_layer(struct flow *d, size_t u)
{
    struct mt_unit_shape *s = &d->units[u];
    int32_t w = weights(d, u), x = d->x;
    d->x = boundary(d, u + 1);
    s->forward.op = MT_OP_FORWARD;
    use(&s->forward, MT_USE_WEIGHTS, w, MT_READ);
    use(&s->forward, MT_USE_X, x, MT_READ);
    use(&s->forward, MT_USE_Y, d->x, MT_WRITE);
    s->backward.op = MT_OP_BACKWARD;
    use(&s->backward, MT_USE_WEIGHTS, w, MT_READ);
    use(&s->backward, MT_USE_X, x, MT_READ);
    use_record(d, u);
    use(&s->backward, MT_USE_DX, d->dx, MT_UPDATE);
    use(&s->backward, MT_USE_GRAD, gradient(d, u), MT_SUM);
    use_adapters(d, u);
}

/* From a boundary to the rows, routing and sum of the experts. */
static void describe_router(struct flow *d, size_t u)
{
    struct mt_unit_shape *s = &d->units[u];
    const struct mt_flow *f = d->f;
    int32_t w = weights(d, u);
    d->rows = add_value(d, MT_OBJ_ROWS, MT_LIFE_STEP, u, f->rows_bytes);
    d->dy = add_value(d, MT_OBJ_ROWS, MT_LIFE_STEP, u, f->rows_bytes);
    d->sum = add_value(d, MT_OBJ_SUM, MT_LIFE_STEP, u, f->sum_bytes);
    d->dn = add_value(d, MT_OBJ_SUM, MT_LIFE_STEP, u, f->sum_bytes);
    d->routing = add_value(d, MT_OBJ_ROUTING, MT_LIFE_STEP, u, f->routing_bytes);
    d->dweights = add_value(d, MT_OBJ_ROUTING, MT_LIFE_STEP, u, f->dweights_bytes);
    s->forward.op = MT_OP_FORWARD;
    use(&s->forward, MT_USE_WEIGHTS, w, MT_READ);
    use(&s->forward, MT_USE_X, d->x, MT_READ);
    use(&s->forward, MT_USE_ROWS, d->rows, MT_FILL);
    use(&s->forward, MT_USE_SUM, d->sum, MT_FILL);
    use(&s->forward, MT_USE_ROUTING, d->routing, MT_FILL);
    s->backward.op = MT_OP_BACKWARD;
    use(&s->backward, MT_USE_WEIGHTS, w, MT_READ);
    use(&s->backward, MT_USE_X, d->x, MT_READ);
    use_record(d, u);
    use(&s->backward, MT_USE_ROUTING, d->routing, MT_READ);
    use(&s->backward, MT_USE_DN, d->dn, MT_READ);
    use(&s->backward, MT_USE_DWEIGHTS, d->dweights, MT_READ);
    use(&s->backward, MT_USE_DX, d->dx, MT_UPDATE);
    use(&s->backward, MT_USE_GRAD, gradient(d, u), MT_SUM);
    use_adapters(d, u);
}

static void describe_lists(struct flow *d, size_t u)
{
    struct mt_unit_shape *s = &d->units[u];
    s->forward = (struct mt_call){.op = MT_OP_FORWARD, .scope = MT_SCOPE_STEP};
    use(&s->forward, MT_USE_ROUTING, d->routing, MT_UPDATE);
}

/* The gradient is cast expert by expert, so there is no FP32 gradient of the whole unit. */
static void describe_experts(struct flow *d, size_t u)
{
    struct mt_unit_shape *s = &d->units[u];
    int32_t w = weights(d, u);
    int32_t cast = add_value(d, MT_OBJ_CAST, MT_LIFE_STEP, u, s->grad_elems * d->f->grad_bytes);
    s->forward = (struct mt_call){.op = MT_OP_FORWARD, .scope = MT_SCOPE_STEP};
    use(&s->forward, MT_USE_WEIGHTS, w, MT_READ);
    use(&s->forward, MT_USE_ROWS, d->rows, MT_READ);
    use(&s->forward, MT_USE_ROUTING, d->routing, MT_READ);
    use(&s->forward, MT_USE_SUM, d->sum, MT_ADD);
    s->backward = (struct mt_call){.op = MT_OP_BACKWARD, .scope = MT_SCOPE_STEP};
    use(&s->backward, MT_USE_WEIGHTS, w, MT_READ);
    use(&s->backward, MT_USE_ROWS, d->rows, MT_READ);
    use(&s->backward, MT_USE_ROUTING, d->routing, MT_READ);
    use(&s->backward, MT_USE_DY, d->dy, MT_READ);
    use(&s->backward, MT_USE_DN, d->dn, MT_ADD);
    use(&s->backward, MT_USE_DWEIGHTS, d->dweights, MT_FILL);
    use(&s->backward, MT_USE_CAST, cast, MT_WRITE);
    use_adapters(d, u);
}

static void describe_combine(struct flow *d, size_t u)
{
    struct mt_unit_shape *s = &d->units[u];
    int32_t unit = (int32_t)u;
    d->x = boundary(d, u + 1);
    d->values[d->dy].unit = d->values[d->dn].unit = d->values[d->dweights].unit = unit; /* for printed programs */
    s->forward.op = MT_OP_FORWARD;
    use(&s->forward, MT_USE_SUM, d->sum, MT_READ);
    use(&s->forward, MT_USE_Y, d->x, MT_WRITE);
    s->backward.op = MT_OP_BACKWARD;
    use(&s->backward, MT_USE_DX, d->dx, MT_READ);
    use(&s->backward, MT_USE_DY, d->dy, MT_FILL);
}

/* Its forward operation computes the gradients too: logits are too large to keep. */
static void describe_head(struct flow *d, size_t u)
{
    struct mt_unit_shape *s = &d->units[u];
    bool tied = d->f->tied;
    int32_t w = weights(d, u), g = gradient(d, u);
    s->size_class = tied ? MT_CLASS_NORM : MT_CLASS_VOCAB;
    s->forward.op = MT_OP_HEAD;
    use(&s->forward, MT_USE_WEIGHTS, w, MT_READ);
    if (tied)
        use(&s->forward, MT_USE_TABLE, d->table, MT_READ);
    use(&s->forward, MT_USE_X, d->x, MT_READ);
    use_adapters(d, u);
    s->logits = s->forward;
    s->logits.op = MT_OP_LOGITS;
    use(&s->forward, MT_USE_DX, d->dx, MT_WRITE);
    use(&s->forward, MT_USE_GRAD, g, MT_SUM);
    if (tied)
        use(&s->forward, MT_USE_TABLE_GRAD, d->table_grad, MT_SUM);
}

size_t mt_flow_describe(struct mt_unit_shape *units, struct mt_value *values, const struct mt_flow *f)
{
    static void (*const describe[])(struct flow *d, size_t u) = {
        [MT_PLACE_EMBEDDING] = describe_embedding, [MT_PLACE_LAYER] = describe_layer,
        [MT_PLACE_ROUTER] = describe_router,       [MT_PLACE_LISTS] = describe_lists,
        [MT_PLACE_EXPERTS] = describe_experts,     [MT_PLACE_COMBINE] = describe_combine,
        [MT_PLACE_HEAD] = describe_head,
    };
    struct flow d = {.units = units, .values = values, .f = f};
    d.dx = add_value(&d, MT_OBJ_DX, MT_LIFE_MICROBATCH, 0, f->boundary_bytes);
    for (size_t u = 0; u < f->n_units; u++) {
        units[u].size_class = MT_CLASS_LAYER;
        units[u].forward = units[u].backward = units[u].logits = units[u].gather = (struct mt_call){0};
        describe[units[u].place](&d, u);
    }
    return d.n_values;
}
