/* SPDX-License-Identifier: Apache-2.0 */
#ifndef MT_CONFIG_CONFIG_H
#define MT_CONFIG_CONFIG_H

#include <stdbool.h>
#include <stdint.h>

#include "base/err.h"
#include "base/strbuf.h"

/* Values of choice keys, in the order of the schema's choice lists (schema.c). */
enum mt_cfg_init { MT_INIT_WEIGHTS, MT_INIT_RANDOM };
enum mt_cfg_dtype { MT_CFG_BF16, MT_CFG_F32 };
enum mt_cfg_auto_dtype { MT_CFG_DTYPE_AUTO, MT_CFG_DTYPE_BF16, MT_CFG_DTYPE_F32 };
enum mt_cfg_format {
    MT_FORMAT_AUTO,
    MT_FORMAT_MESSAGES,
    MT_FORMAT_SHAREGPT,
    MT_FORMAT_ALPACA,
    MT_FORMAT_PROMPT_COMPLETION,
    MT_FORMAT_TEXT,
    MT_FORMAT_INPUT_IDS,
};
enum mt_cfg_train_on { MT_TRAIN_ON_ASSISTANT, MT_TRAIN_ON_LAST, MT_TRAIN_ON_ALL };
enum mt_cfg_overlong { MT_OVERLONG_ERROR, MT_OVERLONG_TRUNCATE, MT_OVERLONG_DROP, MT_OVERLONG_SPLIT };
enum mt_cfg_lr_schedule { MT_LR_CONSTANT, MT_LR_LINEAR, MT_LR_COSINE, MT_LR_WSD };
enum mt_cfg_states { MT_STATES_AUTO, MT_STATES_DEVICE, MT_STATES_HOST, MT_STATES_DISK };
enum mt_cfg_activations {
    MT_ACT_AUTO,
    MT_ACT_KEEP,
    MT_ACT_OFFLOAD,
    MT_ACT_DISK,
    MT_ACT_RECOMPUTE,
};
enum mt_cfg_unit { MT_CUT_AUTO, MT_CUT_LAYERS, MT_CUT_HALVES };
enum mt_cfg_schedule { MT_SCHEDULE_LAYERED, MT_SCHEDULE_MICROBATCH };
enum mt_cfg_pin { MT_PIN_AUTO, MT_PIN_ALL, MT_PIN_STAGING };
enum mt_cfg_save { MT_SAVE_FULL, MT_SAVE_WEIGHTS };
enum mt_cfg_on_signal { MT_ON_SIGNAL_FULL, MT_ON_SIGNAL_WEIGHTS, MT_ON_SIGNAL_NONE };
enum mt_cfg_progress { MT_PROGRESS_AUTO, MT_PROGRESS_ON, MT_PROGRESS_OFF };
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

/** "20GiB", "90%", or "auto". */
struct mt_cfg_size {
    bool is_auto, is_ratio;
    double ratio;
    uint64_t bytes;
};

/** "500" steps, or "30m" (then `is_time`, in seconds). 0 = never. */
struct mt_cfg_interval {
    bool is_time;
    int64_t steps;
    double seconds;
};

#define MT_CFG_AUTO (-1) /* value of an integer key that says "auto"; 0 where one is unset */

/**
 * A whole configuration, typed. Strings and lists are owned by the config and never NULL; a key that
 * is unset is "" or 0. Units: bytes, seconds, tokens.
 */
