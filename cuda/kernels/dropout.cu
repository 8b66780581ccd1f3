/* SPDX-License-Identifier: Apache-2.0 */
/*
 * out = add + mask x / (1 - p), the mask from Philox4x32-10 (Salmon et al. 2011) by row and column. A thread takes a
 * vector of a row: one or two calls of the generator, of ten rounds each. Bytes moved an element of s bytes: 2 s, with
 * `add` 3 s.
 */
#include "launch.cuh"
#include "philox.cuh"
#include "scalar.cuh"

/* Words of the key and counter that do not change from element to element, and below what a word drops. */
struct keys {
    uint32_t k0, k1, c2, c3;
    uint64_t drop;
    float scale;
};

/* x[k] = mask x / (1 - p) for columns [column, column + N) of the row; N is 1 or a multiple of 4, as `column` then. */
template <int N> MT_DEVICE void drop(const keys &s, uint32_t row, size_t column, float (&x)[N])
{
    constexpr int STEP = N < 4 ? N : 4;
    for (int i = 0; i < N; i += STEP) {
        uint4 r = philox(s.k0, s.k1, make_uint4(static_cast<uint32_t>((column + i) / 4), row, s.c2, s.c3));
        for (int k = 0; k < STEP; k++) {
            uint32_t word = word_of(r, static_cast<unsigned>(N == 1 ? column % 4 : k));
            x[i + k] = word >= s.drop ? x[i + k] * s.scale : 0.0f;
        }
    }
}

/* O is T, or float. */
template <typename T, typename O, int N>
static __global__ void __launch_bounds__(256) dropout(struct mt_dropout a, keys s, unsigned columns)
{
    size_t row, at;
    row_of_tile(columns, 1, &row, &at);
    at *= N;
    if (row >= a.n || at >= a.c)
        return;
    size_t i = row * a.c + at, place = a.first_row + (a.rows ? static_cast<size_t>(a.rows[row]) : row);
    float x[N], sum[N];
    load_n<T, N>(static_cast<const T *>(a.x) + i, x);
    drop<N>(s, static_cast<uint32_t>(place), at, x);
    if (a.add) {
        load_either<O, N>(a.add, i, sum);
        for (int k = 0; k < N; k++)
            x[k] += sum[k];
    }
    store_either<O, N>(a.out, i, x);
}

cudaError_t mt_cuda_dropout(const struct mt_dropout *a, cudaStream_t stream)
{
    keys s = {static_cast<uint32_t>(a->seed), static_cast<uint32_t>(a->seed >> 32), static_cast<uint32_t>(a->stream),
              static_cast<uint32_t>(a->stream >> 32), static_cast<uint64_t>(static_cast<double>(a->p) * 4294967296.0),
              1.0f / (1.0f - a->p)};
    return for_dtypes(a->dtype, a->out_dtype, [=](auto x, auto out) {
        return for_widths<decltype(x)>(a->c % VEC<decltype(x)> == 0, [=](auto v) {
            row_tiles t = tile_rows(a->n, a->c / v.n, 1);
            return MT_LAUNCH((dropout<decltype(x), decltype(out), v.n>), grid_of(t.blocks), dim3(t.x, t.y), 0, stream,
                             *a, s, t.columns);
        });
    });
}
