/* SPDX-License-Identifier: Apache-2.0 */
#include "config_lines.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "base/strbuf.h"

enum { COLUMN = 31 }; /* of the reasons */
#define IF_FOUND 0    /* only where something was found out for it */

static const struct init_task tasks[] = {
    {"sft", INIT_SFT, "Fine-tunes all parameters on conversations"},
    {"lora", INIT_LORA, "Trains adapters (LoRA) on conversations"},
    {"qlora", INIT_QLORA, "Trains adapters (LoRA) on a model in 4 bits (NF4), on conversations"},
    {"dpo", INIT_DPO, "Trains adapters (LoRA) on preferences: pairs of answers, or rated ones"},
    {"pretrain", INIT_PRETRAIN, "Trains all parameters on text"},
    {"blocks", INIT_BLOCKS, "Fine-tunes all layers on conversations, a few layers at a time (BAdam)"},
};

/* The lines of a file, in order; the later of two with the same key is another task's. */
static const struct line {
    unsigned tasks;
    const char *section, *key, *value, *why;
} lines[] = {
    {INIT_EVERY, "model", "path", "Qwen/Qwen3-0.6B", "a folder, or a name: hf download NAME"},
    {INIT_PRETRAIN, "model", "init", "random", "weights: goes on from the model's own"},
    {INIT_EVERY & ~INIT_ADAPTERS, "model", "dtype", "bf16", "what is computed in; sums are in FP32"},
    {INIT_QLORA, "model", "base_dtype", "nf4", "of the frozen weights: a quarter of bf16"},
    {INIT_ADAPTERS, "adapter", "kind", "lora", "the model's own weights stay as they are"},
    {INIT_ADAPTERS, "adapter", "rank", "16", "8 to 64 are usual; more learns more"},
    {INIT_ADAPTERS, "adapter", "alpha", "32", "twice the rank is usual"},
    {INIT_EVERY & ~(INIT_DPO | INIT_PRETRAIN), "data", "train", "train.jsonl", "{\"messages\": [...]} a line, or megatrain help formats"},
    {INIT_DPO, "data", "train", "pairs.jsonl", "{\"prompt\", \"chosen\", \"rejected\"} a line"},
    {INIT_PRETRAIN, "data", "train", "text/*.txt", "plain text, or {\"text\": ...} a line in .jsonl"},
    {INIT_EVERY, "data", "eval", "2%", "held out: the same samples in every run"},
    {IF_FOUND, "data", "tokenizer", NULL, NULL},
    {INIT_EVERY & ~INIT_PRETRAIN, "data", "template", "model", "the model's own chat template"},
    {INIT_EVERY, "data", "seq_len", "2048", "tokens of a row; samples share rows"},
    {INIT_EVERY & ~INIT_PRETRAIN, "data", "overlong", "drop", "leaves out what is longer than a row"},
    {INIT_PRETRAIN, "data", "overlong", "split", "longer texts are cut into rows"},
    {INIT_DPO, "preference", "loss", "sigmoid", "DPO; also ipo, simpo, orpo and others"},
    {INIT_DPO, "preference", "beta", "0.1", "smaller: further from the model as it was"},
    {INIT_EVERY & ~(INIT_PRETRAIN | INIT_BLOCKS), "train", "epochs", "3", "passes over the data"},
    {INIT_PRETRAIN | INIT_BLOCKS, "train", "epochs", "1", "passes over the data"},
    {INIT_EVERY & ~INIT_PRETRAIN, "train", "tokens_per_step", "16Ki", "a multiple of seq_len"},
    {INIT_PRETRAIN, "train", "tokens_per_step", "64Ki", "a multiple of seq_len"},
    {INIT_SFT | INIT_BLOCKS, "train", "learning_rate", "1e-5", "5e-6 to 2e-5 are usual for all parameters"},
    {INIT_LORA | INIT_QLORA, "train", "learning_rate", "2e-4", "1e-4 to 3e-4 are usual for adapters"},
    {INIT_DPO, "train", "learning_rate", "1e-5", "5e-6 to 5e-5 are usual for adapters"},
    {INIT_PRETRAIN, "train", "learning_rate", "3e-4", "6e-4 for 100M parameters, 3e-4 for 1B or more"},
    {INIT_BLOCKS, "train", "blocks", "layers", "each layer is a block; all others are frozen"},
    {INIT_BLOCKS, "train", "block_steps", "100", "steps until the next block's turn"},
    {IF_FOUND, "train", "clip", NULL, NULL},
    {INIT_PRETRAIN, "optimizer", "weight_decay", "0.1", "of matrices and embeddings"},
    {IF_FOUND, "optimizer", "state_dtype", NULL, NULL},
    {IF_FOUND, "optimizer", "master", NULL, NULL},
    {INIT_EVERY, "memory", "device_budget", "auto", "layers stream through it: it need hold no model"},
    {INIT_EVERY, "memory", "host_budget", "auto", "90% of what is free"},
    {IF_FOUND, "memory", "update", NULL, NULL},
    {INIT_EVERY, "eval", "every", "100", "steps; the best one's weights are kept"},
    {INIT_EVERY, "checkpoint", "dir", "out", "checkpoints, metrics.jsonl, report.html"},
    {INIT_EVERY, "checkpoint", "every", "30m", "Ctrl-C saves, too; --resume goes on"},
};

