/* SPDX-License-Identifier: Apache-2.0 */
#ifndef MT_DATA_SAMPLES_H
#define MT_DATA_SAMPLES_H

#include "data/sample.h"

/** Turns a file into samples: .jsonl (an object a line), .json (an array), anything else: plain text. */
int mt_samples_read_file(struct mt_sample_reader *r, const char *path, struct mt_err *err);
void mt_samples_finish(struct mt_sample_reader *r);

#endif
