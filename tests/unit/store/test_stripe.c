/* SPDX-License-Identifier: Apache-2.0 */
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "store/disk_priv.h"
#include "test.h"

enum { CHUNK = 4096 };

/* Every byte of the space has one place, no place has two, and all lie within the files. */
static void check_map(size_t n, const double *rates, uint64_t bytes)
{
    struct mt_stripe s;
    char *taken[8];
    uint64_t size[8], sum = 0;
    assert_int_equal(mt_stripe_init(&s, n, CHUNK, rates, NULL), 0);
    for (size_t d = 0; d < n; d++) {
        size[d] = mt_stripe_file_bytes(&s, d, bytes);
        taken[d] = calloc(1, size[d] / CHUNK + 1);
        sum += size[d];
    }
    assert_int_equal(sum, mt_align_up(bytes, CHUNK));
    for (uint64_t at = 0; at < bytes; at += CHUNK) {
        size_t d, d2;
        uint64_t off, off2;
        assert_true(mt_stripe_find(&s, at, &d, &off) >= CHUNK);
        assert_true(d < n && off % CHUNK == 0 && off + CHUNK <= size[d]);
        assert_false(taken[d][off / CHUNK]);
        taken[d][off / CHUNK] = 1;
        uint64_t rest = mt_stripe_find(&s, at + 100, &d2, &off2);
        assert_true(d2 == d && off2 == off + 100 && (n == 1 || rest == CHUNK - 100));
    }
    for (size_t d = 0; d < n; d++)
        free(taken[d]);
    mt_stripe_finish(&s);
}

TEST(every_chunk_has_one_place)
{
    static const double rates[][4] = {{1, 1, 1, 1}, {7, 1, 1, 1}, {3.5, 7, 0.5, 2}, {1, 0, 1, 0.001}};
    for (size_t n = 1; n <= 4; n++)
        for (size_t k = 0; k < MT_ARRAY_LEN(rates); k++)
            for (uint64_t chunks = 1; chunks < 300; chunks += 17)
                check_map(n, rates[k], chunks * CHUNK - 1234);
    check_map(3, NULL, 1 << 20);
}

TEST(drives_get_shares_by_their_rates)
{
    struct mt_stripe s;
    const double rates[] = {6, 2};
    uint64_t bytes = 64 * CHUNK * 10;
    assert_int_equal(mt_stripe_init(&s, 2, CHUNK, rates, NULL), 0);
    assert_int_equal(mt_stripe_file_bytes(&s, 0, bytes), bytes / 4 * 3);
    /* and not in long runs: the slow one is never far off */
    size_t d, since = 0;
    uint64_t off;
    for (uint64_t at = 0; at < bytes; at += CHUNK) {
        mt_stripe_find(&s, at, &d, &off);
        since = d == 1 ? 0 : since + 1;
        assert_true(since <= 4);
    }
    mt_stripe_finish(&s);
}

TEST(too_many_folders_are_refused)
{
    struct mt_stripe s;
    struct mt_err err;
    assert_int_equal(mt_stripe_init(&s, MT_STRIPE_SLOTS + 1, CHUNK, NULL, &err), -EINVAL);
    assert_non_null(strstr(err.msg, "65 folders"));
    assert_int_equal(mt_stripe_init(&s, 0, CHUNK, NULL, &err), -EINVAL);
}
