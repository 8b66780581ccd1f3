/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A device that forwards to another and fails once. There are three kinds of failure, since callers meet them in
 * different places: a refused submission, work that fails after its submission was accepted ("async "), and a
 * refused resource (an allocation, an event, a registration).
 */
#include "device_fault.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "device/backend.h"
#include "device/op.h"
#include "device/products.h"

struct fault_device {
    struct mt_device base; /* base.inner: the device that it forwards to */
    const char *what; /* of `submissions`, `resources` or an operation */
    bool async;
    int64_t nth;
    pthread_mutex_t lock;
    int64_t count;      /* calls of that kind so far; under lock */
    struct mt_err error; /* sticky, code 0: none; under lock */
};

struct fault_event {
    struct mt_event base;
    mt_event *inner;
};

static const char *const submissions[] = {"any", "copy", "call", "record", "wait"}; /* and every operation's name */
static const char *const resources[] = {"alloc", "event", "register"};

static struct fault_device *fault(mt_device *dev)
{
    return (struct fault_device *)dev;
}

static mt_event *inner_event(mt_event *ev)
{
    return ((struct fault_event *)ev)->inner;
}

static int sticky(struct fault_device *d, struct mt_err *err)
{
    pthread_mutex_lock(&d->lock);
    int code = d->error.code;
    if (code && err)
        *err = d->error;
    pthread_mutex_unlock(&d->lock);
    return code;
}

/* Counts a submission. *drop: it must not reach the inner device. */
static int submit(struct fault_device *d, const char *what, bool *drop, struct mt_err *err)
{
    pthread_mutex_lock(&d->lock);
    bool counts = !strcmp(d->what, what) || !strcmp(d->what, "any");
    *drop = d->error.code != 0;
    if (!*drop && counts && ++d->count == d->nth) {
        *drop = true;
        mt_fail(&d->error, MT_ERR_DEVICE, -EIO, "fault device: %s %lld failed", d->what,
                (long long)d->nth);
    }
    int rc = *drop && !d->async ? d->error.code : 0;
    if (rc && err)
        *err = d->error;
    pthread_mutex_unlock(&d->lock);
    return rc;
}

/* Counts a request for a resource. The nth is refused; the device goes on. */
static int take(struct fault_device *d, const char *what, struct mt_err *err)
{
    pthread_mutex_lock(&d->lock);
    bool refuse = !strcmp(d->what, what) && ++d->count == d->nth;
    pthread_mutex_unlock(&d->lock);
    return refuse ? mt_fail(err, MT_ERR_NO_FIT, -ENOMEM, "fault device: %s %lld refused", what,
                            (long long)d->nth)
                  : 0;
}

static void fault_destroy(mt_device *dev)
{
    struct fault_device *d = fault(dev);
    mt_device_destroy(&dev->inner);
    pthread_mutex_destroy(&d->lock);
    free(d);
}

static int fault_alloc(mt_device *dev, size_t bytes, const char *tag, void **out, struct mt_err *err)
{
    int rc = take(fault(dev), "alloc", err);
    return rc ? rc : mt_device_alloc(dev->inner, bytes, tag, out, err);
}

static void fault_poison(mt_device *dev, void *ptr, size_t bytes)
{
    if (!sticky(fault(dev), NULL))
        mt_device_poison(dev->inner, ptr, bytes);
}

static int fault_register_host(mt_device *dev, void *ptr, size_t bytes, struct mt_err *err)
{
    int rc = take(fault(dev), "register", err);
    return rc ? rc : mt_device_register_host(dev->inner, ptr, bytes, err);
}

static int fault_event_create(mt_device *dev, mt_event **out, struct mt_err *err)
{
    struct fault_event *ev = mt_calloc(1, sizeof(*ev));
    if (!ev)
        return mt_fail_nomem(err, "an event", sizeof(*ev));
    int rc = take(fault(dev), "event", err);
    if (!rc)
        rc = mt_event_create(dev->inner, &ev->inner, err);
    if (rc) {
        free(ev);
        return rc;
    }
    ev->base.dev = dev;
    *out = &ev->base;
    return 0;
}

static void fault_event_destroy(mt_event *event)
{
    struct fault_event *ev = (struct fault_event *)event;
    mt_event_destroy(&ev->inner);
    free(ev);
}

/* Always forwarded, even after a failure: events still fire. */
static int fault_event_record(mt_device *dev, mt_event *ev, enum mt_stream s, struct mt_err *err)
{
    bool drop;
    int rc = submit(fault(dev), "record", &drop, err);
    int inner_rc = mt_event_record(dev->inner, inner_event(ev), s, rc ? NULL : err);
    return rc ? rc : inner_rc;
}

