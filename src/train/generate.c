/* SPDX-License-Identifier: Apache-2.0 */
#include "train/generate.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/mem.h"
#include "base/pool.h"
#include "train/draw.h"

/* LEAST, MOST: tokens that must stand elsewhere for a guess, and that are compared. FIRST: guesses of a text at first.
 * ROOM: rows of a pass up to which texts that go on have guesses. LONGEST_PAUSE: passes without a guess of a text whose
 * guesses are wrong. */
enum { LEAST = 2, MOST = 8, FIRST = 3, ROOM = 64, LONGEST_PAUSE = 31 };

/* Rows to draw from: their texts, and the first one's number. */
struct drawing_job {
    struct mt_gen_text *const *text;
    size_t first;
    float *logits;
    int32_t *ids;
};

/* What a generation needs besides its texts. */
struct generator {
    struct mt_session *s;
    const struct mt_generation *g;
    const struct mt_cache_shape *cache;
    struct mt_gen_text *text;
    size_t n, next, said;     /* texts; the next to begin, and the next to hand over */
    size_t slots, tokens;     /* texts under way at most; tokens of a pass at most */
    struct mt_arrays arrays;  /* what follows, but the texts' own */
    struct mt_gen_text **at;  /* [slots] NULL: free */
    struct mt_gen_text **row; /* [rows] text of each loss row of the pass under way */
    size_t guesses;           /* of a text in a pass at most */
    struct mt_batch *batch;   /* with a cache one, else [slots] */
    int32_t *table[MT_N_CACHE_KINDS]; /* [slots, cache.ld] blocks of each place */
    int32_t *free_block;      /* [n_free] */
    size_t n_free, promised;  /* promised: of these, what texts under way may still need */
    uint32_t *users;          /* of each block */
    bool shares;              /* prompts' blocks */
    int32_t *ids;             /* [rows] drawn, and their losses */
    float *loss;
    struct mt_drawing *draw; /* [threads] */
    mt_pool *pool;           /* rows are drawn side by side */
    const struct drawing_job *drawing;
    struct mt_gen_stats stats;
};

static size_t length_of(const struct mt_gen_text *t)
{
    return t->n_prompt + t->n;
}

static size_t blocks_for(const struct generator *x, size_t tokens)
{
    return x->cache->slots ? mt_div_up(tokens, x->cache->block) : 0;
}

/* Blocks that the text may still need, of those of layers without a window. */
static size_t needs(const struct generator *x, const struct mt_gen_text *t)
{
    return blocks_for(x, t->n_prompt + x->g->n_new) - t->blocks;
}

/* --- places and blocks ------------------------------------------------------------------------------ */

static int32_t *table_of(const struct generator *x, const struct mt_gen_text *t)
{
    return x->table[MT_CACHE_ALL] + t->slot * x->cache->ld[MT_CACHE_ALL];
}

static void leave(struct generator *x, struct mt_gen_text *t)
{
    x->promised -= needs(x, t);
    for (size_t i = t->blocks; i-- > 0;)
        if (!--x->users[table_of(x, t)[i]])
            x->free_block[x->n_free++] = table_of(x, t)[i];
    x->at[t->slot] = NULL;
}

/* Whole blocks before the prompt's last token, from which the next one is drawn. */
static size_t shared_blocks(const struct generator *x, const struct mt_gen_text *t)
{
    return x->shares ? (t->n_prompt - 1) / x->cache->block : 0;
}

/* A text under way that has or computes the same prompt. */
static const struct mt_gen_text *with_prompt(const struct generator *x, const struct mt_gen_text *t)
{
    for (size_t i = 0; i < x->slots && shared_blocks(x, t); i++)
        if (x->at[i] && !x->at[i]->of && x->at[i]->prompt == t->prompt && x->at[i]->n_prompt == t->n_prompt)
            return x->at[i];
    return NULL;
}

