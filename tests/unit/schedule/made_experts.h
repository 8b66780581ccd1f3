/* SPDX-License-Identifier: Apache-2.0 */
#ifndef MT_TEST_MADE_EXPERTS_H
#define MT_TEST_MADE_EXPERTS_H

#include <string.h>

#include "schedule/program.h"

/*
 * A small model with units that run once a step, shaped as a mixture of experts: of each layer an attention unit (by
 * micro-batch) that fills the step's rows, routing and sum, two expert units (once a step) that add into the sum, and a
 * unit without weights that makes the next boundary of it (by micro-batch). With adapters, two units come before all of
 * these whose weights stay on the device for the run and which every attention unit uses: one trained, one frozen.
 */
enum { EXPERTS = 2, PER_LAYER = EXPERTS + 2, ADAPTERS = 2, MAX_LAYERS = 3, MAX_E_UNITS = 4 + MAX_LAYERS * PER_LAYER, MAX_E_VALUES = 8 * MAX_E_UNITS };

struct experts {
    struct mt_unit_shape units[MAX_E_UNITS];
    struct mt_value values[MAX_E_VALUES];
    struct mt_program_params p;
    int32_t w[MAX_E_UNITS], g[MAX_E_UNITS]; /* values */
    size_t first;                           /* unit of the first layer */
};

static inline int32_t add_value(struct experts *e, enum mt_object_kind kind, enum mt_lifetime life, size_t unit, size_t bytes)
{
    e->values[e->p.n_values] = (struct mt_value){kind, life, (int32_t)unit, bytes};
    return (int32_t)e->p.n_values++;
}

static inline void use(struct mt_call *c, int32_t value, enum mt_access access)
{
    c->use[c->n_uses++] = (struct mt_use){value, (uint8_t)access};
}

static inline struct mt_unit_shape *add_unit(struct experts *e, enum mt_size_class c, size_t bytes)
{
    size_t u = e->p.n_units++;
    struct mt_unit_shape *s = &e->units[u];
    *s = (struct mt_unit_shape){.size_class = c, .weight_bytes = bytes, .link_bytes = bytes, .grad_elems = bytes / 2, .grad_out_bytes = bytes, .update_elems = bytes / 2,
                                .trainable = bytes > 0};
    if (bytes) {
        e->w[u] = add_value(e, MT_OBJ_WEIGHTS, c == MT_CLASS_RESIDENT ? MT_LIFE_RUN : MT_LIFE_STEP, u, bytes);
        e->g[u] = add_value(e, MT_OBJ_GRAD, MT_LIFE_STEP, u, 2 * bytes);
    }
    return s;
}

