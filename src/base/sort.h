/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stddef.h>
#include <stdint.h>

/** Ascending; no NaN. */
void mt_sort_doubles(double *v, size_t n);
void mt_sort_u64(uint64_t *v, size_t n);
/** For qsort(), of doubles. */
int mt_compare_doubles(const void *a, const void *b);
