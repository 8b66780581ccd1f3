/* SPDX-License-Identifier: Apache-2.0 */
#include "device/meter.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "device/backend.h"
#include "device/cpu/cpu.h"
#include "device/cuda_workspace.h"

/* Addresses are handed out from here upwards and never touched. */
enum { FIRST_ADDRESS_BITS = 44, CUDA_ALIGNMENT = 256 };

struct meter {
    struct mt_device base;
    mt_meter_fn fn;
    void *ctx;
    uintptr_t next;
    size_t used;
};

static const char *const kind_names[MT_N_METER_KINDS] = {
    "gemm_nt",     "gemm_nn",     "gemm_tn", "attention",     "attention_bwd", "embedding",
    "embedding_bwd", "rmsnorm",   "rmsnorm_bwd", "bias_bwd",  "qk_rope",       "qk_rope_bwd",
    "glu",         "glu_bwd",     "cross_entropy", "gather_rows", "scatter_rows", "add",
    "grad_cast",   "join",        "zero",    "cast",
};

const char *mt_meter_kind_name(enum mt_meter_kind k)
{
    return kind_names[k];
}

static void tell(mt_device *dev, const struct mt_metered *op)
{
    struct meter *m = (struct meter *)dev;
    if (m->fn)
        m->fn(m->ctx, op);
}

/* A memory-bound operation over n rows of c elements that moves `per_elem` bytes an element. */
static int tell_rows(mt_device *dev, enum mt_meter_kind k, enum mt_dtype t, unsigned flags, size_t n,
                     size_t c, double per_elem)
{
    struct mt_metered op = {.kind = k, .dtype = t, .flags = flags, .n_dims = 2, .dim = {n, c}};
    op.bytes = (double)n * (double)c * per_elem;
    tell(dev, &op);
    return 0;
}

static int tell_flat(mt_device *dev, enum mt_meter_kind k, enum mt_dtype t, size_t n, double per_elem)
{
    struct mt_metered op = {.kind = k, .dtype = t, .n_dims = 1, .dim = {n}};
    op.bytes = (double)n * per_elem;
    tell(dev, &op);
    return 0;
}

static double size_of(enum mt_dtype t)
{
    return (double)mt_dtype_size(t);
}

static int meter_embedding(mt_device *dev, const struct mt_embedding *a, struct mt_err *err)
{
    (void)err;
    return tell_rows(dev, MT_METER_EMBEDDING, a->dtype, 0, a->n, a->c, 2 * size_of(a->dtype));
}

static int meter_embedding_bwd(mt_device *dev, const struct mt_embedding_bwd *a, struct mt_err *err)
{
    (void)err;
    struct mt_metered op = {.kind = MT_METER_EMBEDDING_BWD, .dtype = a->dtype, .n_dims = 3,
                            .dim = {a->n, a->c, a->n_runs}};
    op.bytes = (double)a->c * ((double)a->n * size_of(a->dtype) + 8.0 * (double)a->n_runs);
    tell(dev, &op);
    return 0;
}

static int meter_rmsnorm(mt_device *dev, const struct mt_rmsnorm *a, struct mt_err *err)
{
    (void)err;
    return tell_rows(dev, MT_METER_RMSNORM, a->dtype, 0, a->n, a->c,
                     (a->residual ? 4 : 2) * size_of(a->dtype));
}

static int meter_rmsnorm_bwd(mt_device *dev, const struct mt_rmsnorm_bwd *a, struct mt_err *err)
{
    (void)err;
    return tell_rows(dev, MT_METER_RMSNORM_BWD, a->dtype, 0, a->n, a->c,
                     (a->dres ? 4 : 3) * size_of(a->dtype));
}

static int meter_gemm(mt_device *dev, const struct mt_gemm *a, struct mt_err *err)
{
    (void)err;
    double m = (double)a->m, n = (double)a->n, k = (double)a->k;
    struct mt_metered op = {.kind = a->trans_a ? MT_METER_GEMM_TN
                                    : a->trans_b ? MT_METER_GEMM_NT
                                                 : MT_METER_GEMM_NN,
                            .dtype = a->dtype, .n_dims = 3, .dim = {a->m, a->n, a->k}};
    op.flags = (a->bias || a->c ? MT_METER_ADDS : 0) |
               (a->d_dtype != a->dtype ? MT_METER_F32_OUT : 0);
    op.flops = 2 * m * n * k;
    op.bytes = (m * k + k * n) * size_of(a->dtype) + m * n * size_of(a->d_dtype) * (a->c ? 2 : 1);
    tell(dev, &op);
    return 0;
}

