/* SPDX-License-Identifier: Apache-2.0 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/fs.h"
#include "base/json.h"
#include "base/log.h"
#include "base/mem.h"
#include "base/sort.h"
#include "base/strbuf.h"
#include "base/units.h"
#include "cli.h"
#include "config_lines.h"
#include "data/text.h"
#include "hf/hf_config.h"
#include "plan_print.h"
#include "train/inputs.h"

/* config init: what model, data and machine say to the lines of a task (config_lines.c). */

enum { LEAST_ROW = 256, USUAL_ROW = 2048 /* the lines' */ };

/* Opens the data as the lines say, with other keys besides; *in is zero. */
static int open_data(struct mt_inputs *in, struct mt_config **cfg, struct init_lines *f, const char *const *others,
                     struct mt_err *err)
{
    struct cli_args args;
    int rc = init_options(&args, f, others) ? cli_load_file(cfg, NULL, MT_TO_TRAIN, &args, err) : mt_fail_nomem(err, "the lines", 0);
    rc = rc ?: mt_inputs_open(in, *cfg, MT_RUN_TRAIN, NULL, err)
            ?: mt_inputs_lay_out_steps(in, &in->numerics, err);
    init_finish_options(&args);
    return rc;
}

/* --- the model ------------------------------------------------------------------------------------- */

static bool file_holds(const char *dir, const char *name, const char *text)
{
    MT_FREED char *all = NULL;
    char path[4096];
    size_t len = 0;
    return !mt_path_printf(path, sizeof(path), "%s/%s", dir, name) && mt_path_exists(path) &&
           (!text || (!mt_read_file(path, &all, &len, NULL) && strstr(all, text)));
}

static bool has_weights(const char *dir)
{
    return file_holds(dir, "model.safetensors", NULL) || file_holds(dir, "model.safetensors.index.json", NULL);
}

static bool has_template(const char *dir)
{
    static const char *const files[] = {"tokenizer_config.json", "chat_template.json"};
    bool found = file_holds(dir, "chat_template.jinja", NULL);
    for (size_t i = 0; i < MT_ARRAY_LEN(files) && !found; i++) {
        MT_JSON_FREED cJSON *o = NULL;
        mt_json_read_file(&o, MT_PATH("%s/%s", dir, files[i]), MT_ERR_INPUT, NULL);
        const cJSON *own = mt_json_get(o, "chat_template");
        found = own && !cJSON_IsNull(own);
    }
    return found;
}

/* A model without a chat template gets the built-in one whose marks its tokenizer knows; a folder without weights and
 * tokenizer, bytes. */
static void choose_template(struct init_lines *f, const char *dir)
{
    static const char *const known[][2] = {{"<|im_end|>", "chatml"}, {"<|eot_id|>", "llama3"}, {"<end_of_turn>", "gemma"},
                                           {"[/INST]", "mistral"}};
    if (!mt_text_has_tokenizer(dir) && !has_weights(dir)) {
        init_set(f, "data.tokenizer", "byte", "the model's folder has no tokenizer");
        init_set(f, "data.template", "chatml", "bytes have none; checkpoints get this one");
        return;
    }
    if (has_template(dir))
        return;
    const char *name = "alpaca";
    for (size_t i = MT_ARRAY_LEN(known); i-- > 0;)
        if (file_holds(dir, "tokenizer.json", known[i][0]))
            name = known[i][1];
    init_set(f, "data.template", name, "the model has none; checkpoints get this one");
}

/* Text trains from random weights where that is asked for, or where there are no others. */
static void choose_start(struct init_lines *f, const char *dir, bool task_given)
{
    if (f->task->task != INIT_PRETRAIN || !has_weights(dir))
        return;
    init_set(f, "model.init", task_given ? "random" : "weights",
             task_given ? "not the folder's; weights: goes on from them" : "goes on from the model's; random: starts over");
    if (!task_given)
        init_set(f, "train.learning_rate", "1e-5", "5e-6 to 2e-5 are usual for a trained model");
}

/* --- the data -------------------------------------------------------------------------------------- */

struct counts {
    uint64_t n, tokens, longest;
    uint64_t p99;
    bool text, rated; /* rated: answers with a label, for other losses than pairs */
    bool joined;      /* no chat template is used */
    bool alone;       /* each has a row of its own */
    bool held;        /* a share of them is held out */
};

/* The share of n samples to hold out. */
static double share_of(double n)
{
    return n < 2000 ? 0.1 : n < 20000 ? 0.05 : 0.02;
}

