/* SPDX-License-Identifier: Apache-2.0 */
/* A model tried by one person: the front of generation on a terminal. */
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/json.h"
#include "base/log.h"
#include "base/mem.h"
#include "base/strbuf.h"
#include "base/visible.h"
#include "generate.h"

/* Text as a terminal may show it. */
static void print_text(const char *text, size_t len)
{
    MT_STR_FREED struct mt_str safe = {0};
    if (!isatty(STDOUT_FILENO)) {
        fwrite(text, 1, len, stdout);
        return;
    }
    mt_str_visible(&safe, text, len);
    fwrite(safe.p ? safe.p : "", 1, safe.len, stdout);
}

static int print_one(void *ctx, const struct cli_text *t, struct mt_err *)
{
    const struct cli_generation *p = ctx;
    if (!p->shows)
        print_text(t->added, t->n_added);
    putchar('\n');
    return 0;
}

/* The prompt's record with what was added, as one line. */
static int print_record(void *ctx, const struct cli_text *t, struct mt_err *err)
{
    const struct cli_generation *p = ctx;
    mt_json_begin();
    MT_JSON_FREED cJSON *o = cJSON_Duplicate(p->record[t->number], true);
    cJSON_DeleteItemFromObjectCaseSensitive(o, "place");
    cJSON_DeleteItemFromObjectCaseSensitive(o, "completion");
    cli_add_text(o, "completion", t->added, t->n_added);
    cJSON_AddNumberToObject(o, "completion_tokens", (double)(t->of->n - t->of->ended));
    cJSON_AddStringToObject(o, "finish_reason", t->of->finish == MT_FINISH_STOP ? "stop" : "length");
    MT_FREED char *text = mt_json_print(o, false);
    bool ok = text && mt_json_complete() && printf("%s\n", text) > 0 && !fflush(stdout);
    return ok ? 0 : mt_fail(err, MT_ERR_RUNTIME, -EIO, "cannot write a completion to standard output");
}

/* --- prompts -------------------------------------------------------------------------------------- */

/* The prompt of the command line; "-": all of standard input. */
static int take_prompt(struct cli_generation *p, const char *prompt, struct mt_err *err)
{
    MT_FREED char *input = NULL;
    size_t size = 0;
    int rc = 0;
    if (prompt && !strcmp(prompt, "-")) {
        ssize_t n = getdelim(&input, &size, 0, stdin);
        prompt = n >= 0 ? input : "";
        if (ferror(stdin) || (n > 0 && !input[n - 1]))
            rc = mt_fail(err, MT_ERR_USAGE, -EINVAL, "standard input %s",
                         ferror(stdin) ? "cannot be read" : "has a zero byte: a prompt is text in UTF-8");
    }
    prompt = prompt ? prompt : "";
    if (!rc && mt_utf8_error(prompt) >= 0)
        rc = mt_fail(err, MT_ERR_USAGE, -EINVAL, "byte %ld of --prompt is not UTF-8", mt_utf8_error(prompt) + 1);
    cJSON *o = cJSON_CreateObject();
    cJSON_AddStringToObject(o, "prompt", prompt);
    mt_json_append(p->prompts, o);
    return rc;
}

/* --- a conversation ------------------------------------------------------------------------------- */

static bool add_message(cJSON *messages, const char *role, const char *text, size_t len)
{
    cJSON *o = cJSON_CreateObject();
    cJSON_AddStringToObject(o, "role", role);
    cli_add_text(o, "content", text ? text : "", len);
    return mt_json_append(messages, o);
}

static int encode_messages(struct cli_generation *p, cJSON *messages, struct mt_err *err)
{
    MT_JSON_FREED cJSON *list = cJSON_CreateArray();
    cJSON *record = cJSON_CreateObject();
    return mt_json_append(list, record) && cJSON_AddItemReferenceToObject(record, "messages", messages)
               ? mt_text_encode(&p->text, list, true, p->ids, err) : mt_fail_nomem(err, "a conversation", 1);
}

/* Does the last turn fit the context with an answer where it stands alone? */
static int fits_alone(struct cli_generation *p, cJSON *messages, size_t context, bool *fits, struct mt_err *err)
{
    MT_JSON_FREED cJSON *last = cJSON_CreateArray();
    int rc = last && cJSON_AddItemReferenceToArray(last, cJSON_GetArrayItem(messages, cJSON_GetArraySize(messages) - 1))
                 ? encode_messages(p, last, err) : mt_fail_nomem(err, "a conversation", 1);
    *fits = !rc && p->ids[0].n + p->g.n_new <= context;
    mt_text_ids_finish(&p->ids[0]);
    return rc;
}

/*
 * Forgets the first turns until what is left and an answer fit the context; p->ids[0] then has what is left.
 * A last turn that does not fit alone is not taken, and nothing is forgotten for it: *taken is false then.
 */
