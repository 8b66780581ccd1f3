/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "model/layout.h"
#include "store/planes.h"

/* Writing a tensor's weights to its planes from f32, as masters or packed, and the error of packing. */

/** The error of packing: sums of squares of the differences and of the weights, by kind of tensor ("mlp.up_proj"). */
enum { MT_PACKING_KINDS = 32 };
struct mt_packing_cost {
    struct {
        char kind[64];
        double lost, all;
    } of[MT_PACKING_KINDS];
    int n;
};
/** Writes "self_attn.q_proj 9.1%, ...", the relative L2 errors, to buf. */
const char *mt_packing_cost_format(const struct mt_packing_cost *c, char *buf, size_t len);

/** Where a tensor's weights come from. */
struct mt_filling {
    /** Elements [first, first + n) of t, which come in order, each once. */
    int (*read)(void *ctx, const struct mt_tensor *t, size_t first, size_t n, float *dst, struct mt_err *err);
    void *ctx;
    float largest;                /* for NVFP4, the largest magnitude of them, and of those that share the tensor's factor */
    int n_threads;                /* that pack; 0: a thread for each CPU */
    struct mt_packing_cost *cost; /* receives the error of packing; NULL: not wanted */
};
/** Writes a tensor to its planes: as masters, or packed, if it is packed there. planes NULL: it is only read. */
int mt_tensor_fill(mt_plane_set *planes, const struct mt_tensor *t, const struct mt_filling *f, struct mt_err *err);

/** Must the matrices have one factor in NVFP4, since programs that serve them compute them as one? So it is with
 * queries, keys and values, and with gate and up; each matrix with itself. */
bool mt_packing_share_factor(const struct mt_layout *l, const struct mt_tensor *a, const struct mt_tensor *b);
/** Marks the tensor as one to be packed when its weights are loaded. */
void mt_packing_make(struct mt_tensor *t, enum mt_packed f);
