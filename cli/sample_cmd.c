/* SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/fs.h"
#include "base/json.h"
#include "base/log.h"
#include "base/mem.h"
#include "base/strbuf.h"
#include "base/visible.h"
#include "cli.h"
#include "data/dataset.h"
#include "generate.h"

/* One prompt of the command line, or those of a file. */
struct sampling {
    struct cli_generation g;
    const char *file; /* NULL: one prompt */
    bool chat, talks; /* talks: a conversation on the terminal, one turn a line */
    size_t at_once;
    cJSON *prompts;  /* array of records */
    struct mt_text_ids *ids;
    size_t n, longest; /* longest: tokens of a prompt */
    char *model_dir;
    char *template_; /* a checkpoint's chat template that the helper does not find itself */
};

/* Text as a terminal may show it. */
static void print_text(const char *text, size_t len)
{
    struct mt_str safe = {0};
    if (!isatty(STDOUT_FILENO)) {
        fwrite(text, 1, len, stdout);
        return;
    }
    mt_str_visible(&safe, text, len);
    fwrite(safe.p ? safe.p : "", 1, safe.len, stdout);
    mt_str_finish(&safe);
}

/* What JSON can have of a text: bytes that are no UTF-8, or zero, are shown by number. */
static void add_text(cJSON *o, const char *name, const char *text, size_t len)
{
    struct mt_str safe = {0};
    bool fits = text && strlen(text) == len && mt_utf8_error(text) < 0;
    for (size_t i = 0; !fits && text && i < len; i++) {
        unsigned char c = (unsigned char)text[i];
        if (c && c < 128)
            mt_str_append(&safe, &text[i], 1);
        else
            mt_str_printf(&safe, "\\x%02x", c);
    }
    cJSON_AddStringToObject(o, name, fits ? text : safe.p ? safe.p : "");
    mt_str_finish(&safe);
}

/* The prompt's record with what was added, as one line. */
static int print_record(const cJSON *record, const struct cli_text *t, struct mt_err *err)
{
    mt_json_begin();
    cJSON *o = cJSON_Duplicate(record, true);
    cJSON_DeleteItemFromObjectCaseSensitive(o, "place");
    cJSON_DeleteItemFromObjectCaseSensitive(o, "completion");
    add_text(o, "completion", t->added, t->n_added);
    cJSON_AddNumberToObject(o, "completion_tokens", (double)(t->n - t->prompt->n));
    cJSON_AddStringToObject(o, "finish_reason", t->finish == CLI_STOP ? "stop" : "length");
    char *text = mt_json_print(o, false);
    bool ok = text && mt_json_complete() && printf("%s\n", text) > 0 && !fflush(stdout);
    free(text);
    cJSON_Delete(o);
    return ok ? 0 : mt_fail(err, MT_ERR_RUNTIME, -EIO, "cannot write a completion to standard output");
}

static int generate(struct mt_session *s, const struct sampling *p, struct mt_err *err)
{
    int rc = 0;
    const cJSON *record = p->prompts->child;
    for (size_t first = 0; first < p->n && !rc; first += p->at_once) {
        size_t n = MT_MIN(p->at_once, p->n - first);
        struct cli_text *t = mt_calloc(n, sizeof(*t));
        if (!t)
            return mt_fail_nomem(err, "sampling", n * sizeof(*t));
        for (size_t i = 0; i < n; i++)
            t[i] = (struct cli_text){.prompt = &p->ids[first + i], .stream = first + i};
        rc = cli_generate(s, &p->g, t, n, err);
        if (!rc && !p->file && !p->g.shows)
            print_text(t->added ? t->added : "", t->n_added);
        for (size_t i = 0; i < n && p->file && !rc; i++, record = record->next)
            rc = print_record(record, &t[i], err);
        cli_texts_finish(t, n);
        free(t);
    }
    if (!p->file && !p->g.shows)
        putchar('\n');
    return rc;
}

