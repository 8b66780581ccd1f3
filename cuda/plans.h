/* SPDX-License-Identifier: Apache-2.0 */
#ifndef MT_CUDA_PLANS_H
#define MT_CUDA_PLANS_H

#include "fused.h"

/**
 * The plans of a fused engine that were used last, at most MT_FUSED_MAX_PLANS: a plan has kernels of its own in GPU
 * memory, outside the budget. One thread at a time, the one that submits to the stream.
 */
enum { MT_FUSED_MAX_PLANS = 128 };
typedef struct mt_fused_plans mt_fused_plans;

/** Starts the engine on a stream. NULL with the reason in `why` (at least 256 bytes). */
mt_fused_plans *mt_fused_plans_create(const struct mt_fused_engine *engine, cudaStream_t stream, char *why,
                                      size_t why_len);
/** Waits for the stream, closes the engine. Accepts NULL. */
void mt_fused_plans_destroy(mt_fused_plans **plans);

/**
 * The plan of a shape, made where there is none; it lives until the next call. Where another must go for it, waits
 * for the stream. -1 with the reason in `why` where the engine refuses the shape, which is remembered, too.
 */
int mt_fused_plans_get(mt_fused_plans *plans, const struct mt_fused_shape *s, void **plan, size_t *workspace_bytes,
                       char *why, size_t why_len);
/** As the engine's. */
int mt_fused_plans_run(mt_fused_plans *plans, void *plan, const struct mt_fused_call *c, char *why, size_t why_len);
/** How many plans were made so far, those that the engine refused included. */
size_t mt_fused_plans_made(const mt_fused_plans *plans);

#endif
