/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "train/session.h"

/**
 * Texts that a model goes on with, token by token: several at a time share each pass through its weights, and the next
 * takes the place of one that ends. A token depends on its own text alone: on the weights, the tokens before it, and a
 * random number of (seed, the text's stream, the token's place).
 *
 * A pass computes what the cache lacks of each text: of a new one its prompt, in pieces if it is long, of others their
 * last token. Where all layers see all tokens, texts of one prompt (the same memory) that are under way share its
 * blocks, but for the last one, which each computes. Models of which a cache is not enough (mt_layout_caches()) compute
 * each text again in each pass.
 *
 * A pass may also compute tokens that are guessed: those that followed where the text's last few stood before (prompt
 * lookup decoding, Saxena 2023). A token is drawn after each; the guesses count up to the first that is not what was
 * drawn. So the tokens are those without guesses, in fewer passes. Not where layers have states of recurrences, from
 * which no token can be taken back.
 */

struct mt_gen_text;
struct mt_generation {
    size_t n_new, top_k;         /* tokens to add at most; of how many likeliest to draw, 0: all */
    double temperature;          /* 0: the likeliest */
    double top_p, min_p;         /* of the fewest likeliest with that probability; of those with that share of the
                                    likeliest's */
    uint64_t seed;
    size_t drawn_of;             /* ids below that are drawn; 0: all of the vocabulary */
    size_t ends_from;            /* ids from there on end a text, beside the model's own and the text's; 0: no others */
    size_t guesses;              /* tokens that are guessed of a text in a pass, at most */
    size_t look_every;           /* passes from one call of look() to the next; 0: it is not called */
    /** May set `finish` of texts under way. */
    int (*look)(void *ctx, struct mt_gen_text *const *texts, size_t n, struct mt_err *err);
    /** May be NULL. A token has been added; all of a text are, texts in their order. */
    void (*added)(void *ctx, const struct mt_gen_text *t);
    int (*done)(void *ctx, struct mt_gen_text *t, struct mt_err *err);
    void *ctx;
};

enum mt_finish { MT_FINISH_NOT, MT_FINISH_LENGTH, MT_FINISH_STOP };

struct mt_gen_text {
    const uint32_t *prompt, *ends; /* borrowed; ends: ids that end this text */
    size_t n_prompt, n_ends;
    uint64_t stream;   /* of random numbers */
    uint32_t *ids;     /* [n] what was added; owned */
    float *logprobs;   /* [n] of each, as `score` has them: at temperature 1, of all tokens; owned */
    size_t n;
    bool ended;        /* the last of them ends the text and is not part of it */
    enum mt_finish finish;
    size_t past, blocks, slot; /* while it is under way: its tokens that the cache has, and its blocks; its place */
    size_t row, rows;          /* of the pass under way: its first loss row; their number, one more than guesses */
    size_t guesses, pause;     /* of its next pass, at most; passes without guesses before that */
    size_t pauses;             /* the pause before */
    const struct mt_gen_text *of; /* the text that computes its prompt, for which it waits; NULL: itself */
};

struct mt_gen_stats {
    size_t passes, tokens, computed, loaded_bytes; /* tokens: drawn; computed: by the model */
    size_t guessed, right;                         /* tokens that were guessed; those that were drawn, too */
    double seconds;
};

/** Goes on with n texts, of which prompt and stream are set and the rest is 0; finish each, after an error, too. The
 * session's inputs were opened by mt_inputs_open_model() for the longest of them with n_new, or have that as
 * answer_len. */
int mt_generate(struct mt_session *s, const struct mt_generation *g, struct mt_gen_text *texts, size_t n,
                struct mt_gen_stats *stats, struct mt_err *err);
void mt_gen_text_finish(struct mt_gen_text *t);