static int fault_event_wait(mt_device *dev, mt_event *ev, enum mt_stream s, struct mt_err *err)
{
    bool drop;
    int rc = submit(fault(dev), "wait", &drop, err);
    return drop ? rc : mt_event_wait(dev->inner, inner_event(ev), s, err);
}

static int fault_event_sync(mt_device *dev, mt_event *ev, struct mt_err *err)
{
    int rc = mt_event_sync(dev->inner, inner_event(ev), err);
    return rc ? rc : sticky(fault(dev), err);
}

static int64_t fault_event_time_ns(mt_event *ev)
{
    return mt_event_time_ns(inner_event(ev));
}

static int fault_copy(mt_device *dev, enum mt_stream s, const struct mt_copy *c, struct mt_err *err)
{
    bool drop;
    int rc = submit(fault(dev), "copy", &drop, err);
    return drop ? rc : mt_device_copy(dev->inner, s, c, err);
}

static int fault_call(mt_device *dev, void (*fn)(void *ctx), void *ctx, struct mt_err *err)
{
    bool drop;
    int rc = submit(fault(dev), "call", &drop, err);
    return drop ? rc : mt_device_call(dev->inner, fn, ctx, err);
}

static int fault_sync(mt_device *dev, struct mt_err *err)
{
    int rc = mt_device_sync(dev->inner, err);
    return rc ? rc : sticky(fault(dev), err);
}

static int fault_status(mt_device *dev, struct mt_err *err)
{
    int rc = mt_device_status(dev->inner, err);
    return rc ? rc : sticky(fault(dev), err);
}

static bool fault_share_findings(mt_device *dev, mt_device *first)
{
    return mt_device_share_findings(dev->inner, first->inner);
}

static int fault_submit(mt_device *dev, enum mt_dev_op op, const void *args, struct mt_err *err)
{
    bool drop;
    mt_device *inner = dev->inner;
    int rc = submit(fault(dev), mt_dev_op_name(op), &drop, err);
    return drop ? rc : inner->backend->submit(inner, op, args, err);
}

static size_t fault_workspace(mt_device *dev, enum mt_dev_op op, const void *args)
{
    return mt_device_workspace(dev->inner, op, args);
}

static const struct mt_device_backend fault_backend = {
    .destroy = fault_destroy,
    .alloc = fault_alloc,
    .poison = fault_poison,
    .register_host = fault_register_host,
    .event_create = fault_event_create,
    .event_destroy = fault_event_destroy,
    .event_record = fault_event_record,
    .event_wait = fault_event_wait,
    .event_sync = fault_event_sync,
    .event_time_ns = fault_event_time_ns,
    .copy = fault_copy,
    .call = fault_call,
    .sync = fault_sync,
    .status = fault_status,
    .share_findings = fault_share_findings,
    .submit = fault_submit,
    .workspace = fault_workspace,
};

/* The list's own copy of the name, which outlives the caller's; NULL: not in the list. */
static const char *look_up(const char *const *list, size_t n, const char *name)
{
    for (size_t i = 0; i < n; i++)
        if (!strcmp(list[i], name))
            return list[i];
    return NULL;
}

static const char *look_up_submission(const char *name)
{
    for (int op = 0; op < MT_N_DEV_OPS; op++)
        if (!strcmp(mt_dev_op_name((enum mt_dev_op)op), name))
            return mt_dev_op_name((enum mt_dev_op)op);
    return look_up(submissions, MT_ARRAY_LEN(submissions), name);
}

int mt_device_create_fault(mt_device **out, mt_device *inner, const char *what, int64_t nth,
                           struct mt_err *err)
{
    bool async = !strncmp(what, "async ", 6);
    const char *name = look_up_submission(what + (async ? 6 : 0));
    if (!name && !async)
        name = look_up(resources, MT_ARRAY_LEN(resources), what);
    if (!name || nth < 1)
        return mt_fail(err, MT_ERR_USAGE, -EINVAL, "fault device: there is no \"%s\" number %lld to fail", what,
                       (long long)nth);
    struct fault_device *d = mt_calloc(1, sizeof(*d));
    if (!d)
        return mt_fail_nomem(err, "the fault device", sizeof(*d));
    *d = (struct fault_device){.base = {&fault_backend, inner->limits, inner},
                               .what = name, .async = async, .nth = nth};
    snprintf(d->base.limits.name, sizeof(d->base.limits.name), "fault on %.110s", inner->limits.name);
    pthread_mutex_init(&d->lock, NULL);
    *out = &d->base;
    return 0;
}
