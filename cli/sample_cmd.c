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

/* An index drawn from softmax(logits / temperature); temperature 0: the likeliest. */
static size_t draw(const float *logits, size_t n, double temperature, double u)
{
    size_t best = 0;
    double sum = 0, at = 0;
    for (size_t i = 1; i < n; i++)
        if (logits[i] > logits[best])
            best = i;
    if (temperature <= 0)
        return best;
    for (size_t i = 0; i < n; i++)
        sum += exp((double)(logits[i] - logits[best]) / temperature);
    for (size_t i = 0; i < n; i++) {
        at += exp((double)(logits[i] - logits[best]) / temperature);
        if (at >= u * sum)
            return i;
    }
    return best;
}

struct sampling {
    struct mt_text_params text;
    struct mt_text_ids prompt;
    size_t n_new;
    double temperature;
    uint64_t seed;
};

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
    const struct mt_hf_config *hf = &s->setup->in->hf;
    size_t vocab = p->text.bytes ? MT_BYTE_VOCAB : (size_t)hf->vocab, first = *n, end = *n + p->n_new;
    int64_t begin = mt_now_ns();
    size_t loaded = 0, runs = 0;
    char bytes[32];
    int rc = 0;
    for (size_t i = 0; *n < end; i++) {
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
        size_t id = draw(logits, vocab, p->temperature, mt_philox_uniform(p->seed, 0, i));
        if (ends_turn(hf, p, id))
            break;
        ids[(*n)++] = (uint32_t)id;
        if (p->text.bytes) {
            putchar((int)id);
            fflush(stdout);
        }
    }
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
    char *dir = NULL;
    struct sampling p = {.n_new = (size_t)cli_whole(args, "max-tokens", 128),
                         .temperature = cli_real(args, "temperature", 0.8),
                         .seed = (uint64_t)cli_whole(args, "seed", 0)};
    (void)cli;
    if (!cli_arg(args, "model") && !cli_arg(args, "adapter")) {
        fprintf(stderr, "megatrain sample: give --model or --adapter\n");
        return EXIT_USAGE;
    }
    prompt = prompt ? prompt : "";
    if (mt_utf8_error(prompt) >= 0) {
        fprintf(stderr, "megatrain sample: byte %ld of --prompt is not UTF-8\n", mt_utf8_error(prompt) + 1);
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
    return code;
}
