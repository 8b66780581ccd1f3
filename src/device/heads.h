/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdbool.h>
#include <stddef.h>

/**
 * Heads of some tokens, wherever they lie: element i of head h of token t is at p[t * ld + h * stride + i], i < dim.
 * A view: the memory is borrowed, and not written where an operation calls it an input. A stride of 0 is one head that
 * all share; only inputs may be shared, unless an operation says otherwise. Heads without an element in common with
 * others lie in stride >= dim.
 */
struct mt_heads {
    void *p;
    size_t ld, stride; /* elements from token to token, from head to head */
    size_t n, dim;     /* heads, elements of a head */
};

/** n heads side by side in rows that are ld elements apart. */
static inline struct mt_heads mt_heads(const void *p, size_t ld, size_t n, size_t dim)
{
    struct mt_heads h = {(void *)p, ld, dim, n, dim};
    return h;
}

/** Do the heads lie side by side? */
static inline bool mt_heads_adjoin(const struct mt_heads *h)
{
    return h->n <= 1 || h->stride == h->dim;
}

/** Elements of a row that the heads span. */
static inline size_t mt_heads_span(const struct mt_heads *h)
{
    return h->n ? (h->n - 1) * h->stride + h->dim : 0;
}

/** The element where a head of a token begins. */
static inline size_t mt_heads_at(const struct mt_heads *h, size_t token, size_t head)
{
    return token * h->ld + head * h->stride;
}

/** Rows that do not lie side by side: row i begins at element i / group * ld + i % group * stride; group 0: at i times
 * the row's length. */
struct mt_row_groups {
    size_t group, ld, stride;
};
