/* SPDX-License-Identifier: Apache-2.0 */
#include "generate.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/log.h"
#include "base/mem.h"
#include "base/philox.h"
#include "base/strbuf.h"
#include "data/dataset.h"

enum { LOOK_EVERY = 8 }; /* tokens between two looks for stop strings, for which texts are decoded by another process */

struct candidate {
    float logit;
    uint32_t id;
};

/* --- drawing -------------------------------------------------------------------------------------- */

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
static size_t keep_likeliest(struct candidate *c, size_t n, const struct cli_generation *g)
{
    double sum = 0, at = 0;
    size_t kept = 0;
    qsort(c, n, sizeof(*c), compare);
    n = g->top_k ? MT_MIN(n, g->top_k) : n;
    for (size_t i = 0; i < n; i++)
        sum += weight(&c[i], c[0].logit, g->temperature);
    do
        at += weight(&c[kept++], c[0].logit, g->temperature);
    while (kept < n && at < g->top_p * sum);
    return kept;
}

/* A token drawn from softmax(logits / temperature); temperature 0: the likeliest. c: [n] scratch. */
static size_t draw(const float *logits, size_t n, const struct cli_generation *g, struct candidate *c, double u)
{
    size_t best = 0;
    double sum = 0, at = 0;
    for (size_t i = 0; i < n; i++) {
        c[i] = (struct candidate){logits[i], (uint32_t)i};
        best = logits[i] > logits[best] ? i : best;
    }
    if (g->temperature <= 0)
        return best;
    if (g->top_k || g->top_p < 1)
        n = keep_likeliest(c, n, g);
    for (size_t i = 0; i < n; i++)
        sum += weight(&c[i], logits[best], g->temperature);
    for (size_t i = 0; i < n; i++) {
        at += weight(&c[i], logits[best], g->temperature);
        if (at >= u * sum)
            return c[i].id;
    }
    return best;
}

static bool ends_turn(const struct mt_hf_config *hf, const struct cli_generation *g, const struct cli_text *t,
                      size_t id)
{
    if (g->text.bytes)
        return id >= 256;
    for (int i = 0; i < hf->n_eos; i++)
        if ((size_t)hf->eos[i] == id)
            return true;
    for (size_t i = 0; i < t->prompt->n_ends; i++)
        if (t->prompt->ends[i] == id)
            return true;
    return false;
}

/* --- texts ---------------------------------------------------------------------------------------- */

/* What a generation needs besides its texts. */
struct generator {
    struct mt_session *s;
    const struct cli_generation *g;
    struct cli_text *text;
    size_t n;
    struct mt_batch *batch; /* [n] */
    size_t *of;             /* [n] text of each batch of the pass under way */
    float *logits;          /* [n, vocab] */
    int32_t *drawn;         /* [n], and their losses */
    float *losses;
    struct candidate *candidate; /* [vocab] */
    size_t vocab, longest, loaded, passes;
};

static void take_piece(void *ctx, size_t sample, const char *text, size_t len, bool added)
{
    struct mt_str *of = ctx;
    if (added)
        mt_str_append(&of[sample], text, len);
}

/* Decodes what was added to the texts and cuts each before its first stop string. */
static int decode(struct generator *x, struct mt_err *err)
{
    struct mt_str *added = mt_calloc(x->n, sizeof(*added));
    struct mt_text_sample *samples = mt_calloc(x->n, sizeof(*samples));
    uint8_t *is_new = mt_calloc(x->n, x->longest);
    int rc = added && samples && is_new ? 0 : mt_fail_nomem(err, "sampled texts", x->n * x->longest);
    for (size_t i = 0; i < x->n && !rc; i++) {
        struct cli_text *t = &x->text[i];
        memset(is_new + i * x->longest + t->prompt->n, 1, t->n - t->prompt->n);
        samples[i] = (struct mt_text_sample){t->ids, is_new + i * x->longest, t->n};
    }
    if (!rc)
        rc = mt_text_decode(&x->g->text, samples, x->n, take_piece, added, err);
    for (size_t i = 0; i < x->n && !rc; i++) {
        struct cli_text *t = &x->text[i];
        free(t->added);
        t->n_added = added[i].len;
        t->added = added[i].p;
        if (added[i].failed)
            rc = mt_fail_nomem(err, "sampled texts", x->longest);
        size_t whole = t->n_added;
        for (size_t k = 0; k < x->g->n_stops && t->added; k++) {
            const char *at = memmem(t->added, whole, x->g->stop[k], strlen(x->g->stop[k]));
            if (at && (size_t)(at - t->added) <= t->n_added) {
                t->n_added = (size_t)(at - t->added);
                t->finish = CLI_STOP;
            }
        }
    }
    free(added);
    free(samples);
    free(is_new);
    return rc;
}

/* On a thread of the device: the one row of each text. */
static void take_logits(void *ctx, size_t mb, size_t first, size_t n, float *logits, int32_t *ids)
{
    struct generator *x = ctx;
    (void)first;
    memcpy(x->logits + mb * x->vocab, logits, n * x->vocab * sizeof(*logits));
    ids[0] = 0;
}