/* Texts that wait for a prompt that has been computed take its blocks. */
static void share_prompts(struct generator *x)
{
    for (size_t k = 0; k < x->slots; k++) {
        struct mt_gen_text *t = x->at[k];
        if (!t || !t->of || t->of->past < t->n_prompt)
            continue;
        size_t n = shared_blocks(x, t);
        for (size_t i = 0; i < n; i++)
            x->users[table_of(x, t)[i] = table_of(x, t->of)[i]]++;
        t->past = n * x->cache->block;
        t->blocks = n;
        t->of = NULL;
        x->promised -= n;
    }
}

/* Free places are taken by the next texts, in their order, while there are blocks for all of each. */
static int begin_texts(struct generator *x, struct mt_err *err)
{
    for (size_t slot = 0; slot < x->slots && x->next < x->n; slot++) {
        struct mt_gen_text *t = &x->text[x->next];
        if (x->at[slot] || x->n_free < x->promised + needs(x, t))
            continue;
        t->finish = x->g->n_new ? MT_FINISH_NOT : MT_FINISH_LENGTH;
        t->ids = mt_calloc(x->g->n_new + 1, sizeof(*t->ids));
        t->logprobs = mt_calloc(x->g->n_new + 1, sizeof(*t->logprobs));
        if (!t->ids || !t->logprobs)
            return mt_fail_nomem(err, "a text", x->g->n_new * sizeof(*t->ids));
        t->of = with_prompt(x, t);
        t->guesses = MT_MIN(x->guesses, (size_t)FIRST);
        x->at[t->slot = slot] = t;
        x->promised += needs(x, t);
        x->next++;
    }
    return 0;
}

/* Blocks for the next k tokens of a text. */
static void take_blocks(struct generator *x, struct mt_gen_text *t, size_t k)
{
    for (; t->blocks < blocks_for(x, t->past + k); x->promised--)
        x->users[table_of(x, t)[t->blocks++] = x->free_block[--x->n_free]] = 1;
}

/* --- a pass ----------------------------------------------------------------------------------------- */

/* Token i of the text. */
static uint32_t token_of(const struct mt_gen_text *t, size_t i)
{
    return i < t->n_prompt ? t->prompt[i] : t->ids[i - t->n_prompt];
}

/* Fills `next` with up to n tokens that may follow: those behind the latest of the places where most of the text's last
 * tokens stood before. Returns their number. */
static size_t guess(const struct mt_gen_text *t, size_t n, uint32_t *next)
{
    size_t len = length_of(t), best = 0, at = 0;
    for (size_t end = len - 1; end > 0 && best < MOST; end--) {
        size_t same = 0;
        while (same < MT_MIN(end, (size_t)MOST) && token_of(t, end - 1 - same) == token_of(t, len - 1 - same))
            same++;
        at = same > best ? end : at;
        best = MT_MAX(same, best);
    }
    for (size_t i = 0; i < n; i++) /* where a text repeats itself, guesses go on with guesses */
        next[i] = at + i < len ? token_of(t, at + i) : next[at + i - len];
    return best < LEAST ? 0 : n;
}

/* The next k tokens of a text, to the batch, and up to `guesses` more if its next token is to be drawn; *rows counts
 * those to be drawn. */
static int add_tokens(struct generator *x, struct mt_gen_text *t, struct mt_batch *b, size_t k, size_t guesses,
                      size_t *rows, struct mt_err *err)
{
    MT_FREED uint32_t *ids = mt_calloc(k + guesses, sizeof(*ids));
    bool next = t->past + k == length_of(t);
    if (!ids)
        return mt_fail_nomem(err, "a pass", (k + guesses) * sizeof(*ids));
    for (size_t i = 0; i < k; i++)
        ids[i] = token_of(t, t->past + i);
    guesses = next && guesses ? guess(t, guesses, ids + k) : 0;
    t->row = *rows;
    t->rows = next ? 1 + guesses : 0;
    int rc = mt_batch_go_on(b, t->past, ids, k + guesses, t->rows, err);
    if (rc)
        return rc;
    for (size_t i = 0; i < t->rows; i++)
        x->row[(*rows)++] = t;
    if (!x->cache->slots)
        return 0;
    take_blocks(x, t, k + guesses);
    for (int i = 0; i < MT_N_CACHE_KINDS; i++) {
        size_t ld = x->cache->ld[i];
        memcpy(b->table[i] + (b->n_docs - 1) * ld, x->table[i] + t->slot * ld, ld * sizeof(int32_t));
    }
    t->past += k;
    return 0;
}

