/* SPDX-License-Identifier: Apache-2.0 */
#ifndef MT_WEIGHTS_SOURCES_H
#define MT_WEIGHTS_SOURCES_H

#include "weights/packed_files.h"

/**
 * Where each tensor of a layout lies in a model's files, and in which form. It is found once, when the files are
 * opened; marking the layout, loading, reading in place and sums follow this list.
 */
struct mt_sources {
    struct mt_st_model st;
    struct mt_packed_source *of; /* [n_tensors] of the layout; `codes` NULL: the files do not have it, or it is an adapter's */
};
/** Opens DIR's safetensors and finds the layout's tensors in them. Close it also after an error. */
int mt_sources_open(struct mt_sources *out, const struct mt_layout *l, const char *dir, struct mt_err *err);
/** Finds them in files that are open already: s->st. */
int mt_sources_find(struct mt_sources *s, const struct mt_layout *l, struct mt_err *err);
void mt_sources_close(struct mt_sources *s);

#endif
