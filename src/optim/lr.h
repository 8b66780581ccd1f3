/* SPDX-License-Identifier: Apache-2.0 */
#ifndef MT_OPTIM_LR_H
#define MT_OPTIM_LR_H

#include <stdint.h>


#include "config/config.h"

/**
 * The learning rate of update k (from 0) of `total`, as transformers.optimization has it: linear
 * warm-up from 0 over `warmup` updates, then constant, linear to min_ratio, half a cosine to min_ratio, or
 * warm-up - stable - decay (linear over the last tenth, to min_ratio).
 */
double mt_lr_at(enum mt_cfg_lr_schedule schedule, double base, uint64_t k, uint64_t warmup,
                uint64_t total, double min_ratio);

/** min(1, max_norm / (norm + 1e-6)); max_norm 0: 1 (no clipping). */
float mt_clip_factor(double norm, double max_norm);

#endif
