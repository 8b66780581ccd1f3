/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "device/ops.h"
#include "hf/safetensors.h"
#include "model/layout.h"

/**
 * Frozen weights that stay packed (base/packed.h). A unit's packed plane holds the bytes of the file: first the codes
 * of all its packed tensors, then their scales and the like.
 *
 * On the device, the packed plane of a unit that runs for each micro-batch is loaded to the end of the unit's buffer
 * and decoded from there to the places of its tensors, which overwrites it: in pieces, in the order of the tensors, so
 * that no piece overwrites codes that are still to be decoded. In bf16 compute, the packed plane of experts, which run
 * once a step, stays in the buffer, after the unpacked tensors, which are end to end there; each expert is decoded to
 * scratch when it runs. So do those of all units of a model that generates and is too large to stay on the device
 * decoded (mt_layout_keep_codes()): each unit is decoded to scratch when it runs.
 */

/** Bytes of a unit's buffer for weights in `dtype`: its elements, its packed plane before decoding, the FP32 copy of its
 * f32_tensor, and mt_unit_norms(). */
size_t mt_unit_slot_bytes(const struct mt_layout *l, size_t unit, enum mt_dtype dtype);
/** Bytes of a buffer for the unit's trained weights alone, in the order of their plane; of whole join blocks. */
size_t mt_unit_adapter_bytes(const struct mt_unit *u, enum mt_dtype dtype);
/** Where the packed plane is loaded to: an offset in that buffer. */
size_t mt_unit_landing(const struct mt_layout *l, size_t unit, enum mt_dtype dtype);
/** The FP32 copy of the unit's f32_tensor: an offset in that buffer, after everything else; of whole join blocks. */
size_t mt_unit_f32_at(const struct mt_layout *l, size_t unit, enum mt_dtype dtype);
/** Where range r of the unit is loaded to: element of that buffer. */
size_t mt_unit_range_at(const struct mt_layout *l, size_t unit, const struct mt_range *r, enum mt_dtype dtype);
/** Lets the packed planes of all units stay in their buffers in bf16 compute, unless adapters are merged into them. */
void mt_layout_keep_codes(struct mt_layout *l);
/** Is the unit's packed plane decoded when it runs, by mt_expert_decode() or mt_unit_decode_to()? */
bool mt_unit_keeps_codes(const struct mt_layout *l, size_t unit, enum mt_dtype dtype);
/** Elements of an expert's parameters, from the start of the first to the end of the last. */
size_t mt_expert_elems(const struct mt_layout *l);
/** From the buffer of a unit that keeps its codes to `out`, laid out as in an unpacked unit. */
struct mt_decoding {
    size_t unit;
    const char *slot;
    char *out;
    bool plain; /* only what is not packed is copied there, since products take the codes */
};
/** Decodes an expert's parameters; `out` begins with the first. */
int mt_expert_decode(const struct mt_layout *l, const struct mt_decoding *d, int expert, mt_device *dev,
                     struct mt_err *err);
/** Bytes of scratch for a unit that is decoded so; 0: the unit's experts are, or nothing is. */
size_t mt_unit_decoded_bytes(const struct mt_layout *l, size_t unit, enum mt_dtype dtype);
/** Decodes the unit, but for its f32_tensor. */
int mt_unit_decode_to(const struct mt_layout *l, const struct mt_decoding *d, mt_device *dev, struct mt_err *err);
/** The codes in that buffer of the matrix that begins at the unit's element `first`, in bf16, without `out`. False: it is
 * not packed; rows and cols are its own. */
bool mt_unit_codes(const struct mt_layout *l, size_t unit, size_t first, const char *slot, struct mt_decode *out);
/** Can products take the codes of every packed matrix: do rows come in whole steps (struct mt_packed_gemm), and does no
 * DoRA, whose norms are of decoded weights, stand on one? */
bool mt_layout_codes_multiply(const struct mt_layout *l);
/** Must the unit's weights be changed after each load, by mt_unit_decode()? */
bool mt_unit_is_decoded(const struct mt_layout *l, size_t unit, enum mt_dtype dtype);
/** With DoRA of merged adapters, in the unit's buffer: magnitude / |W + s B A| of its n_norms rows; after them
 * 1 / magnitude of each. */
float *mt_unit_norms(const struct mt_layout *l, size_t unit, enum mt_dtype dtype, const void *slot);
/** Submits the decoding of a packed plane that was loaded to the unit's buffer, unless its codes stay, and the merging of
 * adapters that are merged. */
