/* SPDX-License-Identifier: Apache-2.0 */
#include "optim/lr.h"

#include <math.h>

#include "base/mem.h"

static double linear_decay(double progress, double min_ratio)
{
    return 1 - (1 - min_ratio) * progress;
}

double mt_lr_at(const struct mt_lr *lr, uint64_t k)
{
    if (k < lr->warmup)
        return lr->peak * (double)k / (double)MT_MAX(lr->warmup, (uint64_t)1);
    uint64_t span = lr->total > lr->warmup ? lr->total - lr->warmup : 1;
    double progress = MT_MIN((double)(k - lr->warmup) / (double)span, 1.0);
    uint64_t decay = MT_MAX(lr->decay, (uint64_t)1), stable_end = lr->total > decay ? lr->total - decay : 0;
    switch (lr->schedule) {
    case MT_LR_LINEAR:
        return lr->peak * linear_decay(progress, lr->min_ratio);
    case MT_LR_COSINE:
        return lr->peak * (lr->min_ratio + (1 - lr->min_ratio) * 0.5 * (1 + cos(M_PI * progress)));
    case MT_LR_WSD:
        stable_end = MT_MAX(stable_end, lr->warmup);
        if (k < stable_end)
            return lr->peak;
        return lr->peak * linear_decay(MT_MIN((double)(k - stable_end) / (double)decay, 1.0), lr->min_ratio);
    default:
        return lr->peak;
    }
}

float mt_clip_factor(double norm, double max_norm)
{
    if (max_norm <= 0)
        return 1;
    double f = max_norm / (norm + 1e-6);
    return f < 1 ? (float)f : 1;
}
