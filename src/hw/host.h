/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stddef.h>

#include "base/err.h"
#include "base/mem.h"
#include "hw/homes.h"

/** Anonymous host memory (planes, activations, boundaries, staging), zero at first, on huge pages if it is large and
 * the system has them; free it with mt_host_free(). Allocates all pages, so that too little memory is an error here and
 * not later. */
int mt_host_alloc(void **out, size_t bytes, const char *what, struct mt_err *err);
/** The same, but pages are allocated on first use: for memory that is mostly never used. */
int mt_host_map(void **out, size_t bytes, const char *what, struct mt_err *err);
void mt_host_free(void *p, size_t bytes);

/** Where memory is to be: home(ctx, at, bytes) is that of bytes [at, at + bytes), which are within one huge page. It is
 * called by several threads. */
struct mt_host_homes {
    const struct mt_numa *numa;
    int (*home)(const void *ctx, size_t at, size_t bytes);
    const void *ctx;
};
/** mt_host_alloc() with all pages at their homes, as far as these have room. */
int mt_host_alloc_at(void **out, size_t bytes, const struct mt_host_homes *homes, const char *what, struct mt_err *err);
