/* SPDX-License-Identifier: Apache-2.0 */
#include "engine/memory.h"

#include <assert.h>
#include <string.h>

void mt_memory_add_row(struct mt_memory_rows *rows, const char *tier, const char *tag, uint64_t bytes)
{
    if (!bytes)
        return;
    for (int i = 0; i < rows->n; i++)
        if (!strcmp(rows->row[i].tier, tier) && !strcmp(rows->row[i].tag, tag)) {
            rows->row[i].bytes += bytes;
            return;
        }
    assert(rows->n < MT_MEMORY_MAX_ROWS);
    rows->row[rows->n++] = (struct mt_memory_row){tier, tag, bytes};
}
