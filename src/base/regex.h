/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdbool.h>

enum { MT_REGEX_WHY = 128 };

/**
 * Whether text begins with what Python's regular expression matches (re.match). Errors, with a text
 * in `why`: -EINVAL the expression cannot be read, -ERANGE it goes back and forth for too long,
 * -ENOMEM.
 */
int mt_regex_begins(bool *yes, const char *expression, const char *text, char why[MT_REGEX_WHY]);
