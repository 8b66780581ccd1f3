/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "model/stored.h"
#include "weights/packed_files.h"

/**
 * Where each tensor of a layout lies in a model's files, and in which form. It is found once, when the files are
 * opened; marking the layout, loading, reading in place, merging and sums follow this list. It stays where it is.
 */
struct mt_sources {
    const struct mt_layout *l;
    struct mt_st_model st;
    struct mt_packed_source *of; /* [n_tensors] of the layout; `codes` NULL: the files do not have it, or it is an adapter's */
    struct mt_stored_reader plain; /* its `summer` sums all that is read; the caller sets it */
    struct mt_packed_matrix packed;
    const struct mt_tensor *decoded; /* that `packed` is of; NULL: none */
};
/** Opens DIR's safetensors and finds the layout's tensors in them. Close it also after an error. */
int mt_sources_open(struct mt_sources *out, const struct mt_layout *l, const char *dir, struct mt_err *err);
/** Finds them in files that are open already: s->st. */
int mt_sources_find(struct mt_sources *s, const struct mt_layout *l, struct mt_err *err);
void mt_sources_close(struct mt_sources *s);
/** The same, but for the files. */
void mt_sources_forget(struct mt_sources *s);
/** Elements [first, first + n) of a tensor as f32, whatever form the files have it in. The caller begins the sum before
 * the first of them. */
int mt_sources_read_f32(struct mt_sources *s, const struct mt_tensor *t, size_t first, size_t n, float *dst,
                        struct mt_err *err);
/** Refuses weights of which hi would not be finite: of elements from `at` on of a tensor in `where`, a file or folder. */
int mt_sources_check_finite(const char *where, const char *tensor, size_t at, const float *x, size_t n,
                            struct mt_err *err);
