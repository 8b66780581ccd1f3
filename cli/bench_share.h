/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "cli.h"
#include "sweep/sweep.h"

/** A job's configuration, as far as it decides which jobs may share a base; finish with bench_share_finish(). */
struct bench_share {
    struct mt_config *cfg;       /* NULL: it cannot be read, which its own run will say */
    struct mt_numerics numerics;
};
void bench_share_open(struct bench_share *s, const char *ini, const struct cli_args *args);
void bench_share_finish(struct bench_share *s);

/**
 * Why jobs of these configurations, or `a` with any, do not run on one base: "its runs train no adapters
 * (adapter.kind)", or "memory.slots differs"; NULL: they may. Beside what a shared run refuses, keys of placement and
 * of the machine are compared: a sweep over these asks for the time of each.
 */
const char *bench_share_refusal(const struct bench_share *a, const struct bench_share *b, char *buf, size_t len);
