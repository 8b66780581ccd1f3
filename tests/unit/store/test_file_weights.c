/* SPDX-License-Identifier: Apache-2.0 */
/* Frozen weights that are read in place, from files that share nothing with them but the bytes. */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/fs.h"
#include "base/mem.h"
#include "store/files/file_weights.h"
#include "store/io/waiter.h"
#include "test.h"

enum { FILES = 3, UNITS = 4, PARTS = 3 };
#define K MT_PLANE_IN_FILE

struct fixture {
    char dir[64], path[FILES][128];
    struct mt_file_part part[UNITS * PARTS];
    struct mt_file_piece piece[UNITS * PARTS];
    size_t plane_bytes[UNITS];
    mt_file_weights *f;
};

static char byte_of(size_t part, size_t i)
{
    return (char)(i * 131 + i / 4096 * 7 + part * 29 + 1);
}

/* Parts of odd sizes at odd offsets, a unit's in several files, with a gap between them in the plane. */
static void set_up_with(struct fixture *x, struct mt_file_weights_params params)
{
    size_t end[FILES] = {0};
    const char *paths[FILES];
    int fd[FILES];
    memset(x, 0, sizeof(*x));
    snprintf(x->dir, sizeof(x->dir), "/tmp/mt-test-XXXXXX");
    assert_non_null(mkdtemp(x->dir));
    for (int i = 0; i < FILES; i++) {
        snprintf(x->path[i], sizeof(x->path[i]), "%s/model-%d.safetensors", x->dir, i);
        paths[i] = x->path[i];
        fd[i] = open(x->path[i], O_CREAT | O_RDWR, 0600);
        assert_true(fd[i] >= 0);
        end[i] = 9 + 100 * (size_t)i;
    }
    for (size_t p = 0; p < UNITS * PARTS; p++) {
        struct mt_file_piece *t = &x->piece[p];
        int file = (int)(p * 7 % FILES);
        size_t unit = p / PARTS;
        x->part[p] = (struct mt_file_part){.unit = unit, .plane = K, .piece = t, .n_pieces = 1, .n_lanes = 1, .n_tensors = 1,
                                           .tensor = {"t"}, .name = "t"};
        *t = (struct mt_file_piece){.file = file, .offset = end[file]};
        t->bytes = p % 5 == 0 ? 10 : MT_SUM_BLOCK * (p % 3) + 77777 * p + 2;
        t->at[0] = x->plane_bytes[unit];
        x->plane_bytes[unit] += t->bytes + 128;
        char *data = malloc(t->bytes);
        assert_non_null(data);
        for (size_t i = 0; i < t->bytes; i++)
            data[i] = byte_of(p, i);
        assert_int_equal(pwrite(fd[file], data, t->bytes, (off_t)end[file]), (ssize_t)t->bytes);
        free(data);
        end[file] += t->bytes + 1;
    }
    for (int i = 0; i < FILES; i++) {
        fsync(fd[i]);
        close(fd[i]);
    }
    params.n_units = UNITS;
    params.paths = paths;
    params.n_paths = FILES;
    params.parts = x->part;
    params.n_parts = UNITS * PARTS;
    MUST(mt_file_weights_open, &x->f, &params);
}

static void set_up(struct fixture *x, bool buffered, unsigned depth)
{
    set_up_with(x, (struct mt_file_weights_params){.buffered = buffered, .depth = depth});
}

static void tear_down(struct fixture *x)
{
    mt_file_weights_close(&x->f);
    mt_remove_tree(x->dir, NULL);
}

static void done(struct mt_file_request *r)
{
    mt_waiter_end(r->ctx);
}

/* Reads all units at once. Returns the first request that failed, or the first if none did. */
static struct mt_file_request read_all(struct fixture *x, char *plane[UNITS])
{
    struct mt_file_request r[UNITS];
    struct mt_waiter w = mt_waiter_for(UNITS);
    memset(r, 0, sizeof(r));
    for (size_t u = 0; u < UNITS; u++) {
        r[u] = (struct mt_file_request){.unit = u, .done = done, .ctx = &w};
        r[u].plane[K] = plane[u];
        mt_file_weights_submit(x->f, &r[u]);
    }
    mt_waiter_wait(&w);
    for (size_t u = 0; u < UNITS; u++)
        if (r[u].rc)
            return r[u];
    return r[0];
}

