/* SPDX-License-Identifier: Apache-2.0 */
#include <math.h>

#include "engine/engine_priv.h"

/* First element of a tensor in a plane whose elements have `size` bytes. */
static void *tensor_at(const mt_engine *e, const struct mt_tensor *t, enum mt_plane_kind k,
                       size_t size)
{
    return (char *)mt_plane(e->p.planes, t->unit, k) + t->first * size;
}

int mt_optimizer_update_unit(mt_engine *e, size_t unit, struct mt_err *err)
{
    const struct mt_unit *u = &e->layout->units[unit];
    if (!e->pending.any)
        return 0;
    for (size_t i = u->first_tensor; i < u->first_tensor + u->n_tensors; i++) {
        const struct mt_tensor *t = &e->layout->tensors[i];
        if (!t->trainable)
            continue;
        enum mt_dtype sd = mt_plane_dtype(e->p.planes, MT_PLANE_M);
        struct mt_adam a = {
            .n = t->n,
            .hi = tensor_at(e, t, MT_PLANE_HI, 2),
            .lo = tensor_at(e, t, MT_PLANE_LO, 2),
            .m = tensor_at(e, t, MT_PLANE_M, mt_dtype_size(sd)),
            .v = tensor_at(e, t, MT_PLANE_V, mt_dtype_size(sd)),
            .grad = tensor_at(e, t, MT_PLANE_GRAD, mt_dtype_size(e->p.grad_dtype)),
            .state_dtype = sd,
            .grad_dtype = e->p.grad_dtype,
            .lr = e->pending.lr,
            .beta1 = e->p.beta1,
            .beta2 = e->p.beta2,
            .eps = e->p.eps,
            .weight_decay = t->decay ? e->p.weight_decay : 0,
            .t = e->pending.t,
            .clip = e->pending.clip,
        };
        uint64_t bad = mt_adam_run_pool(&a, e->p.isa, e->adam_pool);
        if (bad)
            return mt_fail(err, MT_ERR_TRAINING, -EDOM,
                           "update %llu made %llu weights of %s not finite: lower "
                           "train.learning_rate or raise optimizer.eps",
                           (unsigned long long)e->pending.t, (unsigned long long)bad, t->name);
    }
    return 0;
}

static double tensor_square_sum(const mt_engine *e, size_t t)
{
    size_t n;
    const float *part = mt_model_partials(e->model, t, &n);
    double sum = 0;
    for (size_t i = 0; i < n; i++)
        sum += (double)part[i];
    return sum;
}

double mt_optimizer_grad_norm(const mt_engine *e, const struct mt_tensor **bad)
{
    double sum = 0;
    *bad = NULL;
    for (size_t u = e->layout->n_units; u-- > 0;) {
        const struct mt_unit *unit = &e->layout->units[u];
        for (size_t i = unit->first_tensor; i < unit->first_tensor + unit->n_tensors; i++) {
            const struct mt_tensor *t = &e->layout->tensors[i];
            if (!t->trainable)
                continue;
            double s = tensor_square_sum(e, i);
            if (!isfinite(s) && !*bad)
                *bad = t;
            sum += s;
        }
    }
    return sqrt(sum);
}
