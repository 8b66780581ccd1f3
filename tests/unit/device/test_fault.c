/* SPDX-License-Identifier: Apache-2.0 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/mem.h"
#include "device/backend.h"

enum { BUDGET = 4 << 20, PART = 128 << 10, N_PARTS = 16, N = 4, C = 16, HEADS = 2, DIM = 8, BIG = 8192 };

/* One device and memory for the arguments of any operation. */
struct bench {
    mt_device *dev;
    char *mem;
    int32_t host_cu[2];
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

/* Small valid inputs everywhere: zeros, but for the two arrays that must ascend. */
static void open_bench(struct bench *b, mt_device *dev)
{
    static char zeros[(size_t)N_PARTS * PART];
    int32_t cu[2] = {0, N}, rows[N] = {0, 1, 2, 3};
    void *mem = NULL;
    b->dev = dev;
    b->host_cu[1] = N;
    assert_int_equal(mt_device_alloc(dev, sizeof(zeros), "test", &mem, NULL), 0);
    b->mem = mem;
    struct mt_copy c[] = {{mem, 0, zeros, 0, sizeof(zeros), 1},
                          {part(b, 14), 0, cu, 0, sizeof(cu), 1},
                          {part(b, 15), 0, rows, 0, sizeof(rows), 1}};
    for (size_t i = 0; i < MT_ARRAY_LEN(c); i++)
        assert_int_equal(mt_device_copy(dev, MT_STREAM_COMPUTE, &c[i], NULL), 0);
    assert_int_equal(mt_device_sync(dev, NULL), 0);
}

static int op_embedding(struct bench *b, struct mt_err *err)
{
    return mt_op_embedding(b->dev, &(struct mt_embedding){.n = N, .vocab = 8, .c = C, .dtype = MT_F32,
        .scale = 1, .ids = part(b, 15), .table = part(b, 0), .out = part(b, 1)}, err);
}

static int op_embedding_bwd(struct bench *b, struct mt_err *err)
{
    return mt_op_embedding_bwd(b->dev, &(struct mt_embedding_bwd){.n = N, .vocab = 8, .c = C, .n_runs = 1,
        .dtype = MT_F32, .scale = 1, .run_ids = part(b, 0), .starts = part(b, 14), .order = part(b, 15),
        .dout = part(b, 1), .dtable = part(b, 2)}, err);
}

static int op_rmsnorm(struct bench *b, struct mt_err *err)
{
    return mt_op_rmsnorm(b->dev, &(struct mt_rmsnorm){.n = N, .c = C, .dtype = MT_F32, .eps = 1e-6f,
        .x = part(b, 0), .w = part(b, 1), .y = part(b, 2), .rstd = part(b, 3)}, err);
}

static int op_rmsnorm_bwd(struct bench *b, struct mt_err *err)
{
    return mt_op_rmsnorm_bwd(b->dev, &(struct mt_rmsnorm_bwd){.n = N, .c = C, .dtype = MT_F32,
        .dy = part(b, 0), .x = part(b, 1), .w = part(b, 2), .rstd = part(b, 3), .dx = part(b, 4),
        .dw = part(b, 5), .workspace = part(b, 6)}, err);
}

static int op_gemm(struct bench *b, struct mt_err *err)
{
    return mt_op_gemm(b->dev, &(struct mt_gemm){.m = N, .n = C, .k = C, .dtype = MT_F32, .d_dtype = MT_F32,
        .a = part(b, 0), .b = part(b, 1), .lda = C, .ldb = C, .ldd = C, .d = part(b, 2)}, err);
}

static int op_bias_bwd(struct bench *b, struct mt_err *err)
{
    return mt_op_bias_bwd(b->dev, &(struct mt_bias_bwd){.n = N, .c = C, .ld = C, .dtype = MT_F32,
        .dy = part(b, 0), .db = part(b, 1), .workspace = part(b, 2)}, err);
}

static int op_qk_rope(struct bench *b, struct mt_err *err)
{
    size_t ld = 3 * HEADS * DIM;
    return mt_op_qk_rope(b->dev, &(struct mt_qk_rope){.n = N, .n_q = HEADS, .n_kv = HEADS, .head_dim = DIM,
        .rot = DIM, .dtype = MT_F32, .qkv = part(b, 0), .ld_qkv = ld, .qk = part(b, 0), .ld_qk = ld,
        .positions = part(b, 15), .cos_t = part(b, 1), .sin_t = part(b, 2), .max_pos = N}, err);
}

static int op_qk_rope_bwd(struct bench *b, struct mt_err *err)
{
    size_t ld = 3 * HEADS * DIM;
    return mt_op_qk_rope_bwd(b->dev, &(struct mt_qk_rope_bwd){.n = N, .n_q = HEADS, .n_kv = HEADS,
        .head_dim = DIM, .rot = DIM, .dtype = MT_F32, .dqk = part(b, 0), .ld_dqk = ld, .dqkv = part(b, 0),
        .ld_dqkv = ld, .positions = part(b, 15), .cos_t = part(b, 1), .sin_t = part(b, 2),
        .max_pos = N}, err);
}

static struct mt_attention attention(struct bench *b)
{
    size_t ld = HEADS * DIM;
    return (struct mt_attention){.n = N, .n_q = HEADS, .n_kv = HEADS, .head_dim = DIM, .n_docs = 1,
        .max_len = N, .dtype = MT_F32, .scale = 1, .cu_seqlens = part(b, 14), .cu_seqlens_host = b->host_cu,
        .q = part(b, 0), .k = part(b, 1), .v = part(b, 2), .ld_q = ld, .ld_k = ld, .ld_v = ld,
        .o = part(b, 3), .ld_o = ld, .lse = part(b, 4), .workspace = part(b, 10)};
}

static int op_attention(struct bench *b, struct mt_err *err)
{
    struct mt_attention a = attention(b);
    assert_true(mt_op_attention_workspace(b->dev, N, N, HEADS, HEADS, DIM, MT_F32) <= 4 * PART);
    return mt_op_attention(b->dev, &a, err);
}

static int op_attention_bwd(struct bench *b, struct mt_err *err)
{
    size_t ld = HEADS * DIM;
    return mt_op_attention_bwd(b->dev, &(struct mt_attention_bwd){.fwd = attention(b), .d_o = part(b, 5),
        .dq = part(b, 6), .dk = part(b, 7), .dv = part(b, 8), .ld_dq = ld, .ld_dk = ld, .ld_dv = ld}, err);
}

static int op_glu(struct bench *b, struct mt_err *err)
{
    return mt_op_glu(b->dev, &(struct mt_glu){.n = N, .f = C, .dtype = MT_F32, .gate_up = part(b, 0),
        .out = part(b, 1)}, err);
}

static int op_glu_bwd(struct bench *b, struct mt_err *err)
{
    return mt_op_glu_bwd(b->dev, &(struct mt_glu_bwd){.n = N, .f = C, .dtype = MT_F32,
        .gate_up = part(b, 0), .dout = part(b, 1), .dgate_up = part(b, 2)}, err);
}

static int op_cross_entropy(struct bench *b, struct mt_err *err)
{
    return mt_op_cross_entropy(b->dev, &(struct mt_cross_entropy){.n = N, .vocab = C, .ld = C,
        .dtype = MT_F32, .logits = part(b, 0), .targets = part(b, 15), .loss = part(b, 1)}, err);
}

static int op_gather_rows(struct bench *b, struct mt_err *err)
{
    return mt_op_gather_rows(b->dev, &(struct mt_rows){.n = N, .n_dst = N, .c = C, .dtype = MT_F32,
        .rows = part(b, 15), .src = part(b, 0), .dst = part(b, 1)}, err);
}

static int op_scatter_rows(struct bench *b, struct mt_err *err)
{
    return mt_op_scatter_rows(b->dev, &(struct mt_rows){.n = N, .n_dst = N, .c = C, .dtype = MT_F32,
        .rows = part(b, 15), .src = part(b, 0), .dst = part(b, 1)}, err);
}

static int op_add(struct bench *b, struct mt_err *err)
{
    return mt_op_add(b->dev, &(struct mt_add){.n = C, .dtype = MT_F32, .a = part(b, 0), .b = part(b, 1),
        .out = part(b, 2)}, err);
}

static int op_grad_cast(struct bench *b, struct mt_err *err)
{
    return mt_op_grad_cast(b->dev, &(struct mt_grad_cast){.n = C, .src = part(b, 0), .dst_dtype = MT_BF16,
        .dst = part(b, 1), .partials = part(b, 2)}, err);
}

static int op_join(struct bench *b, struct mt_err *err)
{
    return mt_op_join(b->dev, part(b, 0), BIG, err);
}

static int op_zero(struct bench *b, struct mt_err *err)
{
    return mt_op_zero(b->dev, part(b, 0), PART, err);
}

static int op_cast(struct bench *b, struct mt_err *err)
{
    return mt_op_cast(b->dev, &(struct mt_cast){.n = C, .src_dtype = MT_F32, .dst_dtype = MT_BF16,
        .src = part(b, 0), .dst = part(b, 1)}, err);
}

static const struct {
    const char *name;
    int (*submit)(struct bench *b, struct mt_err *err);
} ops[] = {
#define OP(name) {#name, op_##name}
    OP(embedding), OP(embedding_bwd), OP(rmsnorm), OP(rmsnorm_bwd), OP(gemm), OP(bias_bwd), OP(qk_rope),
    OP(qk_rope_bwd), OP(attention), OP(attention_bwd), OP(glu), OP(glu_bwd), OP(cross_entropy),
    OP(gather_rows), OP(scatter_rows), OP(add), OP(grad_cast), OP(join), OP(zero), OP(cast),
#undef OP
};
#define ONE(name, type) +1
_Static_assert(MT_ARRAY_LEN(ops) == MT_DEVICE_OPS(ONE), "every operation has its case");
#undef ONE

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
    mt_event *ev = NULL;
    int want = async ? 0 : -EIO;
    assert_int_equal(mt_event_create(b->dev, &ev, NULL), 0);
    for (size_t i = 0; i < MT_ARRAY_LEN(ops); i++)
        assert_int_equal(ops[i].submit(b, &err), want);
    for (int s = 0; s < MT_N_STREAMS; s++) {
        assert_int_equal(mt_event_record(b->dev, ev, (enum mt_stream)s, &err), want);
        assert_int_equal(mt_event_wait(b->dev, ev, (enum mt_stream)s, &err), want);
        assert_int_equal(mt_event_sync(b->dev, ev, &err), -EIO);
        assert_true(mt_event_time_ns(ev) > 0);
    }
    mt_event_destroy(&ev);
}

