/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "engine/memory.h"
#include "train/setup.h"

/** A limit on a tier, and what the run wants of it. */
struct mt_memory_limit {
    const char *tier, *source; /* "host", "MemAvailable" */
    uint64_t wanted, available;
};
enum { MT_MEMORY_MAX_LIMITS = 8 };
struct mt_memory {
    struct mt_memory_rows rows;
    struct mt_memory_limit limits[MT_MEMORY_MAX_LIMITS];
    int n_limits;
    int n_lanes;
    uint64_t lane_bytes[MT_MAX_LANES]; /* of device_bytes, on each device */
    uint64_t device_bytes, host_bytes, disk_bytes; /* disk: one checkpoint, overlays and scratch */
    uint64_t checkpoint_bytes; /* of one; 0: not known */
    uint64_t checkpoint_free;  /* space for them once the scratch is allocated */
};
/**
 * The memory table by tier and tag, from the same arithmetic that allocates, and the limits that it is compared with:
 * the budgets, MemAvailable, cgroup, RLIMIT_AS, free disk for checkpoints.
 */
int mt_setup_memory(const struct mt_setup *s, struct mt_memory *out, struct mt_err *err);
/** 0, or -ENOSPC (MT_ERR_NO_FIT) naming the first limit that is exceeded, by how much, and what helps. */
int mt_memory_check(const struct mt_memory *m, struct mt_err *err);

/**
 * Whether later phases have room, with the setup's numerics. -ENOSPC (MT_ERR_NO_FIT) names the block of train.blocks that
 * has none. Of train.delink_at it is a warning, as the run can go on from its checkpoint there on another machine.
 */
int mt_setup_check_later(const struct mt_setup *s, struct mt_err *err);

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
