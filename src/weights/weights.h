/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdatomic.h>

#include "base/json.h"
#include "hf/safetensors.h"
#include "model/layout.h"
#include "store/files/file_weights.h"
#include "store/planes.h"

/**
 * Checksums of the tensors of the base (in_base): of each the sum (base/block_sum.h) of the bytes of the file that it
 * is made of. These are its own bytes, if the file has them in the order of the tensor; for a packed one its pieces,
 * one after the other; for one in another order its expert's share of the stored tensor, or all of that.
 */
struct mt_base_sums {
    uint64_t *sum;          /* [n_tensors] receives those of the tensors that are loaded */
    uint64_t *all;          /* [n_tensors] the same of all tensors, also those that are not of the base, of which this
                               machine knew none before (weights/known.h). What was known is compared instead: a tensor
                               that differs is read once more, and is then -EBADMSG (MT_ERR_INPUT). Or NULL */
    const cJSON *want;      /* on a resume: an object of tensors, each with the sum that it must have: "xxh3", 16 hex
                               digits. A different one is -EBADMSG (MT_ERR_INPUT), with file and tensor. Or NULL */
    bool other_forms;       /* a tensor whose files have it in another format than the object says ("form") is not
                               compared, which is warned of; else it is */
    cJSON *sealed;          /* of a model with a seal: its stored tensors, each with the XXH3 of its bytes (text). What
                               is read whole and in order is compared while it is loaded, and gets the `valueint`
                               below: the caller compares the rest. A different one is read once more, and is then
                               -EBADMSG (MT_ERR_CHECKPOINT). Or NULL */
    mt_file_weights *files; /* weights that are read in place: verified when first read; may be NULL */
};

enum { MT_SEAL_COMPARED = 1 };

/**
 * Fills the weights' planes from DIR's safetensors (BF16, F16, F32; packed as in model/packing.h), a piece at a time.
 * Tensors that are marked as packed and are plain in the files are packed, and the log has the error of that; trained
 * ones that are packed in the files are decoded. Planes that are read in place are left alone.
 * Every tensor of the layout must be there with its shape; one that is there and not in the layout is an error, except
 * a tied lm_head. Weights that are NaN, infinite, or so large that hi would be (bits 0x7f7f8000 and above) are errors
 * that name tensor and index.
 * base: sums of the tensors of the base; NULL: not wanted.
 */
int mt_weights_load(const struct mt_layout *l, mt_plane_set *planes, const char *dir, const struct mt_base_sums *base,
                    struct mt_err *err);
/** On a resume: loads the tensors that the checkpoint names instead of holding them, from DIR's files. */
int mt_weights_load_base(const struct mt_layout *l, mt_plane_set *planes, const char *dir,
                         const struct mt_base_sums *base, struct mt_err *err);

/**
 * Reads all tensors with a sum (mt_base_sums.all; 0: none) in DIR's files again, past the page cache; this machine then
 * knows them (weights/known.h). -EBADMSG (MT_ERR_INPUT): one has another sum, in two reads. began_ns: wall clock;
 * -ESTALE: a file has changed since. `stop`: ends it early, with -ECANCELED.
 */
int mt_weights_read_again(const struct mt_layout *l, const char *dir, const uint64_t *sum, int64_t began_ns,
                          const atomic_bool *stop, struct mt_err *err);
/** Fills planes of kind k of a unit again from DIR's files: all of its frozen tensors there. Those of the base (in_base)
 * must have the sum in `base`. */
int mt_weights_reload(const struct mt_layout *l, mt_plane_set *planes, const char *dir, size_t unit,
                      enum mt_plane_kind k, const struct mt_base_sums *base, struct mt_err *err);
/** Compares the tensors of `want` (mt_base_sums, with other_forms) with DIR's files, without loading them; not packed ones
 * of which the layout does not say so. *n_same: how many were compared; may be NULL. */
int mt_weights_verify_base(const struct mt_layout *l, const char *dir, const cJSON *want, size_t *n_same,
                           struct mt_err *err);
/** "BF16", "nf4": the form in which files have the tensor, if it is frozen. */
const char *mt_weights_form(const struct mt_tensor *t, const struct mt_st_tensor *src);

/** Loads only the tensors that stay packed, from a checkpoint, whose other tensors are in its training state. */
int mt_weights_load_packed(const struct mt_layout *l, mt_plane_set *planes, const char *dir, struct mt_err *err);

/** Lays out DIR's model as its config.json says; frozen: its layers are. With adapters, unless NULL, all of it is. */
int mt_weights_layout(struct mt_layout **out, const char *dir, bool frozen, struct mt_adapter_spec *adapters,
                      struct mt_err *err);

/** Smaller tensors are not worth reading in place: they stay in host memory. */
enum { MT_IN_FILE_BYTES = 1 << 20 };

/**
 * Finds out which tensors DIR's safetensors have in F32 beside others in bf16, and how they hold the frozen ones: in
 * bf16, so that masters need only hi; readable in place; or packed. Frozen ones that are not packed are marked to be
 * packed as `wanted`, if they can be. Divides the layout into ranges again. Reads only headers and quant_state; without
 * any file, or with dir NULL, config.json decides.
 * only: an object with the names of the tensors that, besides packed ones, come from the files; NULL: all do.
 * unpacked: one with those that are bf16 even where the files have them packed; NULL: none are.
 * -EINVAL: packed already, in another format.
 */
int mt_weights_mark_stored(struct mt_layout *l, const char *dir, enum mt_packed wanted, const cJSON *only,
                           const cJSON *unpacked, struct mt_err *err);
/** The same for random weights. */
int mt_weights_mark_random(struct mt_layout *l, enum mt_packed wanted, struct mt_err *err);

/** Normal(0, initializer_range) for matrices, ones for norms, zeros for biases; an element depends on
 * (seed, tensor name, index) alone. */
int mt_weights_init_random(const struct mt_layout *l, mt_plane_set *planes, uint64_t seed,
                           int n_threads, struct mt_err *err);
