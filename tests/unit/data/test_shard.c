/* SPDX-License-Identifier: Apache-2.0 */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/fs.h"
#include "base/mem.h"
#include "data/shard.h"
#include "test.h"

static char dir[64], path[128];

static int set_up(void **)
{
    snprintf(dir, sizeof(dir), "/tmp/mt-shard-XXXXXX");
    snprintf(path, sizeof(path), "%.63s/s.tokens", mkdtemp(dir) ? dir : "");
    return dir[0] ? 0 : -1;
}

static int tear_down(void **)
{
    return mt_remove_tree(dir, NULL);
}

/* Samples of 3, 1, 5, ... tokens; every third token is not trained. */
static void write_shard(size_t n)
{
    struct mt_shard_writer w;
    struct mt_shard_header h = {.vocab = 100, .source_hash = 7, .max_len = 9, .place_kind = MT_PLACE_LINE};
    snprintf(h.format, sizeof(h.format), "text");
    assert_int_equal(mt_shard_writer_open(&w, path, NULL), 0);
    for (size_t i = 0; i < n; i++) {
        uint32_t ids[9];
        uint8_t mask[9];
        size_t len = (i * 5 + 3) % 9 + 1;
        for (size_t k = 0; k < len; k++) {
            ids[k] = (uint32_t)(i + k) % 100;
            mask[k] = k % 3 != 0;
        }
        assert_int_equal(mt_shard_writer_append(&w, ids, mask, len / 2, NULL), 0); /* in two pieces */
        assert_int_equal(mt_shard_writer_append(&w, ids + len / 2, mask + len / 2, len - len / 2, NULL), 0);
        assert_int_equal(mt_shard_writer_end(&w, i + 1, NULL), 0);
    }
    assert_int_equal(mt_shard_writer_commit(&w, &h, NULL), 0);
    mt_shard_writer_finish(&w);
}

TEST_WITH(what_is_written_is_read, set_up, tear_down)
{
    static const size_t sizes[] = {1, 2, 3, 17, 1000};
    for (size_t v = 0; v < MT_ARRAY_LEN(sizes); v++) {
        struct mt_shard s;
        uint64_t trained = 0;
        write_shard(sizes[v]);
        assert_int_equal(mt_shard_open(&s, path, 7, NULL), 0);
        assert_int_equal(s.header->n_samples, sizes[v]);
        for (size_t i = 0; i < sizes[v]; i++) {
            size_t len = (i * 5 + 3) % 9 + 1;
            assert_int_equal(s.offsets[i + 1] - s.offsets[i], len);
            assert_int_equal(s.places[i], i + 1);
            for (size_t k = 0; k < len; k++) {
                uint64_t at = s.offsets[i] + k;
                assert_int_equal(s.tokens[at], (i + k) % 100);
                assert_int_equal(s.mask[at / 8] >> (at % 8) & 1, k % 3 != 0);
                trained += k % 3 != 0;
            }
        }
        assert_int_equal(mt_shard_count_trained(&s, 0, s.header->n_tokens), trained);
        mt_shard_close(&s);
        assert_int_equal(mt_shard_open(&s, path, 8, NULL), -EINVAL); /* of other sources */
    }
}

TEST_WITH(counts_of_any_stretch_are_right, set_up, tear_down)
{
    struct mt_shard s;
    write_shard(40);
    assert_int_equal(mt_shard_open(&s, path, 0, NULL), 0);
    uint64_t n = s.header->n_tokens;
    for (uint64_t first = 0; first <= n; first += 3)
        for (uint64_t len = 0; first + len <= n; len += 5) {
            uint64_t sum = 0;
            for (uint64_t k = first; k < first + len; k++)
                sum += s.mask[k / 8] >> (k % 8) & 1;
            assert_int_equal(mt_shard_count_trained(&s, first, len), sum);
        }
    mt_shard_close(&s);
}

/* Overwrites 8 bytes of the file; the shard must then be refused with the word. */
static void refuse(size_t at, uint64_t value, const char *word)
{
    struct mt_shard s;
    struct mt_err err = {0};
    char *text = NULL;
    size_t len = 0;
    assert_int_equal(mt_read_file(path, &text, &len, NULL), 0);
    assert_true(at + 8 <= len);
    memcpy(text + at, &value, 8);
    assert_int_equal(mt_write_file(path, text, len, NULL), 0);
    free(text);
    if (!mt_shard_open(&s, path, 0, &err))
        fail_msg("%zu = %llu was accepted", at, (unsigned long long)value);
    assert_int_equal(err.kind, MT_ERR_INPUT);
    assert_null(s.map);
    if (!strstr(err.msg, word) || !strstr(err.msg, path))
        fail_msg("\"%s\" does not say \"%s\"", err.msg, word);
    write_shard(3);
}

