/* SPDX-License-Identifier: Apache-2.0 */
/* Seconds of single operations: from a sample, from the nearest samples, or from the machine's rates. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "device/op.h"
#include "machine/machine.h"

/* Whether the time of one operation can be estimated from that of the other. */
static bool same_kind(const struct mt_metered *a, const struct mt_metered *b)
{
    return a->op == b->op && a->variant == b->variant && a->dtype == b->dtype;
}

bool mt_same_operation(const struct mt_metered *a, const struct mt_metered *b)
{
    return same_kind(a, b) && a->flags == b->flags &&
           !memcmp(a->dim, b->dim, sizeof(a->dim));
}

/* The rate of matrix products and attention is in flops, that of the others in bytes. */
static double work_of(const struct mt_metered *op)
{
    return op->flops > 0 ? op->flops : op->bytes;
}

bool mt_machine_add_sample(struct mt_machine *m, const struct mt_metered *op, double seconds)
{
    for (size_t i = 0; i < m->n_samples; i++)
        if (mt_same_operation(&m->samples[i].op, op)) {
            m->samples[i].seconds = seconds;
            return true;
        }
    if (!mt_grow(&m->samples, &m->cap_samples, m->n_samples + 1, sizeof(*m->samples)))
        return false;
    m->samples[m->n_samples++] = (struct mt_op_sample){*op, seconds};
    return true;
}

/* kind.dtype.flags.DIMxDIM...:flops:bytes */
void mt_operation_format(char *buf, size_t len, const struct mt_metered *op)
{
    int at = snprintf(buf, len, "%s.%s.%u.", mt_metered_name(op), mt_dtype_name(op->dtype),
                      op->flags);
    for (int i = 0; i < op->n_dims && at >= 0 && (size_t)at < len; i++)
        at += snprintf(buf + at, len - (size_t)at, "%s%llu", i ? "x" : "",
                       (unsigned long long)op->dim[i]);
    if (at >= 0 && (size_t)at < len)
        snprintf(buf + at, len - (size_t)at, ":%.9g:%.9g", op->flops, op->bytes);
}

bool mt_operation_parse(struct mt_metered *op, const char *text)
{
    char kind[32], dtype[8], dims[128];
    unsigned flags;
    double flops, bytes;
    if (sscanf(text, "%31[a-z0-9_].%7[a-z0-9].%u.%127[0-9x]:%lf:%lf", kind, dtype, &flags, dims, &flops,
               &bytes) != 6)
        return false;
    *op = (struct mt_metered){.flags = flags, .flops = flops, .bytes = bytes};
    if (!mt_metered_find(op, kind))
        return false;
    op->dtype = !strcmp(dtype, "f32") ? MT_F32 : !strcmp(dtype, "e4m3") ? MT_E4M3 : MT_BF16;
    for (char *p = dims; op->n_dims < MT_METER_DIMS;) {
        char *end;
        op->dim[op->n_dims++] = strtoull(p, &end, 10);
        if (end == p || op->dim[op->n_dims - 1] == 0)
            return false;
        if (!*end)
            break;
        p = end + 1;
    }
    mt_metered_complete(op);
    return flops > 0 || bytes > 0;
}

/* Heads of queries and of values are mostly as wide as each other: one size, which the shape has twice. */
static bool repeats_width(const struct mt_metered *op, int dim)
{
    enum { D_V = 5 };
    bool attention = op->op == MT_DEV_ATTENTION || op->op == MT_DEV_ATTENTION_BWD;
    return attention && dim == D_V && op->dim[D_V] == op->dim[D_V - 1];
}

/* Squared distance in the logarithms of the shape. */
static double distance2(const struct mt_metered *a, const struct mt_metered *b)
{
    double d = a->flags != b->flags ? 0.04 : 0;
    for (int i = 0; i < a->n_dims; i++) {
        double x = log((double)a->dim[i] / (double)b->dim[i]);
        d += repeats_width(a, i) && repeats_width(b, i) ? 0 : x * x;
    }
    return d;
}

/* Estimates from samples of the same kind; false: there are none. */
static bool from_samples(const struct mt_machine *m, const struct mt_metered *op, double *seconds)
{
    double sum = 0, weights = 0;
    for (size_t i = 0; i < m->n_samples; i++) {
        const struct mt_op_sample *s = &m->samples[i];
        if (!same_kind(&s->op, op))
            continue;
        double d2 = distance2(op, &s->op);
        if (d2 < 1e-12) {
            *seconds = s->seconds * work_of(op) / work_of(&s->op);
            return true;
        }
        double w = 1 / (d2 * d2);
        sum += w * log(work_of(&s->op) / s->seconds);
        weights += w;
    }
    if (!(weights > 0))
        return false;
    *seconds = work_of(op) / exp(sum / weights);
    return true;
}

/* Such operations that run side by side. */
static double beside(const struct mt_metered *op)
{
    return MT_MAX(op->beside, 1);
}

