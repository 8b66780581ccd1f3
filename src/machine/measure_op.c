/* SPDX-License-Identifier: Apache-2.0 */
/* A device operation of a given shape, with arguments and buffers to run it on. */
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "machine/measure_priv.h"

enum { MAX_BUFFERS = 16, FILL = 1 << 20 };

/* The operation's arguments and the buffers that they stand on. */
struct mt_trial {
    mt_device *dev;
    bool dry; /* only to see what it takes: nothing is copied */
    struct mt_metered op;
    const struct mt_flow *flow; /* or NULL */
    void *buffer[MAX_BUFFERS];
    int n_buffers;
    struct mt_err *err; /* of the set-up */
    int rc;
    union {
        struct mt_gemm gemm;
        struct mt_attention_bwd attention;
        struct mt_embedding embedding;
        struct mt_embedding_bwd embedding_bwd;
        struct mt_rmsnorm rmsnorm;
        struct mt_rmsnorm_bwd rmsnorm_bwd;
        struct mt_bias_bwd bias_bwd;
        struct mt_qk_rope qk_rope;
        struct mt_qk_rope_bwd qk_rope_bwd;
        struct mt_glu glu;
        struct mt_glu_bwd glu_bwd;
        struct mt_cross_entropy cross_entropy;
        struct mt_rows rows;
        struct mt_add add;
        struct mt_grad_cast grad_cast;
        struct mt_cast cast;
        struct {
            void *p;
            size_t n;
        } flat;
    } a;
    int32_t *cu_seqlens; /* host */
};

/* Values near 1 that are sane as f32 and as pairs of bf16. */
static void fill_random(uint32_t *w, size_t n)
{
    uint64_t x = 88172645463325252u;
    for (size_t i = 0; i < n; i++) {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        w[i] = (0x3f003f00u | (uint32_t)(x & 0x007f007fu)) ^ (uint32_t)(x >> 32 & 0x80008000u);
    }
}

static void upload(struct mt_trial *t, void *dst, const void *src, size_t bytes)
{
    if (t->dry)
        return;
    if (!t->rc)
        t->rc = mt_device_copy(t->dev, MT_STREAM_COMPUTE, &(struct mt_copy){dst, bytes, src, bytes, bytes, 1},
                               t->err);
    if (!t->rc)
        t->rc = mt_device_sync(t->dev, t->err);
}

static void *take_raw(struct mt_trial *t, size_t bytes)
{
    void *p = NULL;
    if (!t->rc)
        t->rc = mt_device_alloc(t->dev, MT_MAX(bytes, (size_t)64), "measurement", &p, t->err);
    if (!t->rc)
        t->buffer[t->n_buffers++] = p;
    return p;
}

static void *take(struct mt_trial *t, size_t bytes)
{
    char *p = take_raw(t, bytes);
    uint32_t *w = t->rc || t->dry ? NULL : mt_calloc(FILL / 4, 4);
    if (!w)
        return p;
    fill_random(w, FILL / 4);
    for (size_t at = 0; at < bytes && !t->rc; at += FILL)
        upload(t, p + at, w, MT_MIN((size_t)FILL, bytes - at));
    free(w);
    return p;
}

/* The operand that the operation before it has just written. It is only read. */
static void *take_flow(struct mt_trial *t, size_t bytes)
{
    return t->flow && bytes <= t->flow->bytes ? t->flow->data : take(t, bytes);
}

/* n integers: i * mul % mod + i * step. */
static int32_t *take_ints(struct mt_trial *t, size_t n, uint64_t mul, uint64_t mod, int64_t step)
{
    int32_t *p = take_raw(t, n * 4), *host = t->rc || t->dry ? NULL : mt_calloc(n, 4);
    for (size_t i = 0; host && i < n; i++)
        host[i] = (int32_t)(i * mul % mod + (uint64_t)((int64_t)i * step));
    if (host)
        upload(t, p, host, n * 4);
    free(host);
    return p;
}

static size_t dim(const struct mt_metered *op, int i)
{
    return (size_t)op->dim[i];
}

