/* SPDX-License-Identifier: Apache-2.0 */
#include "checkpoint/rounding.h"

#include <math.h>

#include "base/dtype.h"

void mt_rounded_add(struct mt_rounded *r, const float *was, const float *now, const uint16_t *rounded, size_t n)
{
    for (size_t k = 0; k < n; k++) {
        double is = (double)mt_bf16_to_f32(rounded[k]), update = (double)now[k] - (double)was[k];
        r->update += update * update;
        r->kept += (is - (double)was[k]) * update;
        r->lost += (is - (double)now[k]) * (is - (double)now[k]);
    }
}

bool mt_rounded_share(const struct mt_rounded *r, double *kept, double *error)
{
    if (!(r->update > 0))
        return false;
    *kept = r->kept / r->update;
    *error = sqrt(r->lost / r->update);
    return true;
}
