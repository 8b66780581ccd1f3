/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Messages over a wire. A message is cut into pieces; each has a header, which says which message of its way it is of,
 * how long that is, where the piece is in it, and its checksum. A few pieces are under way at a time on each way (to a
 * host, or from one), so that one is summed while others move. What is short is in the header's operation.
 *
 * What the wire reads and writes is either memory of large messages, or of this file: short ones, which may be on
 * their caller's stack, are copied.
 */
#include <errno.h>
#include <limits.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/clock.h"
#include "base/lock.h"
#include "base/mem.h"
#include "base/sum64.h"
#include "base/thread.h"
#include "net/net_priv.h"

enum { WINDOW = 4, PIECE = 4 << 20, SHORT = 4096, IDLE_NS = 50000, IDLE_TURNS = 50 };

struct header {
    uint64_t number, total, at, sum;
};

struct piece {
    struct {
        struct header h;
        char data[SHORT]; /* the whole message, if it is short */
    } head;
    struct mt_wire_op op[2]; /* the header, and a piece that is not short */
    bool over[2];
    struct mt_net_message *m;
    size_t at, bytes;
};

/* Messages to one host, or from it. */
struct way {
    struct mt_net_message *first, *last; /* that have not ended */
    struct mt_net_message *next;         /* whose pieces are posted next */
    uint64_t count;                      /* of messages so far */
    struct piece piece[WINDOW];          /* a ring */
    size_t posted, ended;                /* pieces so far */
    int64_t moved_ns;                    /* when the first one has become that, or a piece ended */
};

struct mt_net {
    mt_wire *wire;
    pthread_t thread;
    pthread_mutex_t lock; /* of all that follows, and of the wire */
    pthread_cond_t works; /* something is under way, or quit */
    pthread_cond_t ends;  /* a message has ended */
    double deadline_s;
    struct way *way[2]; /* [size] by direction */
    size_t n_open;      /* messages that have not ended */
    bool quit, told;
    int rc; /* the error that has ended all */
    struct mt_err why;
};

/* --- ends ------------------------------------------------------------------------------------------------------ */

/* Call under lock. */
static void end_message(mt_net *n, struct mt_net_message *m, struct mt_net_message **over)
{
    n->n_open--;
    m->rc = n->rc;
    if (n->rc)
        m->err = n->why;
    if (m->done) {
        m->next = *over;
        *over = m;
        return;
    }
    m->over = true;
    pthread_cond_broadcast(&n->ends);
}

/* Call without the lock. Those that have ended, of the newest first. */
static void call_back(struct mt_net_message *over)
{
    struct mt_net_message *in_order = NULL, *next;
    for (struct mt_net_message *m = over; m; m = next) {
        next = m->next;
        m->next = in_order;
        in_order = m;
    }
    for (struct mt_net_message *m = in_order; m; m = next) {
        next = m->next; /* it is the caller's then */
        m->done(m);
    }
}

static size_t list_pending(struct way *w, struct mt_wire_op **op)
{
    size_t n = 0;
    for (size_t k = w->ended; k < w->posted; k++) {
        struct piece *p = &w->piece[k % WINDOW];
        for (int i = 0; i < 2; i++)
            if (!p->over[i])
                op[n++] = &p->op[i];
    }
    return n;
}

/* Call under lock, with the error in n->why: nothing is under way after it. */
static void end_all(mt_net *n, int rc, struct mt_net_message **over)
{
    n->rc = rc;
    for (int host = 0; host < n->wire->size; host++)
        for (int d = 0; d < 2; d++) {
            struct way *w = &n->way[d][host];
            struct mt_wire_op *op[2 * WINDOW];
            n->wire->cancel(n->wire, op, list_pending(w, op));
            w->posted = w->ended;
            for (struct mt_net_message *m = w->first, *next; m; m = next) {
                next = m->next;
                end_message(n, m, over);
            }
            w->first = w->last = w->next = NULL;
        }
}

