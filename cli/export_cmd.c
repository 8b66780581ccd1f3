/* SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>
#include <string.h>

#include "base/fs.h"
#include "base/mem.h"
#include "checkpoint/checkpoint.h"
#include "checkpoint/overlay.h"
#include "cli.h"
#include "hf/hf_config.h"
#include "weights/peft.h"

/* Finds the model that adapters are merged into. The caller frees *base. */
static int find_base(char **base, const struct cli_args *args, struct mt_err *err)
{
    const char *from = args->operands[0], *model = cli_arg(args, "model");
    MT_FREED char *name = NULL;
    int rc = 0;
    if (!mt_peft_is_folder(from))
        return mt_fail(err, MT_ERR_USAGE, -EINVAL, "--merge: %s has no adapters", from);
    if (!model)
        rc = cli_model_of_adapter(&name, from, err);
    return rc ?: mt_hf_find_model(base, model ? model : name, err);
}

/* The overlay beside a checkpoint, of the model if it is named. */
static int find_overlay(char **base, const char *from, const char *overlay, const char *model, struct mt_err *err)
{
    MT_FREED char *dir = NULL;
    const char *beside = MT_PATH("%s/..", from), *path = MT_PATH("%s/%s", beside, overlay);
    int rc = model ? mt_hf_find_model(&dir, model, err) : 0;
    if (!rc && dir)
        rc = mt_overlay_adopt(from, overlay, beside, dir, base, err);
    else if (!rc && !mt_is_dir(path))
        rc = mt_fail(err, MT_ERR_CHECKPOINT, -ENOENT, "%s needs %s beside it, with what adapters were added to before: it is not "
                     "there", from, overlay);
    else if (!rc && !(*base = strdup(path)))
        rc = mt_fail_nomem(err, path, strlen(path));
    return rc;
}

/* Adapters of a run that merges them are exported merged, into what those before were added to. *base NULL: others. */
static int find_merged(char **base, const struct cli_args *args, struct mt_err *err)
{
    const char *from = args->operands[0];
    MT_CLOSED_BY(mt_train_state_finish) struct mt_train_state s = {.step = 0};
    MT_FREED char *overlay = NULL;
    mt_overlay_of_adapters(&overlay, from, NULL); /* also of those that were saved without a state */
    if (overlay)
        return find_overlay(base, from, overlay, cli_arg(args, "model"), err);
    bool merges = mt_peft_is_folder(from) && !mt_checkpoint_read_state(from, &s, NULL) && s.blocks.on;
    return merges ? find_base(base, args, err) : 0;
}

/* The evaluation loss of the configuration with another model. */
static int loss_of(double *loss, const char *ini, const char *model, const char *adapter, struct mt_err *err)
{
    static const char *const own[] = {"adapter.kind=none", "adapter.merge_aware=off", "model.base_dtype=auto", "model.init=weights"};
    MT_CLOSED_BY(mt_config_destroy) struct mt_config *cfg = NULL;
    return mt_config_load(&cfg, ini, own, MT_ARRAY_LEN(own), err) ?: cli_choose_model(cfg, model, adapter, err)
               ?: cli_eval(cfg, NULL, loss, err);
}

static int compare_losses(const struct mt_export *e, const char *ini, struct mt_err *err)
{
    bool adapters = mt_peft_is_folder(e->from), stay = adapters && !e->base;
    double before, after;
    int rc = loss_of(&before, ini, adapters ? e->base : e->from, adapters ? e->from : NULL, err)
                 ?: loss_of(&after, ini, stay ? NULL : e->to, stay ? e->to : NULL, err);
    if (!rc)
        printf("loss %.6f before, %.6f after (%+.6f)\n", before, after, after - before);
    return rc;
}

int cli_cmd_export(struct cli *, const struct cli_args *args, struct mt_err *err)
{
    const char *dtype = cli_arg(args, "dtype"), *size = cli_arg(args, "shard-size");
    const char *packed = cli_arg(args, "quantize"), *ini = cli_arg(args, "eval");
    struct mt_export e = {.from = args->operands[0], .to = args->operands[1], .f32 = dtype && !strcmp(dtype, "f32")};
    MT_CLOSED_BY(mt_config_destroy) struct mt_config *cfg = NULL;
    MT_FREED char *base = NULL;
    if (dtype && strcmp(dtype, "bf16") && strcmp(dtype, "f32"))
        return cli_usage("export: --dtype must be bf16 or f32");
    while (packed && e.base_dtype < MT_N_PACKABLE && strcmp(packed, mt_packed_names[e.base_dtype]))
        e.base_dtype++;
    if (packed && (e.base_dtype == MT_PACKED_NONE || e.base_dtype == MT_N_PACKABLE))
        return cli_usage("export: --quantize must be nf4, fp8, mxfp4, int4 or nvfp4");
    e.fold = cli_arg(args, "fold-scales") != NULL;
    if (e.fold && (cli_arg(args, "merge") || !mt_peft_is_folder(e.from)))
        return cli_usage("export: --fold-scales is of adapters that stay adapters");
    int rc = mt_config_load(&cfg, NULL, NULL, 0, err);
    if (!rc && size)
        rc = mt_config_override(cfg, "checkpoint.shard_size", size, "--shard-size", err);
    rc = rc ?: find_merged(&base, args, err);
    if (!rc && base && e.fold)
        rc = mt_fail(err, MT_ERR_USAGE, -EINVAL, "%s is of a run that merges its adapters: there are no scales to fold", e.from);
    if (!rc && !base && cli_arg(args, "merge"))
        rc = find_base(&base, args, err);
    if (!rc) {
        e.base = base;
        e.shard_bytes = cfg->checkpoint.shard_size;
        rc = mt_checkpoint_export(&e, err);
    }
    if (!rc)
        printf(mt_peft_is_folder(e.from) && !base ? "%s: load it with PeftModel.from_pretrained(model, \"%s\")\n"
                                                  : "%s: load it with AutoModelForCausalLM.from_pretrained(\"%s\")\n",
               e.to, e.to);
    if (!rc && ini)
        rc = compare_losses(&e, ini, err);
    return rc;
}
