/* SPDX-License-Identifier: Apache-2.0 */
#ifndef MT_TEST_MADE_PROGRAM_H
#define MT_TEST_MADE_PROGRAM_H

#include <string.h>

#include "pools.h"
#include "schedule/program.h"

/* A small model of made-up sizes, for tests that build step programs. */
enum { MAX_UNITS = 16 };

struct fixture {
    struct mt_unit_shape units[MAX_UNITS];
    struct mt_value values[(MT_MAX_PORTS + MT_MAX_SEGMENTS + 1) * MAX_UNITS];
    struct mt_program_params p;
    bool tied;
    bool keeps[MAX_UNITS]; /* units whose records are kept */
};

/* Describes the units again; call it after a change that affects their operations. */
static inline void describe(struct fixture *f)
{
    size_t head = f->p.n_units - 1;
    for (size_t u = 0; u < f->p.n_units; u++) {
        struct mt_unit_shape *s = &f->units[u];
        s->record[0].bytes = f->keeps[u] && u && u < head ? 256 - 64 * (u & 1) : 0; /* halves of layers differ */
        s->size_class = !u ? MT_CLASS_VOCAB : u < head ? MT_CLASS_LAYER : f->tied ? MT_CLASS_NORM : MT_CLASS_VOCAB;
        s->n_ports = take_ports(s->port, !u ? embedding_ports : u < head ? layer_ports : f->tied ? tied_head_ports : head_ports);
    }
    f->units[0].grad_row_bytes = f->tied ? 0 : 10;
    f->p.n_values = mt_flow_describe(f->units, f->p.n_units, f->p.grad_bytes, f->values);
    f->p.values = f->values;
}

static inline void make(struct fixture *f, size_t layers, size_t n_micro)
{
    memset(f, 0, sizeof(*f));
    for (size_t u = 0; u < layers + 2; u++)
        f->units[u] = (struct mt_unit_shape){
            .weight_bytes = 1000,
            .link_bytes = 1000,
            .grad_elems = 500,
            .grad_out_bytes = 1000,
            .update_elems = 500,
            .trainable = true,
        };
    f->p = (struct mt_program_params){
        .mode = MT_MODE_TRAIN,
        .units = f->units,
        .n_units = layers + 2,
        .n_micro = n_micro,
        .cast = true,
        .grad_bytes = 2,
    };
    describe(f);
    take_fewest_buffers(&f->p, f->p.n_buffers[0]);
}

/* Instructions of the kind. */
static inline size_t count(const struct mt_program *p, enum mt_opcode op)
{
    size_t n = 0;
    for (size_t i = 0; i < p->n_instrs; i++)
        n += p->instrs[i].op == op;
    return n;
}

static inline int build_and_check(struct fixture *f, struct mt_program *prog, struct mt_err *err)
{
    int rc = mt_program_build(prog, &f->p, err);
    return rc ? rc : mt_program_check(prog, err);
}

/* Planes on the disk from the unit `from` on: bits of `what`. */
enum { STATES = 1, WEIGHTS = 2, GRADS = 4, SPILLS = 8 };
static inline void put_on_disk(struct fixture *f, unsigned what, size_t from)
{
    f->p.piece_elems = f->p.piece_align = MT_PIECE_ALIGN;
    f->p.spill_disk = what & SPILLS;
    for (size_t u = from; u < f->p.n_units; u++) {
        struct mt_unit_shape *s = &f->units[u];
        s->grad_elems = s->update_elems = 5000 + 900 * u; /* at least three pieces */
        s->staged_bytes = s->staged_bytes_written = what & WEIGHTS ? 2 * MT_PIECE_ALIGN * ((s->grad_elems + MT_PIECE_ALIGN - 1) / MT_PIECE_ALIGN) : 0;
        s->state_bytes_written = what & STATES ? 10 * MT_PIECE_ALIGN : 0;
        s->grad_on_disk = what & GRADS && s->trainable;
        s->state_bytes = s->state_bytes_written + (s->grad_on_disk ? 2 * MT_PIECE_ALIGN : 0);
    }
    describe(f);
}

#endif