static void each_operation_fails_when_it_is_its_turn(void **state)
{
    (void)state;
    for (size_t i = 0; i < MT_ARRAY_LEN(ops); i++)
        for (int async = 0; async < 2; async++) {
            struct bench b = {0};
            struct mt_err err = {0};
            char what[64];
            snprintf(what, sizeof(what), "%s%s", async ? "async " : "", ops[i].name);
            open_bench(&b, open_fault(what, 3));
            for (int n = 1; n < 3; n++)
                for (size_t k = 0; k < MT_ARRAY_LEN(ops); k++) /* the others do not count */
                    assert_int_equal(ops[k].submit(&b, &err), 0);
            assert_int_equal(mt_device_sync(b.dev, &err), 0);
            assert_int_equal(ops[i].submit(&b, &err), async ? 0 : -EIO);
            expect_failed(b.dev, ops[i].name);
            expect_dead_but_firing(&b, async);
            mt_device_free(b.dev, b.mem);
            assert_int_equal(mt_device_bytes_used(b.dev), 0);
            mt_device_destroy(&b.dev);
        }
}

static void a_failed_copy_moves_nothing(void **state)
{
    (void)state;
    for (int async = 0; async < 2; async++) {
        struct bench b = {0};
        struct mt_err err = {0};
        float in[4] = {1, 2, 3, 4}, out[4] = {0};
        mt_device *dev = open_fault(async ? "async copy" : "copy", 4 + 2); /* open_bench() takes three */
        open_bench(&b, dev);
        assert_int_equal(copy(dev, MT_STREAM_H2D, part(&b, 0), in, sizeof(in), &err), 0);
        assert_int_equal(mt_device_sync(dev, &err), 0);
        assert_int_equal(copy(dev, MT_STREAM_D2H, out, part(&b, 0), 8, &err), 0);
        assert_int_equal(mt_device_sync(dev, &err), 0);
        assert_int_equal(copy(dev, MT_STREAM_D2H, out, part(&b, 0), sizeof(out), &err), async ? 0 : -EIO);
        expect_failed(dev, "copy 6");
        assert_int_equal(copy(dev, MT_STREAM_D2H, out, part(&b, 0), sizeof(out), &err), async ? 0 : -EIO);
        assert_int_equal(mt_device_sync(dev, &err), -EIO);
        assert_true(out[1] == 2 && out[2] == 0 && out[3] == 0);
        expect_dead_but_firing(&b, async);
        mt_device_free(dev, b.mem);
        mt_device_destroy(&dev);
    }
}

