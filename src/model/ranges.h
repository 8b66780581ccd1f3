/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "model/layout.h"
#include "optim/optimizer.h"
#include "store/planes.h"

/**
 * From units and an optimizer to planes: the kinds of planes, and how many elements of each a unit has.
 * All sizes of planes and offsets in them are computed here.
 */

/** The kinds of planes, a row each. `optimizer` NULL: nothing is trained, there are neither states nor gradients. */
void mt_plane_descs(struct mt_plane_desc desc[MT_N_PLANES], const struct mt_optimizer *optimizer, enum mt_master master,
                    enum mt_dtype grad);

/** Do the device's weights in compute dtype `dtype` come from planes of this kind? */
bool mt_plane_is_loaded(enum mt_plane_kind k, enum mt_dtype dtype);
mt_plane_bits mt_loaded_planes(enum mt_dtype dtype);
/** The same for one unit, with lo of its tensor that is FP32 on the device whatever the compute dtype; for any unit. */
mt_plane_bits mt_unit_loaded_planes(const struct mt_layout *l, size_t unit, enum mt_dtype dtype);
mt_plane_bits mt_layout_loaded_planes(const struct mt_layout *l, enum mt_dtype dtype);
/** Kinds that hold frozen weights; of these, the ones that a unit may have and that can be read in place. */
mt_plane_bits mt_frozen_planes(void);
mt_plane_bits mt_unit_file_planes(const struct mt_unit *u);

/** The planes that hold the weights of a kind of range; lo MT_NO_PLANE: there is only hi. */
struct mt_range_planes {
    enum mt_plane_kind hi, lo;
};
struct mt_range_planes mt_range_planes(enum mt_range_kind range);
/** The same for the device, which takes masters of fewer than 32 bits without their lo. */
struct mt_range_planes mt_device_planes(const struct mt_layout *l, enum mt_range_kind range);

/** Elements of the unit's plane of kind k. */
size_t mt_unit_n_elems(const struct mt_unit *u, const struct mt_plane_desc desc[MT_N_PLANES], enum mt_plane_kind k);

/**
 * The planes of a whole layout: fills desc, n_units and elems; the rest stays zero. The caller frees elems.
 */
int mt_layout_plane_params(struct mt_plane_set_params *out, const struct mt_layout *l,
                           const struct mt_optimizer *optimizer, enum mt_dtype grad, struct mt_err *err);

/** What the bytes of a tensor's states may depend on. */
struct mt_state_shape mt_tensor_state_shape(const struct mt_tensor *t);

/** The bytes that a tensor has of plane k of its unit, a weight's or a state's; bytes 0: none. */
struct mt_tensor_span {
    size_t at, bytes;
};
struct mt_tensor_span mt_tensor_span(const struct mt_tensor *t, const struct mt_plane_desc *d, enum mt_plane_kind k);

/** Elements at multiples of which pieces of updates end, so that they are whole pages of every plane. */
size_t mt_piece_align(const struct mt_plane_desc desc[MT_N_PLANES]);

/** FP32 masters of the tensor's elements [first, first + n), to and from the planes that hold them; rounded to the
 * nearest where those of the set have fewer bits. */
int mt_tensor_write_masters(mt_plane_set *planes, const struct mt_tensor *t, size_t first, size_t n,
                            const float *masters, struct mt_err *err);
int mt_tensor_read_masters(mt_plane_set *planes, const struct mt_tensor *t, size_t first, size_t n, float *masters,
                           struct mt_err *err);
