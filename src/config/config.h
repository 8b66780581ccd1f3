/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "base/err.h"
#include "base/packed.h"
#include "base/strbuf.h"
#include "settings/settings.h"

/* Values of choice keys, in the order of the schema's choice lists (schema.c). */
enum mt_cfg_init { MT_INIT_WEIGHTS, MT_INIT_RANDOM };
enum mt_cfg_format {
    MT_FORMAT_AUTO,
    MT_FORMAT_MESSAGES,
    MT_FORMAT_SHAREGPT,
    MT_FORMAT_ALPACA,
    MT_FORMAT_PROMPT_COMPLETION,
    MT_FORMAT_TEXT,
    MT_FORMAT_INPUT_IDS,
    MT_FORMAT_PREFERENCE,
    MT_FORMAT_RATED,
    MT_FORMAT_REQUESTS,
    MT_FORMAT_ROLLOUTS,
};
#define MT_FORMAT_NAMES \
    "auto|messages|sharegpt|alpaca|prompt_completion|text|input_ids|preference|rated|requests|rollouts"
#define MT_TRAIN_ON_NAMES "assistant|last|all"
enum mt_cfg_train_on { MT_TRAIN_ON_ASSISTANT, MT_TRAIN_ON_LAST, MT_TRAIN_ON_ALL };
enum mt_cfg_overlong { MT_OVERLONG_ERROR, MT_OVERLONG_TRUNCATE, MT_OVERLONG_DROP, MT_OVERLONG_SPLIT };
/** Frozen tensors in full checkpoints: named by file and checksum, or copied. */
enum mt_cfg_frozen { MT_FROZEN_NAME, MT_FROZEN_COPY };
enum mt_cfg_block_order { MT_BLOCKS_RANDOM, MT_BLOCKS_ASCENDING, MT_BLOCKS_DESCENDING };
enum mt_cfg_sft_tokens { MT_SFT_ANSWER, MT_SFT_ALL };
enum mt_cfg_save { MT_SAVE_FULL, MT_SAVE_WEIGHTS };
enum mt_cfg_on_signal { MT_ON_SIGNAL_FULL, MT_ON_SIGNAL_WEIGHTS, MT_ON_SIGNAL_NONE };
enum mt_cfg_progress { MT_PROGRESS_AUTO, MT_PROGRESS_ON, MT_PROGRESS_OFF };
enum mt_cfg_adapter { MT_ADAPTER_NONE, MT_ADAPTER_LORA, MT_ADAPTER_DORA };
enum mt_cfg_device { MT_DEVICE_AUTO, MT_DEVICE_CUDA, MT_DEVICE_CPU };

/** A comma-separated list; items are owned by the config. */
struct mt_cfg_list {
    char **items;
    int n;
};

/** "64", or "3%" (then `is_ratio`, and `ratio` is 0.03). */
struct mt_cfg_amount {
    bool is_ratio;
    double ratio;
    int64_t count;
};

/** "500" steps, or "30m" (then `is_time`, in seconds). 0 = never. */
struct mt_cfg_interval {
    bool is_time;
    int64_t steps;
    double seconds;
};

enum { MT_EVAL_SETS = 16 };

/**
 * A whole configuration, typed. Strings and lists are owned by the config and never NULL; a key that
 * is unset is "" or 0. Units: bytes, seconds, tokens. The settings of a step are in `numerics` and `placement`,
 * whatever the sections of their keys.
 */
