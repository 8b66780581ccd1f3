/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "model/layout.h"

/**
 * The value of quantization_config in config.json for a layout's packed tensors, to be freed; NULL: unchanged;
 * "": to be removed, since no tensor is packed.
 */
int mt_quantization_text(char **out, const struct mt_layout *l, struct mt_err *err);
/** The text of a config.json with that value, to be freed; NULL: no memory. */
char *mt_quantization_edit(const char *config, const char *value);
