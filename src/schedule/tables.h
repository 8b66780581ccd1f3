/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdbool.h>

#include "device/device.h"
#include "settings/settings.h"

/**
 * Properties of each queue, pool, kind of object and opcode of a step program. Nothing may depend on the order of an
 * enum: read a value's properties from its row. A new queue, pool, kind or opcode is a row here.
 */

enum mt_queue {
    MT_Q_COMPUTE,
    MT_Q_H2D,
    MT_Q_D2H,
    MT_Q_HOST,
    MT_Q_DISK_READ,
    MT_Q_DISK_WRITE,
    MT_Q_NET,
    MT_N_QUEUES,
};

/**
 * A lane is a device and its queues; the other queues are one each for all lanes. A queue's number is its kind (enum
 * mt_queue) on the first lane and for those that lanes share, and follows these for the device queues of other lanes.
 * Lanes are of all hosts that share a step.
 */
enum { MT_MAX_LANES = 2 * MT_MAX_DEVICES, MT_MAX_QUEUES = MT_N_QUEUES + (MT_MAX_LANES - 1) * MT_N_STREAMS };

/** Instructions of a queue start in program order. */
struct mt_queue_desc {
    const char *name;      /* in programs: "h2d" */
    const char *title;     /* in plans and traces: "H2D link" */
    const char *thread;    /* name of the thread that issues them; NULL: the thread that runs the step */
    bool device;           /* they are submitted to `stream`; else the queue's thread executes them */
    enum mt_stream stream;
    bool disk;             /* they are disk transfers */
    bool ends_in_order;    /* else many are under way at once, and a wait for one is a wait for all before it */
};
extern const struct mt_queue_desc mt_queues[MT_N_QUEUES];

/** Queues of a program of so many lanes: their numbers are less. */
static inline int mt_n_queues(int n_lanes)
{
    return MT_N_QUEUES + (n_lanes - 1) * MT_N_STREAMS;
}
static inline int mt_queue_number(int lane, enum mt_queue kind)
{
    bool other = lane > 0 && mt_queues[kind].device;
    return other ? MT_N_QUEUES + (lane - 1) * MT_N_STREAMS + (int)mt_queues[kind].stream : (int)kind;
}
/** Of a queue that lanes share: 0. */
static inline int mt_queue_lane(int number)
{
    return number < MT_N_QUEUES ? 0 : 1 + (number - MT_N_QUEUES) / MT_N_STREAMS;
}
enum mt_queue mt_queue_kind(int number);

/** Units with buffers of similar sizes share pools. */
enum mt_size_class {
    MT_CLASS_LAYER,
    MT_CLASS_VOCAB,
    MT_CLASS_NORM,
    MT_N_CLASSES,
};

/** Records of so many sizes have pools of their own; smaller ones are with the smallest of these. */
enum { MT_RECORD_SIZES = 6 };

