/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/err.h"

/** A benchmark that fails says why and ends. */
static inline void bench_must(int rc, const struct mt_err *err)
{
    if (rc) {
        fprintf(stderr, "%s: %s\n", program_invocation_short_name, err->msg);
        exit(1);
    }
}

/** Calls op with a struct mt_err of its own as the last argument. */
#define RUN(op, ...)                                                                               \
    do {                                                                                           \
        struct mt_err err_ = {0};                                                                  \
        bench_must(op(__VA_ARGS__, &err_), &err_);                                                 \
    } while (0)
