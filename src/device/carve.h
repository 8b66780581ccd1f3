/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "base/mem.h"

/** Memory that is laid out part by part, from a base that is aligned for all of them. base NULL: it is only counted. */
struct mt_carve {
    char *base;
    size_t used;
};
/** The next part; NULL without a base. */
static inline void *mt_carve(struct mt_carve *c, size_t bytes, size_t alignment)
{
    size_t at = mt_align_up(c->used, alignment);
    c->used = at + bytes;
    return c->base ? c->base + at : NULL;
}
