/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "device/kind.h"
#include "device/metered.h"

/**
 * A device that computes nothing: it reports each operation to a callback, as its shape, floating-point operations and
 * least memory traffic. Buffers are addresses without memory, so that a model of any size can run on it. The planner
 * takes its costs from it, and so from the same code that trains. `args` are the operation's, whose buffers have no memory.
 */
typedef void (*mt_meter_fn)(void *ctx, const struct mt_metered *op, const void *args);

struct mt_meter_params {
    const struct mt_device_kind *kind; /* whose workspaces and alignment it has */
    const char *name;    /* NULL: the kind's */
    size_t budget_bytes;
    int n_threads;
    bool native_bf16;
    int capability;      /* limits.capability */
    mt_meter_fn fn;      /* may be NULL; called on the submitting thread, as the next */
    void (*copied)(void *ctx, enum mt_stream s, const struct mt_copy *c); /* a copy was submitted; may be NULL */
    void *ctx;
};
int mt_device_create_meter(mt_device **out, const struct mt_meter_params *p, struct mt_err *err);
