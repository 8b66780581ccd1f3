/* SPDX-License-Identifier: Apache-2.0 */
#include "model/ranges.h"

#include "base/mem.h"

enum { PIECE = 1024 }; /* elements of a tensor that are split or joined at once */

void mt_plane_descs(struct mt_plane_desc desc[MT_N_PLANES], const struct mt_optimizer *optimizer, enum mt_dtype grad)
{
    const size_t half = mt_dtype_size(MT_BF16);
    for (int k = 0; k < MT_N_PLANES; k++)
        desc[k] = (struct mt_plane_desc){.use = NULL};
    desc[MT_PLANE_HI] = (struct mt_plane_desc){"weights (hi)", NULL, MT_ROLE_WEIGHT, MT_RANGE_ALL, MT_BF16, 1, half};
    desc[MT_PLANE_LO] = (struct mt_plane_desc){"weights (lo)", NULL, MT_ROLE_WEIGHT, MT_RANGE_TRAINED, MT_BF16, 1, half};
    desc[MT_PLANE_FROZEN_LO] = (struct mt_plane_desc){"frozen weights (lo)", NULL, MT_ROLE_WEIGHT, MT_RANGE_FROZEN_WIDE,
                                                      MT_BF16, 1, half};
    if (!optimizer)
        return;
    for (int i = 0; i < optimizer->n_states; i++) {
        const struct mt_optimizer_state *s = &optimizer->state[i];
        desc[MT_PLANE_STATE + i] = (struct mt_plane_desc){s->use, s->name, MT_ROLE_STATE, MT_RANGE_TRAINED, s->dtype,
                                                          s->block, s->block_bytes};
    }
    desc[MT_PLANE_GRAD] = (struct mt_plane_desc){"gradients", NULL, MT_ROLE_GRADIENT, MT_RANGE_TRAINED, grad, 1,
                                                 mt_dtype_size(grad)};
}

bool mt_plane_is_loaded(enum mt_plane_kind k, enum mt_dtype dtype)
{
    return k == MT_PLANE_HI || (dtype == MT_F32 && (k == MT_PLANE_LO || k == MT_PLANE_FROZEN_LO));
}

struct mt_plane_elems mt_unit_plane_elems(const struct mt_unit *u, const struct mt_plane_desc desc[MT_N_PLANES])
{
    struct mt_plane_elems e = {{0}};
    for (int k = 0; k < MT_N_PLANES; k++)
        if (desc[k].block && (desc[k].role == MT_ROLE_WEIGHT || u->trainable))
            e.n[k] = u->n_elems;
    e.n[MT_PLANE_FROZEN_LO] = 0;
    return e;
}

int mt_layout_plane_params(struct mt_plane_set_params *out, const struct mt_layout *l,
                           const struct mt_optimizer *optimizer, enum mt_dtype grad, struct mt_err *err)
{
    struct mt_plane_elems *elems = mt_calloc(l->n_units, sizeof(*elems));
    if (!elems)
        return mt_fail_nomem(err, "the planes", l->n_units * sizeof(*elems));
    *out = (struct mt_plane_set_params){.n_units = l->n_units, .elems = elems};
    mt_plane_descs(out->desc, optimizer, grad);
    for (size_t u = 0; u < l->n_units; u++)
        elems[u] = mt_unit_plane_elems(&l->units[u], out->desc);
    return 0;
}

int mt_tensor_write_masters(mt_plane_set *planes, const struct mt_tensor *t, size_t first, size_t n,
                            const float *masters, struct mt_err *err)
{
    uint16_t hi[PIECE], lo[PIECE];
    for (size_t at = 0; at < n; at += PIECE) {
        size_t k = MT_MIN((size_t)PIECE, n - at);
        for (size_t i = 0; i < k; i++)
            mt_master_split(masters[at + i], &hi[i], &lo[i]);
        int rc = mt_planes_write(planes, t->unit, MT_PLANE_HI, t->first + first + at, k, hi, err);
        if (!rc)
            rc = mt_planes_write(planes, t->unit, MT_PLANE_LO, t->first + first + at, k, lo, err);
        if (rc)
            return rc;
    }
    return 0;
}

int mt_tensor_read_masters(mt_plane_set *planes, const struct mt_tensor *t, size_t first, size_t n, float *masters,
                           struct mt_err *err)
{
    uint16_t hi[PIECE], lo[PIECE];
    for (size_t at = 0; at < n; at += PIECE) {
        size_t k = MT_MIN((size_t)PIECE, n - at);
        int rc = mt_planes_read(planes, t->unit, MT_PLANE_HI, t->first + first + at, k, hi, err);
        if (!rc)
            rc = mt_planes_read(planes, t->unit, MT_PLANE_LO, t->first + first + at, k, lo, err);
        if (rc)
            return rc;
        for (size_t i = 0; i < k; i++)
            masters[at + i] = mt_master_join(hi[i], lo[i]);
    }
    return 0;
}
