/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdint.h>

#include "base/err.h"
#include "base/json.h"

/**
 * Scalars for TensorBoard: DIR/tensorboard/events.out.tfevents.*, in TFRecord framing (length, masked
 * CRC-32C, an Event message; tensorflow/core/util/event.proto). Each run writes a file of its own, whose
 * first record declares events of older files after `step` void.
 */
struct mt_tensorboard;

int mt_tensorboard_open(struct mt_tensorboard **out, const char *dir, uint64_t step,
                        struct mt_err *err);
void mt_tensorboard_close(struct mt_tensorboard **t);
/** Every number of the record but "step", as scalars named after their keys; of a layer's: "key/layer 3". */
void mt_tensorboard_write(struct mt_tensorboard *t, const cJSON *record);
