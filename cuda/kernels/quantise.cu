/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The operands of products in FP8: largest magnitudes, and codes.
 *
 * amax: a block takes a piece of the matrix; maxima of the bits of magnitudes have no order. Bytes moved: those of the
 * matrix once. quantise: every block folds the maxima of the pieces again, then encodes tiles of 64 x 64, which are
 * turned in shared memory if the transpose is wanted. Bytes moved: those of the matrix, and one for each code.
 */
#include "packed.cuh"
#include "reduce.cuh"

static constexpr int THREADS = 256, TILE = 64, TURNS = 4, PITCH = TILE + 4;

template <typename T>
static __global__ void __launch_bounds__(THREADS) largest(const T *x, float *parts, size_t n, size_t piece)
{
    __shared__ uint32_t scratch[WARP];
    size_t first = blockIdx.x * piece, end = first + piece < n ? first + piece : n;
    size_t whole = first < end ? first + (end - first) / VEC<T> * VEC<T> : first;
    uint32_t most = 0;
    for (size_t i = first + threadIdx.x * VEC<T>; i < whole; i += THREADS * VEC<T>) {
        float v[VEC<T>];
        load_n<T, VEC<T>>(x + i, v);
        for (int k = 0; k < VEC<T>; k++)
            most = larger(most, magnitude(v[k]));
    }
    if (whole + threadIdx.x < end)
        most = larger(most, magnitude(load(x + whole + threadIdx.x)));
    most = block_max(most, 0u, scratch);
    if (threadIdx.x == 0)
        parts[blockIdx.x] = float_of_bits(most);
}

cudaError_t mt_cuda_amax(const struct mt_amax *a, cudaStream_t stream)
{
    return for_dtype(a->dtype, [=](auto t) {
        using T = decltype(t);
        return MT_LAUNCH(largest<T>, MT_AMAX_PARTS, THREADS, 0, stream, static_cast<const T *>(a->x), a->parts, a->n,
                         mt_amax_piece(a->n));
    });
}

/* mt_e4m3_factor(), of the bits of a magnitude. */
static __device__ __forceinline__ float factor_of(uint32_t amax)
{
    uint32_t exponent = amax >> 23, up = (amax & 0x7fffffu) > 0x600000u ? 1u : 0u;
    uint32_t to = 262u - exponent - up;
    bool one = amax == 0 || exponent >= 255;
    return one ? 1.0f : float_of_bits((to > 253u ? 253u : to) << 23);
}

static __device__ __forceinline__ uint32_t four_codes(const float *x, float factor)
{
    return e4m3_of(x[0] * factor) | e4m3_of(x[1] * factor) << 8 | e4m3_of(x[2] * factor) << 16 |
           e4m3_of(x[3] * factor) << 24;
}

/* Eight elements from 16-byte aligned memory. */
static __device__ __forceinline__ void load_eight(const bf16 *p, float (&x)[8])
{
    load_n<bf16, 8>(p, x);
}

static __device__ __forceinline__ void load_eight(const float *p, float (&x)[8])
{
    load_floats<8>(p, x);
}

/* A row of 16 codes of a turned tile. */
static __device__ __forceinline__ uint4 turned(const uint8_t *tile, int row, int col)
{
    uint32_t w[4];
    MT_UNROLL(4)
    for (int i = 0; i < 4; i++) {
        const uint8_t *p = tile + (row + 4 * i) * PITCH + col;
        w[i] = static_cast<uint32_t>(p[0]) | static_cast<uint32_t>(p[PITCH]) << 8 |
               static_cast<uint32_t>(p[2 * PITCH]) << 16 | static_cast<uint32_t>(p[3 * PITCH]) << 24;
    }
    return make_uint4(w[0], w[1], w[2], w[3]);
}

template <typename T, bool TURN>
static __global__ void __launch_bounds__(THREADS) quantise(struct mt_quantise a, unsigned columns)
{
    __shared__ uint32_t scratch[WARP], tile[TILE * PITCH / 4];
    size_t row = blockIdx.x / columns * static_cast<size_t>(TILE);
    size_t first = blockIdx.x % columns * static_cast<size_t>(TILE * TURNS), ld = ceil_div(a.rows, 16) * 16;
    uint32_t most = 0;
    for (int i = threadIdx.x; i < MT_AMAX_PARTS; i += THREADS)
        most = larger(most, magnitude(a.parts[i]));
    float factor = factor_of(block_max(most, 0u, scratch));
    if (blockIdx.x == 0 && threadIdx.x == 0)
        *a.scale = float_of_bits((254u << 23) - bits_of_float(factor));
    for (int turn = 0; turn < TURNS; turn++) {
        size_t col = first + turn * TILE;
        if (col >= a.cols)
            break;
        MT_UNROLL(2)
        for (int u = 0; u < TILE * TILE / 8 / THREADS; u++) {
            int item = static_cast<int>(threadIdx.x) + u * THREADS, r = item / (TILE / 8), c = item % (TILE / 8) * 8;
            uint2 codes = make_uint2(0, 0);
            if (row + r < a.rows && col + c < a.cols) {
                size_t at = (row + r) * a.cols + col + c;
                float x[8];
                load_eight(static_cast<const T *>(a.x) + at, x);
                codes = make_uint2(four_codes(x, factor), four_codes(x + 4, factor));
                if (a.codes)
                    store_word(a.codes + at, codes);
            }
            if (TURN) {
                tile[(r * PITCH + c) / 4] = codes.x;
                tile[(r * PITCH + c) / 4 + 1] = codes.y;
            }
        }
        if (TURN) {
            int c = threadIdx.x / (TILE / 16), r = threadIdx.x % (TILE / 16) * 16;
            __syncthreads();
            if (col + c < a.cols && row + r < ld)
                store16(a.codes_t + (col + c) * ld + row + r, turned(reinterpret_cast<const uint8_t *>(tile), r, c));
            __syncthreads();
        }
    }
}

cudaError_t mt_cuda_quantise(const struct mt_quantise *a, cudaStream_t stream)
{
    size_t columns = ceil_div(a->cols, TILE * TURNS);
    return for_flag(a->codes_t, [=](auto turn) {
        return for_dtype(a->dtype, [=](auto t) {
            return MT_LAUNCH((quantise<decltype(t), turn.value>), grid_of(ceil_div(a->rows, TILE) * columns), THREADS,
                             0, stream, *a, static_cast<unsigned>(columns));
        });
    });
}
