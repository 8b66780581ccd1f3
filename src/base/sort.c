/* SPDX-License-Identifier: Apache-2.0 */
#include "base/sort.h"

#include <stdlib.h>

int mt_compare_doubles(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

void mt_sort_doubles(double *v, size_t n)
{
    qsort(v, n, sizeof(*v), mt_compare_doubles);
}

int mt_compare_u64(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

void mt_sort_u64(uint64_t *v, size_t n)
{
    qsort(v, n, sizeof(*v), mt_compare_u64);
}
