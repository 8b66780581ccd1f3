/* SPDX-License-Identifier: Apache-2.0 */
/* Completions of a file of prompts, with their tokens and log-probabilities: rollouts, but for their rewards. */
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include "base/json.h"
#include "base/mem.h"
#include "generate.h"
#include "report.h"

struct writer {
    const struct cli_generation *p;
    FILE *out;
    const char *path;
};

static cJSON *add_ids(cJSON *o, const char *name, const uint32_t *ids, size_t n)
{
    cJSON *list = cJSON_AddArrayToObject(o, name);
    for (size_t i = 0; i < n; i++)
        mt_json_append(list, cJSON_CreateNumber(ids[i]));
    return list;
}

/* The prompt's record, and what was added. Log-probabilities are FP32, written so that they are read as the same. */
static int write_text(void *ctx, const struct cli_text *t, struct mt_err *err)
{
    const struct writer *w = ctx;
    const struct mt_gen_text *of = t->of;
    size_t prompt = t->number / w->p->samples;
    mt_json_begin();
    MT_JSON_FREED cJSON *o = cJSON_Duplicate(cJSON_GetArrayItem(w->p->prompts, (int)prompt), true);
    static const char *const own[] = {"place", "completion", "completion_tokens", "finish_reason", "prompt_ids", "completion_ids",
                                      "logprobs", "temperature", "truncated", "sample"};
    for (size_t i = 0; i < MT_ARRAY_LEN(own); i++)
        cJSON_DeleteItemFromObjectCaseSensitive(o, own[i]);
    if (!mt_json_get(o, "group"))
        cJSON_AddNumberToObject(o, "group", (double)prompt);
    cJSON_AddNumberToObject(o, "sample", (double)(t->number % w->p->samples));
    if (!w->p->ids_only)
        cli_add_text(o, "completion", t->added, t->n_added);
    cJSON_AddStringToObject(o, "finish_reason", of->finish == MT_FINISH_STOP ? "stop" : "length");
    mt_json_put(o, "truncated=%d, temperature=%f", of->finish == MT_FINISH_LENGTH, w->p->g.temperature);
    add_ids(o, "prompt_ids", of->prompt, of->n_prompt);
    add_ids(o, "completion_ids", of->ids, of->n);
    cJSON *logprobs = cJSON_AddArrayToObject(o, "logprobs");
    for (size_t i = 0; i < of->n; i++) {
        char number[32];
        snprintf(number, sizeof(number), "%.9g", (double)of->logprobs[i]);
        mt_json_append(logprobs, cJSON_CreateRaw(number));
    }
    MT_FREED char *text = mt_json_print(o, false);
    bool ok = text && mt_json_complete() && fprintf(w->out, "%s\n", text) > 0 && !fflush(w->out);
    return ok ? 0 : mt_fail(err, MT_ERR_RUNTIME, -EIO, "cannot write to %s: %s", w->path, strerror(errno));
}

static bool is_folder(const char *path)
{
    struct stat st;
    return !stat(path, &st) && S_ISDIR(st.st_mode);
}

/* A configuration file, or the folder of a model with --set alone. */
static int load(struct cli_generation *p, const struct cli_args *args, struct mt_err *err)
{
    const char *of = args->n_operands ? args->operands[0] : NULL, *model = cli_arg(args, "model");
    bool folder = !of || is_folder(of);
    if (folder && of && model)
        return mt_fail(err, MT_ERR_USAGE, -EINVAL, "%s and --model: give one of them", of);
    if (!of && !model && !cli_arg(args, "adapter"))
        return mt_fail(err, MT_ERR_USAGE, -EINVAL, "give a configuration, the folder of a model or of adapters, or --model or --adapter");
    int rc = cli_load_file(&p->cfg, folder ? NULL : of, args, err);
    if (!rc && !cli_arg(args, "temperature") && strcmp(p->cfg->policy.loss, "off") != 0)
        p->g.temperature = p->cfg->numerics.objective_keys.policy.temperature;
    return rc ?: cli_choose_model(p->cfg, folder && of ? of : model, cli_arg(args, "adapter"), err);
}

static int run(struct cli_generation *p, const struct cli_args *args, struct mt_err *err)
{
    const char *path = cli_arg(args, "out");
    struct writer w = {p, stdout, "standard output"};
    if (path && strcmp(path, "-")) {
        w.path = path;
        w.out = fopen(path, "we");
        if (!w.out)
            return mt_fail(err, MT_ERR_RUNTIME, -errno, "cannot write %s: %s", path, strerror(errno));
    }
    int rc = cli_generate(p, 0, write_text, &w, err);
    if (w.out != stdout && fclose(w.out) && !rc)
        rc = mt_fail(err, MT_ERR_RUNTIME, -EIO, "cannot write %s: %s", path, strerror(errno));
    return rc;
}

int cli_cmd_generate(struct cli *, const struct cli_args *args)
{
    struct cli_generation p = {.n = 0};
    struct mt_memory memory;
    struct mt_err err;
    const bool dry = cli_arg(args, "dry-run") != NULL;
    int rc = cli_generation_options(&p, args, 1, &err);
    if (!rc && !p.file)
        rc = mt_fail(&err, MT_ERR_USAGE, -EINVAL, "give --prompts: JSON lines, or - for standard input");
    rc = rc ?: load(&p, args, &err)
            ?: cli_read_prompts(&p, &err)
            ?: cli_encode_prompts(&p, &err)
            ?: cli_generation_open(&p, p.longest + p.g.n_new, &err)
            ?: mt_setup_memory(&p.setup, &memory, &err);
    if (!rc && dry)
        cli_print_memory(&memory);
    rc = rc ?: mt_memory_check(&memory, &err);
    if (!rc && !dry)
        rc = cli_generation_start(&p, &err);
    if (!rc && !dry)
        rc = run(&p, args, &err);
    if (!rc)
        cli_say_speed(&p);
    int code = rc ? cli_fail(&err) : 0;
    cli_generation_finish(&p);
    return code;
}
