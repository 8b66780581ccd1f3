/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "base/json.h"
#include "cli.h"
#include "rates.h"
#include "train/memory.h"
#include "train/train.h"

/** Tables and lines for people, on standard error. */
void cli_print_memory(const struct mt_memory *m);
/** Prints an object on standard output, as "key: value" lines or as JSON, and deletes it. */
/** Returns the exit code: that of a failure if there was no memory for the text. */
int cli_print_object(cJSON *o, bool json);
/** The rows as "memory": [{"tier", "use", "bytes"}]. */
void cli_add_memory(cJSON *o, const struct mt_memory_rows *rows);
/** Model, data, device and plan. */
void cli_print_setup(const struct mt_setup *s);
/** Bytes that a step moves between host memory and disk, and the wear of the drives by the run. */
void cli_print_wear(const struct mt_setup *s, uint64_t tbw);
/** How scratch files and model files are accessed. */
void cli_print_disk(const struct mt_session *s);
/** Prints the progress of a run. */
struct cli_progress {
    const struct cli *cli;
    const struct mt_setup *setup;
    struct cli_rates *rates; /* notified of each step; NULL: not */
    bool show;
    const char *name;        /* of several runs at once: whose progress; else NULL */
};
void cli_progress_events(struct mt_train_events *out, struct cli_progress *p);

/** For a mixture of experts ", 21.6B of them active", else ""; returns buf. */
const char *cli_active_params(char *buf, size_t len, const struct mt_layout *l);
