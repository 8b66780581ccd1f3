/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "base/err.h"

/**
 * The pattern of files of a data set in the Hugging Face hub cache: "hf://datasets/ORG/NAME/PATTERN", or without a
 * pattern, those whose names begin with "train", else the only ones there. The caller frees *pattern. Errors: it is
 * not in the cache (-ENOENT: the message has the command that gets it), or has several sets of files (they are named).
 * Messages begin with `key`, that of the configuration which has the address.
 */
int mt_hub_files(char **pattern, const char *address, const char *key, struct mt_err *err);
