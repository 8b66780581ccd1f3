/* SPDX-License-Identifier: Apache-2.0 */
#include "store/guard.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "base/block_sum.h"
#include "base/lock.h"
#include "base/mem.h"
#include "base/pool.h"
#include "base/sum64.h"
#include "base/thread.h"

enum { MAX_FOUND = 64 };

/* A frozen plane in host memory. */
struct area {
    size_t unit;
    enum mt_plane_kind kind;
    const char *data;
    size_t bytes, first_block;
};

/* What is known of a range of a unit's trained planes; n 0: none. */
struct range {
    size_t first, n;
    uint64_t sum;
};

/* A table by first element: updates cut a unit always alike. */
struct unit {
    pthread_mutex_t lock;
    struct range *range; /* [size], a power of two */
    size_t size, elems;
    size_t covered; /* elements of all ranges */
};

struct mt_guard {
    mt_plane_set *planes;
    struct area *areas;
    size_t n_areas, n_blocks;
    uint64_t *sum; /* [n_blocks] */
    struct unit *units; /* [n_units]; NULL: what is trained is not summed */
    size_t n_units;
    int n_threads;
    struct range *ranges; /* of all units */

    pthread_mutex_t lock;
    pthread_cond_t changed;
    pthread_t thread;
    bool started, quit, busy;
    size_t pass;
    struct mt_guard_block found[MAX_FOUND];
    size_t n_found;
};

/* What is apart has no elements at the places of the weights; what devices write changes between updates. */
static bool is_trained(const struct mt_plane_desc *d)
{
    return d->block && d->range == MT_RANGE_TRAINED && d->role != MT_ROLE_GRADIENT && !d->apart && !d->on_device;
}

static bool is_frozen(const struct mt_plane_desc *d)
{
    return d->block && d->range != MT_RANGE_TRAINED && d->role == MT_ROLE_WEIGHT;
}

/* --- frozen planes ------------------------------------------------------------------------------------ */

/* The area of a block, which is number *block of it. */
static const struct area *area_of(const mt_guard *g, size_t *block)
{
    size_t low = 0, high = g->n_areas;
    while (high - low > 1) {
        size_t middle = low + (high - low) / 2;
        if (g->areas[middle].first_block <= *block)
            low = middle;
        else
            high = middle;
    }
    *block -= g->areas[low].first_block;
    return &g->areas[low];
}

static uint64_t sum_block(const struct area *a, size_t block)
{
    size_t at = block * MT_SUM_BLOCK;
    return mt_block_sum(a->data + at, MT_MIN((size_t)MT_SUM_BLOCK, a->bytes - at));
}

static void first_sum(void *guard, size_t i, int)
{
    mt_guard *g = guard;
    size_t block = i;
    const struct area *a = area_of(g, &block);
    g->sum[i] = sum_block(a, block);
}

static void check_block(void *guard, size_t i, int)
{
    mt_guard *g = guard;
    size_t block = i;
    const struct area *a = area_of(g, &block);
    if (sum_block(a, block) == g->sum[i])
        return;
    MT_LOCKED(&g->lock);
    if (g->n_found < MAX_FOUND) /* more are found again */
        g->found[g->n_found++] = (struct mt_guard_block){
            .unit = a->unit, .kind = a->kind, .first = block * MT_SUM_BLOCK,
            .bytes = MT_MIN((size_t)MT_SUM_BLOCK, a->bytes - block * MT_SUM_BLOCK), .at = i};
}

static void *guard_main(void *guard)
{
    mt_guard *g = guard;
    mt_thread_gives_way();
    pthread_mutex_lock(&g->lock);
    while (!g->quit) {
        if (!g->busy) {
            pthread_cond_wait(&g->changed, &g->lock);
            continue;
        }
        size_t pass = g->pass++;
        pthread_mutex_unlock(&g->lock);
        for (size_t i = pass % MT_GUARD_PASSES; i < g->n_blocks; i += MT_GUARD_PASSES)
            check_block(g, i, 0);
        pthread_mutex_lock(&g->lock);
        g->busy = false;
        pthread_cond_broadcast(&g->changed);
    }
    pthread_mutex_unlock(&g->lock);
    return NULL;
}

void mt_guard_pass(mt_guard *g)
{
    if (!g->n_blocks)
        return;
    mt_raise(&g->lock, &g->changed, &g->busy);
}