enum mt_pool_id {
    MT_POOL_WEIGHTS,       /* decoder layers or parts of them: the slot ring */
    MT_POOL_WEIGHTS_VOCAB, /* embedding and untied head, if they do not share the ring */
    MT_POOL_WEIGHTS_NORM,  /* a tied head's final norm */
    MT_POOL_ADAPTERS,      /* adapters that stay on the device for the run, and small weights that do */
    MT_POOL_BOUNDARY,      /* boundaries and their gradients */
    MT_POOL_RECORD,        /* a pool for each of some sizes of records, the largest first */
    MT_POOL_RECORD_LAST = MT_POOL_RECORD + MT_RECORD_SIZES - 1,
    MT_POOL_ROWS,          /* rows of all micro-batches of a group */
    MT_POOL_SUM,
    MT_POOL_ROUTING,
    MT_POOL_GRAD,
    MT_POOL_GRAD_VOCAB,
    MT_POOL_GRAD_NORM,
    MT_POOL_CAST,
    MT_POOL_CAST_VOCAB,
    MT_POOL_CAST_NORM,
    MT_POOL_CACHE,         /* keys and values of earlier tokens; of layers with a window; states of recurrences */
    MT_POOL_CACHE_WINDOW,
    MT_POOL_CACHE_STATES,
    MT_POOL_MOMENTS,       /* optimizer states of a unit that the device reads and writes */
    MT_POOL_STATE,         /* host: pieces of optimizer states */
    MT_POOL_STAGED,        /* host: weights between disk and device */
    MT_POOL_STAGED_VOCAB,
    MT_POOL_STAGED_NORM,
    MT_POOL_GRAD_OUT,      /* host: gradients between device and disk */
    MT_POOL_GRAD_OUT_VOCAB,
    MT_POOL_GRAD_OUT_NORM,
    MT_POOL_SPILLED,       /* host: boundaries and their gradients between device and disk */
    MT_POOL_SPILLED_RECORD,
    MT_POOL_SPILLED_RECORD_LAST = MT_POOL_SPILLED_RECORD + MT_RECORD_SIZES - 1,
    MT_POOL_SPILLED_ROWS,
    MT_POOL_SPILLED_SUM,
    MT_POOL_SPILLED_ROUTING,
    MT_POOL_KEYS,          /* device: keys and values of rows in chunks, or states; their gradients */
    MT_POOL_DKEYS,
    MT_POOL_SPILLED_KEYS,
    MT_POOL_SPILLED_DKEYS,
    MT_N_POOLS,
    MT_NO_POOL = MT_N_POOLS,
};

struct mt_pool_desc {
    const char *name;        /* in memory tables and messages */
    bool device;             /* device memory, else host memory */
    bool poisonable;         /* dead buffers can be overwritten so that a stale read shows */
    int least;               /* fewest buffers, beside those of objects that live for the run: two if one is filled
                                while the other is in use */
    enum mt_pool_id spilled; /* host pool for its objects on their way to the disk; MT_NO_POOL: never spilled */
};
extern const struct mt_pool_desc mt_pools[MT_N_POOLS];

/** Uses of disk traffic. */
enum mt_disk_use {
    MT_DISK_STATES, /* and gradients, which are read with them */
    MT_DISK_WEIGHTS,
    MT_DISK_GRADIENTS,
    MT_DISK_ACTIVATIONS,
    MT_N_DISK_USES,
};
const char *mt_disk_use_name(enum mt_disk_use use);

enum mt_object_kind {
    MT_OBJ_WEIGHTS,  /* of a unit */
    MT_OBJ_ADAPTERS, /* of a unit: those of its weights that have a buffer of their own */
    MT_OBJ_PERTURBED, /* the same weights with noise added, of a group */
    MT_OBJ_PERTURBED_ADAPTERS,
    MT_OBJ_BOUNDARY, /* x[unit][mb], input of a unit */
    MT_OBJ_DX,       /* gradient of a boundary, one per micro-batch, updated in place */
    MT_OBJ_RECORD,   /* a segment of the activation record of (unit, mb) */
    MT_OBJ_ROWS,     /* rows of all micro-batches of a group, which each micro-batch fills in part */
    MT_OBJ_SUM,      /* the same in FP32, which units that run once a group add into */
    MT_OBJ_ROUTING,  /* which rows go to which expert, and with what weight */
    MT_OBJ_GRAD,     /* FP32 gradient of a unit */
    MT_OBJ_CAST,     /* gradient as cast, to be stored */
    MT_OBJ_MOMENTS,  /* of a unit: the optimizer states by which the device makes a direction of the gradient */
    MT_OBJ_CACHE,    /* of a unit: keys and values of sequences, for their next tokens, in any number of programs */
    MT_OBJ_KEYS,     /* of a unit and a row: keys and values of its chunks, or states: each adds its own */
    MT_OBJ_DKEYS,    /* FP32 sums of their gradients, to which each chunk adds from the last to the first */
    /* in host staging: */
    MT_OBJ_STATE,    /* a piece of a unit's planes that only updates use */
    MT_OBJ_STAGED,   /* a unit's planes on the disk that loads use */
    MT_OBJ_GRAD_OUT, /* a unit's gradient, to be written to its plane on the disk */
    MT_OBJ_GRAD_RING, /* a unit's gradient until its update, which follows under backward: it has no plane */
    MT_OBJ_SPILLED,  /* host copy of an object that is spilled to the disk */
    MT_N_OBJECT_KINDS,
};

