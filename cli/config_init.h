/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "base/strbuf.h"
#include "cli.h"

/**
 * `config init`: a short configuration for --task (sft, lora, qlora, dpo, pretrain, blocks; without it the one that the
 * data are for), with a reason beside each value. With --model its chat template and this machine's memory decide, with
 * --data too the lengths and the number of samples: rows, steps, epochs, evaluations. --set has the last word.
 * What cannot be found out is warned of and left at a usual value.
 */
int cli_config_init(struct mt_str *out, const struct cli_args *args, struct mt_err *err);
