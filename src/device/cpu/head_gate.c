/* SPDX-License-Identifier: Apache-2.0 */
/* y = x s, s = sigmoid(gate); dx = dy s, dgate = dy x s (1 - s). */
#include "device/cpu/pointwise.h"
#include "device/cpu/vecmath.h"

MT_HOT static void forward(const void *, const struct mt_cpu_piece *p)
{
    float *y = p->out[0];
    const float *x = p->in[0], *gate = p->in[1];
    MT_INDEPENDENT
    for (size_t i = 0; i < p->n; i++)
        y[i] = x[i] * mt_sigmoidf(gate[i]);
}

/* dx overwrites dy, dgate gate; either may be the array itself. */
MT_HOT static void backward(const void *, const struct mt_cpu_piece *p)
{
    float *dx = p->out[0], *dgate = p->out[1];
    const float *x = p->in[0], *gate = p->in[1], *dy = p->in[2];
    MT_INDEPENDENT
    for (size_t i = 0; i < p->n; i++) {
        float s = mt_sigmoidf(gate[i]), d = dy[i] * s;
        dgate[i] = d * x[i] * (1.0f - s);
        dx[i] = d;
    }
}

void mt_cpu_run_head_gate(struct mt_cpu_device *d, const struct mt_head_gate *a)
{
    mt_cpu_run_pointwise(d, &(struct mt_cpu_pointwise){
        .f = forward, .n = a->n, .heads = a->x.n, .dim = a->x.dim, .in = {{a->dtype, a->x}, {a->dtype, a->gate}},
        .out = {{a->dtype, a->y}}});
}

void mt_cpu_run_head_gate_bwd(struct mt_cpu_device *d, const struct mt_head_gate_bwd *b)
{
    const struct mt_head_gate *a = &b->fwd;
    mt_cpu_run_pointwise(d, &(struct mt_cpu_pointwise){
        .f = backward, .n = a->n, .heads = a->x.n, .dim = a->x.dim,
        .in = {{a->dtype, a->x}, {a->dtype, a->gate}, {a->dtype, b->dy}},
        .out = {{a->dtype, b->dx}, {a->dtype, b->dgate}}});
}
