/* SPDX-License-Identifier: Apache-2.0 */
/* The smoothed line of a noisy one. */
#include <math.h>

#include "base/mem.h"
#include "report/report_priv.h"

enum {
    WIDEST = 50, /* values on each side, */
    SHARE = 20,  /* at most this part of all, */
    EARLIER = 4, /* and of those before, for a loss falls fastest at first */
};

/* The straight line of least squares through the finite values of [first, last], at `at`, which is one of them. */
static double fitted(const double *v, size_t first, size_t last, size_t at)
{
    double n = 0, x = 0, y = 0, xx = 0, xy = 0;
    for (size_t i = first; i <= last; i++) {
        double d = (double)i - (double)at;
        if (!isfinite(v[i]))
            continue;
        n++;
        x += d;
        y += v[i];
        xx += d * d;
        xy += d * v[i];
    }
    double det = n * xx - x * x;
    return det > 0 ? (y * xx - x * xy) / det : y / n;
}

double *mt_smooth(const double *v, size_t n)
{
    double *out = mt_calloc(n + 1, sizeof(*out));
    for (size_t i = 0; out && i < n; i++) {
        size_t half = MT_MIN(MT_MIN((size_t)WIDEST, 1 + n / SHARE), 1 + i / EARLIER);
        out[i] = isfinite(v[i]) ? fitted(v, i - MT_MIN(i, half), MT_MIN(i + half, n - 1), i) : NAN;
    }
    return out;
}
