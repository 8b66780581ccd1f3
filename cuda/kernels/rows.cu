/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Gather, scatter, add, cast, join: a block moves a few KiB, each thread 16-byte words at a distance of the block's
 * width, all loaded before the first is stored. Bytes moved per element of s bytes: gather and scatter 2 s (1 s for
 * rows that scatter clears), add 3 s, cast both widths, join 8.
 */
#include "base/dtype.h"
#include "launch.cuh"
#include "scalar.cuh"

enum { FLAT_THREADS = 256, FLAT_UNROLL = 4, ROW_UNROLL = 2 };

/* --- rows ------------------------------------------------------------------------------------- */

/* Index of `row` in the ascending a.rows, or a.n. Entry k is at least k, and usually few rows are missing, so the range
 * to search is short. */
static __device__ size_t source_of(const struct mt_rows &a, size_t row)
{
    size_t skipped = a.n_dst - a.n, lo = row > skipped ? row - skipped : 0;
    size_t hi = row + 1 < a.n ? row + 1 : a.n;
    while (lo < hi) {
        size_t mid = (lo + hi) / 2;
        if (static_cast<size_t>(a.rows[mid]) < row)
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo < a.n && static_cast<size_t>(a.rows[lo]) == row ? lo : a.n;
}

/* Gathers or scatters; rows without a source become 0. */
template <typename W, bool SCATTER>
static __global__ void __launch_bounds__(256) move_words(struct mt_rows a, size_t words, unsigned columns)
{
    size_t row, at;
    row_of_tile(columns, ROW_UNROLL, &row, &at);
    if (row >= (SCATTER ? a.n_dst : a.n))
        return;
    size_t source = SCATTER ? source_of(a, row) : static_cast<size_t>(a.rows[row]);
    const W *src = static_cast<const W *>(a.src) + source * words;
    W *dst = static_cast<W *>(a.dst) + row * words, w[ROW_UNROLL] = {};
    if (!SCATTER || source < a.n)
        each_vector<ROW_UNROLL>(at, words, [&](int u, size_t i) { w[u] = load_word<W>(src + i); });
    each_vector<ROW_UNROLL>(at, words, [&](int u, size_t i) { store_word<W>(dst + i, w[u]); });
}

template <typename W, bool SCATTER> static cudaError_t move_rows(const struct mt_rows *a, cudaStream_t stream)
{
    size_t words = a->c * mt_dtype_size(a->dtype) / sizeof(W);
    row_tiles t = tile_rows(SCATTER ? a->n_dst : a->n, words, ROW_UNROLL);
    return MT_LAUNCH((move_words<W, SCATTER>), grid_of(t.blocks), dim3(t.x, t.y), 0, stream, *a, words, t.columns);
}

template <bool SCATTER> static cudaError_t move_rows_by_words(const struct mt_rows *a, cudaStream_t stream)
{
    size_t bytes = a->c * mt_dtype_size(a->dtype);
    if (bytes % 16 == 0)
        return move_rows<uint4, SCATTER>(a, stream);
    return bytes % 4 == 0 ? move_rows<uint32_t, SCATTER>(a, stream) : move_rows<uint16_t, SCATTER>(a, stream);
}

cudaError_t mt_cuda_gather_rows(const struct mt_rows *a, cudaStream_t stream)
{
    return move_rows_by_words<false>(a, stream);
}

cudaError_t mt_cuda_scatter_rows(const struct mt_rows *a, cudaStream_t stream)
{
    return a->n_dst ? move_rows_by_words<true>(a, stream) : cudaSuccess;
}

/* --- flat ------------------------------------------------------------------------------------- */

static size_t flat_blocks(size_t n, size_t per_access)
{
    return ceil_div(n, per_access * FLAT_THREADS * FLAT_UNROLL);
}

/* This thread's first access; the next ones follow at a distance of FLAT_THREADS. */
MT_DEVICE size_t flat_at()
{
    return static_cast<size_t>(blockIdx.x) * FLAT_THREADS * FLAT_UNROLL + threadIdx.x;
}

template <typename T>
static __global__ void __launch_bounds__(FLAT_THREADS) add(const T *a, const T *b, T *out, size_t n, float scale)
{
    constexpr int N = VEC<T>;
    size_t at = flat_at();
    uint4 p[FLAT_UNROLL], q[FLAT_UNROLL];
    MT_UNROLL(FLAT_UNROLL)
    for (int u = 0; u < FLAT_UNROLL; u++) {
        size_t i = (at + u * FLAT_THREADS) * N;
        if (i + N <= n) {
            p[u] = a ? load16(a + i) : make_uint4(0, 0, 0, 0);
            q[u] = load16(b + i);
        }
    }
    MT_UNROLL(FLAT_UNROLL)
    for (int u = 0; u < FLAT_UNROLL; u++) {
        size_t i = (at + u * FLAT_THREADS) * N;
        if (i + N <= n) {
            float x[N], y[N];
            vec_floats<T>(p[u], x);
            vec_floats<T>(q[u], y);
            for (int k = 0; k < N; k++)
                x[k] += scale * y[k];
            store16(out + i, vec_of<T>(x));
        }
    }
    size_t rest = n - n % N + threadIdx.x; /* elements that do not fill an access: done by the last block */
    if (blockIdx.x + 1 == gridDim.x && rest < n)
        store(out + rest, (a ? load(a + rest) : 0.0f) + scale * load(b + rest));
}

cudaError_t mt_cuda_add(const struct mt_add *a, cudaStream_t stream)
{
    return for_dtype(a->dtype, [=](auto t) {
        using T = decltype(t);
        return MT_LAUNCH(add<T>, grid_of(flat_blocks(a->n, VEC<T>)), FLAT_THREADS, 0, stream,
                         static_cast<const T *>(a->a), static_cast<const T *>(a->b), static_cast<T *>(a->out), a->n,
                         a->scale == 0 ? 1.0f : a->scale);
    });
}

template <typename S, typename D>
static __global__ void __launch_bounds__(FLAT_THREADS)
    cast(const S *__restrict__ src, D *__restrict__ dst, size_t n)
{
    size_t at = flat_at();
    float x[FLAT_UNROLL][4];
    MT_UNROLL(FLAT_UNROLL)
    for (int u = 0; u < FLAT_UNROLL; u++) {
        size_t i = (at + u * FLAT_THREADS) * 4;
        if (i + 4 <= n)
            load_four(src + i, x[u]);
    }
    MT_UNROLL(FLAT_UNROLL)
    for (int u = 0; u < FLAT_UNROLL; u++) {
        size_t i = (at + u * FLAT_THREADS) * 4;
        if (i + 4 <= n)
            store_four(dst + i, x[u]);
        else
            MT_UNROLL(1)
            for (; i < n; i++)
                store(dst + i, load(src + i));
    }
}

cudaError_t mt_cuda_cast(const struct mt_cast *a, cudaStream_t stream)
{
    return for_dtype(a->src_dtype, [=](auto src) {
        return for_dtype(a->dst_dtype, [=](auto dst) {
            using S = decltype(src);
            using D = decltype(dst);
            return MT_LAUNCH((cast<S, D>), grid_of(flat_blocks(a->n, 4)), FLAT_THREADS, 0, stream,
                             static_cast<const S *>(a->src), static_cast<D *>(a->dst), a->n);
        });
    });
}

/* --- join ------------------------------------------------------------------------------------- */

enum { JOIN_THREADS = 512, JOIN_UNROLL = MT_JOIN_BLOCK / (4 * JOIN_THREADS) };

/* The master's bits are (hi << 16) + lo with lo's sign (mt_master_join). */
MT_DEVICE uint32_t join_one(uint32_t hi, uint32_t lo)
{
    return (hi << 16) + static_cast<uint32_t>(static_cast<int32_t>(lo << 16) >> 16);
}

/* The low and the high halves of two words. */
MT_DEVICE uint2 join_two(uint32_t hi, uint32_t lo)
{
    return make_uint2(join_one(hi & 0xffffu, lo & 0xffffu), join_one(hi >> 16, lo >> 16));
}

/* A block joins one block of the buffer in place: all of it is in registers before any is stored. */
template <bool NO_LO>
static __global__ void __launch_bounds__(JOIN_THREADS) join_block(char *buf)
{
    char *block = buf + static_cast<size_t>(blockIdx.x) * (4 * MT_JOIN_BLOCK);
    uint2 hi[JOIN_UNROLL], lo[JOIN_UNROLL];
    MT_UNROLL(JOIN_UNROLL)
    for (int u = 0; u < JOIN_UNROLL; u++) {
        size_t i = (static_cast<size_t>(u) * JOIN_THREADS + threadIdx.x) * 8;
        hi[u] = load_word<uint2>(block + i);
        lo[u] = NO_LO ? make_uint2(0, 0) : load_word<uint2>(block + 2 * MT_JOIN_BLOCK + i);
    }
    __syncthreads();
    MT_UNROLL(JOIN_UNROLL)
    for (int u = 0; u < JOIN_UNROLL; u++) {
        uint2 a = join_two(hi[u].x, lo[u].x), b = join_two(hi[u].y, lo[u].y);
        size_t i = (static_cast<size_t>(u) * JOIN_THREADS + threadIdx.x) * 16;
        store16(block + i, make_uint4(a.x, a.y, b.x, b.y));
    }
}

cudaError_t mt_cuda_join(const struct mt_join *a, cudaStream_t stream)
{
    dim3 grid = grid_of(a->n / MT_JOIN_BLOCK);
    char *buf = static_cast<char *>(a->buf);
    return for_flag(a->no_lo, [=](auto no_lo) {
        return MT_LAUNCH(join_block<no_lo.value>, grid, JOIN_THREADS, 0, stream, buf);
    });
}
