/* SPDX-License-Identifier: Apache-2.0 */
#ifndef MT_MODEL_PACKING_H
#define MT_MODEL_PACKING_H

#include "device/ops.h"
#include "hf/safetensors.h"
#include "model/layout.h"
#include "store/block_sum.h"

/**
 * Frozen weights that stay packed (base/packed.h). A unit's packed plane holds, byte for byte, what the file has of
 * each: first the codes of all its packed tensors, then all else of them.
 *
 * On the device the plane of a unit that runs for each micro-batch lands at the end of its buffer and is decoded from
 * there to where its tensors lie, which overwrites it: in pieces, in the order of the tensors, none before the codes
 * that it would overwrite are decoded. The plane of experts, which run once a step, stays in the buffer in bf16
 * compute, behind what is not packed, which lies end to end there; each expert is decoded to scratch when its rows
 * come.
 */

/** Bytes that a unit's buffer has for weights in `dtype`: its elements, where its packed plane lands, and what of it is
 * FP32 all the same. */
size_t mt_unit_slot_bytes(const struct mt_layout *l, size_t unit, enum mt_dtype dtype);
/** Where it lands: an offset in that buffer, at which the plane just fits. */
size_t mt_unit_landing(const struct mt_layout *l, size_t unit, enum mt_dtype dtype);
/** Where the FP32 copy of the unit's f32_tensor lies: an offset in that buffer, behind all else; of whole join blocks. */
size_t mt_unit_f32_at(const struct mt_layout *l, size_t unit, enum mt_dtype dtype);
/** Where range r of the unit is loaded to: elements. */
size_t mt_unit_range_at(const struct mt_layout *l, size_t unit, const struct mt_range *r, enum mt_dtype dtype);
/** Is the unit's packed plane decoded expert by expert, by mt_expert_decode()? */
bool mt_unit_keeps_codes(const struct mt_layout *l, size_t unit, enum mt_dtype dtype);
/** Elements of an expert's parameters, from the first one's beginning to the last one's end. */
size_t mt_expert_elems(const struct mt_layout *l);
/** Puts them to `out`, as they lie in a unit without packed ones, from the buffer of a unit that keeps its codes. */
int mt_expert_decode(const struct mt_layout *l, size_t unit, int expert, const char *slot, char *out, mt_device *dev,
                     struct mt_err *err);
/** Submits the decoding of what has landed in the unit's buffer, where codes do not stay. */
int mt_unit_decode(const struct mt_layout *l, size_t unit, enum mt_dtype dtype, char *slot, mt_device *dev,
                   struct mt_err *err);
/** The end of what of a unit is not packed, as it lies on the device: elements. */
size_t mt_unit_plain_end(const struct mt_layout *l, size_t unit);

/** Lays a unit's packed plane out: sets its tensors' `at` and `aux`; returns its bytes. */
size_t mt_packing_lay_out(struct mt_layout *l, struct mt_unit *u);

/** A tensor of a file that holds a part of a packed tensor, and its place in the unit's packed plane. */
struct mt_packed_piece {
    char name[192];
    enum mt_st_dtype dtype;
    int n_dims;
    int64_t shape[4];
    size_t at, bytes;
};
enum { MT_MAX_PIECES = 6 };
/** The pieces of a packed tensor, codes first, under their names in files that hold it alone; returns their number. */
int mt_packed_pieces(struct mt_packed_piece piece[MT_MAX_PIECES], const struct mt_tensor *t);
/** The same of the file's tensor that t is, or is one of: where it holds the experts of a layer, without a place. */
int mt_packed_stored_pieces(struct mt_packed_piece piece[MT_MAX_PIECES], const struct mt_stored *s,
                            const struct mt_tensor *t);

/** Where a nested tensor's offset is kept, which files have in a note alone: byte of the packed plane. */
size_t mt_packed_offset_at(const struct mt_tensor *t);
/** The tensor is to be packed when its weights are loaded. */
void mt_packing_make(struct mt_tensor *t, enum mt_packed f);
/**
 * Could the tensor be kept packed: a matrix of a decoder layer that is multiplied with, and no router? Where files hold
 * the experts of a layer as one tensor, these in MXFP4, as gpt-oss is released, and nothing else of the model.
 */