static void set_gemm(struct mt_trial *t, const struct mt_metered *op)
{
    size_t m = dim(op, 0), n = dim(op, 1), k = dim(op, 2), e = mt_dtype_size(op->dtype);
    bool f32 = op->flags & MT_METER_F32_OUT || op->dtype == MT_F32;
    struct mt_gemm *g = &t->a.gemm;
    *g = (struct mt_gemm){.m = m, .n = n, .k = k, .dtype = op->dtype, .d_dtype = f32 ? MT_F32 : MT_BF16,
                          .trans_a = op->kind == MT_METER_GEMM_TN,
                          .trans_b = op->kind == MT_METER_GEMM_NT};
    g->a = take_flow(t, m * k * e);
    g->b = take(t, k * n * e);
    g->d = take(t, m * n * (f32 ? 4 : 2));
    g->lda = g->trans_a ? m : k;
    g->ldb = g->trans_b ? k : n;
    g->ldd = n;
    if (op->flags & MT_METER_ADDS) { /* a weight gradient adds to itself, a layer to its input */
        g->c = g->trans_a ? g->d : take(t, m * n * (f32 ? 4 : 2));
        g->ldc = n;
    }
}

static void set_attention(struct mt_trial *t, const struct mt_metered *op)
{
    size_t n = dim(op, 0), len = MT_MIN(dim(op, 1), n), hq = dim(op, 2), hk = dim(op, 3), d = dim(op, 4);
    size_t e = mt_dtype_size(op->dtype), docs = mt_div_up(n, len), ld = (hq + 2 * hk) * d;
    struct mt_attention *f = &t->a.attention.fwd;
    t->cu_seqlens = mt_calloc(docs + 1, sizeof(int32_t));
    if (!t->cu_seqlens) {
        t->rc = mt_fail_nomem(t->err, "a measurement", docs * 4);
        return;
    }
    for (size_t i = 0; i <= docs; i++)
        t->cu_seqlens[i] = (int32_t)MT_MIN(i * len, n);
    bool bwd = op->kind == MT_METER_ATTENTION_BWD;
    char *qkv = bwd ? take(t, n * ld * e) : take_flow(t, n * ld * e);
    int32_t *cu = take_raw(t, (docs + 1) * 4);
    upload(t, cu, t->cu_seqlens, (docs + 1) * 4);
    *f = (struct mt_attention){.n = n, .n_q = hq, .n_kv = hk, .head_dim = d, .n_docs = docs,
                               .max_len = len, .dtype = op->dtype, .scale = 0.125f, .cu_seqlens = cu,
                               .cu_seqlens_host = t->cu_seqlens, .ld_q = ld, .ld_k = ld, .ld_v = ld,
                               .ld_o = hq * d};
    f->q = qkv;
    f->k = qkv + hq * d * e;
    f->v = qkv + (hq + hk) * d * e;
    f->o = take(t, n * hq * d * e);
    f->lse = take(t, n * hq * 4);
    f->workspace = take(t, mt_op_attention_workspace(t->dev, n, len, hq, hk, d, op->dtype));
    if (!bwd)
        return;
    struct mt_attention_bwd *b = &t->a.attention;
    b->d_o = take_flow(t, n * hq * d * e);
    char *dqkv = take(t, n * ld * e);
    b->dq = dqkv;
    b->dk = dqkv + hq * d * e;
    b->dv = dqkv + (hq + hk) * d * e;
    b->ld_dq = b->ld_dk = b->ld_dv = ld;
}

static void set_rope(struct mt_trial *t, const struct mt_metered *op)
{
    size_t n = dim(op, 0), heads = dim(op, 1), d = dim(op, 2), e = mt_dtype_size(op->dtype);
    bool norm = op->flags & MT_METER_NORM, bwd = op->kind == MT_METER_QK_ROPE_BWD;
    size_t ld = heads * d, n_kv = 1;
    int32_t *pos = take_ints(t, n, 1, n, 0);
    float *table = take(t, n * d / 2 * 4);
    void *x = take(t, n * (ld + d) * e), *y = take(t, n * (ld + d) * e);
    void *w = norm ? take(t, d * e) : NULL;
    float *rstd = take(t, n * (heads + 1) * 4);
    size_t n_q = MT_MAX(heads - n_kv, (size_t)1);
    if (!bwd) {
        t->a.qk_rope = (struct mt_qk_rope){
            .n = n, .n_q = n_q, .n_kv = n_kv, .head_dim = d, .rot = d & ~(size_t)1, .dtype = op->dtype,
            .eps = 1e-6f, .qkv = x, .ld_qkv = ld + d, .qk = norm ? y : x, .ld_qk = ld + d,
            .positions = pos, .cos_t = table, .sin_t = table, .max_pos = n, .q_norm = w, .k_norm = w,
            .rstd = rstd};
        return;
    }
    void *ws = take(t, mt_op_qk_rope_bwd_workspace(t->dev, n, n_q, n_kv, d));
    t->a.qk_rope_bwd = (struct mt_qk_rope_bwd){
        .n = n, .n_q = n_q, .n_kv = n_kv, .head_dim = d, .rot = d & ~(size_t)1, .dtype = op->dtype,
        .dqk = y, .ld_dqk = ld + d, .dqkv = y, .ld_dqkv = ld + d, .qkv = x, .ld_qkv = ld + d,
        .positions = pos, .cos_t = table, .sin_t = table, .max_pos = n, .q_norm = w, .k_norm = w,
        .rstd = rstd, .workspace = ws};
    if (norm) {
        t->a.qk_rope_bwd.dq_norm = take(t, d * 4);
        t->a.qk_rope_bwd.dk_norm = take(t, d * 4);
    }
}

