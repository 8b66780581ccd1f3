/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "fused.h"

/**
 * A cache of the most recently used plans of a fused engine, at most MT_FUSED_MAX_PLANS: a plan has kernels of its own
 * in GPU memory, outside the budget. Only the thread that submits to the stream may use it.
 */
enum { MT_FUSED_MAX_PLANS = 128 };
typedef struct mt_fused_plans mt_fused_plans;

/** Starts the engine on a stream. NULL: it failed, for the reason in `why` (at least 256 bytes). */
mt_fused_plans *mt_fused_plans_create(const struct mt_fused_engine *engine, cudaStream_t stream, char *why,
                                      size_t why_len);
/** Waits for the stream, closes the engine. Accepts NULL. */
void mt_fused_plans_destroy(mt_fused_plans **plans);

/**
 * The plan of a shape, made if it is not in the cache; valid until the next call. Waits for the stream if another plan
 * must be dropped. Negative: the engine has none, for the reason in `why` (-ENOMEM: memory ran short); that is cached,
 * too.
 */
int mt_fused_plans_get(mt_fused_plans *plans, const struct mt_fused_shape *s, void **plan, size_t *workspace_bytes,
                       char *why, size_t why_len);
/** As run() of the engine. */
int mt_fused_plans_run(mt_fused_plans *plans, void *plan, const struct mt_fused_call *c, char *why, size_t why_len);
/** Number of plans made so far, including refused ones. */
size_t mt_fused_plans_made(const mt_fused_plans *plans);
