/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdint.h>

/** Reports twice a second, by mt_progress(), how much of a file has been read. The struct is in the caller's memory. */
struct mt_read_progress {
    const char *what; /* borrowed */
    uint64_t total_bytes, done_bytes;
    int64_t begin_ns, reported_ns;
};

void mt_read_progress_begin(struct mt_read_progress *m, const char *what, uint64_t total_bytes);
/** Adds bytes read since the last call; cheap enough to call for every line. */
void mt_read_progress_add(struct mt_read_progress *m, uint64_t bytes);
void mt_read_progress_end(struct mt_read_progress *m);
