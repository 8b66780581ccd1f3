/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "train/inputs.h"

/**
 * How many texts generation has at once: each pass through the weights adds a token to all of them. More are faster,
 * until their caches leave no room for weights. No token depends on it.
 */

/** A pass of so many texts, one new token of each, as the planner simulates it. */
struct mt_texts_pass {
    size_t texts;
    double seconds, drawing; /* drawing: of these, to draw on the host */
    double per_second;       /* tokens */
    size_t caches, weights, units; /* units whose cache and weights stay on the device */
    const char *bound;
};

enum { MT_TEXTS_MOST = 2048, MT_TEXTS_BETWEEN = 5, MT_TEXTS_PASSES = 12 + MT_TEXTS_BETWEEN };

/**
 * Plans passes of `least` (a power of two) texts, of twice as many, and so on, up to the first that do not fit or are more
 * than `of` has; then of some numbers above the best. Ascending. r: of a use that generates, with a machine. *best: the
 * index of the fastest. -ENOSPC: not even `least` fit; -EINVAL: such texts have no cache.
 */
int mt_texts_plan(struct mt_texts_pass pass[MT_TEXTS_PASSES], size_t *n, size_t *best, const struct mt_plan_request *r,
                  const struct mt_texts *of, size_t least, struct mt_err *err);

/**
 * The number of texts for a run on this open device: the plan's best of those above MT_TEXTS_FEW; where the machine has no
 * profile, or so many do not fit, as many as keep their caches on the device, up to 64.
 */
size_t mt_texts_choose(const struct mt_plan_request *r, const struct mt_texts *of, mt_device *dev);
/** Sets the request's cache, rows and draws for n texts at once. */
void mt_texts_request(struct mt_plan_request *r, const struct mt_texts *of, size_t n);
