/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Time and bandwidth of the memory-bound operations, beside a plain copy inside the device measured in the
 * same run:
 *
 *   bench_kernels [KIND [ONLY]]      device kind (cpu), operations whose name has ONLY in it
 *
 * GB/s counts what an operation must move: each input read once and each output written once, and the
 * logits of the cross-entropy twice. Shapes are those of a 7B model on a GPU, of a small one on the cpu.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "bench.h"

#include "base/mem.h"
#include "base/philox.h"
#include "device/ops.h"

enum { SAMPLES = 9, CALLS = 4, PATTERN = 1 << 20 };

struct shape {
    size_t tokens, hidden, ffn, vocab, loss_tokens, flat; /* flat: elements of a weight gradient */
    size_t n_q, n_kv, head_dim, memory;
};

struct bench {
    mt_device *dev;
    struct shape s;
    enum mt_dtype dtype;
    char *memory; /* of the device; an operation's buffers are taken from it and given back together */
    size_t taken;
    float *pattern; /* PATTERN normal values, and as bf16 */
    uint16_t *pattern_bf16;
    double copy_gbps;
};

static void upload(struct bench *b, void *dst, const void *src, size_t bytes)
{
    RUN(mt_device_copy, b->dev, MT_STREAM_COMPUTE, &(struct mt_copy){dst, bytes, src, bytes, bytes, 1});
    RUN(mt_device_sync, b->dev);
}

static void *take(struct bench *b, size_t bytes)
{
    void *p = b->memory + b->taken;
    b->taken += mt_align_up(bytes, 256);
    if (b->taken > b->s.memory) {
        fprintf(stderr, "bench_kernels: an operation's buffers need more than %zu bytes\n", b->s.memory);
        exit(1);
    }
    return p;
}

/* n normal values of the kind. */
static void *values(struct bench *b, enum mt_dtype t, size_t n)
{
    size_t size = mt_dtype_size(t);
    char *p = take(b, n * size);
    const void *src = t == MT_F32 ? (const void *)b->pattern : (const void *)b->pattern_bf16;
    for (size_t i = 0; i < n; i += PATTERN)
        upload(b, p + i * size, src, MT_MIN((size_t)PATTERN, n - i) * size);
    return p;
}

static void *like(struct bench *b, size_t n)
{
    return values(b, b->dtype, n);
}

static int32_t *ints(struct bench *b, const int32_t *v, size_t n)
{
    int32_t *p = take(b, n * sizeof(*v));
    upload(b, p, v, n * sizeof(*v));
    return p;
}

static int32_t *host_ints(size_t n)
{
    int32_t *v = mt_calloc(n, sizeof(*v));
    if (!v)
        abort();
    return v;
}

/* --- measuring ---------------------------------------------------------------------------------- */

typedef int (*operation)(struct bench *b, const void *args, struct mt_err *err);

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Median seconds of a call; warm. */
static double time_of(struct bench *b, operation op, const void *args)
{
    double seconds[SAMPLES];
    mt_event *from = NULL, *to = NULL;
    RUN(mt_event_create, b->dev, &from);
    RUN(mt_event_create, b->dev, &to);
    for (int s = -1; s < SAMPLES; s++) {
        RUN(mt_event_record, b->dev, from, MT_STREAM_COMPUTE);
        for (int i = 0; i < CALLS; i++)
            RUN(op, b, args);
        RUN(mt_event_record, b->dev, to, MT_STREAM_COMPUTE);
        RUN(mt_event_sync, b->dev, to);
        if (s >= 0)
            seconds[s] = (double)(mt_event_time_ns(to) - mt_event_time_ns(from)) * 1e-9 / CALLS;
    }
    mt_event_destroy(&from);
    mt_event_destroy(&to);
    qsort(seconds, SAMPLES, sizeof(*seconds), by_value);
    return seconds[SAMPLES / 2];
}

static void report(struct bench *b, const char *name, operation op, const void *args, double bytes)
{
    double seconds = time_of(b, op, args), gbps = bytes / seconds * 1e-9;
    if (b->copy_gbps == 0)
        b->copy_gbps = gbps; /* the first is the copy */
    printf("%-28s %-5s %10.1f us %9.1f MB %9.1f GB/s %6.1f %% of copy\n", name, mt_dtype_name(b->dtype),
           seconds * 1e6, bytes * 1e-6, gbps, 100 * gbps / b->copy_gbps);
    b->taken = 0;
}

