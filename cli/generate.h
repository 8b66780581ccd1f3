/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "cli.h"
#include "base/json.h"
#include "data/text.h"
#include "train/generate.h"

/* What `sample` and `generate` share: prompts, options, and the texts of tokens. */

enum { CLI_STOPS = 16 };

struct cli_generation {
    struct mt_generation g;
    struct mt_text_params text;
    const char *stop[CLI_STOPS]; /* a text ends before the first of these */
    size_t n_stops;
    const char *file;        /* of prompts, JSON lines; NULL: there is one, of the command line */
    bool chat, shows;        /* shows: prints each byte of a text as it is drawn */
    bool ids_only;           /* there is no tokenizer, and prompts need none: texts are not decoded */
    size_t at_once, samples; /* texts that share a pass, 0: the plan says; texts of a prompt */
    uint64_t *tokens;        /* of mt_texts */
    int64_t noise;           /* step of which each variant of the weights has all texts; -1: the weights as they are */
    cJSON *prompts;          /* array of records */
    const cJSON **record;    /* [n] of `prompts` */
    struct mt_text_ids *ids; /* [n] of the prompts */
    size_t n, longest;       /* longest: tokens of a prompt */
    char *model_dir;
    char *template_;         /* a checkpoint's chat template that the helper does not find itself */
    struct mt_config *cfg;
    struct mt_inputs in;
    struct mt_setup setup;
    struct mt_session own, *session;
    struct mt_gen_stats stats;
};

/** A text that has been generated, as text. */
struct cli_text {
    const struct mt_gen_text *of;
    size_t number;     /* of all texts: prompt number / samples */
    const char *added; /* without the stop string; UTF-8 but with the byte tokenizer */
    size_t n_added;    /* its bytes */
};

typedef int cli_text_fn(void *ctx, const struct cli_text *t, struct mt_err *err);

/** The options that both commands have; the defaults are the command's. */
int cli_generation_options(struct cli_generation *c, const struct cli_args *args, double temperature,
                           struct mt_err *err);
/** Reads the file's records into c->prompts, each with its place for messages. */
int cli_read_prompts(struct cli_generation *c, struct mt_err *err);
/** Finds the model of c->cfg, and encodes the prompts. */
int cli_encode_prompts(struct cli_generation *c, struct mt_err *err);
/** Texts of bytes: which ids are drawn and end one. */
int cli_draw_bytes(struct cli_generation *c, const struct mt_hf_config *hf, struct mt_err *err);
/** Opens the model for texts of up to max_len tokens; then loads its weights. */
int cli_generation_open(struct cli_generation *c, size_t max_len, struct mt_err *err);
int cli_generation_start(struct cli_generation *c, struct mt_err *err);
/** Goes on with c->samples texts of each prompt; `done` is called for each in order. c->stats are added to. stream: of
 * the first text. */
int cli_generate(struct cli_generation *c, uint64_t stream, cli_text_fn *done, void *ctx, struct mt_err *err);
/** The same, written to a file as lines of JSON: a prompt's record, and what was added. path NULL: standard output. */
int cli_write_texts(struct cli_generation *c, const char *path, struct mt_err *err);
/** What the passes cost. */
void cli_say_speed(const struct cli_generation *c);
/** What JSON can have of a text: bytes that are no UTF-8, or zero, are shown by number. */
void cli_add_text(cJSON *o, const char *name, const char *text, size_t len);
void cli_generation_finish(struct cli_generation *c);
