/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "hf/hf_config.h"
#include "hf/keys.h"

/** Reads quantization_config: the packed format of the layers' matrices. Unsupported values are refused by name. */
void mt_quantization_read(struct mt_keys *r, struct mt_hf_config *c);
