/* SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>
#include <string.h>

#include "base/log.h"
#include "base/mem.h"
#include "base/strbuf.h"
#include "cli.h"
#include "config_init.h"
#include "hf/hf_config.h"

static int write_all(struct mt_str *s, const struct cli_args *args)
{
    const char *model = cli_arg(args, "model");
    struct mt_err err;
    MT_FREED char *dir = NULL;
    mt_config_write_template(s, model ? model : "Qwen/Qwen3-0.6B");
    if (model && mt_hf_find_model(&dir, model, &err))
        mt_warn("%s", err.msg);
    return 0;
}

int cli_cmd_config(struct cli *, const struct cli_args *args)
{
    const char *what = args->operands[0];
    int rc = 0, n = args->n_operands;
    MT_STR_FREED struct mt_str s = {0};
    struct mt_err err;
    if (!strcmp(what, "show") && n == 2) {
        struct mt_config *cfg;
        if (cli_load_config(&cfg, args, &err))
            return cli_fail(&err);
        mt_config_print(cfg, true, &s);
        mt_config_destroy(&cfg);
    } else if (!strcmp(what, "keys") && n == 1) {
        mt_config_describe(&s, cli_arg(args, "markdown") != NULL);
    } else if (!strcmp(what, "explain") && n == 2) {
        rc = mt_config_explain(&s, args->operands[1], &err);
    } else if (!strcmp(what, "init") && n == 1) {
        rc = cli_arg(args, "all") ? write_all(&s, args) : cli_config_init(&s, args, &err);
    } else {
        fprintf(stderr, "usage: megatrain config show CONFIG.ini | keys [--markdown] | explain KEY |\n"
                        "           init [--task TASK] [--model DIR] [--data FILE] [--all]\n");
        return EXIT_USAGE;
    }
    if (!rc && s.failed)
        rc = mt_fail_nomem(&err, "the configuration", s.len);
    if (!rc)
        fputs(s.p ? s.p : "", stdout);
    return rc ? cli_fail(&err) : 0;
}
