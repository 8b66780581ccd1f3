/* SPDX-License-Identifier: Apache-2.0 */
#ifndef MT_MODEL_BRANCH_H
#define MT_MODEL_BRANCH_H

#include "model/linear.h"
#include "model/part.h"

/**
 * What parts of a layer have in common: y = x + residual * after(f(before(x))), where `before` and `after` are norms,
 * or nothing. The part computes f, which ends with a product. If nothing comes after that, the product itself adds x.
 */
struct mt_branch {
    const struct mt_part_run *run;
    int before, after; /* roles of the norms' weights; a weight that the part does not have is no norm */
    float *rstd;       /* [n] of the norm before, in the record */
    void *out;         /* [n, hidden] f's result, in the record; NULL: no norm comes after */
    float *rstd_after; /* [n] scratch of backward */
};

/** The backward product of a weight [out, in] of the part, for a run's tokens; its operands are yet to be set. */
static inline struct mt_linear_bwd mt_linear_bwd_of(const struct mt_part_run *r, size_t in, size_t out, int role)
{
    return (struct mt_linear_bwd){.n = r->in->n_tokens, .in = in, .out = out, .w = r->w, .p = r->part->param[role],
                                  .g = r->g, .first = r->of->first};
}

/** *h = before(x), in m->h; without a norm it is x. again: with the recorded rstd. */
int mt_branch_enter(const struct mt_branch *b, bool again, const void **h, struct mt_err *err);
/** out = the product that f ends with, plus `residual` (NULL: 0). */
typedef int mt_branch_product(const struct mt_part_run *r, const void *residual, void *out, struct mt_err *err);
/** y = x + residual * after(f(before(x))): the product's result is in b->out, or the product is made here. */
int mt_branch_leave(const struct mt_branch *b, mt_branch_product *product, void *y, struct mt_err *err);
/** *d = gradient of f's result: run->dx, or m->dh. Uses m->h. */
int mt_branch_leave_backward(const struct mt_branch *b, const void **d, struct mt_err *err);
/** run->dx += gradient of x, from that of f's input in m->dh. */
int mt_branch_enter_backward(const struct mt_branch *b, struct mt_err *err);

#endif
