/* SPDX-License-Identifier: Apache-2.0 */
/* A sender lays its message open and waits until the receiver has copied it. */
#include "net/threads.h"

#include <errno.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/mem.h"
#include "net/net_priv.h"

enum { MAX_SIZE = 64 };

struct slot {
    const void *data;
    size_t bytes;
    bool full;
};

struct end {
    struct mt_net net;
    mt_net_threads *all;
};

struct mt_net_threads {
    pthread_mutex_t lock;
    pthread_cond_t moved;
    int size;
    struct end end[MAX_SIZE];
    struct slot slot[MAX_SIZE][MAX_SIZE]; /* by sender, receiver */
    int ended;                            /* a host that told so, or -1 */
    char why[MT_NET_TEXT];
};

static struct timespec after(double seconds)
{
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    double whole = (double)t.tv_sec + (double)t.tv_nsec * 1e-9 + seconds;
    return (struct timespec){(time_t)whole, (long)((whole - (double)(time_t)whole) * 1e9)};
}

/* Call under lock. Waits until the slot is full or empty; false: it took too long. */
static bool await(mt_net_threads *t, const struct slot *s, bool full, const struct timespec *end)
{
    int rc = 0;
    while (s->full != full && !rc && t->ended < 0)
        rc = pthread_cond_timedwait(&t->moved, &t->lock, end);
    return s->full == full;
}

/* Call under lock, after a wait in vain. */
static int fail(const mt_net *n, const mt_net_threads *t, int host, const char *what, struct mt_err *err)
{
    return t->ended >= 0 ? mt_net_fail_told(t->ended, t->why, err) : mt_net_fail_late(n, host, what, err);
}

static int send_to(mt_net *n, int to, const void *data, size_t bytes, struct mt_err *err)
{
    mt_net_threads *t = ((struct end *)n)->all;
    struct slot *s = &t->slot[n->rank][to];
    struct timespec end = after(n->deadline_s);
    pthread_mutex_lock(&t->lock);
    *s = (struct slot){data, bytes, true};
    pthread_cond_broadcast(&t->moved);
    bool taken = await(t, s, false, &end);
    s->full = false;
    int rc = taken ? 0 : fail(n, t, to, "was taken by", err);
    pthread_mutex_unlock(&t->lock);
    return rc;
}

static int recv_from(mt_net *n, int from, void *data, size_t bytes, struct mt_err *err)
{
    mt_net_threads *t = ((struct end *)n)->all;
    struct slot *s = &t->slot[from][n->rank];
    struct timespec end = after(n->deadline_s);
    pthread_mutex_lock(&t->lock);
    bool came = await(t, s, true, &end);
    size_t sent = s->bytes;
    if (came && sent == bytes) {
        memcpy(data, s->data, bytes);
        s->full = false;
        pthread_cond_broadcast(&t->moved);
    }
    int rc = !came ? fail(n, t, from, "came from", err) : sent != bytes ? mt_net_fail_size(from, sent, bytes, err) : 0;
    pthread_mutex_unlock(&t->lock);
    return rc;
}

static void tell(mt_net *n, const char *why)
{
    mt_net_threads *t = ((struct end *)n)->all;
    pthread_mutex_lock(&t->lock);
    if (t->ended < 0) {
        t->ended = n->rank;
        snprintf(t->why, sizeof(t->why), "%s", why);
    }
    pthread_cond_broadcast(&t->moved);
    pthread_mutex_unlock(&t->lock);
}

/* The threads end by themselves. */
static void part(mt_net *n, bool ok, int code)
{
    (void)n;
    (void)ok;
    (void)code;
}

int mt_net_threads_create(mt_net_threads **out, int size, double deadline_s, struct mt_err *err)
{
    if (size < 1 || size > MAX_SIZE)
        return mt_fail(err, MT_ERR_USAGE, -EINVAL, "%d hosts", size);
    mt_net_threads *t = mt_calloc(1, sizeof(*t));
    if (!t)
        return mt_fail_nomem(err, "hosts as threads", sizeof(*t));
    pthread_mutex_init(&t->lock, NULL);
    pthread_cond_init(&t->moved, NULL);
    t->size = size;
    t->ended = -1;
    for (int i = 0; i < size; i++)
        t->end[i] = (struct end){{i, size, deadline_s, send_to, recv_from, tell, part}, t};
    *out = t;
    return 0;
}

mt_net *mt_net_threads_of(mt_net_threads *t, int rank)
{
    return &t->end[rank].net;
}

void mt_net_threads_destroy(mt_net_threads **t)
{
    if (!*t)
        return;
    pthread_cond_destroy(&(*t)->moved);
    pthread_mutex_destroy(&(*t)->lock);
    free(*t);
    *t = NULL;
}
