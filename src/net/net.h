/* SPDX-License-Identifier: Apache-2.0 */
#ifndef MT_NET_NET_H
#define MT_NET_NET_H

#include <stdbool.h>
#include <stddef.h>

#include "base/err.h"

/**
 * Messages between the hosts of a run. They are numbered from 0; what one sends to another arrives there in order. A
 * message has the number of bytes that its receiver expects: both know it. Its checksum is checked.
 *
 * Every call waits until the message is sent or has arrived, at most for the deadline. Then, and if any host tells
 * that it ends (mt_net_tell()), it fails with -ETIMEDOUT or -ECONNABORTED (MT_ERR_RUNTIME) and names the host.
 * Another size or content than was sent: -EPROTO.
 *
 * Thread-safety: one thread at a time.
 */
typedef struct mt_net mt_net;

/** Whether a launcher (mpirun, srun) has started this process as one of several. */
bool mt_net_is_launched(void);
/**
 * Meets the others that the launcher has started, each of which must call this: by MPI, which is a module of its own,
 * opened here. *out is NULL if there are no others. -ENOENT (MT_ERR_USAGE): this build has no MPI.
 */
int mt_net_open(mt_net **out, struct mt_err *err);
/** Accepts NULL. ok: all hosts part at once. Else this one has failed: ends the processes of all, this one
 * too, with that exit code. */
void mt_net_close(mt_net **n, bool ok, int code);

int mt_net_rank(const mt_net *n);
int mt_net_size(const mt_net *n);
/** Seconds until a wait fails. */
void mt_net_set_deadline(mt_net *n, double seconds);
int mt_net_send(mt_net *n, int to, const void *data, size_t bytes, struct mt_err *err);
int mt_net_recv(mt_net *n, int from, void *data, size_t bytes, struct mt_err *err);
/** Tells all others, as far as they can be reached, why this host ends: what they wait for fails with that. */
void mt_net_tell(mt_net *n, const char *why);

#endif
