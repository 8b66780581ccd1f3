/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "hf/source.h"
#include "model/packing.h"
#include "model/stored.h"

/** The weights of a layout as tensors of the model's files, with packed ones as their pieces, byte for byte. */
struct mt_layout_files {
    const struct mt_layout *layout;
    mt_plane_set *planes;
    struct mt_layout_file {
        size_t stored;                  /* index into mt_layout.stored */
        const struct mt_tensor *packed; /* NULL: it is plain */
        struct mt_packed_piece piece;
        int which;                      /* of the packed tensor's pieces */
    } *of;
    size_t n;
    struct mt_source_list list; /* of[i] is read as p[i]; others may be added after the n */
    bool *lost;         /* is set when reading fails; NULL: not wanted */
    char *quantization; /* for struct mt_hf_dir */
    struct mt_stored_writer writer;
    /* for a fused piece of all experts: one expert's share of it, and one tensor's part of that */
    uint8_t *share, *tensor;
    const struct mt_layout_file *share_of; /* NULL: none */
    size_t share_expert, share_bytes, tensor_bytes;
};
/** Layout and planes are borrowed; f stays where it is. left: [n_stored] which stored tensors to leave out; NULL:
 * none. */
int mt_layout_files_init(struct mt_layout_files *f, const struct mt_layout *l, mt_plane_set *planes, const bool *left,
                         struct mt_err *err);
void mt_layout_files_finish(struct mt_layout_files *f);
/** Adds the tensors of m that the layout leaves as they are (mt_stored_goes_along()). */
int mt_layout_files_add_copied(struct mt_layout_files *f, const struct mt_st_model *m, struct mt_err *err);
