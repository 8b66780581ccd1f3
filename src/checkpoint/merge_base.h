/* SPDX-License-Identifier: Apache-2.0 */
#ifndef MT_CHECKPOINT_MERGE_BASE_H
#define MT_CHECKPOINT_MERGE_BASE_H

#include "hf/safetensors.h"
#include "model/layout.h"
#include "weights/packed_files.h"

/* The model that adapters are merged into, as its tensors are to be in the merged one: packed ones are decoded if any
 * of them changes, since packing the result again would lose what adapters add. */

struct mt_merged {
    struct mt_st_tensor t;                     /* that of the base; decoded: its new name, shape and dtype */
    const struct mt_st_tensor *codes, *scales; /* of all experts of a layer in MXFP4, which are decoded, else NULL */
    struct mt_packed_source src;               /* format not NONE: a packed matrix that is decoded */
    const struct mt_tensor *of;                /* that matrix in the layout */
};

struct mt_merge_base {
    const struct mt_st_model *st;
    struct mt_merged *tensors;      /* owned */
    size_t n;
    bool decodes;                   /* what is packed is decoded */
    const struct mt_merged *now;    /* what is decoded: one of the experts in MXFP4, or a reader of a matrix */
    size_t expert;
    float *values;                  /* of that expert, [out, in] */
    struct mt_packed_reader reader;
};

/** Does the tensor of that name change? */
typedef bool (*mt_merge_changes)(const void *ctx, const char *name);

/** l: of the base, with the adapters; all: decode in any case. st and l are borrowed; names are theirs. */
int mt_merge_base_open(struct mt_merge_base *b, const struct mt_st_model *st, const struct mt_layout *l, bool all,
                       mt_merge_changes changes, const void *ctx, struct mt_err *err);
void mt_merge_base_close(struct mt_merge_base *b);
/** Reads elements of a tensor as f32, in the order of the merged one. */
int mt_merge_base_read(struct mt_merge_base *b, const struct mt_merged *x, size_t first, size_t n, float *w,
                       struct mt_err *err);

#endif
