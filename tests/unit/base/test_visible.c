/* SPDX-License-Identifier: Apache-2.0 */
#include <string.h>

#include "base/err.h"
#include "base/log.h"
#include "base/mem.h"
#include "base/visible.h"
#include "test.h"

static void expect(const char *text, const char *want)
{
    char got[256];
    MT_STR_FREED struct mt_str s = {0};
    mt_visible(got, sizeof(got), text);
    assert_string_equal(got, want);
    mt_str_visible(&s, text, strlen(text));
    if (!strstr(want, "\\x9b"))
        assert_string_equal(s.p, want);
}

TEST(what_steers_a_terminal_is_shown_as_its_code)
{
    expect("a\033]0;title\a\rb", "a\\x1b]0;title\\x07\\x0db");
    expect("one\ntwo\tthree", "one\ntwo\tthree");
    expect("caf\xc3\xa9 \xe6\x97\xa5 \xf0\x9f\x98\x80", "caf\xc3\xa9 \xe6\x97\xa5 \xf0\x9f\x98\x80");
    expect("x\xc2\x9b" "31m", "x\\x9b" "31m");
    expect("x\x9b" "31m", "x\\x9b" "31m"); /* as one byte, for terminals without UTF-8 */
    expect("abc\xe2\x80\xae" "def\x7f", "abc\\u202e" "def\\x7f");
    expect("cut \xe6\x97", "cut \xe6\x97");
}

TEST(a_full_buffer_ends_with_a_whole_character)
{
    char small[6];
    mt_visible(small, sizeof(small), "ab\033\033");
    assert_string_equal(small, "ab");
    mt_visible(small, sizeof(small), "abc\xe6\x97\xa5");
    assert_string_equal(small, "abc");
}

static char logged[256];

static void sink(enum mt_log_level level, const char *line)
{
    (void)level;
    strncpy(logged, line, sizeof(logged) - 1);
}

TEST(errors_and_logs_are_safe)
{
    struct mt_err err;
    mt_fail(&err, MT_ERR_INPUT, -1, "no %s", "\033[2J");
    assert_string_equal(err.msg, "no \\x1b[2J");
    mt_fail_prefix(&err, -1, "in %s", "\033");
    assert_string_equal(err.msg, "in \\x1b: no \\x1b[2J");
    mt_log_set_sink(sink);
    mt_log(MT_LOG_WARN, "at %s", "\a");
    mt_log_set_sink(NULL);
    assert_string_equal(logged, "at \\x07");
}
