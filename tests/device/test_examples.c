/* SPDX-License-Identifier: Apache-2.0 */
/* What holds for every operation of the table, by the examples of its own row. */
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "device/op.h"
#include "harness.h"

enum { MAX_TAKEN = 24 };

struct taken {
    struct harness *h;
    struct {
        struct dbuf *buf;
        unsigned use;
        double *before;
    } of[MAX_TAKEN];
    int n;
};

static const struct mt_op_sizes sizes = {{
    [MT_SIZE_ROWS] = 36, [MT_SIZE_HIDDEN] = 24, [MT_SIZE_FFN] = 48, [MT_SIZE_LOSS_ROWS] = 19, [MT_SIZE_VOCAB] = 320,
    [MT_SIZE_RUNS] = 11, [MT_SIZE_HEADS] = 4, [MT_SIZE_KV_HEADS] = 2, [MT_SIZE_ALL_HEADS] = 3,
    [MT_SIZE_HEAD_DIM] = 16, [MT_SIZE_LENGTH] = 13, [MT_SIZE_ELEMENTS] = MT_JOIN_BLOCK,
    [MT_SIZE_EXPERTS] = 12, [MT_SIZE_TOP_K] = 3}};

/* Guarded; what is to be overwritten holds NaN, what is read values that are sane as f32 and as pairs of bf16. */
static void *take(void *ctx, unsigned use, enum mt_dtype dtype, size_t n)
{
    struct taken *t = ctx;
    double *values;
    buf_random(t->h, MT_BF16, n, 1, &values);
    struct dbuf *b = use & MT_TAKE_READ ? buf_values(t->h, dtype, n, values) : buf_nan(t->h, dtype, n);
    t->of[t->n].buf = b;
    t->of[t->n++].use = use;
    return b->p;
}

static void fail(struct harness *h, const struct mt_metered *m, const char *what)
{
    char text[160];
    snprintf(text, sizeof(text), "%s %u: %s", mt_metered_name(m), m->flags, what);
    must(h, text, -EINVAL, &(struct mt_err){.msg = "by the example of its row"});
}

static void check_buffers(struct harness *h, const struct mt_metered *m, struct taken *t)
{
    for (int i = 0; i < t->n; i++) {
        size_t n = t->of[i].buf->n;
        double *v = t->of[i].use ? buf_get(h, t->of[i].buf) : NULL; /* a workspace may hold anything */
        bool nan = false;
        for (size_t k = 0; v && k < n; k++)
            nan |= isnan(v[k]);
        if (nan)
            fail(h, m, "an output has NaN in it, or not all of it was written");
        if (t->of[i].before && memcmp(v, t->of[i].before, n * sizeof(*v)))
            fail(h, m, "wrote an input");
    }
}

/* What it says that it moves is about what its buffers hold. */
static void check_cost(struct harness *h, const struct mt_metered *want, const void *args, const struct taken *t)
{
    struct mt_metered got;
    double traffic = 0;
    for (int i = 0; i < t->n; i++)
        for (unsigned way = MT_TAKE_READ; way <= MT_TAKE_WRITE; way *= 2)
            if (t->of[i].use & way)
                traffic += (double)(t->of[i].buf->n * mt_dtype_size(t->of[i].buf->dtype));
    mt_dev_op_cost(want->op, args, &got);
    if (got.op != want->op || got.variant != want->variant || got.dtype != want->dtype || got.flags != want->flags ||
        got.n_dims != want->n_dims || memcmp(got.dim, want->dim, sizeof(got.dim)))
        fail(h, want, "its cost is of another shape than its example");
    if (!(got.bytes > 0.4 * traffic && got.bytes < 2.1 * traffic))
        fail(h, want, "its cost in bytes is not that of its buffers");
    if ((mt_dev_op(want->op)->bound == MT_BOUND_BYTES) != (got.flops == 0))
        fail(h, want, "memory-bound operations have no flops, others have");
}

static void run_example(struct harness *h, const struct mt_metered *m)
{
    struct taken t = {.h = h};
    struct mt_err err = {0};
    MT_CLOSED_BY(mt_example_destroy) mt_example *x = NULL;
    must(h, mt_metered_name(m), mt_example_create(&x, &(struct mt_example_params){
                                    .dev = h->dev, .shape = *m, .take = take, .ctx = &t}, &err), &err);
    if (!x)
        return;
    for (int i = 0; i < t.n; i++)
        if (t.of[i].use & MT_TAKE_READ && !(t.of[i].use & MT_TAKE_WRITE))
            t.of[i].before = buf_get(h, t.of[i].buf);
    int rc = mt_example_submit(x, &err);
    must(h, mt_metered_name(m), rc, &err);
    must(h, "sync", mt_device_sync(h->dev, &err), &err);
    check_buffers(h, m, &t);
    check_cost(h, m, mt_example_args(x), &t);
}

DEVICE_TEST(every_operation_keeps_to_its_buffers)
{
    struct mt_metered m;
    int n = 0;
    for (int op = 0; op < MT_N_DEV_OPS; op++)
        for (unsigned which = 0; !mt_metered_example(&m, (enum mt_dev_op)op, which, &sizes, h->dtype); which++, n++)
            run_example(h, &m);
    if (n < MT_N_DEV_OPS)
        must(h, "examples", -EINVAL, &(struct mt_err){.msg = "an operation has none"});
}

/* Groups of Mamba 2, which are wider than a head may be where the norm is first. */
DEVICE_TEST(a_wide_group_has_an_example)
{
    const enum mt_dev_op ops[] = {MT_DEV_GATED_NORM, MT_DEV_GATED_NORM_BWD};
    for (size_t i = 0; i < MT_ARRAY_LEN(ops); i++) {
        struct mt_metered m = {.op = ops[i], .dtype = h->dtype, .flags = MT_METER_PLAIN, .n_dims = 3, .dim = {5, 2, 1280}};
        run_example(h, &m);
    }
}

DEVICE_TEST(a_document_that_goes_on_has_an_example)
{
    const enum mt_dev_op ops[] = {MT_DEV_ATTENTION, MT_DEV_ATTENTION_BWD};
    for (size_t i = 0; i < MT_ARRAY_LEN(ops); i++) {
        struct mt_metered m = {.op = ops[i], .dtype = h->dtype, .n_dims = 6, .dim = {2, 2 * 50 + 2 + 1, 4, 2, 64, 64}};
        run_example(h, &m);
    }
}

DEVICE_TEST(every_operation_refuses_null)
{
    for (int i = 0; i < MT_N_DEV_OPS; i++) {
        const struct mt_op *op = mt_dev_op((enum mt_dev_op)i);
        char *args = (char *)scratch(h, op->args_bytes / sizeof(double) + 1);
        size_t one = 1;
        memcpy(args + op->count, &one, sizeof(one));
        expect_rejected(h, mt_dev_op_name((enum mt_dev_op)i), mt_device_submit(h->dev, (enum mt_dev_op)i, args, NULL));
    }
}