static bool goes_on(const struct mt_gen_text *t)
{
    return t && !t->of && length_of(t) - t->past == 1;
}

/* Guesses of a text that goes on, if n do. */
static size_t guesses_of(const struct generator *x, struct mt_gen_text *t, size_t n)
{
    size_t room = MT_MIN(x->tokens, (size_t)ROOM);
    if (t->pause) {
        t->pause--;
        return 0;
    }
    return MT_MIN(MT_MIN(t->guesses, x->g->n_new - t->n - 1), (room > n ? room - n : 0) / n);
}

/* Those that need one token come first, so that prompts delay none of them. */
static int fill_cached(struct generator *x, size_t *rows, struct mt_err *err)
{
    struct mt_batch *b = x->batch;
    size_t n = 0;
    int rc = 0;
    mt_batch_clear(b);
    for (size_t i = 0; i < x->slots; i++)
        n += goes_on(x->at[i]);
    for (int lone = 1; lone >= 0; lone--)
        for (size_t i = 0; i < x->slots && !rc; i++) {
            struct mt_gen_text *t = x->at[i];
            size_t left = t && !t->of ? length_of(t) - t->past : 0, room = x->tokens - b->n_tokens;
            size_t k = MT_MIN(MT_MIN(left, x->cache->piece), room);
            if (k && (left == 1) == lone)
                rc = add_tokens(x, t, b, k, lone ? guesses_of(x, t, n) : 0, rows, err);
        }
    mt_batch_seal(b);
    return rc;
}

static int fill_whole(struct generator *x, size_t *rows, struct mt_err *err)
{
    int rc = 0;
    for (size_t i = 0; i < x->slots && !rc; i++) {
        struct mt_batch *b = &x->batch[*rows];
        if (!x->at[i])
            continue;
        mt_batch_clear(b);
        rc = add_tokens(x, x->at[i], b, length_of(x->at[i]), 0, rows, err);
        mt_batch_seal(b);
    }
    return rc;
}

static void draw_row(void *ctx, size_t i, int thread)
{
    const struct generator *x = ctx;
    const struct drawing_job *j = x->drawing;
    const struct mt_hf_config *hf = &x->s->setup->in->hf;
    float *row = j->logits + i * x->draw->vocab;
    for (int k = 0; k < hf->n_input_tokens; k++) /* they stand for an image, video or sound */
        row[hf->input_token[k]] = -INFINITY;
    const struct mt_gen_text *t = j->text[i];
    j->ids[i] = (int32_t)mt_draw_token(&x->draw[thread], row, t->stream, t->n + j->first + i - t->row);
}

/* On a thread of the device. */
static void draw_rows(void *ctx, size_t mb, size_t first, size_t n, float *logits, int32_t *ids)
{
    struct generator *x = ctx;
    first += x->cache->slots ? 0 : mb;
    const struct drawing_job j = {x->row + first, first, logits, ids};
    x->drawing = &j;
    mt_pool_run(x->pool, draw_row, x, n);
}

static bool ends(const struct generator *x, const struct mt_gen_text *t, uint32_t id)
{
    const struct mt_hf_config *hf = &x->s->setup->in->hf;
    bool is_end = x->g->ends_from && id >= x->g->ends_from;
    for (int i = 0; i < hf->n_eos && !x->g->ends_from; i++)
        is_end |= (uint32_t)hf->eos[i] == id;
    for (size_t i = 0; i < t->n_ends; i++)
        is_end |= t->ends[i] == id;
    return is_end;
}

static void add_drawn(struct generator *x, struct mt_gen_text *t, uint32_t id, float logprob)
{
    t->ids[t->n] = id;
    t->logprobs[t->n++] = logprob;
    x->stats.tokens++;
    t->ended = ends(x, t, id);
    if (t->ended)
        t->finish = MT_FINISH_STOP;
    else if (t->n == x->g->n_new)
        t->finish = MT_FINISH_LENGTH;
    if (x->g->added && !t->ended)
        x->g->added(x->g->ctx, t);
}