static void set_norm(struct mt_trial *t, const struct mt_metered *op)
{
    size_t n = dim(op, 0), c = dim(op, 1), e = mt_dtype_size(op->dtype);
    bool bwd = op->kind == MT_METER_RMSNORM_BWD;
    void *x = bwd ? take(t, n * c * e) : take_flow(t, n * c * e), *y = take(t, n * c * e), *w = take(t, c * e);
    float *rstd = take(t, n * 4);
    if (!bwd) {
        t->a.rmsnorm = (struct mt_rmsnorm){.n = n, .c = c, .dtype = op->dtype, .eps = 1e-6f, .x = x,
                                           .w = w, .y = y, .rstd = rstd};
        return;
    }
    void *dy = take_flow(t, n * c * e);
    t->a.rmsnorm_bwd = (struct mt_rmsnorm_bwd){
        .n = n, .c = c, .dtype = op->dtype, .dy = dy, .x = x, .w = w, .rstd = rstd, .dres = y, .dx = y,
        .dw = take(t, c * 4), .workspace = take(t, mt_op_rmsnorm_bwd_workspace(t->dev, n, c))};
}

static void set_glu(struct mt_trial *t, const struct mt_metered *op)
{
    size_t n = dim(op, 0), f = dim(op, 1), e = mt_dtype_size(op->dtype);
    bool bwd = op->kind == MT_METER_GLU_BWD;
    void *gu = bwd ? take(t, 2 * n * f * e) : take_flow(t, 2 * n * f * e);
    void *out = bwd ? take_flow(t, n * f * e) : take(t, n * f * e);
    if (!bwd)
        t->a.glu = (struct mt_glu){.n = n, .f = f, .dtype = op->dtype, .gate_up = gu, .out = out};
    else
        t->a.glu_bwd = (struct mt_glu_bwd){.n = n, .f = f, .dtype = op->dtype, .gate_up = gu, .dout = out,
                                           .dgate_up = take(t, 2 * n * f * e), .out = out};
}

static void set_embedding(struct mt_trial *t, const struct mt_metered *op)
{
    size_t n = dim(op, 0), c = dim(op, 1), e = mt_dtype_size(op->dtype), runs = dim(op, 2);
    if (op->kind == MT_METER_EMBEDDING) {
        t->a.embedding = (struct mt_embedding){
            .n = n, .vocab = n, .c = c, .dtype = op->dtype, .scale = 1,
            .ids = take_ints(t, n, 2654435761u, n, 0), .table = take(t, n * c * e), .out = take(t, n * c * e)};
        return;
    }
    int32_t *starts = take_raw(t, (runs + 1) * 4), *host = mt_calloc(runs + 1, 4);
    for (size_t i = 0; host && i <= runs; i++)
        host[i] = (int32_t)(i * n / runs);
    if (host)
        upload(t, starts, host, (runs + 1) * 4);
    free(host);
    t->a.embedding_bwd = (struct mt_embedding_bwd){
        .n = n, .vocab = runs, .c = c, .n_runs = runs, .dtype = op->dtype, .scale = 1,
        .run_ids = take_ints(t, runs, 1, runs, 0), .starts = starts,
        .order = take_ints(t, n, 2654435761u, n, 0), .dout = take_flow(t, n * c * e),
        .dtable = take(t, runs * c * 4)};
}

