/* SPDX-License-Identifier: Apache-2.0 */
#include "weights/packed_planes.h"

#include <stdlib.h>
#include <string.h>

#include "base/mem.h"

struct source {
    const struct mt_tensor *t;
    mt_plane_set *planes;
    struct mt_packed_piece piece[MT_MAX_PIECES];
    int n;
};

/* Reads the piece with that suffix; NULL: there is none, or an error. The caller frees it. */
static void *read_piece(const struct source *s, const char *suffix, int *rc, struct mt_err *err)
{
    void *bytes = NULL;
    for (int i = 0; i < s->n && suffix && !bytes && !*rc; i++) {
        const struct mt_packed_piece *p = &s->piece[i];
        if (strcmp(p->name + strlen(s->t->name), suffix))
            continue;
        bytes = malloc(p->bytes);
        *rc = bytes ? mt_planes_read(s->planes, s->t->unit, MT_PLANE_PACKED, p->at, p->bytes, bytes, err)
                    : mt_fail_nomem(err, p->name, p->bytes);
    }
    return bytes;
}

static int read_nested(float *scales, size_t n, const struct source *s, struct mt_err *err)
{
    int rc = 0;
    float offset = 0;
    MT_FREED uint8_t *codes = read_piece(s, ".absmax", &rc, err);
    MT_FREED float *nested = read_piece(s, ".nested_absmax", &rc, err), *map = read_piece(s, ".nested_quant_map", &rc, err);
    size_t at = mt_packed_offset_at(s->t);
    rc = rc ?: mt_planes_read(s->planes, s->t->unit, MT_PLANE_PACKED, at, sizeof(offset), &offset, err);
    for (size_t i = 0; i < n && !rc; i++) {
        float scale = map[codes[i]] * nested[i / MT_NF4_NESTED];
        scales[i] = scale + offset;
    }
    return rc;
}

static int read_scales(float *scales, float *factor, size_t n, const struct source *s, struct mt_err *err)
{
    int rc = 0;
    if (s->t->scale == MT_SCALE_NESTED)
        return read_nested(scales, n, s, err);
    MT_FREED void *raw = read_piece(s, mt_packed_formats[s->t->packed].scales_name, &rc, err);
    MT_FREED float *own = read_piece(s, mt_packed_factor_name(s->t->scale), &rc, err);
    *factor = own ? *own : 1;
    for (size_t i = 0; i < n && !rc; i++)
        scales[i] = mt_scale_to_f32(s->t->scale, raw, factor, i);
    return rc;
}

int mt_packed_plane_read(struct mt_packed_matrix *out, mt_plane_set *planes, const struct mt_tensor *t,
                         struct mt_err *err)
{
    struct source s = {.t = t, .planes = planes};
    size_t n = mt_packed_n_scales(t->packed, (size_t)t->shape[0], (size_t)t->shape[1]);
    int rc = 0;
    s.n = mt_packed_pieces(s.piece, t);
    *out = (struct mt_packed_matrix){.format = t->packed, .cols = (size_t)t->shape[1]};
    out->codes = read_piece(&s, s.piece[0].name + strlen(t->name), &rc, err);
    out->scales = mt_calloc(n, sizeof(float));
    if (!rc && !out->scales)
        rc = mt_fail_nomem(err, t->name, n * sizeof(float));
    rc = rc ?: read_scales(out->scales, &out->factor, n, &s, err);
    if (rc)
        mt_packed_matrix_finish(out);
    return rc;
}

void mt_packed_matrix_values(const struct mt_packed_matrix *p, size_t first, size_t n, float *dst)
{
    mt_packed_values(p->format, p->cols, p->codes, p->scales, first, n, dst);
}

void mt_packed_matrix_finish(struct mt_packed_matrix *p)
{
    free(p->codes);
    free(p->scales);
    *p = (struct mt_packed_matrix){.codes = NULL};
}