static void records_and_waits_fail_too(void **state)
{
    (void)state;
    static const char *const what[] = {"record", "wait", "async record", "async wait"};
    for (int k = 0; k < 4; k++) {
        struct bench b = {0};
        struct mt_err err = {0};
        mt_event *ev = NULL;
        mt_device *dev = open_fault(what[k], 2);
        open_bench(&b, dev);
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
        mt_device_free(dev, b.mem);
        mt_device_destroy(&dev);
    }
}

static void any_counts_all_submissions(void **state)
{
    (void)state;
    struct bench b = {0};
    mt_event *ev = NULL;
    mt_device *dev = open_fault("any", 3 + 4); /* open_bench() makes three */
    open_bench(&b, dev);
    assert_int_equal(mt_event_create(dev, &ev, NULL), 0);
    assert_int_equal(op_zero(&b, NULL), 0);
    assert_int_equal(mt_event_record(dev, ev, MT_STREAM_COMPUTE, NULL), 0);
    assert_int_equal(mt_event_wait(dev, ev, MT_STREAM_D2H, NULL), 0);
    assert_int_equal(op_gemm(&b, NULL), -EIO);
    expect_failed(dev, "any 7");
    mt_event_destroy(&ev);
    mt_device_free(dev, b.mem);
    mt_device_destroy(&dev);
}

static void a_refused_resource_is_refused_once(void **state)
{
    (void)state;
    struct mt_err err = {0};
    void *a = NULL, *b = NULL;
    char host[64];
    mt_event *ev = NULL;
    mt_device *dev = open_fault("alloc", 2);
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
    mt_device_destroy(&dev);
}

static void what_cannot_fail_is_an_error(void **state)
{
    (void)state;
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
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(each_operation_fails_when_it_is_its_turn),
        cmocka_unit_test(a_failed_copy_moves_nothing),
        cmocka_unit_test(records_and_waits_fail_too),
        cmocka_unit_test(any_counts_all_submissions),
        cmocka_unit_test(a_refused_resource_is_refused_once),
        cmocka_unit_test(what_cannot_fail_is_an_error),
    };
    alarm(100); /* a hang is a failure */
    return cmocka_run_group_tests(tests, NULL, NULL);
}
