/* SPDX-License-Identifier: Apache-2.0 */
#ifndef MT_DEVICE_KIND_H
#define MT_DEVICE_KIND_H

#include "device/device.h"
#include "device/ops.h"

/**
 * What is known of a kind of device without opening one, where there may be none: the planner's counting device
 * (device/meter.h) and measuring ask it. A new kind is one of these and a line in device.c.
 */
struct mt_device_kind {
    const char *name;
    bool shares_host_memory; /* its arena, copies and operations take the host's memory and cores */
    size_t alignment;        /* of arena allocations, in bytes */
    size_t row_bucket;       /* limits.row_bucket: few different shapes of products, where a shape costs something */
    size_t library_bytes;    /* what its libraries take of a budget, at most */
    size_t own_bytes;        /* of it, what a device takes as it is created: limits.budget_bytes is the rest */
    /** As mt_device_workspace(), of a device with such limits: at least what any device of the kind wants. */
    size_t (*workspace)(const struct mt_device_limits *limits, enum mt_dev_op op, const void *args);
    void (*probe)(struct mt_device_info *out, int index);
    /** Fills *out or says why it cannot. */
    int (*create)(mt_device **out, const struct mt_device_params *p, struct mt_err *err);
};

/** NULL where no kind is called so. */
const struct mt_device_kind *mt_device_kind(const char *name);
/** The limits that a device of the kind reports. */
struct mt_device_limits mt_device_kind_limits(const struct mt_device_kind *k, size_t budget_bytes, int n_threads);

extern const struct mt_device_kind mt_cpu_kind, mt_cuda_kind;

#endif
