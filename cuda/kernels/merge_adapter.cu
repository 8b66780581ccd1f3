/* SPDX-License-Identifier: Apache-2.0 */
/*
 * W = Q(g (W + s B A)) in place. A warp takes 64 columns of eight rows, which are whole blocks of every format but FP8,
 * so that an element of A that was read serves them all; a block of FP8 takes the eight warps of a block of threads,
 * four times over. Sums are products in the order of the rank, each rounded, so that the host gives the same bits
 * (device/merge_job.h); they wait in shared memory, each lane's own, for Q, which is too long to be unrolled. A matrix
 * whose blocks are not whole in rows is read as one row, element by element. Operations an element: 2 r (FP8 with new
 * scales: 4 r), and some 20 of Q; bytes: 2 s.
 */
#include "packed.cuh"
#include "reduce.cuh"

static constexpr int WARPS = 8, ROWS = 8, CP = 2, WIDE = CP * WARP;

struct element {
    unsigned row, col;
    bool there;
};

/* A warp's tile: of the matrix, or of the matrix read as one row. */
struct tile {
    unsigned row;
    size_t col;
};

template <bool FLAT>
static __device__ __forceinline__ element element_of(const struct mt_decode &d, tile t, int i, int j)
{
    size_t lane = threadIdx.x % WARP + j * WARP;
    if constexpr (FLAT) {
        size_t at = t.col + i * WIDE + lane;
        unsigned row = static_cast<unsigned>(at / d.cols);
        return {row, static_cast<unsigned>(at - row * d.cols), at < d.rows * d.cols};
    }
    return {t.row + i, static_cast<unsigned>(t.col + lane), t.row + i < d.rows && t.col + lane < d.cols};
}

/* Which of the warp's tiles: FP8 has four, 16 rows of 128. */
template <bool FLAT>
static __device__ __forceinline__ tile tile_of(const struct mt_decode &d, unsigned columns, int sub)
{
    unsigned warp = threadIdx.x / WARP, at = blockIdx.x * WARPS + warp;
    if constexpr (FLAT)
        return {0, static_cast<size_t>(at) * ROWS * WIDE};
    if (d.format == MT_PACKED_FP8)
        return {blockIdx.x / columns * MT_FP8_BLOCK + (warp * 2 + sub / 2) * ROWS,
                blockIdx.x % columns * MT_FP8_BLOCK + sub % 2 * WIDE};
    return {at / columns * ROWS, at % columns * WIDE};
}

/* mt_pack_scale() and mt_pack_e4m3_scale(), of the largest magnitude. */
static __device__ __forceinline__ float own_scale(const struct mt_decode &d, float most)
{
    switch (d.format) {
    case MT_PACKED_NF4:
        return most;
    case MT_PACKED_MXFP4: {
        uint32_t bits = (bits_of_float(most / 6.0f) + 0x7fffffu) & 0x7f800000u;
        return bits ? float_of_bits(bits) : 0x1p-127f;
    }
    case MT_PACKED_INT4:
        return most > 0 ? float_of_bits(bf16_pair(most / 7.5f, 0) << 16) : 0x1p-7f;
    case MT_PACKED_NVFP4: {
        bool times = d.scale == MT_SCALE_E4M3;
        float factor = *d.factor, x = times ? most / 6.0f / factor : most / 6.0f * factor;
        uint32_t byte = e4m3_of(x > 448 ? 448 : x);
        float scale = e4m3(byte ? byte : 1);
        return times ? scale * factor : scale / factor;
    }
    default:
        return 1.0f / (most > 0 ? 1.0f / most * 448.0f : 1.0f);
    }
}

static __device__ __forceinline__ float scale_of_element(const struct mt_decode &d, element e)
{
    size_t i = e.row * d.cols + e.col;
    switch (d.format) {
    case MT_PACKED_NF4:
        return d.nested_scales ? scale_of<MT_PACKED_NF4, true>(d, i) : scale_of<MT_PACKED_NF4, false>(d, i);
    case MT_PACKED_MXFP4:
        return scale_of<MT_PACKED_MXFP4, false>(d, i);
    case MT_PACKED_INT4:
        return scale_of<MT_PACKED_INT4, false>(d, i);
    case MT_PACKED_NVFP4:
        return scale_of<MT_PACKED_NVFP4, false>(d, i);
    default:
        return scale_at<MT_PACKED_FP8, false>(d, e.row, e.col);
    }
}

static __device__ __forceinline__ float clamp(float x, float most)
{
    return x < -most ? -most : x > most ? most : x;
}

/* To the nearest; ties away from zero, or to even codes. */
static __device__ __forceinline__ float fp4(float x, bool to_even)
{
    const float half_way[7] = {0.25f, 0.75f, 1.25f, 1.75f, 2.5f, 3.5f, 5}, value[7] = {0.5f, 1, 1.5f, 2, 3, 4, 6};
    float y = fabsf(x), v = 0;
    MT_UNROLL(7)
    for (int k = 0; k < 7; k++)
        v = (to_even && k % 2 == 0 ? y > half_way[k] : y >= half_way[k]) ? value[k] : v;
    return copysignf(v, x);
}

