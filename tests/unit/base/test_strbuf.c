/* SPDX-License-Identifier: Apache-2.0 */
#include "base/strbuf.h"
#include "test.h"

TEST(printf_appends_and_terminates)
{
    struct mt_str s = {0};
    for (int i = 0; i < 100; i++)
        mt_str_printf(&s, "%d,", i);
    assert_false(s.failed);
    assert_int_equal(s.len, 10 * 2 + 90 * 3);
    assert_int_equal(s.p[s.len], 0);
    mt_str_finish(&s);
    assert_null(s.p);
}

TEST(append_takes_any_bytes)
{
    MT_STR_FREED struct mt_str s = {0};
    mt_str_append(&s, "", 0);
    assert_string_equal(s.p, "");
    mt_str_append(&s, "a\0b", 3);
    assert_int_equal(s.len, 3);
    assert_memory_equal(s.p, "a\0b", 4);
    s.failed = true; /* as when memory was short: nothing more is added */
    mt_str_append(&s, "c", 1);
    mt_str_printf(&s, "d");
    assert_int_equal(s.len, 3);
}

TEST(what_is_not_utf8_is_found)
{
    static const struct {
        const char *text;
        long want;
    } cases[] = {{"", -1}, {"plain", -1}, {"gr\xc3\xbc\xc3\x9f", -1}, {"\xf0\x9f\x98\x80", -1}, {"a\xff", 1}, {"\xc3", 0},
                 {"\xc0\x80", 0}, {"\xed\xa0\x80", 0}, {"\xf4\x90\x80\x80", 0}, {"ok\xe2\x82", 2}, {"\x80", 0}};
    for (size_t i = 0; i < sizeof(cases) / sizeof(*cases); i++)
        assert_int_equal(mt_utf8_error(cases[i].text), cases[i].want);
}

TEST(edit_distance_counts_swaps_as_one)
{
    assert_int_equal(mt_edit_distance("learning_rate", "learing_rate"), 1);
    assert_int_equal(mt_edit_distance("ab", "ba"), 1);
    assert_int_equal(mt_edit_distance("", "abc"), 3);
    assert_int_equal(mt_edit_distance("kitten", "sitting"), 3);
    assert_int_equal(mt_edit_distance("same", "same"), 0);
    char longer[80];
    for (int i = 0; i < 79; i++)
        longer[i] = 'a';
    longer[79] = 0;
    assert_int_equal(mt_edit_distance(longer, "a"), 64); /* too long to compare: far */
}
