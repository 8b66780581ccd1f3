/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "model/layout.h"
#include "store/planes.h"

/* Packing a tensor's weights from f32 into its plane, and the error of that. */

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

/** Packs a tensor of kind MT_RANGE_PACKED from its weights in f32, given in order. */
struct mt_packer;
/** largest: for NVFP4, the largest magnitude of the weights, and of those that share its factor. cost: receives the
 * error of packing; NULL: not wanted. */
int mt_packer_create(struct mt_packer **out, const struct mt_tensor *t, mt_plane_set *planes, float largest,
                     int n_threads, struct mt_packing_cost *cost, struct mt_err *err);
/** The next n elements: whole rows, for FP8 a multiple of 128 rows, except at the end. */
int mt_packer_write(struct mt_packer *p, const float *w, size_t n, struct mt_err *err);
/** Writes what depends on all weights, unless rc, the caller's result so far, is an error; destroys the packer in any
 * case. Returns rc or the error of its own writes. */
int mt_packer_finish(struct mt_packer **p, int rc, struct mt_err *err);
/** The best number of elements for a call of mt_packer_write(), near `about`. */
size_t mt_packer_piece(const struct mt_tensor *t, size_t about);

/** Must the matrices have one factor in NVFP4, since programs that serve them compute them as one? So it is with
 * queries, keys and values, and with gate and up; each matrix with itself. */
bool mt_packing_share_factor(const struct mt_layout *l, const struct mt_tensor *a, const struct mt_tensor *b);
/** Marks the tensor as one to be packed when its weights are loaded. */
void mt_packing_make(struct mt_tensor *t, enum mt_packed f);
