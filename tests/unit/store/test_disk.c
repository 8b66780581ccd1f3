/* SPDX-License-Identifier: Apache-2.0 */
/* The disk on every backend, striped or not, direct and buffered, with injected faults. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/fs.h"
#include "base/mem.h"
#include "base/philox.h"
#include "hw/probe.h"
#include "store/disk.h"
#include "store/io/io.h"
#include "test.h"

enum { BYTES = 5 << 20, CHUNK = 64 << 10 };

static char root[64];
static char dir_names[3][96];
static const char *dirs[3];

static int set_up(void **)
{
    snprintf(root, sizeof(root), "/tmp/mt-disk-XXXXXX");
    if (!mkdtemp(root))
        return -1;
    for (int i = 0; i < 3; i++) {
        snprintf(dir_names[i], sizeof(dir_names[i]), "%s/d%d", root, i);
        dirs[i] = dir_names[i];
        if (mkdir(dirs[i], 0700))
            return -1;
    }
    return 0;
}

static int tear_down(void **)
{
    return mt_remove_tree(root, NULL);
}

static int files_in(const char *dir)
{
    DIR *d = opendir(dir);
    int n = 0;
    for (struct dirent *e; (e = readdir(d));)
        n += e->d_name[0] != '.';
    closedir(d);
    return n;
}

static char *aligned(size_t bytes)
{
    void *p = NULL;
    assert_int_equal(posix_memalign(&p, MT_DISK_ALIGN, bytes), 0);
    return p;
}

static void fill(char *p, size_t bytes, uint64_t seed)
{
    for (size_t i = 0; i + 16 <= bytes; i += 16) {
        struct mt_philox x = mt_philox(seed, 3, i);
        memcpy(p + i, x.v, 16);
    }
}

static struct mt_disk_params params(size_t n_dirs, enum mt_io_kind io)
{
    static const double rates[] = {3, 1, 2};
    return (struct mt_disk_params){.dirs = dirs, .n_dirs = n_dirs, .bytes = BYTES, .chunk_bytes = CHUNK,
                                   .request_bytes = 96 << 10, .depth = 8, .rates = rates, .io = io};
}

static int transfer(mt_disk *d, bool write, uint64_t offset, void *buf, size_t bytes, struct mt_err *err)
{
    struct mt_disk_request r = {.write = write, .n_spans = 1, .span = {{offset, buf, bytes}}};
    return mt_disk_run(d, &r, err);
}

/* Writes everything in pieces of odd sizes, and reads it in others. */
static void round_trip(const struct mt_disk_params *p)
{
    mt_disk *d = NULL;
    struct mt_err err;
    char *a = aligned(BYTES), *b = aligned(BYTES);
    MUST(mt_disk_open, &d, p);
    fill(a, BYTES, 7);
    memset(b, 0x55, BYTES);
    assert_int_equal(transfer(d, false, 4096, b, 3 * MT_DISK_ALIGN, &err), 0);
    for (int i = 0; i < 3 * MT_DISK_ALIGN; i++)
        assert_int_equal(b[i], 0); /* new space holds zeros */
    for (size_t at = 0, n = MT_DISK_ALIGN; at < BYTES; at += n, n = n * 3 / 2 / 4096 * 4096 + 4096) {
        n = MT_MIN(n, BYTES - at);
        MUST(transfer, d, true, at, a + at, n);
    }
    struct mt_disk_request r = {.n_spans = 4,
                                .span = {{0, b, 1 << 20},
                                         {0, b, 0},
                                         {3 << 20, b + (3 << 20), 2 << 20},
                                         {1 << 20, b + (1 << 20), 2 << 20}}};
    MUST(mt_disk_run, d, &r);
    assert_memory_equal(a, b, BYTES);
    struct mt_disk_stats s;
    mt_disk_stats(d, &s);
    assert_true(s.bytes[1] >= BYTES && s.bytes[0] >= BYTES);
    assert_true(s.busy_ns[0] > 0 && s.busy_ns[1] > 0);
    mt_disk_close(&d);
    for (size_t i = 0; i < p->n_dirs; i++)
        assert_int_equal(files_in(dirs[i]), 0);
    free(a);
    free(b);
}

