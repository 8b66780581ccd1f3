/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/err.h"
#include "schedule/unit.h"

/**
 * A step as data. A program is an array of instructions over objects in pools of equal device buffers, as a compiler's
 * code is over values in registers. The builder (build.c) writes the computations, the placer (place.c) gives every
 * object a buffer and adds the loads and stores needed because buffers are few, the checker (check.c) proves the result
 * free of races, the executor (engine/exec.c) runs it. Weight slots, boundaries, activation records and gradient
 * buffers are all pools; "keep" and "offload" differ only in how many buffers a pool has.
 *
 * Each instruction depends only on earlier ones. Each queue runs its instructions in program order; the two disk queues
 * start theirs in that order, with many under way at once, and a wait for one of them is a wait for all before it.
 *
 * Planes and spilled activations may be on a disk. Then a second placer (stage.c) adds host memory as a tier: pools of
 * staging buffers, the disk reads and writes of these, and updates cut into pieces.
 */

struct mt_object {
    enum mt_object_kind kind;
    enum mt_pool_id pool;
    int32_t unit, mb;
    int32_t piece; /* of optimizer states */
    uint8_t lane;  /* with `resident`: the lane on which it is; of what is spilled to the disk: that which spills it */
    int32_t parts; /* number of contributions (MT_PART) that complete it; 0: a single write does */
    bool resident; /* lives for the run: the kth such object of a pool is in the pool's buffer k in every program */
    size_t bytes;
    int64_t spill; /* offset of its home in spill memory (MT_OBJ_SPILLED: in spill space on the disk); -1: none */
};

struct mt_pool_shape {
    int n;        /* buffers */
    size_t bytes; /* of each */
};

enum { MT_MAX_BUFFERS = INT16_MAX, MT_NO_WAIT = -1 };

struct mt_operand {
    int32_t object;
    int16_t buffer; /* of the object's pool; given by the placer */
    uint8_t access; /* enum mt_access */
    uint8_t role;   /* enum mt_role */
};

struct mt_instr {
    uint8_t op, queue, n_operands; /* queue: enum mt_queue */
    uint8_t lane; /* whose device queue it is, and whose buffers its operands in device pools have; of a READ: whose
                     load needs it */
    bool signals; /* an instruction of another queue waits for it */
    bool update;  /* part of the pending update: finished even if the run is abandoned */
    bool own;     /* UPDATE: with the gradients of this step, of units [block, block_end) */
    bool decides; /* the first of those: by their gradients' sums */
    bool once;    /* loads a resident object that nothing changes: skipped if an earlier run has loaded it */
    bool if_rows; /* weights of experts, after the layer's lists: skipped if no row was sent to the unit's experts */
    bool sends;   /* PASS, SHARE: from this host, else to it */
    uint16_t hosts; /* of those: a bit for each host that it goes to, or for that from which it comes */
    int32_t unit, mb;
    int32_t piece; /* of updates, and of loads of weights in parts: which part of the unit's planes */
    int32_t block, block_end;
    struct mt_operand operand[MT_MAX_OPERANDS];
    int32_t wait[MT_MAX_QUEUES]; /* by queue number: its newest instruction that must have ended, or MT_NO_WAIT */
    size_t bytes;              /* moved, for copies; with row_bytes at most */
    size_t row_bytes;          /* STORE_GRAD, UNPACK: of a row, where only those of the step's tokens leave the device */
    size_t first, elems;       /* ADAM: parameters updated; LOAD of weights: of a part, else 0. In the trained planes */
};
#define MT_NO_WAITS {[0 ... MT_MAX_QUEUES - 1] = MT_NO_WAIT}

static inline int mt_instr_queue(const struct mt_instr *in)
{
    return mt_queue_number(in->lane, (enum mt_queue)in->queue);
}

struct mt_program {
    struct mt_pool_shape pool[MT_MAX_LANES][MT_N_POOLS]; /* host pools: of the first */
    int n_lanes;
    int host;                /* whose program it is: its part of the step that hosts share */
    bool owned;              /* as in mt_program_params */
    struct mt_object *objects;
    size_t n_objects, cap_objects;
    struct mt_instr *instrs;
    size_t n_instrs, cap_instrs;
    size_t spill_bytes;      /* spill space in host memory */
    size_t sum_bytes;        /* part of it that is for what is never spilled to the disk: sums of groups */
    size_t disk_spill_bytes; /* spill space on the disk */
    size_t piece_elems;      /* elements of a piece of an update from disk */
    size_t n_units, n_micro;
    struct mt_groups groups;
    size_t chunks;           /* as in mt_program_params */
    bool backward;
    bool balances; /* backward needs the rows that experts have in the whole step: each lane has a BALANCE before */
};

