/* SPDX-License-Identifier: Apache-2.0 */
#ifndef MT_CUDA_ATTENTION_H
#define MT_CUDA_ATTENTION_H

#include "base/strbuf.h"
#include "cuda_priv.h"

/**
 * Three implementations: cuDNN's fused attention, if the build has it and it supports the shape; tiles of matrix
 * products with a softmax between them, for every shape; and kernels of our own on tensor cores, when asked for. In
 * the environment, MEGATRAIN_ATTENTION=tiled always uses tiles, =fused fails if there is no fused engine, and =own uses
 * kernels of our own (flash.h) where they suit, else tiles. At the first call of each kind, the fused result is
 * compared with that of tiles (trial.h).
 */
int mt_cuda_attention_create(struct mt_cuda_device *d, struct mt_err *err);
void mt_cuda_attention_destroy(struct mt_cuda_device *d);
/** "cuDNN 9.19.0", "own" or "tiled". */
void mt_cuda_attention_describe(const struct mt_cuda_device *d, char *buf, size_t len);

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
/** *done is false if the engine does not take the shape, or there is no engine: nothing is done, and 0 is returned. */
int mt_cuda_fused_attention(struct mt_cuda_device *d, const struct mt_attention *a, bool *done,
                            struct mt_err *err);
int mt_cuda_fused_attention_bwd(struct mt_cuda_device *d, const struct mt_attention_bwd *b,
                                bool *done, struct mt_err *err);
/** mt_device_findings(), mt_device_adopt_findings(). */
void mt_cuda_fused_findings(struct mt_cuda_device *d, struct mt_str *out);
bool mt_cuda_fused_adopt(struct mt_cuda_device *d, const char *text);

#endif
