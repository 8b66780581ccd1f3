/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Every operation once on the emulated device, in shapes just large enough for several blocks, warps and tails:
 * small enough for ThreadSanitizer, to which a thread of a block is a thread, so that a missing barrier or event
 * is a data race. Values are for the conformance suite to check; here outputs need only be written, all of them:
 * fresh device memory is NaN.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "device/ops.h"
#include "kinds/kinds.h"

enum { MAX_BUFFERS = 64 };

struct output {
    const char *name;
    void *p;
    size_t n;
    enum mt_dtype dtype;
};

static mt_device *dev;
static struct mt_err err;
static void *buffers[MAX_BUFFERS];
static size_t n_buffers, n_outputs;
static struct output outputs[MAX_BUFFERS];
static int failures;

static void must(const char *what, int rc)
{
    if (rc) {
        printf("FAIL %s: %s\n", what, err.msg);
        exit(1);
    }
}

static void *take(size_t bytes)
{
    void *p = NULL;
    if (n_buffers == MAX_BUFFERS)
        abort();
    must("alloc", mt_device_alloc(dev, bytes, "test", &p, &err));
    return buffers[n_buffers++] = p;
}

static void *upload(const void *host, size_t bytes)
{
    void *p = take(bytes);
    MT_CLOSED_BY(mt_event_destroy) mt_event *ev = NULL;
    must("event", mt_event_create(dev, &ev, &err));
    must("copy", mt_device_copy(dev, MT_STREAM_H2D, &(struct mt_copy){p, bytes, host, bytes, bytes, 1}, &err));
    must("record", mt_event_record(dev, ev, MT_STREAM_H2D, &err));
    must("wait", mt_event_wait(dev, ev, MT_STREAM_COMPUTE, &err));
    must("sync", mt_event_sync(dev, ev, &err)); /* the caller's memory is its own again */
    return p;
}

static void *numbers(enum mt_dtype t, size_t n)
{
    static uint32_t seed = 1;
    size_t size = mt_dtype_size(t);
    MT_FREED char *host = malloc(n * size);
    for (size_t i = 0; host && i < n; i++) {
        seed = seed * 1664525u + 1013904223u;
        float f = (float)(int32_t)seed * 0x1p-31f;
        uint16_t h = mt_f32_to_bf16(f);
        memcpy(host + i * size, t == MT_F32 ? (const void *)&f : (const void *)&h, size);
    }
    void *p = upload(host, n * size);
    return p;
}

/* Fresh memory that the operation is to fill. */
static void *output(const char *name, enum mt_dtype t, size_t n)
{
    void *p = take(n * mt_dtype_size(t));
    mt_device_poison(dev, p, n * mt_dtype_size(t));
    outputs[n_outputs++] = (struct output){name, p, n, t};
    return p;
}

static void check_output(const struct output *o, mt_event *computed)
{
    size_t bytes = o->n * mt_dtype_size(o->dtype);
    MT_FREED char *host = malloc(bytes);
    must("wait", mt_event_wait(dev, computed, MT_STREAM_D2H, &err));
    must("copy", mt_device_copy(dev, MT_STREAM_D2H, &(struct mt_copy){host, bytes, o->p, bytes, bytes, 1}, &err));
    must("sync", mt_device_sync(dev, &err));
    for (size_t i = 0; i < o->n; i++) {
        float f = o->dtype == MT_F32 ? ((const float *)(void *)host)[i]
                                     : mt_bf16_to_f32(((const uint16_t *)(void *)host)[i]);
        if (!isfinite(f)) {
            printf("FAIL %s: element %zu of %zu is %g\n", o->name, i, o->n, (double)f);
            failures++;
            break;
        }
    }
}

static void check_all(void)
{
    mt_event *ev = NULL;
    must("event", mt_event_create(dev, &ev, &err));
    must("record", mt_event_record(dev, ev, MT_STREAM_COMPUTE, &err));
    for (size_t i = 0; i < n_outputs; i++)
        check_output(&outputs[i], ev);
    mt_event_destroy(&ev);
    must("sync", mt_device_sync(dev, &err)); /* what has no outputs to be checked is at work still */
    for (size_t i = 0; i < n_buffers; i++)
        mt_device_free(dev, buffers[i]);
    n_buffers = n_outputs = 0;
}

