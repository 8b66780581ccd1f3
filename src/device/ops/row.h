/* SPDX-License-Identifier: Apache-2.0 */
#ifndef MT_DEVICE_OPS_ROW_H
#define MT_DEVICE_OPS_ROW_H

#include "device/op.h"

/* Shared by the rows of operations. */

/** Bytes of n * c elements. */
static inline double mt_op_bytes(size_t n, size_t c, enum mt_dtype t)
{
    return (double)n * (double)c * (double)mt_dtype_size(t);
}

/** In a check: returns the text of the condition if it does not hold. */
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

/** Are these heads in rows without an element in common? */
static inline bool heads_apart(const struct mt_heads *h)
{
    return h->p && h->dim && (h->n <= 1 || h->stride >= h->dim) && h->ld >= mt_heads_span(h);
}

/** The same, or one head that all share. */
static inline bool heads_lie(const struct mt_heads *h)
{
    return heads_apart(h) || (h->p && h->dim && !h->stride && h->ld >= h->dim);
}

static inline bool heads_alike(const struct mt_heads *a, const struct mt_heads *b)
{
    return a->n == b->n && a->dim == b->dim;
}

/** For operations on rows: counts `arrays` arrays [n, c]. */
static inline void mt_op_count_rows(size_t n, size_t c, enum mt_dtype t, double arrays, struct mt_metered *out)
{
    out->dtype = t;
    out->dim[0] = n;
    out->dim[1] = c;
    out->bytes = arrays * mt_op_bytes(n, c, t);
}

/** The check of an activation's backward: dx may lie where x does, and out, or NULL, where its gradient does. */
static inline const char *mt_op_check_activation_bwd(const void *x, const void *dout, const void *dx, const void *out)
{
    MT_OP_NEED(aligned(x) && aligned(dout) && aligned(dx) && x != dout && dout != dx);
    MT_OP_NEED(!out || (aligned(out) && out != x && out != dx));
    return NULL;
}

/** For operations on heads of dimensions [rows, heads, dim of a head]: counts `arrays` arrays like x. */
static inline void mt_op_count_heads(const struct mt_heads *x, size_t n, enum mt_dtype t, double arrays,
                                     struct mt_metered *out)
{
    out->dtype = t;
    out->dim[0] = n;
    out->dim[1] = x->n;
    out->dim[2] = x->dim;
    out->bytes = arrays * mt_op_bytes(n, x->n * x->dim, t);
}

/** One of those arrays for an example, its heads side by side. */
static inline struct mt_heads mt_op_take_heads(mt_example *x, unsigned use, const struct mt_metered *shape)
{
    size_t n = (size_t)shape->dim[0], heads = (size_t)shape->dim[1], d = (size_t)shape->dim[2];
    return mt_heads(mt_example_take(x, use, shape->dtype, n * heads * d), heads * d, heads, d);
}

/** i * MT_OP_SCATTER % n is a permutation of [0, n) in which neighbours are far apart. */
#define MT_OP_SCATTER UINT64_C(2654435761)

#endif
