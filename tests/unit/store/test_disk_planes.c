/* SPDX-License-Identifier: Apache-2.0 */
/* Planes in memory and on the disk have the same content, however they are written and read. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/fs.h"
#include "base/mem.h"
#include "base/philox.h"
#include "made_planes.h"
#include "test.h"

enum { UNITS = 3, WINDOW = 8192 };

static const size_t elems[UNITS] = {5000, 2048, 11111};
static const bool trainable[UNITS] = {true, false, true};
static char root[64];

static int set_up(void **)
{
    snprintf(root, sizeof(root), "/tmp/mt-planes-XXXXXX");
    return mkdtemp(root) ? 0 : -1;
}

static int tear_down(void **)
{
    return mt_remove_tree(root, NULL);
}

struct fixture {
    struct mt_plane_set_params p;
    mt_disk *disk;
    mt_plane_set *set;
};

static bool sums; /* for sets made later */

static void open_set(struct fixture *f, const mt_plane_bits *on_disk, const struct mt_io_fault *fault)
{
    const char *dirs[] = {root};
    static struct mt_plane_elems by_kind[UNITS];
    *f = (struct fixture){.p = made_planes(UNITS, elems, trainable, by_kind, MT_F32, MT_BF16)};
    f->p.on_disk = on_disk;
    f->p.window_bytes = WINDOW;
    f->p.sums = sums;
    struct mt_disk_params dp = {.dirs = dirs, .n_dirs = 1, .bytes = mt_plane_set_disk_bytes(&f->p),
                                .request_bytes = WINDOW, .fault = fault};
    assert_int_equal(mt_disk_open(&f->disk, &dp, NULL), 0);
    f->p.disk = f->disk;
    assert_int_equal(mt_plane_set_create(&f->set, &f->p, NULL), 0);
}

static void close_set(struct fixture *f)
{
    mt_plane_set_destroy(&f->set);
    mt_disk_close(&f->disk);
}

TEST(sizes_add_up_and_frozen_units_have_no_moments)
{
    struct fixture f;
    const mt_plane_bits masks[UNITS] = {~(1u << MT_PLANE_HI), ~0u, 0};
    uint64_t at;
    size_t host = 0;
    open_set(&f, masks, NULL);
    for (int k = 0; k < MT_N_PLANES; k++)
        host += mt_plane_set_plane_bytes(&f.p, (enum mt_plane_kind)k);
    assert_int_equal(host, mt_plane_set_bytes(&f.p));
    /* unit 0: lo, m, v, gradient; unit 1, frozen: hi, lo */
    assert_int_equal(mt_plane_set_disk_bytes(&f.p), 12288 + 2 * 20480 + 12288 + 2 * 4096);
    assert_int_equal(mt_plane_set_window_bytes(&f.p), 4096 + 3 * WINDOW);
    assert_non_null(mt_plane(f.set, 0, MT_PLANE_HI));
    assert_null(mt_plane(f.set, 0, MT_PLANE_LO));
    assert_true(mt_plane_on_disk(f.set, 0, MT_PLANE_LO, &at) && at % MT_DISK_ALIGN == 0);
    assert_false(mt_plane_on_disk(f.set, 0, MT_PLANE_HI, &at));
    assert_false(mt_plane_on_disk(f.set, 1, MADE_M, &at));
    float x;
    struct mt_err err;
    assert_int_equal(mt_planes_read(f.set, 1, MADE_M, 0, 1, &x, &err), -EINVAL);
    assert_non_null(strstr(err.msg, "no plane"));
    close_set(&f);
}

TEST(planes_on_disk_hold_what_planes_in_memory_hold)
{
    struct fixture a, b;
    const mt_plane_bits all[UNITS] = {~0u, ~0u, ~0u};
    open_set(&a, NULL, NULL);
    open_set(&b, all, NULL);
    char buf[3000 * 4], got[3000 * 4];
    for (uint64_t i = 0; i < 3000; i++) {
        size_t u = (size_t)(mt_philox_uniform(1, 0, i) * UNITS);
        const enum mt_plane_kind kinds[] = {MT_PLANE_HI, MT_PLANE_LO, MADE_M, MADE_V};
        size_t which = (size_t)(mt_philox_uniform(1, 1, i) * (trainable[u] ? 4 : 2));
        enum mt_plane_kind k = kinds[which];
        size_t size = which < 2 ? 2 : 4, first = (size_t)(mt_philox_uniform(1, 2, i) * (double)elems[u]);
        size_t n = MT_MIN((size_t)(mt_philox_uniform(1, 3, i) * 3000), elems[u] - first);
        for (size_t j = 0; j < n * size; j++)
            buf[j] = (char)(i * 7 + j);
        if (i % 3) {
            assert_int_equal(mt_planes_write(a.set, u, k, first, n, buf, NULL), 0);
            assert_int_equal(mt_planes_write(b.set, u, k, first, n, buf, NULL), 0);
        } else {
            assert_int_equal(mt_planes_read(a.set, u, k, first, n, buf, NULL), 0);
            assert_int_equal(mt_planes_read(b.set, u, k, first, n, got, NULL), 0);
            assert_memory_equal(buf, got, n * size);
        }
        if (i % 500 == 0)
            assert_int_equal(mt_planes_settle(b.set, NULL), 0);
    }
    close_set(&a);
    close_set(&b);
}

