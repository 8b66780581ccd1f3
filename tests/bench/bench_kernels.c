/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Time and bandwidth of the memory-bound operations, beside a plain copy inside the device measured in the
 * same run:
 *
 *   bench_kernels [KIND [ONLY]]      device kind (cpu), operations whose name has ONLY in it
 *
 * Every operation of the table is timed in each of its variants, on the arguments of its own row (device/op.h), and
 * GB/s counts what it says that it must move. Some more follow that the planner does not tell apart. Shapes are those
 * of a 7B model on a GPU, of a small one on the cpu. Products and attention are bench_peak.c's.
 *
 * Then ratios of a mixture of experts, beside their targets: products of experts over one product of all their rows,
 * gathering and combining rows over a copy of as many bytes, in the caches and beyond them. Both sides of a ratio run in
 * turns, since the speed of a shared machine varies.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "bench.h"

#include "base/mem.h"
#include "base/philox.h"
#include "device/op.h"
#include "kinds/kinds.h"

enum { SAMPLES = 9, CALLS = 4 };

struct bench {
    mt_device *dev;
    struct mt_op_sizes sizes;
    enum mt_dtype dtype;
    const char *only;
    double copy_gbps;
};

/* --- measuring ---------------------------------------------------------------------------------- */

typedef int (*submission)(mt_device *dev, void *ctx, struct mt_err *err);

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Median seconds of a call; warm. */
static double time_of(mt_device *dev, submission submit, void *ctx)
{
    double seconds[SAMPLES];
    mt_event *from = NULL, *to = NULL;
    RUN(mt_event_create, dev, &from);
    RUN(mt_event_create, dev, &to);
    for (int s = -1; s < SAMPLES; s++) {
        RUN(mt_event_record, dev, from, MT_STREAM_COMPUTE);
        for (int i = 0; i < CALLS; i++)
            RUN(submit, dev, ctx);
        RUN(mt_event_record, dev, to, MT_STREAM_COMPUTE);
        RUN(mt_event_sync, dev, to);
        if (s >= 0)
            seconds[s] = (double)(mt_event_time_ns(to) - mt_event_time_ns(from)) * 1e-9 / CALLS;
    }
    mt_event_destroy(&from);
    mt_event_destroy(&to);
    qsort(seconds, SAMPLES, sizeof(*seconds), by_value);
    return seconds[SAMPLES / 2];
}

static void report(struct bench *b, const char *name, enum mt_dtype dtype, double seconds, double bytes)
{
    double gbps = bytes / seconds * 1e-9;
    if (b->copy_gbps == 0)
        b->copy_gbps = gbps; /* the first is the copy */
    printf("%-28s %-5s %10.1f us %9.1f MB %9.1f GB/s %6.1f %% of copy\n", name, mt_dtype_name(dtype),
           seconds * 1e6, bytes * 1e-6, gbps, 100 * gbps / b->copy_gbps);
}

/* --- operations --------------------------------------------------------------------------------- */

static int submit_copy(mt_device *dev, void *ctx, struct mt_err *err)
{
    return mt_device_copy(dev, MT_STREAM_COMPUTE, ctx, err);
}

static void bench_copy(struct bench *b)
{
    size_t bytes = b->sizes.of[MT_SIZE_ELEMENTS] * 2;
    struct mt_example_flow from = {0}, to = {0};
    RUN(mt_example_flow_create, &from, b->dev, bytes);
    RUN(mt_example_flow_create, &to, b->dev, bytes);
    struct mt_copy c = {to.data, bytes, from.data, bytes, bytes, 1};
    report(b, "copy", MT_BF16, time_of(b->dev, submit_copy, &c), 2.0 * (double)bytes);
    mt_device_free(b->dev, from.data);
    mt_device_free(b->dev, to.data);
}

static int submit_example(mt_device *dev, void *ctx, struct mt_err *err)
{
    (void)dev;
    return mt_example_submit(ctx, err);
}

/* `change`: what is different from the example of the operation's row, or NULL. */
static void bench_example(struct bench *b, const char *name, const struct mt_metered *m, void (*change)(void *args))
{
    MT_CLOSED_BY(mt_example_destroy) mt_example *x = NULL;
    RUN(mt_example_create, &x, &(struct mt_example_params){.dev = b->dev, .shape = *m});
    if (change)
        change(mt_example_args(x));
    report(b, name, m->dtype, time_of(b->dev, submit_example, x), m->bytes);
}

static const char *variant(const struct mt_metered *m)
{
    return m->flags & MT_METER_NORM        ? " with norm"
           : m->flags & MT_METER_LOSS_ONLY ? " loss only"
           : m->flags & MT_METER_NESTED    ? " nested"
                                           : "";
}

