/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "cli.h"

/** megatrain probe net; returns the exit code. */
int cli_probe_net(const struct cli_args *args);