struct mt_config {
    struct mt_numerics numerics;   /* rows_per_step is not a key: 0 */
    struct mt_placement placement;
    struct {
        char *path;
        enum mt_cfg_init init;
        enum mt_packed base_dtype; /* MT_PACKED_NONE: auto */
        struct mt_cfg_list freeze;
        int64_t share_layers;
    } model;
    struct {
        enum mt_cfg_adapter kind;
        int64_t rank;
        double alpha;
        bool rslora;
        struct mt_cfg_list targets, rank_pattern, alpha_pattern, train_also;
        double lr_ratio_b, dropout;
        char *path;
        enum mt_merge_aware merge_aware;
        enum mt_merge_scale merge_scale;
        int64_t merge_every, merge_warmup; /* steps, 0: never; updates */
    } adapter;
    struct {
        struct mt_cfg_list train; /* files and globs, "path:weight" not yet split */
        char *eval;               /* file, "N" samples or "2%" */
        struct mt_cfg_list columns; /* "field:column" */
        int64_t max_samples;        /* of each file; 0: all */
        enum mt_cfg_format format;
        char *tokenizer; /* "model" or "byte" */
        char *template_; /* key "template" */
        enum mt_cfg_train_on train_on;
        bool packing;
        enum mt_cfg_overlong overlong;
        struct mt_cfg_amount max_untrained;
        bool shuffle;
        char *cache_dir;
    } data;
    struct {
        int64_t steps; /* exactly one of steps, epochs, tokens is > 0 */
        double epochs;
        int64_t tokens;
        int64_t tokens_per_step; /* exactly one of this and batch_size is > 0 */
        int64_t batch_size;
        double learning_rate; /* or MT_AUTO */
        enum mt_lr_schedule schedule;
        struct mt_cfg_amount warmup, decay;
        double min_lr_ratio;
        char *objective; /* "cross_entropy" */
        int64_t seed;
        int64_t max_skips;
        char *blocks; /* "off", "layers" or a number: config/blocks.h */
        int64_t block_steps;
        int64_t delink_at; /* a step; 0: none */
        enum mt_cfg_block_order block_order;
        struct mt_cfg_list blocks_always;
    } train;
    struct {
        char *type; /* "adamw" */
        struct mt_cfg_list matrices;
    } optimizer;
    struct {
        char *loss; /* "off", or an objective */
        enum mt_cfg_sft_tokens sft_tokens;
        char *reference; /* "start", a folder or a file */
    } preference;
    struct {
        char *loss; /* "off", or an objective */
        char *prompts, *rollouts, *reward; /* a file; commands or what is built in; "": none */
        int64_t samples, prompts_per_round, steps_per_round, refill;
        double reward_seconds;
    } policy;
    struct {
        char *teacher; /* a file of score --top; "" */
    } distill;
    struct {
        struct mt_cfg_list nvme_paths;
        bool latent_cache; /* generation keeps latents instead of keys and values (mt_layer_spec.latent_cache) */
    } memory;
    struct {
        int64_t every, max_samples;
        bool at_start;
        int64_t early_stop_patience;
        char *best_by; /* a measure's name in metrics, without "eval_" */
        struct mt_cfg_list sets; /* "name:file"; at most MT_EVAL_SETS */
        char *generate;          /* a file of prompts; "" */
        int64_t generate_tokens;
    } eval;
    struct {
        char *dir;
        struct mt_cfg_interval every;
        int64_t keep, keep_every;
        bool keep_best;
        enum mt_cfg_save save;
        enum mt_cfg_frozen frozen;
        enum mt_cfg_on_signal on_signal;
        double time_limit; /* seconds, 0 = none */
        double save_deadline; /* seconds */
        uint64_t shard_size;
    } checkpoint;
    struct {
        struct mt_cfg_list memory; /* sizes, of each host; none: placement.host_budget of what each has */
        struct mt_cfg_list drives; /* sizes, of each host; none: what is free in memory.nvme_paths */
        double timeout;            /* seconds */
    } cluster;
    struct {
        int64_t every;
        bool jsonl, csv, tensorboard;
        char *exec; /* a command; "" = none */
        enum mt_cfg_progress progress;
    } log;
    struct {
        enum mt_cfg_device kind;
        int64_t index;
        double link_gbps; /* cpu device: throttle of each copy direction in GB/s; 0 = none */
        char *gpus;
        char *numa;
    } device;

