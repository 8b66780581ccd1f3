/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stddef.h>

#include "base/err.h"

/** The network between hosts, as `megatrain probe net` has measured it: a file beside the machine's profile. */
struct mt_network {
    double gbs;          /* GB/s of each direction, both ways and all hosts at once: of the slowest */
    double us;           /* a short message, of the slowest pair */
    double cores;        /* that messages take while they move at that rate; 0: unknown */
    int hosts;           /* 0: not measured */
};

void mt_network_path(char *buf, size_t len);
int mt_network_write(const struct mt_network *n, const char *path, struct mt_err *err);
/** -ENOENT: none was measured. */
int mt_network_read(struct mt_network *out, const char *path, struct mt_err *err);
