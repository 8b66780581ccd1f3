/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdbool.h>

#include "base/dtype.h"
#include "checkpoint/rounding.h"
#include "hf/source.h"

/**
 * A model's weights with adapters added: W + s B A, with DoRA its rows scaled, sums in f32, rounded once; and modules
 * that were trained whole. If experts that the base has in MXFP4 have adapters, or f32 is asked for, all
 * such experts are decoded.
 */
struct mt_merge;

/** Adapters of the folder `dir` for the model `base`, which is borrowed and must have the matrix of each. model_dir:
 * its folder, with config.json. */
int mt_merge_open(struct mt_merge **out, const char *dir, const struct mt_st_model *base, const char *model_dir,
                  bool f32, struct mt_err *err);
/** Accepts NULL; sets *m to NULL. */
void mt_merge_close(struct mt_merge **m);
/** Adds the merged model's tensors, or only those that differ from the base's: of f32 if asked for; else of their own dtype
 * in a bf16 model; else bf16. */
int mt_merge_list(struct mt_merge *m, bool differing, struct mt_source_list *out, struct mt_err *err);
/** Is the base's quantization_config not true any more? */
bool mt_merge_decodes(const struct mt_merge *m);
/** From now on tensors are of their own dtype, but F16 ones of F32. */
void mt_merge_keep_dtypes(struct mt_merge *m);
/** From now on matrices with adapters are as adapter.merge_aware = bf16 trains them, computing in `dtype`: made of what
 * the device has of base and adapters (device/ops.h, mt_merge_adapter). */
void mt_merge_as_trained(struct mt_merge *m, enum mt_dtype dtype);
/** What rounding leaves of the update that adapters add, of all that was read in bf16. */
const struct mt_rounded *mt_merge_rounding(const struct mt_merge *m);
