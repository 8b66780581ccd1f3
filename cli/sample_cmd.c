/* SPDX-License-Identifier: Apache-2.0 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/fs.h"
#include "base/log.h"
#include "base/mem.h"
#include "base/philox.h"
#include "base/strbuf.h"
#include "base/visible.h"
#include "checkpoint/checkpoint.h"
#include "cli.h"
#include "data/text.h"
#include "train/train.h"

struct candidate {
    float logit;
    uint32_t id;
};

struct sampling {
    struct mt_text_params text;
    struct mt_text_ids prompt;
    size_t n_new, top_k; /* top_k 0: all */
    double temperature, top_p;
    uint64_t seed;
};

/* The likeliest first; of equal ones that with the smaller id. */
static int compare(const void *a, const void *b)
{
    const struct candidate *x = a, *y = b;
    if (x->logit != y->logit)
        return x->logit < y->logit ? 1 : -1;
    return (x->id > y->id) - (x->id < y->id);
}

static double weight(const struct candidate *c, float best, double temperature)
{
    return exp((double)(c->logit - best) / temperature);
}

/* The fewest candidates, of the top_k likeliest, whose probability among these is top_p or more (Holtzman et al., 2020,
 * "The Curious Case of Neural Text Degeneration"). */
static size_t keep_likeliest(struct candidate *c, size_t n, const struct sampling *p)
{
    double sum = 0, at = 0;
    size_t kept = 0;
    qsort(c, n, sizeof(*c), compare);
    n = p->top_k ? MT_MIN(n, p->top_k) : n;
    for (size_t i = 0; i < n; i++)
        sum += weight(&c[i], c[0].logit, p->temperature);
    do
        at += weight(&c[kept++], c[0].logit, p->temperature);
    while (kept < n && at < p->top_p * sum);
    return kept;
}

/* A token drawn from softmax(logits / temperature); temperature 0: the likeliest. c: [n] scratch. */
static size_t draw(const float *logits, size_t n, const struct sampling *p, struct candidate *c, double u)
{
    size_t best = 0;
    double sum = 0, at = 0;
    for (size_t i = 0; i < n; i++) {
        c[i] = (struct candidate){logits[i], (uint32_t)i};
        best = logits[i] > logits[best] ? i : best;
    }
    if (p->temperature <= 0)
        return best;
    if (p->top_k || p->top_p < 1)
        n = keep_likeliest(c, n, p);
    for (size_t i = 0; i < n; i++)
        sum += weight(&c[i], logits[best], p->temperature);
    for (size_t i = 0; i < n; i++) {
        at += weight(&c[i], logits[best], p->temperature);
        if (at >= u * sum)
            return c[i].id;
    }
    return best;
}

static void print_piece(void *ctx, size_t sample, const char *text, size_t len, bool trained)
{
    (void)ctx;
    (void)sample;
    if (!trained)
        return;
    if (!isatty(STDOUT_FILENO)) {
        fwrite(text, 1, len, stdout);
        return;
    }
    struct mt_str safe = {0};
    mt_str_visible(&safe, text, len);
    fwrite(safe.p ? safe.p : "", 1, safe.len, stdout);
    mt_str_finish(&safe);
}

static bool ends_turn(const struct mt_hf_config *hf, const struct sampling *p, size_t id)
{
    if (p->text.bytes)
        return id >= 256;
    for (int i = 0; i < hf->n_eos; i++)
        if ((size_t)hf->eos[i] == id)
            return true;
    for (size_t i = 0; i < p->prompt.n_ends; i++)
        if (p->prompt.ends[i] == id)
            return true;
    return false;
}

/* Generates tokens after the prompt; with the byte tokenizer each is printed at once. */
static int draw_tokens(struct mt_session *s, const struct sampling *p, uint32_t *ids, size_t *n,
                       struct mt_batch *b, float *logits, struct mt_err *err)
{
    struct candidate *c = mt_calloc((size_t)s->setup->in->hf.vocab, sizeof(*c));
    const struct mt_hf_config *hf = &s->setup->in->hf;
    size_t vocab = p->text.bytes ? MT_BYTE_VOCAB : (size_t)hf->vocab, first = *n, end = *n + p->n_new;
    int64_t begin = mt_now_ns();
    size_t loaded = 0, runs = 0;
    char bytes[32];
    int rc = c ? 0 : mt_fail_nomem(err, "sampling", vocab * sizeof(*c));
    for (size_t i = 0; !rc && *n < end; i++) {
        mt_batch_clear(b);
        rc = mt_batch_add(b, ids, NULL, *n, 0, err);
        if (!rc)
            rc = mt_batch_seal(b, err);
        if (!rc)
            rc = mt_engine_logits(s->engine, b, logits, err);
        if (rc)
            break;
        runs++;
        loaded += mt_engine_loaded_bytes(s->engine);
        size_t id = draw(logits, vocab, p, c, mt_philox_uniform(p->seed, 0, i));
        if (ends_turn(hf, p, id))
            break;
        ids[(*n)++] = (uint32_t)id;
        if (p->text.bytes) {
            putchar((int)id);
            fflush(stdout);
        }
    }
    free(c);
    if (!rc && *n > first)
        mt_info("%zu tokens, %.3g seconds and %s loaded a token", *n - first,
                (double)(mt_now_ns() - begin) * 1e-9 / (double)(*n - first),
                mt_format_bytes(bytes, sizeof(bytes), loaded / runs));
    return rc;
}

