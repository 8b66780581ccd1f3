/* SPDX-License-Identifier: Apache-2.0 */
/*
 * loss = log(sum of e^(x - max)) - (logit[target] - max), since log-sum-exp would be rounded as the logits are;
 * dlogits = (softmax - onehot) scale, the same for all rows or one for each. A block
 * handles a row: one pass for the maximum and the sum of exponentials together (Milakov and Gimelshein 2018, alg.
 * 3), one for the gradient. The first pass goes from the end to the beginning, so that the second finds the
 * beginning in the cache. Bytes moved per element: 4 + 4 and the width of dlogits; an ignored row is only cleared.
 *
 * In place in bf16, element i of the gradient overwrites half of logit i / 2. The whole block reads a piece and,
 * after a barrier, writes its gradient: the logits overwritten are in this piece or in earlier ones.
 */
#include "launch.cuh"
#include "reduce.cuh"
#include "scalar.cuh"

enum { THREADS = 512, WARPS = THREADS / WARP, UNROLL = 4, STEP = 4 * THREADS, PIECE = STEP * UNROLL };

/* Sum of e^(x - max) over some logits, with their maximum; {-inf, 0} for none. */
struct soft_sum {
    float max, sum;
};

/* The sum with another maximum as its shift. Without a difference (both may be -inf) there is nothing to scale. */
MT_DEVICE float sum_under(soft_sum s, float max)
{
    return s.max == max ? s.sum : s.sum * exp_of(s.max - max);
}

MT_DEVICE soft_sum join(soft_sum a, soft_sum b)
{
    float max = a.max > b.max ? a.max : b.max;
    return {max, sum_under(a, max) + sum_under(b, max)};
}

MT_DEVICE soft_sum warp_join(soft_sum s)
{
    for (int d = WARP / 2; d; d /= 2) {
        soft_sum other = {__shfl_xor_sync(0xffffffffu, s.max, d), __shfl_xor_sync(0xffffffffu, s.sum, d)};
        s = join(s, other);
    }
    return s;
}

/* Loads this thread's logits of a piece, from p on; `left` are in the row, others are -inf. */
template <bool VECTOR> MT_DEVICE void load_piece(const float *p, int left, float (&x)[UNROLL][4])
{
    MT_UNROLL(UNROLL)
    for (int u = 0; u < UNROLL; u++) {
        if (VECTOR && u * STEP + 4 <= left)
            load_four(p + u * STEP, x[u]);
        else
            for (int k = 0; k < 4; k++)
                x[u][k] = u * STEP + k < left ? p[u * STEP + k] : -INFINITY;
    }
}

/* Adds a piece; sets *beaten if a logit is larger than the target's, or equal and before it. `target`: the target's
 * distance from this thread's first logit. */
MT_DEVICE void add_piece(const float (&x)[UNROLL][4], int target, float target_logit, soft_sum *s, bool *beaten)
{
    float max = s->max;
    MT_UNROLL(UNROLL)
    for (int u = 0; u < UNROLL; u++)
        for (int k = 0; k < 4; k++) {
            max = x[u][k] > max ? x[u][k] : max;
            *beaten |= (x[u][k] > target_logit) | ((x[u][k] == target_logit) & (u * STEP + k < target));
        }
    float sum = sum_under(*s, max), shift = max == -INFINITY ? 0.0f : max;
    MT_UNROLL(UNROLL)
    for (int u = 0; u < UNROLL; u++)
        for (int k = 0; k < 4; k++)
            sum += exp_of(x[u][k] - shift);
    *s = {max, sum};
}

/* The sum of the whole row, in every thread. */
template <bool VECTOR>
static __device__ soft_sum sum_row(const float *row, int vocab, int target, float target_logit, bool *beaten)
{
    __shared__ soft_sum shared[WARPS];
    __shared__ int beaten_in[WARPS];
    soft_sum s = {-INFINITY, 0};
    *beaten = false;
    for (int piece = (vocab - 1) / PIECE; piece >= 0; piece--) {
        float x[UNROLL][4];
        int at = piece * PIECE + static_cast<int>(threadIdx.x) * 4;
        load_piece<VECTOR>(row + at, vocab - at, x);
        add_piece(x, target - at, target_logit, &s, beaten);
    }
    unsigned lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    s = warp_join(s);
    int any = __any_sync(0xffffffffu, *beaten);
    if (lane == 0) {
        shared[warp] = s;
        beaten_in[warp] = any;
    }
    __syncthreads();
    s = warp_join(lane < WARPS ? shared[lane] : soft_sum{-INFINITY, 0});
    *beaten = __any_sync(0xffffffffu, lane < WARPS && beaten_in[lane]) != 0;
    return s;
}

template <typename T> MT_DEVICE void store_piece(T *p, int left, bool vector, const float (&y)[UNROLL][4])
{
    MT_UNROLL(UNROLL)
    for (int u = 0; u < UNROLL; u++) {
        if (vector && u * STEP + 4 <= left)
            store_four(p + u * STEP, y[u]);
        else
            for (int k = 0; k < 4; k++)
                if (u * STEP + k < left)
                    store(p + u * STEP + k, y[u][k]);
    }
}