TEST_WITH(headers_that_lie_are_refused, set_up, tear_down)
{
    write_shard(3); /* of 4, 9 and 5 tokens */
    size_t offsets = MT_SHARD_HEADER_BYTES + 18 * 4 + 8;
#define FIELD(f) offsetof(struct mt_shard_header, f)
    refuse(0, 0, "format or version");
    refuse(FIELD(version), 1, "format or version");
    refuse(FIELD(n_tokens), 15, "size");
    refuse(FIELD(n_tokens), UINT64_MAX, "overflow");
    refuse(FIELD(n_tokens), UINT64_MAX / 4, "size");
    refuse(FIELD(n_samples), 4, "size");
    refuse(FIELD(n_samples), UINT64_MAX, "overflow");
    refuse(FIELD(n_samples), UINT64_MAX / 8, "overflow");
    refuse(FIELD(max_len), 8, "longer than its header says"); /* rows are sized by it */
    refuse(offsets + 16, 3, "backwards");
    refuse(offsets + 8, UINT64_MAX, "longer");
    refuse(offsets, 1, "cover");
    refuse(offsets + 3 * 8, 17, "cover");
}

TEST_WITH(files_cut_short_are_refused, set_up, tear_down)
{
    struct mt_shard s;
    struct mt_err err = {0};
    write_shard(3);
    for (off_t n = 4300; n >= 0; n -= n > 4096 ? 1 : 512) {
        assert_int_equal(truncate(path, n), 0);
        int rc = mt_shard_open(&s, path, 0, &err);
        if (!rc)
            mt_shard_close(&s);
        assert_true(rc || n == MT_SHARD_HEADER_BYTES + 18 * 4 + 8 + 4 * 8 + 3 * 8);
        write_shard(3);
    }
    assert_int_equal(mt_shard_open(&s, "/no/such.tokens", 0, &err), -ENOENT);
}

TEST_WITH(what_is_not_committed_leaves_no_file, set_up, tear_down)
{
    struct mt_shard_writer w;
    assert_int_equal(mt_shard_writer_open(&w, path, NULL), 0);
    assert_true(mt_path_exists(w.tmp));
    char tmp[4096];
    memcpy(tmp, w.tmp, sizeof(tmp));
    mt_shard_writer_finish(&w);
    assert_false(mt_path_exists(path) || mt_path_exists(tmp));
    assert_int_equal(mt_shard_writer_open(&w, "/no/such/folder/x", NULL), -ENOENT);
    mt_shard_writer_finish(&w);
}

static void flip(off_t at)
{
    char c = 0;
    int fd = open(path, O_RDWR);
    assert_true(fd >= 0 && pread(fd, &c, 1, at) == 1);
    c ^= 8;
    assert_int_equal(pwrite(fd, &c, 1, at), 1);
    close(fd);
}

/* Samples are read many times: what has changed since the shard was verified is found when it is read. */
TEST_WITH(what_changes_after_the_check_is_found, set_up, tear_down)
{
    enum { N = 20000 };
    static uint32_t ids[N * 9], again[N * 9];
    static uint8_t mask[N * 9], bits[N * 9];
    struct mt_shard s;
    write_shard(N);
    assert_int_equal(mt_shard_seal(path, NULL), 0);
    assert_int_equal(mt_shard_open(&s, path, 7, NULL), 0);
    size_t n = s.header->n_tokens;
    assert_int_equal(mt_shard_read(&s, 0, n, ids, mask, NULL), 0);
    assert_int_equal(mt_shard_verify(&s, path, NULL), 0);
    for (size_t at = 0, part; at < n; at += part) { /* in uneven parts, over the ends of blocks */
        part = at + 7777 < n ? 7777 : n - at;
        assert_int_equal(mt_shard_read(&s, at, part, again + at, bits + at, NULL), 0);
    }
    assert_memory_equal(ids, again, n * sizeof(*ids));
    assert_memory_equal(mask, bits, n);
    const off_t places[] = {MT_SHARD_HEADER_BYTES, MT_SHARD_HEADER_BYTES + (off_t)n * 4 - 1,
                            MT_SHARD_HEADER_BYTES + (off_t)n * 4 + 100};
    for (size_t i = 0; i < MT_ARRAY_LEN(places); i++) {
        struct mt_err err = {0};
        flip(places[i]);
        assert_int_equal(mt_shard_read(&s, 0, n, again, bits, &err), -EBADMSG);
        assert_non_null(strstr(err.msg, "changed"));
        flip(places[i]);
        assert_int_equal(mt_shard_read(&s, 0, n, again, bits, NULL), 0);
    }
    mt_shard_close(&s);
    flip(offsetof(struct mt_shard_header, n_untrained)); /* the header has a sum as well */
    assert_int_equal(mt_shard_open(&s, path, 7, NULL), 0);
    assert_int_equal(mt_shard_verify(&s, path, NULL), -EBADMSG);
    mt_shard_close(&s);
}
