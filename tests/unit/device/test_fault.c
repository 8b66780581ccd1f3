/* SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/mem.h"
#include "device/op.h"
#include "device_fault.h"
#include "kinds/kinds.h"
#include "test.h"

enum { BUDGET = 4 << 20, PART = 4096, N_PARTS = 4 };

/* A device that breaks, every operation with arguments for it, and some memory. The arguments were made past the device,
 * by the one it wraps: that does not count. */
struct bench {
    mt_device *dev;
    char *mem;
    mt_example *example[MT_N_DEV_OPS];
};

static void *part(struct bench *b, int i)
{
    return b->mem + (size_t)i * PART;
}

static mt_device *open_cpu(void)
{
    mt_device *dev = NULL;
    struct mt_device_params p = {.kind = "cpu", .budget_bytes = BUDGET, .n_threads = 2};
    assert_int_equal(mt_device_create(&dev, &p, NULL), 0);
    return dev;
}

static mt_device *open_fault(const char *what, int64_t nth)
{
    mt_device *dev = NULL;
    assert_int_equal(mt_device_create_fault(&dev, open_cpu(), what, nth, NULL), 0);
    return dev;
}

static void open_bench(struct bench *b, const char *what, int64_t nth)
{
    static const struct mt_op_sizes sizes = {{
        [MT_SIZE_ROWS] = 4, [MT_SIZE_HIDDEN] = 16, [MT_SIZE_FFN] = 8, [MT_SIZE_LOSS_ROWS] = 4,
        [MT_SIZE_VOCAB] = 16, [MT_SIZE_RUNS] = 2, [MT_SIZE_HEADS] = 2, [MT_SIZE_KV_HEADS] = 2,
        [MT_SIZE_ALL_HEADS] = 4, [MT_SIZE_HEAD_DIM] = 8, [MT_SIZE_LENGTH] = 5, [MT_SIZE_ELEMENTS] = 64,
        [MT_SIZE_EXPERTS] = 4, [MT_SIZE_TOP_K] = 2}};
    mt_device *cpu = open_cpu();
    void *mem = NULL;
    for (int op = 0; op < MT_N_DEV_OPS; op++) {
        struct mt_example_params p = {.dev = cpu};
        assert_int_equal(mt_metered_example(&p.shape, (enum mt_dev_op)op, 0, &sizes, MT_F32), 0);
        assert_int_equal(mt_example_create(&b->example[op], &p, NULL), 0);
    }
    assert_int_equal(mt_device_alloc(cpu, (size_t)N_PARTS * PART, "test", &mem, NULL), 0);
    b->mem = mem;
    assert_int_equal(mt_device_create_fault(&b->dev, cpu, what, nth, NULL), 0);
}

static void close_bench(struct bench *b)
{
    for (int op = 0; op < MT_N_DEV_OPS; op++)
        mt_example_destroy(&b->example[op]);
    mt_device_free(b->dev, b->mem);
    assert_int_equal(mt_device_bytes_used(b->dev), 0);
    mt_device_destroy(&b->dev);
}

static int submit(struct bench *b, int op, struct mt_err *err)
{
    return mt_device_submit(b->dev, (enum mt_dev_op)op, mt_example_args(b->example[op]), err);
}

static int copy(mt_device *dev, enum mt_stream s, void *dst, const void *src, size_t n, struct mt_err *err)
{
    return mt_device_copy(dev, s, &(struct mt_copy){dst, n, src, n, n, 1}, err);
}

static void expect_failed(mt_device *dev, const char *word)
{
    struct mt_err err = {0};
    assert_int_equal(mt_device_status(dev, &err), -EIO);
    assert_int_equal(err.kind, MT_ERR_DEVICE);
    assert_int_equal(err.code, -EIO);
    assert_non_null(strstr(err.msg, word));
    assert_int_equal(mt_device_sync(dev, &err), -EIO);
}