/* A token more for each text that goes on. *over: none does. */
static int pass(struct generator *x, bool *over, struct mt_err *err)
{
    const struct mt_hf_config *hf = &x->s->setup->in->hf;
    size_t n = 0, drawn_of = x->g->text.bytes ? MT_BYTE_VOCAB : x->vocab;
    int rc = 0;
    for (size_t i = 0; i < x->n && !rc; i++) {
        struct cli_text *t = &x->text[i];
        if (t->finish != CLI_GOES_ON)
            continue;
        mt_batch_clear(&x->batch[n]);
        rc = mt_batch_go_on(&x->batch[n], 0, t->ids, t->n, true, err);
        if (!rc)
            rc = mt_batch_seal(&x->batch[n], err);
        x->of[n++] = i;
    }
    *over = !n;
    if (rc || !n)
        return rc;
    rc = mt_engine_draw(x->s->engine, x->batch, n, &(struct mt_draw){take_logits, x}, x->drawn, x->losses, err);
    x->passes++;
    x->loaded += mt_engine_loaded_bytes(x->s->engine);
    for (size_t i = 0; i < n && !rc; i++) {
        struct cli_text *t = &x->text[x->of[i]];
        size_t at = t->n - t->prompt->n;
        double u = mt_philox_uniform(x->g->seed, t->stream, at);
        size_t id = draw(x->logits + i * x->vocab, drawn_of, x->g, x->candidate, u);
        if (!isfinite(x->logits[i * x->vocab + id]))
            return mt_fail(err, MT_ERR_TRAINING, -EDOM, "logits of text %zu are not finite: the model's weights, or values that it "
                           "computes of this text, are too large (megatrain verify says whether its files are whole)", x->of[i]);
        if (ends_turn(hf, x->g, t, id)) {
            t->finish = CLI_STOP;
            continue;
        }
        t->ids[t->n++] = (uint32_t)id;
        if (at + 1 == x->g->n_new)
            t->finish = CLI_LENGTH;
        if (x->g->shows) {
            putchar((int)id);
            fflush(stdout);
        }
    }
    return rc;
}

static int begin(struct generator *x, struct mt_err *err)
{
    size_t rows = x->n * x->vocab;
    for (size_t i = 0; i < x->n; i++)
        x->longest = MT_MAX(x->longest, x->text[i].prompt->n + x->g->n_new);
    x->batch = mt_calloc(x->n, sizeof(*x->batch));
    x->of = mt_calloc(x->n, sizeof(*x->of));
    x->logits = mt_calloc(rows, sizeof(*x->logits));
    x->drawn = mt_calloc(x->n, sizeof(*x->drawn));
    x->losses = mt_calloc(x->n, sizeof(*x->losses));
    x->candidate = mt_calloc(x->vocab, sizeof(*x->candidate));
    int rc = x->batch && x->of && x->logits && x->candidate ? 0 : mt_fail_nomem(err, "sampling", rows * sizeof(float));
    for (size_t i = 0; i < x->n && !rc; i++) {
        struct cli_text *t = &x->text[i];
        t->ids = mt_calloc(x->longest + 1, sizeof(*t->ids));
        rc = t->ids ? mt_batch_init(&x->batch[i], x->longest, 1, err) : mt_fail_nomem(err, "sampling", x->longest);
        for (t->n = 0; t->n < t->prompt->n && !rc; t->n++) {
            t->ids[t->n] = t->prompt->ids[t->n];
            if (t->ids[t->n] >= x->vocab)
                rc = mt_fail(err, MT_ERR_INPUT, -ERANGE, "the prompt's token %u is beyond the model's vocab_size of %zu",
                             t->ids[t->n], x->vocab);
        }
        t->finish = x->g->n_new ? CLI_GOES_ON : CLI_LENGTH;
    }
    return rc;
}

static void say_speed(const struct generator *x, int64_t began)
{
    size_t tokens = 0;
    char bytes[32];
    for (size_t i = 0; i < x->n; i++)
        tokens += x->text[i].n - x->text[i].prompt->n;
    if (tokens)
        mt_info("%zu tokens, %.3g seconds and %s loaded a token", tokens,
                mt_seconds_since(began) / (double)tokens,
                mt_format_bytes(bytes, sizeof(bytes), x->loaded / (x->n > 1 ? tokens : x->passes)));
}

int cli_generate(struct mt_session *s, const struct cli_generation *g, struct cli_text *texts, size_t n,
                 struct mt_err *err)
{
    struct generator x = {.s = s, .g = g, .text = texts, .n = n, .vocab = (size_t)s->setup->in->hf.vocab};
    int64_t began = mt_now_ns();
    bool over = false;
    int rc = begin(&x, err);
    for (size_t i = 1; !rc && !over; i++) {
        rc = pass(&x, &over, err);
        if (!rc && g->n_stops && (g->text.bytes || i % LOOK_EVERY == 0))
            rc = decode(&x, err);
    }
    if (g->shows) { /* what follows is said below the text */
        putchar('\n');
        fflush(stdout);
    }
    if (!rc)
        say_speed(&x, began);
    if (!rc && !g->shows)
        rc = decode(&x, err);
    for (size_t i = 0; x.batch && i < n; i++)
        mt_batch_finish(&x.batch[i]);
    free(x.batch);
    free(x.of);
    free(x.logits);
    free(x.drawn);
    free(x.losses);
    free(x.candidate);
    return rc;
}

void cli_texts_finish(struct cli_text *texts, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        free(texts[i].ids);
        free(texts[i].added);
    }
}
