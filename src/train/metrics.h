/* SPDX-License-Identifier: Apache-2.0 */
#ifndef MT_TRAIN_METRICS_H
#define MT_TRAIN_METRICS_H

#include "train/train.h"

/**
 * A record a step or evaluation, to DIR/metrics.jsonl (doubles read back exactly), DIR/metrics.csv and
 * TensorBoard, each where the configuration asks for it.
 */
struct mt_metrics;

/** Opens for appending; rows past `step` (of a run that went further) are cut off. */
int mt_metrics_open(struct mt_metrics **out, const struct mt_config *cfg, const char *dir,
                    uint64_t step, struct mt_err *err);
void mt_metrics_close(struct mt_metrics **m);
cJSON *mt_metrics_step_record(const struct mt_step_report *r);
cJSON *mt_metrics_eval_record(const struct mt_eval_report *r);
/** Writes the record; borrowed. What cannot be written waits in memory: see append.h. */
void mt_metrics_write(struct mt_metrics *m, const cJSON *record);

#endif
