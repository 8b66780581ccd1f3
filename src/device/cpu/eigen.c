/* SPDX-License-Identifier: Apache-2.0 */
/* Eigenvectors by Jacobi's rotations: of each round first the rows, then the columns. */
#include <math.h>

#include "device/cpu/cpu.h"

enum { ALONE = 128, ROWS = 16 }; /* smaller matrices are one thread's; rows or pairs of a chunk */

struct job {
    const struct mt_eigen *a;
    float *u, *turns; /* [n, n], [pairs, 2]: cosine and sine */
    size_t pairs, round;
    bool turned;
};

MT_HOT static void turn(float *restrict x, float *restrict y, float c, float s, size_t n)
{
    for (size_t k = 0; k < n; k++) {
        float old = x[k];
        x[k] = c * old - s * y[k];
        y[k] = s * old + c * y[k];
    }
}

static void find_turns(struct job *j)
{
    size_t n = j->a->n;
    j->turned = false;
    for (size_t k = 0; k < j->pairs; k++) {
        struct mt_eigen_pair p = mt_eigen_pair(n, j->round, k);
        const float *row = j->a->a + p.i * n;
        float t = p.j < n ? mt_eigen_tangent(row[p.i], j->a->a[p.j * n + p.j], row[p.j]) : 0;
        float c = 1 / sqrtf(1 + t * t);
        j->turned |= t != 0;
        j->turns[2 * k] = c;
        j->turns[2 * k + 1] = t * c;
    }
}

static void turn_rows(void *ctx, size_t chunk, int)
{
    const struct job *j = ctx;
    size_t n = j->a->n, end = MT_MIN(j->pairs, (chunk + 1) * ROWS);
    for (size_t k = chunk * ROWS; k < end; k++) {
        struct mt_eigen_pair p = mt_eigen_pair(n, j->round, k);
        if (p.j == n)
            continue;
        turn(j->a->a + p.i * n, j->a->a + p.j * n, j->turns[2 * k], j->turns[2 * k + 1], n);
        turn(j->u + p.i * n, j->u + p.j * n, j->turns[2 * k], j->turns[2 * k + 1], n);
    }
}

static void turn_columns(void *ctx, size_t chunk, int)
{
    const struct job *j = ctx;
    size_t n = j->a->n, end = MT_MIN(n, (chunk + 1) * ROWS);
    for (size_t k = 0; k < j->pairs; k++) {
        struct mt_eigen_pair p = mt_eigen_pair(n, j->round, k);
        float c = j->turns[2 * k], s = j->turns[2 * k + 1];
        for (size_t row = chunk * ROWS; p.j < n && row < end; row++) {
            float *x = j->a->a + row * n, old = x[p.i];
            x[p.i] = c * old - s * x[p.j];
            x[p.j] = s * old + c * x[p.j];
        }
    }
}

/* Returns whether any pair was turned. */
static bool sweep(mt_pool *pool, struct job *j)
{
    bool any = false;
    for (j->round = 0; j->round < 2 * j->pairs - 1; j->round++) {
        find_turns(j);
        any |= j->turned;
        if (!j->turned)
            continue;
        mt_pool_run(pool, turn_rows, j, mt_div_up(j->pairs, (size_t)ROWS));
        mt_pool_run(pool, turn_columns, j, mt_div_up(j->a->n, (size_t)ROWS));
    }
    return any;
}

static void write_sorted(const struct job *j)
{
    size_t n = j->a->n;
    float largest = 0;
    for (size_t i = 0; i < n; i++)
        largest = MT_MAX(largest, j->a->a[i * n + i]);
    for (size_t i = 0; i < n; i++) {
        float own = j->a->a[i * n + i], root = own > largest * j->a->least ? sqrtf(own) : 1;
        size_t place = 0;
        for (size_t k = 0; k < n; k++)
            place += mt_eigen_before(j->a->a[k * n + k], k, own, i);
        for (size_t k = 0; k < n; k++)
            j->a->w[place * n + k] = j->u[i * n + k] / root;
    }
}

void mt_cpu_run_eigen(struct mt_cpu_device *d, const struct mt_eigen *a)
{
    struct job j = {.a = a, .u = a->workspace, .turns = a->workspace + a->n * a->n,
                    .pairs = mt_div_up(a->n, (size_t)2)};
    mt_pool *pool = a->n < ALONE ? NULL : d->pool;
    memset(j.u, 0, a->n * a->n * sizeof(*j.u));
    for (size_t i = 0; i < a->n; i++)
        j.u[i * a->n + i] = 1;
    for (int s = 0; s < a->sweeps && sweep(pool, &j); s++)
        ;
    write_sorted(&j);
}
