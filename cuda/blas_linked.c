/* SPDX-License-Identifier: Apache-2.0 */
/* For builds that link cuBLASLt: there is nothing to load. */
#include "blas.h"

int mt_cuda_blas_load(struct mt_err *)
{
    return 0;
}
