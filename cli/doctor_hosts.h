/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "base/json.h"
#include "cli.h"
#include "net/net.h"

/** megatrain doctor under a launcher, on each host; closes the net. Returns the exit code. */
int cli_doctor_hosts(mt_net *net, bool json);

/** Adds a finding to the list for each host whose name an earlier one has, too. name: of the first, then each `stride`
 * bytes on. so: what follows, and what to do. */
enum { CLI_HOST_NAME = 64 };
void cli_find_doubled(cJSON *list, const char *name, size_t stride, int n, const char *so);