static void bench_operation(struct bench *b, enum mt_dev_op op)
{
    struct mt_metered m;
    char name[64];
    for (unsigned which = 0; !mt_metered_example(&m, op, which, &b->sizes, b->dtype); which++) {
        snprintf(name, sizeof(name), "%s%s", mt_metered_name(&m), variant(&m));
        if (mt_dev_op(op)->bound == MT_BOUND_BYTES && (b->dtype == MT_F32 || !mt_dev_op(op)->f32_only))
            bench_example(b, name, &m, NULL);
    }
}

/* --- beside the rows' examples -------------------------------------------------------------------- */

static void gelu(void *args)
{
    ((struct mt_glu *)args)->kind = MT_GLU_GELU_TANH;
}

static void gelu_bwd(void *args)
{
    ((struct mt_glu_bwd *)args)->kind = MT_GLU_GELU_TANH;
}

/* Of bf16, later calls meet gradients as logits, which costs the same. */
static void in_place(void *args)
{
    struct mt_cross_entropy *a = args;
    a->dlogits = (void *)(uintptr_t)a->logits;
    a->ld_dlogits = a->ld * 4 / mt_dtype_size(a->dtype);
}

static const struct {
    const char *name;
    enum mt_dev_op op;
    void (*change)(void *args);
} others[] = {{"glu gelu", MT_DEV_GLU, gelu},
              {"glu_bwd gelu", MT_DEV_GLU_BWD, gelu_bwd},
              {"cross_entropy in place", MT_DEV_CROSS_ENTROPY, in_place}};

static void bench_others(struct bench *b)
{
    struct mt_metered m;
    for (size_t i = 0; i < MT_ARRAY_LEN(others); i++)
        if (strstr(others[i].name, b->only) && !mt_metered_example(&m, others[i].op, 0, &b->sizes, b->dtype))
            bench_example(b, others[i].name, &m, others[i].change);
}

/* A few tokens are frequent, most are rare: runs of very different lengths. */
static void count_tokens(int32_t *starts, size_t n, size_t vocab)
{
    MT_FREED float *u = mt_alloc_aligned(n * sizeof(float));
    if (!u)
        abort();
    mt_philox_normal(u, n, 0, 5, 1, 1);
    for (size_t i = 0; i < n; i++) {
        float x = u[i] * u[i] * u[i] * u[i] / 100;
        starts[(int32_t)((x < 1 ? x : 0.999f) * (float)vocab) + 1]++;
    }
    for (size_t v = 0; v < vocab; v++)
        starts[v + 1] += starts[v];
}

static void bench_embedding_of_text(struct bench *b)
{
    size_t n = b->sizes.of[MT_SIZE_ROWS], vocab = b->sizes.of[MT_SIZE_VOCAB], runs = 0;
    MT_FREED int32_t *starts = mt_calloc(vocab + 1, sizeof(*starts));
    struct mt_metered m = {.op = MT_DEV_EMBEDDING_BWD, .dtype = b->dtype, .n_dims = 3};
    if (!strstr("embedding_bwd of text", b->only))
        return;
    if (!starts)
        abort();
    count_tokens(starts, n, vocab);
    for (size_t v = 0; v < vocab; v++) /* runs of no token are left out */
        if (starts[v + 1] > starts[runs])
            starts[++runs] = starts[v + 1];
    m.dim[0] = n;
    m.dim[1] = b->sizes.of[MT_SIZE_HIDDEN];
    m.dim[2] = runs;
    if (mt_metered_count(&m))
        abort();
    MT_CLOSED_BY(mt_example_destroy) mt_example *x = NULL;
    RUN(mt_example_create, &x, &(struct mt_example_params){.dev = b->dev, .shape = m});
    struct mt_embedding_bwd *a = mt_example_args(x);
    size_t bytes = (runs + 1) * sizeof(*starts);
    RUN(mt_device_copy, b->dev, MT_STREAM_COMPUTE,
        &(struct mt_copy){(void *)(uintptr_t)a->starts, bytes, starts, bytes, bytes, 1});
    RUN(mt_device_sync, b->dev);
    report(b, "embedding_bwd of text", m.dtype, time_of(b->dev, submit_example, x), m.bytes);
}

/* --- mixtures of experts ----------------------------------------------------------------------------- */

static double seconds_of(struct bench *b, submission submit, void *ctx, mt_event *const ev[2])
{
    RUN(mt_event_record, b->dev, ev[0], MT_STREAM_COMPUTE);
    RUN(submit, b->dev, ctx);
    RUN(mt_event_record, b->dev, ev[1], MT_STREAM_COMPUTE);
    RUN(mt_event_sync, b->dev, ev[1]);
    return (double)(mt_event_time_ns(ev[1]) - mt_event_time_ns(ev[0])) * 1e-9;
}

