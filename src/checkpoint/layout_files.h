/* SPDX-License-Identifier: Apache-2.0 */
#ifndef MT_CHECKPOINT_LAYOUT_FILES_H
#define MT_CHECKPOINT_LAYOUT_FILES_H

#include "hf/safetensors.h"
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
    struct mt_st_decl *decls;
    size_t n;           /* of both */
    char *quantization; /* for struct mt_hf_dir */
    struct mt_stored_writer writer;
    /* for a fused piece of all experts: one expert's share of it, and one tensor's part of that */
    uint8_t *share, *tensor;
    size_t share_of, share_expert, share_bytes, tensor_bytes; /* of decls; SIZE_MAX: none */
};
/** Layout and planes are borrowed; decls has space for `more` after its n. left: [n_stored] which stored tensors to
 * leave out; NULL: none. */
int mt_layout_files_init(struct mt_layout_files *f, const struct mt_layout *l, mt_plane_set *planes, const bool *left,
                         size_t more, struct mt_err *err);
void mt_layout_files_finish(struct mt_layout_files *f);
/** Elements [first, first + n) of decls[i]. */
int mt_layout_files_read(struct mt_layout_files *f, size_t i, size_t first, size_t n, void *dst, struct mt_err *err);

#endif