/** Where the content of an evicted object is kept until it is loaded again. */
enum mt_home {
    MT_HOME_NONE,
    MT_HOME_PLANE, /* the unit's planes, in host memory or on the disk */
    MT_HOME_SPILL, /* spill memory of the host; of host copies: spill space of the disk */
};

struct mt_kind_desc {
    const char *name;                   /* in programs: "w" */
    bool device;                        /* in device memory, else in host staging */
    enum mt_home home;
    bool training;                      /* only in steps that train */
    bool trained;                       /* only of units with trained parameters */
    bool begins_home;                   /* its home holds its content when the step begins */
    bool returns;                       /* it is stored to its home after its last write in a step */
    enum mt_disk_use disk_use;          /* of its transfers */
    enum mt_pool_id pool[MT_N_CLASSES]; /* by the unit's class */
};
extern const struct mt_kind_desc mt_kinds[MT_N_OBJECT_KINDS];

enum mt_opcode {
    MT_OP_UPDATE,       /* update of a unit's planes, or of a piece of them (operands: state, staged weights, gradient) */
    MT_OP_SCATTER,     /* rows of the embedding's gradient, as they arrived -> their places in its plane */
    MT_OP_GATHER,     /* rows of the embedding, as the pending update leaves them -> home of x */
    MT_OP_LOAD,       /* object from its home, or from its copy in host staging */
    MT_OP_STORE,      /* object to its home, or to its copy in host staging */
    MT_OP_JOIN,       /* hi and lo of loaded weights to f32 */
    MT_OP_ZERO,       /* object := 0 */
    MT_OP_POISON,     /* dead buffer := NaN pattern */
    MT_OP_PERTURB,    /* w, ... -> the same with noise added, of a group; operands in pairs */
    MT_OP_EMBED,      /* w -> x */
    MT_OP_FORWARD,    /* w, x -> y (, record) */
    MT_OP_LOSSES,     /* w, table, x -> loss, for HEAD to weigh rows by */
    MT_OP_HEAD,       /* w, table, x -> loss (, dx; g, g_table) */
    MT_OP_BALANCE,    /* rows that experts have in the whole step -> what backward balances them by */
    MT_OP_BACKWARD,   /* w, x (, record), dx -> dx; g */
    MT_OP_EMBED_BWD,  /* dx -> g */
    MT_OP_ADD_GROUP,  /* g, g of a later group -> their sum in the first */
    MT_OP_GRAD_CAST,  /* g -> c and partial sums of squares */
    MT_OP_STORE_GRAD, /* c or g -> gradient plane in host memory, or host staging */
    MT_OP_STATS,      /* losses and partial sums -> host */
    MT_OP_READ,       /* object of host staging from its home on the disk */
    MT_OP_WRITE,      /* object of host staging to its home on the disk */
    MT_OP_PASS,       /* sum of groups, from its home on one host to that on another */
    MT_OP_SHARE,      /* gradient as cast, or states changed on a device, from planes of one host to all others' */
    MT_OP_RENEW,      /* weights of a unit, from the host that has updated it to all others */
    MT_OP_COUNTS,     /* rows that experts have in a group, from one host to others, whose BALANCE adds them up */
    MT_N_OPCODES,
};

struct mt_opcode_desc {
    const char *name;
    enum mt_queue queue;
    bool moves;        /* copies an object as it is, complete or not */
    bool ends_forward; /* the last of them in a program ends the forward pass */
};
extern const struct mt_opcode_desc mt_opcodes[MT_N_OPCODES];
