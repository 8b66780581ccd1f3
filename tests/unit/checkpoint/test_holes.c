/* SPDX-License-Identifier: Apache-2.0 */
/* Zeros become holes, and nobody who reads the file can tell. */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/fs.h"
#include "base/mem.h"
#include "base/philox.h"
#include "checkpoint/manifest.h"
#include "checkpoint/vfs.h"
#include "test.h"

enum { BLOCK = 64 << 10, BYTES = 40 * BLOCK + 777 };

struct counted {
    size_t written, skipped;
};

static int count_write(void *ctx, int fd, const void *data, size_t len)
{
    ((struct counted *)ctx)->written += len;
    return mt_vfs_posix.write(NULL, fd, data, len);
}

static int count_hole(void *ctx, int fd, size_t len)
{
    ((struct counted *)ctx)->skipped += len;
    return mt_vfs_posix.hole(NULL, fd, len);
}

/* Writes `data` in calls of up to `most` bytes and compares what is in the file with it. */
static struct counted write_and_compare(const char *data, size_t len, size_t most)
{
    char path[] = "/tmp/mt-holes-XXXXXX", *got = NULL;
    struct counted c = {0, 0};
    struct mt_vfs vfs = mt_vfs_posix;
    struct mt_out_file f;
    size_t n = 0;
    uint64_t sum, size;
    close(mkstemp(path));
    unlink(path);
    vfs.ctx = &c;
    vfs.write = count_write;
    vfs.hole = count_hole;
    assert_int_equal(mt_out_open(&f, &vfs, path, NULL), 0);
    for (size_t at = 0, k = 0; at < len; at += n, k++) {
        n = 1 + mt_philox(7, most, k).v[0] % most;
        n = n < len - at ? n : len - at;
        assert_int_equal(mt_out_write(&f, data + at, n, NULL), 0);
    }
    assert_int_equal(mt_out_commit(&f, NULL), 0);
    assert_int_equal(mt_read_file(path, &got, &n, NULL), 0);
    assert_int_equal(n, len);
    assert_memory_equal(got, data, len);
    assert_int_equal(mt_sum_file(path, 0, UINT64_MAX, &sum, &size, NULL), 0);
    assert_true(sum == f.sum && size == len && f.bytes == len);
    assert_int_equal(c.written + c.skipped, len);
    free(got);
    unlink(path);
    return c;
}

TEST(holes_read_as_the_zeros_they_stand_for)
{
    MT_FREED char *data = calloc(BYTES, 1);
    /* single bytes that are not zero, at borders of blocks and beside them */
    const size_t at[] = {0, 3 * BLOCK - 1, 5 * BLOCK, 7 * BLOCK + 1, 20 * BLOCK + 5000};
    for (size_t i = 0; i < sizeof(at) / sizeof(at[0]); i++)
        data[at[i]] = 1;
    struct counted c = write_and_compare(data, BYTES, 10 * BLOCK);
    assert_true(c.skipped > 20 * BLOCK);
    write_and_compare(data, BYTES, 3 * BLOCK + 1);
    c = write_and_compare(data, BYTES, 1000); /* no call holds a whole block */
    assert_int_equal(c.skipped, 0);
}

TEST(a_file_may_end_in_a_hole_or_be_one)
{
    MT_FREED char *data = calloc(BYTES, 1);
    assert_int_equal(write_and_compare(data, 8 * BLOCK, BYTES).written % BLOCK, 0);
    data[0] = 1;
    write_and_compare(data, 8 * BLOCK, BYTES);
}

TEST(what_is_not_zero_is_written)
{
    MT_FREED char *data = malloc(BYTES);
    memset(data, 1, BYTES);
    assert_int_equal(write_and_compare(data, BYTES, 4 * BLOCK).skipped, 0);
}
