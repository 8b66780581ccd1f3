/* SPDX-License-Identifier: Apache-2.0 */
#include <string.h>

#include "test.h"
#include "train/memory.h"

enum { GIB = 1 << 30 };

TEST(what_fits_is_let_pass)
{
    struct mt_memory m = {.n_limits = 2};
    m.limits[0] = (struct mt_memory_limit){"host", "MemAvailable", GIB, GIB};
    m.limits[1] = (struct mt_memory_limit){"disk", "out", 0, 0};
    MUST(mt_memory_check, &m);
}

TEST(the_first_limit_that_is_short_is_told_with_numbers)
{
    struct mt_memory m = {.n_limits = 3};
    struct mt_err err = {0};
    m.limits[0] = (struct mt_memory_limit){"host", "MemAvailable", GIB, (uint64_t)2 * GIB};
    m.limits[1] = (struct mt_memory_limit){"host", "cgroup", (uint64_t)3 * GIB, (uint64_t)2 * GIB};
    m.limits[2] = (struct mt_memory_limit){"disk", "out", (uint64_t)9 * GIB, GIB};
    assert_int_equal(mt_memory_check(&m, &err), -ENOSPC);
    assert_int_equal(err.kind, MT_ERR_NO_FIT);
    assert_non_null(strstr(err.msg, "cgroup"));
    assert_non_null(strstr(err.msg, "3.00 GiB"));
    assert_non_null(strstr(err.msg, "2.00 GiB"));
    assert_null(strstr(err.msg, "9.00 GiB"));
}
