/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <math.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/dtype.h"
#include "base/mem.h"
#include "base/noise.h"

/**
 * Operations by which an optimizer makes a direction of an FP32 gradient while all of it is on the device. The rules
 * are those of ops.h, but arrays are only element-aligned. Where a gradient is not finite, states stay as they are and
 * the direction is 0.
 */

/** Rows whose columns are summed at once: at most 64 such chunks. */
static inline size_t mt_adafactor_chunk(size_t rows)
{
    return MT_MAX((size_t)16, mt_div_up(rows, (size_t)64));
}
enum { MT_DIRECT_PIECE = 16384 }; /* elements whose squares are summed at once */

/**
 * Adafactor (Shazeer and Stern 2018, algorithm 4), without the learning rate: with s = g g + eps,
 *     row = beta2 row + (1 - beta2) mean of s over columns, col = beta2 col + (1 - beta2) mean of s over rows,
 *     u = g / sqrt(row / mean(row)) / sqrt(col), g := u / max(1, rms(u) / clip), scale = max(least, rms(w)).
 * A vector has one column and no `col`: row is the mean of its s, and u = g / sqrt(row). If the sum of row is not
 * finite, row and col stay as they are, and so does an element of col whose sum is not; g := 0 then or if rms(u) is not
 * finite.
 */
struct mt_adafactor {
    size_t rows, cols;
    enum mt_dtype dtype; /* of w */
    float beta2, eps, clip, least;
    float *g;      /* [rows, cols] gradient, then direction */
    const void *w; /* [rows, cols] */
    float *row, *col; /* [rows], [cols]; col NULL: a vector */
    float *scale;     /* [1], written */
    void *workspace;  /* mt_adafactor_workspace() bytes, 16-byte aligned */
};

/** Its parts, from the workspace on. */
struct mt_adafactor_space {
    float *row;     /* [rows] means */
    float *col;     /* [chunks, cols] sums */
    float *w, *u;   /* [pieces], [chunks or pieces] sums of squares */
    float *scalar;  /* [4]: whether g and rms(u) are finite, mean(row), the factor of u; behind all others */
    size_t chunks, pieces;
};
static inline struct mt_adafactor_space mt_adafactor_space(const struct mt_adafactor *a)
{
    struct mt_adafactor_space s;
    s.chunks = mt_div_up(a->rows, mt_adafactor_chunk(a->rows));
    s.pieces = mt_div_up(a->rows * a->cols, (size_t)MT_DIRECT_PIECE);
    s.row = (float *)a->workspace;
    s.col = s.row + a->rows;
    s.w = s.col + (a->col ? s.chunks * a->cols : 0);
    s.u = s.w + s.pieces;
    s.scalar = s.u + MT_MAX(s.pieces, s.chunks);
    return s;
}
static inline size_t mt_adafactor_workspace(size_t rows, size_t cols)
{
    size_t chunks = mt_div_up(rows, mt_adafactor_chunk(rows));
    size_t pieces = mt_div_up(rows * cols, (size_t)MT_DIRECT_PIECE);
    return (rows + chunks * cols + pieces + MT_MAX(pieces, chunks) + 4) * sizeof(float);
}

/**
 * Muon's momentum with Nesterov's step (torch.optim.Muon): m += (1 - mu)(g - m), u = g + mu (m - g), and the matrix that
 * its Newton-Schulz iteration begins with, x = u / max(|u|, 1e-7), |u| over all elements. Rounded once, when stored; u
 * is of the unrounded m.
 */
struct mt_muon {
    size_t n;
    enum mt_dtype dtype, m_dtype; /* of x and m: f32 or bf16 */
    float mu;
    const float *g;   /* [n] */
    void *m, *x;      /* [n] */
    float *workspace; /* [mt_div_up(n, MT_DIRECT_PIECE) + 1] */
};

/** y = scale x, in f32. */
struct mt_widen {
    size_t n;
    enum mt_dtype dtype; /* of x */
    float scale;
    const void *x;
    float *y;
};

/**
 * A random matrix: x[i] = scale or -scale, by bit i % 32 of word i / 32 % 4 of Philox block i / 128. Projections by
 * signs keep lengths as those by normal numbers do (Achlioptas 2003), and every device makes the same ones.
 */
struct mt_signs {
    size_t n;
    float scale;
    uint64_t seed, stream;
    float *x; /* [n] */
};

/**
 * APOLLO (Zhu et al. 2024, algorithm 1) as apollo-torch has it, from the gradient's projection `low`: of each channel,
 * which is a row of a tall matrix or a column of a wide one, or of all together,
 *     m = beta1 m + (1 - beta1) low, v = beta2 v + (1 - beta2) low low, u = m / (sqrt(v) + eps),
 *     s = |u| / (|low| + 1e-8), d = g s, n = |d|, f = max(n / (norm + 1e-8), growth) / growth, norm = n / f,
 * and g := scale d / f.
 * f is 1 if growth or the old norm is 0: a gradient that was 0 once sets no limit. A projection whose sum of squares
 * overflows is treated as one that is not finite.
 */