static int meter_bias_bwd(mt_device *dev, const struct mt_bias_bwd *a, struct mt_err *err)
{
    (void)err;
    return tell_rows(dev, MT_METER_BIAS_BWD, a->dtype, 0, a->n, a->c, size_of(a->dtype));
}

static int tell_rope(mt_device *dev, enum mt_meter_kind k, enum mt_dtype t, bool norm, size_t n,
                     size_t heads, size_t head_dim)
{
    struct mt_metered op = {.kind = k, .dtype = t, .flags = norm ? MT_METER_NORM : 0, .n_dims = 3,
                            .dim = {n, heads, head_dim}};
    double passes = k == MT_METER_QK_ROPE_BWD && norm ? 3 : 2;
    op.bytes = (double)n * (double)heads * (double)head_dim * passes * size_of(t);
    tell(dev, &op);
    return 0;
}

static int meter_qk_rope(mt_device *dev, const struct mt_qk_rope *a, struct mt_err *err)
{
    (void)err;
    return tell_rope(dev, MT_METER_QK_ROPE, a->dtype, a->q_norm, a->n, a->n_q + a->n_kv, a->head_dim);
}

static int meter_qk_rope_bwd(mt_device *dev, const struct mt_qk_rope_bwd *a, struct mt_err *err)
{
    (void)err;
    return tell_rope(dev, MT_METER_QK_ROPE_BWD, a->dtype, a->q_norm, a->n, a->n_q + a->n_kv,
                     a->head_dim);
}

/* Pairs of query and key that are seen: over documents, causal, within the window. */
static double seen_pairs(const struct mt_attention *a)
{
    double sum = 0;
    for (size_t i = 0; i < a->n_docs; i++) {
        double len = a->cu_seqlens_host[i + 1] - a->cu_seqlens_host[i];
        double w = a->window ? MT_MIN((double)a->window, len) : len;
        sum += w * (w + 1) / 2 + (len - w) * w;
    }
    return sum;
}

static int tell_attention(mt_device *dev, enum mt_meter_kind k, const struct mt_attention *a)
{
    double pairs = seen_pairs(a), heads = (double)a->n_q, d = (double)a->head_dim, n = (double)a->n;
    bool bwd = k == MT_METER_ATTENTION_BWD;
    struct mt_metered op = {.kind = k, .dtype = a->dtype, .n_dims = 5};
    op.dim[0] = a->n;
    op.dim[1] = (uint64_t)(2 * pairs / n);
    op.dim[2] = a->n_q;
    op.dim[3] = a->n_kv;
    op.dim[4] = a->head_dim;
    op.flops = pairs * heads * d * (bwd ? 10 : 4); /* five products against two */
    op.bytes = n * d * (2 * heads + 2 * (double)a->n_kv) * size_of(a->dtype) * (bwd ? 2 : 1);
    tell(dev, &op);
    return 0;
}

static int meter_attention(mt_device *dev, const struct mt_attention *a, struct mt_err *err)
{
    (void)err;
    return tell_attention(dev, MT_METER_ATTENTION, a);
}

static int meter_attention_bwd(mt_device *dev, const struct mt_attention_bwd *a, struct mt_err *err)
{
    (void)err;
    return tell_attention(dev, MT_METER_ATTENTION_BWD, &a->fwd);
}

static int meter_glu(mt_device *dev, const struct mt_glu *a, struct mt_err *err)
{
    (void)err;
    return tell_rows(dev, MT_METER_GLU, a->dtype, 0, a->n, a->f, 3 * size_of(a->dtype));
}

static int meter_glu_bwd(mt_device *dev, const struct mt_glu_bwd *a, struct mt_err *err)
{
    (void)err;
    return tell_rows(dev, MT_METER_GLU_BWD, a->dtype, 0, a->n, a->f, (a->out ? 6 : 5) * size_of(a->dtype));
}

