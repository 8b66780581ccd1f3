/* SPDX-License-Identifier: Apache-2.0 */
#include <string.h>

#include "hw/wear.h"
#include "test.h"

/* Percentage used at byte 5, data units written (of 512,000 bytes) from byte 48, little-endian. */
TEST(a_smart_page_tells_what_was_written_and_what_is_rated)
{
    uint8_t page[512] = {0};
    struct mt_hw_wear w = {.percent_used = 99};
    uint64_t units = 234375000; /* 120 TB */
    page[5] = 20;
    for (int i = 0; i < 8; i++)
        page[48 + i] = (uint8_t)(units >> (8 * i));
    mt_hw_wear_parse(&w, page);
    assert_int_equal(w.percent_used, 20);
    assert_int_equal(w.written_bytes, 120000000000000);
    assert_int_equal(w.rated_bytes, 600000000000000);
    page[5] = 0; /* too new to tell */
    mt_hw_wear_parse(&w, page);
    assert_int_equal(w.rated_bytes, 0);
    page[5] = 255;
    memset(page + 48, 0xff, 8);
    mt_hw_wear_parse(&w, page);
    assert_true(w.written_bytes == UINT64_MAX);
}

TEST(what_is_no_nvme_drive_says_nothing)
{
    struct mt_hw_wear w;
    assert_false(mt_hw_wear(&w, "/proc"));
    assert_false(mt_hw_wear(&w, "/no/such/folder"));
}
