/* SPDX-License-Identifier: Apache-2.0 */
#include "engine/program.h"

#include <stdio.h>
#include <stdlib.h>

static const char *const opcode_names[MT_N_OPCODES] = {
    "adam",    "load",   "store",    "join",      "zero",      "poison",     "embed", "forward",
    "head",    "logits", "backward", "embed_bwd", "grad_cast", "store_grad", "stats",
};

static const char *const pool_names[MT_N_POOLS] = {
    "weight slots",     "vocabulary weights",   "norm weights",   "boundaries",
    "activations",      "gradients",            "vocabulary gradients", "norm gradients",
    "gradient casts",   "vocabulary gradient casts", "norm gradient casts",
};

static const char *const queue_names[MT_N_QUEUES] = {"compute", "h2d", "d2h", "host"};
static const char *const kind_names[MT_N_OBJECT_KINDS] = {"w", "x", "dx", "rec", "g", "c"};

const char *mt_opcode_name(enum mt_opcode op)
{
    return opcode_names[op];
}

const char *mt_pool_id_name(enum mt_pool_id id)
{
    return pool_names[id];
}

void mt_program_finish(struct mt_program *p)
{
    free(p->objects);
    free(p->instrs);
    *p = (struct mt_program){0};
}

size_t mt_program_link_bytes(const struct mt_program *p, enum mt_queue q)
{
    size_t sum = 0;
    for (size_t i = 0; i < p->n_instrs; i++)
        if (p->instrs[i].queue == q)
            sum += p->instrs[i].bytes;
    return sum;
}

void mt_instr_format(char *buf, size_t len, const struct mt_program *p, size_t i)
{
    const struct mt_instr *in = &p->instrs[i];
    int at = snprintf(buf, len, "%zu %s unit %d mb %d [", i, opcode_names[in->op], in->unit, in->mb);
    for (int k = 0; k < in->n_operands && at >= 0 && (size_t)at < len; k++) {
        const struct mt_object *o = &p->objects[in->operand[k].object];
        at += snprintf(buf + at, len - (size_t)at, "%s%s%d.%d@%d", k ? " " : "", kind_names[o->kind],
                       o->unit, o->mb, in->operand[k].buffer);
    }
    if (at >= 0 && (size_t)at < len)
        at += snprintf(buf + at, len - (size_t)at, "]");
    for (int q = 0; q < MT_N_QUEUES && at >= 0 && (size_t)at < len; q++)
        if (in->wait[q] >= 0)
            at += snprintf(buf + at, len - (size_t)at, " waits %s %d", queue_names[q], in->wait[q]);
}
