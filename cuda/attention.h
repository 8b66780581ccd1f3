/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "base/strbuf.h"
#include "attempt.h"
#include "cuda_priv.h"

/**
 * Three implementations: kernels of our own on tensor cores (kernels.h), for some widths of heads; cuDNN's fused attention,
 * if the build has it and it supports the shape; tiles of matrix products with a softmax between them, for every
 * shape. Our own come first on GPUs whose tensor cores they were written for (mt_cuda_own_first()), and their shapes
 * never go to cuDNN there, so that its workspace need not be; else cuDNN comes first, but for documents that go on,
 * which it does not know. In the environment, MEGATRAIN_ATTENTION=tiled always uses tiles, =fused fails if there is no
 * fused engine and uses none of ours, and =own uses no fused engine and compares nothing, so that tests see what ours
 * computes. Else at the first call of each kind the result is compared with that of tiles (trial.h).
 */
int mt_cuda_attention_create(struct mt_cuda_device *d, int multiprocessors, struct mt_err *err);
void mt_cuda_attention_destroy(struct mt_cuda_device *d);
/** "cuDNN 9.19.0", "own" or "tiled": what comes first. */
void mt_cuda_attention_describe(const struct mt_cuda_device *d, char *buf, size_t len);
/** mt_device_doubt(), mt_device_share_findings(). */
void mt_cuda_attention_doubt(mt_device *dev);
bool mt_cuda_attention_share(mt_device *dev, mt_device *first);
/** mt_device_distrust(), mt_device_trust(). */
size_t mt_cuda_attention_distrust(mt_device *dev, bool on);

/* --- attention_tiled.c ------------------------------------------------------------------------- */

int mt_cuda_tiled_attention(struct mt_cuda_device *d, const struct mt_attention *a,
                            struct mt_err *err);
int mt_cuda_tiled_attention_bwd(struct mt_cuda_device *d, const struct mt_attention_bwd *b,
                                struct mt_err *err);

/* --- fused.c ----------------------------------------------------------------------------------- */

/** -1: there is no engine, for the reason in `why`; d->fused stays NULL. */
int mt_cuda_fused_create(struct mt_cuda_device *d, char *why, size_t why_len);
void mt_cuda_fused_destroy(struct mt_cuda_device *d);
void mt_cuda_fused_describe(const struct mt_cuda_device *d, char *buf, size_t len);
/** REFUSED: the engine does not take the call, or there is no engine. */
enum mt_cuda_outcome mt_cuda_fused_attend(struct mt_cuda_device *d, const struct mt_cuda_call *c, struct mt_err *err);

/* --- known.c ----------------------------------------------------------------------------------- */

/** Why a version of cuDNN (91900 for 9.19.0; 0: not known) must not do such a call on compute capability `sm`; NULL:
 * nothing is known against it. */
const char *mt_fused_known_wrong(int version, int sm, const struct mt_cuda_call *c);
