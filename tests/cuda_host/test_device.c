/* SPDX-License-Identifier: Apache-2.0 */
/* The host side of the CUDA device on the emulation: memory, copies by all ways, events, errors. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "host_side.h"
#include "test.h"

#include "base/log.h"
#include "base/mem.h"
#include "device/meter.h"
#include "emu/emu.h"
#include "kinds/kinds.h"
#include "store/planes.h"

TEST(a_budget_beyond_the_gpu_is_refused_with_numbers)
{
    mt_device *dev = NULL;
    struct mt_err err = {0};
    struct mt_device_params p = {.kind = "cuda", .n_threads = 1, .budget_bytes = (size_t)1 << 50};
    assert_int_equal(mt_device_create(&dev, &p, &err), -ENOMEM);
    assert_int_equal(err.kind, MT_ERR_NO_FIT);
    assert_non_null(strstr(err.msg, "1.00 PiB"));
    assert_non_null(strstr(err.msg, "are free"));
    assert_null(dev);
}

TEST(allocations_stop_at_the_budget_and_say_what_holds_it)
{
    MT_CLOSED_BY(mt_device_destroy) mt_device *dev = open_device(40 * MIB);
    struct mt_err err = {0};
    void *p = NULL;
    size_t budget = mt_device_limits(dev)->budget_bytes, own = mt_device_bytes_used(dev);
    assert_int_equal(budget + own, 40 * MIB); /* the library's workspace comes out of the budget */
    void *a = take(dev, 3 * MIB, "slots"), *b = take(dev, budget - 3 * MIB, "scratch");
    assert_int_equal(mt_device_alloc(dev, 1, "one more", &p, &err), -ENOMEM);
    assert_non_null(strstr(err.msg, "slots 3.00 MiB"));
    assert_non_null(strstr(err.msg, "cuBLASLt workspace"));
    mt_device_free(dev, a);
    mt_device_free(dev, b);
    assert_int_equal(mt_device_bytes_used(dev), own);
}

/* There and back over each pair of streams, with pitches, and bands that must stay. */
static void round_trip(mt_device *dev, char *host, size_t room, char *device, size_t width, size_t rows,
                       size_t pitch, size_t device_pitch, enum mt_stream in, enum mt_stream out)
{
    char *back = host + room / 2;
    size_t span = (rows - 1) * pitch + width;
    for (size_t i = 0; i < span; i++)
        host[i] = (char)(i * 31 + i / 251);
    memset(back, 0x5a, span + 64);
    must_copy(dev, in, &(struct mt_copy){device, device_pitch, host, pitch, width, rows});
    must_sync(dev);
    must_copy(dev, out, &(struct mt_copy){back, pitch, device, device_pitch, width, rows});
    must_sync(dev);
    for (size_t i = 0; i < span; i++)
        if (back[i] != (i % pitch < width ? host[i] : 0x5a))
            fail_msg("byte %zu of %zu rows of %zu at %zu is wrong", i, rows, width, pitch);
    for (size_t i = span; i < span + 64; i++)
        assert_int_equal(back[i], 0x5a);
}

/* MT_EMU_NO_PIN and MT_EMU_PIN_LIMIT choose what of the host memory is locked: meson.build runs all three. */
TEST(copies_arrive_whatever_is_locked)
{
    static const struct {
        size_t width, rows, pitch, device_pitch;
    } shapes[] = {{1, 1, 1, 1},           {4096, 1, 4096, 4096},     {20 * MIB + 3, 1, 20 * MIB + 3, 20 * MIB + 3},
                  {16384, 700, 16384, 32768}, {1000, 3000, 1024, 1001}, {9 * MIB, 2, 9 * MIB + 17, 9 * MIB}};
    enum { ROOM = 96 * MIB };
    MT_CLOSED_BY(mt_device_destroy) mt_device *dev = open_device(128 * MIB);
    void *host = NULL;
    char *device = take(dev, 64 * MIB, "copies");
    MUST(mt_host_alloc, &host, ROOM, "test");
    MUST(mt_device_register_host, dev, host, ROOM);
    for (size_t i = 0; i < MT_ARRAY_LEN(shapes); i++) {
        round_trip(dev, host, ROOM, device, shapes[i].width, shapes[i].rows, shapes[i].pitch,
                   shapes[i].device_pitch, MT_STREAM_H2D, MT_STREAM_D2H);
        round_trip(dev, host, ROOM, device, shapes[i].width, shapes[i].rows, shapes[i].pitch,
                   shapes[i].device_pitch, MT_STREAM_COMPUTE, MT_STREAM_COMPUTE);
    }
    mt_device_unregister_host(dev, host);
    mt_host_free(host, ROOM);
}

