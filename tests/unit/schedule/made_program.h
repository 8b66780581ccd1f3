/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <string.h>

#include "base/mem.h"
#include "pools.h"
#include "schedule/program.h"

static inline uint32_t next_random(uint32_t *seed)
{
    *seed = *seed * 1664525 + 1013904223;
    return *seed >> 8;
}

/* A small model of made-up sizes, for tests that build step programs. */
enum { MAX_UNITS = 16 };

struct fixture {
    struct mt_unit_shape units[MAX_UNITS];
    struct mt_value values[(MT_MAX_PORTS + MT_MAX_SEGMENTS + 2) * MAX_UNITS];
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

/* Of each lane's pools the fewest buffers that will do and so many more, or of more than 2 as many as are of use. */
static inline void take_lane_buffers(struct mt_program_params *p, int more)
{
    size_t bytes[MT_N_POOLS];
    int least[MT_N_POOLS], most[MT_N_POOLS];
    for (int lane = 0; lane < mt_program_lanes(p); lane++) {
        mt_program_size_pools(p, lane, bytes, least, most);
        for (int i = 0; i < MT_N_POOLS; i++)
            p->n_buffers[lane][i] = more > 2 ? most[i] : MT_MIN(least[i] + more, MT_MAX(least[i], most[i]));
    }
}

/* Adds to a list of n what a program computes, in order, by what it writes; returns how many there are then. */
enum { MOST_WRITES = 20000 };
static inline size_t list_writes(const struct mt_program *p, uint64_t *list, size_t n)
{
    for (size_t i = 0; i < p->n_instrs; i++) {
        const struct mt_instr *in = &p->instrs[i];
        if (in->queue != MT_Q_COMPUTE || in->op == MT_OP_POISON || in->op == MT_OP_JOIN)
            continue;
        for (int k = 0; k < in->n_operands; k++) {
            const struct mt_object *o = &p->objects[in->operand[k].object];
            uint64_t object = (uint64_t)o->kind << 56 | (uint64_t)o->unit << 48 | (uint64_t)o->mb << 40;
            if (in->operand[k].access & MT_WRITE && n < MOST_WRITES)
                list[n++] = object | (uint64_t)in->op << 16 | (uint64_t)in->unit << 8 | (uint64_t)in->mb;
        }
    }
    return n;
}

/* A copy to change: there is space for an instruction more. */
static inline struct mt_program copy_of(const struct mt_program *p)
{
    struct mt_program c = *p;
    c.instrs = mt_calloc(p->n_instrs + 1, sizeof(*c.instrs));
    c.objects = mt_calloc(p->n_objects, sizeof(*c.objects));
    assert_true(c.instrs && c.objects);
    memcpy(c.instrs, p->instrs, p->n_instrs * sizeof(*c.instrs));
    memcpy(c.objects, p->objects, p->n_objects * sizeof(*c.objects));
    return c;
}

/* Takes instruction i out; what waited for it waits for its queue's instruction before. */
static inline void take_out(struct mt_program *p, size_t i)
{
    int32_t before = (int32_t)i - 1, q = mt_instr_queue(&p->instrs[i]);
    while (before >= 0 && mt_instr_queue(&p->instrs[before]) != q)
        before--;
    if (before >= 0)
        p->instrs[before].signals = true;
    memmove(p->instrs + i, p->instrs + i + 1, (p->n_instrs - i - 1) * sizeof(*p->instrs));
    p->n_instrs--;
    for (size_t k = i; k < p->n_instrs; k++)
        for (int w = 0; w < MT_MAX_QUEUES; w++) {
            int32_t *wait = &p->instrs[k].wait[w];
            *wait = *wait == (int32_t)i ? before : *wait - (*wait > (int32_t)i);
        }
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
