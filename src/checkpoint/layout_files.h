/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "hf/source.h"
#include "model/packing.h"
#include "model/stored.h"

/** The weights of a layout as tensors of files, with packed ones as their pieces, byte for byte. */
struct mt_layout_files {
    const struct mt_layout *layout;
    mt_plane_set *planes;
    struct mt_source_list list; /* of them, `of` is the mt_stored, and `part` 0, or 1 + the number of its packed piece */
    bool *lost;         /* is set when reading fails; NULL: not wanted */
    char *quantization; /* for struct mt_hf_dir */
    struct mt_stored_writer writer;
    struct mt_packed_piece *pieces; /* of all that are packed */
    size_t n_pieces;
};
/** All of the model's. Layout and planes are borrowed; f stays where it is. left: [n_stored] which stored tensors to leave
 * out; NULL: none. */
int mt_layout_files_init(struct mt_layout_files *f, const struct mt_layout *l, mt_plane_set *planes, const bool *left,
                         struct mt_err *err);
void mt_layout_files_finish(struct mt_layout_files *f);
/** None yet. */
void mt_layout_files_begin(struct mt_layout_files *f, const struct mt_layout *l, mt_plane_set *planes);
/** Adds one that is not packed, of the model or of adapters, in F32. The name is borrowed. */
int mt_layout_files_add_f32(struct mt_layout_files *f, const struct mt_stored *s, const char *name, struct mt_err *err);
/** Adds the tensors of m that the layout leaves as they are (mt_stored_goes_along()). */
int mt_layout_files_add_copied(struct mt_layout_files *f, const struct mt_st_model *m, struct mt_err *err);