/* The tokens that were drawn after the last one and after guesses that are right. */
static int add_all_drawn(struct generator *x, struct mt_gen_text *t, struct mt_err *err)
{
    size_t right = 0, n = t->rows - 1;
    for (size_t r = t->row; r <= t->row + n && !t->finish; r++) {
        if (!isfinite(x->loss[r]))
            return mt_fail(err, MT_ERR_TRAINING, -EDOM, "logits of text %zu are not finite: the model's weights, or values that it "
                           "computes of this text, are too large (megatrain verify says whether its files are whole)",
                           (size_t)(t - x->text));
        add_drawn(x, t, (uint32_t)x->ids[r], -x->loss[r]);
        if (r == t->row + n || x->ids[r] != x->batch->ids[x->batch->loss_rows[r] + 1])
            break;
        right++;
    }
    t->past += right;
    x->stats.guessed += n;
    x->stats.right += right;
    if (n) { /* more after guesses that are right, fewer and less often after others */
        t->guesses = MT_MIN(right == n ? 2 * n + 1 : right + 1, x->guesses);
        t->pause = t->pauses = right ? 0 : MT_MIN(2 * t->pauses + 1, (size_t)LONGEST_PAUSE);
    }
    return 0;
}

static int pass(struct generator *x, struct mt_err *err)
{
    const struct mt_draw draw = {draw_rows, x};
    size_t rows = 0;
    int rc = x->cache->slots ? fill_cached(x, &rows, err) : fill_whole(x, &rows, err);
    rc = rc ?: mt_engine_draw(x->s->engine, x->batch, x->cache->slots ? 1 : rows, &draw, x->ids, x->loss, err);
    x->stats.passes++;
    for (size_t i = 0; i < (x->cache->slots ? 1 : rows); i++)
        x->stats.computed += x->batch[i].n_tokens;
    x->stats.loaded_bytes += mt_engine_loaded_bytes(x->s->engine);
    for (size_t i = 0; i < rows && !rc; i += x->row[i]->rows)
        rc = add_all_drawn(x, x->row[i], err);
    return rc;
}

/* --- all texts ---------------------------------------------------------------------------------------- */

static int look(struct generator *x, struct mt_err *err)
{
    size_t n = 0;
    if (!x->g->look_every || x->stats.passes % x->g->look_every)
        return 0;
    for (size_t i = 0; i < x->slots; i++)
        if (x->at[i] && x->at[i]->n)
            x->row[n++] = x->at[i];
    return n ? x->g->look(x->g->ctx, x->row, n, err) : 0;
}

/* Texts that have ended leave their places, and are handed over in their order. */
static int end_texts(struct generator *x, struct mt_err *err)
{
    int rc = 0;
    share_prompts(x);
    for (size_t i = 0; i < x->slots; i++)
        if (x->at[i] && x->at[i]->finish)
            leave(x, x->at[i]);
    for (; x->said < x->next && x->text[x->said].finish && !rc; x->said++)
        rc = x->g->done ? x->g->done(x->g->ctx, &x->text[x->said], err) : 0;
    return rc;
}