struct contest {
    submission submit[2]; /* the operation, and what it is compared with */
    void *ctx[2];
};

/* Prints the median over rounds of the times' ratio. */
static void report_ratio(struct bench *b, const char *name, const struct contest *c, const char *target)
{
    enum { ROUNDS = 15 };
    double ratio[ROUNDS], seconds[ROUNDS];
    mt_event *ev[2] = {NULL, NULL};
    for (int i = 0; i < 2; i++)
        RUN(mt_event_create, b->dev, &ev[i]);
    for (int r = -2; r < ROUNDS; r++) {
        double s = seconds_of(b, c->submit[0], c->ctx[0], ev), with = seconds_of(b, c->submit[1], c->ctx[1], ev);
        if (r < 0)
            continue;
        seconds[r] = s;
        ratio[r] = s / with;
    }
    for (int i = 0; i < 2; i++)
        mt_event_destroy(&ev[i]);
    qsort(seconds, ROUNDS, sizeof(*seconds), by_value);
    qsort(ratio, ROUNDS, sizeof(*ratio), by_value);
    printf("%-44s %-5s %10.1f us %6.2f   target %s\n", name, mt_dtype_name(b->dtype), seconds[ROUNDS / 2] * 1e6,
           ratio[ROUNDS / 2], target);
}

enum { EXPERTS = 8, EXPERT_ROWS = 256, EXPERT_WIDTH = 512 };

/* n products of m rows each by a matrix of its own. */
struct products {
    struct mt_gemm g;
    size_t n;
};

static int submit_products(mt_device *dev, void *ctx, struct mt_err *err)
{
    const struct products *p = ctx;
    struct mt_gemm g = p->g;
    size_t in = mt_dtype_size(g.dtype), out = mt_dtype_size(g.d_dtype);
    int rc = 0;
    for (size_t i = 0; i < p->n && !rc; i++) {
        rc = mt_op_gemm(dev, &g, err);
        g.a = (const char *)g.a + g.m * g.k * in;
        g.b = (const char *)g.b + g.n * g.k * in;
        g.d = (char *)g.d + g.m * g.n * out;
    }
    return rc;
}

static struct mt_example_flow make_buffer(struct bench *b, size_t bytes)
{
    struct mt_example_flow f;
    RUN(mt_example_flow_create, &f, b->dev, bytes);
    return f;
}

/* The product of a linear layer, its input's gradient, or the gradient of its weights, of EXPERTS experts. */
static void bench_products(struct bench *b, const char *name, unsigned variant)
{
    bool grad = variant == MT_GEMM_TN;
    size_t rows = EXPERT_ROWS, out = 2 * EXPERT_WIDTH, hidden = EXPERT_WIDTH, size = mt_dtype_size(b->dtype);
    struct mt_gemm g = {.m = grad ? out : rows, .n = variant == MT_GEMM_NT ? out : hidden,
                        .k = grad ? rows : variant == MT_GEMM_NT ? hidden : out,
                        .dtype = b->dtype, .d_dtype = grad ? MT_F32 : b->dtype, .trans_a = grad,
                        .trans_b = variant == MT_GEMM_NT};
    struct mt_example_flow x = make_buffer(b, EXPERTS * g.m * g.k * size), w = make_buffer(b, EXPERTS * g.n * g.k * size),
                   y = make_buffer(b, EXPERTS * g.m * g.n * mt_dtype_size(g.d_dtype));
    g.a = x.data;
    g.b = w.data;
    g.d = y.data;
    g.lda = grad ? g.m : g.k;
    g.ldb = g.trans_b ? g.k : g.n;
    g.ldd = g.n;
    struct products own = {g, EXPERTS}, one = {g, 1};
    *(grad ? &one.g.k : &one.g.m) *= EXPERTS;
    report_ratio(b, name, &(struct contest){{submit_products, submit_products}, {&own, &one}}, "1.15");
    mt_device_free(b->dev, x.data);
    mt_device_free(b->dev, w.data);
    mt_device_free(b->dev, y.data);
}

static int submit_cast(mt_device *dev, void *ctx, struct mt_err *err)
{
    return mt_op_cast(dev, ctx, err);
}

