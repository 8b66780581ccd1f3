/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "schedule/objects.h"

/**
 * A program before placement: the computations, in order, over objects without buffers. It has no loads, stores or
 * joins, except that each STORE_GRAD follows the instruction that completes its operand.
 */
struct mt_draft {
    const struct mt_program_params *params;
    struct mt_program prog; /* objects and pools filled; instrs are the draft */
};

int mt_draft_write(struct mt_draft *d, const struct mt_program_params *params, struct mt_err *err);
int mt_draft_place(struct mt_program *out, struct mt_draft *d, struct mt_err *err);

/** Whether any plane or spilled activation is kept on a disk. */
bool mt_program_uses_disk(const struct mt_program_params *p);
/** Whether updates follow under backward: gradients of some units leave to a ring of buffers, not to planes. */
bool mt_program_has_ring(const struct mt_program_params *p);
/** Raises n[] of the ring's pools to what a program needs, and two more of a kind with as many units, so that a
 * gradient leaves while the one before is updated. */
void mt_program_ring_buffers(const struct mt_program_params *p, int n[MT_N_POOLS]);
/**
 * Whether only the rows of the step's tokens leave the device of the unit's gradient. GRAD_CAST compacts them into the
 * FP32 gradient, STORE_GRAD copies them to the beginning of the plane, from where GATHER reads them, and UNPACK moves
 * them to their places before the update, after which the plane is zero again.
 */
bool mt_program_compacts(const struct mt_program_params *p, size_t unit);
/**
 * Elements of the trained planes that are updated and loaded at once, so that a part is loaded while the next is
 * updated: a part of those of the unit for which forward waits first, the first layer, else all of the unit's.
 */
size_t mt_program_part_elems(const struct mt_program_params *p, size_t unit);
/** -EINVAL: a pool has more buffers than MT_MAX_BUFFERS. */
int mt_program_check_pools(const struct mt_program_params *p, struct mt_err *err);
/** The second placer: host staging between device and disk (stage.c). Replaces the instructions of *p. */
int mt_program_stage(struct mt_program *p, const struct mt_program_params *params, struct mt_err *err);
/** The part of params->host of a program of all hosts' lanes, with its messages (hosts.c). Replaces *p. */
int mt_program_take_part(struct mt_program *p, const struct mt_program_params *params, struct mt_err *err);
/** Drops waits implied by others, and marks the instructions that are waited for: each of those needs an event. */
int mt_program_prune_waits(struct mt_program *p, struct mt_err *err);

/** The unit's operation in the forward pass of the mode; n_uses is 0 if it has none. */
const struct mt_call *mt_forward_call(const struct mt_program_params *p, size_t unit);
/** What makes its weights for the forward pass of a group; n_uses is 0 if they are as loaded. */
const struct mt_call *mt_perturb_call(const struct mt_program_params *p, size_t unit);
/** An instruction without waits and operands, on the opcode's queue. */
struct mt_instr mt_instr_make(enum mt_opcode op, size_t unit, size_t mb);
