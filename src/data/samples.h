/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "data/sample.h"

/** Turns a file into samples: .jsonl (an object a line), .json (an array), anything else: plain text. */
int mt_samples_read_file(struct mt_sample_reader *r, const char *path, struct mt_err *err);
void mt_samples_finish(struct mt_sample_reader *r);
/** Whether data.format = auto takes a record for a rollout. */
bool mt_samples_are_rollouts(const cJSON *o);
