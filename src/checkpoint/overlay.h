/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "checkpoint/hf_dir.h"
#include "checkpoint/merge.h"
#include "hf/safetensors.h"
#include "model/layout.h"
#include "store/planes.h"

/**
 * An overlay: a folder of weights over those of a model, OUT/overlay-<phase>-<sum>/. Its index names the files that it
 * has of its own, and says of all other tensors that they are in the model's folder (MT_ST_IN_BASE); so mt_st_open_dir()
 * reads both as one. <sum> is made of the sums of its files: one name always means the same weights, whichever run
 * writes them. Files that the overlay before has, and this phase did not train, are linked: nothing is copied twice.
 */
struct mt_overlay_rounding {
    struct mt_rounded all;
    const char *worst; /* the tensor of which least is left; NULL: none was rounded. The layout's, or `base`'s */
    double least;      /* the part of its update */
};
struct mt_overlay_write {
    const char *dir;      /* the run's output folder */
    const char *parent;   /* name in `dir` of the overlay before; NULL: none */
    const char *base_dir; /* the model's folder */
    const struct mt_st_model *base; /* what the phase began from: the model's files with the overlay before, open */
    uint64_t phase;
    const struct mt_layout *layout; /* its trained tensors are written: in bf16; in f32 where the model has f32, f16 */
    mt_plane_set *planes;
    const char *const *always; /* [n_always] globs of tensors that every phase trains: they have a file of their own */
    size_t n_always;
    struct mt_overlay_rounding *rounding; /* receives what bf16 leaves of what the phase trained; NULL: not wanted */
    /* Or tensors that adapters were added to, in their own dtype (F16: in F32); layout to n_always are not used. */
    struct mt_merge *merge;          /* NULL: trained tensors are written */
    const struct mt_hf_files *files; /* with merge: the model's, written too, so that the folder is read as a model */
    uint64_t shard_bytes;            /* with merge: of a file */
};
/** Writes it durably, and reads it back. *name, in `dir`, is the caller's to free. An interrupted write leaves only a
 * folder *.tmp, which the next one removes. */
int mt_overlay_write(const struct mt_overlay_write *o, char **name, struct mt_err *err);
/**
 * The tensors of a model that stay as they are if others are put over it: own [n], whose order changes. A packed tensor's
 * pieces go with it. rest: [model->n_tensors] receives names, borrowed from the model; returns how many.
 */
size_t mt_overlay_rest(const char **rest, const struct mt_st_model *model, const char **own, size_t n);
/** The name of the overlay that a folder of adapters has as its model, for the caller to free; *name NULL: another, or
 * no such folder. */
int mt_overlay_of_adapters(char **name, const char *dir, struct mt_err *err);
/** Removes the overlays of DIR, but for `current` (or NULL), that no checkpoint there names. */
void mt_overlay_prune(const char *dir, const char *current);
/**
 * Before a checkpoint is resumed: its overlay lies beside it, and is linked to `dir` if that is another folder. If the
 * model was moved since, to base_dir, the overlay records it. *path: the overlay's folder in `dir`, the caller's to free.
 * -ENOENT (MT_ERR_CHECKPOINT): there is no such overlay.
 */
int mt_overlay_adopt(const char *checkpoint, const char *name, const char *dir, const char *base_dir, char **path,
                     struct mt_err *err);
