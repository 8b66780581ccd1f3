/* SPDX-License-Identifier: Apache-2.0 */
#ifndef MT_CHECKPOINT_CHECKPOINT_H
#define MT_CHECKPOINT_CHECKPOINT_H

#include "checkpoint/hf_dir.h"
#include "checkpoint/history.h"
#include "checkpoint/state.h"
#include "checkpoint/vfs.h"
#include "model/layout.h"
#include "store/planes.h"

/**
 * A checkpoint, DIR/checkpoint-<step>/, is a complete Hugging Face folder in bf16 plus megatrain/: a
 * state-*.safetensors a unit with <name>.master in F32 and the optimizer's states (.exp_avg and .exp_avg_sq), and
 * state.json with the size and XXH3 of every file and tensor. It is written under a temporary name, synced, renamed,
 * and the parent synced: either all of it is there or none. With weights alone, megatrain/ has the list of files and
 * sums. Of a model with adapters, the folder is PEFT's, and what is trained is all that it holds.
 */
struct mt_checkpoint_save {
    const struct mt_vfs *vfs; /* NULL: the real one */
    const char *dir;          /* the run's output folder */
    const char *model_dir;    /* whose config.json, tokenizer ... are copied, where `files` is NULL */
    const char *base_model;   /* with adapters: what they name as their model */
    const struct mt_hf_files *files; /* those, read before */
    const struct mt_layout *layout;
    mt_plane_set *planes;     /* on the disk or not: read a window at a time */
    const struct mt_train_state *state;
    struct mt_history *history; /* updated; NULL: nothing is known of what is in the folder */
    bool full;                /* with training state */
    const uint64_t *named;    /* [n_tensors] sums of the base's tensors (in_base): a full checkpoint names these instead of
                                 holding them. NULL: it holds all */
    const char *base_dir;     /* whose tensors they are */
    bool *lost;               /* set where it failed because the planes could not be read; may be NULL */
    uint64_t shard_bytes;
};
/** Writes nothing where the folder holds this process's own bytes of that step; else what has its name is set aside. */
int mt_checkpoint_save(const struct mt_checkpoint_save *s, struct mt_err *err);
/**
 * Does in DIR, with a small file, what a save does: what the file system cannot do shows before anything is trained.
 * That symbolic links cannot be made is only a warning.
 */
int mt_checkpoint_rehearse(const struct mt_vfs *vfs, const char *dir, struct mt_err *err);
/** Is the tensor in checkpoints? Of a model with adapters, what is trained alone. */
bool mt_checkpoint_holds(const struct mt_layout *l, const struct mt_tensor *t);
/** Bytes a checkpoint takes; desc: the rows of the planes that are saved; named: a full one names the base's tensors. */
uint64_t mt_checkpoint_bytes(const struct mt_layout *l, const struct mt_plane_desc desc[MT_N_PLANES], bool full,
                             bool named);

/**
 * The newest checkpoint of DIR that can be resumed and verifies; *path is the caller's, NULL where the folder has no
 * checkpoint at all. One that another of the folder went on past from an earlier step comes after that one. -EBADMSG
 * (MT_ERR_CHECKPOINT) where there are some and none will do; the error of reading one, which says nothing of its bytes.
 * `pass`: passes over those that cannot be read.
 */
int mt_checkpoint_find_newest(const char *dir, bool pass, char **path, struct mt_err *err);
/** The newest that can be resumed by its list of files alone: their bytes are not read. NULL: none. The caller's. */
char *mt_checkpoint_find_whole(const char *dir);
/** Every file's size and sum; a bad byte is reported with file and tensor. MT_ERR_CHECKPOINT. */
int mt_checkpoint_verify(const char *path, struct mt_err *err);
/**
 * Of a folder that is to be read as a model: the bytes of its weights, where it has sums of them; `all`: and of what
 * goes along with them; `states`: and of the training state. 0 where there are no sums.
 */
int mt_checkpoint_verify_model(const char *path, bool all, bool states, struct mt_err *err);
/** Whether every file that it lists is there in its size; their bytes are not read. */
bool mt_checkpoint_is_whole(const char *path, struct mt_err *err);
int mt_checkpoint_read_state(const char *path, struct mt_train_state *out, struct mt_err *err);
/**
 * Fills the planes with exactly what was saved: each tensor's checksum is that of the bytes that went there. Tensors that
 * it names are left out: mt_weights_load_base(). With adapters, the base must be there already.
 */
int mt_checkpoint_load(const char *path, const struct mt_layout *l, mt_plane_set *planes,
                       struct mt_err *err);

struct mt_export {
    const char *from, *to;     /* from: a model, or adapters (a PEFT folder) */
    const char *base;          /* the model to add the adapters to: sums in f32, rounded once; NULL: they alone */
    bool f32;                  /* from the masters where there are some; what is packed stays as it is */
    enum mt_packed base_dtype; /* packs the layers' matrices; takes host memory for the whole packed model */
    uint64_t shard_bytes;
};
/** Writes a Hugging Face folder alone, synced and with the sums of its files. What it is made from is verified. */
int mt_checkpoint_export(const struct mt_export *e, struct mt_err *err);

/**
 * Takes DIR/.lock for this process; the error names the holder. The lock ends with the descriptor. Where the file
 * system has no locks, that is a warning.
 */
int mt_checkpoint_lock(const char *dir, int *fd, struct mt_err *err);

#endif
