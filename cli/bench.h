/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "cli.h"
#include "plan_print.h"
#include "sweep/sweep.h"

enum { BENCH_MAX_RUNS = 64 }; /* of a job */

/** A sweep under way: `megatrain bench`. */
struct bench {
    struct cli *cli;
    const struct cli_args *args;
    struct mt_sweep sweep;
    char dir[4096];
    struct mt_sweep_row *rows; /* of the selected jobs, so far */
    size_t n_rows;
    struct plan_view view; /* of the current job */
    bool predicted;        /* view.choice is valid */
    bool interrupted, unpredicted; /* unpredicted: the reason for missing predictions has been printed */
    size_t *group;         /* [sweep.n_jobs] the first of the jobs that share a base; its own number: it shares none */
    int lock; /* on the folder; -1: not held */
};

/** Whether --only selects the job. */
bool bench_chosen(const struct bench *b, const struct mt_sweep_job *j);
/** Its name and its point on the axes, for people. */
void bench_describe(char *buf, size_t len, const struct mt_sweep_job *j);
/** Writes the job's configuration into the folder, as `path`. */
int bench_write_job(const struct bench *b, const struct mt_sweep_job *j, char *path, size_t len, struct mt_err *err);

/** One run of a job, or of several on one base, in a child process, so that a crash is a row of the table and not the
 * end of the sweep. */
struct bench_child {
    const size_t *job; /* [n] numbers of jobs whose configurations are in the folder */
    size_t n;
    int k;             /* which of their runs */
    const char *steps; /* most steps, or NULL */
    const char *rates; /* file for rates between its steps, or NULL */
};
/**
 * Runs it and fills r[n]: status ("ok", "does not fit", "exit N", "signal N"), peak memory and, if it is ok, the
 * medians over its measured steps. b->interrupted: it was asked to stop. A failure of the job is its status, not an
 * error. Of several, one whose training fails leaves the others "ok"; any other failure is that of all.
 */
int bench_child_run(struct mt_sweep_run *r, struct bench *b, const struct bench_child *c, struct mt_err *err);

/** Opens the job's view; close with plan_view_close(). Without a profile of the machine there is no prediction, an
 * error if one was asked for. */
int bench_predict(struct bench *b, const struct mt_sweep_job *j, struct mt_sweep_prediction *p, struct mt_err *err);
/** Repeats a job, and again while the results differ too much; fills runs[0..*n), of BENCH_MAX_RUNS. Runs that the
 * folder has are not repeated. */
int bench_run_job(struct bench *b, const struct mt_sweep_job *j, struct mt_sweep_run *runs, size_t *n,
                  struct mt_err *err);
/** Spread of measured / predicted if each run has its own prediction, else of the measured times. */
double bench_spread(const struct mt_sweep_run *runs, int n);

/** Finds which jobs run on one base: b->group. */
int bench_find_groups(struct bench *b, struct mt_err *err);
/** Of the job that shares a base with later ones: runs all of them, as often as bench_run_job() would, which then finds
 * the results. What fails runs again alone: that tells the reason. */
int bench_run_group(struct bench *b, size_t first, struct mt_err *err);
