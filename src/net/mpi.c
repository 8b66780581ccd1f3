/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Hosts by MPI: a module of its own, built against the MPI whose launcher starts it, as their ABIs differ. Only moves
 * bytes. A message is a header, its size and checksum, and then its content in pieces. Every wait polls, so that it
 * ends at its deadline: no launcher is trusted to notice a host that is stopped or cut off.
 */
#include <errno.h>
#include <mpi.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/mem.h"
#include "base/sum64.h"
#include "net/net_priv.h"

enum { TAG_DATA = 1, TAG_END = 2, PIECE = 1 << 26, IDLE_NS = 50000, START_S = 120, ABORT_S = 10, PART_S = 30 };

struct world {
    struct mt_net net;
    MPI_Comm comm;
};

struct header {
    uint64_t bytes, sum;
};

int mt_net_mpi_open(mt_net **out, struct mt_err *err);

static void idle(void)
{
    nanosleep(&(struct timespec){0, IDLE_NS}, NULL);
}

/* Whether a host has told that it ends; then *err says why. */
static int hear(struct world *w, struct mt_err *err)
{
    MPI_Status st;
    int there = 0;
    char why[MT_NET_TEXT] = "";
    if (MPI_Iprobe(MPI_ANY_SOURCE, TAG_END, w->comm, &there, &st) != MPI_SUCCESS || !there)
        return 0;
    MPI_Recv(why, sizeof(why), MPI_BYTE, st.MPI_SOURCE, TAG_END, w->comm, MPI_STATUS_IGNORE);
    why[sizeof(why) - 1] = 0;
    return mt_net_fail_told(st.MPI_SOURCE, why, err);
}

static int fail_mpi(int rc, int host, struct mt_err *err)
{
    char text[MPI_MAX_ERROR_STRING] = "";
    int n = 0;
    MPI_Error_string(rc, text, &n);
    return mt_fail(err, MT_ERR_RUNTIME, -ECONNRESET, "host %d is lost: %s", host, text);
}

static int finish(struct world *w, MPI_Request *r, int host, const char *what, struct mt_err *err)
{
    int64_t begin = mt_now_ns();
    for (unsigned turn = 0;; turn++) {
        int done = 0, rc = MPI_Test(r, &done, MPI_STATUS_IGNORE);
        if (rc != MPI_SUCCESS)
            return fail_mpi(rc, host, err);
        if (done)
            return 0;
        if (turn % 16 == 0 && (rc = hear(w, err)))
            return rc;
        if ((double)(mt_now_ns() - begin) * 1e-9 > w->net.deadline_s)
            return mt_net_fail_late(&w->net, host, what, err);
        if (turn > 200)
            idle();
    }
}

static int send_piece(struct world *w, int to, const void *data, size_t bytes, struct mt_err *err)
{
    MPI_Request r;
    int rc = MPI_Isend(data, (int)bytes, MPI_BYTE, to, TAG_DATA, w->comm, &r);
    return rc != MPI_SUCCESS ? fail_mpi(rc, to, err) : finish(w, &r, to, "was taken by", err);
}

static int recv_piece(struct world *w, int from, void *data, size_t bytes, struct mt_err *err)
{
    MPI_Request r;
    int rc = MPI_Irecv(data, (int)bytes, MPI_BYTE, from, TAG_DATA, w->comm, &r);
    return rc != MPI_SUCCESS ? fail_mpi(rc, from, err) : finish(w, &r, from, "came from", err);
}

static int send_to(mt_net *n, int to, const void *data, size_t bytes, struct mt_err *err)
{
    struct world *w = (struct world *)n;
    struct header h = {bytes, mt_sum64(data, bytes, 0)};
    int rc = send_piece(w, to, &h, sizeof(h), err);
    for (size_t at = 0; at < bytes && !rc; at += PIECE)
        rc = send_piece(w, to, (const char *)data + at, MT_MIN(bytes - at, (size_t)PIECE), err);
    return rc;
}

