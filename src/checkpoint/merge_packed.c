/* SPDX-License-Identifier: Apache-2.0 */
#include "checkpoint/merge_packed.h"

#include <math.h>
#include <stdlib.h>
#include <unistd.h>

#include "base/mem.h"
#include "base/pack.h"
#include "base/pool.h"
#include "device/merge_job.h"
#include "model/packing.h"
#include "model/ranges.h"
#include "weights/packed_files.h"

/* A matrix, its adapter, and what becomes of it; in host memory. */
struct merging {
    const struct mt_layout *l;
    mt_plane_set *planes;
    const struct mt_tensor *t;
    enum mt_dtype dtype;
    struct mt_merge_adapter a;
    struct mt_packed_matrix from; /* packed */
    void *w, *factor[3];         /* in dtype: the matrix; A, B, magnitudes */
    float *norms, *scales;
    uint8_t *codes;
};

/* n elements from element `at` of the tensor's unit on, as a device that computes in dtype has them. */
static int read_elements(const struct merging *m, const struct mt_tensor *t, size_t at, size_t n, void *dst,
                         struct mt_err *err)
{
    if (m->dtype == MT_F32)
        return mt_tensor_read_masters(m->planes, t, at - t->first, n, dst, err);
    return mt_planes_read(m->planes, t->unit, mt_range_planes(t->kind).hi, t->at + (at - t->first), n, dst, err);
}

/* The same of adapters, to a new array. */
static void *read_factor(const struct merging *m, size_t at, size_t n, int *rc, struct mt_err *err)
{
    void *p = mt_calloc(n, mt_dtype_size(m->dtype));
    *rc = p ? read_elements(m, mt_unit_tensor_at(m->l, m->t->unit, at), at, n, p, err)
            : mt_fail_nomem(err, m->t->name, n * mt_dtype_size(m->dtype));
    return p;
}

/* The matrix as it was decoded: rounded once to dtype. */
static int read_matrix(struct merging *m, struct mt_err *err)
{
    size_t n = m->t->n;
    int rc;
    m->w = mt_calloc(n, mt_dtype_size(m->dtype));
    if (!m->w)
        return mt_fail_nomem(err, m->t->name, n * mt_dtype_size(m->dtype));
    if (m->t->kind != MT_RANGE_PACKED)
        return read_elements(m, m->t, m->t->first, n, m->w, err);
    rc = mt_packed_plane_read(&m->from, m->planes, m->t, err);
    for (size_t at = 0, k; at < n && !rc; at += k) {
        float x[1024];
        k = MT_MIN(n - at, MT_ARRAY_LEN(x));
        mt_packed_matrix_values(&m->from, at, k, x);
        for (size_t i = 0; i < k; i++)
            if (m->dtype == MT_BF16)
                ((uint16_t *)m->w)[at + i] = mt_f32_to_bf16(x[i]);
            else
                ((float *)m->w)[at + i] = x[i];
    }
    return rc;
}

static void finish(struct merging *m)
{
    mt_packed_matrix_finish(&m->from);
    free(m->w);
    for (int i = 0; i < 3; i++)
        free(m->factor[i]);
    free(m->norms);
    free(m->scales);
    free(m->codes);
}

/* Of a matrix that mt_merge_of() has found the place of. Must be finished in any case. */
static int begin(struct merging *m, const struct mt_merge_place *p, struct mt_err *err)
{
    const struct mt_tensor *t = m->t;
    size_t rows = (size_t)t->shape[0], cols = (size_t)t->shape[1];
    bool dora = p->magnitude != SIZE_MAX;
    int rc = read_matrix(m, err);
    m->factor[0] = rc ? NULL : read_factor(m, p->a, p->rank * cols, &rc, err);
    m->factor[1] = rc ? NULL : read_factor(m, p->b, rows * p->rank, &rc, err);
    m->factor[2] = rc || !dora ? NULL : read_factor(m, p->magnitude, rows, &rc, err);
    m->norms = mt_calloc(2 * rows, sizeof(float));
    m->scales = mt_calloc(p->format ? mt_packed_n_scales(p->format, rows, cols) : 1, sizeof(float));
    m->codes = mt_calloc(t->n, 1);
    if (!rc && (!m->norms || !m->scales || !m->codes))
        rc = mt_fail_nomem(err, t->name, t->n);
    m->a = (struct mt_merge_adapter){
        .of = {.rows = rows, .cols = cols, .dtype = m->dtype, .format = p->format, .scales = m->from.scales,
               .factor = &m->from.factor, .out = m->w},
        .rescale = p->format && m->l->adapter_default.merge_scale == MT_SCALES_RECOMPUTED,
        .r = p->rank, .s = p->scale, .a = m->factor[0], .b = m->factor[1], .magnitude = m->factor[2],
        .scale = dora ? m->norms : NULL, .inverse = dora ? m->norms + rows : NULL};
    if (m->a.rescale)
        m->a.of.scale = t->scale;
    for (size_t row = 0; dora && row < rows && !rc; row++)
        mt_merge_adapter_norm(&m->a, row);
    return rc;
}

