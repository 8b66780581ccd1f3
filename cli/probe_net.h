/* SPDX-License-Identifier: Apache-2.0 */
#ifndef CLI_PROBE_NET_H
#define CLI_PROBE_NET_H

#include "cli.h"

/** megatrain probe net; returns the exit code. */
int cli_probe_net(const struct cli_args *args);

#endif