static int meter_cross_entropy(mt_device *dev, const struct mt_cross_entropy *a, struct mt_err *err)
{
    (void)err;
    return tell_rows(dev, MT_METER_CROSS_ENTROPY, a->dtype, a->dlogits ? 0 : MT_METER_LOSS_ONLY, a->n,
                     a->vocab, a->dlogits ? 8 + size_of(a->dtype) : 4);
}

static int meter_gather_rows(mt_device *dev, const struct mt_rows *a, struct mt_err *err)
{
    (void)err;
    return tell_rows(dev, MT_METER_GATHER_ROWS, a->dtype, 0, a->n, a->c, 2 * size_of(a->dtype));
}

static int meter_scatter_rows(mt_device *dev, const struct mt_rows *a, struct mt_err *err)
{
    (void)err;
    return tell_rows(dev, MT_METER_SCATTER_ROWS, a->dtype, 0, a->n_dst, a->c, 2 * size_of(a->dtype));
}

static int meter_add(mt_device *dev, const struct mt_add *a, struct mt_err *err)
{
    (void)err;
    return tell_flat(dev, MT_METER_ADD, a->dtype, a->n, 3 * size_of(a->dtype));
}

static int meter_grad_cast(mt_device *dev, const struct mt_grad_cast *a, struct mt_err *err)
{
    (void)err;
    return tell_flat(dev, MT_METER_GRAD_CAST, a->dst_dtype, a->n, 4 + size_of(a->dst_dtype));
}

static int meter_join(mt_device *dev, const struct mt_join *a, struct mt_err *err)
{
    (void)err;
    return tell_flat(dev, MT_METER_JOIN, MT_F32, a->n, 8);
}

static int meter_zero(mt_device *dev, const struct mt_zero *a, struct mt_err *err)
{
    (void)err;
    return tell_flat(dev, MT_METER_ZERO, MT_F32, a->bytes, 1);
}

static int meter_cast(mt_device *dev, const struct mt_cast *a, struct mt_err *err)
{
    (void)err;
    return tell_flat(dev, MT_METER_CAST, a->src_dtype, a->n, size_of(a->src_dtype) + size_of(a->dst_dtype));
}

/* --- memory, events, copies: nothing happens ------------------------------------------------- */

static void meter_destroy(mt_device *dev)
{
    free(dev);
}

static int meter_alloc(mt_device *dev, size_t bytes, const char *tag, void **out, struct mt_err *err)
{
    struct meter *m = (struct meter *)dev;
    size_t need = mt_align_up(MT_MAX(bytes, (size_t)1), dev->limits.alignment);
    if (need > dev->limits.budget_bytes - m->used)
        return mt_fail(err, MT_ERR_NO_FIT, -ENOMEM, "%s: %zu bytes beyond the device budget of %zu", tag,
                       m->used + need, dev->limits.budget_bytes);
    *out = (void *)m->next;
    m->next += need;
    m->used += need;
    return 0;
}

static void meter_free(mt_device *dev, void *ptr)
{
    (void)dev;
    (void)ptr;
}

static size_t meter_used(const mt_device *dev)
{
    return ((const struct meter *)dev)->used;
}

static void meter_poison(mt_device *dev, void *ptr, size_t bytes)
{
    (void)ptr;
    tell_flat(dev, MT_METER_ZERO, MT_F32, bytes, 1);
}

static int meter_register(mt_device *dev, void *ptr, size_t bytes, struct mt_err *err)
{
    (void)dev;
    (void)ptr;
    (void)bytes;
    (void)err;
    return 0;
}

static void meter_unregister(mt_device *dev, void *ptr)
{
    (void)dev;
    (void)ptr;
}

static int meter_event_create(mt_device *dev, mt_event **out, struct mt_err *err)
{
    mt_event *ev = mt_calloc(1, sizeof(*ev));
    if (!ev)
        return mt_fail_nomem(err, "an event", sizeof(*ev));
    ev->dev = dev;
    *out = ev;
    return 0;
}

static void meter_event_destroy(mt_event *ev)
{
    free(ev);
}

static int meter_event(mt_device *dev, mt_event *ev, enum mt_stream s, struct mt_err *err)
{
    (void)dev;
    (void)ev;
    (void)s;
    (void)err;
    return 0;
}

