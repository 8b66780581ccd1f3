/* SPDX-License-Identifier: Apache-2.0 */
#include <stdlib.h>
#include <string.h>
#include <dirent.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/mem.h"
#include "device/device.h"
#include "device/ops.h"
#include "kinds/kinds.h"
#include "test.h"

enum { N = 1 << 16, ROUNDS = 200 };

static mt_device *open_cpu(double link_gbps)
{
    mt_device *dev = NULL;
    struct mt_device_params p = {.kind = "cpu", .budget_bytes = 16 << 20, .n_threads = 2,
                                 .link_gbps = link_gbps};
    assert_int_equal(mt_device_create(&dev, &p, NULL), 0);
    return dev;
}

static void *buffer(mt_device *dev, size_t bytes)
{
    void *p = NULL;
    assert_int_equal(mt_device_alloc(dev, bytes, "test", &p, NULL), 0);
    return p;
}

static mt_event *event(mt_device *dev)
{
    mt_event *ev = NULL;
    assert_int_equal(mt_event_create(dev, &ev, NULL), 0);
    return ev;
}

static void copy(mt_device *dev, enum mt_stream s, void *dst, const void *src, size_t n)
{
    assert_int_equal(mt_device_copy(dev, s, &(struct mt_copy){dst, n, src, n, n, 1}, NULL), 0);
}

/* The thread of this process that is called so, or 0. */
static pid_t thread_named(const char *name)
{
    pid_t found = 0;
    DIR *tasks = opendir("/proc/self/task");
    for (struct dirent *e; tasks && (e = readdir(tasks));) {
        char path[300], comm[32] = "";
        snprintf(path, sizeof(path), "/proc/self/task/%s/comm", e->d_name);
        FILE *f = fopen(path, "re");
        if (f && fgets(comm, sizeof(comm), f) && !strncmp(comm, name, strlen(name)))
            found = atoi(e->d_name);
        if (f)
            fclose(f);
    }
    closedir(tasks);
    return found;
}

struct cpus {
    int n;
    bool has; /* a given one */
};

/* The CPUs that a stream's thread of a device may run on, and whether `cpu` is one of them. */
static struct cpus cpus_of(const char *stream, int n_threads, const int *cpus, int cpu)
{
    MT_CLOSED_BY(mt_device_destroy) mt_device *dev = NULL;
    cpu_set_t set;
    struct mt_device_params p = {.kind = "cpu", .budget_bytes = 1 << 20, .n_threads = n_threads, .cpus = cpus};
    assert_int_equal(mt_device_create(&dev, &p, NULL), 0);
    assert_int_equal(mt_device_sync(dev, NULL), 0); /* the thread has begun */
    pid_t thread = thread_named(stream);
    assert_true(thread > 0);
    assert_int_equal(sched_getaffinity(thread, sizeof(set), &set), 0);
    return (struct cpus){CPU_COUNT(&set), CPU_ISSET(cpu, &set)};
}

TEST(the_compute_stream_is_bound_where_its_helpers_are)
{
    static const char *const names[] = {"mt-compute", "mt-h2d", "mt-d2h"};
    cpu_set_t all;
    int cpu = 0;
    assert_int_equal(sched_getaffinity(0, sizeof(all), &all), 0);
    while (!CPU_ISSET(cpu, &all))
        cpu++;
    const int cpus[] = {cpu, cpu}, n = CPU_COUNT(&all);
    for (int i = 0; i < 3; i++) { /* copies keep off its core, if there is another */
        bool compute = i == 0;
        struct cpus c = cpus_of(names[i], 2, cpus, cpu);
        assert_int_equal(c.n, compute || n == 1 ? 1 : n - 1);
        assert_true(c.has == (compute || n == 1));
        c = cpus_of(names[i], 2, NULL, cpu);
        assert_int_equal(c.n, n);
        c = cpus_of(names[i], 1, cpus, cpu); /* alone it goes where there is room */
        assert_int_equal(c.n, n);
    }
}

TEST(a_stream_keeps_its_order)
{
    MT_CLOSED_BY(mt_device_destroy) mt_device *dev = open_cpu(0);
    int32_t in[ROUNDS], out = -1, *slot = buffer(dev, sizeof(int32_t));
    for (int i = 0; i < ROUNDS; i++) {
        in[i] = i;
        copy(dev, MT_STREAM_COMPUTE, slot, &in[i], 4);
    }
    copy(dev, MT_STREAM_COMPUTE, &out, slot, 4);
    assert_int_equal(mt_device_sync(dev, NULL), 0);
    assert_int_equal(out, ROUNDS - 1);
}

