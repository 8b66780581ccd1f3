/* SPDX-License-Identifier: Apache-2.0 */
/* What is posted waits in a list until its other side is posted, which copies it. */
#include "net_threads.h"

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "net/net_priv.h"

enum { MAX_SIZE = 64, MOST = 64 };

/* Operations of one way that their other side has not come to, by direction; one of both lists is empty. */
struct posted {
    struct mt_wire_op *op[MOST];
    size_t n;
};

struct end {
    mt_wire wire;
    mt_net_threads *all;
};

struct mt_net_threads {
    pthread_mutex_t lock;
    int size;
    struct end end[MAX_SIZE];
    mt_net *net[MAX_SIZE];
    struct posted (*posted)[MAX_SIZE][2]; /* [size] by sender, receiver, whether it sends */
    int ended; /* a host that told so, or -1 */
    char why[MT_NET_TEXT];
};

static struct posted *list_of(mt_net_threads *t, int own, const struct mt_wire_op *op, bool sends)
{
    return op->sends ? &t->posted[own][op->host][sends] : &t->posted[op->host][own][sends];
}

static void take_out(struct posted *p, size_t i)
{
    memmove(&p->op[i], &p->op[i + 1], (--p->n - i) * sizeof(*p->op));
}

static void copy(struct mt_wire_op *from, struct mt_wire_op *to)
{
    to->moved = MT_MIN(from->bytes, to->bytes);
    if (to->moved)
        memcpy(to->data, from->data, to->moved);
    from->request = to->request = 1;
}

static int post(mt_wire *w, struct mt_wire_op *op, struct mt_err *err)
{
    mt_net_threads *t = ((struct end *)w)->all;
    int rc = 0;
    op->request = 0;
    pthread_mutex_lock(&t->lock);
    struct posted *other = list_of(t, w->rank, op, !op->sends), *own = list_of(t, w->rank, op, op->sends);
    if (other->n) {
        copy(op->sends ? op : other->op[0], op->sends ? other->op[0] : op);
        take_out(other, 0);
    } else if (own->n < MOST) {
        own->op[own->n++] = op;
    } else {
        rc = mt_fail(err, MT_ERR_RUNTIME, -ENOSPC, "host %d does not take what it is sent", op->host);
    }
    pthread_mutex_unlock(&t->lock);
    return rc;
}

static int test(mt_wire *w, struct mt_wire_op *op, bool *over, struct mt_err *)
{
    mt_net_threads *t = ((struct end *)w)->all;
    pthread_mutex_lock(&t->lock);
    *over = op->request != 0;
    pthread_mutex_unlock(&t->lock);
    return 0;
}

static void cancel(mt_wire *w, struct mt_wire_op *const *op, size_t n)
{
    mt_net_threads *t = ((struct end *)w)->all;
    pthread_mutex_lock(&t->lock);
    for (size_t i = 0; i < n; i++) {
        struct posted *own = list_of(t, w->rank, op[i], op[i]->sends);
        for (size_t k = own->n; k-- > 0;)
            if (own->op[k] == op[i])
                take_out(own, k);
    }
    pthread_mutex_unlock(&t->lock);
}

static bool hear(mt_wire *w, int *host, char why[MT_NET_TEXT])
{
    mt_net_threads *t = ((struct end *)w)->all;
    pthread_mutex_lock(&t->lock);
    bool heard = t->ended >= 0 && t->ended != w->rank;
    *host = t->ended;
    memcpy(why, t->why, MT_NET_TEXT);
    pthread_mutex_unlock(&t->lock);
    return heard;
}

static void tell(mt_wire *w, const char *why)
{
    mt_net_threads *t = ((struct end *)w)->all;
    pthread_mutex_lock(&t->lock);
    if (t->ended < 0) {
        t->ended = w->rank;
        snprintf(t->why, sizeof(t->why), "%s", why);
    }
    pthread_mutex_unlock(&t->lock);
}

/* The threads end by themselves. */
static void part(mt_wire *, bool, int)
{
}

int mt_net_threads_create(mt_net_threads **out, int size, double deadline_s, const struct mt_net_fault *fault,
                          struct mt_err *err)
{
    if (size < 1 || size > MAX_SIZE)
        return mt_fail(err, MT_ERR_USAGE, -EINVAL, "%d hosts", size);
    mt_net_threads *t = mt_calloc(1, sizeof(*t));
    if (t)
        t->posted = mt_calloc((size_t)size, sizeof(*t->posted));
    if (!t || !t->posted) {
        free(t);
        return mt_fail_nomem(err, "hosts as threads", sizeof(*t));
    }
    pthread_mutex_init(&t->lock, NULL);
    t->size = size;
    t->ended = -1;
    int rc = 0;
    for (int i = 0; i < size && !rc; i++) {
        t->end[i] = (struct end){{i, size, post, test, cancel, hear, tell, part}, t};
        mt_wire *wire = &t->end[i].wire;
        if (fault && fault->host == i)
            rc = mt_net_fault_create(&wire, wire, fault, err);
        if (!rc)
            rc = mt_net_create(&t->net[i], wire, deadline_s, err);
    }
    *out = t;
    if (rc)
        mt_net_threads_destroy(out);
    return rc;
}

mt_net *mt_net_threads_of(mt_net_threads *t, int rank)
{
    return t->net[rank];
}

void mt_net_threads_destroy(mt_net_threads **threads)
{
    mt_net_threads *t = *threads;
    if (!t)
        return;
    for (int i = 0; i < t->size; i++)
        mt_net_close(&t->net[i], true, 0);
    pthread_mutex_destroy(&t->lock);
    free(t->posted);
    free(t);
    *threads = NULL;
}