TEST(what_is_read_is_what_was_written)
{
    for (size_t n = 1; n <= 3; n++)
        for (int io = MT_IO_AUTO; io <= MT_IO_THREADS; io++) {
            struct mt_disk_params p = params(n, (enum mt_io_kind)io);
            if (io == MT_IO_URING && !mt_hw_io_uring_allowed())
                continue;
            round_trip(&p);
            p.buffered = true;
            round_trip(&p);
        }
    struct mt_disk_params p = params(2, MT_IO_AUTO);
    p.rates = NULL; /* measured */
    round_trip(&p);
}

TEST(registered_buffers_are_used)
{
    mt_disk *d = NULL;
    struct mt_disk_info info;
    struct mt_disk_params p = params(1, MT_IO_AUTO);
    char *a = aligned(1 << 20), *b = aligned(1 << 20);
    assert_int_equal(mt_disk_open(&d, &p, NULL), 0);
    struct iovec iov[] = {{a, 1 << 20}, {b, 1 << 20}};
    for (int round = 0; round < 2; round++) { /* registering again replaces */
        mt_disk_set_buffers(d, iov, 2);
        mt_disk_info(d, &info);
        fill(a, 1 << 20, (uint64_t)round);
        assert_int_equal(transfer(d, true, 0, a, 1 << 20, NULL), 0);
        assert_int_equal(transfer(d, false, 0, b, 1 << 20, NULL), 0);
        assert_memory_equal(a, b, 1 << 20);
    }
    mt_disk_set_buffers(d, NULL, 0);
    assert_int_equal(transfer(d, false, 0, a, 1 << 20, NULL), 0);
    mt_disk_close(&d);
    free(a);
    free(b);
}

/* Many requests at once, in both directions. */
enum { MANY = 200, PART = 24 << 10 };
static void note_done(struct mt_disk_request *r)
{
    __atomic_add_fetch((int *)r->ctx, 1, __ATOMIC_RELEASE);
}

/* The kernel has 32 bits for a request's bytes: a larger one must end short, not with none. */
TEST(a_request_of_4_gib_is_not_one_of_none)
{
    const size_t bytes = (size_t)4 << 30;
    const char *path = MT_PATH("%s/short", root);
    MUST(mt_write_file, path, root, sizeof(root));
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    void *buf = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    assert_true(fd >= 0 && buf != MAP_FAILED);
    for (enum mt_io_kind kind = MT_IO_URING; kind <= MT_IO_THREADS; kind++) {
        mt_io *io = NULL;
        struct mt_io_result r = {.res = -1};
        const struct mt_io_op op = {.buf = buf, .bytes = bytes, .tag = buf};
        if (kind == MT_IO_URING && !mt_hw_io_uring_allowed())
            continue;
        MUST(mt_io_create, &io, kind, 1, NULL);
        MUST(io->backend->set_files, io, &fd, 1);
        assert_int_equal(io->backend->submit(io, &op, 1), 0);
        while (!io->backend->wait(io, &r, 1))
            ;
        assert_int_equal(r.res, sizeof(root));
        mt_io_destroy(&io);
    }
    munmap(buf, bytes);
    close(fd);
    unlink(path);
}

