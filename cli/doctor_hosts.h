/* SPDX-License-Identifier: Apache-2.0 */
#ifndef CLI_DOCTOR_HOSTS_H
#define CLI_DOCTOR_HOSTS_H

#include "cli.h"
#include "net/net.h"

/** megatrain doctor under a launcher, on each host; closes the net. Returns the exit code. */
int cli_doctor_hosts(mt_net *net, bool json);

#endif
