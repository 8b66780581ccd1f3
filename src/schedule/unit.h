/* SPDX-License-Identifier: Apache-2.0 */
#ifndef MT_SCHEDULE_UNIT_H
#define MT_SCHEDULE_UNIT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "schedule/tables.h"
#include "settings/settings.h"

/**
 * A model as the builder sees it: units in forward order, and the values that they read and write. A unit is loaded as
 * a whole; its operations name the values they use, so units can be a chain, or several that add into one sum, or one
 * that works on the rows of a whole step.
 */

/** How long the objects of a value live. */
enum mt_lifetime {
    MT_LIFE_MICROBATCH, /* an object for each micro-batch */
    MT_LIFE_STEP,       /* one object for all micro-batches of a step */
    MT_LIFE_RUN,        /* one object, of weights or adapters, that keeps its buffer from step to step */
};

/** Micro-batches spread evenly: `some` of each `of`, counted from the start of `before` steps earlier. of 0: all. */
struct mt_share {
    int32_t some, of, before;
};

struct mt_value {
    enum mt_object_kind kind; /* a kind in device memory */
    enum mt_lifetime life;
    int32_t unit;             /* that it belongs to: gives its size class and its name in printed programs */
    size_t bytes;             /* of an object */
    struct mt_share share;    /* with MT_LIFE_MICROBATCH: micro-batches that have an object */
};

/**
 * How an operation uses an object. FILL and ADD are contributions: the object is complete after the last of them. FILL
 * writes the operation's own part of it (a micro-batch's rows), ADD adds to all of it (a gradient). If the first
 * contribution is an ADD, the object is zeroed before. SUM is an ADD whose operation overwrites the object if it is the
 * first contribution.
 */
enum mt_access {
    MT_READ = 1,
    MT_WRITE = 2,
    MT_UPDATE = MT_READ | MT_WRITE,
    MT_PART = 4,
    MT_FILL = MT_WRITE | MT_PART,
    MT_ADD = MT_UPDATE | MT_PART,
    MT_BEGINS = 8,
    MT_SUM = MT_ADD | MT_BEGINS, /* only in calls: an instruction's operand is FILL or ADD */
};

enum { MT_MAX_OPERANDS = 10 };

/** Role of a value in an operation, by which the executor finds its buffer. */
enum mt_use_role {
    MT_USE_NONE,       /* the instruction has one object (a copy, a zeroing), or it needs no name */
    MT_USE_WEIGHTS,
    MT_USE_TABLE,      /* the embedding's weights as a tied head's output matrix */
    MT_USE_X,          /* boundary before the unit */
    MT_USE_Y,          /* boundary after the unit */
    MT_USE_RECORD_ATTENTION,
    MT_USE_RECORD,
    MT_USE_DX,         /* gradient of a boundary */
    MT_USE_GRAD,       /* FP32 gradient of the unit */
    MT_USE_TABLE_GRAD, /* of MT_USE_TABLE */
    MT_USE_CAST,       /* gradient of the unit as cast */
    MT_USE_ROWS,       /* the experts' input: a row for each token of the step */
    MT_USE_SUM,        /* the sum of the experts' outputs */
    MT_USE_ROUTING,
    MT_USE_DY,         /* gradient of the sum */
    MT_USE_DN,         /* gradient of the rows, which experts add into */
    MT_USE_DWEIGHTS,   /* gradient of the routing weights */
    MT_USE_ADAPTERS,   /* the unit's adapters, if they are not among its weights */
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
    MT_SCOPE_STEP,       /* once, over all micro-batches: it uses no value of a micro-batch */
};

struct mt_call {
    enum mt_opcode op;
    enum mt_scope scope;
    uint8_t n_uses; /* 0: the unit has no such operation */
    struct mt_use use[MT_MAX_OPERANDS];
};

/** A part of a unit's activation record. Backward recomputes what is not recorded. */
struct mt_unit_record {
    size_t bytes;          /* for a micro-batch; 0: none */
    struct mt_share share; /* micro-batches that have one */
};

/** A unit's place in the model, which determines its operations and their values. */
enum mt_unit_place {
    MT_PLACE_EMBEDDING,
    MT_PLACE_LAYER,   /* a decoder layer or a part of one: from one boundary to the next */
    MT_PLACE_ROUTER,  /* from a boundary to the rows, the routing and the sum of a layer with experts */
    MT_PLACE_LISTS,   /* once a step: which rows go to which expert; no weights */
    MT_PLACE_EXPERTS, /* once a step: some of the layer's experts */
    MT_PLACE_COMBINE, /* from the sum to the next boundary; no weights */
    MT_PLACE_HEAD,
};

/**
 * A unit. The program leaves out uses of a frozen unit's gradient, and in steps that do not train those of values that
 * only training has (mt_kind_desc.training).
 */
struct mt_unit_shape {
    enum mt_unit_place place;
    enum mt_size_class size_class;
    size_t weight_bytes; /* of a buffer: in the compute dtype, with space for packed weights before they are decoded */
    bool prepared;       /* a JOIN after each load decodes packed weights, or joins hi and lo */
    size_t link_bytes;   /* of a load */
    size_t adapter_bytes;      /* of a buffer of its adapters' own, in which they stay for the run; 0: none */
    size_t adapter_link_bytes; /* of a load of it, which follows each update */
    size_t grad_elems;     /* of its FP32 gradient on the device */
    size_t grad_out_bytes; /* of the trained ranges' gradients as stored (cast) */
    size_t grad_row_bytes; /* not 0: that gradient is a matrix with rows of so many bytes, zero but for those of the
                              step's tokens */
    size_t update_elems;   /* of the planes that updates use: states and gradients of trained parameters */
    bool trainable;
    struct mt_unit_record record[MT_N_RECORD_PARTS];
    struct mt_call forward, backward;
    struct mt_call logits; /* replaces forward in MT_MODE_LOGITS; n_uses 0: forward is used */
    struct mt_call gather; /* replaces forward with mt_program_params.gather; n_uses 0: forward is used */
    /* planes on the disk; all 0: none */
    size_t staged_bytes;      /* of the planes that are loaded from the disk or from files */
    size_t staged_bytes_adapters; /* of them, those that the load of its adapters' own buffer reads */
    size_t staged_bytes_read; /* what is read for that, if files have it in other formats; 0: the same */
    size_t staged_bytes_written; /* of them, those that an update changes */
    size_t state_elem_bytes;  /* per element, of planes that only updates read from the disk, gradient included */
    size_t state_elem_bytes_written; /* of them, those that updates write */
    bool grad_on_disk;
};

/** A model: units in forward order. Router, lists, groups of experts and the combining unit make one layer together. */
struct mt_flow {
    size_t n_units;        /* the first is the embedding, the last the head */
    bool tied;             /* the head's table is the embedding's */
    size_t boundary_bytes; /* of a micro-batch */
    size_t grad_bytes;     /* of a gradient element as cast */
    /* of a step, with experts */
    size_t rows_bytes, sum_bytes, routing_bytes, dweights_bytes;
};

/** Upper bound of the number of values. */
static inline size_t mt_flow_max_values(size_t n_units)
{
    return 11 * n_units + 1;
}
/** Sets the units' classes and operations from their places and sizes, and `values`; returns the number of values. */
size_t mt_flow_describe(struct mt_unit_shape *units, struct mt_value *values, const struct mt_flow *f);

#endif