/*
 * Elements of results that are computed for each that there is: tensor cores compute whole tiles, and where the number
 * of multiprocessors is known these do the tiles in waves, of which the last may leave most of them idle. A product
 * with few tiles, such as an expert's, pays for that. The library chooses among tiles, so the best counts. Side streams
 * have more such products to give to what the last wave leaves idle.
 */
static double product_waste(const struct mt_machine *m, const struct mt_metered *op)
{
    static const double tiles[][2] = {{128, 128}, {128, 256}, {256, 128}, {64, 128}, {128, 64}};
    double rows = (double)op->dim[0], cols = (double)op->dim[1], sms = m->rate[MT_RATE_MULTIPROCESSORS].value;
    if (m->cpu || !(sms > 0)) {
        double tile = m->cpu ? 16 : 128;
        return ceil(rows / tile) * ceil(cols / tile) * tile * tile / (rows * cols);
    }
    double batch = fmax(round(op->flops / (2 * rows * cols * (double)op->dim[2])), 1) * beside(op), least = INFINITY;
    for (size_t i = 0; i < MT_ARRAY_LEN(tiles); i++) {
        double n = batch * ceil(rows / tiles[i][0]) * ceil(cols / tiles[i][1]);
        least = fmin(least, ceil(n / sms) * sms * tiles[i][0] * tiles[i][1]);
    }
    return least / (batch * rows * cols);
}

const char mt_machine_rules[] =
    "Products: operations by the rate of their type, in whole tiles (of 128x128, 128x256 or 64x128, the best) and whole waves\n"
    "of tiles over the multiprocessors; or their bytes by memory_gbs, if that is longer. FP32 sums of weight gradients are\n"
    "read and written after them. Attention: two products of what is attended to, five in backward, by its rate. Products by\n"
    "codes: operations by the smaller of both rates, in tiles of 32x32 or 8x32, or bytes. The delta rule: half of FP32's rate,\n"
    "in whole waves of documents' key heads over the multiprocessors. All else: bytes by memory_gbs. Each operation takes\n"
    "operation_us more; side streams share it, and the last wave.\n";

static double product_seconds(const struct mt_machine *m, const struct mt_metered *op)
{
    double m_dim = (double)op->dim[0], n_dim = (double)op->dim[1], waste = product_waste(m, op);
    static const enum mt_rate_id by_dtype[] = {[MT_F32] = MT_RATE_GEMM_F32, [MT_BF16] = MT_RATE_GEMM_BF16,
                                               [MT_E4M3] = MT_RATE_GEMM_E4M3};
    double rate = m->rate[by_dtype[op->dtype]].value * 1e12;
    double memory = m->rate[MT_RATE_DEVICE_GBS].value * 1e9, last = 0;
    /* a weight gradient: a tile's FP32 sums are read and written after its products, overlapped with almost nothing */
    if ((op->variant == MT_GEMM_TN || op->dtype == MT_E4M3) && op->flags & MT_METER_F32_OUT)
        last = m_dim * n_dim * sizeof(float) * (op->flags & MT_METER_ADDS ? 2 : 1);
    return fmax(op->flops * waste / rate, (op->bytes - last) / memory) + last / memory;
}

/*
 * A kernel of our own, in tiles of 32 columns and 8 or 32 rows: at the share of the products' rate that the attention
 * kernels are rated at, which feed the same units in the same way.
 */
static double packed_seconds(const struct mt_machine *m, const struct mt_metered *op)
{
    double rows = (double)op->dim[0], cols = (double)op->dim[1], tile = rows <= 8 ? 8 : 32;
    double waste = ceil(rows / tile) * tile * ceil(cols / 32) * 32 / (rows * cols);
    double rate = fmin(m->rate[MT_RATE_GEMM_BF16].value, m->rate[MT_RATE_ATTENTION].value);
    return fmax(op->flops * waste / (rate * 1e12), op->bytes / (m->rate[MT_RATE_DEVICE_GBS].value * 1e9));
}

static double attention_seconds(const struct mt_machine *m, const struct mt_metered *op, enum mt_rate_id id)
{
    double rate = m->rate[id].value;
    if (op->dtype == MT_F32)
        rate *= m->rate[MT_RATE_GEMM_F32].value / m->rate[MT_RATE_GEMM_BF16].value;
    return fmax(op->flops / (rate * 1e12), op->bytes / (m->rate[MT_RATE_DEVICE_GBS].value * 1e9));
}

/* The share of multiprocessors that work, in whole waves of blocks. */
static double busy(const struct mt_machine *m, double blocks)
{
    double sms = m->rate[MT_RATE_MULTIPROCESSORS].value;
    return m->cpu || !(sms > 0) ? 1 : blocks / (ceil(blocks / sms) * sms);
}

/*
 * A kernel of our own, whose products are of FP32 values and are added in FP32. A block takes a value head of a
 * document, in backward those that share keys, in order: few long documents leave multiprocessors idle. By its
 * instructions it reaches about half of what products in FP32 do; no GPU has confirmed that.
 */