/* An operation on rows of a mixture beside a copy, by all threads, of as many bytes as it must move. */
static void bench_rows(struct bench *b, enum mt_dev_op op, size_t rows, const char *name)
{
    struct mt_metered m;
    struct mt_op_sizes sizes = b->sizes;
    MT_CLOSED_BY(mt_example_destroy) mt_example *x = NULL;
    sizes.of[MT_SIZE_ROWS] = rows;
    if (mt_metered_example(&m, op, 0, &sizes, b->dtype))
        abort();
    size_t bytes = (size_t)m.bytes / 2 / 64 * 64;
    RUN(mt_example_create, &x, &(struct mt_example_params){.dev = b->dev, .shape = m});
    struct mt_example_flow from = make_buffer(b, bytes), to = make_buffer(b, bytes);
    struct mt_cast copy = {bytes / sizeof(float), MT_F32, MT_F32, from.data, to.data};
    report_ratio(b, name, &(struct contest){{submit_example, submit_cast}, {x, &copy}}, "1.30");
    mt_device_free(b->dev, from.data);
    mt_device_free(b->dev, to.data);
}

static void bench_mixtures(struct bench *b)
{
    enum { MOST_ROWS = 16384 };
    size_t rows = b->sizes.of[MT_SIZE_ROWS];
    char name[64];
    if (!strstr("mixtures", b->only))
        return;
    bench_products(b, "products of 8 experts over one", MT_GEMM_NT);
    bench_products(b, "input gradients of 8 experts over one", MT_GEMM_NN);
    bench_products(b, "weight gradients of 8 experts over one", MT_GEMM_TN);
    for (size_t times = 1; rows * times <= MOST_ROWS; times *= 16) {
        snprintf(name, sizeof(name), "gather of %zu rows over a copy", rows * times);
        bench_rows(b, MT_DEV_MOE_GATHER, rows * times, name);
        snprintf(name, sizeof(name), "combine of %zu rows over a copy", rows * times);
        bench_rows(b, MT_DEV_MOE_COMBINE, rows * times, name);
    }
}

/* --- all ------------------------------------------------------------------------------------------ */

static const struct mt_op_sizes small = {{
    [MT_SIZE_ROWS] = 512, [MT_SIZE_HIDDEN] = 896, [MT_SIZE_FFN] = 4864, [MT_SIZE_LOSS_ROWS] = 256,
    [MT_SIZE_VOCAB] = 16000, [MT_SIZE_RUNS] = 256, [MT_SIZE_HEADS] = 14, [MT_SIZE_KV_HEADS] = 2,
    [MT_SIZE_ALL_HEADS] = 16, [MT_SIZE_HEAD_DIM] = 64, [MT_SIZE_LENGTH] = 513, [MT_SIZE_ELEMENTS] = 16 << 18,
    [MT_SIZE_EXPERTS] = 64, [MT_SIZE_TOP_K] = 8}};
static const struct mt_op_sizes large = {{
    [MT_SIZE_ROWS] = 16384, [MT_SIZE_HIDDEN] = 3584, [MT_SIZE_FFN] = 18944, [MT_SIZE_LOSS_ROWS] = 2048,
    [MT_SIZE_VOCAB] = 151936, [MT_SIZE_RUNS] = 8192, [MT_SIZE_HEADS] = 28, [MT_SIZE_KV_HEADS] = 4,
    [MT_SIZE_ALL_HEADS] = 32, [MT_SIZE_HEAD_DIM] = 128, [MT_SIZE_LENGTH] = 2049, [MT_SIZE_ELEMENTS] = 1 << 28,
    [MT_SIZE_EXPERTS] = 128, [MT_SIZE_TOP_K] = 8}};

int main(int argc, char **argv)
{
    const char *kind = argc > 1 ? argv[1] : "cpu";
    bool gpu = !strcmp(kind, "cuda");
    struct bench b = {.sizes = gpu ? large : small, .only = argc > 2 ? argv[2] : ""};
    struct mt_device_params p = {.kind = kind, .n_threads = 2,
                                 .budget_bytes = ((size_t)(gpu ? 6 << 10 : 256) << 20) + ((size_t)64 << 20)};
    RUN(mt_device_create, &b.dev, &p);
    printf("%s: %llu tokens, hidden %llu\n", mt_device_limits(b.dev)->name,
           (unsigned long long)b.sizes.of[MT_SIZE_ROWS], (unsigned long long)b.sizes.of[MT_SIZE_HIDDEN]);
    bench_copy(&b);
    for (int dtype = MT_BF16; dtype >= MT_F32; dtype--) {
        b.dtype = (enum mt_dtype)dtype;
        for (int op = 0; op < MT_N_DEV_OPS; op++)
            if (strstr(mt_dev_op_name((enum mt_dev_op)op), b.only))
                bench_operation(&b, (enum mt_dev_op)op);
        bench_embedding_of_text(&b);
        bench_others(&b);
        bench_mixtures(&b);
    }
    mt_device_destroy(&b.dev);
    return 0;
}
