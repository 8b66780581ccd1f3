/* SPDX-License-Identifier: Apache-2.0 */
/*
 * y[t] = silu(s[t]), s[t] = bias + sum over j of w[j] x[t - taps + 1 + j] within the document. Backward, with ds = dy
 * silu': dx[t] = sum over j of w[j] ds[t + taps - 1 - j], dw[j] = sum over t of ds[t] x[t - taps + 1 + j], dbias = sum
 * of ds. Forward: a thread has an element. Backward: a thread goes down a channel of a block of rows, and on for the
 * taps - 1 rows after it; a block's sums of dw and dbias are then folded (fold.cu). Repeated reads of x are the cache's.
 */
#include "documents.cuh"
#include "launch.cuh"
#include "reduce.cuh"
#include "scalar.cuh"
#include "workspace.h"

static constexpr unsigned THREADS = 128;

template <typename T> MT_DEVICE T *channel_of(const struct mt_heads &h, size_t row, size_t channel)
{
    return static_cast<T *>(h.p) + row * h.ld + channel / h.dim * h.stride + channel % h.dim;
}

/* What a document has of p. */
template <typename T> MT_DEVICE const T *carried_at(const void *p, const struct mt_carried &c, size_t doc)
{
    return reinterpret_cast<const T *>(static_cast<const char *>(p) + static_cast<size_t>(c.place[doc]) * c.ld_bytes);
}

/* x of a channel `back` rows before row i of the document; NULL: there is none. x: the channel's of all rows. */
template <typename T>
MT_DEVICE const T *earlier(const struct mt_short_conv &a, const T *x, size_t channel, size_t doc, size_t i, size_t back)
{
    const struct mt_carried &c = a.carried;
    if (i >= back)
        return x + (static_cast<size_t>(a.cu_seqlens[doc]) + i - back) * a.x.ld;
    size_t at = (a.taps - 1 + i - back) * a.x.n * a.x.dim + channel;
    if (!c.after)
        return doc || !a.handed.from ? nullptr : static_cast<const T *>(a.handed.from) + at;
    if (i + static_cast<size_t>(c.past[doc]) < back)
        return nullptr;
    return carried_at<T>(c.before, c, doc) + at;
}

/* s of a document's row. */
template <typename T>
MT_DEVICE float sum_of(const struct mt_short_conv &a, const T *x, const T *w, float bias, size_t row, size_t doc,
                       size_t channel)
{
    float s = bias;
    size_t i = row - static_cast<size_t>(a.cu_seqlens[doc]);
    MT_UNROLL(1)
    for (size_t j = 0; j < a.taps; j++) {
        const T *at = earlier(a, x, channel, doc, i, a.taps - 1 - j);
        if (at)
            s = fmaf(load(w + j), load(at), s);
    }
    return s;
}

template <typename T> MT_DEVICE float bias_of(const struct mt_short_conv &a, size_t channel)
{
    return a.bias ? load(static_cast<const T *>(a.bias) + channel) : 0.0f;
}

template <typename T>
static __global__ void __launch_bounds__(THREADS) convolve(struct mt_short_conv a, unsigned tiles)
{
    size_t row = blockIdx.x / tiles, c = blockIdx.x % tiles * THREADS + threadIdx.x;
    if (c >= a.x.n * a.x.dim)
        return;
    const T *w = static_cast<const T *>(a.w) + c * a.taps;
    size_t doc = document_of(a.cu_seqlens, a.n_docs, row);
    float s = sum_of(a, channel_of<T>(a.x, 0, c), w, bias_of<T>(a, c), row, doc, c);
    store(channel_of<T>(a.y, row, c), s * sigmoid<T>(s));
}

/* A thread leaves a channel's last rows of a document, or of the one that is handed on, in order: none is overwritten
 * before it is read. */
template <typename T>
static __global__ void __launch_bounds__(THREADS) leave_rows(struct mt_short_conv a, unsigned tiles)
{
    size_t doc = blockIdx.x / tiles, c = blockIdx.x % tiles * THREADS + threadIdx.x, channels = a.x.n * a.x.dim;
    if (c >= channels)
        return;
    T *to = static_cast<T *>(a.handed.to) + c;
    if (a.carried.after)
        to = const_cast<T *>(carried_at<T>(a.carried.after, a.carried, doc)) + c;
    else
        doc = a.n_docs - 1;
    size_t rows = static_cast<size_t>(a.cu_seqlens[doc + 1] - a.cu_seqlens[doc]);
    MT_UNROLL(1)
    for (size_t k = 0; k + 1 < a.taps; k++) {
        const T *from = earlier(a, channel_of<T>(a.x, 0, c), c, doc, rows, a.taps - 1 - k);
        store(to + k * channels, from ? load(from) : 0.0f);
    }
}

/* Whether the document has the row, here or in the next piece. */
MT_DEVICE bool has_row(const struct mt_short_conv_bwd &b, size_t doc, size_t row)
{
    return row < static_cast<size_t>(b.fwd.cu_seqlens[doc + 1]) || (b.handed.from && doc + 1 == b.fwd.n_docs);
}

