/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <string.h>

#include "base/mem.h"
#include "store/planes.h"

/** Where bytes go: bytes [first, end) of each plane to memory that begins with byte `first`; NULL: not needed. */
struct mt_file_target {
    char *plane[MT_N_PLANES];
    size_t first, end;
};

/** Copies those of n bytes at `at` of a plane that are needed. */
static inline void mt_file_put(const struct mt_file_target *to, enum mt_plane_kind k, size_t at, const void *src,
                               size_t n)
{
    size_t a = MT_MAX(at, to->first), b = MT_MIN(at + n, to->end);
    if (to->plane[k] && a < b)
        memcpy(to->plane[k] + (a - to->first), (const char *)src + (a - at), b - a);
}