#define RUN(op, ...) must(#op, op(dev, &(__VA_ARGS__), &err))

/* Without the sums of columns for wide rows: hundreds of blocks of a thousand threads, all alike. */
static void norms(enum mt_dtype t, size_t n, size_t c)
{
    bool columns = c < 4096;
    void *x = numbers(t, n * c), *r = numbers(t, n * c), *w = numbers(t, c);
    void *y = output("y", t, n * c);
    float *rstd = output("rstd", MT_F32, n);
    RUN(mt_op_rmsnorm, (struct mt_rmsnorm){.n = n, .c = c, .dtype = t, .eps = 1e-6f, .x = x, .w = w, .y = y,
                                           .rstd = rstd});
    RUN(mt_op_rmsnorm_bwd,
        (struct mt_rmsnorm_bwd){.n = n, .c = c, .dtype = t, .dy = r, .x = x, .w = w, .rstd = rstd, .dres = r,
                                .dx = output("dx", t, n * c), .dw = columns ? numbers(MT_F32, c) : NULL,
                                .workspace = take(mt_op_rmsnorm_bwd_workspace(dev, &(struct mt_rmsnorm_bwd){.n = n, .c = c}))});
    const struct mt_layernorm_bwd centred = {.n = n, .c = c, .biased = true};
    void *wb = numbers(t, 2 * c);
    float *of_rows = output("rstd of LayerNorm", MT_F32, n);
    RUN(mt_op_layernorm, (struct mt_layernorm){.n = n, .c = c, .dtype = t, .eps = 1e-5f, .biased = true, .x = x, .w = wb,
                                               .y = output("LayerNorm", t, n * c), .rstd = of_rows});
    RUN(mt_op_layernorm_bwd,
        (struct mt_layernorm_bwd){.n = n, .c = c, .dtype = t, .biased = true, .dy = r, .x = x, .w = wb, .rstd = of_rows,
                                  .dres = r, .dx = output("dx of LayerNorm", t, n * c),
                                  .dw = columns ? numbers(MT_F32, 2 * c) : NULL,
                                  .workspace = take(mt_op_layernorm_bwd_workspace(dev, &centred))});
    if (!columns) {
        check_all();
        return;
    }
    RUN(mt_op_bias_bwd, (struct mt_bias_bwd){.n = n, .c = c, .ld = c, .dtype = t, .dy = x,
                                             .db = numbers(MT_F32, c),
                                             .workspace = take(mt_op_bias_bwd_workspace(dev, &(struct mt_bias_bwd){.n = n, .c = c}))});
    check_all();
}

static void rope(enum mt_dtype t, size_t n, size_t d, bool norm)
{
    size_t n_q = 3, n_kv = 1, heads = n_q + n_kv, ld = (heads + n_kv) * d;
    int32_t pos[64] = {0};
    for (size_t i = 0; i < n; i++)
        pos[i] = (int32_t)i;
    char *qkv = numbers(t, n * ld);
    void *qw = norm ? numbers(t, d) : NULL, *kw = norm ? numbers(t, d) : NULL;
    float *cs = numbers(MT_F32, n * d / 2), *sn = numbers(MT_F32, n * d / 2);
    int32_t *p = upload(pos, n * sizeof(int32_t));
    float *rstd = norm ? output("rstd", MT_F32, n * heads) : NULL;
    char *qk = output("qk", t, n * heads * d), *dqk = numbers(t, n * heads * d), *dqkv = numbers(t, n * ld);
    size_t k = n_q * d * mt_dtype_size(t);
    struct mt_heads q_in = mt_heads(qkv, ld, n_q, d), k_in = mt_heads(qkv + k, ld, n_kv, d);
    struct mt_qk_rope fwd = {.n = n, .rot = d, .dtype = t, .eps = 1e-6f, .q = q_in, .k = k_in,
                             .to_q = mt_heads(qk, heads * d, n_q, d), .to_k = mt_heads(qk + k, heads * d, n_kv, d),
                             .positions = p, .cos_t = cs, .sin_t = sn, .max_pos = n, .q_norm = qw, .k_norm = kw,
                             .rstd = rstd};
    RUN(mt_op_qk_rope, fwd);
    RUN(mt_op_qk_rope_bwd,
        (struct mt_qk_rope_bwd){
            .fwd = fwd, .dq = mt_heads(dqk, heads * d, n_q, d),
            .dk = mt_heads(dqk + k, heads * d, n_kv, d), .to_dq = mt_heads(dqkv, ld, n_q, d),
            .to_dk = mt_heads(dqkv + k, ld, n_kv, d), .dq_norm = norm ? numbers(MT_F32, d) : NULL,
            .dk_norm = norm ? numbers(MT_F32, d) : NULL,
            .workspace = take(mt_op_qk_rope_bwd_workspace(dev, &(struct mt_qk_rope_bwd){.fwd.n = n, .dq = q_in}))});
    check_all();
}