static double delta_seconds(const struct mt_machine *m, const struct mt_metered *op)
{
    struct mt_delta_rule a = {.k.n = op->dim[3], .v.n = op->dim[2], .plain = op->flags & MT_METER_PLAIN};
    double docs = fmax(round((double)op->dim[0] / (double)MT_MAX(op->dim[1] - 1, 1)), 1);
    double jobs = busy(m, docs * (double)(a.k.n * mt_delta_jobs(&a).of_key));
    double apart = fmax(busy(m, docs * (double)a.v.n), jobs); /* forward, and a quarter of backward */
    double waste = op->op == MT_DEV_DELTA_RULE_BWD ? 0.25 / apart + 0.75 / jobs : 1 / apart;
    double rate = (m->cpu ? 1 : 0.5) * m->rate[MT_RATE_GEMM_F32].value;
    return fmax(op->flops * waste / (rate * 1e12), op->bytes / (m->rate[MT_RATE_DEVICE_GBS].value * 1e9));
}

double mt_machine_op_seconds(const struct mt_machine *m, const struct mt_metered *op)
{
    double s = 0;
    if (!(work_of(op) > 0))
        return 0;
    if (from_samples(m, op, &s))
        return s;
    switch (mt_dev_op(op->op)->bound) {
    case MT_BOUND_PRODUCT:
        s = product_seconds(m, op);
        break;
    case MT_BOUND_PACKED_PRODUCT:
        s = packed_seconds(m, op);
        break;
    case MT_BOUND_ATTENTION:
        s = attention_seconds(m, op, MT_RATE_ATTENTION);
        break;
    case MT_BOUND_ATTENTION_BWD:
        s = attention_seconds(m, op, MT_RATE_ATTENTION_BWD);
        break;
    case MT_BOUND_DELTA:
        s = delta_seconds(m, op);
        break;
    case MT_BOUND_BYTES:
        s = op->bytes / (m->rate[MT_RATE_DEVICE_GBS].value * 1e9);
        break;
    }
    return s + m->rate[MT_RATE_OP_US].value * 1e-6 / beside(op); /* under the others' work */
}

/* Samples s[0] to s[n - 1] are of one optimizer, by threads. */
static double update_ns(const struct mt_update_sample *s, int n, int threads)
{
    int i = 0;
    while (i + 1 < n && s[i + 1].threads <= threads)
        i++;
    double ns = s[i].ns, have = s[i].threads;
    if (threads < have) /* fewer than in any sample */
        return ns * have / threads;
    if (i + 1 < n && threads > have) {
        double t = (threads - have) / (s[i + 1].threads - have);
        return ns + t * (s[i + 1].ns - ns);
    }
    return ns;
}

/* As measured, with bf16 gradients; 0: it was not. */
static double ns_of(const struct mt_machine *m, const char *name, int threads)
{
    int first = 0, n = 0;
    while (first < m->n_updates && strcmp(m->updates[first].name, name))
        first++;
    while (first + n < m->n_updates && !strcmp(m->updates[first + n].name, name))
        n++;
    return n ? update_ns(&m->updates[first], n, threads) : 0;
}

double mt_machine_update_ns(const struct mt_machine *m, int threads)
{
    return ns_of(m, "", threads);
}

static double measured_ns(const struct mt_machine *m, const struct mt_update_form *f, int threads)
{
    char name[MT_OPTIMIZER_NAME];
    mt_update_form_name(f, name);
    return ns_of(m, name, threads);
}

double mt_machine_optimizer_ns(const struct mt_machine *m, const struct mt_numerics *num, int threads)
{
    const struct mt_optimizer *o = num->optimizer;
    const bool stochastic = num->rounding == MT_ROUND_STOCHASTIC;
    const struct mt_update_form forms[] = {{o, num->master, stochastic}, {o, num->master, false}};
    double bytes = mt_optimizer_bytes(o, num->master, num->grad_dtype);
    double instructions = mt_optimizer_thread_ns(o, num->master) / threads;
    /* bound by memory: the same time per byte as the optimizer that was measured; or by instructions */
    double moved = mt_machine_update_ns(m, threads) * bytes / mt_optimizer_bytes(&mt_adamw, MT_MASTER_F32, MT_BF16);
    if (o->zeroth) /* by samples and noise, which no profile has; signs take less than a normal noise */
        return MT_MAX(moved, instructions * (double)num->mezo.samples * (num->mezo.noise == MT_NOISE_SIGN ? 0.15 : 1));
    for (size_t i = 0; i < MT_ARRAY_LEN(forms); i++) { /* a profile may have the nearest rounding alone */
        double own = measured_ns(m, &forms[i], threads);
        if (own > 0)
            return own * bytes / mt_optimizer_bytes(o, num->master, MT_BF16);
    }
    double plain = measured_ns(m, &(struct mt_update_form){o, MT_MASTER_F32, false}, threads);
    if (plain > 0) {
        plain *= bytes / mt_optimizer_bytes(o, MT_MASTER_F32, MT_BF16);
        return num->master == MT_MASTER_BF16 ? MT_MAX(plain, instructions) : plain;
    }
    return MT_MAX(moved, instructions);
}