static void alloc_planes(const struct fixture *x, char *plane[UNITS])
{
    for (size_t u = 0; u < UNITS; u++)
        assert_non_null(plane[u] = calloc(1, x->plane_bytes[u]));
}

static void free_planes(char *plane[UNITS])
{
    for (size_t u = 0; u < UNITS; u++)
        free(plane[u]);
}

static void check_planes(const struct fixture *x, char *plane[UNITS])
{
    for (size_t p = 0; p < UNITS * PARTS; p++) {
        const struct mt_file_piece *t = &x->piece[p];
        const char *at = plane[x->part[p].unit] + t->at[0];
        for (size_t i = 0; i < t->bytes; i++)
            if (at[i] != byte_of(p, i))
                fail_msg("byte %zu of part %zu", i, p);
        for (size_t i = 0; i < 128; i++) /* gaps between parts are not written */
            assert_int_equal(at[t->bytes + i], 0);
    }
}

TEST(every_byte_comes_to_its_place_in_every_pass)
{
    for (int v = 0; v < 4; v++) {
        struct fixture x;
        char *plane[UNITS];
        set_up(&x, v & 1, v & 2 ? 1 : 0);
        for (int pass = 0; pass < 3; pass++) {
            alloc_planes(&x, plane);
            struct mt_file_request r = read_all(&x, plane);
            if (r.rc)
                fail_msg("%s", r.err.msg);
            check_planes(&x, plane);
            free_planes(plane);
        }
        struct mt_file_weights_stats s;
        mt_file_weights_stats(x.f, &s);
        uint64_t all = 0;
        for (size_t p = 0; p < UNITS * PARTS; p++)
            all += x.piece[p].bytes;
        assert_true(s.bytes == 3 * all && s.busy_ns > 0);
        tear_down(&x);
    }
}

TEST(any_run_of_bytes_can_be_read)
{
    struct fixture x;
    char *plane[UNITS], got[5000];
    set_up(&x, false, 0);
    alloc_planes(&x, plane);
    assert_int_equal(read_all(&x, plane).rc, 0);
    for (size_t i = 0; i < 60; i++) {
        size_t u = i % UNITS, first = i * 977777 % (x.plane_bytes[u] - sizeof(got));
        assert_int_equal(mt_file_weights_read(x.f, u, K, first, sizeof(got), got, NULL), 0);
        assert_memory_equal(got, plane[u] + first, sizeof(got));
    }
    free_planes(plane);
    tear_down(&x);
}

static void turn_bit(const struct fixture *x, size_t part, size_t i)
{
    const struct mt_file_piece *t = &x->piece[part];
    char c = (char)(byte_of(part, i) ^ 16);
    int fd = open(x->path[t->file], O_WRONLY);
    assert_true(fd >= 0);
    assert_int_equal(pwrite(fd, &c, 1, (off_t)(t->offset + i)), 1);
    fsync(fd);
    close(fd);
}

TEST(a_block_that_has_changed_is_named)
{
    struct fixture x;
    char *plane[UNITS];
    set_up(&x, false, 0);
    alloc_planes(&x, plane);
    assert_int_equal(read_all(&x, plane).rc, 0);
    turn_bit(&x, 7, x.piece[7].bytes - 1);
    struct mt_file_request r = read_all(&x, plane);
    assert_int_equal(r.rc, -EBADMSG);
    assert_non_null(strstr(r.err.msg, x.path[x.piece[7].file]));
    assert_non_null(strstr(r.err.msg, "\"t\""));
    free_planes(plane);
    tear_down(&x);
}

