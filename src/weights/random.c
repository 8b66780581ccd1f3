/* SPDX-License-Identifier: Apache-2.0 */
/* Random weights, into the planes. */
#include <math.h>
#include <string.h>
#include <xxhash.h>

#include "base/mem.h"
#include "base/philox.h"
#include "base/pool.h"
#include "weights/packer.h"
#include "weights/weights.h"

struct random_job {
    const struct mt_tensor *t;
    uint64_t seed, stream;
    float std, constant;
    mt_pool *pool;
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

static int draw(void *ctx, const struct mt_tensor *, size_t at, size_t n, float *dst, struct mt_err *)
{
    struct random_job *j = ctx;
    j->at = at;
    j->n = n;
    j->dst = dst;
    mt_pool_run(j->pool, fill_block, j, mt_div_up(n, BLOCK));
    return 0;
}

static int init_tensor(const struct mt_layout *l, const struct mt_tensor *t, mt_plane_set *planes, uint64_t seed,
                       mt_pool *pool, struct mt_err *err)
{
    struct random_job j = {.t = t,
                           .seed = seed,
                           .stream = XXH3_64bits(t->name, strlen(t->name)),
                           .std = (float)l->cfg.initializer_range,
                           .constant = t->start,
                           .pool = pool};
    const struct mt_filling f = {.read = draw, .ctx = &j, .largest = 8 * j.std, .n_threads = mt_pool_n_threads(pool)};
    return mt_tensor_fill(planes, t, &f, err);
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