TEST(many_requests_at_once_all_end)
{
    for (int io = MT_IO_AUTO; io <= MT_IO_THREADS; io += MT_IO_THREADS) {
        mt_disk *d = NULL;
        struct mt_disk_params p = params(2, (enum mt_io_kind)io);
        static struct mt_disk_request r[MANY];
        int ended = 0;
        char *a = aligned(MANY * (size_t)PART), *b = aligned(MANY * (size_t)PART);
        fill(a, MANY * (size_t)PART, 5);
        assert_int_equal(mt_disk_open(&d, &p, NULL), 0);
        for (int write = 1; write >= 0; write--) {
            ended = 0;
            for (size_t i = 0; i < MANY; i++) {
                r[i] = (struct mt_disk_request){.write = write, .n_spans = 1, .done = note_done,
                                                .ctx = &ended,
                                                .span = {{i * PART, (write ? a : b) + i * PART, PART}}};
                mt_disk_submit(d, &r[i]);
            }
            while (__atomic_load_n(&ended, __ATOMIC_ACQUIRE) < MANY)
                usleep(100);
            for (size_t i = 0; i < MANY; i++)
                assert_int_equal(r[i].rc, 0);
        }
        mt_disk_close(&d);
        assert_memory_equal(a, b, MANY * (size_t)PART);
        free(a);
        free(b);
    }
}

TEST(survivable_faults_are_survived)
{
    static const char *const faults[] = {"any:short:1:0",   "write:short:3:20", "read:short:2:9",
                                         "any:eintr:1:50",  "any:eagain:2:30",  "any:delay:1:40",
                                         "any:reorder:1:0", "read:reorder:1:0", "write:eio:4",
                                         "read:eio:9:3",    "any:eio:1:3"};
    for (size_t i = 0; i < MT_ARRAY_LEN(faults); i++)
        for (int io = MT_IO_AUTO; io <= MT_IO_THREADS; io += MT_IO_THREADS) {
            struct mt_io_fault f;
            struct mt_disk_params p = params(2, (enum mt_io_kind)io);
            assert_int_equal(mt_io_fault_parse(&f, faults[i], NULL), 0);
            p.fault = &f;
            round_trip(&p);
        }
}

/* Written whole with sums, over what was there; read whole. */
static int deceive(const char *fault, bool sums, const char *a, char *b, struct mt_disk_stats *stats, struct mt_err *err)
{
    enum { PIECE = 320 << 10 };
    struct mt_io_fault f;
    struct mt_disk_params p = params(2, MT_IO_AUTO);
    mt_disk *d = NULL;
    p.fault = &f;
    if (mt_io_fault_parse(&f, fault, err) || mt_disk_open(&d, &p, err))
        fail_msg("%s", err->msg);
    struct mt_disk_sums area = {.offset = 12288, .bytes = 3 << 20, .piece = PIECE, .block = mt_disk_block(d), .what = "things"};
    area.sum = mt_calloc(mt_disk_sums_n(area.bytes, area.piece, area.block), sizeof(*area.sum));
    int rc = 0;
    for (int round = 0; round < 2 && !rc; round++)
        for (size_t at = 0; at < area.bytes && !rc; at += PIECE) { /* in pieces, like the engine */
            struct mt_disk_request w = {.write = true, .n_spans = 1,
                                        .span = {{area.offset + at, (char *)a + at + (size_t)round * MT_DISK_ALIGN,
                                                  MT_MIN((size_t)PIECE, area.bytes - at), sums ? &area : NULL}}};
            rc = mt_disk_run(d, &w, err);
        }
    struct mt_disk_request r = {.n_spans = 1, .span = {{area.offset, b, area.bytes, sums ? &area : NULL}}};
    if (!rc)
        rc = mt_disk_run(d, &r, err);
    mt_disk_stats(d, stats);
    mt_disk_close(&d);
    free(area.sum);
    return rc;
}

