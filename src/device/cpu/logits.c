/* SPDX-License-Identifier: Apache-2.0 */
#include "device/cpu/logits.h"

#include <math.h>

#include "device/cpu/cpu.h"
#include "device/cpu/vecmath.h"

MT_HOT_PART float larger(float a, float b)
{
    return a > b ? a : b;
}

static MT_HOT float largest(const float *x, size_t n)
{
    float most[MT_LANES], all = -INFINITY;
    for (int l = 0; l < MT_LANES; l++)
        most[l] = -INFINITY;
    size_t i = 0;
    for (; i + MT_LANES <= n; i += MT_LANES)
        for (int l = 0; l < MT_LANES; l++)
            most[l] = larger(x[i + (size_t)l], most[l]);
    for (; i < n; i++)
        all = larger(x[i], all);
    for (int l = 0; l < MT_LANES; l++)
        all = larger(most[l], all);
    return all;
}

size_t mt_logits_best(const float *logit, size_t n)
{
    float best = largest(logit, n);
    for (size_t i = 0; i < n; i++)
        if (logit[i] == best)
            return i;
    return 0;
}

MT_HOT_PART float weight(float logit, float best, float temperature)
{
    return mt_exp_negative((logit - best) / temperature);
}

float mt_logits_weight(float logit, float best, float temperature)
{
    return weight(logit, best, temperature);
}

/* Of n, at most a block. */
static MT_HOT double sum_of(const float *x, size_t n, float best, float temperature)
{
    float lane[MT_LANES] = {0};
    double sum = 0;
    size_t i = 0;
    for (; i + MT_LANES <= n; i += MT_LANES)
        for (int l = 0; l < MT_LANES; l++)
            lane[l] += weight(x[i + (size_t)l], best, temperature);
    for (; i < n; i++)
        sum += (double)weight(x[i], best, temperature);
    for (int l = 0; l < MT_LANES; l++)
        sum += (double)lane[l];
    return sum;
}

void mt_logits_sums(double *sum, const float *logit, size_t n, float best, float temperature)
{
    for (size_t i = 0; i < n; i += MT_LOGITS_BLOCK)
        sum[i / MT_LOGITS_BLOCK] = sum_of(logit + i, MT_MIN(n - i, (size_t)MT_LOGITS_BLOCK), best, temperature);
}