/* What the host waits for must not queue behind other streams' copies. */
TEST(small_copies_on_compute_need_no_copy_engine)
{
    enum { N = 1000 };
    MT_CLOSED_BY(mt_device_destroy) mt_device *dev = open_device(64 * MIB);
    void *host = NULL;
    char *device = take(dev, 8 * N, "copies");
    MUST(mt_host_alloc, &host, 4 * MIB, "test");
    MUST(mt_device_register_host, dev, host, 4 * MIB);
    bool locked = mt_emu_pin_state(0, host, 4 * MIB) == MT_EMU_PINNED;
    size_t before = mt_emu_copies();
    round_trip(dev, host, 4 * MIB, device, 4 * N, 1, 4 * N, 4 * N, MT_STREAM_COMPUTE, MT_STREAM_COMPUTE);
    assert_int_equal(mt_emu_copies() == before, locked);
    before = mt_emu_copies(); /* not whole words, and another stream */
    round_trip(dev, host, 4 * MIB, device, 4 * N - 1, 1, 4 * N, 4 * N, MT_STREAM_COMPUTE, MT_STREAM_COMPUTE);
    round_trip(dev, host, 4 * MIB, device, 4 * N, 1, 4 * N, 4 * N, MT_STREAM_H2D, MT_STREAM_D2H);
    assert_true(mt_emu_copies() >= before + 4);
    mt_device_unregister_host(dev, host);
    mt_host_free(host, 4 * MIB);
}

/* Half of a range is registered: a copy over the border is cut there. */
TEST(a_copy_may_cross_from_locked_to_other_memory)
{
    enum { ROOM = 8 * MIB };
    MT_CLOSED_BY(mt_device_destroy) mt_device *dev = open_device(64 * MIB);
    void *host = NULL;
    char *device = take(dev, 8 * MIB, "copies");
    MUST(mt_host_alloc, &host, ROOM, "test");
    MUST(mt_device_register_host, dev, (char *)host + MIB, 2 * MIB);
    round_trip(dev, host, ROOM, device, 3 * MIB + 5, 1, 3 * MIB + 5, 3 * MIB + 5, MT_STREAM_H2D,
               MT_STREAM_D2H);
    round_trip(dev, host, ROOM, device, 1 << 18, 13, (1 << 18) + 12345, 1 << 18, MT_STREAM_H2D,
               MT_STREAM_D2H);
    mt_device_unregister_host(dev, (char *)host + MIB);
    mt_host_free(host, ROOM);
}

/* Or copies wait for kernels that they have nothing to do with. */
TEST(every_stream_has_a_queue_of_its_own)
{
    MT_CLOSED_BY(mt_device_destroy) mt_device *dev = open_device(160 * MIB);
    const struct mt_device_limits *l = mt_device_limits(dev);
    char host[8192], *device = take(dev, sizeof(host), "copies");
    void *sides = take(dev, (size_t)l->sides * l->side_bytes, "sides");
    MUST(mt_device_open_sides, dev, l->sides, sides);
    round_trip(dev, host, sizeof(host), device, 1000, 1, 1000, 1000, MT_STREAM_H2D, MT_STREAM_D2H);
    round_trip(dev, host, sizeof(host), device, 1000, 1, 1000, 1000, MT_STREAM_COMPUTE, MT_STREAM_COMPUTE);
    assert_int_equal(mt_emu_streams_that_share(), 0);
}

static int n_progress;

static void count_progress(enum mt_log_level level, const char *line)
{
    n_progress += level == MT_LOG_PROGRESS && strstr(line, "locking host memory");
}

/* Its pages are made by all threads before, and what takes long says how far it is. Older kernels leave the pages to
 * the lock, which is none here. */
TEST(a_large_range_is_there_when_it_is_locked)
{
    enum { PAGE = 4096, ROOM = 257 * MIB };
    MT_CLOSED_BY(mt_device_destroy) mt_device *dev = open_device(40 * MIB);
    void *host = NULL;
    size_t n = ROOM / PAGE, there = 0;
    unsigned char *resident = calloc(n, 1);
    assert_non_null(resident);
    MUST(mt_host_alloc, &host, ROOM, "test");
    setenv("MT_EMU_PIN_MS", "300", 1); /* of each of two pieces */
    mt_log_set_sink(count_progress);
    MUST(mt_device_register_host, dev, host, ROOM);
    mt_log_set_sink(NULL);
    unsetenv("MT_EMU_PIN_MS");
    if (mt_emu_pin_state(0, host, ROOM) == MT_EMU_PINNED)
        assert_int_equal(n_progress, 1);
    assert_int_equal(mincore(host, ROOM, resident), 0);
    for (size_t i = 0; i < n; i++)
        there += resident[i] & 1;
#ifdef MADV_POPULATE_WRITE
    if (madvise(host, PAGE, MADV_POPULATE_WRITE) == 0)
        assert_int_equal(there, n);
#endif
    for (size_t i = 0; i < ROOM; i += PAGE)
        assert_int_equal(((char *)host)[i], 0);
    mt_device_unregister_host(dev, host);
    mt_host_free(host, ROOM);
    free(resident);
}

