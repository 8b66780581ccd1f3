/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Eigenvectors by Jacobi's rotations: a launch a round, from one copy of the matrix to another, in which a thread turns the
 * four elements of two pairs' rows and columns, and two of the eigenvectors. Bytes moved a round: 16 n^2, mostly from the
 * second level's cache; sides of hundreds are bound by launches.
 */
#include "launch.cuh"

static constexpr unsigned THREADS = 256;

static __global__ void __launch_bounds__(THREADS) begin(float *u, size_t n)
{
    size_t i = static_cast<size_t>(blockIdx.x) * THREADS + threadIdx.x;
    if (i < n * n)
        u[i] = i / n == i % n ? 1.0f : 0.0f;
}

struct turn {
    struct mt_eigen_pair at;
    bool two;
    float c, s;
};

static __device__ turn turn_of(const float *a, size_t n, size_t round, size_t k)
{
    turn t = {mt_eigen_pair(n, round, k), false, 1.0f, 0.0f};
    t.two = t.at.j < n;
    if (!t.two)
        return t;
    const float *row = a + t.at.i * n;
    float tangent = mt_eigen_tangent(row[t.at.i], a[t.at.j * n + t.at.j], row[t.at.j]);
    t.c = 1.0f / sqrtf(1.0f + tangent * tangent);
    t.s = tangent * t.c;
    return t;
}

static __device__ void apply(const turn &t, float *x, float *y)
{
    float old = *x;
    *x = t.c * old - t.s * *y;
    *y = t.s * old + t.c * *y;
}

static __global__ void __launch_bounds__(THREADS) play_round(const float *a, float *to, float *u, size_t n,
                                                             size_t round)
{
    size_t pairs = (n + 1) / 2, id = static_cast<size_t>(blockIdx.x) * THREADS + threadIdx.x;
    if (id >= pairs * pairs)
        return;
    turn r = turn_of(a, n, round, id / pairs), c = turn_of(a, n, round, id % pairs);
    const size_t rows[2] = {r.at.i, r.at.j}, cols[2] = {c.at.i, c.at.j};
    float x[2][2] = {};
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
        for (int j = 0; j < 2; j++)
            if ((!i || r.two) && (!j || c.two))
                x[i][j] = a[rows[i] * n + cols[j]];
    apply(r, &x[0][0], &x[1][0]);
    apply(r, &x[0][1], &x[1][1]);
    apply(c, &x[0][0], &x[0][1]);
    apply(c, &x[1][0], &x[1][1]);
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
        for (int j = 0; j < 2; j++)
            if ((!i || r.two) && (!j || c.two))
                to[rows[i] * n + cols[j]] = x[i][j];
#pragma unroll
    for (int j = 0; j < 2; j++)
        if (r.two && (!j || c.two))
            apply(r, &u[rows[0] * n + cols[j]], &u[rows[1] * n + cols[j]]);
}

/* A block an eigenvector. */
static __global__ void __launch_bounds__(THREADS) write_sorted(const float *a, const float *u, float *w, size_t n,
                                                               float least)
{
    size_t i = blockIdx.x, place = 0;
    float own = a[i * n + i], largest = 0.0f;
    for (size_t k = 0; k < n; k++) {
        largest = fmaxf(largest, a[k * n + k]);
        place += mt_eigen_before(a[k * n + k], k, own, i);
    }
    float root = own > largest * least ? sqrtf(own) : 1.0f;
    for (size_t k = threadIdx.x; k < n; k += THREADS)
        w[place * n + k] = u[i * n + k] / root;
}

cudaError_t mt_cuda_eigen(const struct mt_eigen *a, cudaStream_t stream)
{
    size_t n = a->n, pairs = ceil_div(n, 2), rounds = static_cast<size_t>(a->sweeps) * (2 * pairs - 1);
    float *u = a->workspace, *from = a->a, *to = u + n * n;
    cudaError_t rc = MT_LAUNCH(begin, grid_of(ceil_div(n * n, THREADS)), THREADS, 0, stream, u, n);
    for (size_t r = 0; r < rounds && rc == cudaSuccess; r++) {
        rc = MT_LAUNCH(play_round, grid_of(ceil_div(pairs * pairs, THREADS)), THREADS, 0, stream, from, to, u, n,
                       r % (2 * pairs - 1));
        float *old = from;
        from = to;
        to = old;
    }
    return MT_LAUNCH_NEXT(rc, write_sorted, grid_of(n), THREADS, 0, stream, from, u, a->w, n, a->least);
}