/* Of all blocks. */
static int run_blocks(mt_guard *g, void (*fn)(void *guard, size_t i, int thread), struct mt_err *err)
{
    MT_CLOSED_BY(mt_pool_destroy) mt_pool *pool = NULL;
    const struct mt_pool_params p = {"guard", MT_MAX(g->n_threads, 1), NULL, NULL};
    int rc = g->n_blocks ? mt_pool_create(&pool, &p, err) : 0;
    if (!rc && g->n_blocks)
        mt_pool_run(pool, fn, g, g->n_blocks);
    return rc;
}

int mt_guard_check_frozen(mt_guard *g, struct mt_err *err)
{
    pthread_mutex_lock(&g->lock);
    while (g->busy)
        pthread_cond_wait(&g->changed, &g->lock);
    pthread_mutex_unlock(&g->lock);
    return run_blocks(g, check_block, err);
}

bool mt_guard_take(mt_guard *g, struct mt_guard_block *b)
{
    MT_LOCKED(&g->lock);
    bool any = g->n_found;
    if (any)
        *b = g->found[--g->n_found];
    return any;
}

bool mt_guard_is_mended(mt_guard *g, const struct mt_guard_block *b)
{
    size_t block = b->at;
    const struct area *a = area_of(g, &block);
    return sum_block(a, block) == g->sum[b->at];
}

/* --- trained planes ----------------------------------------------------------------------------------- */

/* Of all trained planes in host memory; those on drives have sums there. */
static uint64_t sum_range(const mt_guard *g, size_t unit, size_t first, size_t n)
{
    uint64_t sum = 0;
    for (int k = 0; k < MT_N_PLANES; k++) {
        const struct mt_plane_desc *d = mt_plane_desc_of(g->planes, (enum mt_plane_kind)k);
        const char *data = is_trained(d) ? mt_plane(g->planes, unit, (enum mt_plane_kind)k) : NULL;
        size_t from = mt_plane_desc_bytes(d, first), to = mt_plane_desc_bytes(d, first + n);
        if (data)
            sum = mt_sum64(data + from, to - from, sum);
    }
    return sum;
}

/* Call under the unit's lock. The range's entry, or an empty one; NULL: the table is full. */
static struct range *find(struct unit *u, size_t first)
{
    for (size_t i = 0; i < u->size; i++) {
        struct range *r = &u->range[((first / MT_PLANE_CHUNK + first % MT_PLANE_CHUNK * 31) + i) & (u->size - 1)];
        if (!r->n || r->first == first)
            return r;
    }
    return NULL;
}

bool mt_guard_before(mt_guard *g, size_t unit, size_t first, size_t n)
{
    struct unit *u = g && g->units ? &g->units[unit] : NULL;
    if (!u)
        return true;
    pthread_mutex_lock(&u->lock);
    const struct range *r = find(u, first);
    struct range known = r ? *r : (struct range){.n = 0};
    pthread_mutex_unlock(&u->lock);
    return known.n != n || sum_range(g, unit, first, n) == known.sum;
}

void mt_guard_after(mt_guard *g, size_t unit, size_t first, size_t n)
{
    struct unit *u = g && g->units ? &g->units[unit] : NULL;
    uint64_t sum = u ? sum_range(g, unit, first, n) : 0;
    if (!u)
        return;
    MT_LOCKED(&u->lock);
    struct range *r = find(u, first);
    if (!r || (r->n != n && (r->n || u->covered + n > u->elems))) { /* the unit is cut in another way than before */
        memset(u->range, 0, u->size * sizeof(*u->range));
        u->covered = 0;
        r = find(u, first);
    }
    u->covered += r->n ? 0 : n;
    *r = (struct range){first, n, sum};
}

int mt_guard_check_trained(mt_guard *g, struct mt_err *err)
{
    for (size_t i = 0; g && g->units && i < g->n_units; i++)
        for (size_t k = 0; k < g->units[i].size; k++) {
            const struct range *r = &g->units[i].range[k];
            if (r->n && sum_range(g, i, r->first, r->n) != r->sum)
                return mt_fail(err, MT_ERR_RUNTIME, -EBADMSG,
                               "parameters %zu to %zu of unit %zu in host memory are not what their last update left: a bit "
                               "of the memory has changed (is it ECC memory? see megatrain doctor); nothing of it is saved: "
                               "go on from the last checkpoint with --resume", r->first, r->first + r->n, i);
        }
    return 0;
}

/* --- the guard ---------------------------------------------------------------------------------------- */

static size_t table_size(size_t elems)
{
    size_t least = 2 * (elems / MT_PLANE_CHUNK + 8), size = 16;
    while (size < least)
        size *= 2;
    return elems ? size : 0;
}

