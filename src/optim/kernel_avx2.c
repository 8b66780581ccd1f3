/* SPDX-License-Identifier: Apache-2.0 */
#include "optim/kernel_body.h"

uint64_t mt_kernel_avx2(const struct mt_kernel *k)
{
    return mt_kernel_body(k);
}