    struct mt_config_priv *priv; /* origins and raw texts */
};

/** What a file is read for. Generation needs no data and no steps, evaluation and scores the tokens of one. */
enum mt_config_use { MT_TO_GENERATE, MT_TO_EVALUATE, MT_TO_TRAIN };

/**
 * Reads an INI file (with its includes) over the defaults, then applies `sets` ("SEC.KEY=V"). Checks
 * names, types, units, ranges and the "exactly one of" rules; relative paths become relative to the
 * file that names them. On failure *out is unchanged and err (kind MT_ERR_USAGE) names file, line and
 * key, and what to change. `path` may be NULL: defaults and sets only, no cross-key checks.
 */
int mt_config_load_for(struct mt_config **out, const char *path, const char *const *sets, int n_sets,
                       enum mt_config_use use, struct mt_err *err);
/** The same for training. */
int mt_config_load(struct mt_config **out, const char *path, const char *const *sets, int n_sets,
                   struct mt_err *err);
void mt_config_destroy(struct mt_config **cfg);
/** A configuration of its own with the same values, but for placement that was decided (origin
 * `decided`): that is at its default again. */
int mt_config_copy(struct mt_config **out, const struct mt_config *cfg, const char *decided,
                   struct mt_err *err);

/** The effective configuration as INI text that loads back to the same values from any folder (paths
 * are absolute); with `origins`, each line says where its value comes from ("run.ini:14", "--set",
 * "default"). */
void mt_config_print(const struct mt_config *cfg, bool origins, struct mt_str *out);

/**
 * Writes resolved settings back: keys of role MT_NUMERICS and MT_PLACEMENT that differ from the two structs take their
 * values from there, with origin `why`. Keys of role MT_MACHINE stay as they are.
 */
int mt_config_adopt(struct mt_config *cfg, const struct mt_numerics *numerics, const struct mt_placement *placement,
                    const char *why, struct mt_err *err);

/** Replaces the value of "sec.key" after loading (say, an `auto` that was resolved), with origin `why`. */
int mt_config_override(struct mt_config *cfg, const char *key, const char *value, const char *why,
                       struct mt_err *err);

/** mt_config_is_default(): nothing has set "sec.key". mt_config_reset() sets it back to its default. */
bool mt_config_is_default(const struct mt_config *cfg, const char *key);
int mt_config_reset(struct mt_config *cfg, const char *key, struct mt_err *err);

/** Whether train.blocks may be set beside the other keys; what stands against it, loading refuses. */
bool mt_config_may_train_blocks(const struct mt_config *cfg);

/**
 * Before a resume: numerics that are auto are taken from the text of an earlier config.effective.ini, with origin
 * `why`. A key of the text that this version does not know is ignored with a warning. A key that the text lacks counts
 * as its default, which is what the older version did.
 */
int mt_config_keep(struct mt_config *cfg, const char *earlier_ini, const char *why, struct mt_err *err);

/**
 * Compares numerics with such a text; what auto is by definition does not differ from it. Appends a line for each difference ("train.seed: 42 -> 43") to `diff`, or to
 * `grown` where train.steps, epochs or tokens became larger.
 */
int mt_config_diff(const struct mt_config *cfg, const char *earlier_ini, struct mt_str *diff,
                   struct mt_str *grown, struct mt_err *err);

/** describe.c: the text of `megatrain config keys` and of the manual, and a configuration with every key; all from the
 * same table. */
void mt_config_describe(struct mt_str *out, bool markdown);
void mt_config_write_template(struct mt_str *out, const char *model_path);
/**
 * All about a key: default, meaning, values, what it may do to a run, keys that have to do with it. `name` is
 * "section.key", a key's name alone (all keys of that name), a section (a line for each of its keys), or what another trainer
 * calls it. -ENOENT (MT_ERR_USAGE): there is none; the message names the nearest.
 */
int mt_config_explain(struct mt_str *out, const char *name, struct mt_err *err);
