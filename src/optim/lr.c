/* SPDX-License-Identifier: Apache-2.0 */
#include "optim/lr.h"

#include <math.h>

#include "base/mem.h"

static double linear_decay(double progress, double min_ratio)
{
    return 1 - (1 - min_ratio) * progress;
}

double mt_lr_at(enum mt_cfg_lr_schedule schedule, double base, uint64_t k, uint64_t warmup,
                uint64_t total, double min_ratio)
{
    if (k < warmup)
        return base * (double)k / (double)MT_MAX(warmup, (uint64_t)1);
    uint64_t span = total > warmup ? total - warmup : 1;
    double progress = MT_MIN((double)(k - warmup) / (double)span, 1.0);
    uint64_t decay = MT_MAX(total / 10, (uint64_t)1), stable_end = total > decay ? total - decay : 0;
    switch (schedule) {
    case MT_LR_LINEAR:
        return base * linear_decay(progress, min_ratio);
    case MT_LR_COSINE:
        return base * (min_ratio + (1 - min_ratio) * 0.5 * (1 + cos(M_PI * progress)));
    case MT_LR_WSD:
        stable_end = MT_MAX(stable_end, warmup);
        if (k < stable_end)
            return base;
        return base * linear_decay(MT_MIN((double)(k - stable_end) / (double)decay, 1.0), min_ratio);
    default:
        return base;
    }
}

float mt_clip_factor(double norm, double max_norm)
{
    if (max_norm <= 0)
        return 1;
    double f = max_norm / (norm + 1e-6);
    return f < 1 ? (float)f : 1;
}
