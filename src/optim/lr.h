/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdint.h>

#include "settings/settings.h"

struct mt_lr {
    enum mt_lr_schedule schedule;
    double peak, min_ratio;        /* the lowest rate is peak * min_ratio */
    uint64_t warmup, decay, total; /* updates; decay: the last ones, for MT_LR_WSD only */
};
/**
 * The learning rate of update k (from 0), as in transformers.optimization: linear warm-up from 0, then constant, linear
 * to the lowest rate, half a cosine to the lowest rate, or WSD: constant, then linear to the lowest rate.
 */
double mt_lr_at(const struct mt_lr *lr, uint64_t k);

/** min(1, max_norm / (norm + 1e-6)); max_norm 0: 1 (no clipping). */
float mt_clip_factor(double norm, double max_norm);
