/* SPDX-License-Identifier: Apache-2.0 */
#include "generate.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/fs.h"
#include "base/log.h"
#include "base/mem.h"
#include "base/sort.h"
#include "base/strbuf.h"
#include "data/dataset.h"
#include "objective/objective.h"

/* LOOK_EVERY: tokens between two looks for stop strings, for which texts are decoded by another process. TOGETHER:
 * texts that it decodes at once when they have ended. */
enum { LOOK_EVERY = 8, TOGETHER = 256 };

/* --- prompts -------------------------------------------------------------------------------------- */

/* Whether the conversation of a prompt ends with an answer. */
static bool is_answered(const cJSON *o)
{
    const cJSON *turns = mt_json_get(o, "messages") ? mt_json_get(o, "messages") : mt_json_get(o, "prompt");
    const cJSON *last = cJSON_IsArray(turns) ? cJSON_GetArrayItem(turns, cJSON_GetArraySize(turns) - 1) : NULL;
    return !strcmp(mt_json_string(last, "role", ""), "assistant");
}

int cli_read_prompts(struct cli_generation *p, struct mt_err *err)
{
    FILE *f = strcmp(p->file, "-") ? fopen(p->file, "re") : stdin;
    MT_FREED char *line = NULL;
    size_t cap = 0, number = 0, answered = 0, first = 0;
    int rc = f ? 0 : mt_fail(err, MT_ERR_INPUT, -errno, "cannot read %s: %s", p->file, strerror(errno));
    for (ssize_t n; !rc && (n = getline(&line, &cap, f)) >= 0;) {
        cJSON *o = NULL;
        const char *place = MT_PATH("%s:%zu", p->file, ++number);
        if (strspn(line, " \t\r\n") == (size_t)n)
            continue;
        rc = mt_json_parse(&o, line, (size_t)n, place, MT_ERR_INPUT, err);
        if (!rc && !cJSON_IsObject(o))
            rc = mt_fail(err, MT_ERR_INPUT, -EINVAL, "%s: a prompt is an object: {\"prompt\": TEXT}, {\"messages\": [...]} or "
                         "{\"prompt_ids\": [...]}", place);
        if (!rc) {
            cJSON_DeleteItemFromObjectCaseSensitive(o, "place");
            cJSON_AddStringToObject(o, "place", place);
        }
        if (!rc && is_answered(o) && !answered++)
            first = number;
        if (rc || !mt_json_append(p->prompts, o))
            cJSON_Delete(o);
    }
    if (!rc && ferror(f))
        rc = mt_fail(err, MT_ERR_INPUT, -EIO, "cannot read %s", p->file);
    if (!rc && !p->prompts->child)
        rc = mt_fail(err, MT_ERR_INPUT, -EINVAL, "%s has no prompt", p->file);
    if (!rc && answered)
        mt_warn("%s: prompts that end with the assistant's turn: %zu, the first in line %zu; what is generated is one more turn behind it: "
                "leave it out to have what is before it answered", p->file, answered, first);
    if (f && f != stdin)
        fclose(f);
    return rc;
}

/* The template that a checkpoint of adapters has: with that they were trained. Also a model's that is read with bytes,
 * which have none of their own. The helper reads another model's. */
static int find_template(struct cli_generation *p, const char *adapter, struct mt_err *err)
{
    const char *dir = adapter && *adapter ? adapter : p->text.bytes ? p->model_dir : NULL;
    p->template_ = dir && !p->text.template_ ? mt_path_join(dir, "chat_template.jinja") : NULL;
    if (dir && !p->text.template_ && !p->template_)
        return mt_fail_nomem(err, dir, strlen(dir));
    if (p->template_ && mt_path_exists(p->template_))
        p->text.template_ = p->template_;
    return 0;
}

/* Prompts of token ids need no tokenizer. */
static int take_ids(const cJSON *record, struct mt_text_ids *out, struct mt_err *err)
{
    const cJSON *list = mt_json_get(record, "prompt_ids"), *v;
    const char *place = cJSON_GetStringValue(mt_json_get(record, "place"));
    out->ids = mt_calloc((size_t)cJSON_GetArraySize(list) + 1, sizeof(*out->ids));
    if (!out->ids)
        return mt_fail_nomem(err, "a prompt", 1);
    cJSON_ArrayForEach(v, list)
    {
        if (!cJSON_IsNumber(v) || v->valuedouble < 0 || v->valuedouble != (uint32_t)v->valuedouble)
            return mt_fail(err, MT_ERR_INPUT, -EINVAL, "%s: \"prompt_ids\" has what is no token id", place ? place : "the prompt");
        out->ids[out->n++] = (uint32_t)v->valuedouble;
    }
    return out->n ? 0 : mt_fail(err, MT_ERR_INPUT, -EINVAL, "%s: the prompt has no token", place ? place : "the prompt");
}