/* A ring of one slot: in, through the compute stream, out; only events keep it right. */
TEST(events_order_the_streams)
{
    mt_device *dev = open_cpu(0);
    float *in = malloc(N * 4), *out = malloc(N * 4), *slot = buffer(dev, N * 4), *sum = buffer(dev, N * 4);
    mt_event *loaded = event(dev), *used = event(dev), *stored = event(dev);
    for (int r = 0; r < 50; r++) {
        assert_int_equal(mt_event_sync(dev, stored, NULL), 0);
        for (int i = 0; r && i < N; i += 997)
            assert_true(out[i] == 2 * (float)(r - 1 + i));
        assert_int_equal(mt_event_sync(dev, loaded, NULL), 0); /* `in` is read no more */
        for (int i = 0; i < N; i++)
            in[i] = (float)(r + i);
        assert_int_equal(mt_event_wait(dev, used, MT_STREAM_H2D, NULL), 0);
        copy(dev, MT_STREAM_H2D, slot, in, N * 4);
        assert_int_equal(mt_event_record(dev, loaded, MT_STREAM_H2D, NULL), 0);
        assert_int_equal(mt_event_wait(dev, loaded, MT_STREAM_COMPUTE, NULL), 0);
        assert_int_equal(mt_event_wait(dev, stored, MT_STREAM_COMPUTE, NULL), 0);
        struct mt_add a = {N, MT_F32, slot, slot, sum};
        assert_int_equal(mt_op_add(dev, &a, NULL), 0);
        assert_int_equal(mt_event_record(dev, used, MT_STREAM_COMPUTE, NULL), 0);
        assert_int_equal(mt_event_wait(dev, used, MT_STREAM_D2H, NULL), 0);
        copy(dev, MT_STREAM_D2H, out, sum, N * 4);
        assert_int_equal(mt_event_record(dev, stored, MT_STREAM_D2H, NULL), 0);
    }
    assert_int_equal(mt_device_sync(dev, NULL), 0);
    mt_event_destroy(&loaded);
    mt_event_destroy(&used);
    mt_event_destroy(&stored);
    mt_device_destroy(&dev);
    free(in);
    free(out);
}

TEST(an_event_never_recorded_is_no_wait)
{
    MT_CLOSED_BY(mt_device_destroy) mt_device *dev = open_cpu(0);
    MT_CLOSED_BY(mt_event_destroy) mt_event *ev = event(dev);
    assert_int_equal(mt_event_wait(dev, ev, MT_STREAM_COMPUTE, NULL), 0);
    assert_int_equal(mt_event_sync(dev, ev, NULL), 0);
    assert_int_equal(mt_event_time_ns(ev), 0);
    assert_int_equal(mt_event_record(dev, ev, MT_STREAM_COMPUTE, NULL), 0);
    assert_int_equal(mt_event_sync(dev, ev, NULL), 0);
    assert_true(mt_event_time_ns(ev) > 0);
    mt_event_destroy(&ev);
    assert_null(ev);
}

TEST(a_wait_is_for_the_newest_record)
{
    mt_device *dev = open_cpu(0.05); /* 1 MB takes 20 ms */
    size_t n = 1 << 20;
    char *in = calloc(2, n), *out = calloc(1, n), *slot = buffer(dev, n);
    mt_event *ev = event(dev);
    memset(in + n, 7, n);
    copy(dev, MT_STREAM_H2D, slot, in, n);
    assert_int_equal(mt_event_record(dev, ev, MT_STREAM_H2D, NULL), 0);
    copy(dev, MT_STREAM_H2D, slot, in + n, n);
    assert_int_equal(mt_event_record(dev, ev, MT_STREAM_H2D, NULL), 0);
    assert_int_equal(mt_event_wait(dev, ev, MT_STREAM_COMPUTE, NULL), 0);
    copy(dev, MT_STREAM_COMPUTE, out, slot, n);
    assert_int_equal(mt_device_sync(dev, NULL), 0);
    assert_memory_equal(out, in + n, n);
    mt_event_destroy(&ev);
    mt_device_destroy(&dev);
    free(in);
    free(out);
}

/* Far more than the ring of commands holds, behind a copy that takes a while. */
TEST(a_full_queue_blocks_and_goes_on)
{
    mt_device *dev = open_cpu(0.1);
    size_t n = 1 << 20;
    char *in = calloc(1, n), *slot = buffer(dev, n);
    int32_t *counters = buffer(dev, 4096 * 4), *got = calloc(4096, 4), one[4096];
    copy(dev, MT_STREAM_H2D, slot, in, n);
    for (int i = 0; i < 4096; i++) {
        one[i] = i;
        copy(dev, MT_STREAM_H2D, counters + i, &one[i], 4);
    }
    assert_int_equal(mt_device_sync(dev, NULL), 0);
    copy(dev, MT_STREAM_D2H, got, counters, 4096 * 4);
    assert_int_equal(mt_device_sync(dev, NULL), 0);
    assert_memory_equal(got, one, sizeof(one));
    mt_device_destroy(&dev);
    free(in);
    free(got);
}

