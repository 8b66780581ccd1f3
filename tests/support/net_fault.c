/* SPDX-License-Identifier: Apache-2.0 */
#include "net_fault.h"

#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/mem.h"

/* What stands for a send of the inner wire, whose poster may be gone before. */
struct copy {
    struct mt_wire_op op;
    struct copy *next;
    char data[];
};

struct faulty {
    mt_wire wire;
    mt_wire *inner;
    struct mt_net_fault f;
    size_t n; /* sends so far */
    int64_t until_ns; /* LATE: what goes to `late_to` waits so long */
    int late_to;
    struct copy *copies;
};

/* Of a send: the inner wire has it; it is over for its poster; or it is still to be posted. */
enum { PASSED, LOST, WAITS };

static int post_copy(struct faulty *w, const struct mt_wire_op *op, size_t bytes, size_t flip, struct mt_err *err)
{
    struct copy *c = mt_calloc(1, sizeof(*c) + op->bytes);
    if (!c)
        return mt_fail_nomem(err, "a fault", op->bytes);
    memcpy(c->data, op->data, op->bytes);
    if (flip < bytes)
        c->data[flip] ^= 4;
    c->op = *op;
    c->op.data = c->data;
    c->op.bytes = bytes;
    c->next = w->copies;
    w->copies = c;
    return w->inner->post(w->inner, &c->op, err);
}

/* The fault at this send; it has the content of a copy, or none. */
static int make_fault(struct faulty *w, struct mt_wire_op *op, struct mt_err *err)
{
    const size_t none = SIZE_MAX;
    int rc = 0;
    op->fate = LOST;
    switch (w->f.kind) {
    case MT_NET_FLIPPED:
        return post_copy(w, op, op->bytes, op->bytes / 2, err);
    case MT_NET_SHORT:
        return post_copy(w, op, op->bytes / 2, none, err);
    case MT_NET_DOUBLED:
        rc = post_copy(w, op, op->bytes, none, err);
        return rc ? rc : post_copy(w, op, op->bytes, none, err);
    case MT_NET_LATE:
        w->until_ns = mt_now_ns() + (int64_t)(w->f.seconds * 1e9);
        w->late_to = op->host;
        op->fate = WAITS;
        return 0;
    default:
        return 0;
    }
}

static int post(mt_wire *wire, struct mt_wire_op *op, struct mt_err *err)
{
    struct faulty *w = (struct faulty *)wire;
    if (!op->sends)
        return w->inner->post(w->inner, op, err);
    size_t n = w->n++;
    if (n == w->f.nth || (n > w->f.nth && w->f.kind == MT_NET_SILENT))
        return make_fault(w, op, err);
    if (w->until_ns && op->host == w->late_to) {
        op->fate = WAITS;
        return 0;
    }
    return w->inner->post(w->inner, op, err);
}

/* Operations are tested in the order in which they were posted, and those before one end first. */
static int test(mt_wire *wire, struct mt_wire_op *op, bool *over, struct mt_err *err)
{
    struct faulty *w = (struct faulty *)wire;
    *over = op->fate == LOST;
    if (*over)
        return 0;
    if (op->fate == WAITS) {
        if (mt_now_ns() < w->until_ns)
            return 0;
        int rc = w->inner->post(w->inner, op, err);
        if (rc)
            return rc;
        op->fate = PASSED;
    }
    return w->inner->test(w->inner, op, over, err);
}

static void cancel(mt_wire *wire, struct mt_wire_op *const *op, size_t n)
{
    struct faulty *w = (struct faulty *)wire;
    for (size_t i = 0; i < n; i++)
        if (op[i]->fate == PASSED)
            w->inner->cancel(w->inner, &op[i], 1);
}

static bool hear(mt_wire *wire, int *host, char why[MT_NET_TEXT])
{
    struct faulty *w = (struct faulty *)wire;
    return w->inner->hear(w->inner, host, why);
}

static void tell(mt_wire *wire, const char *why)
{
    struct faulty *w = (struct faulty *)wire;
    w->inner->tell(w->inner, why);
}

static void close_wire(mt_wire *wire, bool ok, int code)
{
    struct faulty *w = (struct faulty *)wire;
    if (w->f.sends)
        *w->f.sends = w->n;
    for (struct copy *c = w->copies, *next; c; c = next) {
        next = c->next;
        struct mt_wire_op *op = &c->op;
        w->inner->cancel(w->inner, &op, 1);
        free(c);
    }
    w->inner->close(w->inner, ok, code);
    free(w);
}

int mt_net_fault_create(mt_wire **out, mt_wire *inner, const struct mt_net_fault *fault, struct mt_err *err)
{
    struct faulty *w = mt_calloc(1, sizeof(*w));
    if (!w)
        return mt_fail_nomem(err, "a fault", sizeof(*w));
    w->wire = (mt_wire){inner->rank, inner->size, post, test, cancel, hear, tell, close_wire};
    w->inner = inner;
    w->f = *fault;
    *out = &w->wire;
    return 0;
}
