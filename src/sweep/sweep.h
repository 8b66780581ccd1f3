/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdbool.h>
#include <stddef.h>

#include "base/err.h"
#include "base/json.h"
#include "base/strbuf.h"

/**
 * Benchmark sweeps. A sweep file has a base configuration ([global] include = base.ini, or its own sections), axes
 * over any keys ([sweep], "train.micro_batch = 1, 2, 4"; mode = grid crosses them, zip pairs them), and variants of
 * all that ([job NAME], dotted keys).
 */
struct mt_sweep_job {
    char name[64]; /* of [job NAME]; "" in a sweep without variants */
    cJSON *axes;   /* this job's values on the axes: {"train.micro_batch": "4"} */
    char *ini;     /* its whole configuration */
    char hash[17]; /* of the configuration and of how it is measured */
};

/** Jobs whose configurations allow it train on one base that is read once, as `megatrain run a.ini b.ini` does: on:
 * all of them have to. */
enum { MT_SWEEP_SHARED = 64 }; /* most that one run has */
enum mt_sweep_share { MT_SHARE_AUTO, MT_SHARE_ON, MT_SHARE_OFF };

struct mt_sweep {
    int zip;        /* else the axes are crossed */
    int share_base; /* enum mt_sweep_share */
    int warmup_steps, steps, repeat, max_repeat;
    double spread;             /* a job is run again while deviation / median is above this */
    double cooldown;           /* pause before each run, in seconds */
    int abort_on_oom;
    struct mt_sweep_job *jobs;
    size_t n_jobs;
};

/** Reads a sweep file and makes the list of its jobs. Errors (MT_ERR_USAGE) name file, line and key. */
int mt_sweep_read(struct mt_sweep *out, const char *path, struct mt_err *err);
void mt_sweep_finish(struct mt_sweep *s);

/** Statistics of n > 0 values; deviation is the sample standard deviation (0 for one value). */
struct mt_stats {
    double median, min, max, mean, deviation;
    size_t n;
};
struct mt_stats mt_stats_of(const double *v, size_t n);

/** One run of a job; kept as DIR/HASH.K.json, so that an interrupted sweep can be continued. */
struct mt_sweep_run {
    char status[64];      /* "ok", "does not fit", "exit 3", "signal 9" */
    double seconds;       /* median of the measured steps */
    double tok_s, t_fwd, t_bwd, t_wait, t_adam, h2d_bytes, d2h_bytes;
    double loss;          /* mean of the measured steps; 0: not known */
    double shared_by;     /* jobs that ran at once on one base; up to 1: it ran alone. With more, times, tokens a second
                             and memory are of all of them; the loss is the job's own */
    double device_bytes;  /* device memory as planned */
    double peak_bytes;    /* largest resident set of the process; 0: not known for this run alone */
    double planned_bytes; /* host memory as planned before it began, arena included */
    double predicted, ratio; /* predicted with rates measured during the run: medians over steps of the prediction, and
                                of measured / predicted; 0: none. Not saved */
};
/** The prediction for a job; seconds 0: none. */
struct mt_sweep_prediction {
    double seconds, device_bytes, host_bytes, model_flops, peak_flops, tokens;
    char bound[2][24]; /* forward, backward */
    bool fits;
};
int mt_sweep_run_save(const struct mt_sweep_run *r, const char *dir, const char *hash, int k,
                      struct mt_err *err);
/** -ENOENT: this run is not saved. */
int mt_sweep_run_load(struct mt_sweep_run *r, const char *dir, const char *hash, int k,
                      struct mt_err *err);

/** A row of the table: a job and all its runs. What ran with others on one base has no prediction. */
struct mt_sweep_row {
    const struct mt_sweep_job *job;
    char status[64];
    struct mt_stats seconds;
    struct mt_stats ratio;   /* measured / predicted, by each run's own prediction or the job's; n 0: none */
    struct mt_sweep_run run; /* the run with the median time */
    struct mt_sweep_prediction predicted;
};
void mt_sweep_row_fill(struct mt_sweep_row *row, const struct mt_sweep_job *job,
                       const struct mt_sweep_run *runs, size_t n, const struct mt_sweep_prediction *p);

/** The table, in the order of the jobs. */
void mt_sweep_csv(struct mt_str *out, const struct mt_sweep_row *rows, size_t n);
void mt_sweep_markdown(struct mt_str *out, const struct mt_sweep_row *rows, size_t n);
cJSON *mt_sweep_json(const struct mt_sweep_row *rows, size_t n);
/** Statistics of |ratio - 1| over rows that have a ratio; n 0: none. */
struct mt_stats mt_sweep_error(const struct mt_sweep_row *rows, size_t n);

/** Compares two tables written by mt_sweep_json(): appends a Markdown table of what changed beyond the noise. */
void mt_sweep_compare(struct mt_str *out, const cJSON *a, const cJSON *b);
