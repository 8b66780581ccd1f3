/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "data/text.h"
#include "train/session.h"

/* Texts that a model continues: several at a time share each pass through its weights. */

enum { CLI_STOPS = 16 };

struct cli_generation {
    struct mt_text_params text;
    size_t n_new, top_k; /* tokens to add at most; of how many likeliest to draw, 0: all */
    double temperature, top_p;
    uint64_t seed;
    const char *stop[CLI_STOPS]; /* a text ends before the first of these */
    size_t n_stops;
    bool shows; /* prints each byte of a text as it is drawn: with the byte tokenizer and without stop strings alone */
};

enum cli_finish { CLI_GOES_ON, CLI_LENGTH, CLI_STOP };

struct cli_text {
    const struct mt_text_ids *prompt;
    uint64_t stream; /* of random numbers, with the generation's seed */
    uint32_t *ids;   /* the prompt's and what was added */
    size_t n;
    char *added;     /* what was added, as text, without the stop string; UTF-8 but with the byte tokenizer */
    size_t n_added;  /* its bytes */
    enum cli_finish finish;
};

/** Continues n texts; each has prompt and stream set, the rest 0. Free what they get with cli_texts_finish(). */
int cli_generate(struct mt_session *s, const struct cli_generation *g, struct cli_text *texts, size_t n,
                 struct mt_err *err);
void cli_texts_finish(struct cli_text *texts, size_t n);
