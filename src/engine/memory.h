/* SPDX-License-Identifier: Apache-2.0 */
#ifndef MT_ENGINE_MEMORY_H
#define MT_ENGINE_MEMORY_H

#include "engine/engine.h"

/** A row of the memory table: bytes of a tier by use. Both texts are literals. */
struct mt_memory_row {
    const char *tier, *tag;
    uint64_t bytes;
};

/** The rows of a memory table, in the order in which they are shown; starts as zeros. */
enum { MT_MEMORY_MAX_ROWS = MT_N_POOLS + 2 * MT_N_PLANES + 12 }; /* pools, planes on host and drive, and the rest */
struct mt_memory_rows {
    struct mt_memory_row row[MT_MEMORY_MAX_ROWS];
    int n;
};

/** A use of nothing has no row. */
void mt_memory_add_row(struct mt_memory_rows *rows, const char *tier, const char *tag, uint64_t bytes);

/** The engine's share of the tiers: "device" in all, and its rows of "host" and of "nvme" beside the planes. */
void mt_engine_add_device_rows(struct mt_memory_rows *rows, const struct mt_engine_plan *plan);
void mt_engine_add_host_rows(struct mt_memory_rows *rows, const struct mt_engine_plan *plan);
void mt_engine_add_disk_rows(struct mt_memory_rows *rows, const struct mt_engine_plan *plan);

#endif
