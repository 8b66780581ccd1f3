/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A row at a time: maximum, sum of exponentials in fixed lanes, loss, then the gradient in place of the logits. The
 * maximum is taken off first: log-sum-exp would be rounded as the logits are, and so would the loss of a sure token.
 * In bf16 the gradient row is half as long as the logits row that it overwrites; with rising addresses, each
 * piece is read before it is overwritten.
 */
#include <string.h>

#include "device/cpu/cpu.h"
#include "device/cpu/vecmath.h"

enum { PIECE = 1024 };

static size_t first_of(const float *x, float value, size_t n)
{
    size_t k = 0;
    while (k + 1 < n && x[k] != value)
        k++;
    return k;
}

MT_HOT static float exp_sum(const float *x, float shift, size_t n)
{
    float e[PIECE], sum = 0;
    for (size_t c = 0; c < n; c += PIECE) {
        size_t m = MT_MIN((size_t)PIECE, n - c);
        for (size_t i = 0; i < m; i++)
            e[i] = mt_exp_negative(x[c + i] - shift);
        sum += mt_cpu_sum(e, m);
    }
    return sum;
}

/* y may be x. */
MT_HOT static void softmax_piece(float *y, const float *x, float shift, float scale, size_t n)
{
    MT_INDEPENDENT
    for (size_t i = 0; i < n; i++)
        y[i] = mt_exp_negative(x[i] - shift) * scale;
}

/* Through the cap that made the logits x. */
MT_HOT static void cap_backward(float *restrict dx, const float *restrict x, float cap, size_t n)
{
    for (size_t i = 0; i < n; i++)
        dx[i] *= 1.0f - (x[i] / cap) * (x[i] / cap);
}

static void gradient_row(const struct mt_cross_entropy *a, size_t row, float max, float sum)
{
    const float *x = a->logits + row * a->ld;
    int32_t target = a->targets[row];
    float tmp[PIECE], was[PIECE], scale = a->row_scale ? a->row_scale[row] : a->scale;
    for (size_t c = 0; c < a->vocab; c += PIECE) {
        size_t n = MT_MIN((size_t)PIECE, a->vocab - c), at = row * a->ld_dlogits + c;
        float *y = mt_cpu_row_place(a->dtype, a->dlogits, at, tmp);
        if (a->cap > 0)
            memcpy(was, x + c, n * sizeof(float)); /* the gradient may overwrite them */
        if (target < 0)
            for (size_t i = 0; i < n; i++)
                y[i] = 0;
        else
            softmax_piece(y, x + c, max, scale / sum, n);
        if (target >= 0 && (size_t)target >= c && (size_t)target < c + n)
            y[(size_t)target - c] -= scale;
        if (a->cap > 0)
            cap_backward(y, was, a->cap, n);
        mt_cpu_store_row(a->dtype, a->dlogits, at, n, y);
    }
}

/* -sum of p log p = log(sum) - sum of e^(x - max) (x - max) / sum. */
MT_HOT static float entropy_row(const float *x, float max, float sum, size_t n)
{
    float e[PIECE], all = 0;
    for (size_t c = 0; c < n; c += PIECE) {
        size_t m = MT_MIN((size_t)PIECE, n - c);
        for (size_t i = 0; i < m; i++)
            e[i] = mt_exp_negative(x[c + i] - max) * (x[c + i] > -INFINITY ? x[c + i] - max : 0);
        all += mt_cpu_sum(e, m);
    }
    return logf(sum) - all / sum;
}

/* Further ids of the row: their logits, or their gradients. */
static void few_of_row(const struct mt_cross_entropy *a, size_t row)
{
    const int32_t *ids = a->few + row * a->n_few;
    float *values = a->few_values + row * a->n_few;
    for (size_t k = 0; k < a->n_few; k++)
        if (ids[k] >= 0 && a->dlogits)
            mt_cpu_store_row(a->dtype, a->dlogits, row * a->ld_dlogits + (size_t)ids[k], 1, &values[k]);
        else if (ids[k] >= 0)
            values[k] = a->logits[row * a->ld + (size_t)ids[k]];
}

static void loss_row(const void *args, size_t row)
{
    const struct mt_cross_entropy *a = args;
    const float *x = a->logits + row * a->ld;
    float max = mt_cpu_max(x, a->vocab);
    float sum = exp_sum(x, max, a->vocab);
    int32_t target = a->targets[row];
    a->loss[row] = target < 0 ? 0 : logf(sum) - (x[target] - max);
    if (a->correct)
        a->correct[row] = target >= 0 && first_of(x, max, a->vocab) == (size_t)target;
    if (a->entropy)
        a->entropy[row] = target < 0 ? 0 : entropy_row(x, max, sum, a->vocab);
    if (a->dlogits)
        gradient_row(a, row, max, sum);
    if (a->n_few && target >= 0)
        few_of_row(a, row);
}

void mt_cpu_run_cross_entropy(struct mt_cpu_device *d, const struct mt_cross_entropy *a)
{
    mt_cpu_by_rows(d, loss_row, a, a->n, a->vocab);
}