static void attention(enum mt_dtype t, size_t window, size_t d_v, float cap)
{
    static const int32_t cu[] = {0, 5, 38};
    size_t n = 38, n_q = 4, n_kv = 2, d = 24, qw = n_q * d, kw = n_kv * d, ow = n_q * d_v, ld = qw + kw + n_kv * d_v;
    size_t e = mt_dtype_size(t);
    char *qkv = numbers(t, n * ld), *dqkv = output("dqkv", t, n * ld);
    struct mt_attention a = {
        .n = n, .window = window, .n_docs = 2, .max_len = 33, .dtype = t, .scale = 0.2f, .cap = cap,
        .cu_seqlens = upload(cu, sizeof(cu)), .cu_seqlens_host = cu, .q = mt_heads(qkv, ld, n_q, d),
        .k = mt_heads(qkv + qw * e, ld, n_kv, d), .v = mt_heads(qkv + (qw + kw) * e, ld, n_kv, d_v),
        .o = mt_heads(output("o", t, n * ow), ow, n_q, d_v), .lse = output("lse", MT_F32, n_q * n)};
    a.workspace = take(mt_op_attention_workspace(dev, &a));
    RUN(mt_op_attention, a);
    RUN(mt_op_attention_bwd,
        (struct mt_attention_bwd){.fwd = a, .d_o = mt_heads(numbers(t, n * ow), ow, n_q, d_v),
                                  .dq = mt_heads(dqkv, ld, n_q, d), .dk = mt_heads(dqkv + qw * e, ld, n_kv, d),
                                  .dv = mt_heads(dqkv + (qw + kw) * e, ld, n_kv, d_v)});
    check_all();
}

static void products(enum mt_dtype t)
{
    size_t m = 13, n = 40, k = 24;
    void *a = numbers(t, m * k), *b = numbers(t, n * k), *d = output("d", t, m * n);
    RUN(mt_op_gemm, (struct mt_gemm){.m = m, .n = n, .k = k, .dtype = t, .d_dtype = t, .trans_b = true, .a = a,
                                     .b = b, .lda = k, .ldb = k, .ldd = n, .bias = numbers(t, n), .d = d});
    float *dw = numbers(MT_F32, n * k);
    RUN(mt_op_gemm, (struct mt_gemm){.m = n, .n = k, .k = m, .dtype = t, .d_dtype = MT_F32, .trans_a = true,
                                     .a = d, .b = a, .lda = n, .ldb = k, .ldc = k, .ldd = k, .c = dw, .d = dw});
    check_all();
}

static void codes(enum mt_dtype t)
{
    size_t rows = 70, cols = 80, words = rows * cols / sizeof(float), turned = mt_codes_ld(rows) * cols / sizeof(float);
    void *x = numbers(t, rows * cols);
    float *parts = output("parts", MT_F32, MT_AMAX_PARTS), *scale = output("scale", MT_F32, 1);
    RUN(mt_op_amax, (struct mt_amax){.n = rows * cols, .dtype = t, .x = x, .parts = parts});
    RUN(mt_op_quantise, (struct mt_quantise){.rows = rows, .cols = cols, .dtype = t, .x = x, .parts = parts, .scale = scale,
                                             .codes = (void *)output("codes", MT_F32, words),
                                             .codes_t = (void *)output("turned codes", MT_F32, turned)});
    check_all();
}

