/* SPDX-License-Identifier: Apache-2.0 */
#ifndef MT_HW_WEAR_H
#define MT_HW_WEAR_H

#include <stdbool.h>
#include <stdint.h>

/** What an NVMe drive says of its age (NVM Express base specification 2.0, 5.16.1.3: SMART log page). */
struct mt_hw_wear {
    char drive[64];          /* "/dev/nvme0n1" */
    unsigned percent_used;   /* of the endurance that the vendor rates; may exceed 100 */
    uint64_t written_bytes;  /* by hosts, so far */
    uint64_t rated_bytes;    /* what 100 percent would be at this rate; 0: too new to tell */
};
/** Of the drive under `path`; false where it is no NVMe drive of its own, or we may not ask. */
bool mt_hw_wear(struct mt_hw_wear *out, const char *path);
/** Reads the 512 bytes of the log page; `drive` is left alone. */
void mt_hw_wear_parse(struct mt_hw_wear *out, const uint8_t page[512]);

#endif
