/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "base/json.h"

/**
 * The reward of a rollout's "completion" by a check that is built in, against fields of its prompt's record: exact (the same text as "answer", spaces
 * at the ends aside), number (the last number is that of "answer"), regex ("answer" is a regular expression that matches at
 * the beginning, as Python's re.match), schema (JSON by "schema": type, enum, required, properties, items). 1 or 0.
 * -ENOENT: no check has that name. -EINVAL: the record lacks what it needs; *err names it.
 */
int cli_reward(double *out, const char *check, const cJSON *rollout, const char *place, struct mt_err *err);