#define OPERATION(op)                                                                              \
    static int run_##op(struct bench *b, const void *args, struct mt_err *err)                     \
    {                                                                                              \
        return mt_op_##op(b->dev, args, err);                                                      \
    }
OPERATION(embedding)
OPERATION(embedding_bwd)
OPERATION(rmsnorm)
OPERATION(rmsnorm_bwd)
OPERATION(bias_bwd)
OPERATION(qk_rope)
OPERATION(qk_rope_bwd)
OPERATION(glu)
OPERATION(glu_bwd)
OPERATION(cross_entropy)
OPERATION(gather_rows)
OPERATION(scatter_rows)
OPERATION(add)
OPERATION(grad_cast)
OPERATION(cast)

/* --- operations --------------------------------------------------------------------------------- */

static int run_copy(struct bench *b, const void *args, struct mt_err *err)
{
    return mt_device_copy(b->dev, MT_STREAM_COMPUTE, args, err);
}

static void bench_copy(struct bench *b)
{
    size_t bytes = b->s.flat * 2;
    struct mt_copy c = {take(b, bytes), bytes, values(b, MT_F32, bytes / 4), bytes, bytes, 1};
    report(b, "copy", run_copy, &c, 2.0 * (double)bytes);
}

/* A few tokens are frequent, most are rare. */
static int32_t *token_ids(const struct bench *b)
{
    int32_t *ids = host_ints(b->s.tokens);
    float *u = mt_alloc_aligned(b->s.tokens * sizeof(float));
    if (!u)
        abort();
    mt_philox_normal(u, b->s.tokens, 0, 5, 1, 1);
    for (size_t i = 0; i < b->s.tokens; i++) {
        float x = u[i] * u[i] * u[i] * u[i] / 100;
        ids[i] = (int32_t)((x < 1 ? x : 0.999f) * (float)b->s.vocab);
    }
    free(u);
    return ids;
}

static void bench_embedding(struct bench *b)
{
    size_t n = b->s.tokens, c = b->s.hidden, v = b->s.vocab;
    int32_t *ids = token_ids(b);
    struct mt_embedding a = {n, v, c, b->dtype, 1, ints(b, ids, n), like(b, v * c), like(b, n * c)};
    report(b, "embedding", run_embedding, &a, 2.0 * (double)(n * c * mt_dtype_size(b->dtype)));
    free(ids);
}

/* Tokens sorted by id, in order: a counting sort. */
static size_t sort_tokens(const int32_t *ids, size_t n, size_t vocab, int32_t *run_ids, int32_t *starts,
                          int32_t *order)
{
    int32_t *at = host_ints(vocab + 1);
    size_t runs = 0;
    for (size_t i = 0; i < n; i++)
        at[ids[i] + 1]++;
    for (size_t v = 0; v < vocab; v++) {
        if (at[v + 1]) {
            run_ids[runs] = (int32_t)v;
            starts[runs++] = at[v];
        }
        at[v + 1] += at[v];
    }
    starts[runs] = (int32_t)n;
    for (size_t i = 0; i < n; i++)
        order[at[ids[i]]++] = (int32_t)i;
    free(at);
    return runs;
}

static void bench_embedding_bwd(struct bench *b)
{
    size_t n = b->s.tokens, c = b->s.hidden, v = b->s.vocab;
    int32_t *ids = token_ids(b), *run_ids = host_ints(n), *starts = host_ints(n + 1), *order = host_ints(n);
    size_t runs = sort_tokens(ids, n, v, run_ids, starts, order);
    struct mt_embedding_bwd a = {n, v, c, runs, b->dtype, 1, ints(b, run_ids, runs),
                                 ints(b, starts, runs + 1), ints(b, order, n), like(b, n * c),
                                 values(b, MT_F32, v * c)};
    report(b, "embedding_bwd", run_embedding_bwd, &a,
           (double)(n * c * mt_dtype_size(b->dtype)) + 8.0 * (double)(runs * c));
    free(ids);
    free(run_ids);
    free(starts);
    free(order);
}