/* A layer from boundary x to the boundary that it returns. */
static inline int32_t add_layer(struct experts *e, int32_t x, int32_t dx)
{
    size_t u = e->p.n_units, n = e->p.n_micro;
    int32_t rows = add_value(e, MT_OBJ_ROWS, MT_LIFE_STEP, u, 32 * n), routing = add_value(e, MT_OBJ_ROUTING, MT_LIFE_STEP, u, 8 * n);
    int32_t sum = add_value(e, MT_OBJ_SUM, MT_LIFE_STEP, u, 64 * n), dn = add_value(e, MT_OBJ_SUM, MT_LIFE_STEP, u, 64 * n);
    int32_t dy = add_value(e, MT_OBJ_ROWS, MT_LIFE_STEP, u, 32 * n);
    struct mt_unit_shape *a = add_unit(e, MT_CLASS_LAYER, 800);
    a->forward = (struct mt_call){.op = MT_OP_FORWARD};
    use(&a->forward, e->w[u], MT_READ);
    use(&a->forward, x, MT_READ);
    use(&a->forward, rows, MT_FILL);
    use(&a->forward, routing, MT_FILL);
    use(&a->forward, sum, MT_FILL);
    a->backward = (struct mt_call){.op = MT_OP_BACKWARD};
    use(&a->backward, e->w[u], MT_READ);
    use(&a->backward, x, MT_READ);
    use(&a->backward, routing, MT_READ);
    use(&a->backward, dn, MT_READ);
    use(&a->backward, dx, MT_UPDATE);
    use(&a->backward, e->g[u], MT_ADD);
    for (size_t k = 1; k < e->first; k++) { /* adapters */
        use(&a->forward, e->w[k], MT_READ);
        use(&a->backward, e->w[k], MT_READ);
    }
    if (e->first > 1)
        use(&a->backward, e->g[1], MT_ADD);
    for (int i = 0; i < EXPERTS; i++) {
        size_t v = e->p.n_units;
        struct mt_unit_shape *s = add_unit(e, MT_CLASS_LAYER, 1000);
        s->forward = (struct mt_call){.op = MT_OP_FORWARD, .scope = MT_SCOPE_STEP};
        use(&s->forward, e->w[v], MT_READ);
        use(&s->forward, rows, MT_READ);
        use(&s->forward, routing, MT_READ);
        use(&s->forward, sum, MT_ADD);
        s->backward = (struct mt_call){.op = MT_OP_BACKWARD, .scope = MT_SCOPE_STEP};
        use(&s->backward, e->w[v], MT_READ);
        use(&s->backward, rows, MT_READ);
        use(&s->backward, routing, MT_READ);
        use(&s->backward, dy, MT_READ);
        use(&s->backward, dn, MT_ADD);
        use(&s->backward, e->g[v], MT_ADD);
    }
    struct mt_unit_shape *f = add_unit(e, MT_CLASS_LAYER, 0);
    int32_t y = add_value(e, MT_OBJ_BOUNDARY, MT_LIFE_MICROBATCH, e->p.n_units, 64);
    f->forward = (struct mt_call){.op = MT_OP_FORWARD};
    use(&f->forward, sum, MT_READ);
    use(&f->forward, y, MT_WRITE);
    f->backward = (struct mt_call){.op = MT_OP_BACKWARD};
    use(&f->backward, dx, MT_READ);
    use(&f->backward, dy, MT_FILL);
    return y;
}

static inline void make_experts(struct experts *e, size_t layers, size_t n_micro, bool adapters)
{
    memset(e, 0, sizeof(*e));
    e->p = (struct mt_program_params){.mode = MT_MODE_TRAIN, .n_micro = n_micro, .cast = true, .grad_bytes = 2};
    int32_t dx = add_value(e, MT_OBJ_DX, MT_LIFE_MICROBATCH, 0, 64);
    struct mt_unit_shape *embed = add_unit(e, MT_CLASS_VOCAB, 1200);
    int32_t x = add_value(e, MT_OBJ_BOUNDARY, MT_LIFE_MICROBATCH, 1, 64);
    embed->forward = (struct mt_call){.op = MT_OP_EMBED};
    use(&embed->forward, e->w[0], MT_READ);
    use(&embed->forward, x, MT_WRITE);
    embed->backward = (struct mt_call){.op = MT_OP_EMBED_BWD};
    use(&embed->backward, dx, MT_READ);
    use(&embed->backward, e->g[0], MT_ADD);
    for (int k = 0; adapters && k < ADAPTERS; k++)
        add_unit(e, MT_CLASS_RESIDENT, 100)->trainable = k == 0;
    e->first = e->p.n_units;
    for (size_t l = 0; l < layers; l++)
        x = add_layer(e, x, dx);
    size_t h = e->p.n_units;
    struct mt_unit_shape *head = add_unit(e, MT_CLASS_VOCAB, 1200);
    head->forward = (struct mt_call){.op = MT_OP_HEAD};
    use(&head->forward, e->w[h], MT_READ);
    use(&head->forward, x, MT_READ);
    use(&head->forward, dx, MT_WRITE);
    use(&head->forward, e->g[h], MT_ADD);
    e->p.units = e->units;
    e->p.values = e->values;
    mt_program_min_buffers(&e->p, e->p.n_buffers);
}

#endif
