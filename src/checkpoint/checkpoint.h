/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "checkpoint/hf_dir.h"
#include "checkpoint/history.h"
#include "checkpoint/state.h"
#include "checkpoint/vfs.h"
#include "model/layout.h"
#include "store/planes.h"

/**
 * A checkpoint, DIR/checkpoint-<step>/, is a complete Hugging Face folder in bf16 plus megatrain/: a
 * state-*.safetensors for each block with <name>.master in F32 and the optimizer's states (.exp_avg and .exp_avg_sq),
 * and state.json with the size and XXH3 of every file and tensor. It is written under a temporary name, synced,
 * renamed, and the parent synced: either it is complete or it does not exist. A checkpoint of weights alone has only
 * the list of files and sums in megatrain/. With adapters, the folder is PEFT's, and holds only what is trained.
 */
#define MT_REFERENCE_NAME "reference.f64" /* in megatrain/, where the objective needs a reference */
struct mt_checkpoint_save {
    const struct mt_vfs *vfs; /* NULL: the real one */
    const char *dir;          /* the run's output folder */
    const char *model_dir;    /* its config.json, tokenizer ... are copied if `files` is NULL */
    const char *base_model;   /* with adapters: that adapter_config.json names, a folder by its absolute path */
    const struct mt_hf_files *files; /* the same files, read earlier */
    const struct mt_layout *layout;
    mt_plane_set *planes;     /* in memory or on drives: read a window at a time */
    const struct mt_train_state *state;
    struct mt_history *history; /* updated; NULL: nothing is known about the folder's checkpoints */
    bool full;                /* with training state */
    const uint64_t *named;    /* [n_tensors] sums of the base's tensors (in_base): a full checkpoint names these instead
                                 of holding them. NULL: it holds all */
    const char *base_dir;     /* the folder of these tensors */
    const struct mt_st_model *base; /* its files, open: the folder itself may be gone. Names are looked up in them, and
                                 tensors that the program does not use are copied. NULL: there are none; a run by blocks
                                 has them */
    bool *lost;               /* set if it failed because the planes could not be read; may be NULL */
    uint64_t shard_bytes;
};
/** Writes nothing if this process has already saved this step; another folder of the same name is set aside. */
int mt_checkpoint_save(const struct mt_checkpoint_save *s, struct mt_err *err);
/**
 * Makes DIR/checkpoint-<step>, which this process has written or resumed from, say what the state says now, in one
 * step: tensors stay. Of *s: vfs, dir, state, history. For what an evaluation finds after the save.
 */
int mt_checkpoint_amend(const struct mt_checkpoint_save *s, struct mt_err *err);
/** The adapters of a layout alone, as a PEFT folder `to`, which must not exist. Of *s: files, model_dir, base_model,
 * layout, planes. */
int mt_checkpoint_write_adapters(const struct mt_checkpoint_save *s, const char *to, struct mt_err *err);
/**
 * Tries all operations of a save in DIR with a small file, so that a file system without one of them is found before
 * training. Missing symbolic links are only a warning.
 */
int mt_checkpoint_rehearse(const struct mt_vfs *vfs, const char *dir, struct mt_err *err);
/** Is the tensor in checkpoints? With adapters, only trained ones are. */
bool mt_checkpoint_holds(const struct mt_layout *l, const struct mt_tensor *t);
/** Bytes of a checkpoint; desc: the kinds of planes; named: a full one names the base's tensors. */
uint64_t mt_checkpoint_bytes(const struct mt_layout *l, const struct mt_plane_desc desc[MT_N_PLANES], bool full,
                             bool named);

/**
 * The newest checkpoint of DIR that can be resumed and has the right checksums; the caller frees *path. NULL: the
 * folder has no checkpoint. A checkpoint that was given up, since a run in the folder resumed from an earlier step,
 * comes last. -EBADMSG (MT_ERR_CHECKPOINT): there are checkpoints, but none can be resumed. If one cannot be read, that
 * error, since it may be good; `pass`: it is skipped.
 */
int mt_checkpoint_find_newest(const char *dir, bool pass, char **path, struct mt_err *err);
/** The same, only checking that its files are there in their sizes. NULL: none. The caller frees it. */
char *mt_checkpoint_find_whole(const char *dir);
/** Verifies every file's size and checksum; the message names file and tensor. MT_ERR_CHECKPOINT. */
int mt_checkpoint_verify(const char *path, struct mt_err *err);
/**
 * Verifies the weights of a folder that will be read as a model, if it has checksums of them; `all`: also the files
 * beside them; `states`: also the training state. 0 if there are no checksums.
 */
int mt_checkpoint_verify_model(const char *path, bool all, bool states, struct mt_err *err);
/**
 * The same in two parts, between which the weights are loaded (mt_base_sums.sealed): the sums of a folder's stored
 * tensors, after everything else was verified, and whole files where the seal has no sums of tensors and headers.
 * *out NULL: there is nothing to compare. cJSON_Delete() frees it.
 */
int mt_checkpoint_open_seal(const char *dir, cJSON **out, struct mt_err *err);
/** Then compares the tensors that loading did not. */
int mt_checkpoint_verify_left(const char *dir, const cJSON *sealed, struct mt_err *err);
/** Does every file that it lists exist with its size? Contents are not read. -EBADMSG: no; another error: it cannot be
 * looked at. */
int mt_checkpoint_check_whole(const char *path, struct mt_err *err);
int mt_checkpoint_read_state(const char *path, struct mt_train_state *out, struct mt_err *err);
/**
 * Fills the planes with exactly what was saved: the checksum of each tensor is verified on the bytes that are loaded.
 * Leaves out tensors that the checkpoint names (mt_weights_load_base()). With adapters, the base must be loaded before.
 */
int mt_checkpoint_load(const char *path, const struct mt_layout *l, mt_plane_set *planes,
                       struct mt_err *err);

struct mt_export {
    const char *from, *to;     /* from: a model, or adapters (a PEFT folder) */
    const char *base;          /* the model to merge the adapters into: f32 sums, rounded once; NULL: adapters alone */
    bool f32;                  /* from the masters if there are any; packed tensors stay packed. With
                                * base_dtype: what is not packed, of a folder without masters */
    enum mt_packed base_dtype; /* packs the layers' matrices; needs host memory for the whole packed model */
    bool fold;                 /* adapters get one rank and scale (checkpoint/fold.h); not with a base */
    uint64_t shard_bytes;
};
/** Writes a Hugging Face folder without training state, synced, with checksums of its files. Its source is verified. */
int mt_checkpoint_export(const struct mt_export *e, struct mt_err *err);
