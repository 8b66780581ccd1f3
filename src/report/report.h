/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "base/err.h"
#include "base/json.h"
#include "base/strbuf.h"

/** A picture or table of a report. */
struct mt_panel {
    char section[160]; /* heading under which it appears */
    char name[64];     /* file name of its SVG, without ".svg"; "" for a table */
    char *content;     /* an <svg> element, or HTML */
};
struct mt_report {
    struct mt_panel *panels;
    size_t n, cap;
    int reload; /* seconds after which the page loads itself again, as a browser shows it; 0: never */
};

/**
 * Reads folders of runs (metrics.jsonl, run.json, trace.json) and of sweeps (sweep.json) and draws what they hold. A
 * run that crashed is drawn up to the crash; an incomplete last line is ignored. Several runs share the panels of loss,
 * rate and norm. MT_ERR_INPUT: a folder is neither; the message names it.
 */
int mt_report_make(struct mt_report *out, const char *const *dirs, size_t n, struct mt_err *err);
void mt_report_finish(struct mt_report *r);
/** One self-contained page: no scripts, and nothing is fetched. */
void mt_report_html(struct mt_str *out, const struct mt_report *r, const char *title);
