/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "data/batch.h"
#include "device/ops.h"

/** The different calls of attention that a model makes, but for their documents: by window, heads, direction. */
struct mt_warm_attention {
    struct {
        bool backward;
        struct mt_attention_bwd args; /* of forward: fwd alone; buffers and documents are not used */
    } call[8];
    int n;
};

/** Notes a call that is not known yet (mt_cost_params.on_call; ctx: a struct mt_warm_attention). More than the table
 * holds are left out. */
void mt_warm_attention_note(void *ctx, enum mt_dev_op op, const void *args);
/**
 * Runs each call over the documents of the step's micro-batches, on zeros, in the device's free memory, without those for
 * which it is too small. *n_calls: micro-batches, of different documents each. Fails with the device's errors.
 */
int mt_warm_attention_run(const struct mt_warm_attention *w, mt_device *dev, const struct mt_step_data *step,
                          size_t *n_calls, struct mt_err *err);
