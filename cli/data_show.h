/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "cli.h"
#include "train/inputs.h"

/** Shows samples with their trained tokens marked: by colour, brackets, in an HTML file, or as JSON lines. */
int cli_data_show(const struct cli *cli, const struct cli_args *args, const struct mt_inputs *in,
                  struct mt_err *err);
