/* SPDX-License-Identifier: Apache-2.0 */
/* Where cuBLASLt is linked: there is nothing to load. */
#include "blas.h"

int mt_cuda_blas_load(struct mt_err *err)
{
    (void)err;
    return 0;
}
