/* SPDX-License-Identifier: Apache-2.0 */
#ifndef MT_DEVICE_OPS_ROW_H
#define MT_DEVICE_OPS_ROW_H

#include "device/op.h"

/* What the rows of operations share. */

/** Bytes of n * c elements. */
static inline double mt_op_bytes(size_t n, size_t c, enum mt_dtype t)
{
    return (double)n * (double)c * (double)mt_dtype_size(t);
}

/** Leaves a check with the text of the condition that does not hold. */
#define MT_OP_NEED(cond)                                                                           \
    do {                                                                                           \
        if (!(cond))                                                                               \
            return "needs " #cond;                                                                 \
    } while (0)

static inline bool aligned_or_null(const void *p)
{
    return (uintptr_t)p % 16 == 0;
}

static inline bool aligned(const void *p)
{
    return p && aligned_or_null(p);
}

/** Of a list i * MT_OP_SCATTER % n: a permutation of n in which neighbours are far apart. */
#define MT_OP_SCATTER UINT64_C(2654435761)

#endif
