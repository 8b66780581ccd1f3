/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "device/kind.h"
#include "device/ops.h"

/**
 * What a device implements. Only device.c and ops.c call these functions. ops.c has checked the arguments of
 * operations: backends trust them. `mt_device` is the first member of the backend's own struct. What is NULL does the
 * device inside this one (mt_device.inner), if there is one; else there is nothing to do.
 */
struct mt_device_backend {
    void (*destroy)(mt_device *dev);
    int (*alloc)(mt_device *dev, size_t bytes, const char *tag, void **out, struct mt_err *err);
    void (*free)(mt_device *dev, void *ptr);
    size_t (*bytes_used)(const mt_device *dev);
    void (*poison)(mt_device *dev, void *ptr, size_t bytes);
    int (*register_host)(mt_device *dev, void *ptr, size_t bytes, struct mt_err *err);
    void (*unregister_host)(mt_device *dev, void *ptr);

    int (*event_create)(mt_device *dev, mt_event **out, struct mt_err *err);
    void (*event_destroy)(mt_event *ev);
    int (*event_record)(mt_device *dev, mt_event *ev, enum mt_stream s, struct mt_err *err);
    int (*event_wait)(mt_device *dev, mt_event *ev, enum mt_stream s, struct mt_err *err);
    int (*event_sync)(mt_device *dev, mt_event *ev, struct mt_err *err);
    int64_t (*event_time_ns)(mt_event *ev);
    int (*copy)(mt_device *dev, enum mt_stream s, const struct mt_copy *c, struct mt_err *err);
    int (*call)(mt_device *dev, void (*fn)(void *ctx), void *ctx, struct mt_err *err);
    int (*sync)(mt_device *dev, struct mt_err *err);
    int (*status)(mt_device *dev, struct mt_err *err);
    /* Of devices with limits.sides. */
    int (*open_sides)(mt_device *dev, int n, void *memory, struct mt_err *err);
    void (*turn_to)(mt_device *dev, int side);
    /* `name` NULL ends the calling thread's innermost range. */
    void (*range)(mt_device *dev, const char *name);
    /* Of devices that find out about themselves. */
    void (*findings)(mt_device *dev, struct mt_str *out);
    bool (*adopt_findings)(mt_device *dev, const char *text);
    bool (*share_findings)(mt_device *dev, mt_device *first);
    void (*products_of)(mt_device *dev, char *buf, size_t len);
    void (*tune)(mt_device *dev, bool on);
    size_t (*products)(mt_device *dev, struct mt_str *out);
    bool (*adopt_products)(mt_device *dev, const char *text);
    void (*doubt)(mt_device *dev);
    size_t (*distrust)(mt_device *dev, bool on);

    /* `args` points to the struct that the table of operations names. */
    int (*submit)(mt_device *dev, enum mt_dev_op op, const void *args, struct mt_err *err);
    size_t (*workspace)(mt_device *dev, enum mt_dev_op op, const void *args);
};

struct mt_device {
    const struct mt_device_backend *backend;
    struct mt_device_limits limits;
    mt_device *inner; /* or NULL */
};

/** First member of every backend's event. */
struct mt_event {
    mt_device *dev;
};