void init_set(struct init_lines *f, const char *key, const char *value, const char *why, ...)
{
    int i = 0;
    va_list ap;
    while (i < f->n && strcmp(f->set[i].key, key))
        i++;
    char *copy = i < INIT_MAX_SET ? strdup(value) : NULL;
    f->no_memory |= !copy;
    if (!copy)
        return;
    if (i < f->n)
        free(f->set[i].value);
    f->n = MT_MAX(f->n, i + 1);
    f->set[i].value = copy;
    snprintf(f->set[i].key, sizeof(f->set[i].key), "%s", key);
    va_start(ap, why);
    vsnprintf(f->set[i].why, sizeof(f->set[i].why), why, ap);
    va_end(ap);
}

void init_set_number(struct init_lines *f, const char *key, uint64_t value, const char *why)
{
    char text[32];
    snprintf(text, sizeof(text), value % 1024 || !value ? "%llu" : "%lluKi", (unsigned long long)(value % 1024 ? value : value / 1024));
    init_set(f, key, text, "%s", why);
}

/* The line of a key as it will be printed: value and reason; false: the file has none. */
static bool line_of(struct init_lines *f, const struct line *l, const char **value, const char **why)
{
    char key[128];
    snprintf(key, sizeof(key), "%s.%s", l->section, l->key);
    *value = l->value;
    *why = l->why;
    bool there = l->tasks & f->task->task;
    if (!strcmp(l->section, "adapter") && strcmp(l->key, "kind") != 0 && init_value(f, "adapter.path", NULL))
        there = false; /* adapters of a folder have their own */
    for (int i = 0; i < f->n && (there || !l->tasks); i++)
        if (!strcmp(f->set[i].key, key)) {
            *value = f->set[i].value;
            *why = *f->set[i].why ? f->set[i].why : l->why;
            there = f->set[i].printed = true; /* or given as an option */
        }
    return there;
}

void init_unset(struct init_lines *f, int n)
{
    while (f->n > n)
        free(f->set[--f->n].value);
}

void init_drop(struct init_lines *f, const char *key)
{
    for (int i = 0; i < f->n; i++)
        if (!strcmp(f->set[i].key, key)) {
            free(f->set[i].value);
            f->set[i] = f->set[--f->n];
        }
}

const char *init_value(const struct init_lines *f, const char *key, const char *def)
{
    for (int i = 0; i < f->n; i++)
        if (!strcmp(f->set[i].key, key))
            return f->set[i].value;
    return def;
}

int init_task_named(const struct init_task **out, const char *name, struct mt_err *err)
{
    MT_STR_FREED struct mt_str all = {0};
    for (size_t i = 0; i < MT_ARRAY_LEN(tasks); i++) {
        mt_str_printf(&all, "%s%s", i ? ", " : "", tasks[i].name);
        if (name ? strcmp(tasks[i].name, name) : i > 0)
            continue;
        *out = &tasks[i];
        return 0;
    }
    return mt_fail(err, MT_ERR_USAGE, -EINVAL, "--task \"%s\": there are %s; KTO, ORPO and others are dpo with another "
                   "preference.loss, and GRPO and its kin have no task: megatrain help policy", name, all.p ? all.p : "");
}