struct mt_config {
    struct {
        char *path;
        enum mt_cfg_init init;
        enum mt_cfg_dtype dtype;
        struct mt_cfg_list freeze;
    } model;
    struct {
        struct mt_cfg_list train; /* files and globs, "path:weight" not yet split */
        char *eval;               /* file, "N" samples or "2%" */
        enum mt_cfg_format format;
        char *tokenizer; /* "model" or "byte" */
        char *template_; /* key "template" */
        enum mt_cfg_train_on train_on;
        int64_t seq_len;
        bool packing;
        enum mt_cfg_overlong overlong;
        bool shuffle;
        char *cache_dir;
    } data;
    struct {
        int64_t steps; /* exactly one of steps, epochs, tokens is > 0 */
        double epochs;
        int64_t tokens;
        int64_t tokens_per_step; /* exactly one of this and batch_size is > 0 */
        int64_t batch_size;
        int64_t micro_batch; /* sequences, or MT_CFG_AUTO */
        double learning_rate;
        enum mt_cfg_lr_schedule schedule;
        struct mt_cfg_amount warmup;
        double min_lr_ratio;
        double grad_clip; /* 0 = off */
        int64_t seed;
        int64_t max_skips;
    } train;
    struct {
        char *type; /* "adamw" */
        double beta1, beta2, eps, weight_decay;
        bool decay_embeddings;
        enum mt_cfg_dtype state_dtype; /* of m and v */
        enum mt_cfg_auto_dtype grad_dtype;
    } optimizer;
    struct {
        struct mt_cfg_size device_budget, host_budget;
        enum mt_cfg_states states;
        struct mt_cfg_list nvme_paths;
        int64_t slots; /* or MT_CFG_AUTO */
        enum mt_cfg_unit unit;
        enum mt_cfg_activations activations;
        int64_t keep_layers; /* or MT_CFG_AUTO */
        enum mt_cfg_schedule schedule;
        int64_t logits_chunk; /* tokens, or MT_CFG_AUTO */
        enum mt_cfg_pin pin;
    } memory;
    struct {
        int64_t every, max_samples;
        bool at_start;
        int64_t early_stop_patience;
    } eval;
    struct {
        char *dir;
        struct mt_cfg_interval every;
        int64_t keep, keep_every;
        bool keep_best;
        enum mt_cfg_save save;
        enum mt_cfg_on_signal on_signal;
        double time_limit; /* seconds, 0 = none */
        uint64_t shard_size;
    } checkpoint;
    struct {
        int64_t every;
        bool jsonl, csv, tensorboard;
        enum mt_cfg_progress progress;
    } log;
    struct {
        enum mt_cfg_device kind;
        int64_t index;
        double link_gbps; /* cpu device: throttle of each copy direction in GB/s; 0 = none */
        int64_t cpu_threads; /* or MT_CFG_AUTO */
        char *numa;
    } device;

    struct mt_config_priv *priv; /* origins and raw texts */
};

/**
 * Reads an INI file (with its includes) over the defaults, then applies `sets` ("SEC.KEY=V"). Checks
 * names, types, units, ranges and the "exactly one of" rules; relative paths become relative to the
 * file that names them. On failure *out is unchanged and err (kind MT_ERR_USAGE) names file, line and
 * key, and suggests the mend. `path` may be NULL: defaults and sets only, no cross-key checks.
 */
int mt_config_load(struct mt_config **out, const char *path, const char *const *sets, int n_sets,
                   struct mt_err *err);
void mt_config_destroy(struct mt_config **cfg);

/** The effective configuration as INI text that loads back to the same values from any folder (paths
 * are absolute); with `origins`, each line says where its value comes from ("run.ini:14", "--set",
 * "default"). */
void mt_config_print(const struct mt_config *cfg, bool origins, struct mt_str *out);

/** Replaces the value of "sec.key" after loading (an `auto` that was decided), with origin `why`. */
int mt_config_override(struct mt_config *cfg, const char *key, const char *value, const char *why,
                       struct mt_err *err);

/**
 * Compares what must not change over a resume (all but [memory], [device], [log], [eval] and
 * [checkpoint]) with the text of an earlier config.effective.ini. Appends one line a difference,
 * "train.seed: 42 -> 43", to `diff`. Growing train.steps, epochs or tokens is listed in `grown`.
 */
int mt_config_diff(const struct mt_config *cfg, const char *earlier_ini, struct mt_str *diff,
                   struct mt_str *grown, struct mt_err *err);

/** What `megatrain config keys`, the manual and a fresh config file show; from the same table. */
void mt_config_describe(struct mt_str *out, bool markdown);
void mt_config_write_template(struct mt_str *out, const char *model_path);

#endif
