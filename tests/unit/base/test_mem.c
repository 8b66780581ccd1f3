/* SPDX-License-Identifier: Apache-2.0 */
#include <math.h>
#include <string.h>

#include "base/err.h"
#include "base/log.h"
#include "base/mem.h"
#include "test.h"

TEST(sizes_that_overflow_are_noticed)
{
    size_t out = 7;
    void *items = NULL;
    size_t cap = 0;
    assert_false(mt_mul_size(SIZE_MAX / 2, 3, &out));
    assert_false(mt_add_size(SIZE_MAX, 1, &out));
    assert_int_equal(out, 7);
    assert_true(mt_mul_size(SIZE_MAX / 2, 2, &out));
    assert_null(mt_calloc(SIZE_MAX / 4, 8));
    assert_null(mt_alloc_aligned(SIZE_MAX - 10));
    assert_false(mt_grow(&items, &cap, SIZE_MAX / 4, 8));
    assert_null(items);
    assert_int_equal(cap, 0);
}

TEST(an_array_grows_and_keeps_its_items)
{
    MT_FREED int *items = NULL;
    size_t cap = 0;
    for (int i = 0; i < 10000; i++) {
        assert_true(mt_grow(&items, &cap, (size_t)i + 1, sizeof(int)));
        assert_true(cap > (size_t)i);
        items[i] = i;
    }
    for (int i = 0; i < 10000; i++)
        assert_int_equal(items[i], i);
}

TEST(arrays_freed_together_remember_that_one_was_missing)
{
    struct mt_arrays arrays = {0};
    int *counts = mt_arrays_add(&arrays, 3, sizeof(*counts));
    assert_non_null(counts);
    assert_int_equal(counts[2], 0);
    assert_non_null(mt_arrays_add(&arrays, 0, sizeof(double)));
    assert_false(arrays.failed);
    assert_null(mt_arrays_add(&arrays, SIZE_MAX / 4, 8));
    assert_null(mt_arrays_add(&arrays, SIZE_MAX, 1));
    assert_non_null(mt_arrays_add(&arrays, 1, 1));
    assert_true(arrays.failed);
    mt_arrays_finish(&arrays);
    assert_null(arrays.last);
}

TEST(bytes_are_told_in_binary_units)
{
    char buf[32];
    assert_string_equal(mt_format_bytes(buf, sizeof(buf), 0), "0 B");
    assert_string_equal(mt_format_bytes(buf, sizeof(buf), 1023), "1023 B");
    assert_string_equal(mt_format_bytes(buf, sizeof(buf), 1536), "1.50 KiB");
    assert_string_equal(mt_format_bytes(buf, sizeof(buf), UINT64_C(3) << 30), "3.00 GiB");
    assert_string_equal(mt_format_bytes(buf, sizeof(buf), UINT64_MAX), "16384.00 PiB");
    assert_string_equal(mt_format_need(buf, sizeof(buf), 1537), "1.51 KiB");
    assert_string_equal(mt_format_need(buf, sizeof(buf), 1536), "1.50 KiB");
}

TEST(times_are_told_in_two_units)
{
    char buf[32];
    assert_string_equal(mt_format_seconds(buf, sizeof(buf), 0.2), "0s");
    assert_string_equal(mt_format_seconds(buf, sizeof(buf), 99.7), "1m40s");
    assert_string_equal(mt_format_seconds(buf, sizeof(buf), 5999), "99m59s");
    assert_string_equal(mt_format_seconds(buf, sizeof(buf), 17160), "4h46m");
    assert_string_equal(mt_format_seconds(buf, sizeof(buf), -3), "0s");
    assert_string_equal(mt_format_seconds(buf, sizeof(buf), NAN), "277777h46m");
    assert_string_equal(mt_format_seconds(buf, sizeof(buf), INFINITY), "277777h46m");
}

TEST(an_error_takes_prefixes_and_never_overflows)
{
    struct mt_err err = {0};
    char big[4000];
    memset(big, 'x', sizeof(big) - 1);
    big[sizeof(big) - 1] = 0;
    assert_int_equal(mt_fail(&err, MT_ERR_INPUT, -EINVAL, "bad %d", 7), -EINVAL);
    assert_int_equal(mt_fail_prefix(&err, -EINVAL, "file %s", "f"), -EINVAL);
    assert_string_equal(err.msg, "file f: bad 7");
    assert_int_equal(err.kind, MT_ERR_INPUT);
    assert_int_equal(mt_fail_prefix(&err, -EINVAL, "%s", big), -EINVAL);
    assert_int_equal(strlen(err.msg), sizeof(err.msg) - 1);
    assert_int_equal(mt_fail(NULL, MT_ERR_INPUT, -EIO, "nobody listens"), -EIO);
    assert_int_equal(mt_fail_prefix(NULL, -EIO, "nobody"), -EIO);
    assert_int_equal(mt_fail_nomem(&err, "a thing", 42), -ENOMEM);
    assert_int_equal(err.kind, MT_ERR_NO_FIT);
}

static int n_lines;
static char last[4096];
static void sink(enum mt_log_level level, const char *line)
{
    (void)level;
    n_lines++;
    memcpy(last, line, strlen(line) + 1);
}

TEST(an_error_has_the_mend_of_its_code_and_no_figure_that_says_nothing)
{
    struct mt_err err;
    mt_fail(&err, MT_ERR_RUNTIME, -EMFILE, "cannot open %s", "x");
    assert_string_equal(err.msg, "cannot open x: raise the limit, ulimit -n");
    mt_fail_nomem(&err, "the run", 1);
    assert_string_equal(err.msg, "out of memory: there is none for the run");
    mt_fail_nomem(&err, "the run", 65536);
    assert_string_equal(err.msg, "out of memory: 65536 bytes for the run");
}

TEST(the_log_has_levels_and_a_sink)
{
    char big[5000];
    memset(big, 'y', sizeof(big) - 1);
    big[sizeof(big) - 1] = 0;
    mt_log_set_sink(sink);
    mt_log_set_level(MT_LOG_WARN);
    mt_info("not seen");
    assert_int_equal(n_lines, 0);
    mt_warn("seen %d", 1);
    assert_int_equal(n_lines, 1);
    assert_string_equal(last, "seen 1");
    mt_warn("%s", big);
    assert_int_equal(strlen(last), 2047);
    mt_log_set_level(MT_LOG_DEBUG);
    mt_debug("d");
    assert_int_equal(n_lines, 3);
    mt_progress("%d%%", 5);
    assert_string_equal(last, "5%");
    mt_log_set_level(MT_LOG_WARN);
    mt_progress("not seen");
    assert_int_equal(n_lines, 4);
    mt_log_set_sink(NULL);
}
