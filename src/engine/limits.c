/* SPDX-License-Identifier: Apache-2.0 */
/* Sparse-MeZO's limits: of each tensor, the size that a share of its weights does not exceed when the run begins. */
#include <math.h>
#include <string.h>

#include "base/mem.h"
#include "engine/state.h"

enum { SIZES = MT_NOISE_ALL + 1, PIECE = 1 << 16 };

/* The least size that so many of the tensor's weights do not exceed, of their bf16 without the sign. */
static int find_limit(mt_engine *e, const struct mt_tensor *t, uint64_t *count, uint32_t *limit, struct mt_err *err)
{
    uint16_t hi[PIECE];
    int rc = 0;
    memset(count, 0, SIZES * sizeof(*count));
    for (size_t at = 0; at < t->n && !rc; at += PIECE) {
        size_t n = MT_MIN((size_t)PIECE, t->n - at);
        rc = mt_planes_read(e->p.planes, t->unit, MT_PLANE_HI, t->at + at, n, hi, err);
        for (size_t i = 0; i < n && !rc; i++)
            count[hi[i] & MT_NOISE_ALL]++;
    }
    if (rc)
        return rc;
    double some = e->p.numerics.mezo.small * (double)t->n;
    uint64_t below = 0;
    for (*limit = 0; (double)(below += count[*limit]) < some;)
        ++*limit;
    return 0;
}

int mt_engine_find_limits(mt_engine *e, struct mt_err *err)
{
    const struct mt_layout *l = e->b.layout;
    MT_FREED uint64_t *count = NULL;
    int rc = 0;
    if (e->perturbing.numerics || !mt_engine_variants(&e->p) || !e->p.numerics.optimizer->n_states)
        return 0;
    rc = MT_NEW(&count, SIZES, "the sizes of weights", err);
    for (const struct mt_tensor *t = l->tensors; t < l->tensors + l->n_tensors && !rc; t++) {
        struct mt_tensor_span s = mt_tensor_span(t, mt_plane_desc_of(e->p.planes, MT_PLANE_STATE), MT_PLANE_STATE);
        uint32_t code;
        float limit;
        char *at = t->trainable ? (char *)mt_plane(e->p.planes, t->unit, MT_PLANE_STATE) + s.at : NULL;
        if (at)
            memcpy(&limit, at, sizeof(limit));
        if (!at || limit > 0) /* it was found before, by this run */
            continue;
        rc = find_limit(e, t, count, &code, err);
        if (rc)
            break;
        limit = code ? mt_bf16_to_f32((uint16_t)code) : INFINITY; /* zeros alone: all of them */
        memcpy(at, &limit, sizeof(limit));
    }
    return rc;
}
