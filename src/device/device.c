/* SPDX-License-Identifier: Apache-2.0 */
/* The checks and calls of everything but operations (ops.c). */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include "device/backend.h"
#include "device/products.h"

struct mt_device_limits mt_device_kind_limits(const struct mt_device_kind *k, size_t budget_bytes, int n_threads)
{
    return (struct mt_device_limits){.kind = k->name, .budget_bytes = budget_bytes, .own_bytes = k->own_bytes,
                                     .n_threads = n_threads,
                                     .shares_host_memory = k->shares_host_memory, .alignment = k->alignment,
                                     .row_bucket = k->row_bucket, .coded_rows = k->coded_rows, .e4m3 = true,
                                     .sides = k->sides, .side_bytes = k->side_bytes};
}

void mt_device_destroy(mt_device **dev)
{
    if (*dev)
        (*dev)->backend->destroy(*dev);
    *dev = NULL;
}

const struct mt_device_limits *mt_device_limits(const mt_device *dev)
{
    return &dev->limits;
}

/* Calls what the backend has, or the one of the device inside; if neither has it the value is `none`. */
#define CALL(none, dev, does, ...)                                                                 \
    ({                                                                                             \
        mt_device *who = (dev)->backend->does || !(dev)->inner ? (dev) : (dev)->inner;             \
        who->backend->does ? who->backend->does(who, ##__VA_ARGS__) : (none);                      \
    })

/* Functions of device.h that call what the backend has, with what they return if it has nothing. */
#define FORWARD(type, name, parameters, none, does, ...)                                           \
    type name parameters                                                                           \
    {                                                                                              \
        return CALL(none, dev, does, ##__VA_ARGS__);                                               \
    }
#define FORWARD_VOID(name, parameters, does, ...)                                                  \
    void name parameters                                                                           \
    {                                                                                              \
        CALL((void)0, dev, does, ##__VA_ARGS__);                                                   \
    }
FORWARD(int, mt_device_alloc, (mt_device *dev, size_t bytes, const char *tag, void **out, struct mt_err *err), 0,
        alloc, bytes, tag, out, err)
FORWARD(int, mt_device_register_host, (mt_device *dev, void *ptr, size_t bytes, struct mt_err *err), 0,
        register_host, ptr, bytes, err)
FORWARD(int, mt_event_create, (mt_device *dev, mt_event **out, struct mt_err *err), 0, event_create, out, err)
FORWARD(int, mt_event_record, (mt_device *dev, mt_event *ev, enum mt_stream s, struct mt_err *err), 0, event_record,
        ev, s, err)
FORWARD(int, mt_event_wait, (mt_device *dev, mt_event *ev, enum mt_stream s, struct mt_err *err), 0, event_wait, ev,
        s, err)
FORWARD(int, mt_event_sync, (mt_device *dev, mt_event *ev, struct mt_err *err), 0, event_sync, ev, err)
FORWARD(int, mt_device_call, (mt_device *dev, void (*fn)(void *ctx), void *ctx, struct mt_err *err), 0, call, fn, ctx,
        err)
FORWARD(int, mt_device_sync, (mt_device *dev, struct mt_err *err), 0, sync, err)
FORWARD(int, mt_device_status, (mt_device *dev, struct mt_err *err), 0, status, err)
FORWARD(bool, mt_device_adopt_findings, (mt_device *dev, const char *text), false, adopt_findings, text)
FORWARD(size_t, mt_device_products, (mt_device *dev, struct mt_str *out), 0, products, out)
FORWARD(bool, mt_device_adopt_products, (mt_device *dev, const char *text), !*text, adopt_products, text)
FORWARD(size_t, mt_device_distrust, (mt_device *dev), 0, distrust, true)
FORWARD_VOID(mt_device_poison, (mt_device *dev, void *ptr, size_t bytes), poison, ptr, bytes)
FORWARD_VOID(mt_device_unregister_host, (mt_device *dev, void *ptr), unregister_host, ptr)
FORWARD_VOID(mt_device_turn_to, (mt_device *dev, int side), turn_to, side)
FORWARD_VOID(mt_device_findings, (mt_device *dev, struct mt_str *out), findings, out)
FORWARD_VOID(mt_device_tune, (mt_device *dev, bool on), tune, on)
FORWARD_VOID(mt_device_doubt, (mt_device *dev), doubt)

void mt_device_free(mt_device *dev, void *ptr)
{
    if (ptr)
        CALL((void)0, dev, free, ptr);
}

size_t mt_device_bytes_used(const mt_device *dev)
{
    return CALL(0, (mt_device *)(uintptr_t)dev, bytes_used);
}

void mt_event_destroy(mt_event **ev)
{
    if (*ev)
        (*ev)->dev->backend->event_destroy(*ev);
    *ev = NULL;
}

int64_t mt_event_time_ns(mt_event *ev)
{
    return ev->dev->backend->event_time_ns ? ev->dev->backend->event_time_ns(ev) : 0;
}

int mt_device_copy(mt_device *dev, enum mt_stream s, const struct mt_copy *c, struct mt_err *err)
{
    if (!c->dst || !c->src || (c->rows > 1 && (c->dst_pitch < c->width || c->src_pitch < c->width)))
        return mt_fail(err, MT_ERR_DEVICE, -EINVAL, "copy: invalid: %zu rows of %zu bytes at pitches %zu, %zu",
                       c->rows, c->width, c->dst_pitch, c->src_pitch);
    return c->width && c->rows ? CALL(0, dev, copy, s, c, err) : 0;
}

void mt_device_range_begin(mt_device *dev, const char *fmt, ...)
{
    char name[80];
    va_list ap;
    if (!dev->backend->range)
        return;
    va_start(ap, fmt);
    vsnprintf(name, sizeof(name), fmt, ap);
    va_end(ap);
    dev->backend->range(dev, name);
}

void mt_device_range_end(mt_device *dev)
{
    if (dev->backend->range)
        dev->backend->range(dev, NULL);
}

int mt_device_open_sides(mt_device *dev, int n, void *memory, struct mt_err *err)
{
    if (n < 0 || n > dev->limits.sides)
        return mt_fail(err, MT_ERR_DEVICE, -EINVAL, "%d side streams: %s has at most %d", n, dev->limits.name,
                       dev->limits.sides);
    return n ? CALL(0, dev, open_sides, n, memory, err) : 0;
}

bool mt_device_share_findings(mt_device *dev, mt_device *first)
{
    return dev->backend == first->backend && CALL(false, dev, share_findings, first);
}

void mt_device_products_of(mt_device *dev, char *buf, size_t len)
{
    *buf = 0;
    CALL((void)0, dev, products_of, buf, len);
}

void mt_device_trust(mt_device *dev)
{
    CALL(0, dev, distrust, false);
}
