/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stddef.h>
#include <stdint.h>

/**
 * XXH3 (64 bits) of a block in memory, seeded, with the widest registers of this CPU: the system's library is
 * compiled for the oldest one, and takes three to four times as long. Seed 0: the same as without one.
 *
 * Thread-safety: any thread.
 */
uint64_t mt_sum64(const void *data, size_t bytes, uint64_t seed);
