/* SPDX-License-Identifier: Apache-2.0 */
/* Wraps a backend and injects faults into chosen operations, to test the layers above. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "store/io/io.h"

enum {
    REORDERED = 4, /* results that are returned in reverse order */
    LATE_BY = 100,  /* operations by which a stale write is late */
};

/* An operation on a copy of the caller's bytes, or one whose result is to be changed. */
struct changed {
    struct mt_io_op op;
    void *copy;      /* NULL: a read of which a bit is flipped */
    void *tag;       /* of the backend's operation: the caller's, or this struct if the caller has its result already */
    unsigned due_in; /* operations until it is submitted; 0: it has been */
    struct changed *next;
};

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
    struct changed *changed;
    struct mt_io_op half; /* first of two operations that exchange their offsets */
    bool has_half, cannot_wait;
};

static struct fault_io *fault(mt_io *io)
{
    return (struct fault_io *)io;
}

static void fault_destroy(mt_io *io)
{
    struct fault_io *w = fault(io);
    mt_io_destroy(&w->inner); /* waits for its operations under way */
    while (w->changed) {
        struct changed *c = w->changed;
        w->changed = c->next;
        free(c->copy);
        free(c);
    }
    free(w->made);
    free(w->late);
    free(w);
}

static int fault_set_files(mt_io *io, const int *fds, int n, struct mt_err *err)
{
    struct mt_io *inner = fault(io)->inner;
    return inner->backend->set_files(inner, fds, n, err);
}

static int fault_set_buffers(mt_io *io, const struct iovec *iov, int n)
{
    struct mt_io *inner = fault(io)->inner;
    return inner->backend->set_buffers(inner, iov, n);
}

static bool hits(struct fault_io *w, const struct mt_io_op *op)
{
    if (!(op->write ? w->f.writes : w->f.reads))
        return false;
    uint64_t n = ++w->seen;
    return n >= w->f.nth && (!w->f.count || n - w->f.nth < w->f.count);
}

static int64_t reported(enum mt_io_fault_kind k)
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
    int rc = w->inner->backend->submit(w->inner, op, 1);
    w->inner_in_flight += !rc;
    return rc;
}

static void make_result(struct fault_io *w, const struct mt_io_op *op, int64_t res)
{
    w->made[w->n_made++] = (struct mt_io_result){op->tag, res};
}

/* Flips a bit; which one depends only on the number of operations so far. */
static void turn_a_bit(const struct fault_io *w, char *p, size_t bytes)
{
    size_t bit = (size_t)(w->f.nth * 2654435761u % (bytes * 8));
    p[bit / 8] ^= (char)(1 << bit % 8);
}

static struct changed *add_changed(struct fault_io *w, const struct mt_io_op *op, bool copy)
{
    struct changed *c = mt_calloc(1, sizeof(*c));
    if (!c)
        return NULL;
    *c = (struct changed){.op = *op, .tag = op->tag, .next = w->changed};
    if (copy && posix_memalign(&c->copy, 4096, op->bytes)) {
        free(c);
        return NULL;
    }
    if (copy) {
        memcpy(c->copy, op->buf, op->bytes);
        c->op.buf = c->copy;
    }
    w->changed = c;
    return c;
}

static int submit_flipped(struct fault_io *w, const struct mt_io_op *op)
{
    struct changed *c = add_changed(w, op, op->write);
    if (!c)
        return -ENOMEM;
    if (op->write)
        turn_a_bit(w, c->copy, op->bytes);
    return pass_on(w, &c->op);
}

static int submit_stale(struct fault_io *w, const struct mt_io_op *op)
{
    struct changed *c = op->write ? add_changed(w, op, true) : NULL;
    if (op->write && !c)
        return -ENOMEM;
    if (c) {
        c->due_in = LATE_BY;
        c->op.tag = c->tag = c;
    }
    make_result(w, op, (int64_t)op->bytes);
    return 0;
}

/* Submits stale writes that are due. */
static int submit_due(struct fault_io *w)
{
    int rc = 0;
    for (struct changed *c = w->changed; c && !rc; c = c->next)
        if (c->due_in && !--c->due_in)
            rc = pass_on(w, &c->op);
    return rc;
}