static void units_and_loss(enum mt_dtype t)
{
    size_t n = 5, f = 136, vocab = 1003, ld = 1008, width = 4 / mt_dtype_size(t);
    static const int32_t targets[] = {3, -1, 1002, 0, 500};
    void *gu = numbers(t, n * 2 * f), *dout = numbers(t, n * f), *logits = numbers(MT_F32, n * ld);
    RUN(mt_op_glu, (struct mt_glu){.n = n, .f = f, .dtype = t, .gate_up = gu, .out = output("glu", t, n * f)});
    RUN(mt_op_glu_bwd, (struct mt_glu_bwd){.n = n, .f = f, .dtype = t, .kind = MT_GLU_GELU_TANH, .gate_up = gu,
                                           .dout = dout, .dgate_up = gu, .out = dout});
    void *bent = numbers(t, n * f), *dbent = numbers(t, n * f), *shape = numbers(t, 4);
    RUN(mt_op_xielu, (struct mt_xielu){.n = n, .f = f, .dtype = t, .x = bent, .shape = shape, .out = output("xielu", t, n * f)});
    RUN(mt_op_xielu_bwd,
        (struct mt_xielu_bwd){.n = n, .f = f, .dtype = t, .x = bent, .dout = dbent, .shape = shape, .dx = bent, .out = dbent,
                              .dshape = numbers(MT_F32, 2),
                              .workspace = take(mt_op_xielu_bwd_workspace(dev, &(struct mt_xielu_bwd){.n = n, .f = f}))});
    RUN(mt_op_activate, (struct mt_activate){.n = n, .f = f, .dtype = t, .x = gu, .out = output("activate", t, n * f)});
    RUN(mt_op_activate_bwd, (struct mt_activate_bwd){.n = n, .f = f, .dtype = t, .kind = MT_ACTIVATE_GELU_TANH, .x = gu,
                                                     .dout = dout, .dx = gu, .out = dout});
    RUN(mt_op_cross_entropy,
        (struct mt_cross_entropy){.n = n, .vocab = vocab, .ld = ld, .dtype = t, .logits = logits,
                                  .targets = upload(targets, sizeof(targets)),
                                  .loss = output("loss", MT_F32, n), .correct = take(n * sizeof(int32_t)),
                                  .dlogits = logits, .ld_dlogits = ld * width, .scale = 0.5f});
    check_all();
}

static void routing(enum mt_dtype t, size_t e, size_t n_group)
{
    size_t n = 9, k = 4, rows = n + 2;
    void *logits = numbers(t, n * e);
    uint16_t *ids = take(rows * k * sizeof(*ids));
    float *w = output("weights", MT_F32, rows * k), *dw = numbers(MT_F32, n * k), *f = numbers(MT_F32, e);
    struct mt_router_rule rule = {.score = MT_SCORE_SIGMOID, .n_group = n_group, .topk_group = n_group,
                                  .renorm = MT_RENORM_SUM, .scale = 2};
    RUN(mt_op_router, (struct mt_router){.n = n, .n_padded = rows, .e = e, .k = k, .dtype = t, .logits_dtype = t, .rule = rule,
                                         .logits = logits, .select_bias = f, .ids = ids, .weights = w});
    RUN(mt_op_router_bwd, (struct mt_router_bwd){.n = n, .e = e, .k = k, .dtype = t, .logits_dtype = t, .rule = rule,
                                                 .logits = logits, .ids = ids, .dweights = dw, .aux = f, .aux_scale = 0.1f,
                                                 .dlogits = output("dlogits", t, n * e)});
    struct mt_router_stats s = {.n = n, .e = e, .dtype = t, .logits = logits, .prob_sum = numbers(MT_F32, e)};
    s.workspace = take(mt_op_router_stats_workspace(dev, &s));
    RUN(mt_op_router_stats, s);
    struct mt_route_lists l = {.n = rows, .e = e, .k = k, .ids = ids, .weights = w,
                               .counts = output("counts", MT_F32, e + 1), .starts = output("starts", MT_F32, e + 1),
                               .list = take(rows * k * sizeof(int32_t)), .bucket = 128,
                               .places = take(rows * k * sizeof(int32_t))};
    l.workspace = take(mt_op_route_lists_workspace(dev, &l));
    RUN(mt_op_route_lists, l);
    check_all();
}