static int encode(struct cli_generation *p, struct mt_err *err)
{
    MT_JSON_FREED cJSON *texts = cJSON_CreateArray();
    cJSON *record;
    MT_FREED struct mt_text_ids *ids = mt_calloc(p->n, sizeof(*ids));
    size_t i = 0, n = 0;
    int rc = texts && ids ? 0 : mt_fail_nomem(err, "prompts", p->n * sizeof(*ids));
    cJSON_ArrayForEach(record, p->prompts)
    {
        if (!rc && mt_json_get(record, "prompt_ids"))
            rc = take_ids(record, &p->ids[i], err);
        else if (!rc)
            n += cJSON_AddItemReferenceToArray(texts, record);
        i++;
    }
    if (!rc && n)
        rc = mt_text_encode(&p->text, texts, p->chat, ids, err);
    i = n = 0;
    cJSON_ArrayForEach(record, p->prompts)
    {
        if (ids && !mt_json_get(record, "prompt_ids"))
            p->ids[i] = ids[n++];
        i++;
    }
    return rc;
}

int cli_encode_prompts(struct cli_generation *p, struct mt_err *err)
{
    int rc = mt_hf_find_model(&p->model_dir, p->cfg->model.path, err);
    p->text.model_dir = p->model_dir;
    p->text.bytes = p->ids_only = rc || !mt_text_has_tokenizer(p->model_dir);
    const cJSON *record;
    cJSON_ArrayForEach(record, p->prompts) p->ids_only &= mt_json_get(record, "prompt_ids") != NULL;
    if (!rc && p->ids_only && p->n_stops)
        rc = mt_fail(err, MT_ERR_USAGE, -EINVAL, "--stop is a text, and %s has no tokenizer", p->model_dir);
    if (!rc && p->text.bytes && !p->ids_only)
        mt_warn("%s has no tokenizer: using the bytes of the prompt as tokens", p->model_dir);
    rc = rc ?: find_template(p, p->cfg->adapter.path, err);
    rc = rc ?: mt_json_items(&p->record, &p->n, p->prompts, err);
    p->ids = mt_calloc(p->n, sizeof(*p->ids));
    if (!rc && !p->ids)
        rc = mt_fail_nomem(err, "prompts", p->n * sizeof(*p->ids));
    rc = rc ?: encode(p, err);
    for (size_t i = 0; i < p->n && !rc; i++)
        p->longest = MT_MAX(p->longest, p->ids[i].n);
    return rc;
}

/* --- options, and what they open -------------------------------------------------------------------- */

int cli_generation_options(struct cli_generation *p, const struct cli_args *args, double temperature,
                           struct mt_err *err)
{
    p->prompts = cJSON_CreateArray();
    p->file = cli_arg(args, "prompts");
    p->chat = cli_arg(args, "chat") != NULL;
    p->at_once = (size_t)cli_whole(args, "batch", 0);
    p->samples = (size_t)cli_whole(args, "samples", 1);
    p->noise = cli_whole(args, "noise", -1);
    p->text.template_ = cli_arg(args, "template");
    p->g = (struct mt_generation){.n_new = (size_t)cli_whole(args, "max-tokens", 128),
                                  .top_k = (size_t)cli_whole(args, "top-k", 0),
                                  .temperature = cli_real(args, "temperature", temperature),
                                  .top_p = cli_real(args, "top-p", 1),
                                  .min_p = cli_real(args, "min-p", 0),
                                  .seed = (uint64_t)cli_whole(args, "seed", 0),
                                  .guesses = (size_t)cli_whole(args, "guesses", 15)};
    for (size_t i = 0; i < args->n_given; i++) {
        if (strcmp(args->given[i].option->name, "stop") != 0)
            continue;
        if (p->n_stops == CLI_STOPS || !*args->given[i].value)
            return mt_fail(err, MT_ERR_USAGE, -EINVAL, "--stop is a text, and at most %d times there", CLI_STOPS);
        p->stop[p->n_stops++] = args->given[i].value;
    }
    return p->prompts ? 0 : mt_fail_nomem(err, "prompts", 1);
}

