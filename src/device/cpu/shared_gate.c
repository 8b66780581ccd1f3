/* SPDX-License-Identifier: Apache-2.0 */
/*
 * gate = sigmoid(<x, w>), act *= gate; backward with d = dgate gate (1 - gate): dx += d w, dw += sum over rows of d x.
 */

#include "device/cpu/cpu.h"
#include "device/cpu/vecmath.h"

enum { ROW_BLOCK = 32, PIECE = 2048 };

static void forward_row(const void *args, size_t row)
{
    const struct mt_shared_gate *a = args;
    float x[PIECE];
    a->gate[row] = mt_sigmoidf(mt_cpu_dot_rows(a->dtype, a->x, row * a->c, a->w, 0, a->c));
    for (size_t c = 0; c < a->f; c += PIECE) {
        size_t n = MT_MIN((size_t)PIECE, a->f - c), at = row * a->f + c;
        float *y = mt_cpu_row_place(a->dtype, a->act, at, x);
        mt_cpu_scale(y, mt_cpu_row_f32(a->dtype, a->act, at, n, x), a->gate[row], n);
        mt_cpu_store_row(a->dtype, a->act, at, n, y);
    }
}

void mt_cpu_run_shared_gate(struct mt_cpu_device *d, const struct mt_shared_gate *a)
{
    mt_cpu_by_rows(d, forward_row, a, a->n, a->c + a->f);
}

MT_CPU_SUMS(shared_gate_bwd, n, ROW_BLOCK, a->c)

static void backward_row(const void *args, size_t r, float *dw)
{
    const struct mt_shared_gate_bwd *a = args;
    float x[PIECE], w[PIECE], g = a->gate[r], d = a->dgate[r] * (g * (1.0f - g));
    for (size_t c = 0; c < a->c; c += PIECE) {
        size_t n = MT_MIN((size_t)PIECE, a->c - c);
        mt_cpu_add_scaled(a->dx + r * a->c + c, mt_cpu_row_f32(a->dtype, a->w, c, n, w), d, n);
        if (dw)
            mt_cpu_add_scaled(dw + c, mt_cpu_row_f32(a->dtype, a->x, r * a->c + c, n, x), d, n);
    }
}

void mt_cpu_run_shared_gate_bwd(struct mt_cpu_device *d, const struct mt_shared_gate_bwd *a)
{
    mt_cpu_sum_rows(d, backward_row, a, a->n, (struct mt_cpu_sums){ROW_BLOCK, a->c, a->dw, a->workspace});
}
