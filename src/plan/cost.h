/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "engine/engine.h"
#include "machine/machine.h"

/**
 * Prices the COMPUTE instructions of step programs: each is submitted once to a dry engine on a counting
 * device, and the machine's profile gives the times of its device operations. Equal instructions (of equal layers and
 * equal micro-batch sizes) are priced once.
 *
 * Thread-safety: one thread.
 */
struct mt_cost {
    double seconds, flops, bytes; /* flops: of matrix products and attention */
};
typedef struct mt_cost_table mt_cost_table;

struct mt_cost_params {
    const struct mt_engine_params *engine; /* layout and numerics; planes are not used */
    const struct mt_machine *machine;      /* borrowed; NULL: only operations are wanted, for engine->dev's kind */
    /* Optional: told of each operation that is priced, and of its arguments, whose buffers have no memory. */
    void (*on_call)(void *ctx, enum mt_dev_op op, const void *args);
    void *ctx;
};
/** Prices are for full rows of one document each. */
int mt_cost_table_create(mt_cost_table **out, const struct mt_cost_params *p, struct mt_err *err);
/** With the same prices for experts that run as `placement` says, which may have had no memory for the way of t: t
 * itself, or another table that t owns. */
int mt_cost_table_as(mt_cost_table **out, mt_cost_table *t, const struct mt_placement *placement, struct mt_err *err);
void mt_cost_table_destroy(mt_cost_table **t);
int mt_cost_of(mt_cost_table *t, const struct mt_program *prog, const struct mt_instr *in,
               struct mt_cost *out, struct mt_err *err);
/** The distinct operations priced so far; borrowed. */
const struct mt_metered *mt_cost_operations(const mt_cost_table *t, size_t *n);
