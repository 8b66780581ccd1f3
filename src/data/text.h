/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <cjson/cJSON.h>

#include "base/err.h"

/** Which tokenizer: bytes, or a model's own through the data helper. */
struct mt_text_params {
    bool bytes;
    const char *model_dir; /* folder of the tokenizer and the chat template */
    const char *template_; /* NULL: the model's */
};

/** Does the folder have a tokenizer that the data helper reads: tokenizer.json, tekken.json or tiktoken.model? */
bool mt_text_has_tokenizer(const char *model_dir);

struct mt_text_sample {
    const uint32_t *ids;
    const uint8_t *trained; /* one byte per token; NULL: none is trained */
    size_t n;
};

/** Called for each run of trained or untrained tokens, in order; text is UTF-8, except with the byte tokenizer. */
typedef void (*mt_text_piece_fn)(void *ctx, size_t sample, const char *text, size_t len, bool trained);

/** Decodes samples to text. Special tokens are shown by name. */
int mt_text_decode(const struct mt_text_params *p, const struct mt_text_sample *samples, size_t n,
                   mt_text_piece_fn fn, void *ctx, struct mt_err *err);

struct mt_text_ids {
    uint32_t *ids, *ends; /* ends: tokens of the tokenizer that end a turn */
    size_t n, n_ends;
};

/**
 * Token ids of n prompts for the model to continue, each an object: {"prompt": TEXT}, or {"messages": [...]} as in training
 * data, with "place" (file:line) for messages. `chat`: a text is the user's turn. A conversation is followed by the header
 * of an answer. out[n]: finish each; after an error, too.
 */
int mt_text_encode(const struct mt_text_params *p, const cJSON *prompts, bool chat, struct mt_text_ids *out,
                   struct mt_err *err);
void mt_text_ids_finish(struct mt_text_ids *t);