TEST(copies_with_pitch_move_their_rows_alone)
{
    MT_CLOSED_BY(mt_device_destroy) mt_device *dev = open_cpu(0);
    char in[8 * 10], out[8 * 10], *slot = buffer(dev, 8 * 16);
    for (size_t i = 0; i < sizeof(in); i++)
        in[i] = (char)i;
    memset(out, -1, sizeof(out));
    assert_int_equal(mt_device_copy(dev, MT_STREAM_H2D, &(struct mt_copy){slot, 16, in, 10, 7, 8}, NULL), 0);
    assert_int_equal(mt_device_sync(dev, NULL), 0);
    assert_int_equal(mt_device_copy(dev, MT_STREAM_D2H, &(struct mt_copy){out, 10, slot, 16, 7, 8}, NULL), 0);
    assert_int_equal(mt_device_sync(dev, NULL), 0);
    for (int r = 0; r < 8; r++)
        for (int c = 0; c < 10; c++)
            assert_int_equal(out[r * 10 + c], c < 7 ? in[r * 10 + c] : -1);
    struct mt_err err = {0};
    assert_int_equal(mt_device_copy(dev, MT_STREAM_H2D, &(struct mt_copy){slot, 6, in, 10, 7, 8}, &err), -EINVAL);
    assert_int_equal(mt_device_copy(dev, MT_STREAM_H2D, &(struct mt_copy){NULL, 8, in, 8, 7, 1}, &err), -EINVAL);
    assert_int_equal(mt_device_copy(dev, MT_STREAM_H2D, &(struct mt_copy){slot, 0, in, 0, 0, 1}, &err), 0);
}

/* What a link of that rate cannot be faster than; how much slower this machine makes it is not asserted. */
TEST(a_throttled_link_is_never_faster_than_its_rate)
{
    double gbps = 0.2;
    mt_device *dev = open_cpu(gbps);
    size_t n = 4 << 20;
    char *in = calloc(1, n), *out = calloc(1, n), *up = buffer(dev, n), *down = buffer(dev, n);
    mt_event *ev[2] = {event(dev), event(dev)};
    int64_t t0 = mt_now_ns();
    copy(dev, MT_STREAM_H2D, up, in, n);
    assert_int_equal(mt_event_record(dev, ev[0], MT_STREAM_H2D, NULL), 0);
    copy(dev, MT_STREAM_D2H, out, down, n);
    assert_int_equal(mt_event_record(dev, ev[1], MT_STREAM_D2H, NULL), 0);
    assert_int_equal(mt_device_sync(dev, NULL), 0);
    for (int i = 0; i < 2; i++)
        assert_true(mt_event_time_ns(ev[i]) - t0 >= (int64_t)((double)n / gbps));
    t0 = mt_now_ns(); /* the compute stream is not held back: 32 MB would take 160 ms on the link */
    for (int i = 0; i < 8; i++)
        copy(dev, MT_STREAM_COMPUTE, up, in, n);
    assert_int_equal(mt_device_sync(dev, NULL), 0);
    print_message("8 copies on the compute stream: %.1f ms\n", (double)(mt_now_ns() - t0) * 1e-6);
    mt_event_destroy(&ev[0]);
    mt_event_destroy(&ev[1]);
    mt_device_destroy(&dev);
    free(in);
    free(out);
}

struct feeder {
    mt_device *dev;
    enum mt_stream s;
    mt_event *mine, *other;
    char *slot, *host;
};

static void *feed(void *arg)
{
    struct feeder *f = arg;
    for (int i = 0; i < ROUNDS; i++) {
        copy(f->dev, f->s, f->s == MT_STREAM_D2H ? f->host : f->slot, f->s == MT_STREAM_D2H ? f->slot : f->host, 64);
        if (mt_event_record(f->dev, f->mine, f->s, NULL) || mt_event_sync(f->dev, f->mine, NULL))
            abort();
    }
    return NULL;
}

TEST(each_stream_may_have_its_own_thread)
{
    MT_CLOSED_BY(mt_device_destroy) mt_device *dev = open_cpu(0);
    pthread_t t[MT_N_STREAMS];
    struct feeder f[MT_N_STREAMS];
    static char host[MT_N_STREAMS][64];
    for (int s = 0; s < MT_N_STREAMS; s++) {
        f[s] = (struct feeder){dev, (enum mt_stream)s, event(dev), NULL, buffer(dev, 64), host[s]};
        assert_int_equal(pthread_create(&t[s], NULL, feed, &f[s]), 0);
    }
    for (int s = 0; s < MT_N_STREAMS; s++) {
        assert_int_equal(pthread_join(t[s], NULL), 0);
        mt_event_destroy(&f[s].mine);
    }
}

TEST(bad_parameters_are_refused)
{
    MT_CLOSED_BY(mt_device_destroy) mt_device *dev = NULL;
    struct mt_err err = {0};
    struct mt_device_params p = {.kind = "gpu", .budget_bytes = 1 << 20, .n_threads = 1};
    assert_int_equal(mt_device_create(&dev, &p, &err), -EINVAL);
    assert_non_null(strstr(err.msg, "\"gpu\""));
    p.kind = "cpu";
    p.n_threads = 0;
    assert_int_equal(mt_device_create(&dev, &p, &err), -EINVAL);
    p.n_threads = 1;
    p.link_gbps = -1;
    assert_int_equal(mt_device_create(&dev, &p, &err), -EINVAL);
    assert_null(dev);
}

int main(void)
{
    alarm(100);
    return test_run();
}