/* Of few samples a share may be none. Of text that is cut into rows these are not the samples of a run: not asked. */
static int try_share(struct counts *c, const mt_dataset *d, struct mt_err *err)
{
    MT_CLOSED_BY(mt_split_finish) struct mt_split train = {0}, held_out = {0};
    char share[32];
    snprintf(share, sizeof(share), "%g%%", 100 * share_of((double)c->n));
    int rc = c->text ? 0 : mt_dataset_split(d, share, &train, &held_out, err);
    c->held = c->text || held_out.n;
    return rc;
}

/* Tokens of the longest row that the model takes. */
static int64_t longest_row(const struct mt_hf_config *hf)
{
    return hf->longest ? MT_MIN(hf->longest, hf->max_pos) : hf->max_pos;
}

/* Whole samples: in rows as long as the model takes. */
static int count_data(struct counts *c, struct init_lines *f, const struct mt_hf_config *hf, struct mt_err *err)
{
    MT_CLOSED_BY(mt_config_destroy) struct mt_config *cfg = NULL;
    MT_CLOSED_BY(mt_inputs_finish) struct mt_inputs in = {0};
    char len[64];
    snprintf(len, sizeof(len), "data.seq_len=%lld", MT_MIN((long long)longest_row(hf), 1LL << 20));
    const char *any = f->task->task == INIT_DPO ? "preference.loss=kto" : NULL; /* which takes rated answers, too */
    const char *const others[] = {len, "train.tokens_per_step=0", "train.batch_size=1", "data.max_untrained=100%", "data.eval=", any, NULL};
    int rc = open_data(&in, &cfg, f, others, err);
    const struct mt_dataset_stats *d = rc ? NULL : mt_dataset_stats(in.data);
    MT_FREED uint64_t *lens = rc ? NULL : mt_calloc(d->n_samples, sizeof(*lens));
    if (!rc && !lens)
        rc = mt_fail_nomem(err, "lengths", d->n_samples * sizeof(*lens));
    if (!rc) {
        for (uint64_t i = 0; i < d->n_samples; i++)
            lens[i] = mt_dataset_sample(in.data, i, NULL, NULL);
        mt_sort_u64(lens, d->n_samples);
        *c = (struct counts){.n = d->n_samples, .tokens = d->n_tokens, .longest = lens[d->n_samples - 1],
                             .p99 = lens[d->n_samples * 99 / 100], .rated = !strcmp(d->format, "rated"),
                             .text = !strcmp(d->format, "text") || !strcmp(d->format, "plain text")};
        c->alone = !cfg->data.packing;
        c->joined = c->text || mt_notes_find(mt_dataset_notes(in.data), "joined");
        rc = try_share(c, in.data, err);
    }
    return rc;
}

/* Updates of an epoch: as many as TRL makes of 1,000 samples (of 8 each: 125; of 16: 62); of more samples larger
 * steps. */
static double updates_of(double n)
{
    const double each = 11.5, many = 1000;
    return n <= many ? n / each : many / each * sqrt(n / many);
}

static uint64_t round_up_row(double tokens)
{
    uint64_t row = LEAST_ROW;
    while ((double)row < tokens)
        row *= 2;
    return row;
}

/* Beside a rated answer its row has its prompt with another one (KTO). */
static double beside(const struct counts *c)
{
    return c->rated ? 2 : 1;
}

/* Rows that hold the longest sample, unless they would be so long that few updates were left. */
static uint64_t choose_row(struct init_lines *f, const struct counts *c, uint64_t most)
{
    const char *end = c->alone ? "" : "; samples share rows";
    char why[INIT_WIDTH];
    snprintf(why, sizeof(why), "holds the longest sample%s", end);
    uint64_t row = round_up_row(beside(c) * (double)c->longest), nearly = round_up_row(beside(c) * (double)c->p99);
    double mean = beside(c) * (double)c->tokens / (double)c->n;
    if (c->text) {
        for (row = LEAST_ROW; row * 2 <= MT_MIN(most, 4096ULL) && (double)c->tokens / (double)row > 1000; row *= 2)
            ;
        snprintf(why, sizeof(why), "tokens of a row");
    } else if (row > 16 * mean && nearly < row) {
        row = MT_MAX(nearly, round_up_row(8 * mean));
        snprintf(why, sizeof(why), "holds all but the longest 1%%%s", end);
    }
    row = MT_MIN(row, most);
    init_set_number(f, "data.seq_len", row, why);
    return row;
}

