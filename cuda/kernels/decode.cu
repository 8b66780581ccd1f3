/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Packed formats: value = code * scale in f32, rounded once. A thread decodes 16 bytes of the output at a time, from 8
 * or 4 neighbouring codes of one block; values of 4-bit codes are looked up in shared memory, where the 16 are in
 * different banks. Bytes moved per element: s of the output, 1/2 (FP8: 1) of codes, and one scale per 16 to 128
 * (FP8: 16384, a row, or all) elements.
 */
#include "packed.cuh"

enum { THREADS = 256, UNROLL = 4 };

/* The codes of one access. */
template <int BYTES> struct code_word;
template <> struct code_word<2> {
    typedef uint16_t type;
};
template <> struct code_word<4> {
    typedef uint32_t type;
};
template <> struct code_word<8> {
    typedef uint64_t type;
};

template <typename T, int FORMAT, bool NESTED>
static __global__ void __launch_bounds__(THREADS)
    decode_nibbles(struct mt_decode a, size_t n, struct code_values values)
{
    constexpr int N = VEC<T>;
    typedef typename code_word<N / 2>::type word;
    __shared__ float value[16];
    share_values(value, values);
    size_t at = static_cast<size_t>(blockIdx.x) * THREADS * UNROLL + threadIdx.x;
    T *out = static_cast<T *>(a.out);
    word codes[UNROLL];
    float scale[UNROLL], shift[UNROLL];
    MT_UNROLL(UNROLL)
    for (int u = 0; u < UNROLL; u++) {
        size_t i = (at + u * THREADS) * N;
        if (i + N <= n) {
            codes[u] = load_word<word>(a.codes + i / 2);
            scale[u] = scale_of<FORMAT, NESTED>(a, i);
            shift[u] = shift_of<FORMAT>(a, i);
        }
    }
    MT_UNROLL(UNROLL)
    for (int u = 0; u < UNROLL; u++) {
        size_t i = (at + u * THREADS) * N;
        if (i + N <= n) {
            float x[N];
            for (int k = 0; k < N; k++)
                x[k] = code_value<FORMAT>(value, nibble<FORMAT>(codes[u], k), shift[u]) * scale[u];
            store16(out + i, vec_of<T>(x));
        } else if constexpr (FORMAT == MT_PACKED_NF4) { /* other formats have whole blocks */
            MT_UNROLL(1)
            for (; i < n; i++)
                store(out + i, value[nibble<FORMAT>(a.codes[i / 2], static_cast<int>(i % 2))] *
                                   scale_of<FORMAT, NESTED>(a, i));
        }
    }
}

/* N divides a row, or is 1, so that N codes are of one block. */
template <typename T, int N>
static __global__ void __launch_bounds__(256) decode_fp8(struct mt_decode a, size_t vecs, unsigned columns)
{
    size_t row, at;
    row_of_tile(columns, UNROLL, &row, &at);
    if (row >= a.rows)
        return;
    const uint8_t *codes = a.codes + row * a.cols;
    T *out = static_cast<T *>(a.out) + row * a.cols;
    uint64_t word[UNROLL];
    each_vector<UNROLL>(at, vecs, [&](int u, size_t i) {
        if constexpr (N == 1)
            word[u] = codes[i];
        else
            word[u] = load_word<typename code_word<N>::type>(codes + i * N);
    });
    each_vector<UNROLL>(at, vecs, [&](int u, size_t i) {
        float scale = scale_at<MT_PACKED_FP8, false>(a, row, i * N), x[N];
        for (int k = 0; k < N; k++)
            x[k] = e4m3(static_cast<uint32_t>(word[u] >> (8 * k)) & 0xffu) * scale;
        store_n<T, N>(out + i * N, x);
    });
}

cudaError_t mt_cuda_decode(const struct mt_decode *a, cudaStream_t stream)
{
    return for_dtype(a->dtype, [=](auto t) {
        using T = decltype(t);
        return for_format(*a, [=](auto format, auto nested) {
            constexpr int FORMAT = format.value;
            if constexpr (FORMAT == MT_PACKED_FP8) {
                return for_widths<T>(a->cols % VEC<T> == 0, [=](auto v) {
                    row_tiles tiles = tile_rows(a->rows, a->cols / v.n, UNROLL);
                    return MT_LAUNCH((decode_fp8<T, v.n>), grid_of(tiles.blocks), dim3(tiles.x, tiles.y), 0, stream,
                                     *a, a->cols / v.n, tiles.columns);
                });
            } else {
                size_t n = a->rows * a->cols, per_block = static_cast<size_t>(VEC<T>) * THREADS * UNROLL;
                return MT_LAUNCH((decode_nibbles<T, FORMAT, nested.value>), grid_of(ceil_div(n, per_block)), THREADS,
                                 0, stream, *a, n, values_of(FORMAT));
            }
        });
    });
}
