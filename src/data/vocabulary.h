/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdint.h>

#include "base/err.h"

/**
 * A hash of the tokens and ids of a folder's tokenizer.json, which does not depend on how the file
 * is written. 0: there is none, or one without a list of tokens.
 */
int mt_vocabulary_hash(uint64_t *out, const char *model_dir, struct mt_err *err);
