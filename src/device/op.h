/* SPDX-License-Identifier: Apache-2.0 */
#ifndef MT_DEVICE_OP_H
#define MT_DEVICE_OP_H

#include "device/example.h"
#include "device/ops.h"

/**
 * What there is to know about an operation beside how a device does it: one row each, in ops/<name>.c.
 *
 * A row count that only the device knows when the operation runs (tokens of an expert) is two fields of the
 * arguments: the most rows there can be, for which buffers and workspace are sized, and the rows to expect, by
 * which the cost is counted.
 */

/** Which of a machine's rates bounds the operation where no sample of it is known. */
enum mt_op_bound { MT_BOUND_BYTES, MT_BOUND_PRODUCT, MT_BOUND_ATTENTION, MT_BOUND_ATTENTION_BWD };

/** What a dimension counts: examples take theirs from a list of sizes by this. */
enum mt_op_size {
    MT_SIZE_NONE,
    MT_SIZE_ROWS,      /* tokens */
    MT_SIZE_HIDDEN,
    MT_SIZE_FFN,
    MT_SIZE_LOSS_ROWS, /* tokens with a loss, at once */
    MT_SIZE_VOCAB,
    MT_SIZE_RUNS,      /* distinct tokens */
    MT_SIZE_HEADS,     /* of queries */
    MT_SIZE_KV_HEADS,
    MT_SIZE_ALL_HEADS, /* of queries and keys */
    MT_SIZE_HEAD_DIM,
    MT_SIZE_LENGTH,    /* of a document, and one more */
    MT_SIZE_ELEMENTS,  /* of a flat array; of bytes, too */
    MT_SIZE_EXPERTS,
    MT_SIZE_TOP_K,     /* experts of a token */
    MT_N_SIZES,
};
struct mt_op_sizes {
    uint64_t of[MT_N_SIZES];
};

enum { MT_OP_VARIANTS = 3, MT_OP_FLAGS = 4 };

struct mt_op {
    /** Of each variant, in machine profiles: [a-z0-9_]+, at most 31 letters, never changed. NULL ends the list. */
    const char *name[MT_OP_VARIANTS + 1];
    enum mt_op_bound bound;
    enum mt_op_size dim[MT_METER_DIMS]; /* MT_SIZE_NONE ends the list */
    unsigned flags[MT_OP_FLAGS];        /* combinations to take examples of: 0, then others; 0 ends the list */
    bool f32_only;                      /* there is no dtype: it counts as f32 */
    size_t args_bytes;
    size_t count; /* offset of the size_t that is 0 where there is nothing to do; such a call is not submitted */
    /** NULL, or the condition that the arguments do not meet. Backends trust what passed. */
    const char *(*check)(const void *args);
    /** Fills in variant, dtype, flags, dim, flops and bytes, by the arguments' shape alone. */
    void (*cost)(const void *args, struct mt_metered *out);
    /** Fills in arguments of the given shape, with buffers taken from `x`; cost() of them gives the shape again. */
    void (*fill)(mt_example *x, const struct mt_metered *shape, void *args);
};

const struct mt_op *mt_dev_op(enum mt_dev_op op);
/** "gemm": as in the table of operations. */
const char *mt_dev_op_name(enum mt_dev_op op);
/** Fills in all of *out. */
void mt_dev_op_cost(enum mt_dev_op op, const void *args, struct mt_metered *out);
/** "[4096, 512] bf16" into buf, for messages; returns buf. */
const char *mt_dev_op_describe(char *buf, size_t len, enum mt_dev_op op, const void *args);

#endif
