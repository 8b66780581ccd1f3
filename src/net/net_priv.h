/* SPDX-License-Identifier: Apache-2.0 */
#ifndef MT_NET_NET_PRIV_H
#define MT_NET_NET_PRIV_H

#include "net/net.h"

/* A transport: what is behind a struct mt_net. Its own struct begins with this one. */
struct mt_net {
    int rank, size;
    double deadline_s;
    int (*send)(mt_net *n, int to, const void *data, size_t bytes, struct mt_err *err);
    int (*recv)(mt_net *n, int from, void *data, size_t bytes, struct mt_err *err);
    void (*tell)(mt_net *n, const char *why);
    void (*close)(mt_net *n, bool ok, int code); /* frees it; not ok: does not return */
};

enum { MT_NET_DEADLINE_S = 300, MT_NET_TEXT = 256 };

/* The entry of the module of MPI. */
#define MT_NET_MPI_OPEN "mt_net_mpi_open"
typedef int mt_net_open_fn(mt_net **out, struct mt_err *err);

/* The other host did not answer in time. */
int mt_net_fail_late(const mt_net *n, int host, const char *what, struct mt_err *err);
int mt_net_fail_told(int host, const char *why, struct mt_err *err);
int mt_net_fail_size(int host, size_t sent, size_t expected, struct mt_err *err);

#endif
