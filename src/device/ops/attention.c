/* SPDX-License-Identifier: Apache-2.0 */
#include "base/mem.h"
#include "device/ops/row.h"

static const char *check(const void *args)
{
    const struct mt_attention *a = args;
    if (!a->n)
        return NULL;
    MT_OP_NEED(a->n_q && a->n_kv && a->head_dim && a->n_q % a->n_kv == 0);
    MT_OP_NEED(a->cu_seqlens && a->cu_seqlens_host && a->n_docs);
    MT_OP_NEED(a->q && a->k && a->v && a->o && a->lse && a->workspace);
    MT_OP_NEED(a->ld_q >= a->n_q * a->head_dim && a->ld_o >= a->n_q * a->head_dim);
    MT_OP_NEED(a->ld_k >= a->n_kv * a->head_dim && a->ld_v >= a->n_kv * a->head_dim);
    MT_OP_NEED(a->cu_seqlens_host[0] == 0 && (size_t)a->cu_seqlens_host[a->n_docs] == a->n);
    for (size_t i = 0; i < a->n_docs; i++)
        MT_OP_NEED(a->cu_seqlens_host[i] < a->cu_seqlens_host[i + 1] &&
                   (size_t)(a->cu_seqlens_host[i + 1] - a->cu_seqlens_host[i]) <= a->max_len);
    return NULL;
}

static const char *check_bwd(const void *args)
{
    const struct mt_attention_bwd *a = args;
    const char *wrong = check(&a->fwd);
    if (wrong || !a->fwd.n)
        return wrong;
    MT_OP_NEED(a->d_o && a->dq && a->dk && a->dv);
    MT_OP_NEED(a->ld_dq >= a->fwd.n_q * a->fwd.head_dim);
    MT_OP_NEED(a->ld_dk >= a->fwd.n_kv * a->fwd.head_dim && a->ld_dv >= a->fwd.n_kv * a->fwd.head_dim);
    return NULL;
}

/* Number of pairs of a query and a key that it attends to. */
static double attended_pairs(const struct mt_attention *a)
{
    double sum = 0;
    for (size_t i = 0; i < a->n_docs; i++) {
        double len = a->cu_seqlens_host[i + 1] - a->cu_seqlens_host[i];
        double w = a->window ? MT_MIN((double)a->window, len) : len;
        sum += w * (w + 1) / 2 + (len - w) * w;
    }
    return sum;
}

/* dim[1] is twice the mean number of keys that a query attends to: the length plus one, if all documents have the same
 * length and there is no window. */
static void count(const struct mt_attention *a, bool bwd, struct mt_metered *out)
{
    double pairs = attended_pairs(a);
    out->dtype = a->dtype;
    out->dim[0] = a->n;
    out->dim[1] = (uint64_t)(2 * pairs / (double)a->n);
    out->dim[2] = a->n_q;
    out->dim[3] = a->n_kv;
    out->dim[4] = a->head_dim;
    out->flops = pairs * (double)a->n_q * (double)a->head_dim * (bwd ? 10 : 4); /* five products instead of two */
    out->bytes = mt_op_bytes(a->n, a->head_dim, a->dtype) * (2 * (double)a->n_q + 2 * (double)a->n_kv) * (bwd ? 2 : 1);
}

static void cost(const void *args, struct mt_metered *out)
{
    count(args, false, out);
}

static void cost_bwd(const void *args, struct mt_metered *out)
{
    const struct mt_attention_bwd *a = args;
    count(&a->fwd, true, out);
}

/* Arguments without q, k, v and the results. */
static struct mt_attention documents(mt_example *x, const struct mt_metered *shape)
{
    size_t n = (size_t)shape->dim[0], len = MT_MIN(MT_MAX((size_t)shape->dim[1], (size_t)2) - 1, n);
    size_t docs = mt_div_up(n, len);
    struct mt_attention a = {.n = n, .n_q = (size_t)shape->dim[2], .n_kv = (size_t)shape->dim[3],
                             .head_dim = (size_t)shape->dim[4], .n_docs = docs, .max_len = len,
                             .dtype = shape->dtype, .scale = 0.125f};
    int32_t *cu = mt_example_host_ints(x, docs + 1, len, 0);
    if (cu)
        cu[docs] = (int32_t)n;
    a.cu_seqlens_host = cu;
    a.cu_seqlens = mt_example_upload(x, cu, docs + 1);
    a.ld_q = a.ld_k = a.ld_v = (a.n_q + 2 * a.n_kv) * a.head_dim;
    a.ld_o = a.n_q * a.head_dim;
    a.workspace = mt_example_workspace(x, mt_op_attention_workspace(mt_example_device(x), &a));
    return a;
}

/* The parts of a packed row: queries, keys, values. */
static void split(char *packed, const struct mt_attention *a, char *part[3])
{
    size_t head = a->head_dim * mt_dtype_size(a->dtype), at[3] = {0, a->n_q * head, (a->n_q + a->n_kv) * head};
    for (int i = 0; i < 3; i++)
        part[i] = packed ? packed + at[i] : NULL;
}

static void set_qkv(struct mt_attention *a, char *packed)
{
    char *part[3];
    split(packed, a, part);
    a->q = part[0];
    a->k = part[1];
    a->v = part[2];
}

static void fill(mt_example *x, const struct mt_metered *shape, void *args)
{
    struct mt_attention a = documents(x, shape);
    set_qkv(&a, mt_example_fresh(x, a.dtype, a.n * a.ld_q));
    a.o = mt_example_write(x, a.dtype, a.n * a.ld_o);
    a.lse = mt_example_write(x, MT_F32, a.n * a.n_q);
    *(struct mt_attention *)args = a;
}

static void fill_bwd(mt_example *x, const struct mt_metered *shape, void *args)
{
    struct mt_attention_bwd *b = args;
    struct mt_attention *a = &b->fwd;
    char *part[3];
    *b = (struct mt_attention_bwd){.fwd = documents(x, shape)};
    set_qkv(a, mt_example_read(x, a->dtype, a->n * a->ld_q));
    a->o = mt_example_read(x, a->dtype, a->n * a->ld_o);
    a->lse = mt_example_read(x, MT_F32, a->n * a->n_q);
    b->d_o = mt_example_fresh(x, a->dtype, a->n * a->ld_o);
    split(mt_example_write(x, a->dtype, a->n * a->ld_q), a, part);
    b->dq = part[0];
    b->dk = part[1];
    b->dv = part[2];
    b->ld_dq = b->ld_dk = b->ld_dv = a->ld_q;
}

const struct mt_op mt_op_row_attention = {
    .name = {"attention"},
    .bound = MT_BOUND_ATTENTION,
    .dim = {MT_SIZE_ROWS, MT_SIZE_LENGTH, MT_SIZE_HEADS, MT_SIZE_KV_HEADS, MT_SIZE_HEAD_DIM},
    .args_bytes = sizeof(struct mt_attention),
    .count = offsetof(struct mt_attention, n),
    .check = check,
    .cost = cost,
    .fill = fill,
};

const struct mt_op mt_op_row_attention_bwd = {
    .name = {"attention_bwd"},
    .bound = MT_BOUND_ATTENTION_BWD,
    .dim = {MT_SIZE_ROWS, MT_SIZE_LENGTH, MT_SIZE_HEADS, MT_SIZE_KV_HEADS, MT_SIZE_HEAD_DIM},
    .args_bytes = sizeof(struct mt_attention_bwd),
    .count = offsetof(struct mt_attention_bwd, fwd.n),
    .check = check_bwd,
    .cost = cost_bwd,
    .fill = fill_bwd,
};