static int begin(struct generator *x, struct mt_err *err)
{
    const struct mt_cache_shape *c = x->cache;
    size_t batches = c->slots ? 1 : x->slots, rows = x->slots + ROOM, longest = 0;
    for (size_t i = 0; i < x->n; i++)
        longest = MT_MAX(longest, x->text[i].n_prompt + x->g->n_new);
    x->at = mt_arrays_add(&x->arrays, x->slots, sizeof(*x->at));
    x->row = mt_arrays_add(&x->arrays, rows, sizeof(*x->row));
    x->ids = mt_arrays_add(&x->arrays, rows, sizeof(*x->ids));
    x->loss = mt_arrays_add(&x->arrays, rows, sizeof(*x->loss));
    x->batch = mt_arrays_add(&x->arrays, batches, sizeof(*x->batch));
    x->free_block = mt_arrays_add(&x->arrays, c->n[0] + 1, sizeof(*x->free_block));
    x->users = mt_arrays_add(&x->arrays, c->n[0] + 1, sizeof(*x->users));
    x->shares = c->slots > 1;
    x->guesses = x->g->guesses;
    for (size_t u = 0; u < x->s->setup->in->layout->n_units; u++) {
        enum mt_cache_kind kind = mt_unit_cache(x->s->setup->in->layout, u, MT_F32, 1).kind;
        x->shares &= kind == MT_CACHE_ALL;
        x->guesses = kind == MT_CACHE_STATES ? 0 : x->guesses;
    }
    for (int k = 0; k < MT_N_CACHE_KINDS; k++)
        x->table[k] = mt_arrays_add(&x->arrays, x->slots * c->ld[k] + 1, sizeof(int32_t));
    if (x->arrays.failed)
        return mt_fail_nomem(err, "a generation", x->slots * sizeof(*x->batch));
    for (int k = MT_CACHE_WINDOW; k < MT_N_CACHE_KINDS; k++)
        for (size_t i = 0; i < x->slots * c->ld[k]; i++) /* each place's own */
            x->table[k][i] = (int32_t)i;
    for (x->n_free = 0; x->n_free < c->n[0]; x->n_free++) /* the first are taken first */
        x->free_block[x->n_free] = (int32_t)(c->n[0] - 1 - x->n_free);
    for (size_t i = 0; i < x->n; i++)
        for (size_t k = 0; k < x->text[i].n_prompt; k++)
            if (x->text[i].prompt[k] >= (uint32_t)x->s->setup->in->hf.vocab)
                return mt_fail(err, MT_ERR_INPUT, -ERANGE, "token %u of prompt %zu is beyond the model's vocab_size of %lld",
                               x->text[i].prompt[k], i, (long long)x->s->setup->in->hf.vocab);
    int threads = (int)x->s->setup->choice.placement.threads;
    int rc = mt_pool_create(&x->pool, &(struct mt_pool_params){.name = "mt-draw", .n_threads = threads}, err);
    x->draw = rc ? NULL : mt_arrays_add(&x->arrays, (size_t)threads, sizeof(*x->draw));
    if (!rc && !x->draw)
        rc = mt_fail_nomem(err, "drawing tokens", (size_t)threads * sizeof(*x->draw));
    for (int i = 0; i < threads && !rc; i++)
        rc = mt_drawing_init(&x->draw[i], x->g, (size_t)x->s->setup->in->hf.vocab, err);
    for (size_t i = 0; i < batches && !rc; i++)
        rc = mt_batch_init(&x->batch[i], c->slots ? x->tokens : longest, c->slots ? x->slots : 1, err);
    return rc || !c->slots ? rc : mt_batch_init_cache(x->batch, c, err);
}

static void finish(struct generator *x)
{
    for (size_t i = 0; x->batch && i < (x->cache->slots ? 1 : x->slots); i++)
        mt_batch_finish(&x->batch[i]);
    for (int i = 0; x->draw && i < mt_pool_n_threads(x->pool); i++)
        mt_drawing_finish(&x->draw[i]);
    mt_arrays_finish(&x->arrays);
    mt_pool_destroy(&x->pool);
}

int mt_generate(struct mt_session *s, const struct mt_generation *g, struct mt_gen_text *texts, size_t n,
                struct mt_gen_stats *stats, struct mt_err *err)
{
    const struct mt_plan_request *r = &s->setup->request;
    struct generator x = {.s = s, .g = g, .cache = &r->cache, .text = texts, .n = n, .tokens = r->draws,
                          .slots = r->cache.slots ? r->cache.slots : mt_engine_max_micro(s->engine)};
    int64_t began = mt_now_ns();
    int rc = begin(&x, err);
    while (!rc && x.said < n) {
        rc = begin_texts(&x, err);
        share_prompts(&x);
        if (!rc && g->n_new)
            rc = pass(&x, err);
        rc = rc ?: look(&x, err)
                ?: end_texts(&x, err);
    }
    x.stats.seconds = mt_seconds_since(began);
    finish(&x);
    *stats = x.stats;
    return rc;
}

void mt_gen_text_finish(struct mt_gen_text *t)
{
    free(t->ids);
    free(t->logprobs);
    t->ids = NULL;
    t->logprobs = NULL;
}
