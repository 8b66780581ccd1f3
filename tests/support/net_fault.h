/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "net/wire.h"

/** A wire over another that makes one fault, as networks and their drivers do: for tests. */
enum mt_net_fault_kind {
    MT_NET_DROPPED,
    MT_NET_LATE,
    MT_NET_FLIPPED,
    MT_NET_SHORT,
    MT_NET_DOUBLED,
    MT_NET_SILENT,
    MT_N_NET_FAULTS,
};

struct mt_net_fault {
    int host; /* whose sends have it */
    enum mt_net_fault_kind kind;
    size_t nth;     /* of its sends, from 0; SILENT: that and all later ones are lost */
    double seconds; /* LATE: by so many; what follows to the same host waits behind it */
    size_t *sends;  /* becomes the number of its sends when the wire is closed; may be NULL */
};

/** *out closes the inner one. */
int mt_net_fault_create(mt_wire **out, mt_wire *inner, const struct mt_net_fault *fault, struct mt_err *err);