bool mt_packing_takes(const struct mt_layout *l, const struct mt_tensor *t, enum mt_packed f);
/** May it stay packed: is nothing trained that files hold together with it? */
bool mt_packing_keeps(const struct mt_layout *l, const struct mt_tensor *t);

/** Rows of a tensor among those of a file's that holds several in MXFP4: row r is row first + r * step there. Files have
 * outputs as rows, however they have them when they are not packed. */
struct mt_packed_rows {
    size_t first, step; /* step 0: the file holds the tensor alone */
};
struct mt_packed_rows mt_packing_rows(const struct mt_layout *l, const struct mt_tensor *t);

/** How a tensor lies in a file. */
struct mt_packed_source {
    enum mt_packed format; /* MT_PACKED_NONE: `codes` is the tensor in a plain dtype */
    bool nested;
    struct mt_packed_rows rows;
    const struct mt_st_tensor *codes, *scales, *nested_scales, *nested_map, *note;
};
/** Finds a tensor by its name in the files, plain or packed; codes NULL: it is not there. Checks what belongs to it.
 * `l` NULL: the tensor is of no layout, and lies alone. */
int mt_packed_find(struct mt_packed_source *out, const struct mt_st_model *st, const struct mt_layout *l,
                   const struct mt_tensor *t, struct mt_err *err);
/** Do files have the tensor by itself, in the layout's order? */
bool mt_packing_lies_alone(const struct mt_layout *l, const struct mt_tensor *t);
/** NF4's note: checks it, and reads the offset of nested scales. */
int mt_packed_read_offset(const struct mt_st_model *st, const struct mt_packed_source *s, const struct mt_tensor *t,
                          float *offset, struct mt_err *err);
/** Does a tensor of a file of this name belong to one that is packed? */
bool mt_packed_is_piece(const char *name);

/**
 * Copies the source of a tensor that stays packed, of the same format, to its place in the planes.
 * summer: begins, and is given all bytes that the planes get, piece by piece (mt_packed_pieces()); NULL: not wanted.
 */
int mt_packed_copy(const struct mt_st_model *st, const struct mt_packed_source *src, const struct mt_tensor *t,
                   mt_plane_set *planes, struct mt_summer *summer, struct mt_err *err);

/** A packed source that is read as f32. */
struct mt_packed_reader {
    const struct mt_st_model *st;
    struct mt_packed_source src;
    size_t cols;
    uint8_t *codes;
    float *scales; /* all of them */
    struct mt_summer *summer;
};
/** summer: of MXFP4, begins and is given codes and scales as mt_packed_copy() gives them; NULL: not wanted. */
int mt_packed_reader_init(struct mt_packed_reader *r, const struct mt_st_model *st, const struct mt_packed_source *src,
                          const struct mt_tensor *t, struct mt_summer *summer, struct mt_err *err);
void mt_packed_reader_finish(struct mt_packed_reader *r);
/** Elements [first, first + n) of the tensor. */
int mt_packed_read_f32(struct mt_packed_reader *r, size_t first, size_t n, float *dst, struct mt_err *err);

/** What packing has cost: squares of the differences and of the weights, by kind of tensor ("mlp.up_proj"). */
enum { MT_PACKING_KINDS = 32 };
struct mt_packing_cost {
    struct {
        char kind[64];
        double lost, all;
    } of[MT_PACKING_KINDS];
    int n;
};
/** "self_attn.q_proj 9.1%, ...: relative L2" in buf. */
const char *mt_packing_cost_format(const struct mt_packing_cost *c, char *buf, size_t len);

/** Encodes a tensor that is to be packed, whose weights come as f32 in order, and writes it to its planes. */
struct mt_packer;
int mt_packer_create(struct mt_packer **out, const struct mt_tensor *t, mt_plane_set *planes, int n_threads,
                     struct mt_packing_cost *cost, struct mt_err *err);
/** The next n elements: whole rows, of FP8 a multiple of 128 rows but for the last. */
int mt_packer_write(struct mt_packer *p, const float *w, size_t n, struct mt_err *err);
/** Writes what follows from all of it; destroys the packer, whatever `rc` says went before; returns it or its own. */
int mt_packer_finish(struct mt_packer **p, int rc, struct mt_err *err);
/** Elements that are best given at once. */
size_t mt_packer_piece(const struct mt_tensor *t, size_t about);

#endif
