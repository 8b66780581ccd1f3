/* SPDX-License-Identifier: Apache-2.0 */
#include "model/branch.h"

static const struct mt_param *param_of(const struct mt_branch *b, int role)
{
    return &b->run->part->param[role];
}

static struct mt_norm norm_of(const struct mt_branch *b, bool after)
{
    const struct mt_part_run *r = b->run;
    return (struct mt_norm){.spec = &r->part->spec->norm, .eps = after ? r->part->spec->after_eps : 0,
                            .n = r->in->n_tokens, .x = after ? b->out : r->x, .w = r->w,
                            .p = *param_of(b, after ? b->after : b->before), .rstd = after ? b->rstd_after : b->rstd};
}

/* out = a + residual * d, over the hidden states of the micro-batch. */
static int add(const struct mt_branch *b, const void *a, const void *d, void *out, struct mt_err *err)
{
    const mt_model *m = b->run->m;
    return mt_op_add(m->dev,
                     &(struct mt_add){.n = b->run->in->n_tokens * m->wd.c, .dtype = m->dt, .a = a, .b = d, .out = out,
                                      .scale = (float)b->run->part->spec->residual},
                     err);
}

static bool is_plain(const struct mt_branch *b)
{
    return !b->out && b->run->part->spec->residual == 1;
}

int mt_branch_enter(const struct mt_branch *b, bool again, const void **h, struct mt_err *err)
{
    struct mt_norm norm = norm_of(b, false);
    *h = norm.p.n ? b->run->m->h : b->run->x;
    return norm.p.n ? mt_norm(b->run->m, &norm, b->run->m->h, again, err) : 0;
}

int mt_branch_leave(const struct mt_branch *b, mt_branch_product *product, void *y, struct mt_err *err)
{
    struct mt_norm norm = norm_of(b, true);
    if (is_plain(b))
        return product(b->run, b->run->x, y, err);
    int rc = b->out ? mt_norm(b->run->m, &norm, y, false, err) : product(b->run, NULL, y, err);
    return rc ? rc : add(b, b->run->x, y, y, err);
}

int mt_branch_leave_backward(const struct mt_branch *b, const void **d, struct mt_err *err)
{
    mt_model *m = b->run->m;
    struct mt_norm norm = norm_of(b, true);
    int rc = 0;
    *d = b->run->dx;
    if (b->run->part->spec->residual != 1) {
        rc = add(b, NULL, *d, m->dh, err);
        *d = m->dh;
    }
    if (rc || !b->out)
        return rc;
    rc = mt_norm(m, &norm, m->h, false, err); /* for its rstd */
    if (!rc)
        rc = mt_norm_backward(m, &norm, &(struct mt_norm_grad){*d, NULL, m->dh, b->run->g}, err);
    *d = m->dh;
    return rc;
}

int mt_branch_enter_backward(const struct mt_branch *b, struct mt_err *err)
{
    mt_model *m = b->run->m;
    struct mt_norm norm = norm_of(b, false);
    void *dx = b->run->dx;
    if (norm.p.n)
        return mt_norm_backward(m, &norm, &(struct mt_norm_grad){m->dh, dx, dx, b->run->g}, err);
    struct mt_add sum = {.n = b->run->in->n_tokens * m->wd.c, .dtype = m->dt, .a = dx, .b = m->dh, .out = dx};
    return mt_op_add(m->dev, &sum, err);
}
