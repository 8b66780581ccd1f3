/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "model/layout.h"
#include "store/planes.h"

/**
 * Replaces the matrices of the planes that adapters are merged into (model/packing.h, mt_merge_of) by what a run that
 * computes in `dtype` has in their place: codes of their own format, and scales if those are recomputed. From then on
 * the planes of the model's own tensors are those of the merged model.
 */
int mt_merge_packed(const struct mt_layout *l, mt_plane_set *planes, enum mt_dtype dtype, struct mt_err *err);

/** The share of the weights that adapters are merged into that differ from the base; if these are many, of some
 * matrices, evenly spread. Planes are only read. NaN: nothing is merged. */
int mt_merge_share(double *out, const struct mt_layout *l, mt_plane_set *planes, enum mt_dtype dtype,
                   struct mt_err *err);
