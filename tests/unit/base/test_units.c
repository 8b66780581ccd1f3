/* SPDX-License-Identifier: Apache-2.0 */
#include "base/mem.h"
#include "base/units.h"
#include "test.h"

TEST(counts_take_units_and_nothing_else)
{
    static const struct {
        const char *text;
        int64_t want; /* -7: refused */
    } cases[] = {{"0", 0}, {"65536", 65536}, {"64Ki", 65536}, {"64 Ki", 65536}, {"-1", -1}, {"1e3", 1000}, {"2.5k", 2500},
                 {"", -7}, {"abc", -7}, {"3x", -7}, {"2.5", -7}, {"0x10", -7}, {" 3", -7}, {"nan", -7}, {"inf", -7},
                 {"1e300", -7}, {"1 2", -7}};
    for (size_t i = 0; i < MT_ARRAY_LEN(cases); i++) {
        int64_t v = -7;
        assert_int_equal(mt_parse_count(cases[i].text, &v), cases[i].want != -7);
        assert_int_equal(v, cases[i].want);
    }
}

TEST(sizes_need_a_unit)
{
    uint64_t v = 7;
    assert_true(mt_parse_bytes("20GiB", &v) && v == UINT64_C(20) << 30);
    assert_true(mt_parse_bytes("5 GB", &v) && v == UINT64_C(5000000000));
    assert_true(mt_parse_bytes("1KB", &v) && v == 1000);
    static const char *const bad[] = {"", "20", "GiB", "-1GiB", "1e40GB", "nanGB", "5GB/s", "90%"};
    for (size_t i = 0; i < MT_ARRAY_LEN(bad); i++)
        assert_false(mt_parse_bytes(bad[i], &v));
    assert_true(v == 1000);
}

TEST(rates_ratios_and_durations_are_read_exactly)
{
    double v = 7;
    assert_true(mt_parse_rate("25GB/s", &v) && v == 25e9);
    assert_false(mt_parse_rate("25", &v) || mt_parse_rate("25GB", &v));
    assert_true(mt_parse_percent("3%", &v) && v == 3.0 / 100);
    assert_true(mt_parse_percent("7%", &v) && v == 7.0 / 100);
    assert_false(mt_parse_percent("3", &v) || mt_parse_percent("%", &v));
    assert_true(mt_parse_duration("11h30m", &v) && v == 41400);
    assert_true(mt_parse_duration("250ms", &v) && v == 0.25);
    assert_true(mt_parse_duration("0", &v) && v == 0);
    assert_true(mt_parse_duration("1d", &v) && v == 86400);
    static const char *const bad[] = {"", "5", "m", "-3s", "3s5", "1e999s", "3 s"};
    for (size_t i = 0; i < MT_ARRAY_LEN(bad); i++)
        assert_false(mt_parse_duration(bad[i], &v));
    assert_true(mt_parse_real("1e-5", &v) && v == 1e-5);
    assert_false(mt_parse_real("1e-5x", &v) || mt_parse_real("nan", &v) || mt_parse_real("", &v));
    assert_true(v == 1e-5);
}