static bool child_has(void *page)
{
    int status = 0;
    pid_t pid = fork();
    if (!pid) {
        unsigned char resident;
        _exit(mincore(page, 4096, &resident) ? 1 : 0);
    }
    assert_true(pid > 0 && waitpid(pid, &status, 0) == pid && WIFEXITED(status));
    return !WEXITSTATUS(status);
}

/* Pages as large as those of some ARM servers; meson.build has the linker take this one. */
static size_t page_bytes = 4096;
size_t __wrap_mt_page_bytes(void);
size_t __wrap_mt_page_bytes(void)
{
    return page_bytes;
}

/* Its whole pages: what shares one with other data stays. */
static void locked_pages_are_kept_from_children(size_t page)
{
    const size_t bytes = 20 * page;
    MT_CLOSED_BY(mt_device_destroy) mt_device *dev = open_device(40 * MIB);
    void *host = NULL;
    page_bytes = page;
    MUST(mt_host_alloc, &host, bytes + page, "test");
    char *p = (char *)mt_align_up((uintptr_t)host, page);
    memset(p, 1, bytes);
    MUST(mt_device_register_host, dev, p + 100, 10 * page);
    bool locked = mt_emu_pin_state(0, p + page, page) == MT_EMU_PINNED;
    assert_true(child_has(p) && child_has(p + page - 4096));
    assert_int_equal(child_has(p + page), !locked);
    assert_int_equal(child_has(p + 9 * page), !locked);
    assert_true(child_has(p + 10 * page));
    mt_device_unregister_host(dev, p + 100);
    assert_true(child_has(p + page));
    mt_host_free(host, bytes + page);
    page_bytes = 4096;
}

TEST(children_have_no_locked_memory)
{
    locked_pages_are_kept_from_children(4096);
    locked_pages_are_kept_from_children(64 << 10);
}

TEST(copies_of_pageable_memory_keep_their_place_in_the_stream)
{
    enum { N = 4 * MIB };
    MT_CLOSED_BY(mt_device_destroy) mt_device *dev = open_device(64 * MIB);
    struct mt_err err = {0};
    char *device = take(dev, N, "copies"), *a = malloc(N), *b = malloc(N), *out = malloc(N);
    assert_true(a && b && out);
    memset(a, 1, N);
    memset(b, 2, N);
    for (int i = 0; i < 4; i++) { /* no waiting between them */
        must_copy(dev, MT_STREAM_COMPUTE, &(struct mt_copy){device, N, a, N, N, 1});
        must_copy(dev, MT_STREAM_COMPUTE, &(struct mt_copy){device, N, b, N, N, 1});
        assert_int_equal(mt_op_zero(dev, &(struct mt_zero){device, 16}, &err), 0);
        must_copy(dev, MT_STREAM_COMPUTE, &(struct mt_copy){out, N, device, N, N, 1});
    }
    must_sync(dev);
    assert_int_equal(out[0], 0);
    assert_int_equal(out[16], 2);
    assert_int_equal(out[N - 1], 2);
    free(a);
    free(b);
    free(out);
}

/* Out and in again by two streams, as activations that leave the device: whatever the size of the way in. */
TEST(pageable_memory_is_read_after_what_the_stream_waits_for)
{
    static const size_t sizes[] = {64, 20000, 2 * MIB};
    enum { N = 4 * MIB };
    MT_CLOSED_BY(mt_device_destroy) mt_device *dev = open_device(64 * MIB);
    struct mt_err err = {0};
    char *device = take(dev, N, "x"), *again = take(dev, N, "again"), *host = calloc(N, 1), *out = malloc(N);
    mt_event *ev = NULL;
    assert_true(host && out);
    assert_int_equal(mt_event_create(dev, &ev, &err), 0);
    for (size_t i = 0; i < MT_ARRAY_LEN(sizes); i++) {
        size_t n = sizes[i];
        memset(host, 0, N);
        mt_device_poison(dev, device, N);
        assert_int_equal(mt_event_record(dev, ev, MT_STREAM_COMPUTE, &err), 0);
        assert_int_equal(mt_event_wait(dev, ev, MT_STREAM_D2H, &err), 0);
        must_copy(dev, MT_STREAM_D2H, &(struct mt_copy){host, N, device, N, N, 1});
        assert_int_equal(mt_event_record(dev, ev, MT_STREAM_D2H, &err), 0);
        assert_int_equal(mt_event_wait(dev, ev, MT_STREAM_H2D, &err), 0);
        must_copy(dev, MT_STREAM_H2D, &(struct mt_copy){again, n, host + N - n, n, n, 1});
        must_sync(dev);
        must_copy(dev, MT_STREAM_D2H, &(struct mt_copy){out, n, again, n, n, 1});
        must_sync(dev);
        for (size_t k = 0; k < n; k++)
            if ((unsigned char)out[k] != 0xff)
                fail_msg("byte %zu of %zu was read too early", k, n);
    }
    mt_event_destroy(&ev);
    free(host);
    free(out);
}