static int continue_text(struct mt_session *s, const struct sampling *p, struct mt_err *err)
{
    struct mt_batch b;
    int64_t vocab = s->setup->in->hf.vocab;
    size_t n = p->prompt.n, max_len = n + p->n_new;
    uint32_t *ids = mt_calloc(max_len, sizeof(*ids));
    uint8_t *is_new = mt_calloc(max_len, 1);
    float *logits = mt_calloc((size_t)vocab, sizeof(*logits));
    int rc = mt_batch_init(&b, max_len, 1, err);
    if (!rc && (!ids || !logits || !is_new))
        rc = mt_fail_nomem(err, "sampling", (size_t)vocab * sizeof(*logits));
    for (size_t i = 0; !rc && i < n; i++)
        if (p->prompt.ids[i] >= (size_t)vocab)
            rc = mt_fail(err, MT_ERR_INPUT, -ERANGE,
                         "the prompt's token %u is beyond the model's vocab_size of %lld",
                         p->prompt.ids[i], (long long)vocab);
        else
            ids[i] = p->prompt.ids[i];
    if (!rc)
        rc = draw_tokens(s, p, ids, &n, &b, logits, err);
    if (!rc && !p->text.bytes) {
        memset(is_new + p->prompt.n, 1, n - p->prompt.n);
        rc = mt_text_decode(&p->text, &(struct mt_text_sample){ids, is_new, n}, 1, print_piece, NULL,
                            err);
    }
    putchar('\n');
    mt_batch_finish(&b);
    free(ids);
    free(is_new);
    free(logits);
    return rc;
}

/* Uses the model's own tokenizer if it has one, else bytes. */
static int encode_prompt(struct sampling *p, const char *model, const char *prompt, bool chat,
                         char **dir, struct mt_err *err)
{
    int rc = mt_hf_find_model(dir, model, err);
    p->text.model_dir = *dir;
    p->text.bytes = rc || !mt_text_has_tokenizer(*dir);
    if (!rc && p->text.bytes)
        mt_warn("%s has no tokenizer: using the bytes of the prompt as tokens", *dir);
    return rc ? rc : mt_text_encode(&p->text, prompt, chat, &p->prompt, err);
}

int cli_cmd_sample(struct cli *cli, const struct cli_args *args)
{
    const char *prompt = cli_arg(args, "prompt");
    bool chat = cli_arg(args, "chat") != NULL;
    struct mt_config *cfg = NULL;
    struct mt_inputs in = {0};
    struct mt_setup setup = {0};
    struct mt_session s = {0};
    struct mt_err err;
    char *dir = NULL, *input = NULL;
    size_t input_size = 0;
    struct sampling p = {.n_new = (size_t)cli_whole(args, "max-tokens", 128),
                         .top_k = (size_t)cli_whole(args, "top-k", 0),
                         .temperature = cli_real(args, "temperature", 0.8),
                         .top_p = cli_real(args, "top-p", 1),
                         .seed = (uint64_t)cli_whole(args, "seed", 0)};
    (void)cli;
    if (!cli_arg(args, "model") && !cli_arg(args, "adapter")) {
        fprintf(stderr, "megatrain sample: give --model or --adapter\n");
        return EXIT_USAGE;
    }
    if (chat && !prompt) {
        fprintf(stderr, "megatrain sample: --chat needs the user's turn: --prompt TEXT, or --prompt - for standard input\n");
        return EXIT_USAGE;
    }
    if (prompt && !strcmp(prompt, "-")) {
        ssize_t n = getdelim(&input, &input_size, 0, stdin);
        prompt = n >= 0 ? input : "";
        if (ferror(stdin) || (n > 0 && !input[n - 1])) {
            fprintf(stderr, "megatrain sample: standard input %s\n",
                    ferror(stdin) ? "cannot be read" : "has a zero byte: a prompt is text in UTF-8");
            free(input);
            return EXIT_USAGE;
        }
    }
    prompt = prompt ? prompt : "";
    if (mt_utf8_error(prompt) >= 0) {
        fprintf(stderr, "megatrain sample: byte %ld of --prompt is not UTF-8\n", mt_utf8_error(prompt) + 1);
        free(input);
        return EXIT_USAGE;
    }
    int rc = mt_config_load(&cfg, NULL, NULL, 0, &err);
    if (!rc)
        rc = cli_choose_model(cfg, args, &err);
    if (!rc)
        rc = encode_prompt(&p, cfg->model.path, prompt, chat, &dir, &err);
    if (!rc)
        rc = mt_inputs_open_model(&in, cfg, p.prompt.n + p.n_new, &err);
    if (!rc)
        rc = mt_setup_open(&setup, &in, MT_RUN_EVAL, &err);
    if (!rc && p.text.bytes && in.hf.vocab < MT_BYTE_VOCAB)
        rc = mt_fail(&err, MT_ERR_INPUT, -EINVAL, "%s: the byte tokenizer needs a vocabulary of %d",
                     cfg->model.path, MT_BYTE_VOCAB);
    if (!rc)
        rc = mt_session_start(&s, &setup, &err);
    if (!rc)
        rc = mt_session_fill_weights(&s, NULL, &err);
    if (!rc && !chat)
        fputs(prompt, stdout);
    if (!rc)
        rc = continue_text(&s, &p, &err);
    int code = rc ? cli_fail(&err) : 0;
    mt_session_finish(&s);
    mt_setup_finish(&setup);
    mt_inputs_finish(&in);
    mt_config_destroy(&cfg);
    mt_text_ids_finish(&p.prompt);
    free(dir);
    free(input);
    return code;
}