static int fail_late(const mt_net *n, int host, bool sends, struct mt_err *err)
{
    return mt_fail(err, MT_ERR_RUNTIME, -ETIMEDOUT,
                   "host %d: nothing %s host %d in %.0f s: it is lost, stopped or cut off (cluster.timeout)", n->wire->rank,
                   sends ? "was taken by" : "came from", host, n->deadline_s);
}

/* --- pieces ---------------------------------------------------------------------------------------------------- */

static size_t n_pieces(const struct mt_net_message *m)
{
    return m->bytes > SHORT ? (m->bytes + PIECE - 1) / PIECE : 1;
}

static struct mt_wire_op op_of(const struct mt_net_message *m, void *data, size_t bytes)
{
    return (struct mt_wire_op){.host = m->host, .sends = m->sends, .data = data, .bytes = bytes};
}

/* The next piece of the way's next message. */
static int post_piece(mt_net *n, struct way *w, struct mt_err *err)
{
    struct mt_net_message *m = w->next;
    struct piece *p = &w->piece[w->posted % WINDOW];
    const bool in_head = m->bytes <= SHORT;
    p->m = m;
    p->at = m->posted * PIECE;
    p->bytes = MT_MIN(m->bytes - p->at, (size_t)PIECE);
    char *data = m->bytes ? (char *)m->data + p->at : NULL;
    p->head.h = (struct header){0};
    if (m->sends) {
        p->head.h = (struct header){m->number, m->bytes, p->at, p->bytes ? mt_sum64(data, p->bytes, 0) : 0};
        if (in_head && p->bytes)
            memcpy(p->head.data, data, p->bytes);
    }
    p->op[0] = op_of(m, &p->head, m->sends ? sizeof(struct header) + (in_head ? p->bytes : 0) : sizeof(p->head));
    p->op[1] = op_of(m, data, p->bytes);
    p->over[0] = p->over[1] = false;
    int rc = n->wire->post(n->wire, &p->op[0], err);
    if (rc)
        return rc;
    p->over[1] = in_head;
    w->posted++;
    if (!in_head && (rc = n->wire->post(n->wire, &p->op[1], err)))
        p->over[1] = true;
    if (++m->posted == n_pieces(m))
        w->next = m->next;
    return rc;
}

/* Whether the header is of the piece that is expected, with as many bytes; else *err. */
static int check_header(const struct piece *p, struct mt_err *err)
{
    const struct header *h = &p->head.h;
    const struct mt_net_message *m = p->m;
    const size_t inside = m->bytes <= SHORT ? p->bytes : 0;
    if (p->op[0].moved < sizeof(*h) || h->number != m->number || (h->total == m->bytes && h->at != p->at))
        return mt_fail(err, MT_ERR_RUNTIME, -EPROTO, "host %d sent another message than number %llu, which was expected: one is lost or "
                       "doubled on the way, or it runs another step", m->host, (unsigned long long)m->number);
    if (h->total != m->bytes)
        return mt_fail(err, MT_ERR_RUNTIME, -EPROTO, "host %d sent %zu bytes where %zu were expected: it runs another step", m->host,
                       (size_t)h->total, m->bytes);
    if (p->op[0].moved == sizeof(*h) + inside)
        return 0;
    return mt_fail(err, MT_ERR_RUNTIME, -EPROTO, "what came from host %d is cut short on the way", m->host);
}

static int check_content(const struct piece *p, struct mt_err *err)
{
    const bool in_head = p->m->bytes <= SHORT;
    const char *data = in_head ? p->head.data : p->op[1].data;
    if (!in_head && p->op[1].moved != p->bytes)
        return mt_fail(err, MT_ERR_RUNTIME, -EPROTO, "what came from host %d is cut short on the way", p->m->host);
    if (p->head.h.sum != (p->bytes ? mt_sum64(data, p->bytes, 0) : 0))
        return mt_fail(err, MT_ERR_RUNTIME, -EPROTO, "what came from host %d is not what it sent: a bit has changed on the way",
                       p->m->host);
    if (in_head && p->bytes)
        memcpy(p->m->data, p->head.data, p->bytes);
    return 0;
}