/* After the error: work is refused, an event that is recorded fires all the same. */
static void expect_dead_but_firing(struct bench *b, bool async)
{
    struct mt_err err = {0};
    MT_CLOSED_BY(mt_event_destroy) mt_event *ev = NULL;
    int want = async ? 0 : -EIO;
    assert_int_equal(mt_event_create(b->dev, &ev, NULL), 0);
    for (int op = 0; op < MT_N_DEV_OPS; op++)
        assert_int_equal(submit(b, op, &err), want);
    for (int s = 0; s < MT_N_STREAMS; s++) {
        assert_int_equal(mt_event_record(b->dev, ev, (enum mt_stream)s, &err), want);
        assert_int_equal(mt_event_wait(b->dev, ev, (enum mt_stream)s, &err), want);
        assert_int_equal(mt_event_sync(b->dev, ev, &err), -EIO);
        assert_true(mt_event_time_ns(ev) > 0);
    }
}

TEST(each_operation_fails_when_it_is_its_turn)
{
    for (int op = 0; op < MT_N_DEV_OPS; op++)
        for (int async = 0; async < 2; async++) {
            struct bench b = {0};
            struct mt_err err = {0};
            char what[64];
            snprintf(what, sizeof(what), "%s%s", async ? "async " : "", mt_dev_op_name((enum mt_dev_op)op));
            open_bench(&b, what, 3);
            for (int n = 1; n < 3; n++)
                for (int k = 0; k < MT_N_DEV_OPS; k++) /* the others do not count */
                    assert_int_equal(submit(&b, k, &err), 0);
            assert_int_equal(mt_device_sync(b.dev, &err), 0);
            assert_int_equal(submit(&b, op, &err), async ? 0 : -EIO);
            expect_failed(b.dev, mt_dev_op_name((enum mt_dev_op)op));
            expect_dead_but_firing(&b, async);
            close_bench(&b);
        }
}

TEST(a_failed_copy_moves_nothing)
{
    for (int async = 0; async < 2; async++) {
        struct bench b = {0};
        struct mt_err err = {0};
        float in[4] = {1, 2, 3, 4}, out[4] = {0};
        open_bench(&b, async ? "async copy" : "copy", 3);
        mt_device *dev = b.dev;
        assert_int_equal(copy(dev, MT_STREAM_H2D, part(&b, 0), in, sizeof(in), &err), 0);
        assert_int_equal(mt_device_sync(dev, &err), 0);
        assert_int_equal(copy(dev, MT_STREAM_D2H, out, part(&b, 0), 8, &err), 0);
        assert_int_equal(mt_device_sync(dev, &err), 0);
        assert_int_equal(copy(dev, MT_STREAM_D2H, out, part(&b, 0), sizeof(out), &err), async ? 0 : -EIO);
        expect_failed(dev, "copy 3");
        assert_int_equal(copy(dev, MT_STREAM_D2H, out, part(&b, 0), sizeof(out), &err), async ? 0 : -EIO);
        assert_int_equal(mt_device_sync(dev, &err), -EIO);
        assert_true(out[1] == 2 && out[2] == 0 && out[3] == 0);
        expect_dead_but_firing(&b, async);
        close_bench(&b);
    }
}

static void count_call(void *ctx)
{
    ++*(int *)ctx;
}

TEST(a_failed_call_does_not_run)
{
    for (int async = 0; async < 2; async++) {
        struct bench b = {0};
        struct mt_err err = {0};
        int calls = 0;
        open_bench(&b, async ? "async call" : "call", 2);
        assert_int_equal(mt_device_call(b.dev, count_call, &calls, &err), 0);
        assert_int_equal(mt_device_call(b.dev, count_call, &calls, &err), async ? 0 : -EIO);
        expect_failed(b.dev, "call 2");
        assert_int_equal(calls, 1);
        expect_dead_but_firing(&b, async);
        close_bench(&b);
    }
}