TEST(sums_find_what_a_drive_does_not_tell)
{
    static const struct {
        const char *fault;
        bool passes; /* the second read returns the right data */
    } cases[] = {{"read:flip:5", true},      {"read:drop:3:1", true},   {"read:swap:2", true},   {"write:flip:70", false},
                 {"write:drop:81", false},   {"write:swap:61", false},  {"write:stale:40", false}, {"read:flip:9:0", false},
                 {"any:drop:1:0", false},    {"read:stale:7", true}};
    char *a = aligned(4 << 20), *b = aligned(3 << 20);
    struct mt_err err = {0};
    struct mt_disk_stats stats;
    fill(a, 4 << 20, 9);
    assert_int_equal(deceive("read:delay:1", true, a, b, &stats, &err), 0);
    assert_memory_equal(a + MT_DISK_ALIGN, b, 3 << 20);
    assert_true(!stats.n_reread && stats.sum_ns > 0);
    for (size_t i = 0; i < MT_ARRAY_LEN(cases); i++) {
        err.msg[0] = 0;
        memset(b, 3, 3 << 20);
        int rc = deceive(cases[i].fault, true, a, b, &stats, &err);
        if (rc != (cases[i].passes ? 0 : -EBADMSG))
            fail_msg("%s: %d, %s", cases[i].fault, rc, err.msg);
        assert_true(stats.n_reread > 0);
        if (rc)
            assert_true(strstr(err.msg, "things at offset") && strstr(err.msg, root) && strstr(err.msg, "not what was written"));
        else
            assert_memory_equal(a + MT_DISK_ALIGN, b, 3 << 20);
        /* nobody else does */
        memset(b, 3, 3 << 20);
        assert_int_equal(deceive(cases[i].fault, false, a, b, &stats, &err), 0);
        if (memcmp(a + MT_DISK_ALIGN, b, 3 << 20) == 0)
            fail_msg("%s changes nothing", cases[i].fault);
    }
    free(a);
    free(b);
}

TEST(a_span_that_is_not_whole_blocks_is_refused)
{
    mt_disk *d = NULL;
    struct mt_err err = {0};
    struct mt_disk_params p = params(1, MT_IO_AUTO);
    uint64_t sum[8] = {0};
    MT_FREED char *a = aligned(CHUNK);
    assert_int_equal(mt_disk_open(&d, &p, &err), 0);
    struct mt_disk_sums area = {.sum = sum, .offset = 4096, .bytes = 3 * CHUNK, .block = mt_disk_block(d), .what = "things"};
    assert_int_equal(area.block, CHUNK);
    struct mt_disk_request r = {.n_spans = 1, .span = {{4096, a, CHUNK - 4096, &area}}};
    assert_int_equal(mt_disk_run(d, &r, &err), 0);
    r.span[0].bytes = CHUNK - 8192;
    assert_int_equal(mt_disk_run(d, &r, &err), -EINVAL);
    r.span[0] = (struct mt_disk_span){8192, a, CHUNK - 8192, &area};
    assert_int_equal(mt_disk_run(d, &r, &err), -EINVAL);
    mt_disk_close(&d);
}

/* A block without a sum has never been written: anything but zeros came from elsewhere. */
TEST(what_was_never_written_must_read_as_zeros)
{
    mt_disk *d = NULL;
    struct mt_err err = {0};
    struct mt_disk_params p = params(1, MT_IO_AUTO);
    uint64_t sum[8] = {0};
    MT_FREED char *a = aligned(CHUNK);
    assert_int_equal(mt_disk_open(&d, &p, &err), 0);
    struct mt_disk_sums area = {.sum = sum, .offset = CHUNK, .bytes = 2 * CHUNK, .block = mt_disk_block(d), .what = "things"};
    struct mt_disk_request r = {.n_spans = 1, .span = {{CHUNK, a, CHUNK, &area}}};
    memset(a, 1, CHUNK);
    assert_int_equal(mt_disk_run(d, &r, &err), 0);
    assert_true(!a[0] && !memcmp(a, a + 1, CHUNK - 1));
    a[CHUNK - 1] = 1;
    assert_int_equal(transfer(d, true, CHUNK, a, CHUNK, &err), 0); /* as by somebody else */
    assert_int_equal(mt_disk_run(d, &r, &err), -EBADMSG);
    mt_disk_close(&d);
}