TEST(faults_of_a_drive_are_survived_if_that_is_possible)
{
    static const struct {
        const char *fault;
        int rc;
        const char *words;
    } cases[] = {{"read:short:1:0", 0, ""},          {"read:short:5:7", 0, ""},        {"read:eintr:1:40", 0, ""},
                 {"read:eagain:3:9", 0, ""},         {"read:delay:1:20", 0, ""},       {"read:reorder:1:0", 0, ""},
                 {"read:eio:8:3", 0, ""},
                 {"read:eio:8:56", -EIO, "cannot read"}, {"read:zero:3", -ENODATA, "shorter"}};
    for (size_t i = 0; i < MT_ARRAY_LEN(cases); i++) {
        struct fixture x;
        struct mt_io_fault fault;
        char *plane[UNITS];
        assert_int_equal(mt_io_fault_parse(&fault, cases[i].fault, NULL), 0);
        set_up_with(&x, (struct mt_file_weights_params){.fault = &fault, .io = i & 1 ? MT_IO_THREADS : MT_IO_AUTO,
                                                        .buffered = i == 1, .deadline_s = 5});
        alloc_planes(&x, plane);
        struct mt_file_request r = read_all(&x, plane);
        if (r.rc != cases[i].rc || (r.rc && (!strstr(r.err.msg, cases[i].words) || !strstr(r.err.msg, x.dir))))
            fail_msg("%s: %d, %s", cases[i].fault, r.rc, r.err.msg);
        for (int n = 0; r.rc && n < 64; n++) /* requests are read again, once its faults are over */
            r = read_all(&x, plane);
        assert_int_equal(r.rc, 0);
        check_planes(&x, plane);
        free_planes(plane);
        tear_down(&x);
    }
}

/* A drive that does not answer, a backend that fails: all requests end, later ones too. */
TEST(what_never_ends_is_given_up)
{
    static const struct {
        const char *fault;
        enum mt_io_kind io;
        int rc;
    } cases[] = {{"read:hang:4", MT_IO_AUTO, -ETIMEDOUT}, {"read:wait:3", MT_IO_AUTO, -EIO}, {"read:wait:1", MT_IO_THREADS, -EIO},
                 {"read:submit:9", MT_IO_THREADS, -EIO}};
    static char *kept[MT_ARRAY_LEN(cases)][UNITS]; /* never freed, like the memory of lost reads */
    for (size_t i = 0; i < MT_ARRAY_LEN(cases); i++) {
        struct fixture x;
        struct mt_io_fault fault;
        char byte;
        struct mt_err err = {0};
        assert_int_equal(mt_io_fault_parse(&fault, cases[i].fault, NULL), 0);
        set_up_with(&x, (struct mt_file_weights_params){.fault = &fault, .io = cases[i].io, .deadline_s = 0.3});
        alloc_planes(&x, kept[i]);
        struct mt_file_request r = read_all(&x, kept[i]);
        if (r.rc != cases[i].rc || !strstr(r.err.msg, x.dir))
            fail_msg("%s: %d, %s", cases[i].fault, r.rc, r.err.msg);
        assert_int_equal(mt_file_weights_read(x.f, 0, K, 0, 1, &byte, &err), cases[i].rc);
        assert_non_null(strstr(err.msg, "given up"));
        tear_down(&x);
    }
}

/* Drives may return wrong data and no error. */
TEST(wrong_data_are_found_when_a_block_is_read_again)
{
    static const struct {
        const char *fault; /* a pass has 21 reads */
        bool lasts;        /* also when the block is read once more */
    } cases[] = {{"read:flip:33", false}, {"read:swap:33", false}, {"read:flip:33:0", true}};
    for (size_t i = 0; i < MT_ARRAY_LEN(cases); i++) {
        struct fixture x;
        struct mt_io_fault fault;
        struct mt_file_weights_stats stats;
        char *plane[UNITS];
        assert_int_equal(mt_io_fault_parse(&fault, cases[i].fault, NULL), 0);
        set_up_with(&x, (struct mt_file_weights_params){.fault = &fault});
        alloc_planes(&x, plane);
        assert_int_equal(read_all(&x, plane).rc, 0);
        struct mt_file_request r = read_all(&x, plane);
        mt_file_weights_stats(x.f, &stats);
        if (r.rc != (cases[i].lasts ? -EBADMSG : 0) || (r.rc && !strstr(r.err.msg, "has changed")) || !stats.n_reread)
            fail_msg("%s: %d, %s", cases[i].fault, r.rc, r.err.msg);
        if (!cases[i].lasts)
            check_planes(&x, plane);
        free_planes(plane);
        tear_down(&x);
    }
}

