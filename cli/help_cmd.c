/* SPDX-License-Identifier: Apache-2.0 */
/* Help, manual page and completion, all from the tables of commands, options and keys. */
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include "base/mem.h"
#include "base/strbuf.h"
#include "cli.h"
#include "help_text.inc"
#include "hf/family.h"
#include "hf/refused.h"

/* Pages of help that are about no command, of the folder help: paragraphs, folded for a terminal; roff folds its own.
 * One that begins with spaces is a command or a line of a file, and stays as it is. */

/* A page of `megatrain help` that is about no command; also a section of the manual page. */
struct topic {
    const char *name;  /* "models" */
    const char *title; /* what it tells, in a few words */
    const char *const *text; /* paragraphs, of help/<name>.txt; ends with NULL */
};

static const struct topic topics[] = {
    {"models", "supported models and formats of weights", models_text},
    {"adapters", "LoRA and DoRA: what can have adapters, and how they are named", adapters_text},
    {"base", "frozen weights: packed, on drives, or read in place from the model's files", base_text},
    {"formats", "formats of training data, and what is trained of them", formats_text},
    {"updates", "optimizers and the order of updates: memory, time, and what a failure costs", updates_text},
    {"hosts", "several machines by MPI: what they need, what is sent, and what ends them", hosts_text},
    {"sampling", "what megatrain generate and sample keep, and what serves a model", sampling_text},
    {"preferences", "pairs and rated answers, references, rounds with a server", preferences_text},
    {"policy", "reinforcement learning: rollouts, losses, what to watch", policy_text},
};

static const struct topic *find_topic(const char *name)
{
    for (size_t i = 0; i < MT_ARRAY_LEN(topics); i++)
        if (!strcmp(topics[i].name, name))
            return &topics[i];
    return NULL;
}

enum { WIDTH = 78 };

static void print_folded(const char *text)
{
    MT_STR_FREED struct mt_str s = {0};
    mt_str_fold(&s, "", text, WIDTH);
    fputs(s.p ? s.p : "", stdout);
}

/* Of roff, a line that begins with a dot or an apostrophe is a request, and a backslash an escape. */
static void print_roff(const char *text)
{
    for (const char *p = text; *p; p++)
        fputs(*p == '\\' ? "\\e" : (char[]){*p, 0}, stdout);
    printf("\n");
}

static bool is_example(const char *text)
{
    return text && *text == ' ';
}

static void print_example(const char *text, bool opens, bool closes, int roff)
{
    if (opens)
        fputs(roff ? ".PP\n.nf\n" : "\n", stdout);
    if (roff)
        print_roff(text);
    else
        puts(text);
    if (closes && roff)
        fputs(".fi\n", stdout);
}

static void print_families(void)
{
    for (size_t i = 0; mt_family_at(i); i++)
        printf("  %-30s%s\n", mt_family_at(i)->architecture, mt_family_at(i)->moe ? " mixture of experts" : "");
}

static void print_refused(void)
{
    const char *name, *reason;
    for (size_t i = 0; (name = mt_refused_at(i, &reason)); i++)
        printf("  %s: %s\n", name, reason);
}

/* What a paragraph stands for that the program knows itself. */
static void print_list(const char *text, int roff)
{
    fputs(roff ? ".nf\n" : "\n", stdout);
    if (!strcmp(text, "{families}"))
        print_families();
    else
        print_refused();
    fputs(roff ? ".fi\n" : "", stdout);
}

/* Writes the page. roff: for the manual page. */
static void print_topic(const struct topic *t, bool roff)
{
    const char *const *text = t->text;
    for (int i = 0; text[i]; i++) {
        if (is_example(text[i])) {
            print_example(text[i], !i || !is_example(text[i - 1]), !is_example(text[i + 1]), roff);
        } else if (text[i][0] == '{') {
            print_list(text[i], roff);
        } else {
            fputs(roff ? ".PP\n" : i ? "\n" : "", stdout);
            if (roff)
                print_roff(text[i]);
            else
                print_folded(text[i]);
        }
    }
}

