/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Hosts by MPI: a module of its own, built against the MPI whose launcher starts it, as their ABIs differ. Only moves
 * bytes, and waits for nothing without a deadline of its own: no launcher is trusted to notice a host that is stopped
 * or cut off. What MPI may still read or write after a call has returned is in the world, which outlives all of them,
 * or the poster's of an operation.
 */
#include <errno.h>
#include <mpi.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/mem.h"
#include "net/wire.h"

enum { TAG_DATA = 1, TAG_END = 2, IDLE_NS = 50000, START_S = 120, ABORT_S = 10, PART_S = 30 };

struct world {
    mt_wire wire;
    MPI_Comm comm;
    MPI_Request end;          /* the receive of what a host tells that ends; null: it has come */
    char heard[MT_NET_TEXT];
    char told[MT_NET_TEXT];   /* what this one tells */
    MPI_Request parting;      /* of the last barrier */
};
_Static_assert(sizeof(MPI_Request) <= sizeof(uint64_t), "a request fits its operation");

mt_net_open_fn mt_net_mpi_open;

static void idle(void)
{
    nanosleep(&(struct timespec){0, IDLE_NS}, NULL);
}

static bool within(int64_t begin, double seconds)
{
    return mt_seconds_since(begin) < seconds;
}

static int fail_mpi(int rc, int host, struct mt_err *err)
{
    char text[MPI_MAX_ERROR_STRING] = "";
    int n = 0;
    MPI_Error_string(rc, text, &n);
    return mt_fail(err, MT_ERR_RUNTIME, -ECONNRESET, "host %d is lost: %s", host, text);
}

static int post(mt_wire *wire, struct mt_wire_op *op, struct mt_err *err)
{
    const struct world *w = (struct world *)wire;
    MPI_Request r = MPI_REQUEST_NULL;
    int rc = op->sends ? MPI_Isend(op->data, (int)op->bytes, MPI_BYTE, op->host, TAG_DATA, w->comm, &r)
                       : MPI_Irecv(op->data, (int)op->bytes, MPI_BYTE, op->host, TAG_DATA, w->comm, &r);
    memcpy(&op->request, &r, sizeof(r));
    return rc == MPI_SUCCESS ? 0 : fail_mpi(rc, op->host, err);
}

static int test(mt_wire *, struct mt_wire_op *op, bool *over, struct mt_err *err)
{
    MPI_Request r;
    MPI_Status st;
    int done = 0, n = 0;
    memcpy(&r, &op->request, sizeof(r));
    int rc = MPI_Test(&r, &done, &st);
    memcpy(&op->request, &r, sizeof(r)); /* also after an error: some MPIs have freed it then */
    if (rc != MPI_SUCCESS)
        return fail_mpi(rc, op->host, err);
    if (done && !op->sends)
        MPI_Get_count(&st, MPI_BYTE, &n);
    op->moved = (size_t)n;
    *over = done != 0;
    return 0;
}

/* Sends cannot be taken back, and only read. */
static void cancel(mt_wire *wire, struct mt_wire_op *const *op, size_t n)
{
    struct mt_err ignored;
    int64_t begin = mt_now_ns();
    for (size_t i = 0; i < n; i++) {
        MPI_Request r;
        memcpy(&r, &op[i]->request, sizeof(r));
        if (!op[i]->sends && r != MPI_REQUEST_NULL)
            MPI_Cancel(&r);
    }
    for (size_t i = 0; i < n; i++)
        for (bool over = op[i]->sends; !over && within(begin, 1); idle())
            if (test(wire, op[i], &over, &ignored))
                break;
}

static bool hear(mt_wire *wire, int *host, char why[MT_NET_TEXT])
{
    struct world *w = (struct world *)wire;
    MPI_Status st;
    int there = 0;
    if (w->end == MPI_REQUEST_NULL || MPI_Test(&w->end, &there, &st) != MPI_SUCCESS || !there)
        return false;
    *host = st.MPI_SOURCE;
    w->heard[MT_NET_TEXT - 1] = 0;
    memcpy(why, w->heard, MT_NET_TEXT);
    return true;
}