/* A refusal may be the first of all: what other copies go through is locked before. */
TEST(under_wsl_the_staging_ring_is_locked_first)
{
    enum { ROOM = 64 * MIB, N = 20 * MIB, BUFFER = 8 * MIB };
    void *host = NULL;
    setenv("MT_EMU_WSL", "1", 1);
    mt_device *dev = open_device(128 * MIB);
    char *device = take(dev, N, "copies");
    MUST(mt_host_alloc, &host, ROOM, "test");
    MUST(mt_device_register_host, dev, host, ROOM);
    char *last = (char *)host + ROOM - N;
    bool locked = mt_emu_pin_state(0, last, N) == MT_EMU_PINNED;
    size_t before = mt_emu_copies();
    must_copy(dev, MT_STREAM_D2H, &(struct mt_copy){last, N, device, N, N, 1});
    must_sync(dev);
    assert_int_equal(mt_emu_copies() - before, locked ? 1 : mt_div_up(N, BUFFER));
    mt_device_unregister_host(dev, host);
    mt_host_free(host, ROOM);
    mt_device_destroy(&dev);
    unsetenv("MT_EMU_WSL");
}

enum { FEEDER_BYTES = 4000, FEEDER_ROUNDS = 100 };

/* A thread that copies what it has on the device to the host, again and again, and looks at it when an event says that
 * it is there. */
struct feeder {
    mt_device *dev;
    char *device, *host;
    int value, wrong;
    pthread_t thread;
};

static void *feed(void *arg)
{
    struct feeder *f = arg;
    mt_event *ev = NULL;
    struct mt_err err;
    f->wrong = mt_event_create(f->dev, &ev, &err) != 0;
    for (int round = 0; round < FEEDER_ROUNDS && !f->wrong; round++) {
        memset(f->host, 0, FEEDER_BYTES);
        must_copy(f->dev, MT_STREAM_D2H,
                  &(struct mt_copy){f->host, FEEDER_BYTES, f->device, FEEDER_BYTES, FEEDER_BYTES, 1});
        f->wrong = mt_event_record(f->dev, ev, MT_STREAM_D2H, &err) || mt_event_sync(f->dev, ev, &err) ||
                   f->host[0] != f->value || f->host[FEEDER_BYTES - 1] != f->value;
    }
    mt_event_destroy(&ev);
    return NULL;
}

/* The queue's own thread, and the one of COMPUTE that copies logits. */
TEST(two_threads_may_feed_the_way_out)
{
    MT_CLOSED_BY(mt_device_destroy) mt_device *dev = open_device(64 * MIB);
    struct feeder f[2];
    for (int i = 0; i < 2; i++) {
        f[i] = (struct feeder){dev, take(dev, FEEDER_BYTES, "x"), malloc(FEEDER_BYTES), i + 1};
        assert_non_null(f[i].host);
        memset(f[i].host, f[i].value, FEEDER_BYTES);
        must_copy(dev, MT_STREAM_H2D,
                  &(struct mt_copy){f[i].device, FEEDER_BYTES, f[i].host, FEEDER_BYTES, FEEDER_BYTES, 1});
    }
    must_sync(dev);
    for (int i = 0; i < 2; i++)
        assert_int_equal(pthread_create(&f[i].thread, NULL, feed, &f[i]), 0);
    for (int i = 0; i < 2; i++) {
        pthread_join(f[i].thread, NULL);
        free(f[i].host);
    }
    assert_false(f[0].wrong || f[1].wrong);
}

TEST(events_order_streams_and_tell_the_time)
{
    enum { N = 1 * MIB };
    MT_CLOSED_BY(mt_device_destroy) mt_device *dev = open_device(64 * MIB);
    struct mt_err err = {0};
    char *device = take(dev, N, "x"), *host = malloc(N);
    mt_event *before = NULL, *after = NULL;
    assert_true(host);
    assert_int_equal(mt_event_create(dev, &before, &err), 0);
    assert_int_equal(mt_event_create(dev, &after, &err), 0);
    assert_int_equal(mt_event_time_ns(before), 0);
    assert_int_equal(mt_event_record(dev, before, MT_STREAM_COMPUTE, &err), 0);
    mt_device_poison(dev, device, N);
    assert_int_equal(mt_event_record(dev, after, MT_STREAM_COMPUTE, &err), 0);
    assert_int_equal(mt_event_wait(dev, after, MT_STREAM_D2H, &err), 0);
    must_copy(dev, MT_STREAM_D2H, &(struct mt_copy){host, N, device, N, N, 1});
    assert_int_equal(mt_event_record(dev, after, MT_STREAM_D2H, &err), 0);
    assert_int_equal(mt_event_sync(dev, after, &err), 0);
    assert_int_equal((unsigned char)host[N - 1], 0xff);
    assert_true(mt_event_time_ns(before) > 0);
    assert_true(mt_event_time_ns(after) >= mt_event_time_ns(before));
    mt_event_destroy(&before);
    mt_event_destroy(&after);
    free(host);
}