static const struct cli_option set_option = {.name = "set", .arg = "SEC.KEY=VALUE"};

bool init_options(struct cli_args *out, struct init_lines *f, const char *const *others)
{
    const char *value, *why;
    struct mt_str s = {0};
    size_t n = 0, more = 0;
    while (others && others[more])
        more++;
    *out = (struct cli_args){.given = mt_calloc(MT_ARRAY_LEN(lines) + (size_t)f->n + more, sizeof(*out->given))};
    for (size_t i = 0; i < MT_ARRAY_LEN(lines) + (size_t)f->n + more && out->given; i++) {
        size_t k = i - MT_ARRAY_LEN(lines), o = k - (size_t)f->n;
        if (i < MT_ARRAY_LEN(lines) && !line_of(f, &lines[i], &value, &why))
            continue;
        s = (struct mt_str){0};
        if (i < MT_ARRAY_LEN(lines))
            mt_str_printf(&s, "%s.%s=%s", lines[i].section, lines[i].key, value);
        else if (k < (size_t)f->n)
            mt_str_printf(&s, "%s=%s", f->set[k].key, f->set[k].value);
        else
            mt_str_printf(&s, "%s", others[o]);
        out->given[n++] = (struct cli_given){&set_option, s.p};
        if (s.failed)
            break;
    }
    out->n_given = n;
    return out->given && !s.failed;
}

void init_finish_options(struct cli_args *a)
{
    for (size_t i = 0; i < a->n_given; i++)
        free((char *)a->given[i].value);
    cli_args_finish(a);
}

static void print_line(struct mt_str *out, const char *key, const char *value, const char *why)
{
    bool quote = strstr(value, " ;") || strstr(value, " #");
    MT_STR_FREED struct mt_str s = {0};
    mt_str_printf(&s, "%s = %s%s%s", key, quote ? "\"" : "", value, quote ? "\"" : "");
    int column = MT_MAX(COLUMN, (int)s.len + 1);
    if (!why || !*why)
        mt_str_printf(out, "%s\n", s.p);
    else if (column + 2 + (int)strlen(why) <= INIT_WIDTH)
        mt_str_printf(out, "%-*s; %s\n", column, s.p, why);
    else
        mt_str_printf(out, "; %s\n%s\n", why, s.p);
    out->failed |= s.failed;
}

/* Keys of --set that have no line: of the section, which so ends. */
static void end_section(struct mt_str *out, struct init_lines *f, const char *section)
{
    size_t n = strlen(section);
    for (int i = 0; i < f->n; i++)
        if (!f->set[i].printed && !strncmp(f->set[i].key, section, n) && f->set[i].key[n] == '.') {
            print_line(out, f->set[i].key + n + 1, f->set[i].value, f->set[i].why);
            f->set[i].printed = true;
        }
}

void init_print(struct mt_str *out, struct init_lines *f)
{
    const char *value, *why;
    char section[64] = "";
    for (int i = 0; i < f->n; i++)
        f->set[i].printed = false;
    mt_str_printf(out, "; %s.\n", f->task->does);
    if (*f->data)
        mt_str_fold(out, "; ", f->data, INIT_WIDTH);
    mt_str_printf(out, "; Next: megatrain check FILE, then run FILE. Paths are from the file's folder.\n");
    for (size_t i = 0; i < MT_ARRAY_LEN(lines); i++) {
        if (!line_of(f, &lines[i], &value, &why))
            continue;
        if (strcmp(section, lines[i].section)) {
            end_section(out, f, section);
            snprintf(section, sizeof(section), "%s", lines[i].section);
            mt_str_printf(out, "\n[%s]\n", section);
        }
        print_line(out, lines[i].key, value, why);
    }
    end_section(out, f, section);
    for (int i = 0; i < f->n; i++) {
        snprintf(section, sizeof(section), "%.*s", (int)strcspn(f->set[i].key, "."), f->set[i].key);
        if (!f->set[i].printed)
            mt_str_printf(out, "\n[%s]\n", section);
        end_section(out, f, section);
    }
    out->failed |= f->no_memory;
}
