/* SPDX-License-Identifier: Apache-2.0 */
/*
 * W = Q(g (W + s B A)) in place. A warp takes columns of one or more blocks of the format, and some rows of them, so
 * that an element of A that was read serves them all; a block of FP8 takes eight warps. Sums are products in the
 * order of the rank, each rounded, so that the host gives the same bits (device/merge_job.h). NF4 whose blocks are
 * not whole in rows is read as one row, element by element. Operations an element: 2 r, and some 20 of Q; bytes: 2 s.
 */
#include "packed.cuh"
#include "reduce.cuh"

static constexpr int WARPS = MT_FP8_BLOCK / 16;

/* Elements of a warp: ROWS of CP times 32 columns. */
template <int FORMAT> struct tile {
    static constexpr int CP = FORMAT == MT_PACKED_FP8                                  ? MT_FP8_BLOCK / WARP
                              : FORMAT == MT_PACKED_MXFP4 || FORMAT == MT_PACKED_INT4 ? 1
                                                                                       : 2;
    static constexpr int ROWS = FORMAT == MT_PACKED_FP8 ? 16 : 8;
};

struct nf4_codes {
    float value[16];
};

struct element {
    size_t row, col;
    bool there;
};

/* Element j of row i of the warp's tile: lanes are side by side. */
template <int CP, int ROWS, bool FLAT>
static __device__ __forceinline__ element element_of(const struct mt_decode &d, size_t columns, int i, int j)
{
    size_t warp = static_cast<size_t>(blockIdx.x) * WARPS + threadIdx.x / WARP, lane = threadIdx.x % WARP + j * WARP;
    if constexpr (FLAT) {
        size_t at = (warp * ROWS + i) * (CP * WARP) + lane;
        return {at / d.cols, at % d.cols, at < d.rows * d.cols};
    }
    if constexpr (CP * ROWS == 64) /* FP8: the warps of a block lie below each other */
        warp = blockIdx.x % columns + (blockIdx.x / columns * WARPS + threadIdx.x / WARP) * columns;
    size_t row = warp / columns * ROWS + i, col = warp % columns * (CP * WARP) + lane;
    return {row, col, row < d.rows && col < d.cols};
}

/* mt_pack_scale(), of the largest magnitude. */
template <int FORMAT> static __device__ __forceinline__ float own_scale(float most)
{
    if constexpr (FORMAT == MT_PACKED_NF4)
        return most;
    if constexpr (FORMAT == MT_PACKED_MXFP4) {
        uint32_t bits = (bits_of_float(most / 6.0f) + 0x7fffffu) & 0x7f800000u;
        return bits ? float_of_bits(bits) : 0x1p-127f;
    }
    if constexpr (FORMAT == MT_PACKED_INT4)
        return most > 0 ? float_of_bits(bf16_pair(most / 7.5f, 0) << 16) : 0x1p-7f;
    return 1.0f / (most > 0 ? 1.0f / most * 448.0f : 1.0f);
}

static __device__ __forceinline__ float clamp(float x, float most)
{
    return x < -most ? -most : x > most ? most : x;
}

/* The value of mt_pack_codes()'s code, without its scale. */
template <int FORMAT>
static __device__ __forceinline__ float nearest(float x, float unit, float inverse, const struct nf4_codes &nf4)
{
    if constexpr (FORMAT == MT_PACKED_NF4) {
        float y = clamp(x * inverse, 1), v = nf4.value[0];
        MT_UNROLL(15)
        for (int k = 0; k < 15; k++)
            v = y > (nf4.value[k] + nf4.value[k + 1]) / 2 ? nf4.value[k + 1] : v;
        return v;
    } else if constexpr (FORMAT == MT_PACKED_MXFP4) {
        const float half_way[7] = {0.25f, 0.75f, 1.25f, 1.75f, 2.5f, 3.5f, 5}, value[7] = {0.5f, 1, 1.5f, 2, 3, 4, 6};
        float y = fabsf(x * inverse), v = 0;
        MT_UNROLL(7)
        for (int k = 0; k < 7; k++)
            v = y >= half_way[k] ? value[k] : v;
        return copysignf(v, x * inverse);
    } else if constexpr (FORMAT == MT_PACKED_INT4) {
        return static_cast<float>(static_cast<int>(clamp(rintf(clamp(x / unit, 16)) + 0.5f, 7.5f) - 0.5f));
    } else {
        return e4m3(e4m3_of(clamp(x * inverse, 448)));
    }
}

