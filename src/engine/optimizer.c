/* SPDX-License-Identifier: Apache-2.0 */
#include <math.h>

#include "base/mem.h"
#include "engine/engine_priv.h"

/* The planes of an update. */
struct views {
    struct mt_plane_view plane[MT_N_PLANES];
};

static void *element(const mt_engine *e, const struct views *v, int k, size_t i)
{
    const struct mt_plane_desc *d = mt_plane_desc_of(e->p.planes, (enum mt_plane_kind)k);
    return v->plane[k].data + mt_plane_desc_bytes(d, i - v->plane[k].first);
}

/* Updates elements [first, first + n) of the trained planes, all of tensor t. */
static int update_run(mt_engine *e, const struct views *v, const struct mt_tensor *t, size_t first,
                      size_t n, struct mt_err *err)
{
    const struct mt_optimizer *o = e->p.numerics.optimizer;
    struct mt_update u = {
        .n = n,
        .hi = element(e, v, MT_PLANE_HI, first),
        .lo = element(e, v, MT_PLANE_LO, first),
        .grad = element(e, v, MT_PLANE_GRAD, first),
        .grad_dtype = e->p.numerics.grad_dtype,
        .keys = &e->p.numerics.optimizer_keys,
        .lr = e->pending.lr * t->lr_scale,
        .weight_decay = t->decay ? e->p.numerics.optimizer_keys.weight_decay : 0,
        .t = e->pending.t,
        .clip = e->pending.clip,
    };
    for (int i = 0; i < o->n_states; i++)
        u.state[i] = element(e, v, MT_PLANE_STATE + i, first);
    uint64_t bad = o->update(o, &u, e->p.isa, e->adam_pool);
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
            return e->b.buffers[o->pool][in->operand[k].buffer];
    }
    return NULL;
}

int mt_optimizer_update(void *engine, const struct mt_program *prog, const struct mt_instr *in, struct mt_err *err)
{
    mt_engine *e = engine;
    size_t unit = (size_t)in->unit, piece = (size_t)in->piece;
    const struct mt_unit *u = &e->b.layout->units[unit];
    char *state = operand_of(e, prog, in, MT_OBJ_STATE), *staged = operand_of(e, prog, in, MT_OBJ_STAGED);
    size_t from = state ? piece * prog->piece_elems : 0, to = from + in->elems;
    struct views v;
    int rc = 0;
    if (!e->pending.any)
        return 0;
    for (int k = 0; k < MT_N_PLANES; k++)
        v.plane[k] = mt_plane_view(&e->b, unit, (enum mt_plane_kind)k, piece, state, staged);
    for (size_t i = u->first_tensor; i < u->first_tensor + u->n_tensors && !rc; i++) {
        const struct mt_tensor *t = &e->b.layout->tensors[i];
        size_t first = MT_MAX(t->at, from), end = MT_MIN(t->at + t->n, to);
        if (t->trainable && first < end)
            rc = update_run(e, &v, t, first, end - first, err);
    }
    return rc;
}

static double tensor_square_sum(const void *ctx, size_t t)
{
    const mt_engine *e = ctx;
    size_t n;
    const float *part = mt_model_partials(e->b.model, t, &n);
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
    return mt_grad_norm(e->b.layout, tensor_square_sum, e, bad);
}
