/* SPDX-License-Identifier: Apache-2.0 */
/* Wraps a backend and breaks chosen operations: for tests of what the layers above do then. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "store/io_backend.h"

enum { REORDERED = 4 }; /* results that are held back, to be returned in reverse order */

struct fault_io {
    struct mt_io base;
    struct mt_io *inner;
    struct mt_io_fault f;
    uint64_t seen;
    unsigned inner_in_flight;
    struct mt_io_result *made; /* results made up without an operation */
    size_t n_made;
    struct mt_io_op *late; /* operations that wait until nothing else is under way */
    size_t n_late;
};

static struct fault_io *fault(mt_io *io)
{
    return (struct fault_io *)io;
}

static void fault_destroy(mt_io *io)
{
    struct fault_io *w = fault(io);
    mt_io_destroy(&w->inner);
    free(w->made);
    free(w->late);
    free(w);
}

static int fault_set_files(mt_io *io, const int *fds, int n, struct mt_err *err)
{
    return mt_io_set_files(fault(io)->inner, fds, n, err);
}

static int fault_set_buffers(mt_io *io, const struct iovec *iov, int n)
{
    return mt_io_set_buffers(fault(io)->inner, iov, n);
}

static bool hits(struct fault_io *w, const struct mt_io_op *op)
{
    if (!(op->write ? w->f.writes : w->f.reads))
        return false;
    uint64_t n = ++w->seen;
    return n >= w->f.nth && (!w->f.count || n - w->f.nth < w->f.count);
}

static int64_t told(enum mt_io_fault_kind k)
{
    switch (k) {
    case MT_IO_FAULT_EIO:
        return -EIO;
    case MT_IO_FAULT_ENOSPC:
        return -ENOSPC;
    case MT_IO_FAULT_EAGAIN:
        return -EAGAIN;
    case MT_IO_FAULT_EINTR:
        return -EINTR;
    default:
        return 0;
    }
}

static int pass_on(struct fault_io *w, const struct mt_io_op *op)
{
    int rc = mt_io_submit(w->inner, op, 1);
    w->inner_in_flight += !rc;
    return rc;
}

static int fault_submit(mt_io *io, const struct mt_io_op *ops, int n)
{
    struct fault_io *w = fault(io);
    int rc = 0;
    for (int i = 0; i < n && !rc; i++) {
        struct mt_io_op op = ops[i];
        bool hit = hits(w, &op);
        if (hit && w->f.kind == MT_IO_FAULT_DELAY) {
            w->late[w->n_late++] = op;
        } else if (hit && w->f.kind == MT_IO_FAULT_SHORT) {
            op.bytes = MT_MAX(op.bytes / 2 / 512 * 512, MT_MIN(op.bytes, (size_t)512));
            rc = pass_on(w, &op);
        } else if (hit && w->f.kind != MT_IO_FAULT_REORDER) {
            w->made[w->n_made++] = (struct mt_io_result){op.tag, told(w->f.kind)};
        } else {
            rc = pass_on(w, &op);
        }
    }
    return rc;
}

static int wait_inner(struct fault_io *w, struct mt_io_result *out, int max)
{
    int n = mt_io_wait(w->inner, out, max);
    w->inner_in_flight -= n > 0 ? (unsigned)n : 0;
    return n;
}

static int wait_reordered(struct fault_io *w, struct mt_io_result *out, int max)
{
    int n = wait_inner(w, out, max);
    while (n > 0 && n < MT_MIN(max, (int)REORDERED) && w->inner_in_flight) {
        int more = wait_inner(w, out + n, max - n);
        if (more <= 0)
            break;
        n += more;
    }
    for (int i = 0; i < n / 2; i++) {
        struct mt_io_result r = out[i];
        out[i] = out[n - 1 - i];
        out[n - 1 - i] = r;
    }
    return n;
}

static int fault_wait(mt_io *io, struct mt_io_result *out, int max)
{
    struct fault_io *w = fault(io);
    if (w->n_made) {
        int n = (int)MT_MIN(w->n_made, (size_t)max);
        memcpy(out, w->made, (size_t)n * sizeof(*out));
        memmove(w->made, w->made + n, (w->n_made - (size_t)n) * sizeof(*out));
        w->n_made -= (size_t)n;
        return n;
    }
    while (w->n_late && !w->inner_in_flight) {
        int rc = pass_on(w, &w->late[--w->n_late]);
        if (rc)
            return rc;
    }
    return w->f.kind == MT_IO_FAULT_REORDER ? wait_reordered(w, out, max) : wait_inner(w, out, max);
}

static void fault_wake(mt_io *io)
{
    mt_io_wake(fault(io)->inner);
}

static const struct mt_io_backend backend = {
    .name = "faulty",
    .destroy = fault_destroy,
    .set_files = fault_set_files,
    .set_buffers = fault_set_buffers,
    .submit = fault_submit,
    .wait = fault_wait,
    .wake = fault_wake,
};

int mt_io_create_fault(mt_io **out, mt_io *inner, const struct mt_io_fault *f, unsigned depth,
                       struct mt_err *err)
{
    struct fault_io *w = mt_calloc(1, sizeof(*w));
    if (w) {
        w->made = mt_calloc(depth, sizeof(*w->made));
        w->late = mt_calloc(depth, sizeof(*w->late));
    }
    if (!w || !w->made || !w->late) {
        mt_io_destroy(&inner);
        if (w)
            fault_destroy(&w->base);
        return mt_fail_nomem(err, "the fault wrapper", sizeof(*w));
    }
    w->base.backend = &backend;
    w->inner = inner;
    w->f = *f;
    *out = &w->base;
    return 0;
}

int mt_io_fault_parse(struct mt_io_fault *out, const char *text, struct mt_err *err)
{
    static const char *const kinds[] = {"none",  "eio",   "enospc", "eagain", "eintr",
                                        "short", "zero", "delay",  "reorder"};
    char dir[16] = "", kind[16] = "";
    unsigned long long nth = 1, count = 1;
    int n = sscanf(text, "%15[^:]:%15[^:]:%llu:%llu", dir, kind, &nth, &count);
    struct mt_io_fault f = {.reads = strcmp(dir, "write") != 0, .writes = strcmp(dir, "read") != 0,
                            .nth = nth, .count = count};
    bool known = !strcmp(dir, "read") || !strcmp(dir, "write") || !strcmp(dir, "any");
    for (size_t i = 1; i < MT_ARRAY_LEN(kinds); i++)
        if (!strcmp(kind, kinds[i]))
            f.kind = (enum mt_io_fault_kind)i;
    if (n < 2 || !known || !f.kind || !nth)
        return mt_fail(err, MT_ERR_USAGE, -EINVAL,
                       "\"%s\" is no I/O fault: read|write|any, then :kind:nth:count", text);
    *out = f;
    return 0;
}
