/* SPDX-License-Identifier: Apache-2.0 */
#ifndef MT_HF_ROPE_H
#define MT_HF_ROPE_H

#include <cjson/cJSON.h>

#include "hf/hf_config.h"

/** Reads rope_theta and rope_scaling, or rope_parameters, from a parsed config.json. */
int mt_rope_parse(struct mt_rope_config *out, const struct mt_hf_config *cfg, const cJSON *root,
                  const char *name, struct mt_err *err);

#endif