static void set_rows(struct mt_trial *t, const struct mt_metered *op)
{
    size_t n = dim(op, 0), c = dim(op, 1), e = mt_dtype_size(op->dtype);
    t->a.rows = (struct mt_rows){.n = n, .n_dst = n, .c = c, .dtype = op->dtype,
                                 .rows = take_ints(t, n, 1, n, 0), .src = take_flow(t, n * c * e),
                                 .dst = take(t, n * c * e)};
}

static void set_loss(struct mt_trial *t, const struct mt_metered *op)
{
    size_t n = dim(op, 0), v = dim(op, 1);
    t->a.cross_entropy = (struct mt_cross_entropy){
        .n = n, .vocab = v, .ld = v, .dtype = op->dtype, .logits = take_flow(t, n * v * 4),
        .targets = take_ints(t, n, 2654435761u, v, 0), .loss = take(t, n * 4), .correct = take(t, n * 4),
        .ld_dlogits = v, .scale = 1e-3f};
    if (!(op->flags & MT_METER_LOSS_ONLY)) /* not in place: the logits stay what they are */
        t->a.cross_entropy.dlogits = take(t, n * v * mt_dtype_size(op->dtype));
}

static void set_flat(struct mt_trial *t, const struct mt_metered *op)
{
    size_t n = dim(op, 0), e = mt_dtype_size(op->dtype);
    switch (op->kind) {
    case MT_METER_ADD:
        t->a.add = (struct mt_add){n, op->dtype, take_flow(t, n * e), take(t, n * e), take(t, n * e)};
        break;
    case MT_METER_GRAD_CAST:
        t->a.grad_cast = (struct mt_grad_cast){.n = n, .src = take(t, n * 4), .dst_dtype = op->dtype,
                                               .dst = take(t, n * e),
                                               .partials = take(t, mt_div_up(n, MT_SUMSQ_BLOCK) * 4)};
        break;
    case MT_METER_CAST:
        t->a.cast = (struct mt_cast){n, op->dtype, op->dtype == MT_F32 ? MT_BF16 : MT_F32,
                                     take(t, n * e), take(t, n * (6 - e))};
        break;
    case MT_METER_JOIN:
        t->a.flat.n = mt_align_up(n, MT_JOIN_BLOCK);
        t->a.flat.p = take(t, t->a.flat.n * 4);
        break;
    default: /* zero */
        t->a.flat.n = n;
        t->a.flat.p = take(t, n);
    }
}

static void set_up(struct mt_trial *t, const struct mt_metered *op)
{
    switch (op->kind) {
    case MT_METER_GEMM_NT:
    case MT_METER_GEMM_NN:
    case MT_METER_GEMM_TN:
        set_gemm(t, op);
        break;
    case MT_METER_ATTENTION:
    case MT_METER_ATTENTION_BWD:
        set_attention(t, op);
        break;
    case MT_METER_EMBEDDING:
    case MT_METER_EMBEDDING_BWD:
        set_embedding(t, op);
        break;
    case MT_METER_RMSNORM:
    case MT_METER_RMSNORM_BWD:
        set_norm(t, op);
        break;
    case MT_METER_BIAS_BWD:
        t->a.bias_bwd = (struct mt_bias_bwd){
            .n = dim(op, 0), .c = dim(op, 1), .ld = dim(op, 1), .dtype = op->dtype,
            .dy = take_flow(t, dim(op, 0) * dim(op, 1) * mt_dtype_size(op->dtype)),
            .db = take(t, dim(op, 1) * 4),
            .workspace = take(t, mt_op_bias_bwd_workspace(t->dev, dim(op, 0), dim(op, 1)))};
        break;
    case MT_METER_QK_ROPE:
    case MT_METER_QK_ROPE_BWD:
        set_rope(t, op);
        break;
    case MT_METER_GLU:
    case MT_METER_GLU_BWD:
        set_glu(t, op);
        break;
    case MT_METER_CROSS_ENTROPY:
        set_loss(t, op);
        break;
    case MT_METER_GATHER_ROWS:
    case MT_METER_SCATTER_ROWS:
        set_rows(t, op);
        break;
    default:
        set_flat(t, op);
    }
}