static int meter_event_sync(mt_device *dev, mt_event *ev, struct mt_err *err)
{
    (void)dev;
    (void)ev;
    (void)err;
    return 0;
}

static int64_t meter_event_time(mt_event *ev)
{
    (void)ev;
    return 0;
}

static int meter_copy(mt_device *dev, enum mt_stream s, const struct mt_copy *c, struct mt_err *err)
{
    (void)dev;
    (void)s;
    (void)c;
    (void)err;
    return 0;
}

static int meter_sync(mt_device *dev, struct mt_err *err)
{
    (void)dev;
    (void)err;
    return 0;
}

static bool is_cpu(const mt_device *dev)
{
    return !strcmp(dev->limits.kind, "cpu");
}

static size_t rmsnorm_bwd_workspace(mt_device *dev, size_t n, size_t c)
{
    return is_cpu(dev) ? mt_cpu_rmsnorm_bwd_workspace(dev, n, c)
                       : mt_cuda_rmsnorm_bwd_workspace(n, c);
}

static size_t bias_bwd_workspace(mt_device *dev, size_t n, size_t c)
{
    return is_cpu(dev) ? mt_cpu_bias_bwd_workspace(dev, n, c)
                       : mt_cuda_bias_bwd_workspace(n, c);
}

static size_t qk_rope_bwd_workspace(mt_device *dev, size_t n, size_t n_q, size_t n_kv, size_t d)
{
    return is_cpu(dev) ? mt_cpu_qk_rope_bwd_workspace(dev, n, n_q, n_kv, d)
                       : mt_cuda_qk_rope_bwd_workspace(n, d);
}

/* CUDA: as with fused attention, which takes more, so that what is planned fits with either. */
static size_t attention_workspace(mt_device *dev, size_t n, size_t max_len, size_t n_q, size_t n_kv,
                                  size_t d, enum mt_dtype t)
{
    return is_cpu(dev) ? mt_cpu_attention_workspace(dev, n, max_len, n_q, n_kv, d, t)
                       : mt_cuda_attention_bytes(true, n, max_len, n_q, n_kv, d, t);
}

static const struct mt_device_backend meter_backend = {
    .destroy = meter_destroy,
    .alloc = meter_alloc,
    .free = meter_free,
    .bytes_used = meter_used,
    .bytes_peak = meter_used,
    .poison = meter_poison,
    .register_host = meter_register,
    .unregister_host = meter_unregister,
    .event_create = meter_event_create,
    .event_destroy = meter_event_destroy,
    .event_record = meter_event,
    .event_wait = meter_event,
    .event_sync = meter_event_sync,
    .event_time_ns = meter_event_time,
    .copy = meter_copy,
    .sync = meter_sync,
    .status = meter_sync,
    .rmsnorm_bwd_workspace = rmsnorm_bwd_workspace,
    .bias_bwd_workspace = bias_bwd_workspace,
    .qk_rope_bwd_workspace = qk_rope_bwd_workspace,
    .attention_workspace = attention_workspace,
#define METER_ENTRY(name, type) .name = meter_##name,
    MT_DEVICE_OPS(METER_ENTRY)
#undef METER_ENTRY
};

int mt_device_create_meter(mt_device **out, const struct mt_meter_params *p, struct mt_err *err)
{
    struct meter *m = mt_calloc(1, sizeof(*m));
    if (!m)
        return mt_fail_nomem(err, "a meter", sizeof(*m));
    bool cpu = !strcmp(p->kind, "cpu");
    m->base.backend = &meter_backend;
    m->base.limits = (struct mt_device_limits){
        .kind = cpu ? "cpu" : "cuda",
        .budget_bytes = p->budget_bytes,
        .n_threads = MT_MAX(p->n_threads, 1),
        .native_bf16 = p->native_bf16,
        .alignment = cpu ? (size_t)MT_CPU_ALIGNMENT : (size_t)CUDA_ALIGNMENT,
    };
    snprintf(m->base.limits.name, sizeof(m->base.limits.name), "%s", p->name ? p->name : p->kind);
    m->fn = p->fn;
    m->ctx = p->ctx;
    m->next = (uintptr_t)1 << FIRST_ADDRESS_BITS;
    *out = &m->base;
    return 0;
}
