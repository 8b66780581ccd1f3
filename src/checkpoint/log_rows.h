/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <cjson/cJSON.h>
#include <stddef.h>

#include "base/err.h"

/**
 * The log of a run as checkpoints have it (log_history of trainer_state.json): records as text, of which there are at
 * most MT_LOG_ROWS. Before there would be more, every second row of steps goes, and from then on only every second
 * one is added; rows of evaluations stay. So memory is bounded, and the whole run is in it. metrics.jsonl has every
 * row.
 */
enum { MT_LOG_ROWS = 4096 };
struct mt_log_rows {
    char **row; /* [n], owned; {0} is empty and valid */
    size_t n, cap;
    size_t every, skipped; /* one of so many steps is added; steps since the last one */
};
void mt_log_rows_finish(struct mt_log_rows *r);
/** Adds a record; one that there is no memory for is left out. */
void mt_log_rows_add(struct mt_log_rows *r, const cJSON *record);
/** An array of all; NULL: no memory. */
cJSON *mt_log_rows_json(const struct mt_log_rows *r);
/** The rows of such an array. -ENOMEM. */
int mt_log_rows_read(struct mt_log_rows *out, const cJSON *array, struct mt_err *err);