TEST(copies_between_host_and_host_are_refused)
{
    MT_CLOSED_BY(mt_device_destroy) mt_device *dev = open_device(64 * MIB);
    struct mt_err err = {0};
    char a[8] = "", b[8] = "", *device = take(dev, 64, "x");
    struct mt_copy c = {a, 8, b, 8, 8, 1};
    assert_int_equal(mt_device_copy(dev, MT_STREAM_COMPUTE, &c, &err), -EINVAL);
    c.dst = device;
    assert_int_equal(mt_device_copy(dev, MT_STREAM_D2H, &c, &err), -EINVAL); /* the wrong stream */
    assert_int_equal(mt_device_copy(dev, MT_STREAM_H2D, &c, &err), 0);
    must_sync(dev);
}

/* Asking while work is under way. */
TEST(a_status_leaves_nothing_behind)
{
    enum { N = 16 * MIB };
    MT_CLOSED_BY(mt_device_destroy) mt_device *dev = open_device(64 * MIB);
    struct mt_err err = {0};
    char *device = take(dev, N, "x");
    for (int i = 0; i < 20; i++) {
        for (int k = 0; k < 4; k++)
            mt_device_poison(dev, device, N);
        assert_int_equal(mt_device_status(dev, &err), 0);
        if (mt_op_zero(dev, &(struct mt_zero){device, N}, &err) ||
            mt_op_cast(dev, &(struct mt_cast){64, MT_F32, MT_BF16, device, device + 4096}, &err))
            fail_msg("%s", err.msg);
    }
    must_sync(dev);
}

/* The libraries of a toolkit need its driver or a later one, and the error of CUDA names neither. */
TEST(an_old_driver_is_named)
{
    mt_device *dev = NULL;
    struct mt_err err = {0};
    struct mt_device_params p = {.kind = "cuda", .n_threads = 1, .budget_bytes = 40 * MIB};
    setenv("MT_EMU_DRIVER", "12040", 1);
    int rc = mt_device_create(&dev, &p, &err);
    unsetenv("MT_EMU_DRIVER");
    assert_int_equal(rc, -ENODEV);
    assert_non_null(strstr(err.msg, "the NVIDIA driver supports CUDA 12.4"));
    assert_non_null(strstr(err.msg, "update the driver"));
    assert_non_null(strstr(err.msg, "cuda-compat"));
}

/* What a machine lacks is said with what to do, as CUDA's texts are not. */
TEST(errors_of_machines_come_with_what_to_do)
{
    static const struct {
        const char *error, *says;
    } cases[] = {{"34", "stubs"},     {"46", "has the GPU for itself"}, {"802", "nvidia-fabricmanager"},
                 {"803", "reboot"},   {"804", "compat"},                {"999", "nvidia_uvm"},
                 {"214", "faulty"},   {"700", "CUDA_LAUNCH_BLOCKING=1"}, {"716", "CUDA_LAUNCH_BLOCKING=1"},
                 {"304", "nvidia_uvm"}, {"600", "memory.device_budget"},
                 {"702", "lower train.micro_batch, or train.chunk"}};
    mt_device *none = NULL;
    struct mt_err err = {0};
    struct mt_device_params p = {.kind = "cuda", .n_threads = 1, .budget_bytes = 40 * MIB};
    for (size_t i = 0; i < MT_ARRAY_LEN(cases); i++) {
        setenv("MT_EMU_ERROR", cases[i].error, 1);
        assert_int_equal(mt_device_create(&none, &p, &err), -ENODEV);
        if (!strstr(err.msg, cases[i].says))
            fail_msg("%s: %s", cases[i].error, err.msg);
    }
    setenv("MT_EMU_ERROR", "100", 1); /* cudaErrorNoDevice */
    setenv("CUDA_VISIBLE_DEVICES", "7", 1);
    assert_int_equal(mt_device_create(&none, &p, &err), -ENODEV);
    assert_non_null(strstr(err.msg, "CUDA_VISIBLE_DEVICES=7 hides"));
    unsetenv("CUDA_VISIBLE_DEVICES");
    unsetenv("MT_EMU_ERROR");
}

