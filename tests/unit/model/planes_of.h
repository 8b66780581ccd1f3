/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdlib.h>

#include "model/layout.h"
#include "model/ranges.h"
#include "test.h"

/** Planes in memory of all of a layout's tensors, for that optimizer and gradients of grad_dtype; the caller's. */
static inline mt_plane_set *planes_of(const struct mt_layout *l, const struct mt_optimizer *optimizer,
                                      enum mt_dtype grad_dtype)
{
    struct mt_plane_set_params p;
    mt_plane_set *planes = NULL;
    assert_int_equal(mt_layout_plane_params(&p, l, optimizer, grad_dtype, NULL), 0);
    assert_int_equal(mt_plane_set_create(&planes, &p, NULL), 0);
    free(p.elems);
    return planes;
}
