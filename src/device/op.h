/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "device/example.h"
#include "device/ops.h"

/**
 * All that there is to know about an operation except how a device implements it: one row each, in ops/<name>.c.
 */

/** The rate of a machine that bounds the operation, for estimates without a sample. */
enum mt_op_bound {
    MT_BOUND_BYTES,
    MT_BOUND_PRODUCT,
    MT_BOUND_PACKED_PRODUCT, /* by codes */
    MT_BOUND_ATTENTION,
    MT_BOUND_ATTENTION_BWD,
    MT_BOUND_DELTA,
};

/** What a dimension counts; examples take their sizes from a list by it. */
enum mt_op_size {
    MT_SIZE_NONE,
    MT_SIZE_ROWS,      /* tokens */
    MT_SIZE_HIDDEN,
    MT_SIZE_HIDDEN_64, /* the next multiple of 64 of it, whatever a list says */
    MT_SIZE_FFN,
    MT_SIZE_LOSS_ROWS, /* tokens with a loss that are handled at once */
    MT_SIZE_VOCAB,
    MT_SIZE_RUNS,      /* distinct tokens */
    MT_SIZE_HEADS,     /* of queries */
    MT_SIZE_KV_HEADS,
    MT_SIZE_ALL_HEADS, /* of queries and keys */
    MT_SIZE_HEAD_DIM,
    MT_SIZE_LENGTH,    /* of a document, plus one */
    MT_SIZE_ELEMENTS,  /* elements or bytes of a flat array */
    MT_SIZE_EXPERTS,
    MT_SIZE_TOP_K,     /* experts of a token */
    MT_N_SIZES,
};
struct mt_op_sizes {
    uint64_t of[MT_N_SIZES];
};

enum { MT_OP_VARIANTS = 8, MT_OP_FLAGS = 4 };

struct mt_op {
    /** The name of each variant in machine profiles: [a-z0-9_]+, at most 31 characters, never changed. NULL: end. */
    const char *name[MT_OP_VARIANTS + 1];
    enum mt_op_bound bound;
    enum mt_op_size dim[MT_METER_DIMS]; /* MT_SIZE_NONE ends the list */
    unsigned flags[MT_OP_FLAGS];        /* combinations of flags for examples: 0 first; the next 0 ends the list */
    bool f32_only;                      /* has no dtype, and counts as f32 */
    bool bf16_only;
    size_t args_bytes;
    size_t count; /* offset of a size_t in the arguments: if it is 0 there is nothing to do, and nothing is submitted */
    /** NULL, or the condition that the arguments violate. Backends trust arguments that passed. */
    const char *(*check)(const void *args);
    /** Fills in variant, dtype, flags, dim, flops and bytes, by the arguments' shape alone. */
    void (*cost)(const void *args, struct mt_metered *out);
    /** Fills in arguments of the given shape, with buffers taken from `x`; cost() of them must return the shape. */
    void (*fill)(mt_example *x, const struct mt_metered *shape, void *args);
};

const struct mt_op *mt_dev_op(enum mt_dev_op op);
/** "gemm": the name in the table of operations. */
const char *mt_dev_op_name(enum mt_dev_op op);
/** Fills in the whole of *out. */
void mt_dev_op_cost(enum mt_dev_op op, const void *args, struct mt_metered *out);
/** "[4096, 512] bf16" into buf, for messages; returns buf. */
const char *mt_dev_op_describe(char *buf, size_t len, enum mt_dev_op op, const void *args);