/* Two tensors whose rows alternate are one part: either is looked at. */
TEST(a_change_in_either_of_two_tensors_is_found)
{
    enum { ROW = 64, ROWS = 8, OFFSET = 3 };
    for (int lane = 0; lane < 2; lane++) {
        char path[] = "/tmp/mt-test-XXXXXX", data[OFFSET + 2 * ROWS * ROW], got[2 * ROWS * ROW];
        const char *paths[] = {path};
        struct mt_file_piece piece = {.offset = OFFSET, .bytes = ROWS * ROW, .row = ROW, .at = {0, ROWS * ROW}};
        struct mt_file_part part = {.plane = K, .piece = &piece, .n_pieces = 1, .n_lanes = 2, .n_tensors = 2,
                                    .tensor = {"a", "b"}, .name = "a"};
        mt_file_weights *f = NULL;
        int fd = mkstemp(path);
        for (size_t i = 0; i < sizeof(data); i++)
            data[i] = byte_of(0, i);
        assert_int_equal(pwrite(fd, data, sizeof(data), 0), sizeof(data));
        assert_int_equal(mt_file_weights_open(&f, &(struct mt_file_weights_params){.n_units = 1, .paths = paths, .n_paths = 1,
                                                                                   .parts = &part, .n_parts = 1}, NULL), 0);
        assert_int_equal(mt_file_weights_read(f, 0, K, 0, sizeof(got), got, NULL), 0);
        for (size_t i = 0; i < sizeof(got); i++)
            assert_int_equal(got[i], data[OFFSET + i % (ROWS * ROW) / ROW * 2 * ROW + i / (ROWS * ROW) * ROW + i % ROW]);
        data[0] = (char)(data[OFFSET + (2 * 3 + lane) * ROW + 5] ^ 4);
        assert_int_equal(pwrite(fd, data, 1, OFFSET + (2 * 3 + lane) * ROW + 5), 1);
        fsync(fd);
        assert_int_equal(mt_file_weights_read(f, 0, K, 0, sizeof(got), got, NULL), -EBADMSG);
        mt_file_weights_close(&f);
        close(fd);
        unlink(path);
    }
}

TEST(a_file_that_has_become_shorter_ends_the_request)
{
    for (int buffered = 0; buffered < 2; buffered++) {
        struct fixture x;
        char *plane[UNITS];
        set_up(&x, buffered, 0);
        alloc_planes(&x, plane);
        const struct mt_file_piece *last = &x.piece[UNITS * PARTS - 1];
        assert_int_equal(truncate(x.path[last->file], (off_t)(last->offset + last->bytes / 2)), 0);
        struct mt_file_request r = read_all(&x, plane);
        assert_int_equal(r.rc, -ENODATA);
        assert_non_null(strstr(r.err.msg, "shorter"));
        free_planes(plane);
        tear_down(&x);
    }
}

TEST(another_tensor_than_was_named_is_refused)
{
    struct fixture x, y;
    char *plane[UNITS];
    uint64_t sum, other;
    set_up(&x, false, 0);
    alloc_planes(&x, plane);
    for (size_t p = 0; p < UNITS * PARTS; p++) {
        struct mt_summer want;
        char *data = malloc(x.piece[p].bytes);
        for (size_t i = 0; i < x.piece[p].bytes; i++)
            data[i] = byte_of(p, i);
        assert_int_equal(mt_summer_init(&want, NULL), 0);
        mt_summer_begin(&want);
        for (size_t i = 0, n; i < x.piece[p].bytes; i += n) {
            n = MT_MIN(x.piece[p].bytes - i, (size_t)300001);
            mt_summer_add(&want, data + i, n);
        }
        assert_int_equal(mt_file_weights_sum(x.f, p, &sum, NULL), 0); /* without an earlier read */
        assert_true(sum == mt_summer_end(&want));
        mt_file_weights_expect(x.f, p, sum);
        mt_summer_finish(&want);
        free(data);
    }
    assert_int_equal(read_all(&x, plane).rc, 0);
    tear_down(&x);
    set_up(&y, false, 0);
    assert_int_equal(mt_file_weights_sum(y.f, 4, &sum, NULL), 0);
    tear_down(&y);
    set_up(&y, false, 0);
    turn_bit(&y, 4, 0); /* before the first read */
    mt_file_weights_expect(y.f, 4, sum);
    struct mt_file_request r = read_all(&y, plane);
    assert_int_equal(r.rc, -EBADMSG);
    assert_non_null(strstr(r.err.msg, "checkpoint"));
    assert_int_equal(mt_file_weights_sum(y.f, 4, &other, NULL), 0);
    assert_true(other != sum);
    free_planes(plane);
    tear_down(&y);
}
