/* SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/log.h"
#include "base/strbuf.h"
#include "cli.h"
#include "hf/hf_config.h"

int cli_cmd_config(struct cli *cli, const struct cli_args *args)
{
    const char *what = args->operands[0];
    struct mt_str s = {0};
    struct mt_err err;
    (void)cli;
    if (!strcmp(what, "show") && args->n_operands == 2) {
        struct mt_config *cfg;
        if (cli_load_config(&cfg, args, &err))
            return cli_fail(&err);
        mt_config_print(cfg, true, &s);
        mt_config_destroy(&cfg);
    } else if (!strcmp(what, "keys") && args->n_operands == 1) {
        mt_config_describe(&s, cli_arg(args, "markdown") != NULL);
    } else if (!strcmp(what, "init") && args->n_operands == 1) {
        const char *model = cli_arg(args, "model");
        char *dir = NULL;
        mt_config_write_template(&s, model ? model : "Qwen/Qwen3-0.6B");
        if (model && mt_hf_find_model(&dir, model, &err))
            mt_warn("%s", err.msg);
        free(dir);
    } else {
        fprintf(stderr, "usage: megatrain config show CONFIG.ini | keys [--markdown] | init "
                        "[--model DIR]\n");
        return EXIT_USAGE;
    }
    int code = s.failed ? (mt_fail_nomem(&err, "the configuration", s.len), cli_fail(&err)) : 0;
    if (!code)
        fputs(s.p ? s.p : "", stdout);
    mt_str_finish(&s);
    return code;
}