/* Tests the oldest piece under way. */
static int test_piece(mt_net *n, struct piece *p, bool *over, struct mt_err *err)
{
    int rc = 0;
    for (int i = 0; i < 2 && !rc; i++) {
        if (p->over[i])
            continue;
        rc = n->wire->test(n->wire, &p->op[i], &p->over[i], err);
        if (!rc && i == 0 && p->over[0] && !p->m->sends)
            rc = check_header(p, err);
    }
    *over = !rc && p->over[0] && p->over[1];
    return *over && !p->m->sends ? check_content(p, err) : rc;
}

static int move(mt_net *n, struct way *w, bool *moved, struct mt_net_message **over, struct mt_err *err)
{
    int rc = 0;
    while (!rc && w->next && w->posted - w->ended < WINDOW)
        rc = post_piece(n, w, err);
    bool ended = true;
    while (!rc && ended && w->ended < w->posted) {
        struct mt_net_message *m = w->piece[w->ended % WINDOW].m;
        rc = test_piece(n, &w->piece[w->ended % WINDOW], &ended, err);
        if (rc || !ended)
            break;
        *moved = true;
        w->ended++;
        w->moved_ns = mt_now_ns();
        if (++m->ended == n_pieces(m)) {
            w->first = m->next;
            w->last = w->first ? w->last : NULL;
            end_message(n, m, over);
        }
    }
    return rc;
}

/* Moves all ways once; whether anything has. */
static bool turn(mt_net *n, struct mt_net_message **over)
{
    bool moved = false;
    int rc = 0, from;
    char text[MT_NET_TEXT];
    int64_t now = mt_now_ns();
    if (n->wire->hear(n->wire, &from, text))
        rc = mt_fail(&n->why, mt_net_err_kind(text[0] - 'A'), -ECONNABORTED, "host %d has ended: %s", from, text + 1);
    for (int host = 0; host < n->wire->size && !rc; host++)
        for (int d = 0; d < 2 && !rc; d++) {
            struct way *w = &n->way[d][host];
            if (!w->first)
                continue;
            rc = move(n, w, &moved, over, &n->why);
            if (!rc && w->first && (double)(now - w->moved_ns) * 1e-9 > n->deadline_s)
                rc = fail_late(n, host, d == 1, &n->why);
        }
    if (rc)
        end_all(n, rc, over);
    return moved;
}

static void *run(void *arg)
{
    mt_net *n = arg;
    unsigned idle = 0;
    pthread_mutex_lock(&n->lock);
    while (!n->quit) {
        struct mt_net_message *over = NULL;
        if (!n->n_open) {
            pthread_cond_wait(&n->works, &n->lock);
            idle = 0;
            continue;
        }
        idle = turn(n, &over) ? 0 : idle + 1;
        pthread_mutex_unlock(&n->lock);
        call_back(over);
        if (idle > IDLE_TURNS)
            nanosleep(&(struct timespec){0, IDLE_NS}, NULL);
        pthread_mutex_lock(&n->lock);
    }
    pthread_mutex_unlock(&n->lock);
    return NULL;
}

/* --- interface ------------------------------------------------------------------------------------------------- */

static void free_net(mt_net *n)
{
    pthread_cond_destroy(&n->ends);
    pthread_cond_destroy(&n->works);
    pthread_mutex_destroy(&n->lock);
    free(n->way[0]);
    free(n->way[1]);
    free(n);
}

int mt_net_create(mt_net **out, mt_wire *wire, double deadline_s, struct mt_err *err)
{
    mt_net *n = mt_calloc(1, sizeof(*n));
    if (!n) {
        wire->close(wire, false, 1);
        return mt_fail_nomem(err, "messages between hosts", sizeof(*n));
    }
    n->wire = wire;
    n->deadline_s = deadline_s;
    pthread_mutex_init(&n->lock, NULL);
    pthread_cond_init(&n->works, NULL);
    pthread_cond_init(&n->ends, NULL);
    size_t bytes = (size_t)wire->size * sizeof(struct way);
    for (int d = 0; d < 2; d++)
        n->way[d] = mt_calloc((size_t)wire->size, sizeof(struct way));
    int rc = n->way[0] && n->way[1] ? 0 : mt_fail_nomem(err, "messages between hosts", 2 * bytes);
    rc = rc ?: mt_thread_start(&n->thread, "mt-net", run, n, err);
    if (rc) {
        wire->close(wire, false, 1);
        free_net(n);
        return rc;
    }
    *out = n;
    return 0;
}