static void bench_rmsnorm(struct bench *b)
{
    size_t n = b->s.tokens, c = b->s.hidden;
    double bytes = (double)(n * c * mt_dtype_size(b->dtype));
    struct mt_rmsnorm a = {.n = n, .c = c, .dtype = b->dtype, .eps = 1e-6f, .x = like(b, n * c),
                           .w = like(b, c), .y = like(b, n * c), .rstd = take(b, n * sizeof(float))};
    report(b, "rmsnorm", run_rmsnorm, &a, 2 * bytes);
    a = (struct mt_rmsnorm){.n = n, .c = c, .dtype = b->dtype, .eps = 1e-6f, .x = like(b, n * c),
                            .residual = like(b, n * c), .sum = like(b, n * c), .w = like(b, c),
                            .y = like(b, n * c), .rstd = take(b, n * sizeof(float))};
    report(b, "rmsnorm with residual", run_rmsnorm, &a, 4 * bytes);
}

static void bench_rmsnorm_bwd(struct bench *b)
{
    size_t n = b->s.tokens, c = b->s.hidden;
    struct mt_rmsnorm_bwd a = {.n = n, .c = c, .dtype = b->dtype, .dy = like(b, n * c), .x = like(b, n * c),
                               .w = like(b, c), .rstd = values(b, MT_F32, n), .dres = like(b, n * c),
                               .dx = like(b, n * c), .dw = values(b, MT_F32, c),
                               .workspace = take(b, mt_op_rmsnorm_bwd_workspace(b->dev, n, c))};
    report(b, "rmsnorm_bwd", run_rmsnorm_bwd, &a, 4.0 * (double)(n * c * mt_dtype_size(b->dtype)));
}

static void bench_bias_bwd(struct bench *b)
{
    size_t n = b->s.tokens, c = (b->s.n_q + 2 * b->s.n_kv) * b->s.head_dim;
    struct mt_bias_bwd a = {n, c, c, b->dtype, like(b, n * c), values(b, MT_F32, c),
                            take(b, mt_op_bias_bwd_workspace(b->dev, n, c))};
    report(b, "bias_bwd", run_bias_bwd, &a, (double)(n * c * mt_dtype_size(b->dtype)));
}

static struct mt_qk_rope rope_args(struct bench *b, bool norm)
{
    size_t n = b->s.tokens, d = b->s.head_dim, heads = b->s.n_q + b->s.n_kv, ld = (heads + b->s.n_kv) * d;
    int32_t *positions = host_ints(n);
    for (size_t i = 0; i < n; i++)
        positions[i] = (int32_t)(i % 2048);
    struct mt_qk_rope a = {.n = n, .n_q = b->s.n_q, .n_kv = b->s.n_kv, .head_dim = d, .rot = d,
                           .dtype = b->dtype, .eps = 1e-6f, .qkv = like(b, n * ld), .ld_qkv = ld,
                           .positions = ints(b, positions, n), .cos_t = values(b, MT_F32, 2048 * d / 2),
                           .sin_t = values(b, MT_F32, 2048 * d / 2), .max_pos = 2048,
                           .q_norm = norm ? like(b, d) : NULL, .k_norm = norm ? like(b, d) : NULL,
                           .rstd = values(b, MT_F32, n * heads)};
    a.qk = norm ? like(b, n * heads * d) : (void *)(uintptr_t)a.qkv;
    a.ld_qk = norm ? heads * d : ld;
    free(positions);
    return a;
}

