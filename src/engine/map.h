/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "model/layout.h"
#include "schedule/tables.h"
#include "schedule/unit.h"

/**
 * Sets which lane runs each unit, forward and back, from the units' weights and records alone: shape.lane, .lane_back.
 * first_kept: layers from there on keep records on the device.
 */
void mt_map_units(struct mt_unit_shape *units, const struct mt_layout *l, int n_lanes, int64_t first_kept);
/** Host memory and drives for the states that hosts own. */
enum mt_map_place { MT_MAP_DRIVES, MT_MAP_MEMORY, MT_N_MAP_PLACES };
struct mt_map_room {
    int own_lanes; /* of each host */
    const uint64_t (*bytes)[MT_N_MAP_PLACES]; /* [n_units] of each unit's states; borrowed */
    uint64_t of[MT_MAX_LANES][MT_N_MAP_PLACES]; /* by host: less those of its units, afterwards */
};
/** Where lanes share the groups instead: on which lane each unit's gradient is added up, cast and stored. owned: its
 * host alone keeps the unit's states. room: then they go where there is room for them, on drives
 * rather than in memory, of which planes may leave some; NULL: to all alike. */
void mt_map_gradients(struct mt_unit_shape *units, const struct mt_layout *l, int n_lanes, bool owned,
                      struct mt_map_room *room);
