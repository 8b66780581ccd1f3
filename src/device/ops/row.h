/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <string.h>

#include "device/op.h"

/* Shared by the rows of operations. */

/**
 * The row of the operation `op` of struct mt_<op>, of the functions check_<op>(), cost_<op>() and fill_<op>(), which
 * take these arguments by type; `counted` is the member whose offset is `count`. What follows are other members.
 */
#define MT_OP_ROW(op, counted, ...) MT_OP_ROW_OF(op, mt_##op, counted, (#op), __VA_ARGS__)
/** The same, of a struct of another name, and with the names of variants in parentheses. */
#define MT_OP_ROW_OF(op, type, counted, names, ...)                                                \
    static const char *op##_check(const void *a)                                                   \
    {                                                                                              \
        return check_##op(a);                                                                      \
    }                                                                                              \
    static void op##_cost(const void *a, struct mt_metered *out)                                   \
    {                                                                                              \
        cost_##op(a, out);                                                                         \
    }                                                                                              \
    static void op##_fill(mt_example *x, const struct mt_metered *shape, void *a)                  \
    {                                                                                              \
        fill_##op(x, shape, a);                                                                    \
    }                                                                                              \
    const struct mt_op mt_op_row_##op = {.name = {MT_OP_NAMES names},                              \
                                         .args_bytes = sizeof(struct type),                        \
                                         .count = offsetof(struct type, counted),                  \
                                         .check = op##_check,                                      \
                                         .cost = op##_cost,                                        \
                                         .fill = op##_fill,                                        \
                                         __VA_ARGS__}
#define MT_OP_NAMES(...) __VA_ARGS__

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

/** Can documents go on by that? */
static inline bool carried_or_none(const struct mt_carried *c)
{
    return !c->after || (c->before && c->past && c->place);
}

static inline bool not_both(const struct mt_carried *c, const struct mt_handed *h)
{
    return !c->after || (!h->from && !h->to);
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

/** An operation's dtype and dimensions, of MT_DIMS(). */
#define MT_DIMS(...) (const uint64_t[MT_METER_DIMS]){__VA_ARGS__}
static inline void mt_op_shape(struct mt_metered *out, enum mt_dtype t, const uint64_t *dims)
{
    out->dtype = t;
    memcpy(out->dim, dims, MT_METER_DIMS * sizeof(*dims));
}

/* --- rows by one walk over the arguments ---------------------------------------------------------
 *
 * Most operations say what they are in one function, void <op>(struct mt_op_walk *, struct mt_<op> *): it goes through
 * dimensions, dtype, conditions and operands. The same walk checks arguments, counts their cost, and fills in those of
 * an example; only the last writes to them. */

struct mt_op_walk {
    const char *wrong;              /* of a check: the first condition that does not hold */
    struct mt_metered *cost;        /* of a count, else NULL */
    mt_example *x;                  /* of an example, else NULL; with its shape */
    const struct mt_metered *shape;
    int n_dims;                     /* those that were met */
};

/** What an operation does with an operand; OR what is else to be said of it. */
enum {
    READ = MT_TAKE_READ,
    WRITE = MT_TAKE_WRITE,
    UPDATE = READ | WRITE,
    FRESH = READ | MT_TAKE_FRESH,      /* see MT_TAKE_FRESH */
    IN_PLACE = UPDATE | MT_TAKE_FRESH,
    OPTIONAL = 256,                    /* may be NULL, which costs nothing */
    ABSENT = OPTIONAL | 512,           /* the same, and NULL in examples */
    LOOSE = 1024,                      /* only element-aligned */
};

/** The next dimension of the row. Returns it. */
size_t mt_op_dim(struct mt_op_walk *w, size_t *dim);
/** The dtype in which the operation counts. Returns it. */
enum mt_dtype mt_op_dtype(struct mt_op_walk *w, enum mt_dtype *dtype);

/** A condition; of those of a check the first that does not hold counts, and later ones are not looked at. */
#define MT_NEED(w, cond)                                                                           \
    do {                                                                                           \
        if (!(w)->x && !(w)->cost && !(w)->wrong && !(cond))                                       \
            (w)->wrong = "needs " #cond;                                                           \
    } while (0)

/** What examples set, beyond dimensions, dtype and operands. */
#define MT_FILL(w, set)                                                                            \
    do {                                                                                           \
        if ((w)->x) {                                                                              \
            set;                                                                                   \
        }                                                                                          \
    } while (0)

/**
 * An operand: n elements of `dtype` at `pointer`, a member. Costs as many bytes, times `moves`. An example that has set
 * the pointer keeps it, else takes a buffer.
 */
#define MT_ARRAY(w, pointer, use, dtype, n, moves)                                                 \
    mt_op_array(w, &(pointer), (use) & LOOSE ? "needs " #pointer : "needs " #pointer ", aligned to 16 bytes", use, \
                dtype, n, moves)
void mt_op_array(struct mt_op_walk *w, void *pointer, const char *needs, unsigned use, enum mt_dtype dtype, size_t n,
                 int moves);

/** The same of `count` heads of width `dim` in each of n rows: `heads`, a member, is a view without overlaps. */
#define MT_HEADS(w, heads, use, dtype, n, count, dim, moves)                                       \
    do {                                                                                           \
        if ((w)->x && !(heads).p)                                                                  \
            (heads) = mt_heads(NULL, (count) * (dim), count, dim);                                 \
        mt_op_array(w, &(heads).p, "needs " #heads, (use) | LOOSE, dtype, (n) * (count) * (dim), moves); \
        MT_NEED(w, heads_apart(&(heads)));                                                         \
    } while (0)

/** The workspace of an operation of the table's W lines, with arguments `args`: the last operand. */
#define MT_WORKSPACE(w, args, wanted)                                                              \
    do {                                                                                           \
        MT_NEED(w, !(wanted) || (args)->workspace);                                                \
        if ((w)->x)                                                                                \
            (args)->workspace = mt_op_take_workspace(w, args);                                     \
    } while (0)
void *mt_op_take_workspace(struct mt_op_walk *w, const void *args);

/** The row of the operation `op` of struct mt_<op>, by its walk; the rest as of MT_OP_ROW(). */
#define MT_OP_WALK(op, counted, ...) MT_OP_WALK_OF(op, mt_##op, counted, (#op), __VA_ARGS__)
#define MT_OP_WALK_OF(op, type, counted, names, ...)                                               \
    static const char *check_##op(const struct type *a)                                            \
    {                                                                                              \
        struct mt_op_walk w = {0};                                                                 \
        op(&w, (struct type *)(uintptr_t)a);                                                       \
        return w.wrong;                                                                            \
    }                                                                                              \
    static void cost_##op(const struct type *a, struct mt_metered *out)                            \
    {                                                                                              \
        op(&(struct mt_op_walk){.cost = out}, (struct type *)(uintptr_t)a);                        \
    }                                                                                              \
    static void fill_##op(mt_example *x, const struct mt_metered *shape, struct type *a)           \
    {                                                                                              \
        op(&(struct mt_op_walk){.x = x, .shape = shape}, a);                                       \
    }                                                                                              \
    MT_OP_ROW_OF(op, type, counted, names, __VA_ARGS__)

/** i * MT_OP_SCATTER % n is a permutation of [0, n) in which neighbours are far apart. */
#define MT_OP_SCATTER UINT64_C(2654435761)
