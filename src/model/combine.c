/* SPDX-License-Identifier: Apache-2.0 */
/* The end of a layer that is a mixture of experts: its sum, complete, becomes the hidden state. No parameters. */
#include "model/model_priv.h"
#include "model/part.h"

static void lay_out(struct mt_layout_builder *b, struct mt_part *p)
{
    (void)b;
    (void)p;
}

static size_t first_elem(const struct mt_part_run *r)
{
    return r->of->mb * r->m->p.max_tokens * r->m->wd.c;
}

static int finish(const struct mt_part_run *r, void *y, struct mt_err *err)
{
    const mt_model *m = r->m;
    size_t n = r->in->n_tokens * m->wd.c;
    return mt_op_cast(m->dev, &(struct mt_cast){n, MT_F32, m->dt, r->of->sum + first_elem(r), y}, err);
}

/* Copies the sum's gradient for the experts. It is also that of the layer's input, so r->dx keeps it. */
static int backward(const struct mt_part_run *r, struct mt_err *err)
{
    const mt_model *m = r->m;
    size_t n = r->in->n_tokens * m->wd.c;
    return mt_op_cast(m->dev, &(struct mt_cast){n, m->dt, m->dt, r->dx, mt_elem(m, r->of->dy, first_elem(r))}, err);
}

const struct mt_part_kind mt_part_combine = {
    .name = "combine",
    .lay_out = lay_out,
    .finish = finish,
    .backward = backward,
};