/* Transfers without end in a process of its own, which is stopped for longer than a drive may take. */
TEST(a_process_that_was_stopped_does_not_give_its_drives_up)
{
    int pipe_fd[2], status;
    char ready;
    assert_int_equal(pipe(pipe_fd), 0);
    pid_t child = fork();
    if (!child) {
        mt_disk *d = NULL;
        struct mt_io_fault f;
        struct mt_disk_params p = params(1, MT_IO_THREADS);
        char *a = aligned(1 << 20);
        p.fault = &f;
        p.deadline_s = 2.5;
        memset(a, 1, 1 << 20);
        int rc = mt_io_fault_parse(&f, "write:hang:2", NULL); /* given up in the end, but not so soon */
        struct mt_disk_request r = {.write = true, .n_spans = 1, .done = note_done, .span = {{0, a, 1 << 20}}};
        int ended = 0;
        r.ctx = &ended;
        rc = rc ? rc : mt_disk_open(&d, &p, NULL);
        if (!rc)
            mt_disk_submit(d, &r);
        if (write(pipe_fd[1], rc ? "n" : "y", 1) != 1)
            _exit(3);
        raise(SIGSTOP);
        usleep(100000);
        _exit(__atomic_load_n(&ended, __ATOMIC_ACQUIRE) ? 1 : 0);
    }
    assert_int_equal(read(pipe_fd[0], &ready, 1), 1);
    assert_int_equal(ready, 'y');
    assert_int_equal(waitpid(child, &status, WUNTRACED), child);
    usleep(3000000);
    kill(child, SIGCONT);
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status) && !WEXITSTATUS(status));
    close(pipe_fd[0]);
    close(pipe_fd[1]);
    mt_disk *next = NULL; /* removes its scratch */
    struct mt_disk_params p = params(1, MT_IO_THREADS);
    assert_int_equal(mt_disk_open(&next, &p, NULL), 0);
    mt_disk_close(&next);
}

TEST(faults_that_cannot_be_survived_are_told)
{
    static const struct {
        const char *fault;
        bool write;
        int rc;
        const char *words;
    } cases[] = {
        {"write:eio:1:64", true, -EIO, "Input/output error"}, {"read:eio:7:40", false, -EIO, "cannot read"},
        {"write:enospc:5", true, -ENOSPC, "No space left"},  {"read:zero:3", false, -ENODATA, "shorter"},
        {"write:zero:3", true, -EIO, "cannot write"},        {"any:eagain:4:0", true, -EAGAIN, "cannot write"},
        {"write:eio:1:0", true, -EIO, "the last checkpoint"},
    };
    for (size_t i = 0; i < MT_ARRAY_LEN(cases); i++) {
        struct mt_io_fault f;
        struct mt_err err = {0};
        mt_disk *d = NULL;
        struct mt_disk_params p = params(2, MT_IO_AUTO);
        char *a = aligned(1 << 20);
        memset(a, 1, 1 << 20);
        assert_int_equal(mt_io_fault_parse(&f, cases[i].fault, NULL), 0);
        p.fault = &f;
        p.deadline_s = 30; /* pauses before it is tried again are parts of it */
        assert_int_equal(mt_disk_open(&d, &p, NULL), 0);
        assert_int_equal(transfer(d, cases[i].write, 1 << 20, a, 1 << 20, &err), cases[i].rc);
        assert_non_null(strstr(err.msg, cases[i].words));
        assert_non_null(strstr(err.msg, root)); /* which file */
        assert_non_null(strstr(err.msg, "offset"));
        assert_true(strstr(err.msg, "/dev/") || strstr(err.msg, "device "));
        assert_int_equal(err.kind, cases[i].rc == -ENOSPC ? MT_ERR_NO_FIT : MT_ERR_RUNTIME);
        int left = f.count ? transfer(d, cases[i].write, 0, a, 64 << 10, &err) : 0;
        for (int n = 0; left && n < 64; n++) /* the disk still works, once its faults are over */
            left = transfer(d, cases[i].write, 0, a, 64 << 10, &err);
        assert_int_equal(left, 0);
        mt_disk_close(&d);
        free(a);
    }
    struct mt_io_fault f;
    assert_int_equal(mt_io_fault_parse(&f, "write:nonsense:1", NULL), -EINVAL);
    assert_int_equal(mt_io_fault_parse(&f, "sometimes:eio:1", NULL), -EINVAL);
    assert_int_equal(mt_io_fault_parse(&f, "read:eio:0", NULL), -EINVAL);
}