/* Tokens that the longest texts have together, of each number of them. */
static int count_tokens(struct cli_generation *p, struct mt_err *err)
{
    size_t n = p->n * p->samples;
    int rc = MT_NEW(&p->tokens, n, "texts", err);
    for (size_t i = 0; i < n && !rc; i++)
        p->tokens[i] = p->ids[i / p->samples].n + p->g.n_new;
    if (!rc)
        mt_sort_u64(p->tokens, n);
    for (size_t i = n; i > 1 && !rc; i--)
        p->tokens[i - 2] += p->tokens[i - 1];
    return rc;
}

int cli_draw_bytes(struct cli_generation *p, const struct mt_hf_config *hf, struct mt_err *err)
{
    if (p->ids_only || !p->text.bytes)
        return 0;
    p->g.drawn_of = MT_BYTE_VOCAB;
    p->g.ends_from = 256;
    return hf->vocab >= MT_BYTE_VOCAB ? 0 : mt_fail(err, MT_ERR_INPUT, -EINVAL, "%s: the byte tokenizer needs a vocabulary of %d",
                                                    p->cfg->model.path, MT_BYTE_VOCAB);
}

int cli_generation_open(struct cli_generation *p, size_t max_len, struct mt_err *err)
{
    const bool known = max_len == p->longest + p->g.n_new;
    int rc = known ? count_tokens(p, err) : 0;
    const struct mt_texts texts = {.n = p->n * p->samples, .len = max_len, .tokens = p->tokens};
    rc = rc ?: mt_inputs_open_model(&p->in, p->cfg, &texts, p->at_once, err)
            ?: mt_setup_open(&p->setup, &p->in, MT_RUN_EVAL, err);
    return rc ?: cli_draw_bytes(p, &p->in.hf, err);
}

int cli_generation_start(struct cli_generation *p, struct mt_err *err)
{
    mt_setup_adopt_checkpoint(&p->setup);
    p->session = &p->own;
    int rc = mt_session_start(&p->own, &p->setup, err);
    return rc ?: mt_session_fill_weights(&p->own, NULL, err);
}

void cli_generation_finish(struct cli_generation *p)
{
    mt_session_finish(&p->own);
    mt_setup_finish(&p->setup);
    mt_inputs_finish(&p->in);
    mt_config_destroy(&p->cfg);
    for (size_t i = 0; p->ids && i < p->n; i++)
        mt_text_ids_finish(&p->ids[i]);
    free(p->ids);
    free(p->record);
    free(p->tokens);
    cJSON_Delete(p->prompts);
    free(p->model_dir);
    free(p->template_);
}

/* --- texts ------------------------------------------------------------------------------------------ */

/* Texts on their way from tokens to the caller. */
struct texts {
    struct cli_generation *c;
    struct mt_gen_text *text;
    struct mt_gen_text **waiting; /* [TOGETHER] that have ended */
    size_t n_waiting;
    uint64_t stream;
    cli_text_fn *done;
    void *ctx;
};

static void take_piece(void *ctx, size_t sample, const char *text, size_t len, bool added)
{
    struct mt_str *of = ctx;
    if (added)
        mt_str_append(&of[sample], text, len);
}

/* What a text has added that is part of it. */
static size_t kept_of(const struct mt_gen_text *t)
{
    return t->n - t->ended;
}

