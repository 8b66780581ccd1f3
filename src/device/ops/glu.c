/* SPDX-License-Identifier: Apache-2.0 */
#include "device/ops/row.h"

static const char *check_glu(const struct mt_glu *a)
{
    MT_OP_NEED(a->f && aligned(a->gate_up) && aligned(a->out) && a->gate_up != a->out);
    MT_OP_NEED(a->kind != MT_GLU_RELU2 && (a->kind != MT_GLU_CLAMPED || a->limit > 0));
    return NULL;
}

static void cost_glu(const struct mt_glu *a, struct mt_metered *out)
{
    mt_op_count_rows(a->n, a->f, a->dtype, 3, out);
}

static void fill_glu(mt_example *x, const struct mt_metered *shape, struct mt_glu *a)
{
    size_t n = (size_t)shape->dim[0], f = (size_t)shape->dim[1];
    *a = (struct mt_glu){
        .n = n, .f = f, .dtype = shape->dtype, .gate_up = mt_example_fresh(x, shape->dtype, 2 * n * f),
        .out = mt_example_write(x, shape->dtype, n * f)};
}

MT_OP_ROW(glu, n, .dim = {MT_SIZE_ROWS, MT_SIZE_FFN});

static const char *check_glu_bwd(const struct mt_glu_bwd *a)
{
    MT_OP_NEED(a->f && aligned(a->gate_up) && aligned(a->dout) && aligned(a->dgate_up));
    MT_OP_NEED(a->dout != a->dgate_up);
    MT_OP_NEED(!a->out || (aligned(a->out) && a->out != a->gate_up && a->out != a->dgate_up));
    MT_OP_NEED(a->kind != MT_GLU_RELU2 && (a->kind != MT_GLU_CLAMPED || a->limit > 0));
    return NULL;
}

static void cost_glu_bwd(const struct mt_glu_bwd *a, struct mt_metered *out)
{
    mt_op_count_rows(a->n, a->f, a->dtype, a->out ? 6 : 5, out);
}

/* As in a layer, the output overwrites its gradient. */
static void fill_glu_bwd(mt_example *x, const struct mt_metered *shape, struct mt_glu_bwd *a)
{
    size_t n = (size_t)shape->dim[0], f = (size_t)shape->dim[1];
    *a = (struct mt_glu_bwd){.n = n, .f = f, .dtype = shape->dtype};
    a->gate_up = mt_example_read(x, a->dtype, 2 * n * f);
    a->out = mt_example_take(x, MT_TAKE_READ | MT_TAKE_WRITE | MT_TAKE_FRESH, a->dtype, n * f);
    a->dout = a->out;
    a->dgate_up = mt_example_write(x, a->dtype, 2 * n * f);
}

MT_OP_ROW(glu_bwd, n, .dim = {MT_SIZE_ROWS, MT_SIZE_FFN});

static const char *check_expert_glu_bwd(const struct mt_expert_glu_bwd *a)
{
    MT_OP_NEED(a->f && a->k && a->n_padded >= a->n);
    MT_OP_NEED(aligned(a->gate_up) && aligned(a->dout) && aligned(a->dgate_up) && aligned(a->out));
    MT_OP_NEED(a->weights && a->dweights && a->weights != a->dweights);
    MT_OP_NEED(a->dout != a->dgate_up && a->out != a->gate_up && a->out != a->dgate_up);
    MT_OP_NEED(!a->down_bias == !a->d_o && aligned_or_null(a->down_bias) && aligned_or_null(a->d_o));
    MT_OP_NEED(!a->down_bias || a->c);
    MT_OP_NEED(a->kind != MT_GLU_CLAMPED || a->limit > 0);
    return NULL;
}

static void cost_expert_glu_bwd(const struct mt_expert_glu_bwd *a, struct mt_metered *out)
{
    mt_op_shape(out, a->dtype, MT_DIMS(a->n_padded, a->f));
    out->bytes = (2 + 2 * mt_glu_inputs(a->kind)) * mt_op_bytes(a->n_padded, a->f, a->dtype) +
                 (a->d_o ? mt_op_bytes(a->n, a->c, a->dtype) : 0);
}

/* In place, as in a layer. */
static void fill_expert_glu_bwd(mt_example *x, const struct mt_metered *shape, struct mt_expert_glu_bwd *a)
{
    size_t n = (size_t)shape->dim[0], f = (size_t)shape->dim[1];
    *a = (struct mt_expert_glu_bwd){.n = n, .n_padded = n, .f = f, .k = 1, .dtype = shape->dtype};
    a->dgate_up = mt_example_update(x, a->dtype, 2 * n * f);
    a->gate_up = a->dgate_up;
    a->out = mt_example_take(x, MT_TAKE_READ | MT_TAKE_WRITE | MT_TAKE_FRESH, a->dtype, n * f);
    a->dout = a->out;
    a->list = mt_example_ints(x, n, MT_OP_SCATTER, n);
    a->weights = mt_example_read(x, MT_F32, n);
    a->dweights = mt_example_write(x, MT_F32, n);
}

MT_OP_ROW(expert_glu_bwd, n_padded, .dim = {MT_SIZE_ROWS, MT_SIZE_FFN});
