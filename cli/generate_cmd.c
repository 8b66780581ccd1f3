/* SPDX-License-Identifier: Apache-2.0 */
/* Completions of a file of prompts, with their tokens and log-probabilities: rollouts, but for their rewards. */
#include <string.h>

#include "base/fs.h"
#include "base/mem.h"
#include "generate.h"
#include "report.h"

/* A configuration file, or the folder of a model with --set alone. */
static int load(struct cli_generation *p, const struct cli_args *args, struct mt_err *err)
{
    const char *of = args->n_operands ? args->operands[0] : NULL, *model = cli_arg(args, "model");
    bool folder = !of || mt_is_dir(of);
    if (folder && of && model)
        return mt_fail(err, MT_ERR_USAGE, -EINVAL, "%s and --model: give one of them", of);
    if (!of && !model && !cli_arg(args, "adapter"))
        return mt_fail(err, MT_ERR_USAGE, -EINVAL, "give a configuration, the folder of a model or of adapters, or --model or --adapter");
    int rc = cli_load_file(&p->cfg, folder ? NULL : of, MT_TO_GENERATE, args, err);
    if (!rc && !cli_arg(args, "temperature") && strcmp(p->cfg->policy.loss, "off") != 0)
        p->g.temperature = p->cfg->numerics.objective_keys.policy.temperature;
    if (!rc && p->noise >= 0 && (strcmp(p->cfg->optimizer.type, "mezo") || p->cfg->numerics.mezo.small < 1))
        return mt_fail(err, MT_ERR_USAGE, -EINVAL, "--noise is of optimizer.type = mezo, and of mezo.small = 1: give a configuration with them");
    if (!rc)
        p->cfg->numerics.mezo.on_load = p->noise >= 0;
    return rc ?: cli_choose_model(p->cfg, folder && of ? of : model, cli_arg(args, "adapter"), err);
}

int cli_cmd_generate(struct cli *, const struct cli_args *args, struct mt_err *err)
{
    MT_CLOSED_BY(cli_generation_finish) struct cli_generation p = {.n = 0};
    struct mt_memory memory;
    const bool dry = cli_arg(args, "dry-run") != NULL;
    const char *path = cli_arg(args, "out");
    int rc = cli_generation_options(&p, args, 1, err);
    if (!rc && !p.file)
        rc = mt_fail(err, MT_ERR_USAGE, -EINVAL, "give --prompts: JSON lines, or - for standard input");
    rc = rc ?: load(&p, args, err)
            ?: cli_read_prompts(&p, err)
            ?: cli_encode_prompts(&p, err)
            ?: cli_generation_open(&p, p.longest + p.g.n_new, err)
            ?: mt_setup_memory(&p.setup, &memory, err);
    if (!rc && dry)
        cli_print_memory(&memory);
    rc = rc ?: mt_memory_check(&memory, err);
    if (!rc && !dry)
        rc = cli_generation_start(&p, err);
    if (!rc && !dry)
        rc = cli_write_texts(&p, path && strcmp(path, "-") ? path : NULL, err);
    if (!rc)
        cli_say_speed(&p);
    return rc;
}
