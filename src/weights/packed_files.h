/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "hf/safetensors.h"
#include "model/packing.h"
#include "store/planes.h"
#include "weights/turned.h"

/* Packed tensors of files: finding, copying, reading as f32, which is also done of planes. */

/** How a tensor lies in a file. */
struct mt_packed_source {
    enum mt_packed format; /* MT_PACKED_NONE: `codes` is the tensor in a plain dtype */
    enum mt_scale scale;   /* the type of scales in planes */
    bool wider_scales;     /* FP8: planes have F32 where the file has F16 */
    enum mt_turned turned; /* int4: planes have all pieces in another order, so each is read whole */
    uint32_t to_zeros;     /* and that is added to the words of its zero points */
    float offset;          /* of nested scales */
    struct mt_packed_rows rows, scale_rows; /* of codes, and of scales */
    union { /* NULL: the files have none */
        const struct mt_st_tensor *piece[MT_N_PIECES];
        struct {
            const struct mt_st_tensor *codes, *scales, *nested_scales, *nested_map, *in_note, *factor, *values;
            const struct mt_st_tensor *zeros, *note;
        };
    };
};
/** Finds a tensor by its name in the files, plain or packed, and checks its scales and the like; codes NULL: not found.
 * `l` NULL: the tensor is of no layout, and is a tensor of its own in the file. */
int mt_packed_find(struct mt_packed_source *out, const struct mt_st_model *st, const struct mt_layout *l,
                   const struct mt_tensor *t, struct mt_err *err);
/** Rows of the piece in that tensor of the files. */
struct mt_packed_rows mt_packed_rows_in(const struct mt_packed_source *src, const struct mt_packed_piece *p);
/** The tensor of the files that holds the piece; NULL: none of its size. */
const struct mt_st_tensor *mt_packed_piece_in(const struct mt_packed_source *src, const struct mt_packed_piece *p);
/** Is this the name of a piece of a packed tensor? */
bool mt_packed_is_piece(const char *name);
/** Is it a bias that GPTQ's files have beside codes, whether the layer has one or not? Zeros, where it has none. */
bool mt_packed_is_bias(const struct mt_st_model *st, const struct mt_st_tensor *t);

/**
 * Copies the source of a tensor that stays packed, of the same format, to its place in the planes.
 * summer: given all bytes that the planes get, piece by piece (mt_packed_pieces()); NULL: not wanted.
 */
int mt_packed_copy(const struct mt_st_model *st, const struct mt_packed_source *src, const struct mt_tensor *t,
                   mt_plane_set *planes, struct mt_summer *summer, struct mt_err *err);

/** Can code times scale only be finite, by bytes [at, at + n) of a piece? Scales so large that a
 * product with a code may not be are refused, too. */
bool mt_packed_is_finite(enum mt_packed f, enum mt_scale scale, enum mt_piece piece, size_t at, const char *data,
                         size_t n);

/** A packed tensor, read whole into host memory: from files, or from the planes for what is computed once, before
 * training. Begins as zeros; finish it also after an error. */
struct mt_packed_matrix {
    enum mt_packed format;
    size_t cols;
    uint8_t *codes; /* owned */
    float *scales;  /* owned; all of them, as f32 */
    float factor;   /* that is part of E4M3 ones */
    uint32_t *zeros; /* owned; NULL: it has no zero points */
};
/** Reads a packed tensor; what *out had is finished first. summer: given what is read, of MXFP4 as by mt_packed_copy();
 * NULL: not wanted. */
int mt_packed_file_read(struct mt_packed_matrix *out, const struct mt_st_model *st, const struct mt_packed_source *src,
                        const struct mt_tensor *t, struct mt_summer *summer, struct mt_err *err);
/** The same of planes. */
int mt_packed_plane_read(struct mt_packed_matrix *out, mt_plane_set *planes, const struct mt_tensor *t,
                         struct mt_err *err);
/** Elements [first, first + n) of a tensor in planes as f32. m keeps it if it is packed. */
int mt_packed_plane_values(struct mt_packed_matrix *m, mt_plane_set *planes, const struct mt_tensor *t, size_t first,
                           size_t n, float *dst, struct mt_err *err);
/** Decodes elements [first, first + n) of the tensor. */
void mt_packed_matrix_values(const struct mt_packed_matrix *p, size_t first, size_t n, float *dst);
/** Accepts one of zeros. */
void mt_packed_matrix_finish(struct mt_packed_matrix *p);
