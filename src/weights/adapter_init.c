/* SPDX-License-Identifier: Apache-2.0 */
/* The initial values of adapters, as in PEFT: A uniform, B zero, DoRA's magnitudes the lengths of the rows of W, decoded where it
 * is packed. */
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <xxhash.h>

#include "base/mem.h"
#include "base/philox.h"
#include "model/ranges.h"
#include "model/stored.h"
#include "weights/packed_files.h"
#include "weights/peft.h"

enum { PIECE = 1 << 16, ROWS = 256 }; /* elements; rows of magnitudes */

static int init_factor(const struct mt_tensor *t, mt_plane_set *planes, uint64_t seed, float *buf, struct mt_err *err)
{
    uint64_t stream = XXH3_64bits(t->name, strlen(t->name));
    bool a = mt_ends_with(t->name, "." MT_LORA_A ".weight");
    double bound = a ? 1 / sqrt((double)t->shape[1]) : 0;
    int rc = 0;
    for (size_t at = 0; at < t->n && !rc; at += PIECE) {
        size_t n = MT_MIN((size_t)PIECE, t->n - at);
        for (size_t i = 0; i < n; i++)
            buf[i] = a ? (float)((2 * mt_philox_uniform(seed, stream, at + i) - 1) * bound) : 0;
        rc = mt_tensor_write_masters(planes, t, at, n, buf, err);
    }
    return rc;
}

/* Lengths of rows [first, first + n) of the matrix under an adapter. */
static int row_norms(struct mt_packed_matrix *kept, mt_plane_set *planes, const struct mt_tensor *w, size_t first,
                     size_t n, float *norm, struct mt_err *err)
{
    size_t in = (size_t)w->shape[1];
    float buf[1024];
    for (size_t row = 0; row < n; row++) {
        double sum = 0;
        for (size_t at = 0, k; at < in; at += k) {
            k = MT_MIN(MT_ARRAY_LEN(buf), in - at);
            int rc = mt_packed_plane_values(kept, planes, w, (first + row) * in + at, k, buf, err);
            if (rc)
                return rc;
            for (size_t i = 0; i < k; i++)
                sum += (double)buf[i] * (double)buf[i];
        }
        norm[row] = (float)sqrt(sum);
    }
    return 0;
}

static int init_magnitude(const struct mt_layout *l, const struct mt_tensor *w, mt_plane_set *planes,
                          struct mt_err *err)
{
    char name[MT_TENSOR_NAME], module[MT_TENSOR_NAME];
    float norm[ROWS];
    MT_CLOSED_BY(mt_packed_matrix_finish) struct mt_packed_matrix kept = {.codes = NULL};
    int rc = 0;
    mt_stored_module(module, l, w);
    snprintf(name, sizeof(name), "%.90s." MT_LORA_MAGNITUDE, module);
    const struct mt_tensor *m = mt_layout_find(l, name);
    for (size_t first = 0; first < m->n && !rc; first += ROWS) {
        size_t n = MT_MIN((size_t)ROWS, m->n - first);
        rc = row_norms(&kept, planes, w, first, n, norm, err)
          ?: mt_tensor_write_masters(planes, m, first, n, norm, err);
    }
    return rc;
}

int mt_adapter_init(const struct mt_layout *l, mt_plane_set *planes, uint64_t seed, struct mt_err *err)
{
    MT_FREED float *buf = mt_calloc(PIECE, sizeof(float));
    int rc = buf ? 0 : mt_fail_nomem(err, "an adapter", PIECE * sizeof(float));
    for (size_t i = 0; i < l->n_tensors && !rc; i++)
        if (l->tensors[i].adapter)
            rc = init_factor(&l->tensors[i], planes, seed, buf, err);
    for (size_t i = 0; i < l->n_adapters && !rc; i++)
        for (size_t k = 0; k < l->adapters[i].n_targets && l->adapters[i].dora && !rc; k++)
            rc = init_magnitude(l, &l->tensors[l->adapters[i].target[k].tensor], planes, err);
    return rc ?: mt_planes_settle(planes, err);
}