static void experts(enum mt_dtype t)
{
    enum { N = 5, K = 2, C = 264, F = 520, PADDED = 8 };
    static const int32_t host[N] = {1, 2, 5, 6, 9};
    int32_t *list = upload(host, sizeof(host));
    float *w = numbers(MT_F32, N * K), *gate = output("gate", MT_F32, N);
    void *x = numbers(t, N * C), *gu = numbers(t, PADDED * 2 * F), *dout = numbers(t, PADDED * F);
    RUN(mt_op_moe_gather, (struct mt_moe_gather){.n = N, .n_padded = PADDED, .c = C, .k = K, .dtype = t, .list = list, .x = x,
                                                 .weights = w, .out = output("gathered rows", t, PADDED * C)});
    static const int32_t places[N * K] = {4, 1, -1, -1, 0, 7, 9, 2, 3, 8};
    RUN(mt_op_moe_combine, (struct mt_moe_combine){.n = N, .c = C, .k = K, .rows = N, .first = 1, .dtype = t, .src = x,
                                                   .places = upload(places, sizeof(places)), .weights = w,
                                                   .sum = numbers(MT_F32, N * C)});
    RUN(mt_op_expert_glu_bwd,
        (struct mt_expert_glu_bwd){.n = N, .n_padded = PADDED, .f = F, .k = K, .dtype = t, .kind = MT_GLU_CLAMPED, .alpha = 1.702f,
                                   .limit = 1, .gate_up = gu, .dout = dout, .list = list, .weights = w, .c = C,
                                   .down_bias = numbers(t, C), .d_o = numbers(t, PADDED * C), .dgate_up = gu, .out = dout,
                                   .dweights = numbers(MT_F32, N * K)});
    RUN(mt_op_expert_glu_bwd, /* without a gate */
        (struct mt_expert_glu_bwd){.n = N, .n_padded = PADDED, .f = F, .k = K, .dtype = t, .kind = MT_GLU_RELU2, .gate_up = gu,
                                   .dout = dout, .list = list, .weights = w, .dgate_up = gu, .out = dout,
                                   .dweights = numbers(MT_F32, N * K)});
    void *wg = numbers(t, C);
    RUN(mt_op_shared_gate, (struct mt_shared_gate){.n = N, .c = C, .f = F, .dtype = t, .x = x, .w = wg, .act = dout, .gate = gate});
    struct mt_shared_gate_bwd b = {.n = N, .c = C, .dtype = t, .x = x, .w = wg, .gate = gate, .dgate = numbers(MT_F32, N),
                                   .dx = numbers(MT_F32, N * C), .dw = numbers(MT_F32, C)};
    b.workspace = take(mt_op_shared_gate_bwd_workspace(dev, &b));
    RUN(mt_op_shared_gate_bwd, b);
    check_all();
}

static void sinks(enum mt_dtype t)
{
    size_t n = 9, n_q = 10, d = 24, width = n_q * d;
    struct mt_heads o = mt_heads(numbers(t, n * width), width, n_q, d);
    void *s = numbers(t, n_q);
    float *lse = numbers(MT_F32, n * n_q);
    RUN(mt_op_attention_sink, (struct mt_attention_sink){.n = n, .dtype = t, .sinks = s, .o = o, .lse = lse});
    struct mt_attention_sink_bwd b = {.n = n, .dtype = t, .sinks = s, .o = o,
                                      .d_o = mt_heads(numbers(t, n * width), width, n_q, d), .lse = lse, .dsinks = numbers(MT_F32, n_q)};
    b.workspace = take(mt_op_attention_sink_bwd_workspace(dev, &b));
    RUN(mt_op_attention_sink_bwd, b);
    check_all();
}

