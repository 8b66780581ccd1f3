/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "device/device.h"
#include "device/ops.h"

/**
 * What is known of a kind of device without opening one (this machine may have none): used by the planner's counting
 * device (device/meter.h) and by measuring. A new kind is one of these and a line in kinds/kinds.c.
 */
struct mt_device_kind {
    const char *name;
    bool shares_host_memory; /* its arena, copies and operations use the host's memory and cores */
    size_t alignment;        /* of arena allocations, in bytes */
    size_t row_bucket;       /* limits.row_bucket; above 1 where each new shape of a product has a cost */
    size_t library_bytes;    /* most bytes of a budget that its libraries take */
    size_t own_bytes;        /* part of it that a device takes when it is created: limits.budget_bytes is the rest */
    size_t coded_rows;       /* limits.coded_rows */
    int sides;               /* limits.sides, and limits.side_bytes */
    size_t side_bytes;
    /** As mt_device_workspace(), for a device with these limits: enough for every device of the kind. */
    size_t (*workspace)(const struct mt_device_limits *limits, enum mt_dev_op op, const void *args);
    void (*probe)(struct mt_device_info *out, int index);
    /** Sets *out, or fails with the reason. */
    int (*create)(mt_device **out, const struct mt_device_params *p, struct mt_err *err);
    /** How many this machine has; NULL: a run makes as many as it wants. */
    int (*count)(void);
    /** A device's identifier, "GPU-...", or ""; takes nothing of the device. */
    void (*identify)(char *out, size_t len, int index);
};

/** The limits that a device of the kind reports. */
struct mt_device_limits mt_device_kind_limits(const struct mt_device_kind *k, size_t budget_bytes, int n_threads);

extern const struct mt_device_kind mt_cpu_kind;