/* --- prompts -------------------------------------------------------------------------------------- */

/* A file's records, each with its place for messages. */
static int read_prompts(struct sampling *p, struct mt_err *err)
{
    FILE *f = strcmp(p->file, "-") ? fopen(p->file, "re") : stdin;
    char *line = NULL, place[4200];
    size_t cap = 0, number = 0;
    int rc = f ? 0 : mt_fail(err, MT_ERR_INPUT, -errno, "cannot read %s: %s", p->file, strerror(errno));
    for (ssize_t n; !rc && (n = getline(&line, &cap, f)) >= 0;) {
        cJSON *o = NULL;
        snprintf(place, sizeof(place), "%s:%zu", p->file, ++number);
        if (strspn(line, " \t\r\n") == (size_t)n)
            continue;
        rc = mt_json_parse(&o, line, (size_t)n, place, MT_ERR_INPUT, err);
        if (!rc && !cJSON_IsObject(o))
            rc = mt_fail(err, MT_ERR_INPUT, -EINVAL, "%s: a prompt is an object: {\"prompt\": TEXT} or {\"messages\": [...]}", place);
        if (!rc) {
            cJSON_DeleteItemFromObjectCaseSensitive(o, "place");
            cJSON_AddStringToObject(o, "place", place);
        }
        if (rc || !mt_json_append(p->prompts, o))
            cJSON_Delete(o);
    }
    if (!rc && ferror(f))
        rc = mt_fail(err, MT_ERR_INPUT, -EIO, "cannot read %s", p->file);
    if (!rc && !p->prompts->child)
        rc = mt_fail(err, MT_ERR_INPUT, -EINVAL, "%s has no prompt", p->file);
    if (f && f != stdin)
        fclose(f);
    free(line);
    return rc;
}

/* The prompt of the command line; "-": all of standard input. */
static int take_prompt(struct sampling *p, const char *prompt, struct mt_err *err)
{
    char *input = NULL;
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
    free(input);
    return rc;
}

/* The template that a checkpoint of adapters has: with that they were trained. Also a model's that is read with bytes,
 * which have none of their own. The helper reads another model's. */
static int find_template(struct sampling *p, const char *adapter, struct mt_err *err)
{
    const char *dir = adapter && *adapter ? adapter : p->g.text.bytes ? p->model_dir : NULL;
    p->template_ = dir && !p->g.text.template_ ? mt_path_join(dir, "chat_template.jinja") : NULL;
    if (dir && !p->g.text.template_ && !p->template_)
        return mt_fail_nomem(err, dir, strlen(dir));
    if (p->template_ && mt_path_exists(p->template_))
        p->g.text.template_ = p->template_;
    return 0;
}

/* Uses the model's own tokenizer if it has one, else bytes. */
static int encode_prompts(struct sampling *p, const struct mt_config *cfg, struct mt_err *err)
{
    int rc = mt_hf_find_model(&p->model_dir, cfg->model.path, err);
    p->g.text.model_dir = p->model_dir;
    p->g.text.bytes = rc || !mt_text_has_tokenizer(p->model_dir);
    if (!rc && p->g.text.bytes)
        mt_warn("%s has no tokenizer: using the bytes of the prompt as tokens", p->model_dir);
    if (!rc)
        rc = find_template(p, cfg->adapter.path, err);
    p->n = (size_t)cJSON_GetArraySize(p->prompts);
    p->ids = mt_calloc(p->n, sizeof(*p->ids));
    if (!rc && !p->ids)
        rc = mt_fail_nomem(err, "prompts", p->n * sizeof(*p->ids));
    if (!rc)
        rc = mt_text_encode(&p->g.text, p->prompts, p->chat, p->ids, err);
    for (size_t i = 0; i < p->n && !rc; i++)
        p->longest = MT_MAX(p->longest, p->ids[i].n);
    p->at_once = MT_MIN(p->at_once, p->n);
    return rc;
}