template <int FORMAT> static __device__ __forceinline__ float scale_of_element(const struct mt_decode &d, element e)
{
    if constexpr (FORMAT == MT_PACKED_FP8)
        return fp8_scale(d, e.row / MT_FP8_BLOCK * ceil_div(d.cols, MT_FP8_BLOCK) + e.col / MT_FP8_BLOCK);
    else if constexpr (FORMAT == MT_PACKED_FP8T)
        return fp8_scale(d, 0);
    else if constexpr (FORMAT == MT_PACKED_NF4)
        return d.nested_scales ? scale_of<FORMAT, true>(d, e.row * d.cols + e.col)
                               : scale_of<FORMAT, false>(d, e.row * d.cols + e.col);
    else
        return scale_of<FORMAT, false>(d, e.row * d.cols + e.col);
}

template <typename T, int FORMAT, bool FLAT>
static __global__ void __launch_bounds__(WARPS *WARP)
    merge_adapter(struct mt_merge_adapter a, size_t columns, struct nf4_codes nf4)
{
    constexpr int CP = tile<FORMAT>::CP, ROWS = tile<FORMAT>::ROWS;
    __shared__ float scratch[WARP];
    const T *wa = static_cast<const T *>(a.a), *wb = static_cast<const T *>(a.b);
    T *w = static_cast<T *>(a.of.out);
    float x[ROWS][CP] = {};
    MT_UNROLL(1)
    for (size_t k = 0; k < a.r; k++)
        MT_UNROLL(ROWS)
        for (int i = 0; i < ROWS; i++)
            MT_UNROLL(CP)
            for (int j = 0; j < CP; j++) {
                element e = element_of<CP, ROWS, FLAT>(a.of, columns, i, j);
                if (e.there)
                    x[i][j] += load(wb + e.row * a.r + k) * load(wa + k * a.of.cols + e.col);
            }
    float most[ROWS], all = 0;
    MT_UNROLL(ROWS)
    for (int i = 0; i < ROWS; i++) {
        most[i] = 0;
        MT_UNROLL(CP)
        for (int j = 0; j < CP; j++) {
            element e = element_of<CP, ROWS, FLAT>(a.of, columns, i, j);
            if (!e.there)
                continue;
            float y = load(w + e.row * a.of.cols + e.col) + a.s * x[i][j];
            x[i][j] = a.magnitude ? y * a.scale[e.row] : y;
            most[i] = larger(most[i], fabsf(x[i][j]));
        }
        all = larger(all, most[i]);
    }
    if (FORMAT == MT_PACKED_FP8 && a.rescale)
        all = block_max(all, 0.0f, scratch);
    MT_UNROLL(ROWS)
    for (int i = 0; i < ROWS; i++) {
        float own = FORMAT == MT_PACKED_FP8 ? all : a.rescale ? warp_max(most[i]) : 0;
        MT_UNROLL(CP)
        for (int j = 0; j < CP; j++) {
            element e = element_of<CP, ROWS, FLAT>(a.of, columns, i, j);
            if (!e.there)
                continue;
            T *to = w + e.row * a.of.cols + e.col;
            if constexpr (FORMAT == MT_PACKED_NONE) {
                store(to, float_of_bits(bf16_pair(x[i][j], 0) << 16));
            } else {
                constexpr float least = FORMAT == MT_PACKED_NF4 ? 1e-38f : 0x1p-127f;
                float scale = a.rescale ? own_scale<FORMAT>(own) : scale_of_element<FORMAT>(a.of, e);
                float unit = fabsf(scale) < least ? copysignf(least, scale) : scale;
                store(to, nearest<FORMAT>(x[i][j], unit, 1.0f / unit, nf4) * scale);
            }
        }
    }
}

