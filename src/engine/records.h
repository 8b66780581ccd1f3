/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "model/layout.h"
#include "settings/settings.h"

/**
 * How many records of each kind of segment leave the layers that are recomputed, in layers: memory.offload,
 * memory.offload_attention and memory.offload_layers as one list. MT_AUTO: not decided.
 */
struct mt_records {
    const struct mt_layout *layout; /* borrowed; its segments are the kinds */
    int64_t layers[MT_MAX_SEGMENT_KINDS];
};
struct mt_records mt_records_of(const struct mt_layout *l, const struct mt_placement *p);
/** Whether any record is offloaded. */
bool mt_records_offload(const struct mt_records *r);
/** Writes them to the placement: a name in memory.offload only for kinds that the other two keys do not say. */
void mt_records_place(const struct mt_records *r, struct mt_placement *p);
/** -EINVAL (MT_ERR_USAGE): memory.offload names what the model does not have, or is not a list of NAME:NUMBER. */
int mt_records_check(const struct mt_layout *l, const struct mt_placement *p, struct mt_err *err);
