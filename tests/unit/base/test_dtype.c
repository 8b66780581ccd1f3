/* SPDX-License-Identifier: Apache-2.0 */
#include <math.h>
#include <stdlib.h>

#include "base/dtype.h"
#include "test.h"

/* All 2^32 patterns with MEGATRAIN_TEST_FULL set; else a stride that visits every exponent and every low half,
 * and the neighbourhoods of all ties. */
static uint64_t stride(void)
{
    const char *full = getenv("MEGATRAIN_TEST_FULL");
    return full && *full ? 1 : 251;
}

static void check_split(uint32_t u)
{
    uint16_t hi, lo;
    mt_master_split(mt_f32_from_bits(u), &hi, &lo);
    if (mt_f32_bits(mt_master_join(hi, lo)) != u)
        fail_msg("%08x splits to %04x %04x and does not come back", u, hi, lo);
}

TEST(a_master_survives_its_split)
{
    for (uint64_t u = 0; u < UINT64_C(1) << 32; u += stride())
        check_split((uint32_t)u);
    for (uint32_t h = 0; h < 65536; h++)
        for (uint32_t lo = 0x7ffe; lo <= 0x8002; lo++)
            check_split(h << 16 | lo);
}

TEST(hi_is_the_nearest_bf16)
{
    size_t ties = 0, differ = 0;
    for (uint64_t v = 0; v < UINT64_C(1) << 32; v += stride()) {
        uint32_t u = (uint32_t)v;
        uint16_t hi, lo;
        if ((u & 0x7fffffff) >= 0x7f7f8000) /* the loader refuses these */
            continue;
        mt_master_split(mt_f32_from_bits(u), &hi, &lo);
        assert_true(isfinite(mt_bf16_to_f32(hi)));
        if (hi != mt_f32_to_bf16(mt_f32_from_bits(u)))
            assert_int_equal(lo, 0x8000); /* only ties round otherwise */
    }
    for (uint32_t h = 0; h < 65536; h++) { /* the ties: half away from zero, half of them not to even */
        uint32_t u = h << 16 | 0x8000;
        uint16_t hi, lo;
        if ((u & 0x7fffffff) >= 0x7f7f8000)
            continue;
        ties++;
        mt_master_split(mt_f32_from_bits(u), &hi, &lo);
        assert_int_equal(hi, h + 1);
        differ += hi != mt_f32_to_bf16(mt_f32_from_bits(u));
    }
    assert_int_equal(ties, 65278);
    assert_int_equal(differ, 32640);
    uint16_t hi, lo;
    mt_master_split(mt_f32_from_bits(0x7f7f7fff), &hi, &lo);
    assert_true(isfinite(mt_bf16_to_f32(hi)));
    mt_master_split(mt_f32_from_bits(0x7f7f8000), &hi, &lo);
    assert_true(isinf(mt_bf16_to_f32(hi)));
}

TEST(a_bf16_weight_has_no_rest)
{
    for (uint32_t h = 0; h < 65536; h++) {
        uint16_t hi, lo;
        mt_master_split(mt_bf16_to_f32((uint16_t)h), &hi, &lo);
        assert_int_equal(hi, h);
        assert_int_equal(lo, 0);
    }
}

TEST(casts_to_bf16_round_to_nearest_even_and_keep_nan)
{
    for (uint64_t v = 0; v < UINT64_C(1) << 32; v += stride()) {
        float x = mt_f32_from_bits((uint32_t)v), y = mt_bf16_to_f32(mt_f32_to_bf16(x));
        if (isnan(x)) {
            assert_true(isnan(y));
            continue;
        }
        uint32_t down = (uint32_t)v & 0xffff0000u;
        double low = (double)mt_f32_from_bits(down), high = (double)mt_f32_from_bits(down + 0x10000);
        if ((down & 0x7f800000) == 0x7f800000) {
            assert_true(y == x);
            continue;
        }
        if (isinf(high)) /* one step past the largest, as rounding sees it */
            high = copysign(0x1p128, high);
        double dl = fabs((double)x - low), dh = fabs(high - (double)x);
        uint32_t want = dl < dh || (dl == dh && !(down >> 16 & 1)) ? down : down + 0x10000;
        assert_int_equal(mt_f32_bits(y), want);
    }
}

TEST(f16_is_read_exactly)
{
    for (uint32_t h = 0; h < 65536; h++) {
        float x = mt_f16_to_f32((uint16_t)h);
        int exp = (int)(h >> 10 & 31);
        double frac = h & 1023, want = exp ? ldexp(1 + frac / 1024, exp - 15) : ldexp(frac, -24);
        if (exp == 31 && h & 1023)
            assert_true(isnan(x));
        else if (exp == 31)
            assert_true(isinf(x));
        else
            assert_true(fabs((double)x) == want);
        assert_int_equal(signbit(x) != 0, h >> 15);
    }
}
