/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stddef.h>
#include <stdint.h>

/** Ascending; no NaN. */
void mt_sort_doubles(double *v, size_t n);
void mt_sort_u64(uint64_t *v, size_t n);
/** For qsort() and bsearch(): of items that begin with a double, or a uint64_t. */
int mt_compare_doubles(const void *a, const void *b);
int mt_compare_u64(const void *a, const void *b);
