/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "report/report.h"

/** Columns of metrics.jsonl; NaN in records that lack one. */
enum {
    MT_COL_STEP,
    MT_COL_TOKENS,
    MT_COL_LOSS,
    MT_COL_LR,
    MT_COL_GRAD_NORM,
    MT_COL_TOK_S,
    MT_COL_T_STEP,
    MT_COL_T_FWD,
    MT_COL_T_BWD,
    MT_COL_T_OPT,
    MT_COL_T_WAIT,
    MT_COL_T_DATA,
    MT_COL_H2D,
    MT_COL_D2H,
    MT_N_COLS,
};
/** How layers spread their tokens over experts. */
enum mt_spread { MT_SPREAD_BALANCE, MT_SPREAD_ENTROPY, MT_SPREAD_IDLE, MT_SPREAD_FULLEST, MT_N_SPREADS };

/** What objectives measure, by key (measures.c). */
enum { MT_N_LINES = 15 };
struct mt_lines {
    double *step, *value[MT_N_LINES];     /* [n], by training step; NaN in records that lack one */
    double *eval_step, *eval[MT_N_LINES]; /* [n_eval] */
    size_t n, n_eval;
};
/** For at most n records. */
int mt_lines_alloc(struct mt_lines *l, size_t n, struct mt_err *err);
void mt_lines_finish(struct mt_lines *l);
/** A record of a step or of an evaluation; one that has none of them adds nothing. */
void mt_lines_read(struct mt_lines *l, double step, const cJSON *o);

/** Losses of the sets of eval.sets, each a line. */
enum { MT_REPORT_SETS = 16 };
struct mt_set_lines {
    char name[MT_REPORT_SETS][80];
    double *step, *loss[MT_REPORT_SETS]; /* [n]; NaN where a set was not evaluated */
    size_t n, n_sets, cap;
};
/** For at most n records. */
int mt_set_lines_alloc(struct mt_set_lines *l, size_t n, struct mt_err *err);
void mt_set_lines_finish(struct mt_set_lines *l);
void mt_set_lines_read(struct mt_set_lines *l, double step, const cJSON *record);

struct mt_run_data {
    char name[128];
    double *col[MT_N_COLS]; /* [n], by training step */
    size_t n;
    double *eval_step, *eval_loss; /* [n_eval] */
    size_t n_eval;
    struct {
        double *step;                         /* [n] */
        double *mean[MT_N_SPREADS], *worst[MT_N_SPREADS]; /* [n] over layers, and of the worst layer */
        size_t n;
    } experts;
    struct mt_lines lines;
    struct mt_set_lines sets;
    cJSON *info, *trace;    /* run.json, trace.json; or NULL */
};
int mt_run_data_read(struct mt_run_data *r, const char *dir, struct mt_err *err);
void mt_run_data_finish(struct mt_run_data *r);

/**
 * [n], the caller frees it: each value replaced by that of a straight line fitted to its neighbours on both sides
 * (local linear regression: Cleveland, 1979), which does not lag behind a falling loss as a moving average does. NaN
 * where v is not finite; the others do not count it. NULL: no memory.
 */
double *mt_smooth(const double *v, size_t n);

/** Takes ownership of the text, which may have failed. */
int mt_report_add(struct mt_report *r, const char *section, const char *name, struct mt_str *content,
                  struct mt_err *err);
/** Panels of all runs together, then of each run. */
int mt_report_runs(struct mt_report *r, const struct mt_run_data *runs, size_t n, struct mt_err *err);
/** Panels of what an objective has measured; none where it has not. */
int mt_report_lines(struct mt_report *r, const char *section, const struct mt_lines *l, struct mt_err *err);
int mt_report_sets(struct mt_report *r, const char *section, const struct mt_set_lines *l, struct mt_err *err);
int mt_report_sweep(struct mt_report *r, const char *name, const cJSON *table, struct mt_err *err);
