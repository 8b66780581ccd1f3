/* SPDX-License-Identifier: Apache-2.0 */
/*
 * D' = decode(B) A': for a few rows of A, the time is that of reading B's codes. A block makes 32 columns of D, of up to
 * 32 rows; its warps take steps of 64 along K in turn, and their sums are added as a tree, so that an element has the
 * same sums in any shape. A thread decodes 16 neighbouring elements of four rows of B, each run of one block of its
 * format, straight into fragments of mma: within a step, columns are dealt to k in the order in which threads read
 * them, of both operands alike. Bytes moved: codes and scales once for each 32 rows of A; A, which L2 keeps, for
 * each 32 columns of D.
 */
#include "mma.cuh"
#include "packed.cuh"

enum { WARPS = 8, STEP = 64, RUN = STEP / 4, ROWS = 32, TILES = ROWS / 16 };

/* Codes of 16 neighbouring elements. */
template <int FORMAT> struct code_run {
    uint32_t word[FORMAT == MT_PACKED_FP8 ? 4 : 2];
};

template <int FORMAT> static __device__ __forceinline__ code_run<FORMAT> load_run(const uint8_t *codes, size_t i)
{
    code_run<FORMAT> r;
    if constexpr (FORMAT == MT_PACKED_FP8) {
        uint4 v = load_word<uint4>(codes + i);
        r.word[0] = v.x;
        r.word[1] = v.y;
        r.word[2] = v.z;
        r.word[3] = v.w;
    } else {
        uint64_t v = load_word<uint64_t>(codes + i / 2);
        r.word[0] = static_cast<uint32_t>(v);
        r.word[1] = static_cast<uint32_t>(v >> 32);
    }
    return r;
}

/* Elements 2 p and 2 p + 1 of a run as bf16. */
template <int FORMAT>
static __device__ __forceinline__ uint32_t pair_of(const code_run<FORMAT> &r, int p, float scale, float shift,
                                                   const float *value)
{
    if constexpr (FORMAT == MT_PACKED_FP8) {
        uint32_t c = r.word[p / 2] >> (p % 2 * 16);
        return rounded_pair(e4m3(c & 0xffu) * scale, e4m3(c >> 8 & 0xffu) * scale);
    } else {
        uint32_t c = r.word[p / 4];
        int k = p % 4 * 2;
        return rounded_pair(code_value<FORMAT>(value, nibble<FORMAT>(c, k), shift) * scale,
                            code_value<FORMAT>(value, nibble<FORMAT>(c, k + 1), shift) * scale);
    }
}

/* What a thread has of a step: of each tile rows g and g + 8, g being a quarter of its lane. */
template <int FORMAT> struct step {
    code_run<FORMAT> codes[TILES][2];
    float scale[TILES][2], shift[TILES][2];
};

template <int FORMAT, bool NESTED>
static __device__ __forceinline__ void load_step(step<FORMAT> *s, const struct mt_decode &b,
                                                 const unsigned (&row)[TILES][2], unsigned col)
{
    MT_UNROLL(2)
    for (int r = 0; r < TILES; r++)
        for (int h = 0; h < 2; h++) {
            s->codes[r][h] = load_run<FORMAT>(b.codes, static_cast<size_t>(row[r][h]) * b.cols + col);
            s->scale[r][h] = scale_at<FORMAT, NESTED>(b, row[r][h], col);
            s->shift[r][h] = shift_of<FORMAT>(b, static_cast<size_t>(row[r][h]) * b.cols + col);
        }
}

/* acc += B A' of the step, for 8 NT rows of A from `token` on; in halves, so that all is in registers. */
template <int FORMAT, int NT>
static __device__ __forceinline__ void add_step(float (&acc)[TILES][NT][4], const step<FORMAT> &s,
                                                const struct mt_packed_gemm &a, size_t token, size_t col,
                                                const float *value)
{
    constexpr int PRODUCTS = RUN / 8;
    const uint16_t *x = static_cast<const uint16_t *>(a.a) + token * a.lda + col;
    MT_UNROLL(2)
    for (int half = 0; half < 2; half++) {
        uint32_t fragment[TILES][PRODUCTS][4];
        MT_UNROLL(2)
        for (int r = 0; r < TILES; r++)
            for (int k = 0; k < PRODUCTS; k++)
                for (int i = 0; i < 4; i++)
                    fragment[r][k][i] = pair_of<FORMAT>(s.codes[r][i % 2], (half * PRODUCTS + k) * 2 + i / 2,
                                                        s.scale[r][i % 2], s.shift[r][i % 2], value);
        MT_UNROLL(4)
        for (int j = 0; j < NT; j++) {
            uint4 w = {};
            if (token + static_cast<size_t>(j) * 8 < a.m)
                w = load_word<uint4>(x + static_cast<size_t>(j) * 8 * a.lda + half * 8);
            for (int r = 0; r < TILES; r++) {
                multiply_add(acc[r][j], fragment[r][0], w.x, w.y);
                multiply_add(acc[r][j], fragment[r][1], w.z, w.w);
            }
        }
    }
}