/* As the first launch of a build for other GPUs. */
TEST(a_build_without_code_for_the_gpu_says_so)
{
    struct mt_err err = {0};
    float *x = NULL;
    mt_device *dev = open_device(40 * MIB);
    assert_int_equal(mt_device_alloc(dev, 1024, "x", (void **)&x, &err), 0);
    setenv("MT_EMU_LAUNCH_ERROR", "209", 1);
    assert_int_equal(mt_op_add(dev, &(struct mt_add){.n = 64, .dtype = MT_F32, .a = x, .b = x, .out = x + 64}, &err), -EIO);
    unsetenv("MT_EMU_LAUNCH_ERROR");
    assert_non_null(strstr(err.msg, "-Dgpu-archs"));
    mt_device_destroy(&dev);

    struct mt_device_params p = {.kind = "cuda", .n_threads = 1, .budget_bytes = 40 * MIB};
    struct mt_device_info info;
    setenv("MT_EMU_LAUNCH_ERROR", "209", 1);
    assert_int_equal(mt_device_create(&dev, &p, &err), -ENODEV);
    assert_string_equal(mt_device_choose("auto", 0, &info), "cpu");
    unsetenv("MT_EMU_LAUNCH_ERROR");
    assert_true(info.shown && !info.present);
    assert_non_null(strstr(info.text, "compute capability 9.0"));
    assert_non_null(strstr(info.text, "scripts/build"));
    assert_non_null(strstr(err.msg, "scripts/build"));
    assert_string_equal(mt_device_choose("auto", 0, &info), "cuda");
    assert_false(info.shown);
}

/* What was submitted before an error that is not CUDA's end still runs, and its memory may be freed after a wait. */
TEST(a_failed_device_is_waited_for)
{
    enum { N = 20 * MIB };
    struct mt_err err = {0};
    MT_CLOSED_BY(mt_device_destroy) mt_device *dev = open_device(64 * MIB);
    char *device = take(dev, N, "x"), *host = calloc(N, 1);
    float *x = take(dev, 1024, "y");
    assert_non_null(host);
    mt_device_poison(dev, device, N);
    must_sync(dev);
    must_copy(dev, MT_STREAM_D2H, &(struct mt_copy){host, N, device, N, N, 1});
    setenv("MT_EMU_LAUNCH_ERROR", "2", 1);
    assert_int_equal(mt_op_add(dev, &(struct mt_add){.n = 64, .dtype = MT_F32, .a = x, .b = x, .out = x + 64}, &err), -EIO);
    unsetenv("MT_EMU_LAUNCH_ERROR");
    assert_int_equal(mt_device_sync(dev, &err), -EIO);
    assert_int_equal((unsigned char)host[N - 1], 0xff);
    free(host);
}

/* The driver loads a kernel when it is launched first. */
TEST(an_error_that_may_be_for_lack_of_memory_says_so)
{
    struct mt_err err = {0};
    size_t free_bytes, total;
    float *x = NULL;
#ifdef __SANITIZE_ADDRESS__
    skip(); /* nearly all of the memory cannot be had: its allocations stand apart */
#endif
    for (size_t left = 8 * MIB; left <= 128 * MIB; left += 120 * MIB) {
        assert_int_equal(cudaMemGetInfo(&free_bytes, &total), cudaSuccess);
        mt_device *dev = open_device(free_bytes - left);
        assert_int_equal(mt_device_alloc(dev, 1024, "x", (void **)&x, &err), 0);
        setenv("MT_EMU_LAUNCH_ERROR", "2", 1);
        assert_int_equal(mt_op_add(dev, &(struct mt_add){.n = 64, .dtype = MT_F32, .a = x, .b = x, .out = x + 64}, &err),
                         -EIO);
        unsetenv("MT_EMU_LAUNCH_ERROR");
        assert_true(!strstr(err.msg, "beside memory.device_budget: lower that") == (left > 64 * MIB));
        mt_device_destroy(&dev);
    }
}

TEST(allocations_may_stand_apart)
{
    setenv("MEGATRAIN_CUDA_APART", "1", 1);
    MT_CLOSED_BY(mt_device_destroy) mt_device *dev = open_device(40 * MIB);
    unsetenv("MEGATRAIN_CUDA_APART");
    char host[256] = "apart", back[256] = "";
    char *a = take(dev, 256, "a"), *b = take(dev, 256, "b");
    assert_true(b != a + 256);
    must_copy(dev, MT_STREAM_H2D, &(struct mt_copy){b, 256, host, 256, 256, 1});
    must_sync(dev);
    mt_device_free(dev, a);
    must_copy(dev, MT_STREAM_D2H, &(struct mt_copy){back, 256, b, 256, 256, 1});
    must_sync(dev);
    assert_string_equal(back, "apart");
    mt_device_free(dev, b);
    struct mt_err err = {0};
    void *p = NULL;
    assert_int_equal(mt_device_alloc(dev, 41 * MIB, "much", &p, &err), -ENOMEM);
}

