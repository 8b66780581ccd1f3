/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "base/err.h"
#include "config/config.h"

/** Exit codes; the manual has the same table. */
enum {
    EXIT_RUNTIME = 1,
    EXIT_USAGE = 2,
    EXIT_INPUT = 3,
    EXIT_NO_FIT = 4,
    EXIT_DEVICE = 5,
    EXIT_TRAINING = 6,
    EXIT_CHECKPOINT = 7,
    EXIT_REQUEUE = 75,
};

/** Runs of fewer updates are warned of. */
enum { CLI_FEW_UPDATES = 50 };

/** Upper bound of an option that has none. */
#define CLI_NO_LIMIT 1e18

/** What the value of an option must be; checked before the command runs. */
enum cli_value { CLI_TEXT, CLI_WHOLE, CLI_REAL, CLI_SIZE };

/** One option of a command: drives parsing, help, manual and completion. */
struct cli_option {
    const char *name; /* long name */
    char letter;      /* or 0 */
    const char *arg;  /* name of its value, "FILE"; NULL: takes none; "=WORD": the value is optional */
    const char *help;
    enum cli_value value;
    double min, max;  /* bounds of CLI_WHOLE, CLI_REAL and CLI_SIZE (bytes) */
};

struct mt_inputs;

struct cli_given {
    const struct cli_option *option;
    const char *value; /* NULL: given without a value */
};

/** Options as given; repeated ones keep their order. */
struct cli_args {
    struct cli_given *given; /* owned: cli_args_finish() */
    size_t n_given, cap_given;
    char **operands;
    int n_operands;
};

struct cli {
    bool quiet, no_progress, json_log, colour, colour_always;
    int verbose;
    int64_t start_ns; /* mt_boot_ns() when the process began */
};

struct cli_command {
    const char *name, *synopsis, *help;
    const struct cli_option *options; /* ends with a NULL name */
    int min_operands, max_operands;
    /* The exit code; negative: *err says why, which main() prints. */
    int (*run)(struct cli *cli, const struct cli_args *args, struct mt_err *err);
};

extern const struct cli_command cli_commands[];
extern const struct cli_option cli_global_options[];

void cli_args_finish(struct cli_args *a);
/** Value of the last option `name`; "" if it was given without a value; NULL if it was not given. */
const char *cli_arg(const struct cli_args *a, const char *name);
/** The same as a number, or `def` if it was not given. Only for options with that kind of value. */
int64_t cli_whole(const struct cli_args *a, const char *name, int64_t def);
double cli_real(const struct cli_args *a, const char *name, double def);
uint64_t cli_size(const struct cli_args *a, const char *name, uint64_t def);
/** Parses argv[1..]. Returns -1 to go on; else prints what is wrong and returns an exit code. */
int cli_parse(struct cli *cli, const struct cli_command *cmd, int argc, char **argv,
              struct cli_args *out);
void cli_help(const struct cli_command *cmd);
void cli_help_all(void);

/** Whether the value of option `arg` is the next argument: true for "--color", not for "--color=never". */
bool cli_takes_next(const struct cli_option *options, const char *arg);

/** Prints "megatrain: message" and returns the exit code of the error's kind. */
int cli_fail(const struct mt_err *err);
/** Prints "megatrain message" on standard error and returns EXIT_USAGE. */
int cli_usage(const char *fmt, ...) __attribute__((format(printf, 1, 2)));
/** Loads the configuration named by the first operand with all --set options. */
int cli_load_config(struct mt_config **out, enum mt_config_use use, const struct cli_args *args, struct mt_err *err);
/** The same from the file `path`. NULL: from defaults and --set options alone, without checks between keys. */
int cli_load_file(struct mt_config **out, const char *path, enum mt_config_use use, const struct cli_args *args,
                  struct mt_err *err);

/** The model that an adapter's folder names, if it is to be found; the caller frees it. */
int cli_model_of_adapter(char **model, const char *dir, struct mt_err *err);
/**
 * Sets what a command reads, as --model and --adapter name it; NULL: not given. If the model is an adapter's folder, it is
 * taken as the adapter. If no model is given, it is the one that the adapter names.
 */
int cli_choose_model(struct mt_config *cfg, const char *model, const char *adapter, struct mt_err *err);
/** The loss on the configuration's evaluation data, printed as the command's options say; args NULL: not printed. */
int cli_eval(struct mt_config *cfg, const struct cli_args *args, double *loss, struct mt_err *err);

/** `probe disk [DIR]`: the drive under a folder. */
int cli_probe_disk(const struct cli_args *args, struct mt_err *err);
/** `probe net`; returns the exit code. */
int cli_probe_net(const struct cli_args *args);
/** Shows samples with their trained tokens marked: by colour, brackets, in an HTML file, or as JSON lines. */
int cli_data_show(const struct cli *cli, const struct cli_args *args, const struct mt_inputs *in, struct mt_err *err);

/**
 * From here on standard output and standard error, where they are terminals, show what would steer a terminal instead
 * of sending it (base/visible.h), except for what this program itself sends: two colours, and lines written over. So
 * text from files cannot, whichever command prints it and how. Files and pipes get every byte as it is. Once, at start.
 */
void cli_guard_terminals(void);

#define CLI_COMMANDS(X)                                                                            \
    X(run) X(plan) X(bench) X(report) X(check) X(data) X(eval) X(score) X(generate) X(sample) X(inspect) X(export) \
    X(verify) X(stop) X(doctor) X(probe) X(config)                                                         \
    X(completion) X(help) X(setup_data)
#define CLI_DECLARE(name) int cli_cmd_##name(struct cli *cli, const struct cli_args *args, struct mt_err *err);
CLI_COMMANDS(CLI_DECLARE)
#undef CLI_DECLARE
