/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stddef.h>

#include "base/err.h"

/** Called for each `key = value`, with quotes removed and variables replaced in the value. Returns 0 to go on. */
typedef int (*mt_ini_fn)(void *ctx, const char *file, int line, const char *section, const char *key,
                         const char *value, struct mt_err *err);

/** Parses INI text; follows `include = FILE` (relative to `file`). Messages begin with "file:line: ". */
int mt_ini_parse(const char *text, size_t len, const char *file, mt_ini_fn fn, void *ctx,
                 struct mt_err *err);
int mt_ini_parse_file(const char *file, mt_ini_fn fn, void *ctx, struct mt_err *err);
