/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stddef.h>
#include <stdint.h>

/* One header of xxHash, compiled for two instruction sets: mt_sum64() chooses. */
uint64_t mt_sum64_avx2(const void *data, size_t bytes, uint64_t seed);
uint64_t mt_sum64_avx512(const void *data, size_t bytes, uint64_t seed);