static int submit_half(struct fault_io *w, const struct mt_io_op *op)
{
    struct mt_io_op other = w->half, own = *op;
    w->has_half = false;
    own.offset = w->half.offset;
    own.file = w->half.file;
    other.offset = op->offset;
    other.file = op->file;
    return pass_on(w, &own) ?: pass_on(w, &other);
}

static int submit_hit(struct fault_io *w, struct mt_io_op *op)
{
    switch (w->f.kind) {
    case MT_IO_FAULT_DELAY:
        w->late[w->n_late++] = *op;
        return 0;
    case MT_IO_FAULT_SHORT:
        op->bytes = MT_MAX(op->bytes / 2 / 512 * 512, MT_MIN(op->bytes, (size_t)512));
        return pass_on(w, op);
    case MT_IO_FAULT_REORDER:
        return pass_on(w, op);
    case MT_IO_FAULT_FLIP:
        return submit_flipped(w, op);
    case MT_IO_FAULT_STALE:
        return submit_stale(w, op);
    case MT_IO_FAULT_SWAP:
        w->half = *op;
        w->has_half = true;
        return 0;
    case MT_IO_FAULT_HANG:
        return 0;
    case MT_IO_FAULT_WAIT:
        w->cannot_wait = true;
        return pass_on(w, op);
    case MT_IO_FAULT_SUBMIT:
        return -EIO;
    case MT_IO_FAULT_DROP:
        make_result(w, op, (int64_t)op->bytes);
        return 0;
    default:
        make_result(w, op, reported(w->f.kind));
        return 0;
    }
}

static int fault_submit(mt_io *io, const struct mt_io_op *ops, int n)
{
    struct fault_io *w = fault(io);
    int rc = 0;
    for (int i = 0; i < n && !rc; i++) {
        struct mt_io_op op = ops[i];
        rc = submit_due(w);
        if (rc)
            break;
        bool hit = hits(w, &op);
        if (w->has_half && op.write == w->half.write && op.bytes == w->half.bytes)
            rc = submit_half(w, &op);
        else if (hit && !w->has_half)
            rc = submit_hit(w, &op);
        else
            rc = pass_on(w, &op);
    }
    return rc;
}

/* Handles a result of the backend; false: the caller has got one already. */
static bool settle(struct fault_io *w, const struct mt_io_result *r)
{
    for (struct changed **at = &w->changed; *at; at = &(*at)->next) {
        struct changed *c = *at;
        if (c->tag != r->tag || c->due_in)
            continue;
        bool own = c->tag == (void *)c;
        if (!c->copy && r->res > 0)
            turn_a_bit(w, c->op.buf, (size_t)r->res);
        *at = c->next;
        free(c->copy);
        free(c);
        return !own;
    }
    return true;
}

static int wait_inner(struct fault_io *w, struct mt_io_result *out, int max)
{
    int n = w->inner->backend->wait(w->inner, out, max), kept = 0;
    w->inner_in_flight -= n > 0 ? (unsigned)n : 0;
    for (int i = 0; i < n; i++)
        if (settle(w, &out[i]))
            out[kept++] = out[i];
    return n < 0 ? n : kept;
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
    if (w->cannot_wait)
        return -EIO;
    if (w->n_made) {
        int n = (int)MT_MIN(w->n_made, (size_t)max);
        memcpy(out, w->made, (size_t)n * sizeof(*out));
        memmove(w->made, w->made + n, (w->n_made - (size_t)n) * sizeof(*out));
        w->n_made -= (size_t)n;
        return n;
    }
    if (w->has_half && !w->inner_in_flight) { /* no partner came: it is done at its own offset */
        w->has_half = false;
        int rc = pass_on(w, &w->half);
        if (rc)
            return rc;
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
    fault(io)->inner->backend->wake(fault(io)->inner);
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
                                        "short", "zero", "delay",  "reorder",
                                        "flip",  "stale", "swap", "drop", "hang", "wait", "submit"};
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
                       "\"%s\" is not an I/O fault: must be read|write|any:kind:nth[:count]", text);
    *out = f;
    return 0;
}