void mt_net_close(mt_net **net, bool ok, int code)
{
    mt_net *n = *net;
    if (!n)
        return;
    mt_raise(&n->lock, &n->works, &n->quit);
    pthread_join(n->thread, NULL);
    n->wire->close(n->wire, ok && !n->rc && !n->n_open, code);
    free_net(n);
    *net = NULL;
}

int mt_net_rank(const mt_net *n)
{
    return n->wire->rank;
}

int mt_net_size(const mt_net *n)
{
    return n->wire->size;
}

void mt_net_set_deadline(mt_net *n, double seconds)
{
    MT_LOCKED(&n->lock);
    n->deadline_s = seconds;
}

void mt_net_submit(mt_net *n, struct mt_net_message *m)
{
    struct mt_net_message *over = NULL;
    m->posted = m->ended = 0;
    m->over = false;
    m->next = NULL;
    m->rc = 0;
    pthread_mutex_lock(&n->lock);
    struct way *w = &n->way[m->sends][m->host];
    m->number = w->count++;
    n->n_open++;
    if (n->rc) {
        end_message(n, m, &over);
    } else {
        w->moved_ns = w->first ? w->moved_ns : mt_now_ns();
        w->next = w->next ? w->next : m;
        if (w->last)
            w->last->next = m;
        else
            w->first = m;
        w->last = m;
    }
    pthread_cond_signal(&n->works);
    pthread_mutex_unlock(&n->lock);
    call_back(over);
}

int mt_net_wait(mt_net *n, struct mt_net_message *m, struct mt_err *err)
{
    pthread_mutex_lock(&n->lock);
    while (!m->over)
        pthread_cond_wait(&n->ends, &n->lock);
    pthread_mutex_unlock(&n->lock);
    if (m->rc && err)
        *err = m->err;
    return m->rc;
}

static int pass(mt_net *n, struct mt_net_message *m, struct mt_err *err)
{
    mt_net_submit(n, m);
    return mt_net_wait(n, m, err);
}

int mt_net_send(mt_net *n, int to, const void *data, size_t bytes, struct mt_err *err)
{
    struct mt_net_message m = {.host = to, .sends = true, .data = (void *)(uintptr_t)data, .bytes = bytes};
    return pass(n, &m, err);
}

int mt_net_recv(mt_net *n, int from, void *data, size_t bytes, struct mt_err *err)
{
    struct mt_net_message m = {.host = from, .data = data, .bytes = bytes};
    return pass(n, &m, err);
}

void mt_net_abandon(mt_net *n)
{
    struct mt_net_message *over = NULL;
    pthread_mutex_lock(&n->lock);
    if (!n->rc)
        end_all(n, mt_fail(&n->why, MT_ERR_RUNTIME, -ECANCELED, "the step was abandoned"), &over);
    pthread_mutex_unlock(&n->lock);
    call_back(over);
}

enum mt_err_kind mt_net_err_kind(int64_t number)
{
    if (number < 0 || number > INT_MAX)
        return MT_ERR_RUNTIME;
    switch ((enum mt_err_kind)number) { /* without a default, so that the compiler asks for a new kind */
    case MT_ERR_RUNTIME:
    case MT_ERR_USAGE:
    case MT_ERR_INPUT:
    case MT_ERR_NO_FIT:
    case MT_ERR_DEVICE:
    case MT_ERR_TRAINING:
    case MT_ERR_CHECKPOINT:
        return (enum mt_err_kind)number;
    }
    return MT_ERR_RUNTIME;
}

void mt_net_tell(mt_net *n, const struct mt_err *why)
{
    char text[MT_NET_TEXT];
    snprintf(text, sizeof(text), "%c%.*s", 'A' + (int)why->kind, MT_NET_TEXT - 2, why->msg); /* what turn() reads */
    MT_LOCKED(&n->lock);
    if (!n->told)
        n->wire->tell(n->wire, text);
    n->told = true;
}
