/* SPDX-License-Identifier: Apache-2.0 */
#include "train/wear.h"

#include "base/mem.h"
#include "hw/wear.h"

void mt_setup_wear(const struct mt_setup *s, uint64_t tbw, struct mt_wear *out)
{
    struct mt_wear w = {.rated_bytes = tbw};
    const struct mt_cfg_list *dirs = &s->in->cfg->memory.nvme_paths;
    for (int i = 0; i < MT_N_DISK_USES; i++) {
        w.read_bytes += s->choice.engine.traffic.read[i];
        w.written_bytes += s->choice.engine.traffic.written[i];
    }
    w.run_bytes = w.written_bytes * s->in->total_steps / (uint64_t)MT_MAX(dirs->n, 1);
    for (int i = 0; i < dirs->n && !tbw; i++) {
        struct mt_hw_wear drive;
        if (!mt_hw_wear(&drive, dirs->items[i]) || !drive.rated_bytes)
            continue;
        w.rated_bytes = w.measured ? MT_MIN(w.rated_bytes, drive.rated_bytes) : drive.rated_bytes;
        w.measured = true;
    }
    w.share = w.rated_bytes ? (double)w.run_bytes / (double)w.rated_bytes : 0;
    *out = w;
}
