/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stddef.h>

#include "base/err.h"
#include "base/strbuf.h"

/**
 * Appends a page that draws what folders of runs (metrics.jsonl, run.json, trace.json) and of sweeps (sweep.json) hold:
 * their numbers, and a script (draw.js) that makes charts of them. Nothing is fetched. A run that crashed is drawn up
 * to the crash; an incomplete last line is ignored. `reload`: seconds after which a browser loads the page again; 0:
 * never. MT_ERR_INPUT: a folder is neither; the message names it.
 */
int mt_report_page(struct mt_str *out, const char *const *dirs, size_t n, const char *title, int reload,
                   struct mt_err *err);
/** Draws the pictures of such a page into a folder, each as an SVG file, by Node.js; where there is none,
 * MT_ERR_RUNTIME. */
int mt_report_save_pictures(const char *page, const char *dir, struct mt_err *err);
