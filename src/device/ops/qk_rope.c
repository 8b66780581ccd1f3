/* SPDX-License-Identifier: Apache-2.0 */
#include "base/mem.h"
#include "device/ops/row.h"

static const char *check(const void *args)
{
    const struct mt_qk_rope *a = args;
    MT_OP_NEED(a->n_q && a->n_kv && a->head_dim && a->rot <= a->head_dim && a->rot % 2 == 0);
    MT_OP_NEED(a->qkv && a->qk && a->positions && a->cos_t && a->sin_t);
    MT_OP_NEED(a->ld_qkv >= (a->n_q + a->n_kv) * a->head_dim && a->ld_qk >= (a->n_q + a->n_kv) * a->head_dim);
    MT_OP_NEED(!a->q_norm == !a->k_norm);
    MT_OP_NEED(!a->q_norm || (a->rstd && a->qk != a->qkv));
    return NULL;
}

static void cost(const void *args, struct mt_metered *out)
{
    const struct mt_qk_rope *a = args;
    out->dtype = a->dtype;
    out->flags = a->q_norm ? MT_METER_NORM : 0;
    out->dim[0] = a->n;
    out->dim[1] = a->n_q + a->n_kv;
    out->dim[2] = a->head_dim;
    out->bytes = 2 * mt_op_bytes(a->n, (a->n_q + a->n_kv) * a->head_dim, a->dtype);
}

/* One key head, the others are query heads. In place without a norm, as in a layer. */
static void fill(mt_example *x, const struct mt_metered *shape, void *args)
{
    size_t n = (size_t)shape->dim[0], heads = (size_t)shape->dim[1], d = (size_t)shape->dim[2];
    bool norm = shape->flags & MT_METER_NORM;
    struct mt_qk_rope a = {.n = n, .n_q = heads - 1, .n_kv = 1, .head_dim = d, .rot = d & ~(size_t)1,
                           .dtype = shape->dtype, .eps = 1e-6f, .max_pos = n};
    a.positions = mt_example_ints(x, n, 1, 0);
    a.cos_t = a.sin_t = mt_example_read(x, MT_F32, n * d / 2);
    a.ld_qkv = (heads + 1) * d;
    if (norm) {
        a.qkv = mt_example_read(x, a.dtype, n * a.ld_qkv);
        a.ld_qk = heads * d;
        a.qk = mt_example_write(x, a.dtype, n * a.ld_qk);
        a.q_norm = a.k_norm = mt_example_read(x, a.dtype, d);
        a.rstd = mt_example_write(x, MT_F32, n * heads);
    } else {
        a.qkv = a.qk = mt_example_update(x, a.dtype, n * a.ld_qkv);
        a.ld_qk = a.ld_qkv;
    }
    *(struct mt_qk_rope *)args = a;
}

const struct mt_op mt_op_row_qk_rope = {
    .name = {"qk_rope"},
    .dim = {MT_SIZE_ROWS, MT_SIZE_ALL_HEADS, MT_SIZE_HEAD_DIM},
    .flags = {0, MT_METER_NORM},
    .args_bytes = sizeof(struct mt_qk_rope),
    .count = offsetof(struct mt_qk_rope, n),
    .check = check,
    .cost = cost,
    .fill = fill,
};

static const char *check_bwd(const void *args)
{
    const struct mt_qk_rope_bwd *a = args;
    MT_OP_NEED(a->n_q && a->n_kv && a->head_dim && a->rot <= a->head_dim && a->rot % 2 == 0);
    MT_OP_NEED(a->dqk && a->dqkv && a->positions && a->cos_t && a->sin_t);
    MT_OP_NEED(!a->q_norm == !a->k_norm);
    MT_OP_NEED(!a->q_norm || (a->rstd && a->qkv && a->workspace));
    return NULL;
}

static void cost_bwd(const void *args, struct mt_metered *out)
{
    const struct mt_qk_rope_bwd *a = args;
    out->dtype = a->dtype;
    out->flags = a->q_norm ? MT_METER_NORM : 0;
    out->dim[0] = a->n;
    out->dim[1] = a->n_q + a->n_kv;
    out->dim[2] = a->head_dim;
    out->bytes = (a->q_norm ? 3 : 2) * mt_op_bytes(a->n, (a->n_q + a->n_kv) * a->head_dim, a->dtype);
}

static void fill_bwd(mt_example *x, const struct mt_metered *shape, void *args)
{
    size_t n = (size_t)shape->dim[0], heads = (size_t)shape->dim[1], d = (size_t)shape->dim[2];
    struct mt_qk_rope_bwd a = {.n = n, .n_q = heads - 1, .n_kv = 1, .head_dim = d, .rot = d & ~(size_t)1,
                               .dtype = shape->dtype, .max_pos = n};
    a.positions = mt_example_ints(x, n, 1, 0);
    a.cos_t = a.sin_t = mt_example_read(x, MT_F32, n * d / 2);
    a.ld_qkv = a.ld_dqk = a.ld_dqkv = (heads + 1) * d;
    a.dqkv = mt_example_update(x, a.dtype, n * a.ld_dqkv);
    a.dqk = a.dqkv;
    if (shape->flags & MT_METER_NORM) {
        a.qkv = mt_example_read(x, a.dtype, n * a.ld_qkv);
        a.q_norm = a.k_norm = mt_example_read(x, a.dtype, d);
        a.rstd = mt_example_read(x, MT_F32, n * heads);
        a.dq_norm = mt_example_update(x, MT_F32, d);
        a.dk_norm = mt_example_update(x, MT_F32, d);
    }
    a.workspace = mt_example_workspace(x, mt_op_qk_rope_bwd_workspace(mt_example_device(x), &a));
    *(struct mt_qk_rope_bwd *)args = a;
}

const struct mt_op mt_op_row_qk_rope_bwd = {
    .name = {"qk_rope_bwd"},
    .dim = {MT_SIZE_ROWS, MT_SIZE_ALL_HEADS, MT_SIZE_HEAD_DIM},
    .flags = {0, MT_METER_NORM},
    .args_bytes = sizeof(struct mt_qk_rope_bwd),
    .count = offsetof(struct mt_qk_rope_bwd, n),
    .check = check_bwd,
    .cost = cost_bwd,
    .fill = fill_bwd,
};
