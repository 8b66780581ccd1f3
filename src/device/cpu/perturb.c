/* SPDX-License-Identifier: Apache-2.0 */
#include "base/philox.h"
#include "device/cpu/pointwise.h"

enum { BLOCK = 128 }; /* elements, which are whole blocks of either noise */

static void words_of(uint32_t *words, const struct mt_perturb *a, uint64_t first, size_t n)
{
    for (uint64_t block = mt_noise_block(a->kind), i = 0; i < n; i += block, words += 4) {
        struct mt_philox r = mt_philox(a->seed, a->stream, mt_noise_index(a->kind, a->sample, first + i));
        memcpy(words, r.v, sizeof(r.v));
    }
}

MT_HOT static void add_normal(float *y, const float *x, const uint32_t *words, float scale, size_t n)
{
    for (size_t i = 0; i < n; i++)
        y[i] = x[i] + scale * mt_noise_normal(words[i]);
}

MT_HOT static void add_signs(float *y, const float *x, const uint32_t *words, float scale, size_t n)
{
    for (size_t i = 0; i < n; i++)
        y[i] = x[i] + (words[i / 32] >> (i % 32) & 1 ? -scale : scale);
}

static void piece(const void *args, const struct mt_cpu_piece *p)
{
    const struct mt_perturb *a = args;
    uint32_t words[MT_CPU_PIECE + BLOCK];
    if (a->scale == 0) {
        memmove(p->out[0], p->in[0], p->n * sizeof(float));
        return;
    }
    words_of(words, a, p->first, p->n);
    float y[MT_CPU_PIECE];
    (a->kind == MT_NOISE_SIGN ? add_signs : add_normal)(y, p->in[0], words, a->scale, p->n);
    for (size_t i = 0; i < p->n; i++)
        p->out[0][i] = mt_noise_takes(p->in[0][i], a->limit) ? y[i] : p->in[0][i];
}

void mt_cpu_run_perturb(struct mt_cpu_device *d, const struct mt_perturb *a)
{
    mt_cpu_run_pointwise(d, &(struct mt_cpu_pointwise){
        .f = piece, .args = a, .n = 1, .heads = 1, .dim = a->n, .in = {mt_cpu_flat(a->dtype, a->x, a->n)},
        .out = {mt_cpu_flat(a->dtype, a->y, a->n)}});
}
