/* SPDX-License-Identifier: Apache-2.0 */
#ifndef MT_DEVICE_METER_H
#define MT_DEVICE_METER_H

#include "device/metered.h"

/**
 * A device that computes nothing and reports what it was asked to: each operation goes to a callback as its
 * shape, floating-point operations and least memory traffic. Buffers are addresses without memory, so a model
 * of any size can be driven through it; the planner's costs come from there, and so from the very code that trains.
 */
typedef void (*mt_meter_fn)(void *ctx, const struct mt_metered *op);

struct mt_meter_params {
    const char *kind;    /* of mt_device_kind(): whose workspaces and alignment are reported */
    const char *name;
    size_t budget_bytes;
    int n_threads;
    bool native_bf16;
    mt_meter_fn fn;      /* may be NULL; called on the submitting thread */
    void *ctx;
};
/** -EINVAL where no kind of device is called so. */
int mt_device_create_meter(mt_device **out, const struct mt_meter_params *p, struct mt_err *err);

#endif