/* --- a conversation ------------------------------------------------------------------------------- */

static bool add_message(cJSON *messages, const char *role, const char *text, size_t len)
{
    cJSON *o = cJSON_CreateObject();
    cJSON_AddStringToObject(o, "role", role);
    add_text(o, "content", text ? text : "", len);
    return mt_json_append(messages, o);
}

static int encode_messages(struct sampling *p, cJSON *messages, struct mt_err *err)
{
    cJSON *list = cJSON_CreateArray(), *record = cJSON_CreateObject();
    int rc = mt_json_append(list, record) && cJSON_AddItemReferenceToObject(record, "messages", messages)
                 ? 0 : mt_fail_nomem(err, "a conversation", 1);
    if (!rc)
        rc = mt_text_encode(&p->g.text, list, true, p->ids, err);
    cJSON_Delete(list);
    return rc;
}

/* Does the last turn fit the context with an answer where it stands alone? */
static int fits_alone(struct sampling *p, cJSON *messages, size_t context, bool *fits, struct mt_err *err)
{
    cJSON *last = cJSON_CreateArray();
    int rc = last && cJSON_AddItemReferenceToArray(last, cJSON_GetArrayItem(messages, cJSON_GetArraySize(messages) - 1))
                 ? encode_messages(p, last, err) : mt_fail_nomem(err, "a conversation", 1);
    *fits = !rc && p->ids[0].n + p->g.n_new <= context;
    mt_text_ids_finish(&p->ids[0]);
    cJSON_Delete(last);
    return rc;
}

/*
 * Forgets the first turns until what is left and an answer fit the context; p->ids[0] then has what is left.
 * A last turn that does not fit alone is not taken, and nothing is forgotten for it: *taken is false then.
 */
static int encode_turns(struct sampling *p, cJSON *messages, size_t context, bool *taken, struct mt_err *err)
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

/* The answer to the last of the messages, printed and added to them. */
static int answer(struct mt_session *s, struct sampling *p, cJSON *messages, struct mt_err *err)
{
    struct cli_text t = {.prompt = &p->ids[0], .stream = (uint64_t)cJSON_GetArraySize(messages)};
    int rc = cli_generate(s, &p->g, &t, 1, err);
    if (!rc) {
        print_text(t.added ? t.added : "", t.n_added);
        putchar('\n');
        fflush(stdout);
        if (!add_message(messages, "assistant", t.added, t.n_added))
            rc = mt_fail_nomem(err, "a conversation", t.n_added);
    }
    cli_texts_finish(&t, 1);
    mt_text_ids_finish(&p->ids[0]);
    return rc;
}

/* Each line of the terminal is the user's next turn, to the end of input. */
static int converse(struct mt_session *s, struct sampling *p, size_t context, struct mt_err *err)
{
    cJSON *messages = cJSON_CreateArray();
    char *line = NULL;
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
        if (!rc)
            rc = encode_turns(p, messages, context, &taken, err);
        if (!rc && taken)
            rc = answer(s, p, messages, err);
    }
    putchar('\n');
    free(line);
    cJSON_Delete(messages);
    return rc;
}

/* --- the command ---------------------------------------------------------------------------------- */

