/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

/** Wear that an NVMe drive reports (NVM Express base specification 2.0, 5.16.1.3: SMART log page). */
struct mt_hw_wear {
    char drive[64];          /* "/dev/nvme0n1" */
    unsigned percent_used;   /* of the endurance that the vendor rates; may exceed 100 */
    uint64_t written_bytes;  /* by hosts, so far */
    uint64_t rated_bytes;    /* writes at which percent_used will be 100, extrapolated; 0: too new to tell */
};
/** Reads it from the drive under `path`; false if that is not a single NVMe drive, or we lack the permission. */
bool mt_hw_wear(struct mt_hw_wear *out, const char *path);
/** Decodes the 512 bytes of the log page; leaves `drive` alone. */
void mt_hw_wear_parse(struct mt_hw_wear *out, const uint8_t page[512]);
