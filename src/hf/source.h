/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "hf/safetensors.h"

/**
 * A tensor that is read, wherever its bytes come from: a file, planes, or other sources, which a filter decodes, adds
 * to, rounds or packs. Exports, saves and overlays are lists of sources, which checkpoint/hf_dir.h writes.
 */
struct mt_source {
    struct mt_st_decl decl; /* as it is read. First: sources are sorted as declarations are */
    /** Elements [first, first + n), of decl.dtype. */
    int (*read)(const struct mt_source *s, size_t first, size_t n, void *dst, struct mt_err *err);
    void *ctx;              /* of `read`; borrowed */
    const void *of;         /* the tensor, as ctx knows it; borrowed */
    int part;               /* of that, as `read` counts */
};

/** A tensor of open files as it is there, or as f32 (BF16, F16, F32, F64 only). Borrows both. */
struct mt_source mt_source_raw(const struct mt_st_model *m, const struct mt_st_tensor *t);
struct mt_source mt_source_f32(const struct mt_st_model *m, const struct mt_st_tensor *t);

/** Starts as zeros. */
struct mt_source_list {
    struct mt_source *p;
    size_t n, cap;
};
int mt_source_add(struct mt_source_list *l, struct mt_source s, struct mt_err *err);
void mt_source_list_finish(struct mt_source_list *l);