TEST(space_that_is_not_there_is_refused_with_numbers)
{
    mt_disk *d = NULL;
    struct mt_err err;
    struct mt_disk_params p = params(2, MT_IO_AUTO);
    p.bytes = (uint64_t)1 << 50;
    assert_int_equal(mt_disk_open(&d, &p, &err), -ENOSPC);
    assert_int_equal(err.kind, MT_ERR_NO_FIT);
    assert_non_null(strstr(err.msg, "TiB of scratch are needed"));
    assert_non_null(strstr(err.msg, "short"));
    assert_int_equal(files_in(dirs[0]), 0);
    /* a limit on the size of files simulates a file system that is full */
    struct rlimit old, cap;
    signal(SIGXFSZ, SIG_IGN);
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &old), 0);
    cap = old;
    cap.rlim_cur = 1 << 20;
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &cap), 0);
    p.bytes = BYTES;
    int rc = mt_disk_open(&d, &p, &err);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &old), 0);
    assert_int_equal(rc, -ENOSPC);
    assert_int_equal(files_in(dirs[0]), 0);
}

TEST(a_missing_folder_is_named)
{
    mt_disk *d = NULL;
    struct mt_err err;
    char missing[128];
    const char *where[] = {dirs[0], missing};
    struct mt_disk_params p = params(2, MT_IO_AUTO);
    snprintf(missing, sizeof(missing), "%s/not-there", root);
    p.dirs = where;
    assert_int_equal(mt_disk_open(&d, &p, &err), -ENOENT);
    assert_non_null(strstr(err.msg, missing));
    assert_non_null(strstr(err.msg, "memory.nvme_paths"));
    assert_int_equal(files_in(dirs[0]), 0); /* files made before are removed */
}

TEST(scratch_of_a_killed_run_is_removed_and_of_a_living_one_kept)
{
    mt_disk *mine = NULL, *next = NULL;
    struct mt_disk_params p = params(1, MT_IO_THREADS);
    int pipe_fd[2], status;
    char ready;
    assert_int_equal(pipe(pipe_fd), 0);
    pid_t child = fork();
    if (!child) {
        mt_disk *d = NULL;
        int rc = mt_disk_open(&d, &p, NULL);
        if (write(pipe_fd[1], rc ? "n" : "y", 1) == 1)
            pause();
        _exit(1);
    }
    assert_int_equal(read(pipe_fd[0], &ready, 1), 1);
    assert_int_equal(ready, 'y');
    assert_int_equal(files_in(dirs[0]), 1);
    assert_int_equal(mt_disk_open(&mine, &p, NULL), 0);
    assert_int_equal(files_in(dirs[0]), 2); /* the child lives: its file stays */
    kill(child, SIGKILL);
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_int_equal(files_in(dirs[0]), 2);
    assert_int_equal(mt_disk_open(&next, &p, NULL), 0);
    assert_int_equal(files_in(dirs[0]), 2); /* the child's is gone, mine and the new one are there */
    mt_disk_close(&mine);
    mt_disk_close(&next);
    assert_int_equal(files_in(dirs[0]), 0);
    close(pipe_fd[0]);
    close(pipe_fd[1]);
}

/* As the kernel does, which takes a killed process's io_uring apart after the process is gone. */
TEST(scratch_that_stays_locked_for_a_moment_is_waited_for)
{
    mt_disk *next = NULL;
    struct mt_disk_params p = params(1, MT_IO_THREADS);
    int status;
    pid_t child = fork();
    if (!child) {
        mt_disk *d = NULL;
        int rc = mt_disk_open(&d, &p, NULL);
        if (!rc && !fork()) /* has the file and its lock, too */
            usleep(100000);
        _exit(rc ? 1 : 0);
    }
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_int_equal(status, 0);
    assert_int_equal(files_in(dirs[0]), 1);
    assert_int_equal(mt_disk_open(&next, &p, NULL), 0);
    assert_int_equal(files_in(dirs[0]), 1); /* the new one */
    mt_disk_close(&next);
    assert_int_equal(files_in(dirs[0]), 0);
}

