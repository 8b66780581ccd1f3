/* SPDX-License-Identifier: Apache-2.0 */
/* The end of a layer that is a mixture of experts: its sum, complete, becomes the hidden state. No parameters. */
#include "model/part.h"
#include "model/state.h"

static void lay_out(struct mt_layout_builder *, struct mt_part *)
{
}

static size_t first_elem(const struct mt_part_run *r)
{
    return mt_model_first_row(r->m, r->of->mb) * r->m->wd.c;
}

static int finish(const struct mt_part_run *r, void *y, struct mt_err *err)
{
    const mt_model *m = r->m;
    size_t n = r->in->n_tokens * m->wd.c;
    const float *sum = mt_value(r, MT_ROLE_SUM);
    return mt_op_cast(m->dev, &(struct mt_cast){n, MT_F32, m->dt, sum + first_elem(r), y}, err);
}

/* Copies the sum's gradient for the experts. It is also that of the layer's input, so r->dx keeps it. */
static int backward(const struct mt_part_run *r, struct mt_err *err)
{
    const mt_model *m = r->m;
    size_t n = r->in->n_tokens * m->wd.c;
    void *dy = mt_elem(m, mt_value(r, MT_ROLE_DY), first_elem(r));
    return mt_op_cast(m->dev, &(struct mt_cast){n, m->dt, m->dt, r->dx, dy}, err);
}

const struct mt_part_kind mt_part_combine = {
    .name = "combine",
    .port = {{MT_ROLE_SUM, MT_READ, MT_NO_ACCESS},
             {MT_ROLE_Y, MT_WRITE, MT_NO_ACCESS, mt_hidden_bytes},
             {MT_ROLE_DX, MT_NO_ACCESS, MT_READ, mt_hidden_bytes},
             {MT_ROLE_DY, MT_NO_ACCESS, MT_FILL}},
    .lay_out = lay_out,
    .finish = finish,
    .backward = backward,
};
