/* SPDX-License-Identifier: Apache-2.0 */
/*
 * An engine of fused attention (cuda/fused.h) for the emulation, with what cuDNN supports and refuses, so
 * that cuda/fused.c's choices, tables and copies are tested without it. Written from the interface's words.
 */
#include <math.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/dtype.h"
#include "base/mem.h"
#include "emu.h"
#include "fused.h"

enum { MAX_PLANS = 128 }; /* at once: each takes GPU memory beside the budget */

struct plan {
    struct mt_fused_shape s;
    size_t workspace;
    atomic_int runs; /* on their way */
};

struct context {
    cudaStream_t stream;
    int n_plans;
};

static atomic_size_t n_made;

size_t mt_emu_fused_plans(void)
{
    return atomic_load(&n_made);
}

/* A call on its way to the stream's thread. */
struct job {
    struct mt_fused_shape s;
    struct mt_fused_call c;
    size_t workspace;
    struct plan *plan;
};

/* Sequence b of a tensor: its first element. */
static int64_t start(const struct job *j, int table, int64_t b, int64_t ld)
{
    return j->s.ragged ? j->c.offsets[table][b] : b * j->s.len * ld;
}

static float get(const void *p, int64_t i)
{
    return mt_bf16_to_f32(((const uint16_t *)p)[i]);
}

static void put(void *p, int64_t i, float v)
{
    ((uint16_t *)p)[i] = mt_f32_to_bf16(v);
}

static float dot(const void *a, int64_t at_a, const void *b, int64_t at_b, int64_t n)
{
    float sum = 0;
    for (int64_t c = 0; c < n; c++)
        sum += get(a, at_a + c) * get(b, at_b + c);
    return sum;
}

/* One head of one sequence. */
struct head {
    int64_t rows, q, k, v, o, dq, group_heads; /* elements of row 0 */
    float *stats;
    int64_t stats_step;
    float scale;
};

static struct head head_of(const struct job *j, int64_t b, int64_t h)
{
    const struct mt_fused_shape *s = &j->s;
    int64_t kv = h / (s->n_q / s->n_kv);
    uint32_t bits = (uint32_t)s->scale_bits;
    struct head x = {.rows = s->ragged ? j->c.lens[b] : s->len,
                     .q = start(j, MT_FUSED_Q, b, s->q.ld) + h * s->q.stride,
                     .k = start(j, MT_FUSED_K, b, s->k.ld) + kv * s->k.stride,
                     .v = start(j, MT_FUSED_V, b, s->v.ld) + kv * s->v.stride,
                     .o = start(j, MT_FUSED_O, b, s->o.ld) + h * s->o.stride,
                     .stats_step = s->ragged ? s->n_q : 1, .scale = mt_f32_from_bits(bits)};
    if (s->backward)
        x.dq = start(j, MT_FUSED_DQ, b, s->dq.ld) + h * s->dq.stride;
    x.stats = j->c.stats + (s->ragged ? j->c.offsets[MT_FUSED_STATS][b] + h
                                      : (b * s->n_q + h) * s->len);
    if (x.rows < 0 || x.rows > s->len)
        mt_emu_die("fused attention: a sequence of %lld rows in a shape of %lld", (long long)x.rows,
                   (long long)s->len);
    return x;
}

static int64_t first_seen(const struct mt_fused_shape *s, int64_t i)
{
    return s->window && i + 1 > s->window ? i + 1 - s->window : 0;
}

static void forward_row(const struct job *j, const struct head *x, int64_t i, float *p)
{
    const struct mt_fused_shape *s = &j->s;
    float max = -INFINITY, sum = 0;
    for (int64_t k = first_seen(s, i); k <= i; k++) {
        p[k] = x->scale * dot(j->c.q, x->q + i * s->q.ld, j->c.k, x->k + k * s->k.ld, s->dim);
        max = fmaxf(max, p[k]);
    }
    for (int64_t k = first_seen(s, i); k <= i; k++)
        sum += p[k] = expf(p[k] - max);
    for (int64_t c = 0; c < s->dim_v; c++) {
        float o = 0;
        for (int64_t k = first_seen(s, i); k <= i; k++)
            o += p[k] * get(j->c.v, x->v + k * s->v.ld + c);
        put(j->c.o, x->o + i * s->o.ld + c, o / sum);
    }
    x->stats[i * x->stats_step] = max + logf(sum);
}