template <typename T, bool VECTOR>
static __device__ void gradient_row(const float *row, T *out, int vocab, bool vector_out, int target,
                                    soft_sum s, float scale, float cap)
{
    const float share = scale / s.sum;
    for (int piece = 0; piece <= (vocab - 1) / PIECE; piece++) {
        float x[UNROLL][4];
        int at = piece * PIECE + static_cast<int>(threadIdx.x) * 4;
        load_piece<VECTOR>(row + at, vocab - at, x);
        MT_UNROLL(UNROLL)
        for (int u = 0; u < UNROLL; u++)
            for (int k = 0; k < 4; k++) {
                float y = exp_of(x[u][k] - s.max) * share;
                y = u * STEP + k == target - at ? y - scale : y;
                x[u][k] = cap > 0 ? y * (1.0f - (x[u][k] / cap) * (x[u][k] / cap)) : y;
            }
        __syncthreads();
        store_piece(out + at, vocab - at, vector_out, x);
    }
}

/* -sum of p log p = log(sum) - sum of e^(x - max) (x - max) / sum, in every thread. */
template <bool VECTOR> static __device__ float entropy_row(const float *row, int vocab, soft_sum s)
{
    __shared__ float shared[WARPS];
    float all = 0;
    for (int piece = 0; piece <= (vocab - 1) / PIECE; piece++) {
        float x[UNROLL][4];
        int at = piece * PIECE + static_cast<int>(threadIdx.x) * 4;
        load_piece<VECTOR>(row + at, vocab - at, x);
        MT_UNROLL(UNROLL)
        for (int u = 0; u < UNROLL; u++)
            for (int k = 0; k < 4; k++)
                all += x[u][k] > -INFINITY ? exp_of(x[u][k] - s.max) * (x[u][k] - s.max) : 0.0f;
    }
    return logf(s.sum) - block_sum(all, shared) / s.sum;
}

template <typename T> static __device__ void clear_row(T *out, int vocab, bool vector_out)
{
    const float zeros[UNROLL][4] = {};
    for (int at = static_cast<int>(threadIdx.x) * 4; at < vocab; at += PIECE)
        store_piece(out + at, vocab - at, vector_out, zeros);
}

/* Further ids of a row: their logits, or their gradients after all others. */
template <typename T> MT_DEVICE void few_of_row(const mt_cross_entropy &a, size_t row, const float *logits, T *out)
{
    const int *ids = a.few + row * a.n_few;
    float *values = a.few_values + row * a.n_few;
    if (out)
        __syncthreads();
    for (int k = static_cast<int>(threadIdx.x); k < static_cast<int>(a.n_few); k += THREADS) {
        if (ids[k] >= 0 && out)
            store(out + ids[k], values[k]);
        else if (ids[k] >= 0)
            values[k] = logits[ids[k]];
    }
}

template <typename T, bool VECTOR>
static __global__ void __launch_bounds__(THREADS, 2) cross_entropy(struct mt_cross_entropy a, bool vector_out)
{
    size_t row = blockIdx.x;
    int vocab = static_cast<int>(a.vocab), target = a.targets[row];
    T *out = a.dlogits ? static_cast<T *>(a.dlogits) + row * a.ld_dlogits : nullptr;
    if (target < 0) {
        if (threadIdx.x == 0) {
            a.loss[row] = 0;
            if (a.correct)
                a.correct[row] = 0;
            if (a.entropy)
                a.entropy[row] = 0;
        }
        if (out)
            clear_row(out, vocab, vector_out);
        return;
    }
    const float *logits = a.logits + row * a.ld;
    float target_logit = logits[target];
    bool beaten;
    soft_sum s = sum_row<VECTOR>(logits, vocab, target, target_logit, &beaten);
    if (threadIdx.x == 0) {
        a.loss[row] = logf(s.sum) - (target_logit - s.max);
        if (a.correct)
            a.correct[row] = !beaten;
    }
    if (a.entropy) {
        float entropy = entropy_row<VECTOR>(logits, vocab, s);
        if (threadIdx.x == 0)
            a.entropy[row] = entropy;
    }
    if (out)
        gradient_row<T, VECTOR>(logits, out, vocab, vector_out, target, s,
                                a.row_scale ? a.row_scale[row] : a.scale, a.cap);
    if (a.n_few)
        few_of_row<T>(a, row, logits, out);
}

cudaError_t mt_cuda_cross_entropy(const struct mt_cross_entropy *a, cudaStream_t stream)
{
    if (a->vocab > INT_MAX - PIECE) /* targets and indices in a row are 32-bit */
        return cudaErrorInvalidValue;
    bool vector_out = aligned_to(a->dlogits, 4 * mt_dtype_size(a->dtype)) && a->ld_dlogits % 4 == 0;
    return for_flag(rows_aligned<float>(a->logits, a->ld), [=](auto vector) {
        return for_dtype(a->dtype, [=](auto t) {
            return MT_LAUNCH((cross_entropy<decltype(t), vector.value>), grid_of(a->n), THREADS, 0, stream, *a,
                             vector_out);
        });
    });
}
