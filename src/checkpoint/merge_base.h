/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "hf/safetensors.h"
#include "model/layout.h"
#include "weights/sources.h"

/* The model that adapters are merged into, as its tensors are to be in the merged one: packed ones are decoded if any
 * of them changes, since packing the result again would lose what adapters add. */

struct mt_merged {
    struct mt_st_tensor t;          /* that of the base; decoded: its new name, shape and dtype */
    const struct mt_stored *stored; /* the layout's, if it is decoded, else NULL */
};

struct mt_merge_base {
    const struct mt_st_model *st;
    struct mt_merged *tensors; /* owned */
    size_t n;
    bool decodes;              /* what is packed is decoded */
    struct mt_sources sources;
    struct mt_stored_writer writer;
};

/** Does the tensor of that name change? */
typedef bool (*mt_merge_changes)(const void *ctx, const char *name);

/** l: of the base, with the adapters; all: decode in any case. st and l are borrowed; names are
 * theirs. b stays where it is. */
int mt_merge_base_open(struct mt_merge_base *b, const struct mt_st_model *st, const struct mt_layout *l, bool all,
                       mt_merge_changes changes, const void *ctx, struct mt_err *err);
void mt_merge_base_close(struct mt_merge_base *b);
/** Reads elements of a tensor as f32, in the order of the merged one. */
int mt_merge_base_read(struct mt_merge_base *b, const struct mt_merged *x, size_t first, size_t n, float *w,
                       struct mt_err *err);
