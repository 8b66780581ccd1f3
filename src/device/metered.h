/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "device/ops.h"

/** Flags of an operation that change its cost at the same shape. */
enum {
    MT_METER_ADDS = 1,      /* gemm: a C or bias is added */
    MT_METER_F32_OUT = 2,   /* gemm: D is f32, A and B are not */
    MT_METER_NORM = 4,      /* qk_rope: with QK-norm; merge_adapter: of DoRA */
    MT_METER_LOSS_ONLY = 8, /* cross-entropy: no gradient */
    MT_METER_NESTED = 16,   /* decode: scales are packed, too */
    MT_METER_PLAIN = 32,    /* delta_rule: the plain one; gated_norm: the gate first */
};
/** Variants of gemm, as in its row; the variants of decode are the formats after MT_PACKED_NONE. */
enum { MT_GEMM_NT /* a linear layer */, MT_GEMM_NN /* its input gradient */, MT_GEMM_TN /* its weight gradient */ };
enum { MT_METER_DIMS = 6 };

/** An operation as the counting device reports it: its shape, floating-point operations and least memory traffic. */
struct mt_metered {
    enum mt_dev_op op;
    unsigned variant;
    enum mt_dtype dtype;
    unsigned flags;
    int n_dims;
    uint64_t dim[MT_METER_DIMS]; /* their meaning is in the operation's row (device/op.h) */
    double flops; /* of matrix products; 0 for the memory-bound rest */
    double bytes; /* least traffic with memory */
    int beside;   /* such operations run side by side with it, itself included: on a side stream; 0 is 1 */
};

/** "gemm_nt": the variant's name in machine profiles. */
const char *mt_metered_name(const struct mt_metered *m);
/** Sets op and variant by name; false: there is none. */
bool mt_metered_find(struct mt_metered *m, const char *name);

/** A dimension that a stored operation lacks, since its row had fewer then, is the one before it: a head of values had
 * the width of one of keys. */
void mt_metered_complete(struct mt_metered *m);

struct mt_op_sizes;
/** The operation's example number `which` (all its variants and flags) at these sizes, with flops and bytes. -ERANGE:
 * there are fewer; -ENOMEM. */
int mt_metered_example(struct mt_metered *out, enum mt_dev_op op, unsigned which, const struct mt_op_sizes *sizes,
                       enum mt_dtype dtype);
/** Fills in flops and bytes as the operation's row counts them for the shape, and drops flags that do not exist for its
 * dtype; -ENOMEM. */
int mt_metered_count(struct mt_metered *m);