static int recv_from(mt_net *n, int from, void *data, size_t bytes, struct mt_err *err)
{
    struct world *w = (struct world *)n;
    struct header h = {0, 0};
    int rc = recv_piece(w, from, &h, sizeof(h), err);
    if (!rc && h.bytes != bytes)
        return mt_net_fail_size(from, h.bytes, bytes, err);
    for (size_t at = 0; at < bytes && !rc; at += PIECE)
        rc = recv_piece(w, from, (char *)data + at, MT_MIN(bytes - at, (size_t)PIECE), err);
    if (!rc && mt_sum64(data, bytes, 0) != h.sum)
        rc = mt_fail(err, MT_ERR_RUNTIME, -EPROTO, "what came from host %d is not what it sent: a bit has changed on the way", from);
    return rc;
}

/* A host that does not take it in a second hears of it by its deadline. */
static void tell(mt_net *n, const char *why)
{
    struct world *w = (struct world *)n;
    char text[MT_NET_TEXT] = "";
    snprintf(text, sizeof(text), "%s", why);
    for (int to = 0; to < n->size; to++) {
        MPI_Request r;
        if (to == n->rank || MPI_Isend(text, sizeof(text), MPI_BYTE, to, TAG_END, w->comm, &r) != MPI_SUCCESS)
            continue;
        int done = 0;
        for (int64_t begin = mt_now_ns(); !done && mt_now_ns() - begin < 1000000000; idle())
            if (MPI_Test(&r, &done, MPI_STATUS_IGNORE) != MPI_SUCCESS)
                break;
    }
}

/* MPI's own ends of a run hang where a network is cut: the alarm ends this process then. */
static void part(mt_net *n, bool ok, int code)
{
    struct world *w = (struct world *)n;
    struct mt_err err;
    MPI_Request r;
    n->deadline_s = PART_S;
    if (ok && MPI_Ibarrier(w->comm, &r) == MPI_SUCCESS && !finish(w, &r, 0, "came from", &err)) {
        alarm(ABORT_S);
        MPI_Comm_free(&w->comm);
        MPI_Finalize();
        alarm(0);
        free(w);
        return;
    }
    signal(SIGALRM, SIG_DFL);
    alarm(ABORT_S);
    MPI_Abort(MPI_COMM_WORLD, code);
    _exit(code);
}

/* Where hosts meet MPI has no deadline: one that never comes would keep the others for ever. */
static void miss(int signo)
{
    static const char text[] = "megatrain: the hosts of the run have not met in 2 minutes: one is lost, stopped or cut off\n";
    (void)signo;
    if (write(STDERR_FILENO, text, sizeof(text) - 1) < 0)
        _exit(2);
    _exit(1);
}

int mt_net_mpi_open(mt_net **out, struct mt_err *err)
{
    int have = 0, rank = 0, size = 1;
    struct world *w = mt_calloc(1, sizeof(*w));
    if (!w)
        return mt_fail_nomem(err, "MPI", sizeof(*w));
    signal(SIGALRM, miss);
    alarm(START_S);
    if (MPI_Init_thread(NULL, NULL, MPI_THREAD_SERIALIZED, &have) != MPI_SUCCESS || have < MPI_THREAD_SERIALIZED) {
        alarm(0);
        free(w);
        return mt_fail(err, MT_ERR_RUNTIME, -EIO, "MPI does not start, or not for several threads");
    }
    MPI_Comm_dup(MPI_COMM_WORLD, &w->comm);
    MPI_Comm_set_errhandler(w->comm, MPI_ERRORS_RETURN);
    MPI_Comm_rank(w->comm, &rank);
    MPI_Comm_size(w->comm, &size);
    alarm(0);
    w->net = (struct mt_net){rank, size, MT_NET_DEADLINE_S, send_to, recv_from, tell, part};
    *out = &w->net;
    if (size == 1) {
        part(&w->net, true, 0);
        *out = NULL;
    }
    return 0;
}
