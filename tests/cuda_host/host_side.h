/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdlib.h>

#include "device/device.h"
#include "device/ops.h"
#include "kinds/kinds.h"
#include "test.h"

/* What tests of the emulated CUDA device share: each call ends the test if it fails. */
enum { MIB = 1 << 20 };

static inline mt_device *open_device(size_t budget)
{
    mt_device *dev = NULL;
    struct mt_device_params p = {.kind = "cuda", .budget_bytes = budget, .n_threads = 12};
    MUST(mt_device_create, &dev, &p);
    return dev;
}

static inline void *take(mt_device *dev, size_t bytes, const char *tag)
{
    void *p = NULL;
    MUST(mt_device_alloc, dev, bytes, tag, &p);
    return p;
}

static inline void must_copy(mt_device *dev, enum mt_stream s, const struct mt_copy *c)
{
    MUST(mt_device_copy, dev, s, c);
}

static inline void must_sync(mt_device *dev)
{
    MUST(mt_device_sync, dev);
}
