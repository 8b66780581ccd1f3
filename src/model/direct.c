/* SPDX-License-Identifier: Apache-2.0 */
#include "model/direct.h"

#include "base/mem.h"
#include "model/ranges.h"
#include "model/state.h"
#include "optim/optimizer.h"

enum { ALIGN = 256 };

size_t mt_unit_moment_planes(const struct mt_layout *l, size_t unit, struct mt_moment_plane plane[MT_MAX_STATES])
{
    struct mt_plane_desc desc[MT_N_PLANES];
    size_t n = 0, at = 0;
    mt_plane_descs(desc, l->optimizer, l->master, MT_F32);
    for (int k = 0; k < MT_N_PLANES; k++) {
        size_t elems = mt_unit_n_elems(&l->units[unit], desc, (enum mt_plane_kind)k);
        size_t bytes = desc[k].on_device ? mt_plane_desc_bytes(&desc[k], elems) : 0;
        if (!bytes)
            continue;
        plane[n++] = (struct mt_moment_plane){(enum mt_plane_kind)k, at, bytes};
        at += mt_align_up(bytes, (size_t)ALIGN);
    }
    return n;
}

size_t mt_unit_moment_bytes(const struct mt_layout *l, size_t unit)
{
    struct mt_moment_plane plane[MT_MAX_STATES];
    size_t n = l->units[unit].trainable ? mt_unit_moment_planes(l, unit, plane) : 0;
    return n ? plane[n - 1].at + mt_align_up(plane[n - 1].bytes, (size_t)ALIGN) : 0;
}

/* Sets the tensor's states in the unit's buffer `moments`, NULL: none; returns whether it has any. */
static bool find_states(const struct mt_layout *l, const struct mt_tensor *t, char *moments, void *state[MT_MAX_STATES])
{
    struct mt_moment_plane plane[MT_MAX_STATES];
    struct mt_plane_desc desc[MT_N_PLANES];
    size_t n = t->trainable ? mt_unit_moment_planes(l, t->unit, plane) : 0;
    bool any = false;
    mt_plane_descs(desc, l->optimizer, l->master, MT_F32);
    for (size_t i = 0; i < n; i++) {
        struct mt_tensor_span span = mt_tensor_span(t, &desc[plane[i].kind], plane[i].kind);
        any |= span.bytes > 0;
        if (moments && span.bytes)
            state[plane[i].kind - MT_PLANE_STATE] = moments + plane[i].at + span.at;
    }
    return any;
}

bool mt_tensor_has_direction(const struct mt_layout *l, const struct mt_tensor *t)
{
    return find_states(l, t, NULL, NULL);
}

static struct mt_direction direction_of(const struct mt_tensor *t, enum mt_dtype dtype)
{
    struct mt_state_shape s = mt_tensor_state_shape(t);
    return (struct mt_direction){.rows = s.rows, .cols = s.cols, .rank = s.rank, .dtype = dtype};
}

size_t mt_direct_scratch_bytes(const struct mt_model_params *p)
{
    const struct mt_layout *l = p->layout;
    size_t most = 0;
    for (size_t i = 0; p->backward && l->optimizer && l->optimizer->direct && i < l->n_tensors; i++) {
        struct mt_direction d = direction_of(&l->tensors[i], p->dtype);
        if (mt_tensor_has_direction(l, &l->tensors[i]))
            most = MT_MAX(most, l->optimizer->direct_scratch(&d));
    }
    return most;
}

int mt_model_direct_tensor(mt_model *m, size_t tensor, const struct mt_model_direct *a, struct mt_err *err)
{
    const struct mt_tensor *t = &m->layout->tensors[tensor];
    const struct mt_model_learner *of = &m->inputs[0].of;
    struct mt_direction d = direction_of(t, m->dt);
    if (!a->moments || !find_states(m->layout, t, a->moments, d.state))
        return 0;
    d.dev = m->dev;
    d.g = a->g;
    d.w = mt_elem(m, a->w, t->first);
    d.keys = m->p.optimizer_keys;
    d.t = of->update ? of->update : 2; /* 0: it is metered; the first update may do more than most */
    d.seed = of->seed;
    d.tensor = t->number;
    d.scratch = m->direct;
    mt_model_poison(m, m->direct, m->layout->optimizer->direct_scratch(&d));
    int rc = mt_op_grad_cast(m->dev,
                             &(struct mt_grad_cast){
                                 .n = t->n,
                                 .src = a->g,
                                 .dst_dtype = a->cast_dtype,
                                 .partials = mt_model_stats_partials(m, m->stats_dev) + m->partials_at[tensor],
                             },
                             err);
    return rc ?: m->layout->optimizer->direct(m->layout->optimizer, &d, err);
}

int mt_model_direct(mt_model *m, const struct mt_unit_run *r, struct mt_err *err)
{
    const struct mt_unit *u = &m->layout->units[r->unit];
    int rc = 0;
    for (size_t t = u->first_tensor; !rc && t < u->first_tensor + u->n_tensors; t++) {
        const struct mt_model_direct a = {.g = (float *)r->at[MT_ROLE_GRAD] + m->layout->tensors[t].grad,
                                          .w = r->at[MT_ROLE_WEIGHTS], .moments = r->at[MT_ROLE_MOMENTS],
                                          .cast_dtype = r->cast_dtype};
        rc = mt_model_direct_tensor(m, t, &a, err);
    }
    return rc;
}