int mt_unit_decode(const struct mt_layout *l, size_t unit, enum mt_dtype dtype, char *slot, mt_device *dev,
                   struct mt_err *err);
/** Where the A, B and magnitudes of a matrix's adapter lie: elements of the unit; SIZE_MAX: no DoRA. */
struct mt_merge_place {
    size_t a, b, magnitude, rank;
    float scale;
    size_t norm;           /* if it is merged: its first factor of rows */
    enum mt_packed format; /* and the format of Q; MT_PACKED_NONE: it is rounded to bf16 */
};
/** false: it has no adapter. */
bool mt_adapter_of(const struct mt_tensor *t, struct mt_merge_place *out);
/** The same of one that adapters are merged into; false: nothing is. */
bool mt_merge_of(const struct mt_layout *l, const struct mt_tensor *t, struct mt_merge_place *out);
/** How many experts a unit should have by default: as many as cross the link, packed or in bf16, as
 * MT_EXPERT_GROUP_BYTES. The layout's group if nothing is packed. */
size_t mt_packing_expert_group(const struct mt_layout *l);
/** The end of a unit's unpacked tensors on the device: elements. */
size_t mt_unit_plain_end(const struct mt_layout *l, size_t unit);

/** Lays out a unit's packed plane: sets its tensors' `at` and `aux`; returns its bytes. */
size_t mt_packing_lay_out(struct mt_layout *l, struct mt_unit *u);

/** The pieces that a packed tensor may have, in the order of its bytes in the unit's packed plane; files have all but the
 * offset of nested scales, which is in the note (NF4's quant_state). INT4's note is its shape. */
enum mt_piece {
    MT_PIECE_CODES, MT_PIECE_SCALES, MT_PIECE_NESTED, MT_PIECE_MAP, MT_PIECE_OFFSET, MT_PIECE_FACTOR, MT_PIECE_VALUES,
    MT_PIECE_ZEROS, MT_PIECE_NOTE, MT_N_PIECES,
};
/** A piece as a tensor of a file, and its place in the unit's packed plane. */
struct mt_packed_piece {
    enum mt_piece kind;
    char name[192];
    enum mt_st_dtype dtype;
    int n_dims;
    int64_t shape[4];
    size_t at, bytes;
};
enum { MT_MAX_PIECES = 6 };
/** The pieces of a packed tensor, codes first, named as in files in which it is one tensor; returns their number. */
int mt_packed_pieces(struct mt_packed_piece piece[MT_MAX_PIECES], const struct mt_tensor *t);
/** The same of the stored tensor that t is, or is fused into; `at` is meaningless if it holds a layer's experts. */
int mt_packed_stored_pieces(struct mt_packed_piece piece[MT_MAX_PIECES], const struct mt_stored *s,
                            const struct mt_tensor *t);

/** The first byte of a piece in the packed plane, also of the offset of nested scales: an F32. */
size_t mt_packed_piece_at(const struct mt_tensor *t, enum mt_piece kind);
/** Is the matrix of that name a router's, or the gate of a shared expert? */
bool mt_packing_is_router(const char *name);
/**
 * Can the tensor be kept packed? A matrix of a linear layer of a decoder layer can, except a router,
 * and in INT4 one that quantization_config excepts. If files hold the experts of a layer as one tensor, only these can
 * be in MXFP4, as in the release of gpt-oss; in FP8 they can where files have them so.
 */
bool mt_packing_takes(const struct mt_layout *l, const struct mt_tensor *t, enum mt_packed f);
/** May it stay packed? Not if a tensor that is fused with it in files is trained. */
bool mt_packing_keeps(const struct mt_layout *l, const struct mt_tensor *t);

/** Rows of a piece of a tensor in a stored one that holds several: row r is row first + r * step there. Rows of codes
 * (p NULL) are outputs in packed files, even if unpacked files are transposed; scales have one for each row of
 * blocks. */
struct mt_packed_rows {
    size_t first, step; /* step 0: it is a tensor of its own in the file */
};
struct mt_packed_rows mt_packing_rows(const struct mt_layout *l, const struct mt_tensor *t,
                                      const struct mt_packed_piece *p);
/** Rows of a piece of codes or scales. */
size_t mt_packed_piece_rows(const struct mt_packed_piece *p);

/** Do files have it as a tensor of its own, in the layout's order? */
bool mt_packing_lies_alone(const struct mt_layout *l, const struct mt_tensor *t);