static void job_main(void *ctx, size_t job, int thread)
{
    struct merging *m = ctx;
    (void)thread;
    mt_merge_adapter_job(&m->a, job, m->a.of.format ? m->codes : NULL, m->a.of.format ? m->scales : NULL);
}

static int write_packed(struct merging *m, struct mt_err *err)
{
    const struct mt_tensor *t = m->t;
    size_t n = mt_packed_n_scales(t->packed, m->a.of.rows, m->a.of.cols), size = mt_scale_size(t->scale);
    int rc = mt_planes_write(m->planes, t->unit, MT_PLANE_PACKED, t->at,
                             mt_packed_code_bytes(t->packed, m->a.of.rows, m->a.of.cols), m->codes, err);
    if (rc || !m->a.rescale)
        return rc;
    mt_pack_scales(t->scale, m->from.factor, m->scales, n, m->scales);
    return mt_planes_write(m->planes, t->unit, MT_PLANE_PACKED, t->aux, n * size, m->scales, err);
}

static int write_plain(struct merging *m, struct mt_err *err)
{
    int rc = 0;
    for (size_t at = 0, k; at < m->t->n && !rc; at += k) {
        float x[1024];
        k = MT_MIN(m->t->n - at, MT_ARRAY_LEN(x));
        for (size_t i = 0; i < k; i++)
            x[i] = m->dtype == MT_BF16 ? mt_bf16_to_f32(((uint16_t *)m->w)[at + i]) : ((float *)m->w)[at + i];
        rc = mt_tensor_write_masters(m->planes, m->t, at, k, x, err);
    }
    return rc;
}

int mt_merge_packed(const struct mt_layout *l, mt_plane_set *planes, enum mt_dtype dtype, struct mt_err *err)
{
    long cpus = sysconf(_SC_NPROCESSORS_ONLN);
    MT_CLOSED_BY(mt_pool_destroy) mt_pool *pool = NULL;
    int rc = mt_pool_create(&pool, &(struct mt_pool_params){"merge", (int)MT_MIN(MT_MAX(cpus, 1), 64), NULL, NULL}, err);
    for (size_t i = 0; i < l->n_tensors && !rc; i++) {
        struct merging m = {.l = l, .planes = planes, .t = &l->tensors[i], .dtype = dtype};
        struct mt_merge_place p;
        if (!mt_merge_of(l, m.t, &p))
            continue;
        rc = begin(&m, &p, err);
        if (!rc)
            mt_pool_run(pool, job_main, &m, mt_merge_adapter_n_jobs(&m.a));
        rc = rc ?: p.format ? write_packed(&m, err) : write_plain(&m, err);
        finish(&m);
    }
    return rc;
}

int mt_merge_share(double *out, const struct mt_layout *l, mt_plane_set *planes, enum mt_dtype dtype,
                   struct mt_err *err)
{
    enum { MOST = 1 << 26 }; /* elements: a second or two */
    struct mt_merge_place p;
    size_t all = 0, seen = 0, differ = 0, of = 0;
    int rc = 0;
    for (size_t i = 0; i < l->n_tensors; i++)
        all += mt_merge_of(l, &l->tensors[i], &p) ? l->tensors[i].n : 0;
    for (size_t i = 0; i < l->n_tensors && !rc; i++) {
        struct merging m = {.l = l, .planes = planes, .t = &l->tensors[i], .dtype = dtype};
        if (!mt_merge_of(l, m.t, &p) || (seen += m.t->n) < of * mt_div_up(all, MOST))
            continue;
        rc = begin(&m, &p, err);
        for (size_t j = 0; !rc && j < mt_merge_adapter_n_jobs(&m.a); j++)
            differ += mt_merge_adapter_job(&m.a, j, NULL, NULL);
        of += m.t->n;
        finish(&m);
    }
    *out = of ? (double)differ / (double)of : NAN;
    return rc;
}