TEST(files_that_are_not_ours_are_left_alone)
{
    char path[160];
    mt_disk *d = NULL;
    struct mt_disk_params p = params(1, MT_IO_AUTO);
    snprintf(path, sizeof(path), "%s/weights.safetensors", dirs[0]);
    assert_int_equal(mt_write_file(path, "x", 1, NULL), 0);
    assert_int_equal(mt_disk_open(&d, &p, NULL), 0);
    mt_disk_close(&d);
    assert_true(mt_path_exists(path));
    unlink(path);
}

TEST(rates_are_measured)
{
    struct mt_disk_rates r;
    struct mt_disk_probe p = {.dir = dirs[0], .bytes = 16 << 20, .both = true};
    assert_int_equal(mt_disk_measure(&r, &p, NULL), 0);
    assert_true(r.read > 0 && r.write > 0 && r.together > 0 && r.cpu_read >= 0);
    assert_int_equal(files_in(dirs[0]), 0);
}

/* A backend that fails, a drive that hangs: all requests end, later ones too, and the disk can be closed.
 * The last: its threads stay, and others fork. */
TEST(what_never_ends_is_given_up)
{
    static const struct {
        const char *fault;
        int rc;
    } cases[] = {{"read:hang:4", -ETIMEDOUT}, {"write:hang:30:0", -ETIMEDOUT}, {"read:wait:3", -EIO}, {"any:wait:1", -EIO},
                 {"write:submit:9", -EIO}};
    for (size_t i = 0; i < MT_ARRAY_LEN(cases); i++)
        for (int io = MT_IO_AUTO; io <= MT_IO_THREADS; io += MT_IO_THREADS) {
            struct mt_io_fault f;
            struct mt_disk_params p = params(2, (enum mt_io_kind)io);
            mt_disk *d = NULL;
            struct mt_err err = {0};
            static struct mt_disk_request r[2 * MANY];
            int ended = 0, failed = 0;
            static char *kept[2 * MT_ARRAY_LEN(cases)]; /* never freed: lost transfers may still write there */
            char *a = kept[2 * i + (io != MT_IO_AUTO)] = aligned(2 * MANY * (size_t)PART);
            memset(a, 5, 2 * MANY * (size_t)PART);
            assert_int_equal(mt_io_fault_parse(&f, cases[i].fault, NULL), 0);
            p.fault = &f;
            p.deadline_s = 0.4;
            assert_int_equal(mt_disk_open(&d, &p, NULL), 0);
            for (int k = 0; k < 2 * MANY; k++) {
                size_t at = (size_t)k / 2 * PART;
                r[k] = (struct mt_disk_request){.write = k & 1, .n_spans = 1, .done = note_done, .ctx = &ended,
                                                .span = {{at, a + (size_t)k * PART, PART}}};
                mt_disk_submit(d, &r[k]);
            }
            while (__atomic_load_n(&ended, __ATOMIC_ACQUIRE) < 2 * MANY)
                usleep(1000);
            for (int k = 0; k < 2 * MANY; k++) {
                assert_true(!r[k].rc || (r[k].rc == cases[i].rc && strstr(r[k].err.msg, root)));
                failed += r[k].rc != 0;
            }
            assert_true(failed > 0);
            assert_int_equal(transfer(d, false, 0, a, 64 << 10, &err), cases[i].rc);
            assert_non_null(strstr(err.msg, "given up"));
            mt_disk_close(&d);
            assert_int_equal(files_in(dirs[0]), 0);
        }
}

TEST_GROUP(set_up, tear_down)

int main(void)
{
    alarm(300); /* a hang is a failure */
    return test_run();
}
