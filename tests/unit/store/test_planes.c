/* SPDX-License-Identifier: Apache-2.0 */
#include <stdlib.h>
#include <sys/mman.h>
#include <string.h>

#include "base/mem.h"
#include "made_planes.h"
#include "test.h"

enum { UNITS = 3 };
static const size_t elems[UNITS] = {8192, 100, 4097};
static const bool trainable[UNITS] = {true, false, true};

static struct mt_plane_set_params params(enum mt_dtype state, enum mt_dtype grad)
{
    static struct mt_plane_elems by_kind[UNITS];
    return made_planes(UNITS, elems, trainable, by_kind, state, grad);
}

static size_t bytes_of(const struct mt_plane_set_params *p, size_t unit, int k)
{
    size_t size = k == MT_PLANE_HI || k == MT_PLANE_LO ? 2 : mt_dtype_size(p->desc[k].dtype);
    bool has = k == MT_PLANE_HI || k == MT_PLANE_LO ||
               (trainable[unit] && (k == MADE_M || k == MADE_V || k == MT_PLANE_GRAD));
    return has ? elems[unit] * size : 0;
}

TEST(planes_are_zero_aligned_and_apart)
{
    for (int v = 0; v < 4; v++) {
        struct mt_plane_set_params p = params(v & 1 ? MT_BF16 : MT_F32, v & 2 ? MT_BF16 : MT_F32);
        mt_plane_set *s = NULL;
        assert_int_equal(mt_plane_set_create(&s, &p, NULL), 0);
        for (size_t u = 0; u < UNITS; u++)
            for (int k = 0; k < MT_N_PLANES; k++) {
                unsigned char *plane = mt_plane(s, u, k);
                size_t n = bytes_of(&p, u, k);
                if (!n) {
                    assert_null(plane);
                    continue;
                }
                assert_int_equal((uintptr_t)plane % 4096, 0);
                size_t bytes;
                char *range = mt_plane_set_range(s, (enum mt_plane_kind)k, &bytes);
                assert_int_equal((uintptr_t)range % 4096, 0);
                assert_true((char *)plane >= range && (char *)plane + n <= range + bytes);
                for (size_t i = 0; i < n; i++)
                    assert_int_equal(plane[i], 0);
                memset(plane, (int)(1 + u * MT_N_PLANES + (size_t)k), n);
            }
        for (size_t u = 0; u < UNITS; u++)
            for (int k = 0; k < MT_N_PLANES; k++) {
                unsigned char *plane = mt_plane(s, u, k);
                for (size_t i = 0; plane && i < bytes_of(&p, u, k); i++)
                    assert_int_equal(plane[i], 1 + u * MT_N_PLANES + (size_t)k);
            }
        assert_int_equal(mt_plane_elems(s, 2, MADE_V), 4097);
        assert_int_equal(mt_plane_elems(s, 1, MADE_V), 0);
        assert_int_equal(mt_plane_desc_of(s, MADE_V)->dtype, v & 1 ? MT_BF16 : MT_F32);
        mt_plane_set_destroy(&s);
        assert_null(s);
        mt_plane_set_destroy(&s);
    }
}

TEST(the_arithmetic_is_that_of_the_mapping)
{
    struct mt_plane_set_params p = params(MT_F32, MT_BF16);
    size_t sum = 0;
    for (int k = 0; k < MT_N_PLANES; k++) {
        size_t want = 0;
        for (size_t u = 0; u < UNITS; u++)
            want += mt_align_up(bytes_of(&p, u, k), 4096);
        assert_int_equal(mt_plane_set_plane_bytes(&p, k), want);
        sum += want;
    }
    assert_int_equal(mt_plane_set_bytes(&p), sum);
    MT_CLOSED_BY(mt_plane_set_destroy) mt_plane_set *s = NULL;
    size_t bytes, ranges = 0;
    assert_int_equal(mt_plane_set_create(&s, &p, NULL), 0);
    for (int k = 0; k < MT_N_PLANES; k++) {
        mt_plane_set_range(s, (enum mt_plane_kind)k, &bytes);
        ranges += bytes;
    }
#ifndef __SANITIZE_ADDRESS__ /* which puts gaps between planes */
    assert_int_equal(ranges, sum);
#endif
    assert_true(ranges >= sum);
}

TEST(a_block_is_whole_also_where_few_of_its_elements_are_used)
{
    const struct mt_plane_desc packed = {.block = 64, .block_bytes = 34};
    assert_int_equal(mt_plane_desc_bytes(&packed, 0), 0);
    assert_int_equal(mt_plane_desc_bytes(&packed, 1), 34);
    assert_int_equal(mt_plane_desc_bytes(&packed, 64), 34);
    assert_int_equal(mt_plane_desc_bytes(&packed, 65), 68);
}

/* Otherwise a run would fail only in its first update if its moments do not fit. */
TEST(all_pages_are_there_from_the_start)
{
    enum { BYTES = (600 << 20) + 12345 };
    void *m = NULL;
    size_t pages = mt_div_up(BYTES, 4096), there = 0;
    unsigned char *in_core = mt_calloc(pages, 1);
    assert_int_equal(mt_host_alloc(&m, BYTES, "pages", NULL), 0);
    assert_int_equal(mincore(m, BYTES, in_core), 0);
    for (size_t i = 0; i < pages; i++)
        there += in_core[i] & 1;
    assert_int_equal(there, pages);
    for (size_t i = 0; i < BYTES; i += 4096)
        assert_int_equal(((char *)m)[i], 0);
    mt_host_free(m, BYTES);
    free(in_core);
}

TEST(more_than_there_is_cannot_be_mapped)
{
    size_t huge[1] = {(size_t)1 << 55};
    bool yes[1] = {true};
    struct mt_plane_elems by_kind[1];
    struct mt_plane_set_params p = made_planes(1, huge, yes, by_kind, MT_F32, MT_BF16);
    mt_plane_set *s = NULL;
    struct mt_err err = {0};
    void *m = NULL;
    assert_int_equal(mt_plane_set_create(&s, &p, &err), -ENOMEM);
    assert_int_equal(err.kind, MT_ERR_NO_FIT);
    assert_null(s);
    assert_int_equal(mt_host_alloc(&m, (size_t)1 << 60, "a dream", &err), -ENOMEM);
    assert_non_null(strstr(err.msg, "a dream"));
    assert_null(m);
    mt_host_free(NULL, 5);
}