static void bench_qk_rope(struct bench *b)
{
    double bytes = (double)(b->s.tokens * (b->s.n_q + b->s.n_kv) * b->s.head_dim * mt_dtype_size(b->dtype));
    for (int norm = 0; norm < 2; norm++) {
        struct mt_qk_rope a = rope_args(b, norm);
        report(b, norm ? "qk_rope with norm" : "qk_rope in place", run_qk_rope, &a, 2 * bytes);
    }
    struct mt_qk_rope f = rope_args(b, true);
    size_t d = f.head_dim;
    struct mt_qk_rope_bwd a = {
        .n = f.n, .n_q = f.n_q, .n_kv = f.n_kv, .head_dim = d, .rot = f.rot, .dtype = f.dtype, .dqk = f.qk,
        .ld_dqk = f.ld_qk, .dqkv = f.qk, .ld_dqkv = f.ld_qk, .qkv = f.qkv, .ld_qkv = f.ld_qkv,
        .positions = f.positions, .cos_t = f.cos_t, .sin_t = f.sin_t, .max_pos = f.max_pos,
        .q_norm = f.q_norm, .k_norm = f.k_norm, .rstd = f.rstd, .dq_norm = values(b, MT_F32, d),
        .dk_norm = values(b, MT_F32, d),
        .workspace = take(b, mt_op_qk_rope_bwd_workspace(b->dev, f.n, f.n_q, f.n_kv, d))};
    report(b, "qk_rope_bwd with norm", run_qk_rope_bwd, &a, 3 * bytes);
}

static void bench_glu(struct bench *b)
{
    size_t n = b->s.tokens / 2, f = b->s.ffn;
    double bytes = (double)(n * f * mt_dtype_size(b->dtype));
    static const char *const names[2][2] = {{"glu silu", "glu_bwd silu"}, {"glu gelu", "glu_bwd gelu"}};
    for (int kind = MT_GLU_SILU; kind <= MT_GLU_GELU_TANH; kind++) {
        struct mt_glu a = {n, f, b->dtype, (enum mt_glu_kind)kind, like(b, n * 2 * f), like(b, n * f)};
        report(b, names[kind][0], run_glu, &a, 3 * bytes);
        struct mt_glu_bwd d = {n, f, b->dtype, (enum mt_glu_kind)kind, like(b, n * 2 * f),
                               like(b, n * f), like(b, n * 2 * f), like(b, n * f)};
        report(b, names[kind][1], run_glu_bwd, &d, 6 * bytes);
    }
}

/* In place: of bf16, later calls meet gradients as logits, which costs the same. */
static void bench_cross_entropy(struct bench *b)
{
    size_t n = b->s.loss_tokens, v = b->s.vocab;
    int32_t *targets = host_ints(n);
    for (size_t i = 0; i < n; i++)
        targets[i] = (int32_t)(i * 7919 % v);
    void *logits = values(b, MT_F32, n * v);
    struct mt_cross_entropy a = {.n = n, .vocab = v, .ld = v, .dtype = b->dtype, .logits = logits,
                                 .targets = ints(b, targets, n), .loss = take(b, n * 4),
                                 .correct = take(b, n * 4), .dlogits = logits,
                                 .ld_dlogits = v * 4 / mt_dtype_size(b->dtype), .scale = 1};
    report(b, "cross_entropy in place", run_cross_entropy, &a,
           (double)(n * v) * (8.0 + (double)mt_dtype_size(b->dtype)));
    free(targets);
}

static void bench_rows(struct bench *b)
{
    size_t n = b->s.tokens, k = n - n / 4, c = b->s.hidden;
    double row = (double)(c * mt_dtype_size(b->dtype));
    int32_t *rows = host_ints(k);
    for (size_t i = 0; i < k; i++)
        rows[i] = (int32_t)(i + i / 3);
    struct mt_rows a = {k, n, c, b->dtype, ints(b, rows, k), like(b, n * c), like(b, n * c)};
    report(b, "gather_rows", run_gather_rows, &a, 2 * (double)k * row);
    a = (struct mt_rows){k, n, c, b->dtype, ints(b, rows, k), like(b, n * c), like(b, n * c)};
    report(b, "scatter_rows", run_scatter_rows, &a, (double)(k + n) * row);
    free(rows);
}

static void bench_add(struct bench *b)
{
    size_t n = b->s.tokens * b->s.hidden;
    struct mt_add a = {n, b->dtype, like(b, n), like(b, n), like(b, n)};
    report(b, "add", run_add, &a, 3.0 * (double)(n * mt_dtype_size(b->dtype)));
}

