/* SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>
#include <string.h>

#include "checkpoint/checkpoint.h"
#include "cli.h"

int cli_cmd_export(struct cli *cli, const struct cli_args *args)
{
    const char *dtype = cli_arg(args, "dtype"), *size = cli_arg(args, "shard-size");
    const char *packed = cli_arg(args, "base-dtype");
    struct mt_export e = {.from = args->operands[0], .to = args->operands[1], .f32 = dtype && !strcmp(dtype, "f32")};
    struct mt_config *cfg = NULL;
    struct mt_err err;
    (void)cli;
    if (dtype && strcmp(dtype, "bf16") && strcmp(dtype, "f32")) {
        fprintf(stderr, "megatrain export: --dtype must be bf16 or f32\n");
        return EXIT_USAGE;
    }
    while (packed && e.base_dtype < MT_N_PACKED && strcmp(packed, mt_packed_names[e.base_dtype]))
        e.base_dtype++;
    if (packed && (e.base_dtype == MT_PACKED_NONE || e.base_dtype == MT_N_PACKED || dtype)) {
        fprintf(stderr, "megatrain export: --base-dtype must be nf4, fp8 or mxfp4, without --dtype\n");
        return EXIT_USAGE;
    }
    int rc = mt_config_load(&cfg, NULL, NULL, 0, &err);
    if (!rc && size)
        rc = mt_config_override(cfg, "checkpoint.shard_size", size, "--shard-size", &err);
    if (!rc) {
        e.shard_bytes = cfg->checkpoint.shard_size;
        rc = mt_checkpoint_export(&e, &err);
    }
    if (!rc)
        printf("%s: load it with AutoModelForCausalLM.from_pretrained(\"%s\")\n", args->operands[1],
               args->operands[1]);
    mt_config_destroy(&cfg);
    return rc ? cli_fail(&err) : 0;
}
