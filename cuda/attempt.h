/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "trial.h"

/** A call of attention, or, if `b` is not NULL, of its backward. */
struct mt_cuda_call {
    const struct mt_attention *a;
    const struct mt_attention_bwd *b;
};

/** REFUSED: nothing was done, another way must do it. FAILED: the device's error is set. */
enum mt_cuda_outcome { MT_CUDA_DONE, MT_CUDA_REFUSED, MT_CUDA_FAILED };
typedef enum mt_cuda_outcome (*mt_cuda_way)(struct mt_cuda_device *d, const struct mt_cuda_call *c,
                                            enum mt_trial_way way, struct mt_err *err);

/** Does the call by tiles. */
int mt_cuda_tiles(struct mt_cuda_device *d, const struct mt_cuda_call *c, struct mt_err *err);

/**
 * Does the call by go(), unless its kind was found wrong. The first call of a kind, and its next one after
 * mt_trials_doubt(), is compared with tiles. d->verdict is that on the kind while go() runs, which may change it
 * (mt_trials_settle()).
 */
enum mt_cuda_outcome mt_cuda_attempt(struct mt_cuda_device *d, const struct mt_cuda_call *c, enum mt_trial_way way,
                                     mt_cuda_way go, struct mt_err *err);
