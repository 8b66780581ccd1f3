/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "data/batch.h"
#include "engine/engine.h"
#include "test.h"

/** Makes micro, of which d has the counts: n ids as two samples, parted at `cut`, in rows of `room` tokens. */
static inline void made_batch(struct mt_step_data *d, struct mt_batch *micro, size_t room, const uint32_t *ids, size_t n,
                              size_t cut)
{
    assert_int_equal(mt_batch_init(micro, room, 2, NULL), 0);
    assert_int_equal(mt_batch_add(micro, ids, NULL, cut, 0, NULL), 0);
    assert_int_equal(mt_batch_add(micro, ids + cut, NULL, n - cut, 1, NULL), 0);
    mt_batch_seal(micro);
    d->n_tokens += micro->n_tokens;
    d->n_loss += micro->n_loss;
}