static int read_options(struct sampling *p, const struct cli_args *args, struct mt_err *err)
{
    const char *prompt = cli_arg(args, "prompt");
    p->file = cli_arg(args, "prompts");
    p->chat = cli_arg(args, "chat") != NULL;
    p->at_once = (size_t)cli_whole(args, "batch", 16);
    p->g = (struct cli_generation){.n_new = (size_t)cli_whole(args, "max-tokens", 128),
                                   .top_k = (size_t)cli_whole(args, "top-k", 0),
                                   .temperature = cli_real(args, "temperature", 0.8),
                                   .top_p = cli_real(args, "top-p", 1),
                                   .seed = (uint64_t)cli_whole(args, "seed", 0),
                                   .text.template_ = cli_arg(args, "template")};
    for (size_t i = 0; i < args->n_given; i++) {
        if (strcmp(args->given[i].option->name, "stop") != 0)
            continue;
        if (p->g.n_stops == CLI_STOPS || !*args->given[i].value)
            return mt_fail(err, MT_ERR_USAGE, -EINVAL, "--stop is a text, and at most %d times there", CLI_STOPS);
        p->g.stop[p->g.n_stops++] = args->given[i].value;
    }
    if (args->n_operands && cli_arg(args, "model"))
        return mt_fail(err, MT_ERR_USAGE, -EINVAL, "%s and --model: give one of them", args->operands[0]);
    if (!args->n_operands && !cli_arg(args, "model") && !cli_arg(args, "adapter"))
        return mt_fail(err, MT_ERR_USAGE, -EINVAL, "give the folder of a model or of adapters, or --model or --adapter");
    if (prompt && p->file)
        return mt_fail(err, MT_ERR_USAGE, -EINVAL, "--prompt and --prompts: give one of them");
    p->talks = p->chat && !prompt && !p->file && isatty(STDIN_FILENO);
    if (p->chat && !prompt && !p->file && !p->talks)
        return mt_fail(err, MT_ERR_USAGE, -EINVAL, "--chat needs the user's turn: --prompt TEXT, or --prompt - for standard "
                       "input; a conversation needs a terminal");
    return p->file ? read_prompts(p, err) : take_prompt(p, prompt, err);
}

int cli_cmd_sample(struct cli *, const struct cli_args *args)
{
    struct mt_config *cfg = NULL;
    struct mt_inputs in = {0};
    struct mt_setup setup = {0};
    struct mt_session s = {0};
    struct sampling p = {.prompts = cJSON_CreateArray()};
    struct mt_err err;
    const size_t context = (size_t)cli_whole(args, "context", 2048);
    int rc = p.prompts ? read_options(&p, args, &err) : mt_fail_nomem(&err, "prompts", 1);
    if (!rc)
        rc = mt_config_load(&cfg, NULL, NULL, 0, &err);
    if (!rc)
        rc = cli_choose_model(cfg, args->n_operands ? args->operands[0] : cli_arg(args, "model"), cli_arg(args, "adapter"), &err);
    if (!rc)
        rc = encode_prompts(&p, cfg, &err);
    if (!rc)
        rc = mt_inputs_open_model(&in, cfg, p.talks ? context : p.longest + p.g.n_new, p.at_once, &err);
    if (!rc)
        rc = mt_setup_open(&setup, &in, MT_RUN_EVAL, &err);
    if (!rc && p.g.text.bytes && in.hf.vocab < MT_BYTE_VOCAB)
        rc = mt_fail(&err, MT_ERR_INPUT, -EINVAL, "%s: the byte tokenizer needs a vocabulary of %d",
                     cfg->model.path, MT_BYTE_VOCAB);
    if (!rc)
        mt_setup_adopt_checkpoint(&setup);
    if (!rc)
        rc = mt_session_start(&s, &setup, &err);
    if (!rc)
        rc = mt_session_fill_weights(&s, NULL, &err);
    if (!rc && !p.chat && !p.file)
        fputs(mt_json_get(p.prompts->child, "prompt")->valuestring, stdout);
    p.g.shows = p.g.text.bytes && !p.g.n_stops && !p.file && !p.talks;
    if (!rc)
        rc = p.talks ? converse(&s, &p, context, &err) : generate(&s, &p, &err);
    int code = rc ? cli_fail(&err) : 0;
    mt_session_finish(&s);
    mt_setup_finish(&setup);
    mt_inputs_finish(&in);
    mt_config_destroy(&cfg);
    for (size_t i = 0; p.ids && i < p.n; i++)
        mt_text_ids_finish(&p.ids[i]);
    free(p.ids);
    cJSON_Delete(p.prompts);
    free(p.model_dir);
    free(p.template_);
    return code;
}