/* The value of mt_pack_codes()'s code, with its scale. */
static __device__ __forceinline__ float quantised(float x, float scale, int format, const struct code_values &nf4)
{
    float least = format == MT_PACKED_NF4 ? 1e-38f : 0x1p-127f;
    float unit = fabsf(scale) < least ? copysignf(least, scale) : scale, inverse = 1.0f / unit;
    switch (format) {
    case MT_PACKED_NF4: {
        float y = clamp(x * inverse, 1), v = nf4.of[0];
        MT_UNROLL(15)
        for (int k = 0; k < 15; k++)
            v = y > (nf4.of[k] + nf4.of[k + 1]) / 2 ? nf4.of[k + 1] : v;
        return v * scale;
    }
    case MT_PACKED_MXFP4:
    case MT_PACKED_NVFP4:
        return fp4(x * inverse, format == MT_PACKED_NVFP4) * scale;
    case MT_PACKED_INT4:
        return static_cast<float>(static_cast<int>(clamp(rintf(clamp(x / unit, 16)) + 0.5f, 7.5f) - 0.5f)) * scale;
    case MT_PACKED_NONE:
        return float_of_bits(bf16_pair(x, 0) << 16);
    default:
        return e4m3(e4m3_of(clamp(x * inverse, 448))) * scale;
    }
}

/* The lane's elements of g (W + s B A). Returns the largest magnitude. Sums of a matrix's rows grow together, so that
 * an element of A is read once for them; of one that is read as a row, one after the other. */
template <typename T, bool FLAT>
static __device__ __forceinline__ float merge_tile(const struct mt_merge_adapter &a, tile t, float (*out)[WIDE])
{
    constexpr int N = FLAT ? 1 : ROWS;
    const T *wa = static_cast<const T *>(a.a), *wb = static_cast<const T *>(a.b), *w = static_cast<const T *>(a.of.out);
    float most = 0;
    MT_UNROLL(1)
    for (int row = 0; row < ROWS; row += N)
        MT_UNROLL(1)
        for (int j = 0; j < CP; j++) {
            element e[N];
            float x[N] = {};
            MT_UNROLL(N)
            for (int i = 0; i < N; i++)
                e[i] = element_of<FLAT>(a.of, t, row + i, j);
            MT_UNROLL(1)
            for (size_t k = 0; k < a.r; k++)
                MT_UNROLL(N)
                for (int i = 0; i < N; i++)
                    if (e[i].there)
                        x[i] += load(wb + e[i].row * a.r + k) * load(wa + k * a.of.cols + e[i].col);
            MT_UNROLL(N)
            for (int i = 0; i < N; i++) {
                float y = e[i].there ? load(w + e[i].row * a.of.cols + e[i].col) + a.s * x[i] : 0;
                y = e[i].there && a.magnitude ? y * a.scale[e[i].row] : y;
                out[row + i][threadIdx.x % WARP + j * WARP] = y;
                most = larger(most, fabsf(y));
            }
        }
    return most;
}

/* columns: tiles side by side. */
template <typename T, bool FLAT>
static __global__ void __launch_bounds__(WARPS *WARP, 2)
    merge_adapter(struct mt_merge_adapter a, unsigned columns, struct code_values nf4)
{
    __shared__ float scratch[WARP], sums[WARPS][ROWS][WIDE];
    float(*x)[WIDE] = sums[threadIdx.x / WARP];
    T *w = static_cast<T *>(a.of.out);
    int format = static_cast<int>(a.of.format), lane = threadIdx.x % WARP;
    int tiles = format == MT_PACKED_FP8 ? 4 : 1, lanes = format == MT_PACKED_NVFP4 ? MT_NVFP4_BLOCK : WARP;
    float all = 0;
    MT_UNROLL(1)
    for (int sub = format == MT_PACKED_FP8 && a.rescale ? -tiles : 0; sub < tiles; sub++) {
        tile t = tile_of<FLAT>(a.of, columns, sub & 3);
        float here = merge_tile<T, FLAT>(a, t, x);
        if (sub < 0) { /* first for the scale of all */
            all = larger(all, here);
            all = sub == -1 ? block_max(all, 0.0f, scratch) : all;
            continue;
        }
        MT_UNROLL(1)
        for (int i = 0; i < ROWS; i++) {
            float both = larger(fabsf(x[i][lane]), fabsf(x[i][lane + WARP]));
            MT_UNROLL(1)
            for (int j = 0; j < CP; j++) {
                element e = element_of<FLAT>(a.of, t, i, j);
                float y = x[i][lane + j * WARP], most = format == MT_PACKED_NF4 ? both : fabsf(y), scale = 1;
                if (a.rescale)
                    scale = own_scale(a.of, format == MT_PACKED_FP8 ? all : warp_max(most, lanes));
                else if (format && e.there)
                    scale = scale_of_element(a.of, e);
                if (e.there)
                    store(w + e.row * a.of.cols + e.col, quantised(y, scale, format, nf4));
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

cudaError_t mt_cuda_merge_adapter(const struct mt_merge_adapter *a, cudaStream_t stream)
{
    const struct mt_packed_format *f = &mt_packed_formats[a->of.format];
    bool square = a->of.format == MT_PACKED_FP8, across_rows = !f->by_rows && f->block && a->of.cols % f->block;
    unsigned columns = static_cast<unsigned>(ceil_div(a->of.cols, square ? MT_FP8_BLOCK : WIDE));
    size_t n = across_rows ? ceil_div(a->of.rows * a->of.cols, ROWS * WIDE)
                           : columns * ceil_div(a->of.rows, square ? MT_FP8_BLOCK : ROWS);
    dim3 rows = grid_of(ceil_div(a->of.rows, WARPS)), blocks = grid_of(square ? n : ceil_div(n, WARPS));
    cudaError_t rc = cudaSuccess;
    if (a->magnitude)
        rc = MT_LAUNCH_OF(a->of.dtype, row_norms, rows, WARPS *WARP, 0, stream, *a);
    return for_flag(across_rows, [=](auto flat) {
        return for_dtype(a->of.dtype, [=](auto t) {
            return MT_LAUNCH_NEXT(rc, (merge_adapter<decltype(t), flat.value>), blocks, WARPS *WARP, 0, stream, *a,
                                  columns, values_of(MT_PACKED_NF4));
        });
    });
}