TEST(records_and_waits_fail_too)
{
    static const char *const what[] = {"record", "wait", "async record", "async wait"};
    for (int k = 0; k < 4; k++) {
        struct bench b = {0};
        struct mt_err err = {0};
        mt_event *ev = NULL;
        open_bench(&b, what[k], 2);
        mt_device *dev = b.dev;
        assert_int_equal(mt_event_create(dev, &ev, NULL), 0);
        int rc = 0;
        for (int n = 0; n < 2; n++) {
            assert_int_equal(rc, 0);
            rc = mt_event_record(dev, ev, MT_STREAM_COMPUTE, &err);
            if (!rc)
                rc = mt_event_wait(dev, ev, MT_STREAM_H2D, &err);
        }
        assert_int_equal(rc, k < 2 ? -EIO : 0);
        expect_failed(dev, k % 2 ? "wait 2" : "record 2");
        expect_dead_but_firing(&b, k >= 2);
        mt_event_destroy(&ev);
        close_bench(&b);
    }
}

TEST(any_counts_all_submissions)
{
    struct bench b = {0};
    mt_event *ev = NULL;
    open_bench(&b, "any", 4);
    mt_device *dev = b.dev;
    assert_int_equal(mt_event_create(dev, &ev, NULL), 0);
    assert_int_equal(submit(&b, MT_DEV_ZERO, NULL), 0);
    assert_int_equal(mt_event_record(dev, ev, MT_STREAM_COMPUTE, NULL), 0);
    assert_int_equal(mt_event_wait(dev, ev, MT_STREAM_D2H, NULL), 0);
    assert_int_equal(submit(&b, MT_DEV_GEMM, NULL), -EIO);
    expect_failed(dev, "any 4");
    mt_event_destroy(&ev);
    close_bench(&b);
}

TEST(a_refused_resource_is_refused_once)
{
    struct mt_err err = {0};
    void *a = NULL, *b = NULL;
    char host[64];
    mt_event *ev = NULL;
    MT_CLOSED_BY(mt_device_destroy) mt_device *dev = open_fault("alloc", 2);
    assert_int_equal(mt_device_alloc(dev, 256, "a", &a, &err), 0);
    assert_int_equal(mt_device_alloc(dev, 256, "b", &b, &err), -ENOMEM);
    assert_int_equal(err.kind, MT_ERR_NO_FIT);
    assert_null(b);
    assert_int_equal(mt_device_alloc(dev, 256, "b", &b, &err), 0);
    assert_int_equal(mt_device_status(dev, &err), 0);
    assert_int_equal(mt_device_bytes_used(dev), 512);
    mt_device_free(dev, a);
    mt_device_free(dev, b);
    mt_device_destroy(&dev);

    dev = open_fault("event", 1);
    assert_int_equal(mt_event_create(dev, &ev, &err), -ENOMEM);
    assert_null(ev);
    assert_int_equal(mt_event_create(dev, &ev, &err), 0);
    mt_event_destroy(&ev);
    mt_device_destroy(&dev);

    dev = open_fault("register", 1);
    assert_int_equal(mt_device_register_host(dev, host, sizeof(host), &err), -ENOMEM);
    assert_int_equal(mt_device_register_host(dev, host, sizeof(host), &err), 0);
    mt_device_unregister_host(dev, host);
}

TEST(what_cannot_fail_is_an_error)
{
    static const char *const bad[] = {"", "nothing", "async alloc", "async ", "gemms"};
    mt_device *cpu = open_cpu(), *dev = NULL;
    for (size_t i = 0; i < MT_ARRAY_LEN(bad); i++)
        assert_int_equal(mt_device_create_fault(&dev, cpu, bad[i], 1, NULL), -EINVAL);
    assert_int_equal(mt_device_create_fault(&dev, cpu, "gemm", 0, NULL), -EINVAL);
    assert_null(dev);
    mt_device_destroy(&cpu); /* still ours */
}

int main(void)
{
    alarm(300); /* a hang is a failure; sanitizers take minutes */
    return test_run();
}
