/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "base/json.h"
#include "cli.h"
#include "plan/resolve.h"

/** All that `megatrain plan` shows. */
struct plan_view {
    struct mt_config *cfg;
    struct mt_hf_config hf;
    char *model_dir; /* owned; NULL: only a config.json */
    struct mt_layout *layout, *halves; /* halves: NULL unless memory.unit is auto */
    struct mt_plan_cuts *blocks;       /* [n_blocks] of train.blocks, once nothing fits */
    size_t n_blocks, cap_blocks;
    struct mt_machine machine;
    bool local;       /* the machine is this one */
    bool generates;   /* nothing is trained, and the layout is generation's */
    int device_index; /* of the device that measures it */
    struct mt_err unmeasured; /* of this machine, which has no rates: why; code 0: it has */
    struct mt_plan_request request;
    struct mt_plan_choice choice;
    double alone;        /* of several hosts: seconds of the step on one of them; 0: it does not fit there */
    uint64_t epoch_rows; /* of data.train; 0: not known, as its tokens are not prepared here */
};

/**
 * Opens a configuration (NULL: defaults and --set), its model's config.json and the machine that the
 * options name, or this one's profile. Also used by bench. Close with plan_view_close(), opened or not.
 */
int plan_view_open(struct plan_view *v, const char *ini, const struct cli_args *args, struct mt_err *err);
/** Settings that are tried beside the configuration and the options: up to 7 keys, and the size of a step. Keys that
 * another optimizer.type does not have are at their defaults. */
struct plan_settings {
    const char *key[7], *value[7];
    long long tokens_per_step; /* 0: as it is */
    bool generates;
};
/** The same with such settings, and without messages; `change` NULL: plan_view_open(). */
int plan_view_open_as(struct plan_view *v, const char *ini, const struct cli_args *args,
                      const struct plan_settings *change, struct mt_err *err);
/** Finds the choice: by the search, or on a machine without rates by the rules of its runs (then choice.sim is 0).
 * Errors as of mt_resolve(). */
int plan_view_resolve(struct plan_view *v, struct mt_err *err);
/** Where nothing fits: has changes make all blocks of train.blocks fit, not the view's alone. */
int plan_view_keep_blocks(struct plan_view *v, struct mt_err *err);
/** For what cannot do without rates: 0 if there are some. */
int plan_view_needs_rates(const struct plan_view *v, struct mt_err *err);
void plan_view_close(struct plan_view *v);
/** plan_hosts.c: takes --hosts and --net; of a plan for several hosts, what crosses, and how much it gains. */
int plan_view_share(struct plan_view *v, const struct cli_args *args, struct mt_err *err);
/** Plans the step on one of the hosts, too. -ENOSPC (MT_ERR_NO_FIT): they are slower than that; it says why. */
int plan_compare_hosts(struct plan_view *v, struct mt_err *err);
void plan_print_hosts(const struct plan_view *v);
void plan_add_hosts(cJSON *o, const struct plan_view *v);
/** Times the configuration's operations on this machine if the profile lacks samples of them; `anew`: all of the
 * choice, and the optimizer and the link (mt_measure_again()). */
int plan_view_measure(struct plan_view *v, struct cli *cli, bool anew, struct mt_err *err);

/** plan_generate.c: --generate. */
int plan_print_generation(const struct cli_args *args, struct mt_err *err);

/** Tokens of the run that the configuration asks for; 0: not known, or for none. */
double plan_run_tokens(const struct plan_view *v);

/** What the plan's writes do to drives. */
struct plan_wear {
    double tb_a_day; /* written to all drives; 0: nothing is */
    double rated_tb; /* of a drive */
    bool assumed;    /* rated_tb: the machine's file does not say */
    int drives;
    double days;     /* of training until they have written what they are rated for */
    double tokens;   /* the same in tokens */
};
void plan_wear(struct plan_wear *w, const struct plan_view *v);
/** A line, and where the drives would not last a year and ten such runs, what would not wear them out. */
void plan_print_wear(const struct plan_view *v);

/** A run by blocks of layers (train.blocks), of which the view is the lowest block's phase. */
struct plan_blocks {
    uint64_t n, steps;            /* blocks; 0: the run trains all at once. Steps of a phase */
    double seconds, written;      /* of a step, and bytes that it writes to drives: means over all blocks */
    double overlay_bytes, read_bytes; /* of a switch: written to the overlay, and read of weights */
};
/** Searches for a few blocks, evenly spaced, and takes the others between them. */
int plan_blocks(struct plan_blocks *out, const struct plan_view *v, struct mt_err *err);
void plan_print_blocks(const struct plan_view *v);
void plan_print_merges(const struct plan_view *v);

/** Prints to standard output, within 80 columns. */
void plan_print(const struct plan_view *v);
/** refused: why the plan should not be followed, though it fits; NULL: it may be. */
void plan_print_json(const struct plan_view *v, const char *refused);
void plan_print_no_fit_json(const struct plan_view *v, const struct mt_err *err,
                            const struct mt_plan_change *changes, size_t n);

/** A row for each optimizer and order of updates: memory, time and writes of the configuration's step with it. */
int plan_print_optimizers(const struct cli_args *args, struct mt_err *err);
/** plan_prices.c: plan --prices. Returns as a command does. */
int plan_print_prices(const struct cli_args *args, struct mt_err *err);
/** Reads the machine that --machine names, changed by the options. Finish with mt_machine_finish(). */
int plan_read_machine(struct mt_machine *out, const struct cli_args *args, struct mt_err *err);