/* The planner's device, which has no GPU, must not think that a plan takes less than it does. */
TEST(the_planner_knows_the_workspaces)
{
    static const size_t tokens[] = {1, 70, 2048, 16384, 65536}, lens[] = {1, 64, 2000, 8192, 65536};
    mt_device *dev = open_device(64 * MIB), *meter = NULL;
    struct mt_meter_params p = {.kind = mt_device_kind("cuda"), .budget_bytes = SIZE_MAX / 2};
    struct mt_err err = {0};
    assert_int_equal(mt_device_create_meter(&meter, &p, &err), 0);
    for (size_t i = 0; i < MT_ARRAY_LEN(tokens); i++) {
        size_t n = tokens[i];
        struct mt_rmsnorm_bwd norm = {.n = n, .c = 896};
        struct mt_bias_bwd bias = {.n = n, .c = 4608};
        struct mt_qk_rope_bwd rope = {.fwd.n = n, .dq = mt_heads(NULL, 4608, 28, 128),
                                      .dk = mt_heads(NULL, 4608, 4, 128)};
        assert_int_equal(mt_op_rmsnorm_bwd_workspace(dev, &norm), mt_op_rmsnorm_bwd_workspace(meter, &norm));
        assert_int_equal(mt_op_bias_bwd_workspace(dev, &bias), mt_op_bias_bwd_workspace(meter, &bias));
        assert_int_equal(mt_op_qk_rope_bwd_workspace(dev, &rope), mt_op_qk_rope_bwd_workspace(meter, &rope));
        for (size_t k = 0; k < MT_ARRAY_LEN(lens) && lens[k] <= n; k++)
            for (int t = MT_F32; t <= MT_BF16; t++) {
                struct mt_heads q = mt_heads(NULL, 4608, 28, 128), kv = mt_heads(NULL, 4608, 4, 128);
                struct mt_attention a = {.n = n, .max_len = lens[k], .q = q, .k = kv, .v = kv, .o = q, .dtype = (enum mt_dtype)t};
                assert_true(mt_op_attention_workspace(dev, &a) > 0);
                assert_int_equal(mt_op_attention_workspace(dev, &a), mt_op_attention_workspace(meter, &a));
            }
    }
    /* where our own attention is first, its shapes need no scratch of cuDNN's */
    struct mt_heads q = mt_heads(NULL, 8192, 64, 128), kv = mt_heads(NULL, 1024, 8, 128);
    struct mt_attention a = {.n = 16384, .max_len = 16384, .q = q, .k = kv, .v = kv, .o = q, .dtype = MT_BF16};
    size_t any = mt_op_attention_workspace(meter, &a);
    mt_device_destroy(&meter);
    p.capability = 89;
    assert_int_equal(mt_device_create_meter(&meter, &p, &err), 0);
    assert_true(mt_op_attention_workspace(meter, &a) + ((size_t)1500 << 20) < any);
    mt_device_destroy(&meter);
    mt_device_destroy(&dev);
}

static mt_device *open_second(void)
{
    mt_device *dev = NULL;
    struct mt_device_params p = {
        .kind = "cuda", .index = 1, .budget_bytes = 64 * MIB, .n_threads = 1};
    MUST(mt_device_create, &dev, &p);
    return dev;
}

/* CUDA refuses to lock memory twice, and what one device has unlocked is not locked for the other.
 */
TEST(devices_share_locked_memory_until_the_last_leaves)
{
    enum { ROOM = 20 * MIB };
    void *host = NULL;
    MUST(mt_host_alloc, &host, ROOM, "test");
    for (int last = 0; last < 2; last++) {
        mt_device *dev[2] = {open_device(64 * MIB), open_second()};
        for (int i = 0; i < 2; i++)
            MUST(mt_device_register_host, dev[i], host, ROOM);
        enum mt_emu_pin pin = mt_emu_pin_state(0, host, ROOM);
        assert_int_equal(mt_emu_pin_state(1, host, ROOM),
                         pin); /* as much as may be locked, for both */
        mt_device_unregister_host(dev[!last], host);
        assert_int_equal(mt_emu_pin_state(0, host, ROOM), pin);
        mt_device_destroy(&dev[!last]);
        assert_int_equal(mt_emu_pin_state(0, host, ROOM), pin);
        round_trip(dev[last], host, ROOM, take(dev[last], 8 * MIB, "copies"), 3 * MIB + 5, 1,
                   3 * MIB + 5, 3 * MIB + 5, MT_STREAM_H2D, MT_STREAM_D2H);
        mt_device_unregister_host(dev[last], host);
        assert_int_equal(mt_emu_pin_state(0, host, ROOM), MT_EMU_PAGEABLE);
        mt_device_destroy(&dev[last]);
    }
    assert_int_equal(mt_emu_registered_twice(), 0);
    mt_host_free(host, ROOM);
}