static void bench_casts(struct bench *b)
{
    size_t n = b->s.flat, size = mt_dtype_size(b->dtype);
    struct mt_grad_cast g = {n, values(b, MT_F32, n), b->dtype, like(b, n),
                             take(b, mt_div_up(n, MT_SUMSQ_BLOCK) * sizeof(float))};
    report(b, "grad_cast from f32", run_grad_cast, &g, (double)n * (4.0 + (double)size));
    struct mt_cast c = {n, MT_F32, b->dtype, values(b, MT_F32, n), like(b, n)};
    report(b, "cast from f32", run_cast, &c, (double)n * (4.0 + (double)size));
}

static int run_join(struct bench *b, const void *args, struct mt_err *err)
{
    return mt_op_join(b->dev, (void *)(uintptr_t)args, b->s.flat, err);
}

static int run_zero(struct bench *b, const void *args, struct mt_err *err)
{
    return mt_op_zero(b->dev, (void *)(uintptr_t)args, b->s.flat * 4, err);
}

static void bench_planes(struct bench *b)
{
    report(b, "join", run_join, values(b, MT_F32, b->s.flat), 8.0 * (double)b->s.flat);
    report(b, "zero", run_zero, values(b, MT_F32, b->s.flat), 4.0 * (double)b->s.flat);
}

static const struct {
    const char *name;
    void (*fn)(struct bench *b);
} benches[] = {
    {"embedding", bench_embedding},   {"embedding_bwd", bench_embedding_bwd},
    {"rmsnorm", bench_rmsnorm},       {"rmsnorm_bwd", bench_rmsnorm_bwd},
    {"bias_bwd", bench_bias_bwd},     {"qk_rope", bench_qk_rope},
    {"glu", bench_glu},               {"cross_entropy", bench_cross_entropy},
    {"rows", bench_rows},             {"add", bench_add},
    {"casts", bench_casts},           {"planes", bench_planes},
};

static const struct shape small = {.tokens = 512, .hidden = 896, .ffn = 4864, .vocab = 16000,
                                   .loss_tokens = 256, .flat = 16 << 18, .n_q = 14, .n_kv = 2,
                                   .head_dim = 64, .memory = (size_t)256 << 20};
static const struct shape large = {.tokens = 16384, .hidden = 3584, .ffn = 18944, .vocab = 151936,
                                   .loss_tokens = 2048, .flat = 1 << 28, .n_q = 28, .n_kv = 4,
                                   .head_dim = 128, .memory = (size_t)6 << 30};

static void open_bench(struct bench *b, const char *kind)
{
    b->s = strcmp(kind, "cuda") ? small : large;
    struct mt_device_params p = {.kind = kind, .budget_bytes = b->s.memory + ((size_t)64 << 20),
                                 .n_threads = 2};
    void *memory = NULL;
    RUN(mt_device_create, &b->dev, &p);
    RUN(mt_device_alloc, b->dev, b->s.memory, "bench", &memory);
    b->memory = memory;
    b->pattern = mt_alloc_aligned(PATTERN * sizeof(float));
    b->pattern_bf16 = mt_alloc_aligned(PATTERN * sizeof(uint16_t));
    if (!b->pattern || !b->pattern_bf16)
        abort();
    mt_philox_normal(b->pattern, PATTERN, 0, 3, 1, 1);
    for (size_t i = 0; i < PATTERN; i++)
        b->pattern_bf16[i] = mt_f32_to_bf16(b->pattern[i]);
}

int main(int argc, char **argv)
{
    const char *kind = argc > 1 ? argv[1] : "cpu", *only = argc > 2 ? argv[2] : "";
    struct bench b = {0};
    open_bench(&b, kind);
    printf("%s: %zu tokens, hidden %zu\n", mt_device_limits(b.dev)->name, b.s.tokens, b.s.hidden);
    bench_copy(&b);
    for (int dtype = MT_BF16; dtype >= MT_F32; dtype--)
        for (size_t i = 0; i < MT_ARRAY_LEN(benches); i++) {
            b.dtype = (enum mt_dtype)dtype;
            if (strstr(benches[i].name, only))
                benches[i].fn(&b);
        }
    mt_device_free(b.dev, b.memory);
    mt_device_destroy(&b.dev);
    free(b.pattern);
    free(b.pattern_bf16);
    return 0;
}
