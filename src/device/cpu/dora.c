/* SPDX-License-Identifier: Apache-2.0 */
/* The rows' norms and scales of DoRA, and columns scaled by them. */
#include <math.h>

#include "device/cpu/pointwise.h"

enum { PIECE = 2048 };

static float sum_of_squares(const struct mt_dora_scale *a, size_t row)
{
    return mt_cpu_dot_rows(a->dtype, a->w, row * a->c, a->w, row * a->c, a->c);
}

/* Of rank r, in pieces of at most PIECE: sum over k of b_k (2 s wa_k + s^2 gram_k . b). */
static float of_adapter(const struct mt_dora_scale *a, size_t row)
{
    float bk[PIECE], bl[PIECE], term[PIECE], sum = 0;
    for (size_t k = 0; k < a->r; k += PIECE) {
        size_t nk = MT_MIN((size_t)PIECE, a->r - k);
        const float *b = mt_cpu_row_f32(a->dtype, a->b, row * a->r + k, nk, bk);
        for (size_t i = 0; i < nk; i++)
            term[i] = 0;
        for (size_t l = 0; l < a->r; l += PIECE) {
            size_t nl = MT_MIN((size_t)PIECE, a->r - l);
            const float *other = mt_cpu_row_f32(a->dtype, a->b, row * a->r + l, nl, bl);
            for (size_t i = 0; i < nk; i++)
                term[i] += mt_cpu_dot(a->gram + (k + i) * a->r + l, other, nl);
        }
        for (size_t i = 0; i < nk; i++)
            term[i] = 2 * a->s * a->wa[row * a->r + k + i] + a->s * a->s * term[i];
        sum += mt_cpu_dot(b, term, nk);
    }
    return sum;
}

static void scale_of_row(const void *args, size_t row)
{
    const struct mt_dora_scale *a = args;
    a->inverse[row] = a->magnitude ? 1 / sqrtf(sum_of_squares(a, row) + of_adapter(a, row)) : 0;
    a->scale[row] = a->magnitude ? mt_cpu_element(a->dtype, a->magnitude, row) * a->inverse[row] : 1;
}

void mt_cpu_run_dora_scale(struct mt_cpu_device *d, const struct mt_dora_scale *a)
{
    mt_cpu_by_rows(d, scale_of_row, a, a->n, a->c + a->r * a->r);
}

/* x NULL: zeros */
MT_HOT static void add_row(float *y, const float *x, const float *z, size_t n)
{
    MT_INDEPENDENT
    for (size_t i = 0; i < n; i++)
        y[i] = x ? x[i] + z[i] : z[i];
}

static void scale_piece(const void *args, const struct mt_cpu_piece *p)
{
    const struct mt_scale_columns *a = args;
    float y[MT_CPU_PIECE], bias[MT_CPU_PIECE]; /* the output may be what is added */
    mt_cpu_multiply(y, p->in[0], a->scale + p->first, p->n);
    if (a->bias)
        add_row(y, mt_cpu_row_f32(a->dtype, a->bias, p->first, p->n, bias), y, p->n);
    add_row(p->out[0], p->in[1], y, p->n);
}

void mt_cpu_run_scale_columns(struct mt_cpu_device *d, const struct mt_scale_columns *a)
{
    mt_cpu_run_pointwise(d, &(struct mt_cpu_pointwise){
        .f = scale_piece, .args = a, .n = a->n, .heads = 1, .dim = a->c,
        .in = {mt_cpu_rows(a->dtype, a->x, 0, a->c), mt_cpu_rows(a->out_dtype, a->add, 0, a->c)},
        .out = {mt_cpu_rows(a->out_dtype, a->out, 0, a->c)}});
}
