/* SPDX-License-Identifier: Apache-2.0 */
#ifndef MT_TRAIN_METRICS_H
#define MT_TRAIN_METRICS_H

#include "train/train.h"

/** DIR/metrics.jsonl: a record a step or evaluation, doubles that read back exactly. */
struct mt_metrics;

/** Opens for appending; rows past `step` (of a run that went further) are cut off. */
int mt_metrics_open(struct mt_metrics **out, const char *dir, uint64_t step, struct mt_err *err);
void mt_metrics_close(struct mt_metrics **m);
/** Records to be printed, not looked into: their numbers are texts. */
cJSON *mt_metrics_step_record(const struct mt_step_report *r);
cJSON *mt_metrics_eval_record(const struct mt_eval_report *r);
/** Writes and flushes the record; borrowed. */
int mt_metrics_write(struct mt_metrics *m, const cJSON *record, struct mt_err *err);

#endif
