/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "store/planes.h"

#define MADE_M MT_PLANE_STATE
#define MADE_V ((enum mt_plane_kind)(MT_PLANE_STATE + 1))

/** Parameters of planes with two states; a unit that is not trainable has only weights. */
static inline struct mt_plane_set_params made_planes(size_t n_units, const size_t *n, const bool *trainable,
                                                     struct mt_plane_elems *elems, enum mt_dtype state,
                                                     enum mt_dtype grad)
{
    struct mt_plane_set_params p = {.n_units = n_units, .elems = elems};
    size_t s = mt_dtype_size(state);
    p.desc[MT_PLANE_HI] = (struct mt_plane_desc){"hi", NULL, MT_ROLE_WEIGHT, MT_RANGE_TRAINED, MT_BF16, 1, 2};
    p.desc[MT_PLANE_LO] = (struct mt_plane_desc){"lo", NULL, MT_ROLE_WEIGHT, MT_RANGE_TRAINED, MT_BF16, 1, 2};
    p.desc[MADE_M] = (struct mt_plane_desc){"m", "m", MT_ROLE_STATE, MT_RANGE_TRAINED, state, 1, s};
    p.desc[MADE_V] = (struct mt_plane_desc){"v", "v", MT_ROLE_STATE, MT_RANGE_TRAINED, state, 1, s};
    p.desc[MT_PLANE_GRAD] =
        (struct mt_plane_desc){"gradients", NULL, MT_ROLE_GRADIENT, MT_RANGE_TRAINED, grad, 1, mt_dtype_size(grad)};
    for (size_t u = 0; u < n_units; u++) {
        elems[u] = (struct mt_plane_elems){{0}};
        for (int k = 0; k < MT_N_PLANES; k++)
            if (p.desc[k].role == MT_ROLE_WEIGHT ? k <= MT_PLANE_LO : trainable[u])
                elems[u].n[k] = n[u];
    }
    return p;
}
