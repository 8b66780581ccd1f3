/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stddef.h>

/**
 * What a model has that is not supported, and what to do instead, for families that people may well try: "has ...; train
 * ...". By the beginning of its architecture, or of its model_type where config.json has no architectures (NULL).
 * NULL: nothing is known of it.
 */
const char *mt_refused_reason(const char *architecture, const char *model_type);
/** The i-th of these: how its architecture begins, and its reason; NULL: there are fewer. */
const char *mt_refused_at(size_t i, const char **reason);