static double nice(double v)
{
    double unit = pow(10, floor(log10(MT_MAX(v, 1))));
    return MT_MAX(1, round(v / unit) * unit);
}

static double rows_of(const struct counts *c, uint64_t row)
{
    double filled = beside(c) * (double)c->tokens / ((double)row * 0.97);
    return c->alone ? MT_MAX(filled, (double)c->n) : filled;
}

/* Rows of a step, epochs, and how often it is evaluated, from what the data are. */
static void choose_steps(struct init_lines *f, const struct counts *c, uint64_t row)
{
    const double least = 60, most_epochs = 10; /* least: updates of a run */
    double rows = rows_of(c, row);
    double n = c->text ? MT_MAX(rows, (double)c->n) : (double)c->n;
    double held_out = c->held ? share_of(n) : 0;
    rows *= 1 - held_out;
    double want = MT_MAX(updates_of(n), 1), share = rows / want;
    uint64_t each = (uint64_t)MT_MAX(share, 1);
    if (share / (double)each > (double)(each + 1) / share) /* the nearer one by ratio */
        each++;
    while (each > 1 && most_epochs * ceil(rows / (double)each) < CLI_FEW_UPDATES)
        each--;
    double updates = MT_MAX(ceil(rows / (double)each), 1), epochs = n < 10000 && !c->text ? 3 : 1;
    epochs = MT_MIN(MT_MAX(epochs, ceil(least / updates)), most_epochs);
    char why[INIT_WIDTH], value[32];
    snprintf(why, sizeof(why), "%llu row%s: some %.0f samples, %.0f updates an epoch", (unsigned long long)each, each > 1 ? "s" : "",
             (double)c->n / updates, updates);
    if (c->text)
        snprintf(why, sizeof(why), "%llu row%s: %.0f updates an epoch", (unsigned long long)each, each > 1 ? "s" : "", updates);
    init_set_number(f, "train.tokens_per_step", each * row, why);
    snprintf(value, sizeof(value), "%g", epochs);
    init_set(f, "train.epochs", value, "%.0f updates in all", epochs * updates);
    snprintf(value, sizeof(value), "%.0f", nice(epochs * updates / 8));
    init_set(f, "eval.every", value, c->held ? "steps; the best one's weights are kept" : "steps, where data.eval is set");
    snprintf(value, sizeof(value), "%g%%", 100 * held_out);
    init_set(f, "data.eval", c->held ? value : "", c->held ? "held out: the same samples in every run"
                                                           : "too few samples to hold any out: name a file");
}

/* What the format of the data decides. */
static void choose_by_format(struct init_lines *f, const struct counts *c, const char *data)
{
    if (c->joined && f->task->task != INIT_PRETRAIN)
        init_set(f, "data.template", init_value(f, "data.template", "model"), "not used: strings are joined as they stand");
    if (!c->rated)
        return;
    init_set(f, "data.train", data, "{\"prompt\", \"completion\", \"label\"} a line");
    init_set(f, "preference.loss", "kto", "KTO, of rated answers; also apo_zero_unpaired");
}

/* Blocks of layers that each get some steps, in at least one round. */
static void choose_blocks(struct init_lines *f, int64_t n_layers, const struct counts *c, uint64_t row, double epochs,
                          uint64_t step)
{
    const double least = 10, most = 100; /* steps of a block */
    double updates = epochs * rows_of(c, row) / ((double)step / (double)row);
    double blocks = MT_MIN(MT_MAX(floor(updates / least), 1), (double)n_layers);
    double steps = MT_MIN(floor(updates / blocks), most);
    char value[32];
    if (blocks < (double)n_layers) {
        snprintf(value, sizeof(value), "%.0f", blocks);
        init_set(f, "train.blocks", value, "blocks that the %lld layers are divided into", (long long)n_layers);
    }
    snprintf(value, sizeof(value), "%.0f", MT_MAX(steps, 1));
    init_set(f, "train.block_steps", value, "steps until the next block's turn: a round of all in %.0f", MT_MAX(steps, 1) * blocks);
}

/* Without --task: what the data are for. */
static int count_for_task(struct counts *c, struct init_lines *f, bool given, const struct mt_hf_config *hf,
                          struct mt_err *err)
{
    struct mt_err other;
    int rc = count_data(c, f, hf, err);
    const struct init_task *was = f->task;
    if (rc && !given) {
        init_task_named(&f->task, "dpo", NULL);
        if (count_data(c, f, hf, &other))
            f->task = was;
        else
            rc = 0;
    }
    if (!rc && !given && c->text) {
        init_task_named(&f->task, "pretrain", NULL);
        init_drop(f, "data.template");
        rc = count_data(c, f, hf, err);
    }
    return rc;
}

