/* SPDX-License-Identifier: Apache-2.0 */
#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "cli.h"
#include "log_lines.h"

enum { MAX_OPTIONS = 64, FIRST = 256 };

const char *cli_arg(const struct cli_args *a, const char *name)
{
    for (int i = a->n_given; i-- > 0;)
        if (!strcmp(a->given[i]->name, name))
            return a->values[i] ? a->values[i] : "";
    return NULL;
}

static int fill_table(struct option *longs, const struct cli_option **of, char *shorts,
                      const struct cli_option *list, int n)
{
    for (; list->name; list++, n++) {
        longs[n] = (struct option){list->name,
                                   !list->arg            ? no_argument
                                   : list->arg[0] == '=' ? optional_argument
                                                         : required_argument,
                                   NULL, FIRST + n};
        of[n] = list;
        if (list->letter) {
            size_t k = strlen(shorts);
            shorts[k] = list->letter;
            shorts[k + 1] = 0;
        }
    }
    return n;
}

static void set_global(struct cli *cli, const char *name, const char *value)
{
    cli->quiet |= !strcmp(name, "quiet");
    cli->verbose += !strcmp(name, "verbose");
    cli->no_progress |= !strcmp(name, "no-progress");
    if (!strcmp(name, "log-format"))
        cli->json_log = !strcmp(value, "json");
    if (!strcmp(name, "color"))
        cli->colour_always = !strcmp(value, "always");
    if (!strcmp(name, "color"))
        cli->colour = !strcmp(value, "always") || (strcmp(value, "never") && cli->colour);
}

static bool colour_by_default(void)
{
    const char *term = getenv("TERM"), *no = getenv("NO_COLOR");
    return isatty(STDERR_FILENO) && !(no && *no) && !(term && !strcmp(term, "dumb"));
}

static bool good_global(const char *name, const char *value)
{
    if (!strcmp(name, "log-format"))
        return !strcmp(value, "text") || !strcmp(value, "json");
    if (!strcmp(name, "color"))
        return !strcmp(value, "auto") || !strcmp(value, "always") || !strcmp(value, "never");
    return true;
}

int cli_parse(struct cli *cli, const struct cli_command *cmd, int argc, char **argv,
              struct cli_args *out)
{
    struct option longs[MAX_OPTIONS] = {{0}};
    const struct cli_option *of[MAX_OPTIONS];
    char shorts[MAX_OPTIONS] = ":";
    int n_global = fill_table(longs, of, shorts, cli_global_options, 0);
    int n = fill_table(longs, of, shorts, cmd->options, n_global), c;
    cli->colour = colour_by_default();
    opterr = 0;
    while ((c = getopt_long(argc, argv, shorts, longs, NULL)) != -1) {
        int i = c - FIRST;
        if (c == '?' || c == ':') {
            fprintf(stderr, "megatrain %s: %s \"%s\"; see megatrain help %s\n", cmd->name,
                    c == ':' ? "a value is missing for" : "unknown option", argv[optind - 1],
                    cmd->name);
            return EXIT_USAGE;
        }
        for (int k = 0; c < FIRST && k < n; k++)
            if (of[k]->letter == c)
                i = k;
        if (!strcmp(of[i]->name, "help")) {
            cli_help(cmd);
            return 0;
        }
        if (i < n_global) {
            if (!good_global(of[i]->name, optarg)) {
                fprintf(stderr, "megatrain: --%s cannot be \"%s\"\n", of[i]->name, optarg);
                return EXIT_USAGE;
            }
            set_global(cli, of[i]->name, optarg);
        } else if (out->n_given < MAX_OPTIONS) {
            out->given[out->n_given] = of[i];
            out->values[out->n_given++] = optarg;
        }
    }
    out->operands = argv + optind;
    out->n_operands = argc - optind;
    if (out->n_operands < cmd->min_operands || out->n_operands > cmd->max_operands) {
        fprintf(stderr, "usage: megatrain %s [OPTION]... %s\n", cmd->name, cmd->synopsis);
        return EXIT_USAGE;
    }
    return -1;
}

int cli_fail(const struct mt_err *err)
{
    static const int codes[] = {
        [MT_ERR_RUNTIME] = EXIT_RUNTIME,   [MT_ERR_USAGE] = EXIT_USAGE,
        [MT_ERR_INPUT] = EXIT_INPUT,       [MT_ERR_NO_FIT] = EXIT_NO_FIT,
        [MT_ERR_DEVICE] = EXIT_DEVICE,     [MT_ERR_TRAINING] = EXIT_TRAINING,
        [MT_ERR_CHECKPOINT] = EXIT_CHECKPOINT,
    };
    fprintf(stderr, "megatrain: %s\n", err->msg);
    return codes[err->kind];
}

int cli_load_file(struct mt_config **out, const char *path, const struct cli_args *args,
                  struct mt_err *err)
{
    const char *sets[64];
    int n = 0;
    for (int i = 0; i < args->n_given; i++)
        if (!strcmp(args->given[i]->name, "set"))
            sets[n++] = args->values[i];
    return mt_config_load(out, path, sets, n, err);
}

int cli_load_config(struct mt_config **out, const struct cli_args *args, struct mt_err *err)
{
    int rc = cli_load_file(out, args->operands[args->n_operands - 1], args, err);
    if (!rc && (*out)->log.progress == MT_PROGRESS_OFF)
        cli_log_hide_progress();
    return rc;
}

/* By the parser of the configuration. */
int cli_parse_size(const struct cli_args *args, const char *name, uint64_t *out, struct mt_err *err)
{
    struct mt_config *cfg = NULL;
    const char *text = cli_arg(args, name);
    if (!text)
        return 0;
    int rc = mt_config_load(&cfg, NULL, NULL, 0, err);
    if (!rc)
        rc = mt_config_override(cfg, "memory.host_budget", text, name, err);
    if (!rc && (cfg->placement.host_budget.is_auto || cfg->placement.host_budget.is_ratio))
        rc = mt_fail(err, MT_ERR_USAGE, -EINVAL, "--%s %s: bytes with a unit, such as 1MiB", name, text);
    if (!rc)
        *out = cfg->placement.host_budget.bytes;
    mt_config_destroy(&cfg);
    return rc;
}