/* Prints the topic policy as the manual page megatrain-policy(7). */
static void print_policy_manual(void)
{
    printf(".TH MEGATRAIN-POLICY 7 \"\" \"megatrain %s\" \"Miscellaneous\"\n.SH NAME\nmegatrain-policy \\- reinforcement "
           "learning: rollouts, losses, rounds\n.SH DESCRIPTION\n", MT_VERSION);
    print_topic(find_topic("policy"), true);
    printf(".SH SEE ALSO\nmegatrain(1), megatrain.ini(5)\n");
}

/* Prints the manual page megatrain-cluster(7). */
static void print_cluster_manual(void)
{
    printf(".TH MEGATRAIN-CLUSTER 7 \"\" \"megatrain %s\" \"Miscellaneous\"\n%s", MT_VERSION, megatrain_cluster_text);
}

static const struct {
    int code;
    const char *meaning;
} exit_codes[] = {
    {0, "done"},
    {EXIT_RUNTIME, "run-time failure (I/O, internal)"},
    {EXIT_USAGE, "usage or configuration error"},
    {EXIT_INPUT, "bad input: model, tokenizer, data"},
    {EXIT_NO_FIT, "will not fit (host, device, disk)"},
    {EXIT_DEVICE, "device error"},
    {EXIT_TRAINING, "training failed: gradients, weights or losses not finite"},
    {EXIT_CHECKPOINT, "checkpoint damaged or not matching"},
    {EXIT_REQUEUE, "stopped on the time limit with a good checkpoint: run again with --resume"},
    {130, "SIGINT, checkpoint saved"},
    {143, "SIGTERM, SIGHUP, the file STOP or megatrain stop, checkpoint saved"},
};

/* Every variable that is read anywhere; checked by tests/lint/environment.py. */
static const struct variable {
    const char *name, *meaning;
} user_variables[] = {
    {"HF_HUB_CACHE", "the Hugging Face cache in which models are looked up by name"},
    {"HF_HOME", "the parent folder of that cache; else ~/.cache/huggingface"},
    {"XDG_CACHE_HOME", "folder for caches and this machine's measurements; else ~/.cache"},
    {"XDG_DATA_HOME", "folder for what setup-data installs; else ~/.local/share"},
    {"HOME", "the parent of ~/.cache and ~/.local/share"},
    {"MEGATRAIN_PYTHON", "the Python with the data helper's modules; else .venv-data beside the scripts, what setup-data made, or python3"},
    {"MEGATRAIN_DATA_HELPER", "path of prepare_data.py; else it is searched for beside the program"},
    {"SOURCE_DATE_EPOCH", "today's date for chat templates, in seconds since 1970"},
    {"PATH", "where python3 is looked up, in folders that have whole names"},
    {"NO_COLOR", "no colour, unless --color says otherwise"},
    {"TERM", "dumb: no colour and no progress line"},
    {"COLUMNS", "width of the progress line"},
    {"OMPI_COMM_WORLD_SIZE", "processes that mpirun of Open MPI has started: more than one are the hosts of a run"},
    {"PMI_SIZE", "the same of MPICH's mpirun, and of srun"},
    {"PMIX_RANK", "set by launchers that use PMIx: MPI is asked for the number"},
    {"SLURM_STEP_NUM_TASKS", "tasks of srun: with one, MPI is not asked"},
    {"VIRTUAL_ENV", "the active Python environment: CUDA's libraries are looked for in its packages, too"},
    {"CONDA_PREFIX", "the same of conda's"},
    {"CUDA_VISIBLE_DEVICES", "the GPUs that CUDA sees, read here for a message alone where it sees none"},
    {"CUDA_DEVICE_MAX_CONNECTIONS", "CUDA's queues for a GPU's streams: 16 unless it is set, one for each"},
}, test_variables[] = {
    {"MEGATRAIN_CPU_GEMM", "matrix products of the cpu device: plain, avx2, avx512 or bf16"},
    {"MEGATRAIN_ADAM_ISA", "the optimizer's loop: scalar, avx2 or avx512; all give the same bits"},
    {"MEGATRAIN_ATTENTION", "on a GPU: tiled, fused (cuDNN's, an error without it), or own (never cuDNN's)"},
    {"MEGATRAIN_CUDA_APART", "set: one cudaMalloc for each allocation, for compute-sanitizer"},
    {"MEGATRAIN_IO", "threads: do not use io_uring"},
    {"MEGATRAIN_IO_FAULT", "simulated faults of the drive, such as write:eio:12"},
    {"MEGATRAIN_DISK_PIECE", "number of elements that an update reads from the drive at a time"},
    {"MEGATRAIN_POISON", "set: fill buffers and scratch of no further use with NaN"},
    {"MEGATRAIN_RESIDENT", "bytes to assume as the process's own memory"},
    {"MEGATRAIN_PROBE_SMALL", "set: probe measures small shapes"},
};