template <typename T>
static __global__ void __launch_bounds__(THREADS, 1)
    convolve_backward(struct mt_short_conv_bwd b, size_t rows, unsigned tiles)
{
    const struct mt_short_conv &a = b.fwd;
    size_t channels = a.x.n * a.x.dim, c = blockIdx.x % tiles * THREADS + threadIdx.x, taps = a.taps;
    size_t first = blockIdx.x / tiles * rows, end = first + rows < a.n ? first + rows : a.n, last = end + taps - 1;
    if (c >= channels)
        return;
    const T *x = channel_of<T>(a.x, 0, c), *weights = static_cast<const T *>(a.w) + c * taps;
    float bias = bias_of<T>(a, c), dbias = 0;
    float w[MT_CONV_MAX_TAPS], dw[MT_CONV_MAX_TAPS] = {}, ds[MT_CONV_MAX_TAPS] = {}; /* ds[k]: of k rows before */
    for (int j = 0; j < MT_CONV_MAX_TAPS; j++)
        w[j] = j < static_cast<int>(taps) ? load(weights + j) : 0.0f;
    size_t doc = document_of(a.cu_seqlens, a.n_docs, first), doc_x = doc;
    MT_UNROLL(1)
    for (size_t row = first; row < last; row++) {
        for (int k = MT_CONV_MAX_TAPS - 1; k > 0; k--)
            ds[k] = ds[k - 1];
        ds[0] = 0;
        if (row < a.n) {
            if (row >= static_cast<size_t>(a.cu_seqlens[doc + 1]))
                doc++;
            size_t i = row - static_cast<size_t>(a.cu_seqlens[doc]);
            float s = sum_of(a, x, weights, bias, row, doc, c), e = sigmoid<T>(s);
            ds[0] = load(channel_of<T>(b.dy, row, c)) * (e * (1.0f + s * (1.0f - e)));
            dbias += row < end ? ds[0] : 0.0f;
            for (int j = 0; j < MT_CONV_MAX_TAPS; j++) {
                bool adds = j < static_cast<int>(taps) && row < end;
                const T *at = adds ? earlier(a, x, c, doc, i, taps - 1 - j) : nullptr;
                if (at)
                    dw[j] = fmaf(ds[0], load(at), dw[j]);
            }
        } else if (b.handed.from) {
            ds[0] = static_cast<const float *>(b.handed.from)[(row - a.n) * channels + c];
        }
        if (b.handed.to && row + 1 < taps)
            static_cast<float *>(b.handed.to)[row * channels + c] = has_row(b, 0, row) ? ds[0] : 0.0f;
        if (row + 1 < first + taps)
            continue;
        size_t at = row + 1 - taps; /* whose dx is complete */
        if (at >= static_cast<size_t>(a.cu_seqlens[doc_x + 1]))
            doc_x++;
        float dx = 0;
        for (int j = 0; j < MT_CONV_MAX_TAPS; j++)
            if (j < static_cast<int>(taps) && has_row(b, doc_x, row - j))
                dx = fmaf(w[j], ds[j], dx);
        store(channel_of<T>(b.dx, at, c), dx);
    }
    if (!b.dw && !b.dbias)
        return;
    float *partials = static_cast<float *>(b.workspace) + blockIdx.x / tiles * channels * (taps + 1);
    float *partial = partials + c * taps;
    partials[channels * taps + c] = dbias;
    for (int j = 0; j < MT_CONV_MAX_TAPS; j++)
        if (j < static_cast<int>(taps))
            partial[j] = dw[j];
}

template <typename T> static cudaError_t run(const struct mt_short_conv *a, cudaStream_t stream)
{
    unsigned tiles = static_cast<unsigned>(ceil_div(a->x.n * a->x.dim, THREADS));
    cudaError_t rc = MT_LAUNCH(convolve<T>, grid_of(a->n * tiles), THREADS, 0, stream, *a, tiles);
    size_t left = a->carried.after ? a->n_docs : a->handed.to ? 1 : 0;
    if (rc == cudaSuccess && left)
        rc = MT_LAUNCH(leave_rows<T>, grid_of(left * tiles), THREADS, 0, stream, *a, tiles);
    return rc;
}

cudaError_t mt_cuda_short_conv(const struct mt_short_conv *a, cudaStream_t stream)
{
    return a->dtype == MT_BF16 ? run<bf16>(a, stream) : run<float>(a, stream);
}

cudaError_t mt_cuda_short_conv_bwd(const struct mt_short_conv_bwd *b, cudaStream_t stream)
{
    const struct mt_short_conv *a = &b->fwd;
    size_t rows = mt_cuda_short_conv_bwd_rows(a->n), blocks = ceil_div(a->n, rows), channels = a->x.n * a->x.dim;
    unsigned tiles = static_cast<unsigned>(ceil_div(a->x.n * a->x.dim, THREADS));
    cudaError_t rc;
    if (a->dtype == MT_BF16)
        rc = MT_LAUNCH(convolve_backward<bf16>, grid_of(blocks * tiles), THREADS, 0, stream, *b, rows, tiles);
    else
        rc = MT_LAUNCH(convolve_backward<float>, grid_of(blocks * tiles), THREADS, 0, stream, *b, rows, tiles);
    const float *partials = static_cast<const float *>(b->workspace);
    size_t ld = channels * (a->taps + 1), taps = channels * a->taps;
    if (rc == cudaSuccess && b->dw)
        rc = mt_cuda_fold(b->dw, partials, blocks, ld, taps, stream);
    if (rc == cudaSuccess && b->dbias)
        rc = mt_cuda_fold(b->dbias, partials + taps, blocks, ld, channels, stream);
    return rc;
}
