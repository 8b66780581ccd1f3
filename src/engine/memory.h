/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "engine/engine.h"

/** A row of the memory table: bytes of one use in a tier. Both strings are literals. */
struct mt_memory_row {
    const char *tier, *tag;
    uint64_t bytes;
};

/** The rows of a memory table, in the order shown; initialise with zeros. */
enum { MT_MEMORY_MAX_ROWS = MT_N_POOLS + 2 * MT_N_PLANES + 12 }; /* pools, planes on host and drive, and the rest */
struct mt_memory_rows {
    struct mt_memory_row row[MT_MEMORY_MAX_ROWS];
    int n;
};

/** Adds to the row of that name, or a row, unless bytes is 0. */
void mt_memory_add_row(struct mt_memory_rows *rows, const char *tier, const char *tag, uint64_t bytes);