/* The longest row that is a power of two, and that the model takes. */
static uint64_t most_of_row(const struct mt_hf_config *hf)
{
    uint64_t most = 1;
    while (most * 2 <= (uint64_t)longest_row(hf))
        most *= 2;
    return most;
}

static void look_at_data(struct init_lines *f, bool task_given, const struct mt_hf_config *hf, const char *data)
{
    struct counts c;
    struct mt_err err;
    uint64_t row, most = most_of_row(hf);
    if (count_for_task(&c, f, task_given, hf, &err)) {
        mt_warn("%s; the figures below are usual ones, not of these data", err.msg);
        return;
    }
    row = choose_row(f, &c, most);
    choose_steps(f, &c, row);
    choose_by_format(f, &c, data);
    int64_t step = (int64_t)row;
    mt_parse_count(init_value(f, "train.tokens_per_step", ""), &step);
    if (f->task->task == INIT_BLOCKS)
        choose_blocks(f, hf->n_layers, &c, row, atof(init_value(f, "train.epochs", "1")), (uint64_t)step);
    snprintf(f->data, sizeof(f->data), "%.80s: %llu samples, %llu tokens; the longest has %llu.", data, (unsigned long long)c.n,
             (unsigned long long)c.tokens, (unsigned long long)c.longest);
}

/* --- this machine ------------------------------------------------------------------------------------ */

/* Whether the lines fit here; then how much they take. */
static int try_memory(struct init_lines *f, struct mt_err *err)
{
    MT_CLOSED_BY(init_finish_options) struct cli_args args = {0};
    MT_CLOSED_BY(plan_view_close) struct plan_view v = {0};
    char a[32], b[32];
    int rc = init_options(&args, f, NULL) ? plan_view_open(&v, NULL, &args, err) : mt_fail_nomem(err, "the lines", 0);
    rc = rc ?: plan_view_resolve(&v, err);
    if (!rc) {
        init_set(f, "memory.device_budget", "auto", "%s of %s here", mt_format_bytes(a, sizeof(a), v.choice.engine.device_bytes),
            mt_format_bytes(b, sizeof(b), v.request.placement.device_budget.bytes));
        init_set(f, "memory.host_budget", "auto", "%s of %s here%s", mt_format_bytes(a, sizeof(a), v.choice.host_bytes),
            mt_format_bytes(b, sizeof(b), v.request.placement.host_budget.bytes), v.machine.cpu ? ", with the device" : "");
    }
    return rc;
}

/* The mildest settings with which it fits this machine; those that are not the task's are left out. */
static void look_at_machine(struct init_lines *f)
{
    static const struct {
        unsigned tasks;
        const char *key[4], *value[4], *why[4];
    } leaner[] = {
        {INIT_EVERY, {NULL}, {NULL}, {NULL}},
        {INIT_EVERY & ~INIT_ADAPTERS, {"train.clip", "memory.update"}, {"unit", "backward"},
         {"each layer's gradient by its own norm", "then gradients need next to no memory"}},
        {INIT_EVERY & ~INIT_ADAPTERS, {"optimizer.state_dtype"}, {"8bit"}, {"2.1 bytes a parameter: FP32's 8 do not fit here"}},
        {INIT_EVERY & ~INIT_ADAPTERS, {"optimizer.state_dtype", "optimizer.master", "train.clip", "memory.update"},
         {"8bit", "bf16", "unit", "backward"},
         {"FP32 states do not fit here", "FP32 masters do not fit here", "each layer's gradient by its own norm",
          "then gradients need next to no memory"}},
        {INIT_ADAPTERS, {"model.base_dtype"}, {"nf4"}, {"4 bits a weight: bf16 does not fit here"}},
    };
    struct mt_err first = {0}, err;
    for (size_t i = 0; i < MT_ARRAY_LEN(leaner); i++) {
        int before = f->n;
        bool given = leaner[i].key[0] && init_value(f, leaner[i].key[0], NULL);
        if (given || !(leaner[i].tasks & f->task->task))
            continue;
        for (size_t k = 0; k < 4 && leaner[i].key[k]; k++)
            init_set(f, leaner[i].key[k], leaner[i].value[k], "%s", leaner[i].why[k]);
        int rc = try_memory(f, first.code ? &err : &first);
        if (!rc)
            return;
        if (rc != -ENOSPC) {
            mt_warn("%s", first.code ? first.msg : err.msg);
            return;
        }
        init_unset(f, before);
    }
    mt_warn("%s", first.msg);
}

