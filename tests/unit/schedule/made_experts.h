/* SPDX-License-Identifier: Apache-2.0 */
#ifndef MT_TEST_MADE_EXPERTS_H
#define MT_TEST_MADE_EXPERTS_H

#include <string.h>

#include "schedule/program.h"

/*
 * A small model with units that run once a step: of each layer a router (by micro-batch) that fills the step's rows,
 * routing and sum, lists and two expert units (once a step), and the unit that makes the next boundary (by micro-batch).
 * With adapters there are two more units before all of these, one trained and one frozen: their weights stay on the
 * device for the run, and every router uses them.
 */
enum { EXPERTS = 2, PER_LAYER = EXPERTS + 3, ADAPTERS = 2, MAX_LAYERS = 3, MAX_E_UNITS = 2 + ADAPTERS + MAX_LAYERS * PER_LAYER };
enum { ROUTER = 1, LISTS, FIRST_EXPERTS, LAST_EXPERTS, COMBINE }; /* units of the first layer, without adapters */

struct experts {
    struct mt_unit_shape units[MAX_E_UNITS];
    struct mt_value values[11 * MAX_E_UNITS + 1];
    struct mt_program_params p;
};

static inline void use(struct mt_call *c, int32_t value, enum mt_access access)
{
    c->use[c->n_uses++] = (struct mt_use){value, (uint8_t)access, MT_USE_NONE};
}

static inline void add_unit(struct experts *e, enum mt_unit_place place, size_t bytes)
{
    e->units[e->p.n_units++] = (struct mt_unit_shape){.place = place, .weight_bytes = bytes, .link_bytes = bytes, .grad_elems = bytes / 2, .grad_out_bytes = bytes,
                                                      .update_elems = bytes / 2, .trainable = bytes > 0};
}

static inline int32_t add_value(struct experts *e, enum mt_object_kind kind, enum mt_lifetime life, size_t unit, size_t bytes)
{
    e->values[e->p.n_values] = (struct mt_value){kind, life, (int32_t)unit, bytes};
    return (int32_t)e->p.n_values++;
}

/* Units after the embedding that all routers use. */
static inline void insert_adapters(struct experts *e)
{
    memmove(e->units + 1 + ADAPTERS, e->units + 1, (e->p.n_units - 1) * sizeof(e->units[0]));
    e->p.n_units += ADAPTERS;
    for (size_t v = 0; v < e->p.n_values; v++)
        e->values[v].unit += e->values[v].unit > 0 ? ADAPTERS : 0;
    for (size_t k = 1; k <= ADAPTERS; k++) {
        e->units[k] = (struct mt_unit_shape){.size_class = MT_CLASS_RESIDENT, .weight_bytes = 100, .link_bytes = 100, .grad_elems = 50, .grad_out_bytes = 100,
                                             .update_elems = 50, .trainable = k == 1};
        int32_t w = add_value(e, MT_OBJ_WEIGHTS, MT_LIFE_RUN, k, 100), g = add_value(e, MT_OBJ_GRAD, MT_LIFE_STEP, k, 200);
        for (size_t u = 0; u < e->p.n_units; u++) {
            struct mt_unit_shape *s = &e->units[u];
            if (s->place != MT_PLACE_ROUTER)
                continue;
            use(&s->forward, w, MT_READ);
            use(&s->backward, w, MT_READ);
            if (k == 1)
                use(&s->backward, g, MT_ADD);
        }
    }
}

static inline void make_experts(struct experts *e, size_t layers, size_t n_micro, bool adapters)
{
    memset(e, 0, sizeof(*e));
    e->p = (struct mt_program_params){.mode = MT_MODE_TRAIN, .n_micro = n_micro, .cast = true, .grad_bytes = 2};
    add_unit(e, MT_PLACE_EMBEDDING, 1200);
    for (size_t l = 0; l < layers; l++) {
        add_unit(e, MT_PLACE_ROUTER, 800);
        add_unit(e, MT_PLACE_LISTS, 0);
        for (int i = 0; i < EXPERTS; i++)
            add_unit(e, MT_PLACE_EXPERTS, 1000);
        add_unit(e, MT_PLACE_COMBINE, 0);
    }
    add_unit(e, MT_PLACE_HEAD, 1200);
    e->p.n_values = mt_flow_describe(e->units, e->values,
                                     &(struct mt_flow){.n_units = e->p.n_units, .boundary_bytes = 64, .grad_bytes = 2, .rows_bytes = 32 * n_micro,
                                                       .sum_bytes = 64 * n_micro, .routing_bytes = 8 * n_micro, .dweights_bytes = 4 * n_micro});
    if (adapters)
        insert_adapters(e);
    e->p.units = e->units;
    e->p.values = e->values;
    mt_program_min_buffers(&e->p, e->p.n_buffers);
}

#endif
