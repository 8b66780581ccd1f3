/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Casts a unit's gradient for its copy to the host. In place, if the budget has no buffer for the cast: the 16-bit
 * element i overwrites half of the 32-bit element i / 2, which has been cast already. A piece that begins at element
 * `at` may therefore have at most `at` elements; the first ones go through a small buffer.
 */
#include "base/mem.h"
#include "model/direct.h"
#include "model/state.h"

struct cast {
    mt_model *m;
    const float *g;
    float *partials; /* of the tensor; NULL: of a direction */
    char *dst;
    enum mt_dtype dtype;
};

/* Elements [at, at + n) of the gradient; `first` is the tensor's first, and at - first is a multiple of the block. */
static int cast_piece(const struct cast *c, size_t first, size_t at, size_t n, void *to, struct mt_err *err)
{
    return mt_op_grad_cast(c->m->dev,
                           &(struct mt_grad_cast){
                               .n = n,
                               .src = c->g + at,
                               .dst_dtype = c->dtype,
                               .dst = to,
                               .partials = c->partials ? c->partials + (at - first) / MT_SUMSQ_BLOCK : NULL,
                           },
                           err);
}

static int cast_in_place(const struct cast *c, size_t first, size_t n, struct mt_err *err)
{
    size_t size = mt_dtype_size(c->dtype), end = first + n, piece;
    int rc = 0;
    mt_model_poison(c->m, c->m->cast_start, (size_t)MT_SUMSQ_BLOCK * 2);
    for (size_t at = first; at < end && !rc; at += piece) {
        void *to = c->dst + at * size;
        bool buffered = at < MT_SUMSQ_BLOCK;
        piece = MT_MIN(end - at, buffered ? MT_SUMSQ_BLOCK : at / MT_SUMSQ_BLOCK * MT_SUMSQ_BLOCK);
        rc = cast_piece(c, first, at, piece, buffered ? c->m->cast_start : to, err);
        if (!rc && buffered)
            rc = mt_model_copy(c->m, to, c->m->cast_start, piece * size, err);
    }
    return rc;
}

/* Where the sums of a tensor's squares go; NULL: they have been made before it became a direction. */
static float *partials_of(mt_model *m, size_t tensor)
{
    return mt_tensor_has_direction(m->layout, &m->layout->tensors[tensor])
               ? NULL : mt_model_stats_partials(m, m->stats_dev) + m->partials_at[tensor];
}

int mt_model_cast_tensor(mt_model *m, size_t tensor, const float *src, void *dst, enum mt_dtype dst_dtype,
                         struct mt_err *err)
{
    const struct mt_tensor *t = &m->layout->tensors[tensor];
    const struct cast c = {m, src, partials_of(m, tensor), dst, dst_dtype};
    return cast_piece(&c, 0, 0, t->n, c.dst + t->grad * mt_dtype_size(dst_dtype), err);
}

int mt_model_compact_rows(mt_model *m, const void *cast, enum mt_dtype dtype, void *packed, struct mt_err *err)
{
    size_t c = (size_t)m->layout->cfg.hidden;
    const struct mt_tensor *table = &m->layout->tensors[m->layout->units[0].first_tensor];
    return mt_op_gather_rows(m->dev,
                             &(struct mt_rows){.n = m->n_used, .c = c, .dtype = dtype, .rows = m->used_dev,
                                               .src = (const char *)cast + table->grad * mt_dtype_size(dtype),
                                               .dst = packed},
                             err);
}

int mt_model_grad_cast(mt_model *m, size_t unit, float *g, void *dst, enum mt_dtype dst_dtype,
                       struct mt_err *err)
{
    const struct mt_unit *u = &m->layout->units[unit];
    bool in_place = (void *)g == dst && dst_dtype != MT_F32;
    int rc = 0;
    for (size_t t = u->first_tensor; !rc && t < u->first_tensor + u->n_tensors; t++) {
        const struct mt_tensor *ten = &m->layout->tensors[t];
        struct cast c = {m, g, partials_of(m, t), dst, dst_dtype};
        if (!ten->trainable)
            continue;
        rc = in_place ? cast_in_place(&c, ten->grad, ten->n, err)
                      : cast_piece(&c, ten->grad, ten->grad, ten->n,
                                   c.dst + ten->grad * mt_dtype_size(dst_dtype), err);
    }
    return rc;
}