TEST(planes_with_sums_hold_the_same)
{
    sums = true;
    planes_on_disk_hold_what_planes_in_memory_hold(state);
    sums = false;
}

/* The drive has other data than was written last. */
TEST(what_a_drive_changed_is_not_read_as_a_plane)
{
    struct fixture f;
    struct mt_err err = {0};
    const mt_plane_bits all[UNITS] = {~0u, ~0u, ~0u};
    static uint16_t x[11111];
    uint64_t at;
    void *p = NULL;
    sums = true;
    open_set(&f, all, NULL);
    sums = false;
    assert_true(mt_plane_set_sum_bytes(&f.p) > 0);
    for (size_t i = 0; i < MT_ARRAY_LEN(x); i++)
        x[i] = (uint16_t)(i * 3);
    assert_int_equal(mt_planes_write(f.set, 2, MT_PLANE_LO, 0, 11111, x, &err), 0);
    assert_int_equal(mt_planes_settle(f.set, &err), 0);
    assert_true(mt_plane_on_disk(f.set, 2, MT_PLANE_LO, &at));
    assert_int_equal(posix_memalign(&p, MT_DISK_ALIGN, MT_DISK_ALIGN), 0);
    struct mt_disk_request r = {.n_spans = 1, .span = {{at + 8192, p, MT_DISK_ALIGN}}}; /* bypasses the sums */
    assert_int_equal(mt_disk_run(f.disk, &r, NULL), 0);
    ((char *)p)[77] ^= 4;
    r.write = true;
    assert_int_equal(mt_disk_run(f.disk, &r, NULL), 0);
    assert_int_equal(mt_planes_read(f.set, 2, MT_PLANE_LO, 0, 4096, x, &err), 0); /* another block */
    assert_int_equal(mt_planes_read(f.set, 2, MT_PLANE_LO, 4096, 1, x, &err), -EBADMSG);
    assert_non_null(strstr(err.msg, "unit 2's lo at offset"));
    ((char *)p)[77] ^= 4;
    assert_int_equal(mt_disk_run(f.disk, &r, NULL), 0);
    assert_int_equal(mt_planes_read(f.set, 2, MT_PLANE_LO, 4096, 1, x, &err), 0);
    /* nor is space that was never written and is not zero */
    assert_int_equal(mt_planes_read(f.set, 0, MADE_M, 0, 1, x, &err), 0);
    assert_int_equal(mt_planes_settle(f.set, &err), 0);
    assert_true(mt_plane_on_disk(f.set, 0, MADE_M, &at));
    r.span[0].offset = at;
    assert_int_equal(mt_disk_run(f.disk, &r, NULL), 0);
    assert_int_equal(mt_planes_read(f.set, 0, MADE_M, 0, 1, x, &err), -EBADMSG);
    free(p);
    close_set(&f);
}

TEST(settling_brings_all_to_the_disk_itself)
{
    struct fixture f;
    const mt_plane_bits masks[UNITS] = {0, 0, ~0u};
    uint16_t hi[4096], want[3000];
    uint64_t at;
    void *p = NULL;
    open_set(&f, masks, NULL);
    for (size_t i = 0; i < 3000; i++)
        want[i] = (uint16_t)(mt_philox_uniform(5, 5, i) * 65536);
    assert_int_equal(mt_planes_write(f.set, 2, MT_PLANE_HI, 0, 3000, want, NULL), 0);
    assert_int_equal(mt_planes_settle(f.set, NULL), 0);
    assert_true(mt_plane_on_disk(f.set, 2, MT_PLANE_HI, &at));
    assert_int_equal(posix_memalign(&p, MT_DISK_ALIGN, 8192), 0);
    struct mt_disk_request r = {.n_spans = 1, .span = {{at, p, 8192}}};
    assert_int_equal(mt_disk_run(f.disk, &r, NULL), 0);
    memcpy(hi, p, 8192);
    assert_memory_equal(hi, want, sizeof(want));
    /* and reads see what the disk has then, not an old window */
    memset(p, 0, 8192);
    r.write = true;
    assert_int_equal(mt_disk_run(f.disk, &r, NULL), 0);
    assert_int_equal(mt_planes_read(f.set, 2, MT_PLANE_HI, 0, 100, hi, NULL), 0);
    assert_int_equal(hi[7], 0);
    free(p);
    close_set(&f);
}

TEST(a_write_that_fails_is_told_when_it_happens)
{
    struct fixture f;
    struct mt_err err;
    const mt_plane_bits masks[UNITS] = {~0u, 0, 0};
    struct mt_io_fault fault = {MT_IO_FAULT_EIO, false, true, 1, 0};
    uint16_t x[4] = {1, 2, 3, 4};
    open_set(&f, masks, &fault);
    assert_int_equal(mt_planes_write(f.set, 0, MT_PLANE_HI, 0, 4, x, &err), 0); /* in the window */
    assert_int_equal(mt_planes_settle(f.set, &err), -EIO);
    assert_non_null(strstr(err.msg, root));
    assert_int_equal(mt_planes_settle(f.set, &err), 0); /* reported only once */
    close_set(&f);
}

TEST_GROUP(set_up, tear_down)
