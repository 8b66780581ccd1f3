/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "train/setup.h"

/** How much of their endurance a run costs the drives of memory.nvme_paths. */
struct mt_wear {
    uint64_t read_bytes, written_bytes; /* of a step, all drives */
    uint64_t run_bytes;                 /* written by the whole run to the drive that gets most */
    uint64_t rated_bytes;               /* endurance of that drive; 0: not known */
    bool measured;                      /* by SMART; else as the user gave it */
    double share;                       /* run_bytes over rated_bytes */
};
/** `tbw`: rated endurance of a drive in bytes as the user gave it; 0: ask SMART. */
void mt_setup_wear(const struct mt_setup *s, uint64_t tbw, struct mt_wear *out);
