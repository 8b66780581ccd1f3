/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "data/sample.h"

/**
 * Reads a record of format preference ("chosen" and "rejected", with "prompt" or with their common beginning as the
 * prompt) or rated ("prompt", "completion", "label") without the data helper: strings with the byte tokenizer, or
 * token ids ("prompt_ids", "chosen_ids", ...). Ends its two samples: the chosen answer and the rejected one, each with
 * the prompt, of which nothing is trained. Of a rated answer the other sample is empty. What cannot be trained on (an
 * answer without tokens, two equal ones) is counted and left out.
 */
int mt_answers_read(struct mt_sample_reader *r, const cJSON *o, const char *where, uint64_t place, struct mt_err *err);
