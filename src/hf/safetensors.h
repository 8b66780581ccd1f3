/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/block_sum.h"
#include "base/err.h"

enum mt_st_dtype {
    MT_ST_BF16, MT_ST_F16, MT_ST_F32, MT_ST_F64, MT_ST_I8, MT_ST_U8, MT_ST_I16, MT_ST_I32, MT_ST_I64,
    MT_ST_BOOL, MT_ST_F8_E4M3, MT_ST_F8_E5M2, MT_ST_F8_E8M0, MT_ST_N_DTYPES,
};
size_t mt_st_dtype_size(enum mt_st_dtype t);
const char *mt_st_dtype_name(enum mt_st_dtype t);

enum { MT_ST_MAX_DIMS = 8 };

struct mt_st_tensor {
    char *name;
    enum mt_st_dtype dtype;
    int n_dims;
    int64_t shape[MT_ST_MAX_DIMS];
    size_t n_elems, n_bytes;
    uint64_t offset; /* of its first byte in the file */
    int file;        /* index into mt_st_model.files */
};

/**
 * One or several safetensors files, opened and checked: no holes, overlaps, duplicates or wrong sizes; the header is
 * untrusted. Tensors are sorted by name.
 */
struct mt_st_model {
    struct mt_st_tensor *tensors;
    size_t n_tensors;
    struct mt_st_file {
        char *path, *name;
        int fd;
        uint64_t size;
    } *files;
    int n_files;
};

/** Opens DIR/model.safetensors, or the files that DIR/model.safetensors.index.json names (their names are untrusted: no
 * '/', no '..'). A missing shard, a tensor in the wrong shard or only pytorch_model.bin is an error (MT_ERR_INPUT). */
int mt_st_open_dir(struct mt_st_model *out, const char *dir, struct mt_err *err);
/** Warns of a folder with model.safetensors beside an index that does not name it: others read other weights. */
void mt_st_warn_of_two(const char *dir);
/**
 * A checkpoint may name frozen tensors instead of holding them. Its index then gives MT_ST_IN_BASE as their file, and
 * the folder of their model as key MT_ST_BASE_KEY of its metadata, absolute or from the index's own folder. They are
 * opened with the others.
 */
#define MT_ST_IN_BASE "frozen-tensors-are-in-the-base-model.safetensors"
#define MT_ST_BASE_KEY "base_model"
int mt_st_open_file(struct mt_st_model *out, const char *path, struct mt_err *err);
void mt_st_close(struct mt_st_model *m);
const struct mt_st_tensor *mt_st_find(const struct mt_st_model *m, const char *name);

/** Reads elements [first, first + n) as f32 (BF16, F16, F32, F64 only). */
int mt_st_read_f32(const struct mt_st_model *m, const struct mt_st_tensor *t, size_t first, size_t n,
                   float *dst, struct mt_err *err);
/** The same; `summer` gets the bytes as the file has them, NULL: nothing does. */
int mt_st_read_f32_summed(const struct mt_st_model *m, const struct mt_st_tensor *t, size_t first, size_t n, float *dst,
                          struct mt_summer *summer, struct mt_err *err);
/** Reads raw bytes [first, first + n) of the tensor. */
int mt_st_read_raw(const struct mt_st_model *m, const struct mt_st_tensor *t, size_t first, size_t n,
                   void *dst, struct mt_err *err);

/**
 * A tensor of a file to be written. The caller sorts the declarations (mt_st_file_order), writes the header, and then
 * each tensor's bytes in that order.
 */
struct mt_st_decl {
    const char *name;
    enum mt_st_dtype dtype;
    int n_dims;
    int64_t shape[MT_ST_MAX_DIMS];
};
/** For qsort() of declarations, or what begins with one: descending dtype alignment, then name. */
int mt_st_file_order(const void *a, const void *b);
size_t mt_st_decl_bytes(const struct mt_st_decl *d);
/** Builds the 8-byte length and the JSON header (with __metadata__ {"format":"pt"}), padded to 8 bytes, of sorted
 * declarations. The caller frees *out. */
int mt_st_build_header(char **out, size_t *len, const struct mt_st_decl *decls, size_t n,
                       struct mt_err *err);