/* dk, dv: [rows, dim] and [rows, dim_v] sums of the group. */
static void backward_row(const struct job *j, const struct head *x, int64_t i, float *dk, float *dv)
{
    const struct mt_fused_shape *s = &j->s;
    int64_t d = s->dim, d_v = s->dim_v, q = x->q + i * s->q.ld, o = x->o + i * s->o.ld;
    float delta = dot(j->c.d_o, o, j->c.o, o, d_v), *dq = calloc((size_t)d, sizeof(float));
    for (int64_t k = first_seen(s, i); dq && k <= i; k++) {
        int64_t key = x->k + k * s->k.ld, value = x->v + k * s->v.ld;
        float score = x->scale * dot(j->c.q, q, j->c.k, key, d);
        float p = expf(score - x->stats[i * x->stats_step]);
        float ds = p * (dot(j->c.d_o, o, j->c.v, value, d_v) - delta) * x->scale;
        for (int64_t c = 0; c < d; c++) {
            dq[c] += ds * get(j->c.k, key + c);
            dk[k * d + c] += ds * get(j->c.q, q + c);
        }
        for (int64_t c = 0; c < d_v; c++)
            dv[k * d_v + c] += p * get(j->c.d_o, o + c);
    }
    for (int64_t c = 0; dq && c < d; c++)
        put(j->c.dq, x->dq + i * s->dq.ld + c, dq[c]);
    free(dq);
}

static void backward_group(const struct job *j, int64_t b, int64_t kv)
{
    const struct mt_fused_shape *s = &j->s;
    int64_t group = s->n_q / s->n_kv, d = s->dim, d_v = s->dim_v;
    float *dk = calloc((size_t)(s->len * (d + d_v)), sizeof(float)), *dv = dk + s->len * d;
    struct head x = {0};
    if (!dk)
        mt_emu_die("no memory for attention");
    for (int64_t h = kv * group; h < (kv + 1) * group; h++) {
        x = head_of(j, b, h);
        for (int64_t i = 0; i < x.rows; i++)
            backward_row(j, &x, i, dk, dv);
    }
    for (int64_t i = 0; i < x.rows; i++) {
        for (int64_t c = 0; c < d; c++)
            put(j->c.dk, start(j, MT_FUSED_DK, b, s->dk.ld) + kv * s->dk.stride + i * s->dk.ld + c, dk[i * d + c]);
        for (int64_t c = 0; c < d_v; c++)
            put(j->c.dv, start(j, MT_FUSED_DV, b, s->dv.ld) + kv * s->dv.stride + i * s->dv.ld + c, dv[i * d_v + c]);
    }
    free(dk);
}

/* MT_EMU_FUSED_FAULT = "backward ragged nan": calls of a kind that go wrong, by not a number or by a tenth; "empty": only
 * those with empty sequences; "after 20": not the first 20; "memory": plans of a kind that get none. NULL: nothing is wrong with this kind. */
static const char *fault_of(const struct mt_fused_shape *s)
{
    const char *fault = getenv("MT_EMU_FUSED_FAULT");
    bool this = fault && strstr(fault, s->backward ? "backward" : "forward") && strstr(fault, s->ragged ? "ragged" : "fixed");
    return this ? fault : NULL;
}

static void spoil(const struct job *j)
{
    static atomic_int n_calls;
    const char *fault = fault_of(&j->s), *after = fault ? strstr(fault, "after ") : NULL;
    if (after && atomic_fetch_add(&n_calls, 1) < atoi(after + 6))
        return;
    if (!fault || strstr(fault, "memory") || (strstr(fault, "empty") && j->c.lens[j->s.batch - 1]))
        return;
    uint16_t *p = j->s.backward ? j->c.dv : j->c.o;
    int64_t ld = j->s.backward ? j->s.dv.ld : j->s.o.ld, rows = j->s.ragged ? j->c.lens[0] : j->s.len;
    if (strstr(fault, "nan"))
        p[0] = 0x7fc0;
    else
        for (int64_t i = 0; i < rows; i++)
            for (int64_t c = 0; c < j->s.dim_v; c++)
                put(p, i * ld + c, 1.1f * get(p, i * ld + c));
}

static void run_job(void *args)
{
    const struct job *j = args;
    MT_FREED float *p = malloc((size_t)j->s.len * sizeof(float));
    memset(j->c.workspace, 0xff, j->workspace); /* nobody else may keep anything there */
    for (int64_t b = 0; p && b < j->s.batch; b++) {
        for (int64_t h = 0; !j->s.backward && h < j->s.n_q; h++) {
            struct head x = head_of(j, b, h);
            for (int64_t i = 0; i < x.rows; i++)
                forward_row(j, &x, i, p);
        }
        for (int64_t kv = 0; j->s.backward && kv < j->s.n_kv; kv++)
            backward_group(j, b, kv);
    }
    spoil(j);
}