void mt_program_finish(struct mt_program *p);

/** ZEROTH: the pending update, and forward alone, each group with perturbed weights of its own. LOGITS: evaluation of
 * few rows. UPDATE: only the pending update. */
enum mt_program_mode { MT_MODE_TRAIN, MT_MODE_ZEROTH, MT_MODE_EVAL, MT_MODE_LOGITS, MT_MODE_UPDATE };

struct mt_program_params {
    enum mt_program_mode mode;
    const struct mt_unit_shape *units;
    size_t n_units;
    const struct mt_value *values;
    size_t n_values;
    size_t n_micro;
    struct mt_groups groups; /* of micro-batches; only the first ones may be in a step */
    size_t chunks;   /* micro-batches of a row, all in one group: forward is in their order, backward in the reverse
                        one; 0: a micro-batch has whole rows */
    bool weighs_rows; /* the head needs the losses of all chunks of a row before its gradients */
    bool one_ring;   /* units of the vocabulary's class share the layers' buffers */
    bool join;       /* weights are loaded as hi and lo, and joined after each load */
    bool cast;       /* gradients are cast into separate buffers; else in place */
    bool gather;     /* rows of the embedding are gathered on the host where that is possible (mt_program_gathers) */
    bool poison;     /* dead buffers are overwritten, so that a stale read shows */
    size_t grad_bytes;            /* of a gradient element as cast */
    size_t count_bytes;           /* of the rows that experts have in a group, if backward needs those of all groups;
                                     0: it does not. Of several lanes only by_data */
    size_t piece_elems;           /* of updates from disk: a multiple of piece_align */
    size_t piece_align;           /* elements that are whole pages of every plane, a multiple of MT_PIECE_ALIGN */
    bool draws_apart;             /* caches are in programs of MT_MODE_LOGITS alone; buffers have room for them */
    size_t most_spill;            /* of several hosts: spill memory that one should do with; 0: any. The same for all */
    bool spill_disk;              /* activations that leave the device may be spilled to the disk */
    int n_lanes;                  /* 0: one */
    bool by_data;                 /* lanes share the groups, not the units: a unit's lanes are where its gradient is added
                                     up, cast and stored */
    int n_hosts;                  /* that have equal shares of the lanes, with by_data; 0: one */
    int host;                     /* whose program is built */
    bool owned;                   /* of several hosts: a unit is updated by the host of its lane_back alone, which sends
                                     the others its weights; else its gradient goes to all, and each updates it */
    int n_buffers[MT_MAX_LANES][MT_N_POOLS]; /* of each pool; at least what one instruction needs; host pools: [0], of
                                                each host */
};
static inline int mt_program_lanes(const struct mt_program_params *p)
{
    return p->n_lanes ? p->n_lanes : 1;
}

static inline int mt_program_hosts(const struct mt_program_params *p)
{
    return p->n_hosts ? p->n_hosts : 1;
}
/** Lanes of each host; and the host of a lane. */
static inline int mt_program_own_lanes(const struct mt_program_params *p)
{
    return mt_program_lanes(p) / mt_program_hosts(p);
}
static inline int mt_program_host_of(const struct mt_program_params *p, int lane)
{
    return lane / mt_program_own_lanes(p);
}

/** The lane of a micro-batch, if lanes share the groups. */
static inline int mt_micro_lane(const struct mt_program_params *p, size_t mb)
{
    return (int)(mt_group_of(p->groups, mb) * (size_t)mt_program_lanes(p) / mt_groups_n(p->groups));
}

/** The host that adds up and casts a unit's gradient, and, if units have owners, is that. */
static inline int mt_program_owner(const struct mt_program_params *p, size_t unit)
{
    return mt_program_host_of(p, p->units[unit].lane_back);
}

/** How many units the host owns. */
static inline size_t mt_program_n_owned(const struct mt_program_params *p, int host)
{
    size_t n = 0;
    for (size_t u = 0; u < p->n_units; u++)
        n += mt_program_owner(p, u) == host;
    return n;
}

/** Bytes of a unit's weights as all hosts need them after an update: those that are loaded. */
static inline size_t mt_program_renewed_bytes(const struct mt_program_params *p, size_t unit)
{
    return p->units[unit].update_elems * (p->join ? 4 : 2);
}

/** The lane of a group. */
static inline int mt_group_lane(const struct mt_program_params *p, size_t group)
{
    return mt_micro_lane(p, mt_group_first(p->groups, group));
}

/** Buffers beyond which more are of no use (everything resident), if one lane had all units. */
void mt_program_max_buffers(const struct mt_program_params *p, int n[MT_N_POOLS]);
/** Bytes of one buffer of each pool; device pools: of the lane's units, or of the largest on any lane. */
enum { MT_ALL_LANES = -1 };
void mt_program_buffer_bytes(const struct mt_program_params *p, int lane, size_t bytes[MT_N_POOLS]);
/** Both at once, for one lane: 0 bytes of a pool that it does not use. least: fewest buffers of each pool with which a
 * program can be built. */