/* One device stores what the other loads; only an event is between them. Both tell the host's time.
 */
TEST(a_device_waits_for_another_ones_copy)
{
    enum { ROOM = 4 * MIB };
    const int64_t clocks_apart_ns = 1000000000; /* far more than a busy machine can cause, far less than a day */
    mt_device *a = open_device(64 * MIB), *b = open_second();
    struct mt_err err = {0};
    mt_event *stored = NULL, *loaded = NULL;
    void *host = NULL;
    char *on_a = take(a, ROOM, "a"), *on_b = take(b, ROOM, "b");
    assert_int_equal(mt_host_alloc(&host, 2 * ROOM, "test", &err), 0);
    assert_int_equal(mt_device_register_host(a, host, 2 * ROOM, &err), 0);
    assert_int_equal(mt_device_register_host(b, host, 2 * ROOM, &err), 0);
    assert_int_equal(mt_event_create(a, &stored, &err), 0);
    assert_int_equal(mt_event_create(b, &loaded, &err), 0);
    for (int round = 1; round <= 8; round++) {
        struct mt_zero zero = {on_a, ROOM};
        memset((char *)host + ROOM, round, ROOM);
        must_copy(a, MT_STREAM_COMPUTE,
                  &(struct mt_copy){on_a, ROOM, (char *)host + ROOM, ROOM, ROOM, 1});
        must_copy(a, MT_STREAM_COMPUTE, &(struct mt_copy){host, ROOM, on_a, ROOM, ROOM, 1});
        assert_int_equal(mt_event_record(a, stored, MT_STREAM_COMPUTE, &err), 0);
        assert_int_equal(mt_op_zero(a, &zero, &err), 0);
        assert_int_equal(mt_event_wait(b, stored, MT_STREAM_H2D, &err), 0);
        must_copy(b, MT_STREAM_H2D, &(struct mt_copy){on_b, ROOM, host, ROOM, ROOM, 1});
        assert_int_equal(mt_event_record(b, loaded, MT_STREAM_H2D, &err), 0);
        assert_int_equal(mt_event_sync(b, loaded, &err), 0);
        assert_true(mt_event_time_ns(loaded) - mt_event_time_ns(stored) > -clocks_apart_ns);
        must_sync(a);
        must_copy(b, MT_STREAM_D2H,
                  &(struct mt_copy){(char *)host + ROOM, ROOM, on_b, ROOM, ROOM, 1});
        must_sync(b);
        for (size_t i = 0; i < ROOM; i++)
            assert_int_equal(((char *)host)[ROOM + i], round);
    }
    mt_event_destroy(&stored);
    mt_event_destroy(&loaded);
    mt_device_unregister_host(a, host);
    mt_device_unregister_host(b, host);
    mt_host_free(host, 2 * ROOM);
    mt_device_destroy(&a);
    mt_device_destroy(&b);
}

/* Last: the emulated context is gone then, as a real one. */
TEST(the_first_error_stays)
{
    MT_CLOSED_BY(mt_device_destroy) mt_device *dev = open_device(64 * MIB);
    struct mt_err err = {0}, later = {0};
    MT_CLOSED_BY(mt_event_destroy) mt_event *ev = NULL;
    char *device = take(dev, 4096, "x"), host[4096];
    assert_int_equal(mt_event_create(dev, &ev, &err), 0);
    /* an operation on host memory */
    int rc = mt_op_cast(dev, &(struct mt_cast){64, MT_F32, MT_BF16, host, device}, &err);
    if (!rc)
        rc = mt_device_sync(dev, &err);
    assert_int_equal(rc, -EIO);
    assert_int_equal(err.kind, MT_ERR_DEVICE);
    assert_int_equal(mt_device_status(dev, &later), rc);
    assert_string_equal(later.msg, err.msg);
    assert_int_equal(mt_op_zero(dev, &(struct mt_zero){device, 64}, &later), rc);
    assert_int_equal(mt_event_record(dev, ev, MT_STREAM_COMPUTE, &later), rc);
    assert_int_equal(mt_event_sync(dev, ev, &later), rc);
}

/* With an argument: the tests whose names match that pattern. */
int main(int argc, char **argv)
{
    setenv("MT_EMU_DEVICES", "2", 0);
    unsetenv("CUDA_DEVICE_MAX_CONNECTIONS");
    cmocka_set_test_filter(argc > 1 ? argv[1] : NULL);
    return test_run();
}