/* Decodes what was added to n texts, of each its first kept[i] tokens: out[n], of zeros, which the caller frees. */
static int decode(const struct cli_generation *c, struct mt_gen_text *const *t, const size_t *kept, size_t n,
                  struct mt_str *out, struct mt_err *err)
{
    MT_FREED struct mt_text_sample *samples = mt_calloc(n, sizeof(*samples));
    size_t total = 0, at = 0;
    for (size_t i = 0; i < n; i++)
        total += t[i]->n_prompt + kept[i];
    MT_FREED uint32_t *ids = mt_calloc(total, sizeof(*ids));
    MT_FREED uint8_t *is_new = mt_calloc(total, 1);
    int rc = samples && ids && is_new ? 0 : mt_fail_nomem(err, "generated texts", total * sizeof(*ids));
    for (size_t i = 0; i < n && !rc; at += samples[i++].n) {
        samples[i] = (struct mt_text_sample){ids + at, is_new + at, t[i]->n_prompt + kept[i]};
        memcpy(ids + at, t[i]->prompt, t[i]->n_prompt * sizeof(*ids));
        if (kept[i])
            memcpy(ids + at + t[i]->n_prompt, t[i]->ids, kept[i] * sizeof(*ids));
        memset(is_new + at + t[i]->n_prompt, 1, kept[i]);
    }
    rc = rc ?: mt_text_decode(&c->text, samples, n, take_piece, out, err);
    for (size_t i = 0; i < n && !rc; i++)
        if (out[i].failed)
            rc = mt_fail_nomem(err, "generated texts", total);
    return rc;
}

/* Bytes before the first stop string. */
static size_t before_stop(const struct cli_generation *c, const struct mt_str *text)
{
    size_t n = text->len;
    for (size_t k = 0; k < c->n_stops && text->p; k++) {
        const char *at = memmem(text->p, text->len, c->stop[k], strlen(c->stop[k]));
        n = at ? MT_MIN(n, (size_t)(at - text->p)) : n;
    }
    return n;
}

/* The fewest tokens with which a text has its stop string: those since the last look are tried. */
static int cut_at_stop(const struct cli_generation *c, struct mt_gen_text *t, struct mt_err *err)
{
    size_t best = kept_of(t), n = MT_MIN(c->g.look_every * (1 + c->g.guesses), best);
    MT_FREED size_t *kept = NULL;
    MT_FREED struct mt_gen_text **all = NULL;
    MT_FREED struct mt_str *text = NULL;
    int rc = MT_NEW(&kept, n, "generated texts", err)
          ?: MT_NEW(&all, n, "generated texts", err)
          ?: MT_NEW(&text, n, "generated texts", err);
    for (size_t j = 0; j < n && !rc; j++) {
        all[j] = t;
        kept[j] = kept_of(t) - j;
    }
    rc = rc ?: decode(c, all, kept, n, text, err);
    for (size_t j = 0; j < n && text; j++) {
        if (!rc && before_stop(c, &text[j]) < text[j].len)
            best = kept[j];
        mt_str_finish(&text[j]);
    }
    t->n = rc ? t->n : best;
    t->ended = false;
    t->finish = MT_FINISH_STOP;
    return rc;
}

/* Texts of which a stop string has come end with it. */
static int look(void *ctx, struct mt_gen_text *const *t, size_t n, struct mt_err *err)
{
    const struct texts *x = ctx;
    MT_FREED struct mt_str *text = mt_calloc(n, sizeof(*text));
    MT_FREED size_t *kept = mt_calloc(n, sizeof(*kept));
    int rc = text && kept ? 0 : mt_fail_nomem(err, "generated texts", n * sizeof(*text));
    for (size_t i = 0; i < n && !rc; i++)
        kept[i] = kept_of(t[i]);
    rc = rc ?: decode(x->c, t, kept, n, text, err);
    for (size_t i = 0; i < n && text; i++) {
        if (!rc && before_stop(x->c, &text[i]) < text[i].len)
            rc = cut_at_stop(x->c, t[i], err);
        mt_str_finish(&text[i]);
    }
    return rc;
}

/* Hands over the texts that wait. */
static int hand_over(struct texts *x, struct mt_err *err)
{
    struct mt_str text[TOGETHER] = {{0}};
    size_t kept[TOGETHER], n = x->n_waiting;
    int rc = x->c->n_stops && n ? look(x, x->waiting, n, err) : 0;
    for (size_t i = 0; i < n; i++)
        kept[i] = kept_of(x->waiting[i]);
    if (!rc && n && !x->c->shows && !x->c->ids_only)
        rc = decode(x->c, x->waiting, kept, n, text, err);
    for (size_t i = 0; i < n; i++) {
        struct cli_text t = {x->waiting[i], (size_t)(x->waiting[i]->stream - x->stream), text[i].p ? text[i].p : "",
                             before_stop(x->c, &text[i])};
        rc = rc ?: x->done(x->ctx, &t, err);
        mt_str_finish(&text[i]);
        mt_gen_text_finish(x->waiting[i]);
    }
    x->n_waiting = 0;
    return rc;
}

