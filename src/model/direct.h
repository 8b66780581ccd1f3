/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "model/model.h"
#include "store/planes.h"

/**
 * Optimizers that make a direction of a gradient while all of it is on the device (mt_optimizer.direct): the states by
 * which they do so, and the step from gradient to direction.
 */

/** A plane of such states, and its place in the unit's buffer of them. */
struct mt_moment_plane {
    enum mt_plane_kind kind;
    size_t at, bytes;
};
/** The unit's, in the order of the optimizer's states; returns their number. */
size_t mt_unit_moment_planes(const struct mt_layout *l, size_t unit, struct mt_moment_plane plane[MT_MAX_STATES]);
/** Bytes of the buffer; 0: gradients of the unit leave as they are. */
size_t mt_unit_moment_bytes(const struct mt_layout *l, size_t unit);
/** Whether the tensor's gradient becomes a direction. */
bool mt_tensor_has_direction(const struct mt_layout *l, const struct mt_tensor *t);
