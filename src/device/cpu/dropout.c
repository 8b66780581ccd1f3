/* SPDX-License-Identifier: Apache-2.0 */
#include "base/philox.h"
#include "device/cpu/pointwise.h"

/* m[j] = 1 where column first + j of the row is kept, else 0; `first` and n are multiples of 4. */
static void mask_of(float *m, const struct mt_dropout *a, uint64_t row, size_t first, size_t n)
{
    uint64_t drop = (uint64_t)((double)a->p * 0x1p32);
    for (size_t i = 0; i < n; i += 4) {
        struct mt_philox r = mt_philox(a->seed, a->stream, row << 32 | (first + i) / 4);
        for (size_t k = 0; k < 4; k++)
            m[i + k] = r.v[k] >= drop ? 1.0f : 0.0f;
    }
}

MT_HOT static void drop(float *y, const float *x, const float *mask, float scale, size_t n)
{
    MT_INDEPENDENT
    for (size_t i = 0; i < n; i++)
        y[i] = mask[i] != 0.0f ? x[i] * scale : 0.0f;
}

MT_HOT static void add(float *y, const float *x, const float *dropped, size_t n)
{
    MT_INDEPENDENT
    for (size_t i = 0; i < n; i++)
        y[i] = x[i] + dropped[i];
}

static void piece(const void *args, const struct mt_cpu_piece *p)
{
    const struct mt_dropout *a = args;
    float mask[MT_CPU_PIECE], sum[MT_CPU_PIECE], *y = a->add ? sum : p->out[0];
    size_t row = a->rows ? (size_t)a->rows[p->row] : p->row;
    mask_of(mask, a, a->first_row + row, p->first, mt_align_up(p->n, 4));
    drop(y, p->in[0], mask, 1.0f / (1.0f - a->p), p->n);
    if (a->add)
        add(p->out[0], p->in[1], y, p->n);
}

void mt_cpu_run_dropout(struct mt_cpu_device *d, const struct mt_dropout *a)
{
    mt_cpu_run_pointwise(d, &(struct mt_cpu_pointwise){
        .f = piece, .args = a, .n = a->n, .heads = 1, .dim = a->c,
        .in = {mt_cpu_rows(a->dtype, a->x, 0, a->c), mt_cpu_rows(a->out_dtype, a->add, 0, a->c)},
        .out = {mt_cpu_rows(a->out_dtype, a->out, 0, a->c)}});
}