static void print_variables(const struct variable *v, size_t n, const char *format)
{
    for (size_t i = 0; i < n; i++)
        printf(format, v[i].name, v[i].meaning);
}

static void print_keys_manual(void)
{
    MT_STR_FREED struct mt_str keys = {0};
    mt_config_describe(&keys, false);
    printf(".TH MEGATRAIN.INI 5 \"\" \"megatrain %s\" \"File Formats\"\n.SH NAME\nmegatrain.ini \\- configurations of "
           "megatrain\n.SH DESCRIPTION\nSections in brackets, one key a line. An unknown key is an error. Paths are relative to the "
           "file's folder. ${NAME} stands for an environment variable, ${NAME:\\-value} has a default. \\fBmegatrain config "
           "init\\fR writes a file for a task, with \\fB\\-\\-all\\fR every key.\n.SH KEYS\n.nf\n%s.fi\n.SH SEE ALSO\nmegatrain(1)\n",
           MT_VERSION, keys.p ? keys.p : "");
}

static void help_environment(void)
{
    printf("Environment variables. In a configuration, ${NAME} stands for any variable's value and\n"
           "${NAME:-value} has a default.\n\n");
    print_variables(user_variables, MT_ARRAY_LEN(user_variables), "  %-22s %s\n");
    printf("\nFor tests and measurements of megatrain itself:\n\n");
    print_variables(test_variables, MT_ARRAY_LEN(test_variables), "  %-22s %s\n");
}

static void print_options(const struct cli_option *o)
{
    for (; o->name; o++) {
        char left[64];
        bool optional = o->arg && o->arg[0] == '=';
        snprintf(left, sizeof(left), "%s%c%s--%s%s%s%s", o->letter ? "-" : "  ",
                 o->letter ? o->letter : ' ', o->letter ? ", " : " ", o->name,
                 o->arg ? (optional ? "[=" : " ") : "", o->arg ? o->arg + optional : "",
                 optional ? "]" : "");
        printf("  %-28s %s\n", left, o->help);
    }
}

void cli_help(const struct cli_command *cmd)
{
    printf("usage: megatrain %s [OPTION]... %s\n\n%s\n", cmd->name, cmd->synopsis, cmd->help);
    if (cmd->options->name) {
        printf("\nOptions\n");
        print_options(cmd->options);
    }
    printf("\nGlobal options\n");
    print_options(cli_global_options);
}

void cli_help_all(void)
{
    printf("usage: megatrain COMMAND [OPTION]... [ARGUMENT]...\n\n"
           "Trains language models far larger than the GPU (or CPU memory budget) they run on.\n\n"
           "Commands\n");
    for (const struct cli_command *c = cli_commands; c->name; c++)
        printf("  %-11s %s\n", c->name, c->help);
    printf("\nGlobal options\n");
    print_options(cli_global_options);
    printf("\nmegatrain help COMMAND shows a command's options; megatrain help keys, all keys of the\n"
           "configuration, and help KEY one of them, also by the name that another trainer has for\n"
           "it; megatrain help --man, the manual page with the exit codes.\n"
           "\nmegatrain help TOPIC\n");
    for (size_t i = 0; i < MT_ARRAY_LEN(topics); i++)
        printf("  %-11s %s\n", topics[i].name, topics[i].title);
    printf("  %-11s %s\n", "environment", "the environment variables that are read");
}

