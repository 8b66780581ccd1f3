/* SPDX-License-Identifier: Apache-2.0 */
/* Random weights, into the planes. */
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#include "base/mem.h"
#include "base/philox.h"
#include "base/pool.h"
#include "model/ranges.h"
#include "weights/packer.h"
#include "weights/weights.h"

enum { PIECE = 1 << 20 }; /* elements */

struct random_job {
    const struct mt_tensor *t;
    uint64_t seed, stream;
    float std, constant;
    float *dst; /* elements [at, at + n) */
    size_t at, n;
};

enum { BLOCK = 1 << 14 }; /* elements of one job of a thread */

/* Of one element, which its index in the tensor draws. */
static float log_uniform(const struct random_job *j, size_t i)
{
    double low = (double)j->constant, high = (double)j->t->log_to;
    return (float)log(low + (high - low) * mt_philox_uniform(j->seed, j->stream, j->at + i));
}

static void fill_block(void *ctx, size_t i, int)
{
    const struct random_job *j = ctx;
    size_t first = i * BLOCK, n = MT_MIN((size_t)BLOCK, j->n - first);
    if (j->t->n_dims == 2)
        mt_philox_normal(j->dst + first, n, j->at + first, j->seed, j->stream, j->std);
    else
        for (size_t k = 0; k < n; k++)
            j->dst[first + k] = j->t->log_to > 0 ? log_uniform(j, first + k) : j->constant;
}

static int init_tensor(const struct mt_layout *l, const struct mt_tensor *t, mt_plane_set *planes, uint64_t seed,
                       mt_pool *pool, struct mt_err *err)
{
    bool packs = t->kind == MT_RANGE_PACKED;
    struct mt_packer *packer = NULL;
    size_t piece = MT_MIN(packs ? mt_packer_piece(t, PIECE) : PIECE, t->n);
    MT_FREED float *buf = mt_alloc_aligned(piece * sizeof(*buf));
    struct random_job j = {.t = t,
                           .seed = seed,
                           .stream = XXH3_64bits(t->name, strlen(t->name)),
                           .std = (float)l->cfg.initializer_range,
                           .constant = t->start,
                           .dst = buf};
    int rc = buf ? 0 : mt_fail_nomem(err, t->name, piece * sizeof(*buf));
    if (!rc && packs)
        rc = mt_packer_create(&packer, t, planes, 8 * j.std, mt_pool_n_threads(pool), NULL, err);
    for (j.at = 0; j.at < t->n && !rc; j.at += j.n) {
        j.n = MT_MIN(piece, t->n - j.at);
        mt_pool_run(pool, fill_block, &j, mt_div_up(j.n, BLOCK));
        rc = packer ? mt_packer_write(packer, buf, j.n, err) : mt_tensor_write_masters(planes, t, j.at, j.n, buf, err);
    }
    return packer ? mt_packer_finish(&packer, rc, err) : rc;
}

int mt_weights_init_random(const struct mt_layout *l, mt_plane_set *planes, uint64_t seed,
                           int n_threads, struct mt_err *err)
{
    MT_CLOSED_BY(mt_pool_destroy) mt_pool *pool = NULL;
    int rc = mt_pool_create(&pool, &(struct mt_pool_params){"init", n_threads, NULL, NULL}, err);
    for (size_t i = 0; i < l->n_tensors && !rc; i++)
        rc = init_tensor(l, &l->tensors[i], planes, seed, pool, err);
    return rc ?: mt_planes_settle(planes, err);
}
