/* SPDX-License-Identifier: Apache-2.0 */
#ifndef MT_CHECKPOINT_QUANTIZATION_H
#define MT_CHECKPOINT_QUANTIZATION_H

#include "model/layout.h"

/**
 * What config.json must say of a layout's packed tensors: the value of quantization_config, the caller's to free; NULL: what
 * it says already; "": nothing, as none is packed.
 */
int mt_quantization_text(char **out, const struct mt_layout *l, struct mt_err *err);
/** The text of a config.json with that value, the caller's to free; NULL: no memory. */
char *mt_quantization_edit(const char *config, const char *value);

#endif
