/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/err.h"

/**
 * What moves bytes between hosts: MPI (mpi.c), or threads of one process (threads.c); and one that makes faults
 * (fault.c). The messages of net.h are cut and summed above it (messages.c), the same for all.
 *
 * Operations from one host to another meet in the order in which each side has posted them, a send and a receive at a
 * time. A receive may be longer than what is sent. Nothing here waits but tell and close. Thread-safety: one at a time.
 */
struct mt_wire_op {
    int host; /* the other side */
    bool sends;
    void *data; /* the poster's; until the operation is over, or cancelled */
    size_t bytes;
    size_t moved;      /* a receive that is over: bytes that have come */
    uint64_t request;  /* the transport's */
    int fate;          /* of a wire over another; 0 at first */
};

enum { MT_NET_TEXT = 256 };

typedef struct mt_wire mt_wire;
struct mt_wire {
    int rank, size;
    int (*post)(mt_wire *w, struct mt_wire_op *op, struct mt_err *err);
    int (*test)(mt_wire *w, struct mt_wire_op *op, bool *over, struct mt_err *err);
    /** Gives up n operations that are not over. Receives write nothing after this but those that were half through
     * and did not end in a second: these may, in later calls of this wire, which are tell and close alone. */
    void (*cancel)(mt_wire *w, struct mt_wire_op *const *op, size_t n);
    /** Whether a host has told that it ends, and why. */
    bool (*hear)(mt_wire *w, int *host, char why[MT_NET_TEXT]);
    void (*tell)(mt_wire *w, const char *why);
    /** Frees it. ok: nothing is under way on any host, and all come here. Not ok: ends the processes of all, where
     * hosts are processes. */
    void (*close)(mt_wire *w, bool ok, int code);
};

/** The entry of the module of MPI. *out is NULL if there are no others. */
#define MT_NET_MPI_OPEN "mt_net_mpi_open"
typedef int mt_net_open_fn(mt_wire **out, struct mt_err *err);
