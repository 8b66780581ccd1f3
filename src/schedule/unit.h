/* SPDX-License-Identifier: Apache-2.0 */
#ifndef MT_SCHEDULE_UNIT_H
#define MT_SCHEDULE_UNIT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "schedule/tables.h"
#include "settings/settings.h"

/**
 * A model as the builder sees it: units in the order in which forward passes them, and the values that they read and
 * write. A unit is what is streamed at once; its operations name the values they use, so units can be a chain, or
 * several that add into one sum, or one that works on the rows of a whole step.
 */

/** How long the objects of a value live. */
enum mt_lifetime {
    MT_LIFE_MICROBATCH, /* an object for each micro-batch */
    MT_LIFE_STEP,       /* one object for all micro-batches of a step */
    MT_LIFE_RUN,        /* one, of weights, which keeps its buffer from step to step */
};

/** Some of many, spread evenly: `some` of each `of`, counted on from the micro-batches of `before` steps. of 0: all. */
struct mt_share {
    int32_t some, of, before;
};

struct mt_value {
    enum mt_object_kind kind; /* of device memory */
    enum mt_lifetime life;
    int32_t unit;             /* whose it is: its size class, and what programs print */
    size_t bytes;             /* of an object */
    struct mt_share share;    /* of a micro-batch's: those that have one */
};

/**
 * How an operation uses an object. FILL and ADD contribute to an object that is complete once all operations that do so
 * have: FILL writes a part of its own of it (a micro-batch's rows), ADD adds to all of it (a gradient). An object whose
 * first contribution is an ADD is zeroed before. SUM is an ADD whose operation writes all of the object where it is the
 * first.
 */
enum mt_access {
    MT_READ = 1,
    MT_WRITE = 2,
    MT_UPDATE = MT_READ | MT_WRITE,
    MT_PART = 4,
    MT_FILL = MT_WRITE | MT_PART,
    MT_ADD = MT_UPDATE | MT_PART,
    MT_BEGINS = 8,
    MT_SUM = MT_ADD | MT_BEGINS, /* of calls alone: an instruction's operand is FILL or ADD */
};

enum { MT_MAX_OPERANDS = 10 };

/** What an operation takes a value for, by which the executor finds its buffer. */
enum mt_use_role {
    MT_USE_NONE,       /* the instruction has one object (a copy, a zeroing), or it needs no name */
    MT_USE_WEIGHTS,
    MT_USE_TABLE,      /* the embedding's weights as a tied head's output matrix */
    MT_USE_X,          /* boundary before the unit */
    MT_USE_Y,          /* and behind it */
    MT_USE_RECORD_ATTENTION,
    MT_USE_RECORD,
    MT_USE_DX,         /* gradient of a boundary */
    MT_USE_GRAD,       /* FP32 gradient of the unit */
    MT_USE_TABLE_GRAD, /* of MT_USE_TABLE */
    MT_USE_CAST,       /* gradient of the unit as cast */
    MT_USE_ROWS,       /* what experts work on: a row for each token of the step */
    MT_USE_SUM,        /* what they add into */
    MT_USE_ROUTING,
    MT_USE_DY,         /* gradient of the sum */
    MT_USE_DN,         /* and of the rows, which experts add into */
    MT_USE_DWEIGHTS,   /* and of the routing's weights */
    MT_N_USE_ROLES,
};

struct mt_use {
    int32_t value; /* position in mt_program_params.values */
    uint8_t access;
    uint8_t role; /* enum mt_use_role */
};

/** How often an operation of a unit runs. */
enum mt_scope {
    MT_SCOPE_MICROBATCH, /* for each micro-batch */
    MT_SCOPE_STEP,       /* once, over all micro-batches: it uses values that live for the step alone */
};

struct mt_call {
    enum mt_opcode op;
    enum mt_scope scope;
    uint8_t n_uses; /* 0: the unit has no such operation */
    struct mt_use use[MT_MAX_OPERANDS];
};

/** A part of a unit's activation record. Backward recomputes what is not there. */
struct mt_unit_record {
    size_t bytes;          /* of a micro-batch; 0: there is none */
    struct mt_share share; /* micro-batches that leave one */
};

/** Where a unit stands in the model, from which its operations and their values follow. */
enum mt_unit_place {
    MT_PLACE_EMBEDDING,
    MT_PLACE_LAYER,   /* a decoder layer or a part of one: from one boundary to the next */
    MT_PLACE_ROUTER,  /* from a boundary to the rows, the routing and the sum of a layer with experts */
    MT_PLACE_LISTS,   /* once a step: which rows go to which expert. It has no weights */
    MT_PLACE_EXPERTS, /* once a step: some of the layer's experts */
    MT_PLACE_COMBINE, /* from the sum to the next boundary. It has no weights */
    MT_PLACE_HEAD,
};

/**
 * A unit. A use is left out of the program where nothing wants what it makes: the gradient of a unit that is frozen,
 * and in steps that do not train whatever only training has (mt_kind_desc.training).
 */
struct mt_unit_shape {
    enum mt_unit_place place;
    enum mt_size_class size_class;
    size_t weight_bytes; /* on the device, in the compute dtype; with where a load lands that is decoded */
    bool prepared;       /* after each load some of it is decoded, or hi and lo joined: by a JOIN */
    size_t link_bytes;   /* of a load */
    size_t grad_elems;     /* of its FP32 gradient on the device */
    size_t grad_out_bytes; /* of the trained ranges' gradients on their way out, as cast */
    size_t update_elems;   /* of the planes that updates work on: states and gradients of what is trained */
    bool trainable;
    struct mt_unit_record record[MT_N_RECORD_PARTS];
    struct mt_call forward, backward;
    struct mt_call logits; /* in place of forward where only the last token's logits are wanted; n_uses 0: forward */
    /* planes on the disk; all 0: none */
    size_t staged_bytes;      /* of the planes on the disk that loads take */
    size_t staged_bytes_written; /* of them, what an update changes */
    size_t state_elem_bytes;  /* bytes of an element that updates alone take from it, gradient included, and */
    size_t state_elem_bytes_written; /* give back */
    bool grad_on_disk;
};

/** A model: units in forward order. Router, lists, groups of experts and the combining unit make one layer together. */
struct mt_flow {
    size_t n_units;        /* the first is the embedding, the last the head */
    bool tied;             /* the head's table is the embedding's */
    size_t boundary_bytes; /* of a micro-batch */
    size_t grad_bytes;     /* of a gradient element as cast */
    /* of a step, where there are experts */
    size_t rows_bytes, sum_bytes, routing_bytes, dweights_bytes;
};

/** No model of so many units has more values. */
static inline size_t mt_flow_max_values(size_t n_units)
{
    return 10 * n_units + 1;
}
/** Fills in the units' classes and operations, whose places and sizes are there, and `values`; returns how many. */
size_t mt_flow_describe(struct mt_unit_shape *units, struct mt_value *values, const struct mt_flow *f);

#endif
