/* SPDX-License-Identifier: Apache-2.0 */
#include "optim/adam_kernel.h"

uint64_t mt_adam_avx512(const struct mt_adam *a, const struct mt_adam_scalars *s, size_t first, size_t n)
{
    return mt_adam_range(a, s, first, n);
}
