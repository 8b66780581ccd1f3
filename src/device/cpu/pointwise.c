/* SPDX-License-Identifier: Apache-2.0 */
#include "device/cpu/pointwise.h"

static void piece(const struct mt_cpu_pointwise *w, size_t row, size_t head, size_t first)
{
    float in[MT_CPU_VIEWS][MT_CPU_PIECE], out[MT_CPU_VIEWS][MT_CPU_PIECE];
    struct mt_cpu_piece p = {MT_MIN((size_t)MT_CPU_PIECE, w->dim - first), row, head * w->dim + first, {0}, {0}};
    for (size_t i = 0; i < MT_CPU_VIEWS; i++) {
        const struct mt_cpu_view *from = &w->in[i], *to = &w->out[i];
        if (from->at.p)
            p.in[i] = mt_cpu_row_f32(from->dtype, from->at.p, mt_heads_at(&from->at, row, head) + first, p.n, in[i]);
        p.out[i] = to->at.p ? mt_cpu_row_place(to->dtype, to->at.p, mt_heads_at(&to->at, row, head) + first, out[i])
                            : out[i];
    }
    w->f(w->args, &p);
    for (size_t i = 0; i < MT_CPU_VIEWS; i++)
        if (w->out[i].at.p)
            mt_cpu_store_row(w->out[i].dtype, w->out[i].at.p, mt_heads_at(&w->out[i].at, row, head) + first, p.n,
                             p.out[i]);
}

static void pieces_of_row(const void *args, size_t row)
{
    const struct mt_cpu_pointwise *w = args;
    for (size_t head = 0; head < w->heads; head++)
        for (size_t first = 0; first < w->dim; first += MT_CPU_PIECE)
            piece(w, row, head, first);
}

void mt_cpu_run_pointwise(struct mt_cpu_device *d, const struct mt_cpu_pointwise *w)
{
    mt_cpu_by_rows(d, pieces_of_row, w, w->n, w->heads * w->dim);
}
