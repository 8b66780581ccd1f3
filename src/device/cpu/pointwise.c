/* SPDX-License-Identifier: Apache-2.0 */
#include "device/cpu/pointwise.h"

static void piece(const void *args, size_t i)
{
    const struct mt_cpu_pointwise *w = args;
    size_t in_head = mt_div_up(w->dim, MT_CPU_PIECE), in_row = w->heads * in_head;
    size_t row = i / in_row, head = i % in_row / in_head, first = i % in_head * MT_CPU_PIECE;
    float in[MT_CPU_VIEWS][MT_CPU_PIECE], out[MT_CPU_VIEWS][MT_CPU_PIECE];
    struct mt_cpu_piece p = {MT_MIN((size_t)MT_CPU_PIECE, w->dim - first), row, head * w->dim + first, {0}, {0}};
    for (size_t k = 0; k < MT_CPU_VIEWS; k++) {
        const struct mt_cpu_view *from = &w->in[k], *to = &w->out[k];
        if (from->at.p)
            p.in[k] = mt_cpu_row_f32(from->dtype, from->at.p, mt_heads_at(&from->at, row, head) + first, p.n, in[k]);
        p.out[k] = to->at.p ? mt_cpu_row_place(to->dtype, to->at.p, mt_heads_at(&to->at, row, head) + first, out[k])
                            : out[k];
    }
    w->f(w->args, &p);
    for (size_t k = 0; k < MT_CPU_VIEWS; k++)
        if (w->out[k].at.p)
            mt_cpu_store_row(w->out[k].dtype, w->out[k].at.p, mt_heads_at(&w->out[k].at, row, head) + first, p.n,
                             p.out[k]);
}

void mt_cpu_run_pointwise(struct mt_cpu_device *d, const struct mt_cpu_pointwise *w)
{
    size_t pieces = w->n * w->heads * mt_div_up(w->dim, MT_CPU_PIECE);
    mt_cpu_by_rows(d, piece, w, pieces, MT_MIN(w->dim, (size_t)MT_CPU_PIECE));
}
