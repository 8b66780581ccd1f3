/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The functions of a struct mt_cpu_products for one instruction set. The file that includes this defines before
 *     WIDTH       floats of a vector
 *     ROWS, VECS  a register tile: ROWS rows by VECS vectors
 *     NAME(x)     a name of its own for this set
 */
typedef float NAME(vec) __attribute__((vector_size(WIDTH * sizeof(float)), aligned(4), may_alias));

/* Rows [i, i + rows) and VECS vectors from column j: their sums over [from, to) of k, added to `sum`. */
MT_HOT_PART void NAME(add_sums)(NAME(vec) (*sum)[VECS], const float *a, size_t rs, size_t cs, const float *b,
                               size_t ldb, size_t n, size_t rows)
{
    for (; n; n--, a += cs, b += ldb) {
        NAME(vec) row[VECS];
#pragma GCC unroll 4
        for (size_t v = 0; v < VECS; v++)
            row[v] = *(const NAME(vec) *)(b + v * WIDTH);
#pragma GCC unroll 8
        for (size_t r = 0; r < rows; r++)
#pragma GCC unroll 4
            for (size_t v = 0; v < VECS; v++)
                sum[r][v] += a[r * rs] * row[v];
    }
}

MT_HOT_PART void NAME(tile)(const struct product *x, size_t i, size_t j, size_t rows)
{
    NAME(vec) sum[ROWS][VECS];
#pragma GCC unroll 8
    for (size_t r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (size_t v = 0; v < VECS; v++)
            sum[r][v] = (NAME(vec)){0};
    size_t from = x->upper ? i : 0, to = x->lower ? MT_MIN(x->k, i + rows) : x->k;
    NAME(add_sums)(sum, x->a + i * x->rs + from * x->cs, x->rs, x->cs, x->b + from * x->ldb + j, x->ldb, to - from,
                   rows);
#pragma GCC unroll 8
    for (size_t r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (size_t v = 0; v < VECS; v++) {
            NAME(vec) *d = (NAME(vec) *)(x->d + (i + r) * x->ldd + j + v * WIDTH);
            *d = x->adds ? *d + x->sign * sum[r][v] : x->sign * sum[r][v];
        }
}

static void NAME(multiply)(const struct product *x)
{
    size_t i = 0;
    for (; i + ROWS <= x->m; i += ROWS)
        for (size_t j = 0; j < (x->half ? MT_MIN(x->n, i + ROWS) : x->n); j += VECS * WIDTH)
            NAME(tile)(x, i, j, ROWS);
    for (; i < x->m; i++)
        for (size_t j = 0; j < (x->half ? MT_MIN(x->n, i + 1) : x->n); j += VECS * WIDTH)
            NAME(tile)(x, i, j, 1);
}

/* Rows [i, i + rows), of which those before are solved. */
MT_HOT_PART void NAME(solve_rows)(const struct substitution *s, size_t i, size_t j, size_t rows)
{
    NAME(vec) sum[ROWS][VECS], done[ROWS][VECS];
    const float *a = s->a + i * s->lda;
#pragma GCC unroll 8
    for (size_t r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (size_t v = 0; v < VECS; v++)
            sum[r][v] = (NAME(vec)){0};
    NAME(add_sums)(sum, a, s->lda, 1, s->x + j, s->ldx, i, rows);
#pragma GCC unroll 8
    for (size_t r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (size_t v = 0; v < VECS; v++) {
            NAME(vec) *x = (NAME(vec) *)(s->x + (i + r) * s->ldx + j + v * WIDTH);
#pragma GCC unroll 8
            for (size_t k = 0; k < r; k++)
                sum[r][v] += a[r * s->lda + i + k] * done[k][v];
            done[r][v] = *x - sum[r][v];
            *x = done[r][v];
        }
}

static void NAME(substitute)(const struct substitution *s)
{
    size_t i = 0;
    for (; i + ROWS <= s->rows; i += ROWS)
        for (size_t j = 0; j < s->n; j += VECS * WIDTH)
            NAME(solve_rows)(s, i, j, ROWS);
    for (; i < s->rows; i++)
        for (size_t j = 0; j < s->n; j += VECS * WIDTH)
            NAME(solve_rows)(s, i, j, 1);
}

static const struct mt_cpu_products NAME(products) = {NAME(multiply), NAME(substitute)};

#undef WIDTH
#undef ROWS
#undef VECS
#undef NAME