static int end(void *ctx, struct mt_gen_text *t, struct mt_err *err)
{
    struct texts *x = ctx;
    x->waiting[x->n_waiting++] = t;
    return x->n_waiting == TOGETHER ? hand_over(x, err) : 0;
}

static void show(void *, const struct mt_gen_text *t)
{
    putchar((int)t->ids[t->n - 1]);
    fflush(stdout);
}

int cli_generate(struct cli_generation *c, uint64_t stream, cli_text_fn *done, void *ctx, struct mt_err *err)
{
    size_t n = c->n * c->samples;
    struct mt_gen_text *waiting[TOGETHER];
    struct texts x = {.c = c, .waiting = waiting, .stream = stream, .done = done, .ctx = ctx};
    x.text = mt_calloc(n, sizeof(*x.text));
    struct mt_gen_stats stats = {0};
    if (!x.text)
        return mt_fail_nomem(err, "texts", n * sizeof(*x.text));
    for (size_t i = 0; i < n; i++) {
        const struct mt_text_ids *p = &c->ids[i / c->samples];
        x.text[i] = (struct mt_gen_text){.prompt = p->ids, .n_prompt = p->n, .ends = p->ends, .n_ends = p->n_ends,
                                         .stream = stream + i};
    }
    c->g.look_every = !c->n_stops ? 0 : c->text.bytes ? 1 : LOOK_EVERY;
    c->g.look = look;
    c->g.done = end;
    c->g.added = c->shows ? show : NULL;
    c->g.ctx = &x;
    int rc = mt_generate(c->session, &c->g, x.text, n, &stats, err);
    c->stats.passes += stats.passes;
    c->stats.tokens += stats.tokens;
    c->stats.computed += stats.computed;
    c->stats.loaded_bytes += stats.loaded_bytes;
    c->stats.guessed += stats.guessed;
    c->stats.right += stats.right;
    c->stats.seconds += stats.seconds;
    rc = rc ?: hand_over(&x, err);
    for (size_t i = 0; i < n; i++)
        mt_gen_text_finish(&x.text[i]);
    free(x.text);
    return rc;
}

void cli_say_speed(const struct cli_generation *c)
{
    const struct mt_gen_stats *s = &c->stats;
    char bytes[32], guesses[80] = "";
    if (s->guessed)
        snprintf(guesses, sizeof(guesses), "; %zu of %zu guesses were right", s->right, s->guessed);
    if (s->tokens)
        mt_info("%zu tokens, %.3g seconds and %s loaded a token; %zu tokens were computed in %zu passes%s", s->tokens,
                s->seconds / (double)s->tokens, mt_format_bytes(bytes, sizeof(bytes), s->loaded_bytes / s->tokens),
                s->computed, s->passes, guesses);
}

void cli_add_text(cJSON *o, const char *name, const char *text, size_t len)
{
    MT_STR_FREED struct mt_str safe = {0};
    bool fits = text && strlen(text) == len && mt_utf8_error(text) < 0;
    for (size_t i = 0; !fits && text && i < len; i++) {
        unsigned char c = (unsigned char)text[i];
        if (c && c < 128)
            mt_str_append(&safe, &text[i], 1);
        else
            mt_str_printf(&safe, "\\x%02x", c);
    }
    cJSON_AddStringToObject(o, name, fits ? text : safe.p ? safe.p : "");
}

static cJSON *add_ids(cJSON *o, const char *name, const uint32_t *ids, size_t n)
{
    cJSON *list = cJSON_AddArrayToObject(o, name);
    for (size_t i = 0; i < n; i++)
        mt_json_append(list, cJSON_CreateNumber(ids[i]));
    return list;
}

/* To where texts are written. */
struct writer {
    const struct cli_generation *p;
    FILE *out;
    const char *path;
    size_t variant, n_variants; /* of the weights */
    char **line;                /* [texts, n_variants] kept until all have come, so that a prompt's are together */
};

static int put_line(const struct writer *w, const char *line, struct mt_err *err)
{
    bool ok = fprintf(w->out, "%s\n", line) > 0 && !fflush(w->out);
    return ok ? 0 : mt_fail(err, MT_ERR_RUNTIME, -EIO, "cannot write to %s: %s", w->path, strerror(errno));
}