struct mt_apollo {
    size_t rows, cols, rank;
    bool by_tensor; /* s of all channels together */
    float beta1, beta2, eps, growth, scale;
    float *g;         /* [rows, cols] gradient, then direction */
    const float *low; /* [channels, rank], channels = max(rows, cols) */
    float *m, *v;     /* [channels, rank] */
    float *norm;      /* [1] */
    float *workspace; /* mt_apollo_workspace() numbers */
};

/** Its parts: two sums of each channel, of which the first becomes s; a sum of each row; scale / f, 0: not finite. */
static inline size_t mt_apollo_channels(const struct mt_apollo *a)
{
    return MT_MAX(a->rows, a->cols);
}
static inline size_t mt_apollo_workspace(size_t rows, size_t cols)
{
    return 2 * MT_MAX(rows, cols) + rows + 1;
}

/**
 * The eigenvectors of a small symmetric matrix without negative eigenvalues, by Jacobi's rotations (Golub and Van Loan,
 * section 8.5): row i of w is the eigenvector of the i-th largest eigenvalue, divided by its root, so that with
 * a = y y^T the rows of w y are orthonormal. An eigenvalue of at most `least` times the largest divides by 1. A sweep
 * turns each pair of rows and columns once, in rounds of disjoint pairs of a fixed order; pairs that are orthogonal to
 * 1e-7 are left, and after a sweep without a turn the rest may be left out.
 */
struct mt_eigen {
    size_t n;
    int sweeps;
    float least;      /* 0: all that are above 0 count */
    float *a;         /* [n, n], destroyed */
    float *w;         /* [n, n] */
    float *workspace; /* mt_eigen_workspace() numbers */
};
static inline size_t mt_eigen_workspace(size_t n)
{
    return 2 * n * n + 2;
}

#ifdef __CUDACC__
#define MT_EIGEN_PART static inline __host__ __device__
#else
#define MT_EIGEN_PART static inline
#endif
/** Pair k of a round, of (n + 1) / 2: all play each other as in a tournament. i < j; j = n: i has none. */
struct mt_eigen_pair {
    size_t i, j;
};
MT_EIGEN_PART struct mt_eigen_pair mt_eigen_pair(size_t n, size_t round, size_t k)
{
    size_t last = (n + 1) / 2 * 2 - 1, x = k ? (round + k) % last : last, y = (round + last - k) % last;
    struct mt_eigen_pair p = {x < y ? x : y, x < y ? y : x};
    return p;
}
/** Of the angle by which a pair of diagonal elements x and y with z beside them is turned; 0: not. */
MT_EIGEN_PART float mt_eigen_tangent(float x, float y, float z)
{
    float half = (y - x) / (2 * z), size = half < 0 ? -half : half, least = 1e-7f;
    if (z * z <= least * least * x * y || z == 0)
        return 0;
    float t = 1 / (size + sqrtf(1 + half * half));
    return half < 0 ? -t : t;
}
/** Whether eigenvalue x, number i, stands before y, number j. */
MT_EIGEN_PART bool mt_eigen_before(float x, size_t i, float y, size_t j)
{
    float of_x = x > 0 ? x : 0, of_y = y > 0 ? y : 0; /* of NaN 0 */
    return of_x > of_y || (of_x == of_y && i < j);
}

/**
 * The moments and steps of AdamW without bias correction, as galore-torch has them, of a projected gradient:
 *     m = beta1 m + (1 - beta1) low, v = beta2 v + (1 - beta2) low low, low := m / (sqrt(v) + eps).
 * If the sum of squares of low is not finite, m and v stay and low := 0.
 */
struct mt_low_adam {
    size_t n;
    float beta1, beta2, eps;
    float *low, *m, *v; /* [n] */
    float *workspace;   /* [mt_div_up(n, MT_DIRECT_PIECE) + 1] */
};

/** Rows of norm 1, to a factor of 2, replace those of `to`, with the sign that turns them to the side of the old row:
 * eigenvectors have none of their own. Others, not finite ones among them, replace none. */
struct mt_unit_rows {
    size_t rows, cols;
    const float *from; /* [rows, cols] */
    float *to;         /* [rows, cols] */
};

/**
 * Perturbed weights of a tensor: y = x + scale z, z by base/noise.h; a product and a sum in f32, then rounded to `dtype`.
 * x may be y.
 */
struct mt_perturb {
    size_t n;
    enum mt_dtype dtype;
    float scale; /* 0: y = x */
    uint32_t limit; /* of mt_noise_takes(): y = x where it is false */
    enum mt_noise_kind kind;
    uint64_t seed, stream, sample;
    const void *x; /* [n] */
    void *y;       /* [n] */
};

/** Their rows of the table. */
#define MT_DEVICE_OPS_DIRECT(X)                                                                    \
    X(ADAFACTOR, adafactor, struct mt_adafactor)                                                   \
    X(MUON, muon, struct mt_muon)                                                                  \
    X(WIDEN, widen, struct mt_widen)                                                               \
    X(SIGNS, signs, struct mt_signs)                                                               \
    X(APOLLO, apollo, struct mt_apollo)                                                            \
    X(EIGEN, eigen, struct mt_eigen)                                                               \
    X(LOW_ADAM, low_adam, struct mt_low_adam)                                                      \
    X(UNIT_ROWS, unit_rows, struct mt_unit_rows)                                                   \
    X(PERTURB, perturb, struct mt_perturb)
