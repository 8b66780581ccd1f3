/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "hf/source.h"
#include "model/packing.h"
#include "model/stored.h"

/** Tensors of a layout as tensors of files, which its writer assembles; packed ones as their pieces, byte for byte. */
struct mt_layout_files {
    struct mt_stored_writer writer;
    struct mt_source_list list; /* of the layout's, `of` is the mt_stored, and `part` as in mt_stored_part */
    bool *lost;         /* is set when reading fails; NULL: not wanted */
    char *quantization; /* for struct mt_hf_dir; NULL: unchanged */
    struct mt_packed_piece *pieces; /* of all that are packed */
    size_t n_pieces;
};
/** All of the model's, from planes. Layout and planes are borrowed; f stays where it is. left: [n_stored] which stored
 * tensors to leave out; NULL: none. */
int mt_layout_files_init(struct mt_layout_files *f, const struct mt_layout *l, mt_plane_set *planes, const bool *left,
                         struct mt_err *err);
/** None yet: of planes, or `as` the caller reads its tensors. */
void mt_layout_files_of_planes(struct mt_layout_files *f, const struct mt_layout *l, mt_plane_set *planes);
void mt_layout_files_begin(struct mt_layout_files *f, struct mt_stored_writer as);
void mt_layout_files_finish(struct mt_layout_files *f);
/** One that is not packed, of the model or of adapters, in BF16 or F32. */
struct mt_source mt_layout_files_source(struct mt_layout_files *f, const struct mt_stored *s, struct mt_st_decl as);
/** Adds the tensors of m that the layout leaves as they are (mt_stored_goes_along()). */
int mt_layout_files_add_copied(struct mt_layout_files *f, const struct mt_st_model *m, struct mt_err *err);
