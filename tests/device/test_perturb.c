/* SPDX-License-Identifier: Apache-2.0 */
/* Perturbed weights: noise that every device makes with the same bits, as the host does in its updates. */
#include <math.h>

#include "base/philox.h"
#include "harness.h"

static void perturb_case(struct harness *h, enum mt_noise_kind kind, size_t n, float scale, uint32_t limit)
{
    double *x, *want = scratch(h, n);
    struct dbuf *from = buf_random(h, h->dtype, n, 0.02, &x), *to = buf_nan(h, h->dtype, n);
    struct mt_perturb a = {.n = n, .dtype = h->dtype, .scale = scale, .limit = limit, .kind = kind, .seed = h->seed << 33 | 5,
                           .stream = mt_noise_stream(3, 17), .sample = 2, .x = from->p, .y = to->p};
    RUN(h, mt_op_perturb, &a);
    for (size_t i = 0; i < n; i++) {
        struct mt_philox r = mt_philox(a.seed, a.stream, mt_noise_index(kind, a.sample, i));
        bool takes = scale != 0 && (mt_f32_to_bf16(fabsf((float)x[i])) <= limit || limit == MT_NOISE_ALL);
        float y = (float)x[i] + (takes ? scale * mt_noise_of(kind, r.v[mt_noise_word(kind, i)], i) : 0);
        want[i] = (double)(!takes ? (float)x[i] : h->dtype == MT_BF16 ? mt_bf16_to_f32(mt_f32_to_bf16(y)) : y);
    }
    expect_close(h, "perturbed", buf_get(h, to), want, n, 0);
    a.y = from->p;
    RUN(h, mt_op_perturb, &a);
    expect_close(h, "in place", buf_get(h, from), want, n, 0);
}

DEVICE_TEST(noise_has_the_same_bits_on_all_devices)
{
    for (int kind = MT_NOISE_NORMAL; kind <= MT_NOISE_SIGN; kind++) {
        perturb_case(h, (enum mt_noise_kind)kind, 1, 0.5f, MT_NOISE_ALL);
        perturb_case(h, (enum mt_noise_kind)kind, 131, -1e-3f, mt_f32_to_bf16(0.013f));
        perturb_case(h, (enum mt_noise_kind)kind, 5003, 1, mt_f32_to_bf16(0.02f));
        perturb_case(h, (enum mt_noise_kind)kind, 77, 0, MT_NOISE_ALL);
    }
}

/* Of all words a million evenly spread ones, in double. */
DEVICE_TEST(noise_is_normal)
{
    double one = 1, squares = 0, fourth = 0;
    const uint32_t n = 1 << 20;
    for (uint32_t i = 0; i < n; i++) {
        double z = (double)mt_noise_normal(i << 12 | 1 << 11), share = 0.5 * erfc(-z / sqrt(2));
        one = fmax(one, 1 + fabs(share - (i + 0.5) / n));
        squares += z * z / n;
        fourth += z * z * z * z / n;
    }
    expect_close(h, "1 and the largest error of a share", &one, &(double){1}, 1, 1e-6);
    expect_close(h, "variance", &squares, &(double){1}, 1, 1e-4);
    expect_close(h, "fourth moment", &fourth, &(double){3}, 1, 1e-3);
}