size_t mt_guard_bytes(const struct mt_plane_set_params *p, bool trained)
{
    size_t bytes = 0;
    for (size_t u = 0; u < p->n_units; u++) {
        for (int k = 0; k < MT_N_PLANES; k++)
            if (is_frozen(&p->desc[k]) && p->elems[u].n[k])
                bytes += mt_sum_blocks(mt_plane_desc_bytes(&p->desc[k], p->elems[u].n[k])) * sizeof(uint64_t);
        bytes += trained ? table_size(p->elems[u].n[MT_PLANE_HI]) * sizeof(struct range) : 0;
    }
    return bytes;
}

static void add_area(mt_guard *g, size_t unit, enum mt_plane_kind k)
{
    const struct mt_plane_desc *d = mt_plane_desc_of(g->planes, k);
    const char *data = is_frozen(d) ? mt_plane(g->planes, unit, k) : NULL;
    size_t bytes = data ? mt_plane_desc_bytes(d, mt_plane_elems(g->planes, unit, k)) : 0;
    if (!bytes)
        return;
    g->areas[g->n_areas++] = (struct area){unit, k, data, bytes, g->n_blocks};
    g->n_blocks += mt_sum_blocks(bytes);
}

static int sum_frozen(mt_guard *g, struct mt_err *err)
{
    g->areas = mt_calloc(g->n_units * MT_N_PLANES, sizeof(*g->areas));
    for (size_t u = 0; u < g->n_units && g->areas; u++)
        for (int k = 0; k < MT_N_PLANES; k++)
            add_area(g, u, (enum mt_plane_kind)k);
    g->sum = g->areas ? mt_calloc(MT_MAX(g->n_blocks, (size_t)1), sizeof(*g->sum)) : NULL;
    if (!g->sum)
        return mt_fail_nomem(err, "sums of frozen weights", g->n_blocks * sizeof(*g->sum));
    return run_blocks(g, first_sum, err);
}

static int make_tables(mt_guard *g, struct mt_err *err)
{
    size_t n = 0;
    for (size_t u = 0; u < g->n_units; u++)
        n += table_size(mt_plane_elems(g->planes, u, MT_PLANE_HI));
    g->units = mt_calloc(g->n_units, sizeof(*g->units));
    g->ranges = mt_calloc(MT_MAX(n, (size_t)1), sizeof(*g->ranges));
    if (!g->units || !g->ranges) {
        free(g->units);
        g->units = NULL;
        return mt_fail_nomem(err, "sums of trained planes", n * sizeof(*g->ranges));
    }
    struct range *at = g->ranges;
    for (size_t u = 0; u < g->n_units; u++) {
        size_t elems = mt_plane_elems(g->planes, u, MT_PLANE_HI);
        g->units[u] = (struct unit){.range = at, .size = table_size(elems), .elems = elems};
        pthread_mutex_init(&g->units[u].lock, NULL);
        at += g->units[u].size;
    }
    return 0;
}

int mt_guard_create(mt_guard **out, const struct mt_guard_params *p, struct mt_err *err)
{
    mt_guard *g = mt_calloc(1, sizeof(*g));
    if (!g)
        return mt_fail_nomem(err, "the guard of host memory", sizeof(*g));
    g->planes = p->planes;
    g->n_units = p->n_units;
    g->n_threads = p->n_threads;
    pthread_mutex_init(&g->lock, NULL);
    pthread_cond_init(&g->changed, NULL);
    int rc = sum_frozen(g, err);
    if (!rc && p->trained)
        rc = make_tables(g, err);
    if (!rc && g->n_blocks) {
        rc = mt_thread_start(&g->thread, "mt-guard", guard_main, g, err);
        g->started = !rc;
    }
    if (rc)
        mt_guard_destroy(&g);
    else
        *out = g;
    return rc;
}

void mt_guard_destroy(mt_guard **guard)
{
    mt_guard *g = *guard;
    *guard = NULL;
    if (!g)
        return;
    if (g->started) {
        mt_raise(&g->lock, &g->changed, &g->quit);
        pthread_join(g->thread, NULL);
    }
    for (size_t u = 0; g->units && u < g->n_units; u++)
        pthread_mutex_destroy(&g->units[u].lock);
    pthread_cond_destroy(&g->changed);
    pthread_mutex_destroy(&g->lock);
    free(g->areas);
    free(g->sum);
    free(g->units);
    free(g->ranges);
    free(g);
}
