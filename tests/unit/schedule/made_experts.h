/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <string.h>

#include "pools.h"
#include "schedule/program.h"

/*
 * A small model with units that run once a step: of each layer a router (by micro-batch) that fills the step's rows,
 * routing and sum, lists and two expert units (once a step), and the unit that makes the next boundary (by micro-batch).
 * With adapters, each router has some that stay on the device for the run; those of the first layer are trained.
 */
enum { EXPERTS = 2, PER_LAYER = EXPERTS + 3, MAX_LAYERS = 3, MAX_E_UNITS = 2 + MAX_LAYERS * PER_LAYER };
enum { ROUTER = 1, LISTS, FIRST_EXPERTS, LAST_EXPERTS, COMBINE }; /* units of the first layer */

struct experts {
    struct mt_unit_shape units[MAX_E_UNITS];
    struct mt_value values[(MT_MAX_PORTS + MT_MAX_SEGMENTS + 1) * MAX_E_UNITS];
    struct mt_program_params p;
};

/* The ports of a layer's units, for a micro-batch. */
static const struct mt_port made_ports[][MT_MAX_PORTS] = {
    [ROUTER] = {{MT_ROLE_WEIGHTS, MT_READ, MT_READ},
                {MT_ROLE_X, MT_READ, MT_READ},
                {MT_ROLE_ROWS, MT_FILL, MT_NO_ACCESS, 32},
                {MT_ROLE_SUM, MT_FILL, MT_NO_ACCESS, 64},
                {MT_ROLE_ROUTING, MT_FILL, MT_READ, 8},
                {MT_ROLE_DN, MT_NO_ACCESS, MT_READ, 64},
                {MT_ROLE_DWEIGHTS, MT_NO_ACCESS, MT_READ, 4},
                {MT_ROLE_DX, MT_NO_ACCESS, MT_UPDATE},
                {MT_ROLE_GRAD, MT_NO_ACCESS, MT_SUM}},
    [LISTS] = {{MT_ROLE_ROUTING, MT_UPDATE, MT_NO_ACCESS}},
    [FIRST_EXPERTS] = {{MT_ROLE_WEIGHTS, MT_READ, MT_READ},
                       {MT_ROLE_ROWS, MT_READ, MT_READ},
                       {MT_ROLE_SUM, MT_ADD, MT_NO_ACCESS},
                       {MT_ROLE_ROUTING, MT_READ, MT_READ},
                       {MT_ROLE_DY, MT_NO_ACCESS, MT_READ, 32},
                       {MT_ROLE_DN, MT_NO_ACCESS, MT_ADD},
                       {MT_ROLE_DWEIGHTS, MT_NO_ACCESS, MT_FILL},
                       {MT_ROLE_CAST, MT_NO_ACCESS, MT_WRITE}},
    [COMBINE] = {{MT_ROLE_SUM, MT_READ, MT_NO_ACCESS},
                 {MT_ROLE_Y, MT_WRITE, MT_NO_ACCESS, HIDDEN_BYTES},
                 {MT_ROLE_DX, MT_NO_ACCESS, MT_READ},
                 {MT_ROLE_DY, MT_NO_ACCESS, MT_FILL}},
};

static inline struct mt_unit_shape *add_unit(struct experts *e, const struct mt_port *ports, size_t bytes)
{
    struct mt_unit_shape *s = &e->units[e->p.n_units++];
    *s = (struct mt_unit_shape){.layer = -1, .weight_bytes = bytes, .link_bytes = bytes, .grad_elems = bytes / 2, .grad_out_bytes = bytes,
                                .update_elems = bytes / 2, .trainable = bytes > 0};
    s->n_ports = take_ports(s->port, ports);
    return s;
}

static inline void add_layer(struct experts *e, int32_t layer, bool adapters)
{
    for (int at = ROUTER; at <= COMBINE; at++) {
        bool experts = at >= FIRST_EXPERTS && at <= LAST_EXPERTS;
        struct mt_unit_shape *s = add_unit(e, made_ports[experts ? FIRST_EXPERTS : at], experts ? 1000 : at == ROUTER ? 800 : 0);
        s->layer = layer;
        s->scope = experts || at == LISTS ? MT_SCOPE_GROUP : MT_SCOPE_MICROBATCH;
        for (int i = 0; i < s->n_ports; i++) /* what lives for a step has the rows of all micro-batches */
            s->port[i].bytes *= mt_roles[s->port[i].role].life == MT_LIFE_GROUP ? e->p.n_micro : 1;
        if (at == ROUTER && adapters) {
            s->adapter_bytes = s->adapter_link_bytes = 100;
            s->trainable = layer == 0;
        }
    }
}

static inline void make_experts(struct experts *e, size_t layers, size_t n_micro, bool adapters)
{
    memset(e, 0, sizeof(*e));
    e->p = (struct mt_program_params){.mode = MT_MODE_TRAIN, .n_micro = n_micro, .cast = true, .grad_bytes = 2};
    add_unit(e, embedding_ports, 1200)->size_class = MT_CLASS_VOCAB;
    for (size_t l = 0; l < layers; l++)
        add_layer(e, (int32_t)l, adapters);
    add_unit(e, head_ports, 1200)->size_class = MT_CLASS_VOCAB;
    e->p.n_values = mt_flow_describe(e->units, e->p.n_units, e->p.grad_bytes, e->values);
    e->p.units = e->units;
    e->p.values = e->values;
    take_fewest_buffers(&e->p, e->p.n_buffers[0]);
}

/* A mixture whose experts sum their gradients in FP32 before these are cast. */
static inline void make_mixture(struct experts *e, size_t n_micro, size_t groups)
{
    make_experts(e, 2, n_micro, false);
    e->p.groups = (struct mt_groups){groups, n_micro};
    for (size_t u = 0; u < e->p.n_units; u++)
        for (int i = 0; i < e->units[u].n_ports; i++)
            if (e->units[u].port[i].role == MT_ROLE_CAST) {
                e->units[u].port[i].role = MT_ROLE_GRAD;
                e->units[u].port[i].backward = MT_SUM;
            }
    e->p.n_values = mt_flow_describe(e->units, e->p.n_units, e->p.grad_bytes, e->values);
}
