/* SPDX-License-Identifier: Apache-2.0 */
#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/log.h"
#include "base/mem.h"
#include "base/units.h"
#include "checkpoint/checkpoint.h"
#include "checkpoint/state.h"
#include "cli.h"
#include "hf/hf_config.h"
#include "log_lines.h"
#include "train/inputs.h"
#include "weights/peft.h"

enum { MAX_OPTIONS = 64, FIRST = 256 }; /* of a command */

/* Whether an option's value is valid; if not, prints why. */
static bool good_value(const struct cli_command *cmd, const struct cli_option *o, const char *text)
{
    int64_t n = 0;
    uint64_t bytes = 0;
    double v = 0;
    const char *what = "a number";
    bool ok = true;
    switch (o->value) {
    case CLI_WHOLE:
        ok = mt_parse_count(text, &n);
        what = "a whole number";
        v = (double)n;
        break;
    case CLI_REAL:
        ok = mt_parse_real(text, &v);
        break;
    case CLI_SIZE:
        ok = mt_parse_bytes(text, &bytes);
        what = "a size with a unit, such as 1MiB,";
        v = (double)bytes;
        break;
    case CLI_TEXT:
    default:
        return true;
    }
    if (ok && v >= o->min && v <= o->max)
        return true;
    char range[96];
    if (o->max >= CLI_NO_LIMIT)
        snprintf(range, sizeof(range), "of %.15g or more", o->min);
    else
        snprintf(range, sizeof(range), "between %.15g and %.15g%s", o->min, o->max, o->value == CLI_SIZE ? " bytes" : "");
    fprintf(stderr, "megatrain %s: --%s must be %s %s, not \"%s\"\n", cmd->name, o->name, what, range, text);
    return false;
}

bool cli_takes_next(const struct cli_option *options, const char *arg)
{
    for (const struct cli_option *o = options; o->name; o++)
        if (!strncmp(arg, "--", 2) && !strcmp(arg + 2, o->name))
            return o->arg && o->arg[0] != '=';
    return false;
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

static void wrong_operands(const struct cli_command *cmd, const struct cli_args *a)
{
    if (a->n_operands > cmd->max_operands)
        fprintf(stderr, "megatrain %s: \"%s\" is one argument too many\n", cmd->name, a->operands[cmd->max_operands]);
    for (size_t i = 0; i < a->n_given && a->n_operands > cmd->max_operands; i++)
        if (a->given[i].option->arg && !a->given[i].value)
            fprintf(stderr, "(a value of --%s is written with an equals sign: --%s=%s)\n", a->given[i].option->name,
                    a->given[i].option->name, a->operands[cmd->max_operands]);
    fprintf(stderr, "usage: megatrain %s [OPTION]... %s\n", cmd->name, cmd->synopsis);
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
        if (c == '?' || c == ':')
            return cli_usage("%s: %s \"%s\"; see megatrain help %s", cmd->name,
                             c == ':' ? "a value is missing for" : "unknown option", argv[optind - 1], cmd->name);
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
            continue;
        }
        if (optarg && !good_value(cmd, of[i], optarg))
            return EXIT_USAGE;
        if (!mt_grow(&out->given, &out->cap_given, out->n_given + 1, sizeof(*out->given))) {
            struct mt_err err;
            mt_fail_nomem(&err, "the options", sizeof(*out->given));
            return cli_fail(&err);
        }
        out->given[out->n_given++] = (struct cli_given){of[i], optarg};
    }
    out->operands = argv + optind;
    out->n_operands = argc - optind;
    if (out->n_operands < cmd->min_operands || out->n_operands > cmd->max_operands) {
        wrong_operands(cmd, out);
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
    cli_say_error(err->msg);
    return codes[err->kind];
}

int cli_load_file(struct mt_config **out, const char *path, enum mt_config_use use, const struct cli_args *args,
                  struct mt_err *err)
{
    MT_FREED const char **sets = NULL;
    int n = 0, rc = MT_NEW(&sets, args->n_given, "the options", err);
    for (size_t i = 0; i < args->n_given && !rc; i++)
        if (!strcmp(args->given[i].option->name, "set"))
            sets[n++] = args->given[i].value;
    return rc ?: mt_config_load_for(out, path, sets, n, use, err);
}

/* A checkpoint knows how its run packed the base: otherwise the results are a little different. */
static void compare_packing(const struct mt_config *cfg, const char *dir)
{
    MT_CLOSED_BY(mt_train_state_finish) struct mt_train_state st = {.step = 0};
    if (mt_checkpoint_read_state(dir, &st, NULL))
        return;
    char format[32];
    mt_train_state_value(&st, "model", "base_dtype", format, sizeof(format));
    for (enum mt_packed f = MT_PACKED_NONE + 1; f < MT_N_PACKABLE; f++)
        if (!strcmp(mt_packed_names[f], format) && f != cfg->model.base_dtype)
            mt_warn("%s was trained on a base packed as %s, and here it is not packed so: set model.base_dtype = %s for the "
                    "same results", dir, mt_packed_names[f], mt_packed_names[f]);
}

int cli_model_of_adapter(char **model, const char *dir, struct mt_err *err)
{
    MT_FREED char *name = NULL, *found = NULL;
    struct mt_err why = {0};
    int rc = mt_peft_base_model(&name, dir, err);
    if (!rc && (rc = mt_hf_find_model(&found, name, &why)))
        mt_fail(err, why.kind, rc, "%s (%s/" MT_PEFT_CONFIG " names it): give --model", why.msg, dir);
    if (!rc)
        *model = MT_GIVE(name);
    return rc;
}

int cli_choose_model(struct mt_config *cfg, const char *model, const char *adapter, struct mt_err *err)
{
    MT_FREED char *base = NULL;
    int rc = 0;
    if (model && !adapter && mt_peft_is_folder(model)) {
        adapter = model;
        model = NULL;
    }
    if (adapter && !model && !*cfg->model.path) {
        rc = cli_model_of_adapter(&base, adapter, err);
        model = base;
    }
    if (!rc && model)
        rc = mt_config_override(cfg, "model.path", model, "--model", err);
    if (!rc && adapter)
        rc = mt_inputs_use_adapter(cfg, adapter, "--adapter", err);
    if (!rc && adapter)
        compare_packing(cfg, adapter);
    return rc;
}

int cli_load_config(struct mt_config **out, enum mt_config_use use, const struct cli_args *args, struct mt_err *err)
{
    int rc = cli_load_file(out, args->operands[args->n_operands - 1], use, args, err);
    if (!rc && (*out)->log.progress == MT_PROGRESS_OFF)
        cli_log_hide_progress();
    return rc;
}
