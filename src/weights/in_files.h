/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "model/layout.h"
#include "store/files/file_weights.h"

/**
 * Opens the planes that are read in place from DIR's files: those whose bit is set in in_files [n_units], of tensors
 * that are marked as in_file. What the files have in f16 or f32, or in another order than the planes, is converted and
 * put in order when it is read; packed tensors are read as they are. Weights that are not finite are the same error as
 * in mt_weights_load(), when they are first read. Of packed ones, scales so large that a product with a code may not be
 * finite are refused, too. `fault`: for tests; NULL: none.
 */
int mt_weights_open_files(mt_file_weights **out, const struct mt_layout *l, const mt_plane_bits *in_files,
                          const char *dir, enum mt_io_kind io, const struct mt_io_fault *fault, struct mt_err *err);