static void end_job(void *args)
{
    atomic_fetch_sub(&((const struct job *)args)->plan->runs, 1);
}

static const char *refusal(const struct mt_fused_shape *s)
{
    int sm = mt_emu_settings()->capability;
    if (s->dim % 8 || s->dim_v % 8 || s->dim > (s->backward && sm != 90 ? 128 : 256))
        return "head size";
    if (s->backward && s->len == 1)
        return "s_q = s_kv = 1 is not supported.";
    if (s->ragged && s->backward ? s->total < 1 : s->total)
        mt_emu_die("fused attention: a total of %lld rows%s", (long long)s->total, s->backward ? " backward" : "");
    if (s->backward && s->ragged && (sm < 90 || sm >= 120))
        return "Deterministic algorithm is not supported for bprop thd on SM8X and SM12X GPUs";
    return NULL;
}

static void engine_describe(char *buf, size_t len)
{
    snprintf(buf, len, "emulated cuDNN");
}

static int engine_open(void **ctx, cudaStream_t stream, char *why, size_t why_len)
{
    struct context *c = mt_calloc(1, sizeof(*c));
    if (!c) {
        snprintf(why, why_len, "no memory");
        return -1;
    }
    c->stream = stream;
    *ctx = c;
    return 0;
}

static void engine_close(void *ctx)
{
    MT_FREED struct context *c = ctx;
    if (c->n_plans)
        mt_emu_die("fused attention: closed with %d plans", c->n_plans);
}

static int engine_plan(void *ctx, const struct mt_fused_shape *s, void **out, size_t *bytes, char *why,
                       size_t why_len)
{
    struct context *c = ctx;
    const char *no = refusal(s);
    struct plan *p = no ? NULL : calloc(1, sizeof(*p));
    size_t len = (size_t)s->len;
    atomic_fetch_add(&n_made, 1);
    if (!p) {
        snprintf(why, why_len, "%s", no ? no : "no memory");
        return -1;
    }
    const char *fault = fault_of(s);
    if ((fault && strstr(fault, "memory")) || !mt_emu_driver_take(mt_emu_settings()->plan_bytes)) {
        free(p);
        snprintf(why, why_len, "CUDNN_STATUS_ALLOC_FAILED");
        return -ENOMEM;
    }
    if (++c->n_plans > MAX_PLANS)
        mt_emu_die("fused attention: more than %d plans", MAX_PLANS);
    p->s = *s;
    p->workspace = 256;
    if (s->backward)
        p->workspace = (size_t)(s->batch * s->n_q) * 2 * mt_align_up(len, 64) * mt_align_up(len, 128);
    *out = p;
    *bytes = p->workspace;
    return 0;
}

static void engine_drop(void *ctx, void *plan)
{
    MT_FREED struct plan *p = plan;
    if (atomic_load(&p->runs))
        mt_emu_die("fused attention: a plan is dropped before its runs are done");
    mt_emu_driver_give(mt_emu_settings()->plan_bytes);
    ((struct context *)ctx)->n_plans--;
}

static int engine_run(void *ctx, void *plan, const struct mt_fused_call *call, char *why, size_t why_len)
{
    struct plan *p = plan;
    struct job j = {p->s, *call, p->workspace, p};
    if (!mt_emu_check_device("fused attention's workspace", mt_emu_device(), call->workspace,
                             p->workspace)) {
        snprintf(why, why_len, "the workspace is not on the device");
        return -1;
    }
    atomic_fetch_add(&p->runs, 1);
    if (!mt_emu_submit(((struct context *)ctx)->stream, run_job, end_job, &j, sizeof(j)))
        return 0;
    atomic_fetch_sub(&p->runs, 1);
    return -1;
}

static int engine_supports(const struct mt_fused_shape *s, int sm, const char *properties, char *why,
                           size_t why_len)
{
    (void)s;
    (void)sm;
    (void)properties;
    snprintf(why, why_len, "cuDNN's alone can tell");
    return -1;
}

bool mt_cuda_fused_built(void)
{
    return true;
}

const struct mt_fused_engine *mt_cuda_fused_engine(char *why, size_t why_len)
{
    static const struct mt_fused_engine engine = {engine_describe, engine_open, engine_close,   engine_plan,
                                                  engine_drop,     engine_run,  engine_supports};
    if (!getenv("MT_EMU_NO_FUSED"))
        return &engine;
    snprintf(why, why_len, "MT_EMU_NO_FUSED is set");
    return NULL;
}
