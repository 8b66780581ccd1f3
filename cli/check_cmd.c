/* SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/fs.h"
#include "base/mem.h"
#include "checkpoint/checkpoint.h"
#include "checkpoint/output.h"
#include "cli.h"
#include "hf/safetensors.h"
#include "weights/peft.h"
#include "weights/weights.h"
#include "report.h"

/* Whether the model is the one that the adapters of the checkpoint were trained on; reads all of it. */
static int check_base(struct cli *cli, const struct mt_setup *s, const char *adapter, struct mt_err *err)
{
    MT_CLOSED_BY(mt_train_state_finish) struct mt_train_state state = {.step = 0};
    size_t n = 0;
    bool known = !mt_checkpoint_read_state(adapter, &state, NULL) && state.frozen && state.frozen->child;
    bool stored = s->in->cfg->model.init == MT_INIT_WEIGHTS;
    int rc = !known || !stored ? 0
                 : mt_weights_verify_base(s->choice.layout, s->in->model_dir, state.frozen, &n, err);
    if (rc || cli->quiet)
        return rc;
    if (n)
        printf("Base      %zu tensors of the model are those that the adapters were trained on\n", n);
    else
        printf("Base      not compared: %s\n", !stored ? "model.init = random"
                                              : known ? "the adapters were trained on files of another format"
                                                      : "PEFT's own files say nothing of the model's bytes");
    return 0;
}

/* Removes what the check has made: the folder, and its parents up to `top`, as far as they are empty. */
static void remove_made(const char *dir, size_t top)
{
    unlink(MT_PATH("%s/.lock", dir));
    for (size_t n = strlen(dir); n >= top; n--)
        if ((n == strlen(dir) || dir[n] == '/') && rmdir(MT_PATH("%.*s", (int)n, dir)))
            return;
}

/* Whether checkpoints can be saved in the folder, as a run tries it before its first step; it is left as it was. */
static int try_output(const char *dir, struct mt_err *err)
{
    struct mt_output out;
    size_t top = 0; /* length of the first folder's name that is not there; 0: all are */
    for (size_t n = 1; n <= strlen(dir) && !top; n++)
        if (!dir[n] || dir[n] == '/') {
            top = mt_path_exists(MT_PATH("%.*s", (int)n, dir)) ? 0 : n;
        }
    int rc = mt_output_open(&out, dir, err) ?: mt_checkpoint_rehearse(NULL, dir, err);
    mt_output_close(&out);
    if (top)
        remove_made(dir, top);
    return rc;
}

int cli_cmd_check(struct cli *cli, const struct cli_args *args, struct mt_err *err)
{
    MT_CLOSED_BY(mt_config_destroy) struct mt_config *cfg = NULL;
    MT_CLOSED_BY(mt_inputs_finish) struct mt_inputs in = {0};
    MT_CLOSED_BY(mt_setup_finish) struct mt_setup setup = {0};
    struct mt_memory memory;
    int rc = cli_load_config(&cfg, MT_TO_TRAIN, args, err)
          ?: cli_choose_model(cfg, cli_arg(args, "model"), cli_arg(args, "adapter"), err)
          ?: mt_inputs_open(&in, cfg, MT_RUN_TRAIN, NULL, err);
    if (!rc)
        mt_inputs_say_rate(&in);
    rc = rc ?: mt_setup_open(&setup, &in, MT_RUN_TRAIN, err);
    if (!rc && cfg->model.init == MT_INIT_WEIGHTS) {
        MT_CLOSED_BY(mt_st_close) struct mt_st_model st = {0};
        rc = mt_st_open_dir(&st, in.model_dir, err);
    }
    if (!rc && mt_path_exists(cfg->checkpoint.dir) && !mt_is_dir(cfg->checkpoint.dir))
        rc = mt_fail(err, MT_ERR_USAGE, -ENOTDIR, "checkpoint.dir = %s is a file: name a folder", cfg->checkpoint.dir);
    rc = rc ?: try_output(cfg->checkpoint.dir, err);
    if (!rc && setup.choice.layout->n_adapters && *cfg->adapter.path)
        rc = mt_peft_check(setup.choice.layout, cfg->adapter.path, err);
    rc = rc ?: mt_setup_memory(&setup, &memory, err);
    if (!rc && !cli->quiet) {
        cli_print_setup(&setup);
        cli_print_memory(&memory);
    }
    if (!rc && setup.choice.layout->n_adapters && cli_arg(args, "adapter"))
        rc = check_base(cli, &setup, cfg->adapter.path, err);
    rc = rc ?: mt_memory_check(&memory, err) ?: mt_setup_check_later(&setup, err);
    if (!rc)
        printf("ok\n");
    return rc;
}