/* A host that does not take it in a second hears of it by its deadline. */
static void tell(mt_wire *wire, const char *why)
{
    struct world *w = (struct world *)wire;
    int64_t begin = mt_now_ns();
    snprintf(w->told, sizeof(w->told), "%s", why);
    MT_FREED MPI_Request *r = mt_calloc((size_t)wire->size, sizeof(MPI_Request));
    for (int to = 0; to < wire->size && r; to++) {
        r[to] = MPI_REQUEST_NULL;
        if (to != wire->rank)
            MPI_Isend(w->told, sizeof(w->told), MPI_BYTE, to, TAG_END, w->comm, &r[to]);
    }
    for (int to = 0; to < wire->size && r; to++)
        for (int done = 0; !done && within(begin, 1); idle())
            if (MPI_Test(&r[to], &done, MPI_STATUS_IGNORE) != MPI_SUCCESS)
                break;
}

/* Whether all hosts have come to the end. */
static bool part(struct world *w)
{
    int done = 0;
    int64_t begin = mt_now_ns();
    if (MPI_Ibarrier(w->comm, &w->parting) != MPI_SUCCESS)
        return false;
    for (; !done && within(begin, PART_S); idle())
        if (MPI_Test(&w->parting, &done, MPI_STATUS_IGNORE) != MPI_SUCCESS)
            return false;
    return done != 0;
}

/* Nothing is under way: the receive of an end is taken back. */
static void finalize(struct world *w)
{
    if (w->end != MPI_REQUEST_NULL) {
        MPI_Cancel(&w->end);
        MPI_Wait(&w->end, MPI_STATUS_IGNORE);
    }
    if (w->comm != MPI_COMM_NULL)
        MPI_Comm_free(&w->comm);
    MPI_Finalize();
}

/* MPI's own ends of a run hang where a network is cut: the alarm ends this process then. */
static void close_wire(mt_wire *wire, bool ok, int code)
{
    struct world *w = (struct world *)wire;
    bool parted = ok && part(w);
    signal(SIGALRM, SIG_DFL);
    alarm(ABORT_S);
    if (!parted) {
        MPI_Abort(MPI_COMM_WORLD, code);
        _exit(code);
    }
    finalize(w);
    alarm(0);
    free(w);
}

/* Where hosts meet MPI has no deadline: one that never comes would keep the others for ever. */
static void miss(int)
{
    static const char text[] = "megatrain: the hosts of the run have not met in 2 minutes: one is lost, stopped or cut off\n";
    if (write(STDERR_FILENO, text, sizeof(text) - 1) < 0)
        _exit(2);
    _exit(1);
}

/*
 * Open MPI over TCP hands a message that was answered to the socket as one "put". What answers the other side's messages
 * then waits behind all of it, and both directions together have the rate of one. In pieces of its own (all flags but
 * PUT) they overlap: 1.6 times the bytes each way at once. The user's own setting is kept; MPICH has no such one.
 */
static void overlap_directions(void)
{
    setenv("OMPI_MCA_btl_tcp_flags", "313", 0);
}

int mt_net_mpi_open(mt_wire **out, struct mt_err *err)
{
    int have = 0, rank = 0, size = 1;
    struct world *w = mt_calloc(1, sizeof(*w));
    if (!w)
        return mt_fail_nomem(err, "MPI", sizeof(*w));
    w->end = w->parting = MPI_REQUEST_NULL;
    w->comm = MPI_COMM_NULL;
    overlap_directions();
    signal(SIGALRM, miss);
    alarm(START_S);
    int rc = MPI_Init_thread(NULL, NULL, MPI_THREAD_SERIALIZED, &have);
    if (rc == MPI_SUCCESS && have < MPI_THREAD_SERIALIZED)
        finalize(w);
    if (rc != MPI_SUCCESS || have < MPI_THREAD_SERIALIZED) {
        alarm(0);
        free(w);
        return mt_fail(err, MT_ERR_RUNTIME, -EIO, "MPI does not start, or not for several threads");
    }
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    *out = NULL;
    if (size == 1) {
        finalize(w);
        free(w);
    } else {
        MPI_Comm_dup(MPI_COMM_WORLD, &w->comm);
        MPI_Comm_set_errhandler(w->comm, MPI_ERRORS_RETURN);
        MPI_Irecv(w->heard, sizeof(w->heard), MPI_BYTE, MPI_ANY_SOURCE, TAG_END, w->comm, &w->end);
        w->wire = (mt_wire){rank, size, post, test, cancel, hear, tell, close_wire};
        *out = &w->wire;
    }
    alarm(0);
    return 0;
}
