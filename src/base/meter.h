/* SPDX-License-Identifier: Apache-2.0 */
#ifndef MT_BASE_METER_H
#define MT_BASE_METER_H

#include <stdint.h>

/** Tells by mt_progress(), twice a second, how far the reading of a file is. The caller's memory. */
struct mt_meter {
    const char *what; /* borrowed */
    uint64_t total_bytes, done_bytes;
    int64_t begun_ns, told_ns;
};

void mt_meter_init(struct mt_meter *m, const char *what, uint64_t total_bytes);
/** Adds what was read since; cheap enough for every line. */
void mt_meter_add(struct mt_meter *m, uint64_t bytes);
void mt_meter_finish(struct mt_meter *m);

#endif
