/* SPDX-License-Identifier: Apache-2.0 */
#include <math.h>

#include "base/mem.h"
#include "engine/engine_priv.h"

/* The planes that an update works on. */
struct views {
    struct mt_plane_view plane[MT_N_PLANES];
};

static void *element(const struct views *v, enum mt_plane_kind k, size_t i, size_t size)
{
    return v->plane[k].data + (i - v->plane[k].first) * size;
}

static int update_run(mt_engine *e, const struct views *v, const struct mt_tensor *t, size_t first,
                      size_t n, struct mt_err *err)
{
    enum mt_dtype sd = mt_plane_dtype(e->p.planes, MT_PLANE_M);
    struct mt_adam a = {
        .n = n,
        .hi = element(v, MT_PLANE_HI, first, 2),
        .lo = element(v, MT_PLANE_LO, first, 2),
        .m = element(v, MT_PLANE_M, first, mt_dtype_size(sd)),
        .v = element(v, MT_PLANE_V, first, mt_dtype_size(sd)),
        .grad = element(v, MT_PLANE_GRAD, first, mt_dtype_size(e->p.grad_dtype)),
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
    return 0;
}

static char *operand_of(const mt_engine *e, const struct mt_program *prog, const struct mt_instr *in,
                        enum mt_object_kind kind)
{
    for (int k = 0; k < in->n_operands; k++) {
        const struct mt_object *o = &prog->objects[in->operand[k].object];
        if (o->kind == kind)
            return e->buffers[o->pool][in->operand[k].buffer];
    }
    return NULL;
}

int mt_optimizer_update(mt_engine *e, const struct mt_program *prog, const struct mt_instr *in,
                        struct mt_err *err)
{
    size_t unit = (size_t)in->unit, piece = (size_t)in->piece;
    const struct mt_unit *u = &e->layout->units[unit];
    char *state = operand_of(e, prog, in, MT_OBJ_STATE), *staged = operand_of(e, prog, in, MT_OBJ_STAGED);
    size_t from = state ? piece * prog->piece_elems : 0, to = from + in->elems;
    struct views v;
    int rc = 0;
    if (!e->pending.any)
        return 0;
    for (int k = 0; k < MT_N_PLANES; k++)
        v.plane[k] = mt_plane_view(e, unit, (enum mt_plane_kind)k, piece, state, staged);
    for (size_t i = u->first_tensor; i < u->first_tensor + u->n_tensors && !rc; i++) {
        const struct mt_tensor *t = &e->layout->tensors[i];
        size_t first = MT_MAX(t->first, from), end = MT_MIN(t->first + t->n, to);
        if (t->trainable && first < end)
            rc = update_run(e, &v, t, first, end - first, err);
    }
    return rc;
}

static double tensor_square_sum(const void *ctx, size_t t)
{
    const mt_engine *e = ctx;
    size_t n;
    const float *part = mt_model_partials(e->model, t, &n);
    double sum = 0;
    for (size_t i = 0; i < n; i++)
        sum += (double)part[i];
    return sum;
}

double mt_grad_norm(const struct mt_layout *l, double (*square_sum)(const void *ctx, size_t tensor), const void *ctx,
                    const struct mt_tensor **bad)
{
    double sum = 0;
    *bad = NULL;
    for (size_t end = l->n_units, first; end > 0; end = first) {
        for (first = end - 1; first > 0 && l->units[first - 1].block == l->units[end - 1].block;)
            first--;
        const struct mt_unit *last = &l->units[end - 1];
        for (size_t i = l->units[first].first_tensor; i < last->first_tensor + last->n_tensors; i++) {
            if (!l->tensors[i].trainable)
                continue;
            double s = square_sum(ctx, i);
            if (!isfinite(s) && !*bad)
                *bad = &l->tensors[i];
            sum += s;
        }
    }
    return sqrt(sum);
}

double mt_optimizer_grad_norm(const mt_engine *e, const struct mt_tensor **bad)
{
    return mt_grad_norm(e->layout, tensor_square_sum, e, bad);
}
