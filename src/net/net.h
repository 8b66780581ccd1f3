/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/err.h"

/**
 * Messages between the hosts of a run. They are numbered from 0; what one sends to another arrives there in order. A
 * message has the number of bytes that its receiver expects: both know it. What arrives is checked by number, size and
 * checksum: a message that is lost, doubled, cut short or changed on its way is an error, never a result.
 *
 * A thread of its own ("mt-net") moves all messages that are under way, both directions at once. The first error ends
 * all of them, and every later one, with the same: a message to or from a host that moved nothing for the deadline
 * -ETIMEDOUT; a host that tells that it ends (mt_net_tell()) -ECONNABORTED; what did not arrive as it was sent
 * -EPROTO. All are MT_ERR_RUNTIME and name the host.
 *
 * Thread-safety: any thread; mt_net_close() when no other uses it.
 */
typedef struct mt_net mt_net;

/** A message under way: the caller's, as its data, until it has ended. */
struct mt_net_message {
    int host; /* the other side */
    bool sends;
    void *data; /* only read if it sends */
    size_t bytes;
    /** Called when it has ended: on the thread of the net, or on that of a call of mt_net_submit() after an error or of
     * mt_net_abandon(), before it returns. May submit others. NULL: somebody waits for it. */
    void (*done)(struct mt_net_message *m);
    void *ctx;
    int rc; /* when it has ended */
    struct mt_err err;
    /* the net's own */
    bool over;
    uint64_t number;
    size_t posted, ended; /* pieces */
    struct mt_net_message *next;
};

/** Whether a launcher (mpirun, srun) has started this process as one of several. */
bool mt_net_is_launched(void);
/**
 * Meets the others that the launcher has started, each of which must call this: by MPI, which is a module of its own,
 * opened here. *out is NULL if there are no others. -ENOENT (MT_ERR_USAGE): this build has no MPI.
 */
int mt_net_open(mt_net **out, struct mt_err *err);
/** Accepts NULL. ok: all hosts part at once. Else, or if an error has ended its messages, this one has failed: ends
 * the processes of all, this one too, with that exit code. */
void mt_net_close(mt_net **n, bool ok, int code);

int mt_net_rank(const mt_net *n);
int mt_net_size(const mt_net *n);
/** Seconds without a movement after which a message fails. */
void mt_net_set_deadline(mt_net *n, double seconds);

/** Starts a message, behind those to (or from) the same host that were started before. */
void mt_net_submit(mt_net *n, struct mt_net_message *m);
/** Waits until a message without `done` has ended; returns its rc. */
int mt_net_wait(mt_net *n, struct mt_net_message *m, struct mt_err *err);
/** Both at once. */
int mt_net_send(mt_net *n, int to, const void *data, size_t bytes, struct mt_err *err);
int mt_net_recv(mt_net *n, int from, void *data, size_t bytes, struct mt_err *err);
/** Ends all messages that are under way, and every later one, with -ECANCELED. */
void mt_net_abandon(mt_net *n);
/** Tells all others, as far as they can be reached in a second, why this host ends: what they wait for fails with
 * that, of the same kind. Call it before the data of messages that have failed are freed. Only the first call tells. */
void mt_net_tell(mt_net *n, const struct mt_err *why);
/** The kind of error that a number from another host stands for; MT_ERR_RUNTIME: none that is known here. */
enum mt_err_kind mt_net_err_kind(int64_t number);
