/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "hf/safetensors.h"
#include "model/layout.h"
#include "model/packing.h"

/**
 * Converts between the layout's tensors and those of the model's files, which may hold them fused, transposed or
 * interleaved (mt_tensor_place). Needs little memory: of a tensor of all experts, one expert's share at a time.
 */

/** Gives a tensor its name on disk in the family. */
void mt_stored_name(struct mt_tensor *t, const struct mt_layout *l, int layer, const char *usual);
/** The tensor under the name that it has where each `share` layers have the weights of the first of them. */
struct mt_tensor mt_stored_as_shared(const struct mt_layout *l, const struct mt_tensor *t, int share);
/** The tensor of all experts in which the model's files have the matrix; NULL: it is a tensor of its own. */
const struct mt_fused_tensor *mt_stored_fused(const struct mt_layout *l, const struct mt_tensor *t);
/** By which name PEFT adapts the matrix: that of its module in transformers, or of the fused tensor. */
void mt_stored_module(char module[MT_TENSOR_NAME], const struct mt_layout *l, const struct mt_tensor *t);
/** The name of the parameter of all experts of the tensor's layer. */
void mt_stored_joined_name(char name[MT_TENSOR_NAME], const struct mt_layout *l, const struct mt_tensor *t,
                           const struct mt_fused_tensor *joined);
/** Fills l->stored, l->pieces and each tensor's place from l->tensors. */
int mt_stored_place(struct mt_layout *l, struct mt_err *err);

/** Reads tensors of a layout from a model's files, whose names may have the usual prefixes, or adapters' from PEFT's. All
 * but the first three begin as zeros. */
struct mt_stored_reader {
    const struct mt_layout *l;
    const struct mt_st_model *st;
    struct mt_summer *summer; /* sums what is read; borrowed, and begun by the caller; NULL: nothing does */
    float *share; /* of one expert, in the order of the file */
    size_t share_of, share_at, share_n, share_cap; /* stored tensor, its first element; n 0: none */
    uint64_t share_sum;
};
void mt_stored_reader_finish(struct mt_stored_reader *r);
/** The file's tensor that has t; NULL: there is none. */
const struct mt_st_tensor *mt_stored_source(const struct mt_stored_reader *r, const struct mt_tensor *t);
/** Elements [first, first + n) of tensor t, which `src` has, as f32; NULL is refused. What the file has in the order of
 * the tensor is given to the summer; else its expert's share is summed from begin to end, when it is read: share_sum. */
int mt_stored_read_f32(struct mt_stored_reader *r, const struct mt_st_tensor *src, const struct mt_tensor *t,
                       size_t first, size_t n, float *dst, struct mt_err *err);
/** Does the file have the tensor's elements end to end, in its own order? */
bool mt_stored_is_in_order(const struct mt_tensor *t);
/** Elements of its expert's share of the stored tensor, in which it lies; all of that, if it is not fused. */
size_t mt_stored_share(const struct mt_layout *l, const struct mt_tensor *t);
/** The row in the file of row r of the tensor: if rows are paired, those of a head's two halves alternate there. */
size_t mt_stored_row(const struct mt_tensor *t, size_t r);
/** The file's tensor of that name, or of that name with another prefix; NULL: there is none. */
const struct mt_st_tensor *mt_stored_find(const struct mt_st_model *st, const char *name);

/**
 * Does the tensor belong to a part of the model that this program does not use: layers after the decoder's, or others
 * for predicting several tokens at once? These are skipped when weights are loaded, and copied when they are saved.
 */
bool mt_stored_goes_along(const struct mt_layout *l, const char *name);

/** Values [first, first + n) of a tensor, `size` bytes each: its elements, f32 where that is 4, else bf16; or bytes of one
 * of its pieces, if it is packed. */
struct mt_values {
    const struct mt_tensor *t;
    size_t first, n, size;
    const struct mt_packed_piece *piece; /* NULL: its elements */
};
/** What is read of l->stored[stored], and bytes of a value: elements; or, if it is packed, bytes of a piece. */
struct mt_stored_part {
    size_t stored;
    int piece;   /* 1 + its number in mt_packed_stored_pieces(); 0: it is not packed */
    size_t size;
};
/** Assembles stored tensors from tensors of a layout. Zero-initialise all but the first three; finish frees. */
struct mt_stored_writer {
    const struct mt_layout *l;
    int (*read)(void *ctx, const struct mt_values *v, void *dst, struct mt_err *err);
    void *ctx;
    char *share, *tensor;
    struct mt_stored_part share_of; /* size 0: of none */
    size_t share_at, share_bytes, tensor_bytes;
};
void mt_stored_writer_finish(struct mt_stored_writer *w);
/** How files have it: F32 or BF16. The name is the layout's. */
struct mt_st_decl mt_stored_decl(const struct mt_stored *s);
/** Values [first, first + n). */
int mt_stored_gather(struct mt_stored_writer *w, struct mt_stored_part of, size_t first, size_t n, void *dst,
                     struct mt_err *err);