void mt_program_size_pools(const struct mt_program_params *p, int lane, size_t bytes[MT_N_POOLS],
                           int least[MT_N_POOLS], int most[MT_N_POOLS]);
/** Sets the entries of host pools, which depend on where planes are; reads those of device pools. */
void mt_program_host_buffer_bytes(const struct mt_program_params *p, size_t bytes[MT_N_POOLS]);

/**
 * Builds and places a program; with several hosts the part of `host`, with the messages between them. -ENOSPC (names
 * the pool): a pool is too small. -E2BIG: the step has more instructions than a program can number. -EINVAL: a pool has
 * more buffers than MT_MAX_BUFFERS; an operation that runs once a group uses a micro-batch's value; a value other than
 * weights and adapters lives for the run; the units of a mixture's layer are on several lanes; lanes that do not share the
 * groups need the rows of experts in the whole step; or several hosts have drives, or updates under backward.
 */
int mt_program_build(struct mt_program *out, const struct mt_program_params *params,
                     struct mt_err *err);
/**
 * Whether the embedding's forward is GATHER, on the host: it writes the first boundary to its home, with the pending update
 * of just those rows, so forward need not wait for the update of the whole embedding, which comes last. Needs all
 * of the embedding's planes in host memory.
 */
bool mt_program_gathers(const struct mt_program_params *p);
/**
 * The same in two parts, so that one may first see what is spilled and then say where planes are. mt_program_place()
 * makes what the device does; of where planes and spills are it reads only what mt_program_placed_for() is made of.
 * While that has not changed, mt_program_complete() adds what is staged, for host pools as they are in *params then.
 * Of several hosts a placed program has all that any of them does. mt_program_complete() finishes *p if it fails.
 */
int mt_program_place(struct mt_program *out, const struct mt_program_params *params, struct mt_err *err);
unsigned mt_program_placed_for(const struct mt_program_params *params);
int mt_program_complete(struct mt_program *p, const struct mt_program_params *params, struct mt_err *err);

/** Whether the object is loaded from the planes of its unit's weights: all of them, or its adapters. */
static inline bool mt_object_is_of_planes(const struct mt_object *o)
{
    return mt_kinds[o->kind].device && mt_kinds[o->kind].home == MT_HOME_PLANE && !mt_kinds[o->kind].returns;
}

/**
 * Proves, from the instructions alone, that every read sees the newest content of its object, that no buffer or home
 * is overwritten before its last reader and no copy read before it is complete, that an object to which several
 * operations contribute (a gradient, rows of a group) is read only after the last of them, that sums of groups are
 * added as the tree of struct mt_groups says, each once, that objects that live
 * for the run keep their buffers, that weights are loaded only after their update, that those of experts are
 * skipped only after their rows are known, and that backward knows the rows of the whole step if it needs them.
 * -EPROTO names the two instructions of the first fault.
 */
int mt_program_check(const struct mt_program *p, struct mt_err *err);
/**
 * The same of the programs of all hosts, [n] by host, run together: each message is sent and received in turn, of the
 * same content, complete; every sum of groups is passed on to one host; every gradient reaches all; and the rows of
 * experts reach all whose backward needs them.
 */
int mt_program_check_hosts(const struct mt_program *const *p, int n, struct mt_err *err);

/** A number for a program: different programs have different ones, as a rule. */
uint64_t mt_program_hash(const struct mt_program *p, uint64_t seed);

/** Whether the instruction makes a layer's lists of the rows that go to each expert, of its micro-batch's group. */
bool mt_instr_makes_lists(const struct mt_instr *in);
/** Whether the instruction stores what the planes of the next step must have: from it on, the step is finished. */
bool mt_instr_returns(const struct mt_program *p, const struct mt_instr *in);

/** Bytes copied by queue q in a run of the program after the first. */
size_t mt_program_link_bytes(const struct mt_program *p, enum mt_queue q);

/** The use of a READ or WRITE. */
enum mt_disk_use mt_instr_disk_use(const struct mt_program *p, const struct mt_instr *in);
struct mt_disk_traffic {
    uint64_t read[MT_N_DISK_USES], written[MT_N_DISK_USES];
};
struct mt_disk_traffic mt_program_disk_traffic(const struct mt_program *p);

/** One line: "12 backward unit 3 mb 1 [w3@0 x3.1@2 ...] waits h2d 10". */
void mt_instr_format(char *buf, size_t len, const struct mt_program *p, size_t i);
