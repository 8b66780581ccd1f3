/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdint.h>

#include "base/err.h"
#include "base/strbuf.h"

/**
 * A log that grows at its end and never ends the run that writes it: what cannot be written is reported once, kept
 * in memory and tried again, after a longer pause each time. Records are written whole or not at all.
 *
 * Thread-safety: one thread.
 */
struct mt_append {
    char path[4096];
    int fd;                /* -1: not open */
    int64_t end;           /* end of the last record that was written whole */
    struct mt_str pending; /* records that could not be written yet */
    int64_t retry_ns, wait_ns;
    bool failing;
};

/** Opens or creates the file; its contents are kept if `keep` is set, else truncated. */
int mt_append_open(struct mt_append *a, const char *path, bool keep, struct mt_err *err);
void mt_append_put(struct mt_append *a, const void *record, size_t len);
/** Tries once more to write the pending records. */
void mt_append_close(struct mt_append *a);
