/* SPDX-License-Identifier: Apache-2.0 */
#ifndef MT_MODEL_WEIGHTS_H
#define MT_MODEL_WEIGHTS_H

#include "base/json.h"
#include "model/layout.h"
#include "store/file_weights.h"
#include "store/planes.h"

/**
 * What the tensors of the base (in_base) are known by: of each the sum (store/block_sum.h) of the bytes of the file
 * that it is made of. These are its own, where they lie in the file as in the tensor; of a packed one those of its
 * pieces, one after the other; of one that lies there in another order all that one expert has of the file's tensor, or
 * all of it.
 */
struct mt_base_sums {
    uint64_t *sum;          /* [n_tensors] is given those of what is loaded */
    const cJSON *want;      /* of a run that goes on: an object of tensors, each with the sum that it has to have:
                               "xxh3", 16 hex digits. Another one is -EBADMSG (MT_ERR_INPUT), with file and tensor. Or
                               NULL */
    mt_file_weights *files; /* those that are read in place: held against it in their first pass; may be NULL */
};

/**
 * Fills the weights' planes from DIR's safetensors (BF16, F16, F32; packed as in model/packing.h), a piece at a time.
 * What is to be packed and is not is packed, and the log says what that cost; what is packed and trained is decoded.
 * Planes that are in files have their content.
 * Every tensor of the layout must be there with its shape; one that is there and not in the layout is an error, except
 * a tied lm_head. NaN, infinite and larger than 0x7f7f8000 values are refused by tensor and index.
 * base: sums of the tensors of the base; NULL: not wanted.
 */
int mt_weights_load(const struct mt_layout *l, mt_plane_set *planes, const char *dir, const struct mt_base_sums *base,
                    struct mt_err *err);
/** Of a run that goes on: the tensors that its checkpoint names instead of holding them, from DIR's files. */
int mt_weights_load_base(const struct mt_layout *l, mt_plane_set *planes, const char *dir,
                         const struct mt_base_sums *base, struct mt_err *err);

/** Of them, what stays packed alone: of a checkpoint, whose other tensors come from its state. */
int mt_weights_load_packed(const struct mt_layout *l, mt_plane_set *planes, const char *dir, struct mt_err *err);

/** Smaller tensors are not worth reading in place: they stay in host memory. */
enum { MT_IN_FILE_BYTES = 1 << 20 };

/**
 * Finds out which tensors DIR's safetensors have in F32 beside others in bf16, and how they hold the frozen ones: as bf16, whose masters need no more than hi, and which of
 * these can be read in place, or packed; those that are wider and can be are to be packed as `wanted`. Divides the
 * layout into ranges again. Reads headers and notes alone; without any file, or with dir NULL, config.json is believed.
 * only: an object with the names of those that come from
 * the files at all, besides packed ones; NULL: all do. -EINVAL: packed already, in another format.
 */
int mt_weights_mark_stored(struct mt_layout *l, const char *dir, enum mt_packed wanted, const cJSON *only,
                           struct mt_err *err);
/** The same of random weights. */
int mt_weights_mark_random(struct mt_layout *l, enum mt_packed wanted, struct mt_err *err);

/**
 * Opens what of the layout is read in place from DIR's files: planes of MT_RANGE_IN_FILE of units whose bit of that is
 * set in in_files [n_units]. Weights that are not finite are
 * refused as mt_weights_load() does, when they are first read.
 */
int mt_weights_open_files(mt_file_weights **out, const struct mt_layout *l, const mt_plane_bits *in_files,
                          const char *dir, struct mt_err *err);

/** Normal(0, initializer_range) for matrices, ones for norms, zeros for biases; an element depends on
 * (seed, tensor name, index) alone. */
int mt_weights_init_random(const struct mt_layout *l, mt_plane_set *planes, uint64_t seed,
                           int n_threads, struct mt_err *err);

#endif
