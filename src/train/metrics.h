/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "train/control.h"

/**
 * A record a step or evaluation, to DIR/metrics.jsonl (doubles read back exactly), DIR/metrics.csv and TensorBoard, and
 * to a command (feed.h), each where the configuration asks for it. Those of layers are rows of
 * metrics-layers.csv.
 */
struct mt_metrics;

/**
 * Opens for appending; records after `step`, of a run that went further before it was resumed, are cut off. layers:
 * there are records of layers, too. The objective's measures have columns in metrics.csv.
 */
int mt_metrics_open(struct mt_metrics **out, const struct mt_config *cfg, const char *dir, uint64_t step,
                    const struct mt_objective *objective, bool layers, struct mt_err *err);
/** Records go to the command, too; borrowed, since it outlives the phases of train.blocks. */
void mt_metrics_feed(struct mt_metrics *m, struct mt_feed *feed);
void mt_metrics_close(struct mt_metrics **m);
/** Of records: NULL where memory was short, which the writers take. The caller frees them with cJSON_Delete(). */
cJSON *mt_metrics_step_record(const struct mt_step_report *r);
/**
 * How a layer's tokens were spread over its experts: expert_balance is 1 where evenly, n where one got them all (n times
 * the sum of squared shares); expert_entropy 1 and 0; experts_idle had none; expert_max_share is the fullest one's.
 */
cJSON *mt_metrics_layer_record(uint64_t step, int layer, const int32_t *rows, size_t n_experts);
cJSON *mt_metrics_eval_record(const struct mt_eval_report *r);
/** Writes the record; borrowed. What cannot be written waits: see append.h. */
void mt_metrics_write(struct mt_metrics *m, const cJSON *record);
