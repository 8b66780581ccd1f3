/* SPDX-License-Identifier: Apache-2.0 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/philox.h"
#include "base/mem.h"
#include "test.h"

/* The known answers of the Random123 distribution (Salmon et al. 2011), philox4x32-10. */
TEST(blocks_are_those_of_the_paper)
{
    static const struct {
        uint32_t ctr[4], key[2], want[4];
    } kat[] = {
        {{0, 0, 0, 0}, {0, 0}, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
        {{0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff}, {0xffffffff, 0xffffffff},
         {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}},
        {{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0},
         {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}},
    };
    for (size_t i = 0; i < sizeof(kat) / sizeof(kat[0]); i++) {
        struct mt_philox r = mt_philox(kat[i].key[0] | (uint64_t)kat[i].key[1] << 32,
                                       kat[i].ctr[2] | (uint64_t)kat[i].ctr[3] << 32,
                                       kat[i].ctr[0] | (uint64_t)kat[i].ctr[1] << 32);
        assert_memory_equal(r.v, kat[i].want, sizeof(r.v));
    }
}

TEST(a_normal_number_depends_on_its_index_alone)
{
    enum { N = 1003 };
    float whole[N], part[N];
    mt_philox_normal(whole, N, 0, 7, 9, 0.5f);
    for (size_t first = 0; first < 9; first++)
        for (size_t n = 0; n < 50; n += 7) {
            mt_philox_normal(part, n, first, 7, 9, 0.5f);
            assert_memory_equal(part, whole + first, n * sizeof(float));
        }
    mt_philox_normal(part, N, 0, 8, 9, 0.5f);
    assert_true(memcmp(part, whole, sizeof(part)) != 0);
    mt_philox_normal(part, N, 0, 7, 10, 0.5f);
    assert_true(memcmp(part, whole, sizeof(part)) != 0);
}

TEST(normal_numbers_have_their_moments)
{
    enum { N = 1 << 18 };
    MT_FREED float *x = malloc(N * sizeof(float));
    double sum = 0, sq = 0, fourth = 0;
    mt_philox_normal(x, N, 12345, 1, 2, 3.0f);
    for (int i = 0; i < N; i++) {
        double z = (double)x[i] / 3;
        sum += z;
        sq += z * z;
        fourth += z * z * z * z;
    }
    /* five standard errors: 1/sqrt(N), sqrt(2/N), sqrt(96/N) */
    assert_true(fabs(sum / N) <= 5 / sqrt(N));
    assert_true(fabs(sq / N - 1) <= 5 * sqrt(2.0 / N));
    assert_true(fabs(fourth / N - 3) <= 5 * sqrt(96.0 / N));
}

TEST(uniform_numbers_fill_their_interval)
{
    enum { N = 100000, BINS = 20 };
    int bins[BINS] = {0};
    for (uint64_t i = 0; i < N; i++) {
        double u = mt_philox_uniform(3, 4, i);
        assert_true(u >= 0 && u < 1);
        bins[(int)(u * BINS)]++;
    }
    double chi = 0, want = (double)N / BINS;
    for (int b = 0; b < BINS; b++)
        chi += (bins[b] - want) * (bins[b] - want) / want;
    assert_true(chi < 50); /* 19 degrees of freedom: p < 1e-4 */
}

TEST(a_permutation_takes_each_place_once)
{
    static const uint64_t sizes[] = {1, 2, 3, 5, 16, 17, 255, 256, 1000, 4097};
    for (size_t s = 0; s < sizeof(sizes) / sizeof(sizes[0]); s++)
        for (uint64_t stream = 0; stream < 5; stream++) {
            uint64_t n = sizes[s];
            char *seen = calloc(n, 1);
            size_t fixed = 0;
            for (uint64_t i = 0; i < n; i++) {
                uint64_t p = mt_permute(i, n, 42, stream);
                assert_true(p < n && !seen[p]);
                seen[p] = 1;
                fixed += p == i;
            }
            assert_true(n < 100 || fixed < 12); /* one is expected */
            free(seen);
        }
}

TEST(permutations_of_huge_sets_stay_inside)
{
    static const uint64_t sizes[] = {UINT64_C(1) << 31, (UINT64_C(1) << 31) + 1, UINT64_C(1) << 62,
                                     (UINT64_C(1) << 63) + 5, UINT64_MAX};
    for (size_t s = 0; s < sizeof(sizes) / sizeof(sizes[0]); s++)
        for (uint64_t k = 0; k < 200; k++) {
            uint64_t i = k < 100 ? k : sizes[s] - 1 - k;
            assert_true(mt_permute(i, sizes[s], 1, 2) < sizes[s]);
        }
}
