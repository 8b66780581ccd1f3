/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "model/packing.h"
#include "store/planes.h"

/** A packed tensor, read whole into host memory: from files (packed_files.h), or from the planes, for what is computed
 * once, before training. */
struct mt_packed_matrix {
    enum mt_packed format;
    size_t cols;
    uint8_t *codes; /* owned */
    float *scales;  /* owned; all of them, as f32 */
    float factor;   /* that is part of E4M3 ones */
    uint32_t *zeros; /* owned; NULL: it has no zero points */
};
/** Reads a piece whole, also the offset of nested scales. */
typedef int (*mt_packed_read)(void *ctx, const struct mt_tensor *t, const struct mt_packed_piece *p, void *dst,
                              struct mt_err *err);
/** What *out had is finished first: it begins as zeros. Finish it also after an error. */
int mt_packed_matrix_read(struct mt_packed_matrix *out, const struct mt_tensor *t, mt_packed_read read, void *ctx,
                          struct mt_err *err);
/** The same of planes. */
int mt_packed_plane_read(struct mt_packed_matrix *out, mt_plane_set *planes, const struct mt_tensor *t,
                         struct mt_err *err);
/** Elements [first, first + n) of a tensor in planes as f32. m keeps it if it is packed; zeros before. */
int mt_packed_plane_values(struct mt_packed_matrix *m, mt_plane_set *planes, const struct mt_tensor *t, size_t first,
                           size_t n, float *dst, struct mt_err *err);
/** Decodes elements [first, first + n) of the tensor. */
void mt_packed_matrix_values(const struct mt_packed_matrix *p, size_t first, size_t n, float *dst);
/** Accepts one of zeros. */
void mt_packed_matrix_finish(struct mt_packed_matrix *p);
