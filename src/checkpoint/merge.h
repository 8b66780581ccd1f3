/* SPDX-License-Identifier: Apache-2.0 */
#ifndef MT_CHECKPOINT_MERGE_H
#define MT_CHECKPOINT_MERGE_H

#include "hf/safetensors.h"

/**
 * A model's weights with adapters added: W + s B A, with DoRA its rows scaled, sums in f32, rounded once; and modules
 * that were trained whole.
 */
struct mt_merge;

/** Adapters of the folder `dir` for the model `base`, which is borrowed and must have the matrix of each. */
int mt_merge_open(struct mt_merge **out, const char *dir, const struct mt_st_model *base, bool f32, struct mt_err *err);
/** Accepts NULL; sets *m to NULL. */
void mt_merge_close(struct mt_merge **m);
/** The dtype of the base's tensor in the merged model: f32 if asked for; else its own in a bf16 model; else bf16. */
enum mt_st_dtype mt_merge_dtype(const struct mt_merge *m, const struct mt_st_tensor *t);
/** Elements [first, first + n) of the base's tensor, merged, in that dtype. */
int mt_merge_read(struct mt_merge *m, const struct mt_st_model *base, const struct mt_st_tensor *t, size_t first,
                  size_t n, void *dst, struct mt_err *err);

#endif
