/* SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>

#include "checkpoint/checkpoint.h"
#include "cli.h"

int cli_cmd_verify(struct cli *, const struct cli_args *args, struct mt_err *err)
{
    int rc = mt_checkpoint_verify(args->operands[0], err);
    if (!rc)
        printf("%s: all files match their checksums\n", args->operands[0]);
    return rc;
}
