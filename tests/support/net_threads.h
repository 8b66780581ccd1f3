/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "net/net.h"
#include "net_fault.h"

/** Hosts that are threads of one process: for tests. Each thread uses its own mt_net. */
typedef struct mt_net_threads mt_net_threads;

/** fault: of what host fault->host sends; NULL: none. */
int mt_net_threads_create(mt_net_threads **out, int size, double deadline_s, const struct mt_net_fault *fault,
                          struct mt_err *err);
mt_net *mt_net_threads_of(mt_net_threads *t, int rank);
/** Accepts NULL. No thread uses it any more. */
void mt_net_threads_destroy(mt_net_threads **t);