/* A warp takes a row; columns in 32 lanes. */
template <typename T> static __global__ void __launch_bounds__(WARPS *WARP) row_norms(struct mt_merge_adapter a)
{
    size_t row = static_cast<size_t>(blockIdx.x) * WARPS + threadIdx.x / WARP, cols = a.of.cols;
    const T *w = static_cast<const T *>(a.of.out) + row * cols, *wa = static_cast<const T *>(a.a);
    const T *wb = static_cast<const T *>(a.b) + row * a.r;
    float sum = 0;
    if (row >= a.of.rows)
        return;
    for (size_t c = threadIdx.x % WARP; c < cols; c += WARP) {
        float x = 0;
        MT_UNROLL(4)
        for (size_t k = 0; k < a.r; k++)
            x += load(wb + k) * load(wa + k * cols + c);
        x = load(w + c) + a.s * x;
        sum += x * x;
    }
    sum = warp_sum(sum);
    if (threadIdx.x % WARP == 0) {
        float m = load(static_cast<const T *>(a.magnitude) + row);
        a.scale[row] = m * (1.0f / sqrtf(sum));
        a.inverse[row] = m != 0.0f ? 1.0f / m : 0.0f;
    }
}

template <typename T, int FORMAT, bool FLAT>
static cudaError_t launch(const struct mt_merge_adapter *a, cudaStream_t stream)
{
    struct nf4_codes nf4;
    for (int i = 0; i < 16; i++)
        nf4.value[i] = mt_nf4_values[i];
    size_t rows = FORMAT == MT_PACKED_FP8 ? MT_FP8_BLOCK : tile<FORMAT>::ROWS, wide = tile<FORMAT>::CP * WARP;
    size_t columns = ceil_div(a->of.cols, wide), warps = columns * ceil_div(a->of.rows, rows);
    if (FLAT)
        warps = ceil_div(a->of.rows * a->of.cols, rows * wide);
    return MT_LAUNCH((merge_adapter<T, FORMAT, FLAT>),
                     grid_of(FORMAT == MT_PACKED_FP8 ? warps : ceil_div(warps, WARPS)), WARPS *WARP, 0, stream, *a,
                     columns, nf4);
}

template <typename T, int FORMAT>
static cudaError_t launch_blocks(const struct mt_merge_adapter *a, cudaStream_t stream)
{
    return a->of.cols % (tile<FORMAT>::CP * WARP) ? launch<T, FORMAT, true>(a, stream)
                                                  : launch<T, FORMAT, false>(a, stream);
}

template <typename T> static cudaError_t run(const struct mt_merge_adapter *a, cudaStream_t stream)
{
    if (a->magnitude) {
        cudaError_t e = MT_LAUNCH(row_norms<T>, grid_of(ceil_div(a->of.rows, WARPS)), WARPS *WARP, 0, stream, *a);
        if (e != cudaSuccess)
            return e;
    }
    switch (a->of.format) {
    case MT_PACKED_NF4:
        return launch_blocks<T, MT_PACKED_NF4>(a, stream);
    case MT_PACKED_MXFP4:
        return launch_blocks<T, MT_PACKED_MXFP4>(a, stream);
    case MT_PACKED_INT4:
        return launch_blocks<T, MT_PACKED_INT4>(a, stream);
    case MT_PACKED_FP8:
        return launch<T, MT_PACKED_FP8, false>(a, stream);
    case MT_PACKED_FP8T:
        return launch<T, MT_PACKED_FP8T, false>(a, stream);
    default:
        return launch<T, MT_PACKED_NONE, false>(a, stream);
    }
}

cudaError_t mt_cuda_merge_adapter(const struct mt_merge_adapter *a, cudaStream_t stream)
{
    return a->of.dtype == MT_BF16 ? run<bf16>(a, stream) : run<float>(a, stream);
}