static void rows(enum mt_dtype t)
{
    enum { N = 7, V = 9, C = 264 };
    static const int32_t ids[N] = {3, 1, 3, 8, 0, 3, 1}, run_ids[] = {0, 1, 3, 8}, starts[] = {0, 1, 3, 6, 7};
    static const int32_t order[N] = {4, 1, 6, 0, 2, 5, 3}, some[] = {0, 2, 5};
    void *table = numbers(t, V * C), *x = output("embedding", t, N * C);
    RUN(mt_op_embedding, (struct mt_embedding){N, V, C, t, 1.5f, upload(ids, sizeof(ids)), table, x});
    RUN(mt_op_embedding_bwd,
        (struct mt_embedding_bwd){.n = N, .vocab = V, .c = C, .n_runs = 4, .dtype = t, .scale = 1.5f,
                                  .run_ids = upload(run_ids, sizeof(run_ids)),
                                  .starts = upload(starts, sizeof(starts)), .order = upload(order, sizeof(order)),
                                  .dout = x, .dtable = numbers(MT_F32, V * C)});
    int32_t *list = upload(some, sizeof(some));
    void *part = output("gathered", t, 3 * C);
    RUN(mt_op_gather_rows, (struct mt_rows){3, 0, C, t, list, x, part});
    RUN(mt_op_scatter_rows, (struct mt_rows){3, N, C, t, list, part, output("scattered", t, N * C)});
    RUN(mt_op_add, (struct mt_add){N * C, t, x, x, output("added", t, N * C)});
    check_all();
}

static void casts(enum mt_dtype t)
{
    size_t n = MT_SUMSQ_BLOCK + 1001;
    float *src = numbers(MT_F32, n);
    void *joined = numbers(MT_BF16, 2 * (size_t)MT_JOIN_BLOCK);
    RUN(mt_op_grad_cast, (struct mt_grad_cast){n, src, t, output("cast gradient", t, n),
                                               output("squares", MT_F32, 2)});
    RUN(mt_op_cast, (struct mt_cast){n, MT_F32, t, src, output("cast", t, n)});
    RUN(mt_op_join, (struct mt_join){joined, MT_JOIN_BLOCK});
    RUN(mt_op_join, (struct mt_join){numbers(MT_BF16, 2 * (size_t)MT_JOIN_BLOCK), MT_JOIN_BLOCK, .no_lo = true});
    RUN(mt_op_zero, (struct mt_zero){output("zero", t, n), n * mt_dtype_size(t)});
    check_all();
}

/* Micro-batches pass from one device to another through one place in host memory, both computing:
 * only events order them. */