/* The sums of all warps, in the first. */
template <int NT> static __device__ __forceinline__ void add_warps(float (&acc)[TILES][NT][4])
{
    __shared__ float sums[WARPS / 2][TILES * NT * 4][WARP];
    int lane = static_cast<int>(threadIdx.x) % WARP, warp = static_cast<int>(threadIdx.x) / WARP;
    for (int half = WARPS / 2; half; half /= 2) {
        MT_UNROLL(32)
        for (int i = 0; i < TILES * NT * 4; i++)
            if (warp >= half && warp < 2 * half)
                sums[warp - half][i][lane] = acc[i / (NT * 4)][i / 4 % NT][i % 4];
        __syncthreads();
        MT_UNROLL(32)
        for (int i = 0; i < TILES * NT * 4; i++)
            if (warp < half)
                acc[i / (NT * 4)][i / 4 % NT][i % 4] += sums[warp][i][lane];
        __syncthreads();
    }
}

template <typename D>
static __device__ __forceinline__ void finish(const struct mt_packed_gemm &a, size_t token, size_t row, float x)
{
    if (token >= a.m || row >= a.b.rows)
        return;
    if (a.bias)
        x += load(static_cast<const bf16 *>(a.bias) + row);
    if (a.c)
        x += load(static_cast<const D *>(a.c) + token * a.ldc + row);
    store(static_cast<D *>(a.d) + token * a.ldd + row, x);
}

template <int FORMAT, bool NESTED, int NT>
static __global__ void __launch_bounds__(WARPS *WARP, FORMAT == MT_PACKED_FP8 ? 1 : 2) /* FP8 needs more registers */
    multiply(struct mt_packed_gemm a, unsigned token_blocks, struct code_values values)
{
    __shared__ float value[16];
    share_values(value, values);
    int lane = static_cast<int>(threadIdx.x) % WARP, warp = static_cast<int>(threadIdx.x) / WARP;
    size_t first_row = static_cast<size_t>(blockIdx.x / token_blocks) * ROWS;
    size_t first_token = static_cast<size_t>(blockIdx.x % token_blocks) * NT * 8;
    unsigned row[TILES][2], in_step = static_cast<unsigned>(lane % 4) * RUN, cols = static_cast<unsigned>(a.b.cols);
    for (int i = 0; i < 2 * TILES; i++) {
        size_t at = first_row + static_cast<size_t>(i * 8 + lane / 4);
        row[i / 2][i % 2] = static_cast<unsigned>(at < a.b.rows ? at : a.b.rows - 1);
    }
    float acc[TILES][NT][4] = {};
    MT_UNROLL(1) /* the other warps' loads are enough to read ahead */
    for (unsigned at = static_cast<unsigned>(warp) * STEP; at < cols; at += WARPS * STEP) {
        step<FORMAT> s;
        load_step<FORMAT, NESTED>(&s, a.b, row, at + in_step);
        add_step<FORMAT, NT>(acc, s, a, first_token + static_cast<size_t>(lane / 4), at + in_step, value);
    }
    add_warps<NT>(acc);
    if (warp)
        return;
    MT_UNROLL(32)
    for (int i = 0; i < TILES * NT * 4; i++) {
        int r = i / (NT * 4), j = i / 4 % NT, e = i % 4;
        size_t token = first_token + static_cast<size_t>(j * 8 + lane % 4 * 2 + e % 2);
        size_t to = first_row + static_cast<size_t>(r * 16 + e / 2 * 8 + lane / 4);
        if (a.d_dtype == MT_BF16)
            finish<bf16>(a, token, to, acc[r][j][e]);
        else
            finish<float>(a, token, to, acc[r][j][e]);
    }
}

template <int FORMAT, bool NESTED, int NT>
static cudaError_t run(const struct mt_packed_gemm *a, cudaStream_t stream)
{
    size_t blocks = ceil_div(a->m, static_cast<size_t>(NT) * 8);
    return MT_LAUNCH((multiply<FORMAT, NESTED, NT>), grid_of(blocks * ceil_div(a->b.rows, ROWS)), WARPS * WARP, 0,
                     stream, *a, static_cast<unsigned>(blocks), values_of(FORMAT));
}

cudaError_t mt_cuda_packed_gemm(const struct mt_packed_gemm *a, cudaStream_t stream)
{
    return for_format(a->b, [=](auto format, auto nested) {
        return a->m <= 8 ? run<format.value, nested.value, 1>(a, stream)
                         : run<format.value, nested.value, 4>(a, stream);
    });
}
