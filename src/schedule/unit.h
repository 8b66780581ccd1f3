/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "schedule/port.h"
#include "settings/settings.h"

/**
 * A model as the builder sees it: units in forward order, and the values that they read and write. A unit is loaded as
 * a whole; its operations name the values they use, so units can be a chain, or several that add into one sum, or one
 * that works on the rows of a whole group.
 */

/** Micro-batches spread evenly: `some` of each `of`, counted from the start of `before` steps earlier. of 0: all. */
struct mt_share {
    int32_t some, of, before;
};
/** Whether a value with that share has an object for the micro-batch. */
static inline bool mt_share_has(const struct mt_share *s, size_t n_micro, size_t mb)
{
    int64_t i = (int64_t)s->before * (int64_t)n_micro + (int64_t)mb;
    return !s->of || (i + 1) * s->some / s->of > i * s->some / s->of;
}

struct mt_value {
    enum mt_object_kind kind; /* a kind in device memory */
    enum mt_lifetime life;
    int32_t unit;             /* that it belongs to: gives its size class and its name in printed programs */
    size_t bytes;             /* of an object */
    struct mt_share share;    /* with MT_LIFE_MICROBATCH: micro-batches that have an object */
    uint8_t size;             /* of a record, a cache, or weights that stay: which of the pools of its kind */
};

enum { MT_MAX_OPERANDS = 14 };

struct mt_use {
    int32_t value; /* position in mt_program_params.values */
    uint8_t access;
    uint8_t role; /* enum mt_role */
};

/** How often an operation of a unit runs. */
enum mt_scope {
    MT_SCOPE_MICROBATCH, /* for each micro-batch */
    MT_SCOPE_GROUP,      /* once for each group, over all its micro-batches: it uses no value of a micro-batch */
};

struct mt_call {
    enum mt_opcode op;
    enum mt_scope scope;
    uint8_t n_uses; /* 0: the unit has no such operation */
    struct mt_use use[MT_MAX_OPERANDS];
};

/** A segment of a unit's activation record. Backward recomputes what is not recorded. */
struct mt_unit_record {
    size_t bytes;          /* for a micro-batch; 0: none */
    struct mt_share share; /* micro-batches that have one */
    uint8_t size;          /* which of the pools of records; set by mt_flow_describe() */
};

/**
 * A unit. The program leaves out uses of a frozen unit's gradient, and in steps that do not train those of values that
 * only training has (mt_kind_desc.training).
 */
struct mt_unit_shape {
    int32_t layer;       /* units with the same number share the values of a layer */
    int32_t back;        /* so many units before it is the one whose weights and gradient it uses; 0: it has its own */
    int32_t block;       /* neighbouring units with the same number are clipped and skipped as one */
    enum mt_scope scope; /* of its operations */
    uint8_t lane;        /* that forward runs on, and all that is not backward */
    uint8_t lane_back;   /* that backward runs on, and that has the gradients */
    enum mt_size_class size_class;
    uint8_t n_ports;
    struct mt_port port[MT_MAX_PORTS]; /* what its operations use, beside its record and its adapters */
    size_t weight_bytes; /* of a buffer: in the compute dtype, with space for packed weights before they are decoded */
    bool prepared;       /* a JOIN after each load decodes packed weights, or joins hi and lo */
    bool noisy;          /* it adds noise, to adapters in a buffer of their own, too */
    size_t link_bytes;   /* of a load */
    size_t adapter_bytes;      /* of a buffer of its adapters' own, in which they stay for the run; 0: none */
    size_t adapter_link_bytes; /* of a load of it, which follows each update */
    bool weights_stay;         /* keep their buffer for the run, in which nothing changes them: they are loaded once */
    size_t cache_bytes;        /* of a buffer of what generation keeps of earlier tokens; 0: none */
    size_t key_bytes, dkey_bytes; /* of what a row in chunks keeps, and its gradients (struct mt_unit_row); 0: none */
    bool cache_stays;          /* it keeps its buffer for the run */
    uint8_t cache_kind;        /* enum mt_cache_kind: buffers of a kind are as large */
    size_t grad_elems;     /* of its FP32 gradient on the device */
    size_t grad_out_bytes; /* of the trained ranges' gradients as stored (cast), with the gaps between them */
    size_t grad_row_bytes; /* not 0: that gradient is a matrix with rows of so many bytes, zero but for those of the
                              step's tokens */
    size_t moment_bytes;   /* of a buffer for the states by which its gradient becomes a direction; 0: none */
    size_t update_elems;   /* of the planes that updates use: states and gradients of trained parameters */
    bool trainable;
    struct mt_unit_record record[MT_MAX_SEGMENTS];
    bool perturbs;       /* steps of MT_MODE_ZEROTH run its forward with perturbed weights, of what is trained */
    /* the following nine are set by mt_flow_describe() */
    bool shared;         /* a later unit uses its weights, too */
    struct mt_call forward, backward;
    struct mt_call perturb, perturbed; /* with `perturbs`: makes such weights of a group; and forward with them */
    struct mt_call gather; /* replaces forward with mt_program_params.gather; n_uses 0: forward is used */
    struct mt_call losses; /* of the head, before it with mt_program_params.weighs_rows */
    bool makes_lists;    /* it decides which experts have rows */
    bool follows_lists;  /* its weights are not needed if none of its experts has rows */
    /* planes on the disk; all 0: none */
    size_t staged_bytes;      /* of the planes that are loaded from the disk or from files */
    size_t staged_bytes_adapters; /* of them, those that the load of its adapters' own buffer reads */
    size_t staged_bytes_read; /* what is read for that, if files have it in other formats; 0: the same */
    size_t staged_bytes_written; /* of them, those that an update changes */
    size_t state_bytes;  /* of piece_align elements of planes that only updates read from the disk, gradient included */
    size_t state_bytes_written; /* of them, those that updates write */
    bool grad_on_disk;
    bool grad_in_ring;   /* its gradient has no plane: it is updated under backward, with all units of its block */
};

/** Upper bound of the number of values. */
static inline size_t mt_flow_max_values(size_t n_units)
{
    return (MT_MAX_PORTS + MT_MAX_SEGMENTS + 6) * n_units;
}
/**
 * Sets the operations of a model's units from their ports and sizes, and `values`; returns the number of values. The
 * first unit is the embedding, the last the head. grad_bytes: of a gradient element as cast.
 */
size_t mt_flow_describe(struct mt_unit_shape *units, size_t n_units, size_t grad_bytes, struct mt_value *values);
