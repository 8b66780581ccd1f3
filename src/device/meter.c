/* SPDX-License-Identifier: Apache-2.0 */
#include "device/meter.h"

#include <stdio.h>
#include <stdlib.h>

#include "base/mem.h"
#include "device/backend.h"
#include "device/op.h"

/* First address of its buffers, which are never accessed. */
enum { FIRST_ADDRESS_BITS = 44 };

struct meter {
    struct mt_device base;
    const struct mt_device_kind *kind;
    mt_meter_fn fn;
    void (*copied)(void *ctx, enum mt_stream s, const struct mt_copy *c);
    void *ctx;
    uintptr_t next;
    size_t used;
    int sides, side; /* that are open; to which it is turned */
};

static void report(struct meter *m, enum mt_dev_op op, const void *args)
{
    struct mt_metered metered;
    mt_dev_op_cost(op, args, &metered);
    metered.beside = m->side ? m->sides : 1;
    if (m->fn)
        m->fn(m->ctx, &metered, args);
}

static int meter_submit(mt_device *dev, enum mt_dev_op op, const void *args, struct mt_err *)
{
    report((struct meter *)dev, op, args);
    return 0;
}

/* --- memory, events, copies: next to nothing happens ------------------------------------------------- */

static void meter_destroy(mt_device *dev)
{
    free(dev);
}

static int meter_alloc(mt_device *dev, size_t bytes, const char *tag, void **out, struct mt_err *err)
{
    struct meter *m = (struct meter *)dev;
    size_t need = mt_align_up(MT_MAX(bytes, (size_t)1), dev->limits.alignment);
    if (need > dev->limits.budget_bytes - m->used)
        return mt_fail(err, MT_ERR_NO_FIT, -ENOMEM, "%s: %zu bytes exceed the device budget of %zu", tag,
                       m->used + need, dev->limits.budget_bytes);
    *out = (void *)m->next;
    m->next += need;
    m->used += need;
    return 0;
}

static size_t meter_used(const mt_device *dev)
{
    return ((const struct meter *)dev)->used;
}

static void meter_poison(mt_device *dev, void *ptr, size_t bytes)
{
    report((struct meter *)dev, MT_DEV_ZERO, &(struct mt_zero){ptr, bytes});
}

static int meter_event_create(mt_device *dev, mt_event **out, struct mt_err *err)
{
    mt_event *ev = mt_calloc(1, sizeof(*ev));
    if (!ev)
        return mt_fail_nomem(err, "an event", sizeof(*ev));
    ev->dev = dev;
    *out = ev;
    return 0;
}

static void meter_event_destroy(mt_event *ev)
{
    free(ev);
}

static int meter_copy(mt_device *dev, enum mt_stream s, const struct mt_copy *c, struct mt_err *)
{
    const struct meter *m = (const struct meter *)dev;
    if (m->copied)
        m->copied(m->ctx, s, c);
    return 0;
}

static int meter_open_sides(mt_device *dev, int n, void *, struct mt_err *)
{
    ((struct meter *)dev)->sides = n;
    return 0;
}

static void meter_turn_to(mt_device *dev, int side)
{
    ((struct meter *)dev)->side = side;
}

static size_t meter_workspace(mt_device *dev, enum mt_dev_op op, const void *args)
{
    return ((struct meter *)dev)->kind->workspace(&dev->limits, op, args);
}

static const struct mt_device_backend meter_backend = {
    .destroy = meter_destroy,
    .alloc = meter_alloc,
    .bytes_used = meter_used,
    .poison = meter_poison,
    .event_create = meter_event_create,
    .event_destroy = meter_event_destroy,
    .copy = meter_copy,
    .open_sides = meter_open_sides,
    .turn_to = meter_turn_to,
    .submit = meter_submit,
    .workspace = meter_workspace,
};

int mt_device_create_meter(mt_device **out, const struct mt_meter_params *p, struct mt_err *err)
{
    struct meter *m = mt_calloc(1, sizeof(*m));
    if (!m)
        return mt_fail_nomem(err, "a counting device", sizeof(*m));
    m->kind = p->kind;
    m->base.backend = &meter_backend;
    m->base.limits = mt_device_kind_limits(p->kind, p->budget_bytes, MT_MAX(p->n_threads, 1));
    m->base.limits.native_bf16 = p->native_bf16;
    m->base.limits.capability = p->capability;
    snprintf(m->base.limits.name, sizeof(m->base.limits.name), "%s", p->name ? p->name : p->kind->name);
    m->fn = p->fn;
    m->copied = p->copied;
    m->ctx = p->ctx;
    m->next = (uintptr_t)1 << FIRST_ADDRESS_BITS;
    *out = &m->base;
    return 0;
}