static void roff_options(const struct cli_option *o)
{
    for (; o->name; o++) {
        bool optional = o->arg && o->arg[0] == '=';
        char letter[16] = "";
        if (o->letter)
            snprintf(letter, sizeof(letter), "\\-%c, ", o->letter);
        printf(".TP\n.B %s\\-\\-%s%s%s%s\n%s\n", letter, o->name, !o->arg ? "" : optional ? "[=" : " ",
               o->arg ? o->arg + optional : "", optional ? "]" : "", o->help);
    }
}

static void print_manual(void)
{
    printf(".TH MEGATRAIN 1 \"\" \"megatrain %s\" \"User Commands\"\n.SH NAME\nmegatrain \\- train "
           "language models far larger than the GPU\n.SH SYNOPSIS\n.B megatrain\n.I COMMAND\n"
           "[OPTION]... [ARGUMENT]...\n.SH COMMANDS\n",
           MT_VERSION);
    for (const struct cli_command *c = cli_commands; c->name; c++) {
        printf(".SS %s %s\n%s\n", c->name, c->synopsis, c->help);
        roff_options(c->options);
    }
    printf(".SH GLOBAL OPTIONS\n");
    roff_options(cli_global_options);
    for (size_t i = 0; i < MT_ARRAY_LEN(topics); i++) {
        printf(".SH %s\n", topics[i].name);
        print_topic(&topics[i], true);
    }
    printf(".SH EXIT STATUS\n");
    for (size_t i = 0; i < sizeof(exit_codes) / sizeof(*exit_codes); i++)
        printf(".TP\n.B %d\n%s\n", exit_codes[i].code, exit_codes[i].meaning);
    printf(".SH ENVIRONMENT\n");
    print_variables(user_variables, MT_ARRAY_LEN(user_variables), ".TP\n.B %s\n%s\n");
    printf(".PP\nFor tests and measurements of megatrain itself:\n");
    print_variables(test_variables, MT_ARRAY_LEN(test_variables), ".TP\n.B %s\n%s\n");
    printf(".SH SIGNALS\nSIGINT, SIGTERM and SIGHUP abandon the current step, save the last applied update "
           "and end;\na second SIGINT ends at once. SIGUSR1 saves and goes on; SIGUSR2 prints a "
           "status line.\nThe files STOP and SAVE in the output folder do the same. Each is answered within two seconds and a save, "
           "in any phase;\na step that a save cuts short is made again.\n.SH SEE ALSO\nmegatrain.ini(5), megatrain-cluster(7), megatrain-policy(7)\n");
}

/* All keys, or one by its name here or that of another trainer. */
static int help_key(const char *name)
{
    MT_STR_FREED struct mt_str s = {0};
    struct mt_err err;
    if (!strcmp(name, "keys"))
        mt_config_describe(&s, false);
    else if (mt_config_explain(&s, name, &err))
        return cli_usage("\"%s\" is no command, topic or key: see megatrain help", name);
    fputs(s.p ? s.p : "", stdout);
    return 0;
}

int cli_cmd_help(struct cli *, const struct cli_args *args, struct mt_err *)
{
    const char *man = cli_arg(args, "man");
    if (man && *man && strcmp(man, "ini") && strcmp(man, "cluster") && strcmp(man, "policy"))
        return cli_usage("help: --man=%s: there are --man, --man=ini, --man=cluster and --man=policy", man);
    if (man) {
        if (*man == 'c')
            print_cluster_manual();
        else if (*man == 'p')
            print_policy_manual();
        else if (*man)
            print_keys_manual();
        else
            print_manual();
        return 0;
    }
    if (!args->n_operands) {
        cli_help_all();
        return 0;
    }
    if (!strcmp(args->operands[0], "environment")) {
        help_environment();
        return 0;
    }
    const struct topic *topic = find_topic(args->operands[0]);
    if (topic) {
        print_topic(topic, false);
        return 0;
    }
    for (const struct cli_command *c = cli_commands; c->name; c++)
        if (!strcmp(c->name, args->operands[0])) {
            cli_help(c);
            return 0;
        }
    return help_key(args->operands[0]);
}
