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

static void add_pools(struct mt_memory_rows *rows, const struct mt_engine_plan *p, const char *tier, bool device)
{
    for (int i = 0; i < MT_N_POOLS; i++)
        if (mt_pools[i].device == device)
            mt_memory_add_row(rows, tier, mt_pools[i].name, p->pool_bytes[i]);
}

void mt_engine_add_device_rows(struct mt_memory_rows *rows, const struct mt_engine_plan *p)
{
    add_pools(rows, p, "device", true);
    size_t lanes = (size_t)mt_program_own_lanes(&p->program);
    mt_memory_add_row(rows, "device", "scratch", lanes * p->scratch);
    mt_memory_add_row(rows, "device", "logits", lanes * p->logits);
    mt_memory_add_row(rows, "device", "inputs", lanes * p->inputs);
    mt_memory_add_row(rows, "device", "rotary tables", lanes * p->tables);
}

void mt_engine_add_host_rows(struct mt_memory_rows *rows, const struct mt_engine_plan *p)
{
    add_pools(rows, p, "host", false);
    mt_memory_add_row(rows, "host", "boundaries and activations", p->spill_bytes);
    mt_memory_add_row(rows, "host", "staging", p->staging_bytes);
    mt_memory_add_row(rows, "host", "blocks read from files", p->file_bytes);
    mt_memory_add_row(rows, "host", "a teacher's tokens", p->top_bytes);
}

void mt_engine_add_disk_rows(struct mt_memory_rows *rows, const struct mt_engine_plan *p)
{
    mt_memory_add_row(rows, "nvme", "boundaries and activations", p->disk_spill_bytes);
}
