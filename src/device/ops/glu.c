/* SPDX-License-Identifier: Apache-2.0 */
#include "device/ops/row.h"

static const char *check(const void *args)
{
    const struct mt_glu *a = args;
    MT_OP_NEED(a->f && aligned(a->gate_up) && aligned(a->out) && a->gate_up != a->out);
    MT_OP_NEED(a->kind != MT_GLU_RELU2 && (a->kind != MT_GLU_CLAMPED || a->limit > 0));
    return NULL;
}

static void cost(const void *args, struct mt_metered *out)
{
    const struct mt_glu *a = args;
    mt_op_count_rows(a->n, a->f, a->dtype, 3, out);
}

static void fill(mt_example *x, const struct mt_metered *shape, void *args)
{
    size_t n = (size_t)shape->dim[0], f = (size_t)shape->dim[1];
    *(struct mt_glu *)args = (struct mt_glu){.n = n, .f = f, .dtype = shape->dtype,
                                             .gate_up = mt_example_fresh(x, shape->dtype, 2 * n * f),
                                             .out = mt_example_write(x, shape->dtype, n * f)};
}

const struct mt_op mt_op_row_glu = {
    .name = {"glu"},
    .dim = {MT_SIZE_ROWS, MT_SIZE_FFN},
    .args_bytes = sizeof(struct mt_glu),
    .count = offsetof(struct mt_glu, n),
    .check = check,
    .cost = cost,
    .fill = fill,
};

static const char *check_bwd(const void *args)
{
    const struct mt_glu_bwd *a = args;
    MT_OP_NEED(a->f && aligned(a->gate_up) && aligned(a->dout) && aligned(a->dgate_up));
    MT_OP_NEED(a->dout != a->dgate_up);
    MT_OP_NEED(!a->out || (aligned(a->out) && a->out != a->gate_up && a->out != a->dgate_up));
    MT_OP_NEED(a->kind != MT_GLU_RELU2 && (a->kind != MT_GLU_CLAMPED || a->limit > 0));
    return NULL;
}

static void cost_bwd(const void *args, struct mt_metered *out)
{
    const struct mt_glu_bwd *a = args;
    mt_op_count_rows(a->n, a->f, a->dtype, a->out ? 6 : 5, out);
}

/* As in a layer, the output overwrites its gradient. */
static void fill_bwd(mt_example *x, const struct mt_metered *shape, void *args)
{
    size_t n = (size_t)shape->dim[0], f = (size_t)shape->dim[1];
    struct mt_glu_bwd a = {.n = n, .f = f, .dtype = shape->dtype};
    a.gate_up = mt_example_read(x, a.dtype, 2 * n * f);
    a.out = mt_example_take(x, MT_TAKE_READ | MT_TAKE_WRITE | MT_TAKE_FRESH, a.dtype, n * f);
    a.dout = a.out;
    a.dgate_up = mt_example_write(x, a.dtype, 2 * n * f);
    *(struct mt_glu_bwd *)args = a;
}

const struct mt_op mt_op_row_glu_bwd = {
    .name = {"glu_bwd"},
    .dim = {MT_SIZE_ROWS, MT_SIZE_FFN},
    .args_bytes = sizeof(struct mt_glu_bwd),
    .count = offsetof(struct mt_glu_bwd, n),
    .check = check_bwd,
    .cost = cost_bwd,
    .fill = fill_bwd,
};

static const char *check_expert(const void *args)
{
    const struct mt_expert_glu_bwd *a = args;
    MT_OP_NEED(a->f && a->k && a->n_padded >= a->n);
    MT_OP_NEED(aligned(a->gate_up) && aligned(a->dout) && aligned(a->dgate_up) && aligned(a->out));
    MT_OP_NEED(a->weights && a->dweights && a->weights != a->dweights);
    MT_OP_NEED(a->dout != a->dgate_up && a->out != a->gate_up && a->out != a->dgate_up);
    MT_OP_NEED(!a->down_bias == !a->d_o && aligned_or_null(a->down_bias) && aligned_or_null(a->d_o));
    MT_OP_NEED(!a->down_bias || a->c);
    MT_OP_NEED(a->kind != MT_GLU_CLAMPED || a->limit > 0);
    return NULL;
}

static void cost_expert(const void *args, struct mt_metered *out)
{
    const struct mt_expert_glu_bwd *a = args;
    out->dtype = a->dtype;
    out->dim[0] = a->n_padded;
    out->dim[1] = a->f;
    out->bytes = (2 + 2 * mt_glu_inputs(a->kind)) * mt_op_bytes(a->n_padded, a->f, a->dtype) +
                 (a->d_o ? mt_op_bytes(a->n, a->c, a->dtype) : 0);
}

/* In place, as in a layer. */
static void fill_expert(mt_example *x, const struct mt_metered *shape, void *args)
{
    size_t n = (size_t)shape->dim[0], f = (size_t)shape->dim[1];
    struct mt_expert_glu_bwd a = {.n = n, .n_padded = n, .f = f, .k = 1, .dtype = shape->dtype};
    a.dgate_up = mt_example_update(x, a.dtype, 2 * n * f);
    a.gate_up = a.dgate_up;
    a.out = mt_example_take(x, MT_TAKE_READ | MT_TAKE_WRITE | MT_TAKE_FRESH, a.dtype, n * f);
    a.dout = a.out;
    a.list = mt_example_ints(x, n, MT_OP_SCATTER, n);
    a.weights = mt_example_read(x, MT_F32, n);
    a.dweights = mt_example_write(x, MT_F32, n);
    *(struct mt_expert_glu_bwd *)args = a;
}

const struct mt_op mt_op_row_expert_glu_bwd = {
    .name = {"expert_glu_bwd"},
    .dim = {MT_SIZE_ROWS, MT_SIZE_FFN},
    .args_bytes = sizeof(struct mt_expert_glu_bwd),
    .count = offsetof(struct mt_expert_glu_bwd, n_padded),
    .check = check_expert,
    .cost = cost_expert,
    .fill = fill_expert,
};