/* What logits were divided by for the log-probabilities. */
static double logprobs_temperature(const struct cli_generation *p)
{
    const struct mt_numerics *n = &p->session->setup->choice.numerics;
    const struct mt_objective *o = mt_objective_of(n);
    return o->rollouts && !o->by_rewards ? n->objective_keys.policy.temperature : 1;
}

/* The prompt's record, and what was added. Log-probabilities are FP32, written so that they are read as the same. */
static int write_text(void *ctx, const struct cli_text *t, struct mt_err *err)
{
    const struct writer *w = ctx;
    const struct mt_gen_text *of = t->of;
    const bool noisy = w->p->noise >= 0;
    const double drawn = w->p->g.temperature;
    size_t prompt = t->number / w->p->samples;
    mt_json_begin();
    MT_JSON_FREED cJSON *o = cJSON_Duplicate(w->p->record[prompt], true);
    static const char *const own[] = {"place", "completion", "completion_tokens", "finish_reason", "prompt_ids", "completion_ids",
                                      "logprobs", "temperature", "logprobs_temperature", "truncated", "sample", "noise"};
    for (size_t i = 0; i < MT_ARRAY_LEN(own); i++)
        cJSON_DeleteItemFromObjectCaseSensitive(o, own[i]);
    if (!mt_json_get(o, "group"))
        cJSON_AddNumberToObject(o, "group", (double)prompt);
    cJSON_AddNumberToObject(o, "sample", (double)(t->number % w->p->samples));
    if (noisy)
        cJSON_AddNumberToObject(o, "noise", (double)w->variant);
    if (!w->p->ids_only)
        cli_add_text(o, "completion", t->added, t->n_added);
    cJSON_AddStringToObject(o, "finish_reason", of->finish == MT_FINISH_STOP ? "stop" : "length");
    mt_json_put(o, "truncated=%d, temperature=%f", of->finish == MT_FINISH_LENGTH, drawn);
    if (drawn > 0 && drawn != logprobs_temperature(w->p))
        cJSON_AddNumberToObject(o, "logprobs_temperature", logprobs_temperature(w->p));
    add_ids(o, "prompt_ids", of->prompt, of->n_prompt);
    add_ids(o, "completion_ids", of->ids, of->n);
    cJSON *logprobs = cJSON_AddArrayToObject(o, "logprobs");
    for (size_t i = 0; i < of->n; i++) {
        char number[32];
        snprintf(number, sizeof(number), "%.9g", (double)of->logprobs[i]);
        mt_json_append(logprobs, cJSON_CreateRaw(number));
    }
    MT_FREED char *text = mt_json_print(o, false);
    if (!text || !mt_json_complete())
        return mt_fail_nomem(err, "a text", t->n_added);
    if (!noisy)
        return put_line(w, text, err);
    w->line[t->number * w->n_variants + w->variant] = MT_GIVE(text);
    return 0;
}

/* Every variant of the weights has the same prompts and random numbers. */
static int write_variants(struct writer *w, struct cli_generation *p, struct mt_err *err)
{
    size_t n = p->n * p->samples;
    w->n_variants = mt_mezo_variants(&p->cfg->numerics.mezo);
    int rc = MT_NEW(&w->line, n * w->n_variants, "generated texts", err);
    for (; w->variant < w->n_variants && !rc; w->variant++) {
        mt_engine_perturb(p->session->engine, (uint64_t)p->noise, w->variant);
        rc = cli_generate(p, 0, write_text, w, err);
    }
    for (size_t i = 0; w->line && i < n * w->n_variants; i++) {
        rc = rc ?: put_line(w, w->line[i], err);
        free(w->line[i]);
    }
    free(w->line);
    return rc;
}

int cli_write_texts(struct cli_generation *p, const char *path, struct mt_err *err)
{
    struct writer w = {.p = p, .out = path ? fopen(path, "we") : stdout, .path = path ? path : "standard output"};
    if (!w.out)
        return mt_fail(err, MT_ERR_RUNTIME, -errno, "cannot write %s: %s", path, strerror(errno));
    int rc = p->noise >= 0 ? write_variants(&w, p, err) : cli_generate(p, 0, write_text, &w, err);
    if (path && fclose(w.out) && !rc)
        rc = mt_fail(err, MT_ERR_RUNTIME, -EIO, "cannot write %s: %s", path, strerror(errno));
    return rc;
}