int mt_trial_submit(struct mt_trial *t, struct mt_err *err)
{
    mt_device *d = t->dev;
    switch (t->op.kind) {
    case MT_METER_GEMM_NT:
    case MT_METER_GEMM_NN:
    case MT_METER_GEMM_TN:
        return mt_op_gemm(d, &t->a.gemm, err);
    case MT_METER_ATTENTION:
        return mt_op_attention(d, &t->a.attention.fwd, err);
    case MT_METER_ATTENTION_BWD:
        return mt_op_attention_bwd(d, &t->a.attention, err);
    case MT_METER_EMBEDDING:
        return mt_op_embedding(d, &t->a.embedding, err);
    case MT_METER_EMBEDDING_BWD:
        return mt_op_embedding_bwd(d, &t->a.embedding_bwd, err);
    case MT_METER_RMSNORM:
        return mt_op_rmsnorm(d, &t->a.rmsnorm, err);
    case MT_METER_RMSNORM_BWD:
        return mt_op_rmsnorm_bwd(d, &t->a.rmsnorm_bwd, err);
    case MT_METER_BIAS_BWD:
        return mt_op_bias_bwd(d, &t->a.bias_bwd, err);
    case MT_METER_QK_ROPE:
        return mt_op_qk_rope(d, &t->a.qk_rope, err);
    case MT_METER_QK_ROPE_BWD:
        return mt_op_qk_rope_bwd(d, &t->a.qk_rope_bwd, err);
    case MT_METER_GLU:
        return mt_op_glu(d, &t->a.glu, err);
    case MT_METER_GLU_BWD:
        return mt_op_glu_bwd(d, &t->a.glu_bwd, err);
    case MT_METER_CROSS_ENTROPY:
        return mt_op_cross_entropy(d, &t->a.cross_entropy, err);
    case MT_METER_GATHER_ROWS:
        return mt_op_gather_rows(d, &t->a.rows, err);
    case MT_METER_SCATTER_ROWS:
        return mt_op_scatter_rows(d, &t->a.rows, err);
    case MT_METER_ADD:
        return mt_op_add(d, &t->a.add, err);
    case MT_METER_GRAD_CAST:
        return mt_op_grad_cast(d, &t->a.grad_cast, err);
    case MT_METER_CAST:
        return mt_op_cast(d, &t->a.cast, err);
    case MT_METER_JOIN:
        return mt_op_join(d, t->a.flat.p, t->a.flat.n, err);
    default:
        return mt_op_zero(d, t->a.flat.p, t->a.flat.n, err);
    }
}

int mt_flow_create(struct mt_flow *out, mt_device *dev, size_t bytes, struct mt_err *err)
{
    struct mt_trial t = {.dev = dev, .err = err};
    void *p = take(&t, bytes);
    if (t.rc) {
        mt_device_free(dev, p);
        return t.rc;
    }
    *out = (struct mt_flow){p, bytes};
    return 0;
}

int mt_trial_create(struct mt_trial **out, mt_device *dev, const struct mt_metered *op,
                    const struct mt_flow *flow, struct mt_err *err)
{
    struct mt_trial *t = mt_calloc(1, sizeof(*t));
    if (!t)
        return mt_fail_nomem(err, "a measurement", sizeof(*t));
    t->dev = dev;
    t->op = *op;
    t->flow = flow;
    t->err = err;
    set_up(t, op);
    int rc = t->rc;
    if (rc)
        mt_trial_destroy(&t);
    *out = t;
    return rc;
}

void mt_trial_destroy(struct mt_trial **trial)
{
    struct mt_trial *t = *trial;
    if (!t)
        return;
    mt_device_sync(t->dev, NULL);
    for (int i = 0; i < t->n_buffers; i++)
        mt_device_free(t->dev, t->buffer[i]);
    free(t->cu_seqlens);
    free(t);
    *trial = NULL;
}

/* By the very arguments, on a device that only counts. */
size_t mt_measure_operation_bytes(const struct mt_measure_params *mp, const struct mt_metered *op)
{
    enum { GAPS = 64 << 10 }; /* of a buffer: alignment, and what sanitizers put between */
    struct mt_trial t = {.op = *op, .dry = true};
    struct mt_meter_params p = {.kind = mp->device_kind, .budget_bytes = SIZE_MAX, .n_threads = mp->n_threads};
    size_t bytes = 0;
    if (mt_device_create_meter(&t.dev, &p, NULL))
        return 0;
    set_up(&t, op);
    bytes = mt_device_bytes_used(t.dev) + (size_t)t.n_buffers * GAPS;
    mt_device_destroy(&t.dev);
    free(t.cu_seqlens);
    return bytes;
}
