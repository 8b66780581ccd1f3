/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "device/device.h"

/**
 * Wraps a device so that the nth call (from 1) of the kind `what` fails; the wrapper owns `inner` and
 * destroys it (if this function fails, the caller still owns it). For tests of error paths.
 *
 *   "gemm" (any operation's name), "copy", "call", "record", "wait", or "any" of these: that submission and all
 *       later ones return -EIO and are dropped.
 *   "async " before such a name: the submission is accepted, but its work and all later work are dropped;
 *       only mt_event_sync(), mt_device_sync() and mt_device_status() return the -EIO.
 *   "alloc", "event" (creation), "register": only that call fails, with -ENOMEM.
 *
 * Events are recorded and fire in any case.
 */
int mt_device_create_fault(mt_device **out, mt_device *inner, const char *what, int64_t nth,
                           struct mt_err *err);