static void relay(mt_device *second, enum mt_dtype t)
{
    enum { ROUNDS = 6, N = 1500, AHEAD = 0, BEHIND = 1 };
    const size_t bytes = N * mt_dtype_size(t);
    mt_device *d[2] = {dev, second};
    mt_event *made[2], *moved[2];
    void *x[2], *y[2], *host = NULL, *back = malloc(bytes);
    if (!back || posix_memalign(&host, 4096, 8192))
        abort();
    for (int i = 0; i < 2; i++) {
        must("register", mt_device_register_host(d[i], host, bytes, &err));
        must("event", mt_event_create(d[i], &made[i], &err));
        must("event", mt_event_create(d[i], &moved[i], &err));
        must("alloc", mt_device_alloc(d[i], bytes, "x", &x[i], &err));
        must("alloc", mt_device_alloc(d[i], bytes, "y", &y[i], &err));
        must("zero", mt_op_zero(d[i], &(struct mt_zero){x[i], bytes}, &err));
        must("zero", mt_op_zero(d[i], &(struct mt_zero){y[i], bytes}, &err));
        must("record", mt_event_record(d[i], made[i], MT_STREAM_COMPUTE, &err)); /* the first copy in waits, too */
    }
    for (int r = 0; r < ROUNDS; r++) {
        must("wait",
             mt_event_wait(d[AHEAD], moved[AHEAD], MT_STREAM_COMPUTE, &err)); /* y has left */
        must("add",
             mt_op_add(d[AHEAD], &(struct mt_add){N, t, x[AHEAD], x[AHEAD], y[AHEAD]}, &err));
        must("record", mt_event_record(d[AHEAD], made[AHEAD], MT_STREAM_COMPUTE, &err));
        must("wait", mt_event_wait(d[AHEAD], made[AHEAD], MT_STREAM_D2H, &err));
        must("wait",
             mt_event_wait(d[AHEAD], moved[BEHIND], MT_STREAM_D2H, &err)); /* the place is free */
        must("out",
             mt_device_copy(d[AHEAD], MT_STREAM_D2H,
                            &(struct mt_copy){host, bytes, y[AHEAD], bytes, bytes, 1}, &err));
        must("record", mt_event_record(d[AHEAD], moved[AHEAD], MT_STREAM_D2H, &err));
        must("wait", mt_event_wait(d[BEHIND], moved[AHEAD], MT_STREAM_H2D, &err));
        must("wait",
             mt_event_wait(d[BEHIND], made[BEHIND], MT_STREAM_H2D, &err)); /* x has been read */
        must("in",
             mt_device_copy(d[BEHIND], MT_STREAM_H2D,
                            &(struct mt_copy){x[BEHIND], bytes, host, bytes, bytes, 1}, &err));
        must("record", mt_event_record(d[BEHIND], moved[BEHIND], MT_STREAM_H2D, &err));
        must("wait", mt_event_wait(d[BEHIND], moved[BEHIND], MT_STREAM_COMPUTE, &err));
        must("add",
             mt_op_add(d[BEHIND], &(struct mt_add){N, t, x[BEHIND], y[BEHIND], y[BEHIND]}, &err));
        must("record", mt_event_record(d[BEHIND], made[BEHIND], MT_STREAM_COMPUTE, &err));
    }
    must("sync", mt_device_sync(d[AHEAD], &err));
    must("sync", mt_device_sync(d[BEHIND], &err));
    must("back", mt_device_copy(second, MT_STREAM_D2H,
                                &(struct mt_copy){back, bytes, y[BEHIND], bytes, bytes, 1}, &err));
    must("sync", mt_device_sync(second, &err));
    for (size_t i = 0; i < bytes; i++)
        if (((const char *)back)[i])
            failures++;
    for (int i = 0; i < 2; i++) {
        mt_device_unregister_host(d[i], host);
        mt_event_destroy(&made[i]);
        mt_event_destroy(&moved[i]);
        mt_device_free(d[i], x[i]);
        mt_device_free(d[i], y[i]);
    }
    free(host);
    free(back);
}

int main(int argc, char **argv)
{
    struct mt_device_params p = {
        .kind = argc > 1 ? argv[1] : "cuda", .budget_bytes = (size_t)64 << 20, .n_threads = 1};
    mt_device *second = NULL;
    must("device", mt_device_create(&dev, &p, &err));
    p.index = 1;
    must("device", mt_device_create(&second, &p, &err));
    for (int d = 0; d < 2; d++) {
        enum mt_dtype t = d ? MT_BF16 : MT_F32;
        norms(t, 5, 72);
        norms(t, 9, 1100);
        norms(t, 3, 8200);
        rope(t, 5, 24, false);
        rope(t, 6, 128, true);
        rope(t, 3, 72, true);
        attention(t, 0, 24, 0);
        attention(t, 7, 24, 0);
        attention(t, 0, 8, 2);
        products(t);
        codes(t);
        units_and_loss(t);
        routing(t, 16, 1);
        routing(t, 72, 8);
        experts(t);
        sinks(t);
        rows(t);
        casts(t);
        relay(second, t);
    }
    mt_device_destroy(&second);
    mt_device_destroy(&dev);
    printf("%d failures\n", failures);
    return failures != 0;
}