/* --set, each as it was given. */
static int take_given(struct init_lines *f, const struct cli_args *args, struct mt_err *err)
{
    MT_CLOSED_BY(mt_config_destroy) struct mt_config *cfg = NULL;
    int rc = cli_load_file(&cfg, NULL, MT_TO_TRAIN, args, err); /* names and values are right */
    for (size_t i = 0; i < args->n_given && !rc; i++) {
        char key[64];
        const char *text = args->given[i].value, *eq = text ? strchr(text, '=') : NULL;
        if (strcmp(args->given[i].option->name, "set") || !eq)
            continue;
        snprintf(key, sizeof(key), "%.*s", (int)(eq - text), text);
        init_set(f, key, eq + 1, "as given");
    }
    return rc;
}

/*
 * `config init`: a short configuration for --task (sft, lora, qlora, dpo, pretrain, blocks; without it the one that the
 * data are for), with a reason beside each value. With --model its chat template and this machine's memory decide, with
 * --data too the lengths and the number of samples: rows, steps, epochs, evaluations. --set has the last word.
 * What cannot be found out is warned of and left at a usual value.
 */
static int cli_config_init(struct mt_str *out, const struct cli_args *args, struct mt_err *err)
{
    struct init_lines f = {0};
    struct mt_hf_config hf;
    struct mt_err why;
    const char *task = cli_arg(args, "task"), *model = cli_arg(args, "model"), *data = cli_arg(args, "data");
    MT_FREED char *dir = NULL;
    int rc = init_task_named(&f.task, task, err) ?: take_given(&f, args, err);
    if (!rc && model)
        init_set(&f, "model.path", model, "a folder, or a name: hf download NAME");
    if (!rc && data)
        init_set(&f, "data.train", data, "%s", "");
    bool here = !rc && model && !mt_hf_find_model(&dir, model, &why);
    if (!rc && model && !here)
        mt_warn("%s", why.msg);
    if (!rc && here)
        rc = mt_hf_config_read(&hf, dir, err);
    if (!rc && here) {
        if (most_of_row(&hf) < USUAL_ROW)
            init_set_number(&f, "data.seq_len", most_of_row(&hf), "as much as the model takes");
        if (!init_value(&f, "data.template", NULL) && !init_value(&f, "data.tokenizer", NULL))
            choose_template(&f, dir);
        if (f.task->task == INIT_PRETRAIN)
            init_drop(&f, "data.template");
        if (hf.packed && f.task->task == INIT_QLORA)
            init_set(&f, "model.base_dtype", "auto", "the model's files are packed already");
        if (data)
            look_at_data(&f, task != NULL, &hf, data);
        choose_start(&f, dir, task != NULL);
    } else if (!rc && data && !here) {
        mt_warn("--data is counted in the tokens of a model: give --model with a folder, too");
    }
    if (!rc && model)
        look_at_machine(&f);
    rc = rc ?: take_given(&f, args, err);
    if (!rc)
        init_print(out, &f);
    init_unset(&f, 0);
    return rc;
}

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

int cli_cmd_config(struct cli *, const struct cli_args *args, struct mt_err *err)
{
    const char *what = args->operands[0];
    int rc = 0, n = args->n_operands;
    MT_STR_FREED struct mt_str s = {0};
    if (!strcmp(what, "show") && n == 2) {
        MT_CLOSED_BY(mt_config_destroy) struct mt_config *cfg = NULL;
        rc = cli_load_config(&cfg, MT_TO_TRAIN, args, err);
        if (!rc)
            mt_config_print(cfg, true, &s);
    } else if (!strcmp(what, "keys") && n == 1) {
        mt_config_describe(&s, cli_arg(args, "markdown") != NULL);
    } else if (!strcmp(what, "explain") && n == 2) {
        rc = mt_config_explain(&s, args->operands[1], err);
    } else if (!strcmp(what, "init") && n == 1) {
        rc = cli_arg(args, "all") ? write_all(&s, args) : cli_config_init(&s, args, err);
    } else {
        fprintf(stderr, "usage: megatrain config show CONFIG.ini | keys [--markdown] | explain KEY |\n"
                        "           init [--task TASK] [--model DIR] [--data FILE] [--all]\n");
        return EXIT_USAGE;
    }
    if (!rc && s.failed)
        rc = mt_fail_nomem(err, "the configuration", s.len);
    if (!rc)
        fputs(s.p ? s.p : "", stdout);
    return rc;
}
