/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <cjson/cJSON.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/err.h"

/**
 * The history of a checkpoint. Each process that trains draws a run id of its own; the checkpoint that it resumed from
 * is its newest ancestor: the id of the process that wrote that, its step, and the checksum of its
 * state.json. Checkpoints of versions without ids have the empty id.
 */
enum { MT_RUN_ID = 17 }; /* 16 hexadecimal digits */
struct mt_ancestor {
    char run[MT_RUN_ID];
    uint64_t step;
    char sum[MT_RUN_ID];
};
struct mt_lineage {
    char run[MT_RUN_ID];
    struct mt_ancestor *ancestors; /* newest first; owned */
    size_t n;
};

/** Draws the id of a new run. */
int mt_lineage_begin(struct mt_lineage *l, struct mt_err *err);
/** The same, for a run that resumes from the checkpoint that `l` was read from. */
int mt_lineage_go_on(struct mt_lineage *l, uint64_t step, const char *state_sum, struct mt_err *err);
void mt_lineage_finish(struct mt_lineage *l);

/** Is what `run` wrote at that step in the history of `l`, or its own? */
bool mt_lineage_has(const struct mt_lineage *l, const char *run, uint64_t step);
/** Did `l` resume from an earlier step of `run`, and so give up what `run` wrote at `step`? */
bool mt_lineage_gave_up(const struct mt_lineage *l, const char *run, uint64_t step);

void mt_lineage_to_json(const struct mt_lineage *l, cJSON *o);
int mt_lineage_from_json(struct mt_lineage *out, const cJSON *o, const char *name, struct mt_err *err);