static int encode_turns(struct cli_generation *p, cJSON *messages, size_t context, bool *taken, struct mt_err *err)
{
    int rc;
    *taken = true;
    while (!(rc = encode_messages(p, messages, err)) && p->ids[0].n + p->g.n_new > context) {
        mt_text_ids_finish(&p->ids[0]);
        if (!(rc = fits_alone(p, messages, context, taken, err)) && !*taken) {
            mt_warn("this turn and an answer of --max-tokens = %zu are longer than --context = %zu: it is not taken", p->g.n_new,
                    context);
            cJSON_DeleteItemFromArray(messages, cJSON_GetArraySize(messages) - 1);
        }
        if (rc || !*taken)
            return rc;
        mt_warn("the conversation is longer than --context = %zu tokens: its first turn is forgotten", context);
        cJSON_DeleteItemFromArray(messages, 0);
        cJSON_DeleteItemFromArray(messages, 0);
    }
    return rc;
}

static int take_answer(void *ctx, const struct cli_text *t, struct mt_err *err)
{
    print_text(t->added, t->n_added);
    putchar('\n');
    fflush(stdout);
    return add_message(ctx, "assistant", t->added, t->n_added) ? 0 : mt_fail_nomem(err, "a conversation", t->n_added);
}

/* The answer to the last of the messages, printed and added to them. */
static int answer(struct cli_generation *p, cJSON *messages, struct mt_err *err)
{
    int rc = cli_generate(p, (uint64_t)cJSON_GetArraySize(messages), take_answer, messages, err);
    mt_text_ids_finish(&p->ids[0]);
    return rc;
}

/* Each line of the terminal is the user's next turn, to the end of input. */
static int converse(struct cli_generation *p, size_t context, struct mt_err *err)
{
    MT_JSON_FREED cJSON *messages = cJSON_CreateArray();
    MT_FREED char *line = NULL;
    size_t cap = 0;
    int rc = messages ? 0 : mt_fail_nomem(err, "a conversation", 1);
    mt_text_ids_finish(&p->ids[0]); /* of no prompt */
    bool taken = false;
    for (ssize_t n; !rc;) {
        fputs("> ", stdout);
        fflush(stdout);
        if ((n = getline(&line, &cap, stdin)) < 0)
            break;
        n -= n && line[n - 1] == '\n';
        line[n] = 0;
        if (!n)
            continue;
        if (mt_utf8_error(line) >= 0 || strlen(line) != (size_t)n) {
            mt_warn("a turn is text in UTF-8");
            continue;
        }
        rc = add_message(messages, "user", line, (size_t)n) ? 0 : mt_fail_nomem(err, "a conversation", (size_t)n);
        rc = rc ?: encode_turns(p, messages, context, &taken, err);
        if (!rc && taken)
            rc = answer(p, messages, err);
    }
    putchar('\n');
    return rc;
}

/* --- the command ---------------------------------------------------------------------------------- */

static int read_options(struct cli_generation *p, const struct cli_args *args, bool *talks, struct mt_err *err)
{
    const char *prompt = cli_arg(args, "prompt");
    int rc = cli_generation_options(p, args, 0.8, err);
    if (rc)
        return rc;
    if (args->n_operands && cli_arg(args, "model"))
        return mt_fail(err, MT_ERR_USAGE, -EINVAL, "%s and --model: give one of them", args->operands[0]);
    if (!args->n_operands && !cli_arg(args, "model") && !cli_arg(args, "adapter"))
        return mt_fail(err, MT_ERR_USAGE, -EINVAL, "give the folder of a model or of adapters, or --model or --adapter");
    if (prompt && p->file)
        return mt_fail(err, MT_ERR_USAGE, -EINVAL, "--prompt and --prompts: give one of them");
    *talks = p->chat && !prompt && !p->file && isatty(STDIN_FILENO);
    if (p->chat && !prompt && !p->file && !*talks)
        return mt_fail(err, MT_ERR_USAGE, -EINVAL, "--chat needs the user's turn: --prompt TEXT, or --prompt - for standard "
                       "input; a conversation needs a terminal");
    return p->file ? cli_read_prompts(p, err) : take_prompt(p, prompt, err);
}

int cli_cmd_sample(struct cli *, const struct cli_args *args, struct mt_err *err)
{
    MT_CLOSED_BY(cli_generation_finish) struct cli_generation p = {.n = 0};
    const size_t context = (size_t)cli_whole(args, "context", 2048);
    bool talks = false;
    int rc = read_options(&p, args, &talks, err)
          ?: mt_config_load(&p.cfg, NULL, NULL, 0, err)
          ?: cli_choose_model(p.cfg, args->n_operands ? args->operands[0] : cli_arg(args, "model"), cli_arg(args, "adapter"), err)
          ?: cli_encode_prompts(&p, err)
          ?: cli_generation_open(&p, talks ? context : p.longest + p.g.n_new, err)
          ?: cli_generation_start(&p, err);
    if (!rc && !p.chat && !p.file)
        fputs(mt_json_get(p.prompts->child, "prompt")->valuestring, stdout);
    p.shows = p.text.bytes && !p.n_stops && !p.file && !talks;
    rc = rc ?: talks ? converse(&p, context, err) : cli_generate(&p, 0, p.file ? print_record : print_one, &p, err);
    if (!rc)
        cli_say_speed(&p);
    return rc;
}
