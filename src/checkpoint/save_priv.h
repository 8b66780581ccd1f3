/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "base/json.h"
#include "checkpoint/checkpoint.h"
#include "checkpoint/hf_dir.h"
#include "checkpoint/layout_files.h"

/* A checkpoint while it is written: save.c makes the folder, save_tensors.c its tensors. */

struct mt_saver {
    const struct mt_checkpoint_save *s;
    const struct mt_vfs *vfs;
    char tmp[4096];
    char base_dir[4096]; /* absolute, so that it is found from any folder */
    cJSON *frozen; /* what an earlier version of this checkpoint names; NULL: none */
    cJSON *files;
    char sum[MT_SUM_TEXT]; /* of the sealed file */
};

/* save_tensors.c */

/** Does the checkpoint only name the tensor, which stays in the model's folder? */
bool mt_save_names_only(const struct mt_checkpoint_save *s, const struct mt_tensor *t);
/** Does a checkpoint copy tensors of the model that are not in the layout from its files? */
bool mt_save_copies(const struct mt_checkpoint_save *s);
/** A folder as PEFT writes it: all trained tensors, and nothing of the base. */
int mt_save_adapter(struct mt_saver *v, struct mt_err *err);
/** A folder as transformers writes it, with all weights. */
int mt_save_weights(struct mt_saver *v, struct mt_err *err);
/** A part of a tensor's training state, as it is in a file and in the planes. */
struct mt_state_part {
    const struct mt_tensor *t;
    enum mt_plane_kind kind; /* MT_PLANE_HI: the FP32 master */
    char name[160];
    struct mt_st_decl decl;  /* but for the name */
    size_t at, bytes;        /* of the plane; of a master only bytes */
};
/**
 * The master, or the state that planes of this kind are: in the tensor's shape if it has an F32 or BF16 number for each
 * element, else as numbers in a row, or as the bytes of its blocks. False: the tensor has none.
 */
bool mt_state_part(struct mt_state_part *out, const mt_plane_set *planes, const struct mt_tensor *t,
                   enum mt_plane_kind kind);
/** Masters and optimizer states, a file for each block. */
int mt_save_state(struct mt_saver *v, struct mt_err *err);
