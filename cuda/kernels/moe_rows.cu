/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Gathers rows of tokens for an expert, or of the embedding for tokens, and adds outputs of experts to the tokens' sums. A block takes one or more rows,
 * or a part of one; a thread takes vectors at a distance of the block's width, all loaded before the first is stored.
 * Bytes moved per element of s bytes: gather 2 s, combine s for each of the token's entries, and 8.
 */
#include "launch.cuh"
#include "scalar.cuh"

enum { UNROLL = 2 };

/* The rows of a list, times their weights, or without weights `scale`. */
template <typename T, int N>
static __global__ void __launch_bounds__(256)
    gather(struct mt_moe_gather a, float scale, size_t vecs, unsigned columns)
{
    size_t row, at;
    row_of_tile(columns, UNROLL, &row, &at);
    if (row >= a.n_padded)
        return;
    bool routed = row < a.n;
    unsigned entry = routed ? static_cast<unsigned>(a.list[row]) : 0u;
    float w = routed && a.weights ? a.weights[entry] : scale, x[UNROLL][N] = {};
    const T *src = static_cast<const T *>(a.x) + entry / static_cast<unsigned>(a.k) * a.c;
    T *dst = static_cast<T *>(a.out) + row * a.c;
    if (routed)
        each_vector<UNROLL>(at, vecs, [&](int u, size_t i) { load_n<T, N>(src + i * N, x[u]); });
    each_vector<UNROLL>(at, vecs, [&](int u, size_t i) {
        for (int k = 0; k < N; k++)
            x[u][k] *= w;
        store_n<T, N>(dst + i * N, x[u]);
    });
}

/*
 * The token's first entry from row `from` of src on; rows are counted from the last one if a.down. Returns its row, or
 * a.rows or more: there is none. An entry that is elsewhere has a row that is too great, whichever way it is counted.
 */
MT_DEVICE unsigned next_entry(const struct mt_moe_combine &a, size_t token, unsigned from, size_t *entry)
{
    unsigned rows = static_cast<unsigned>(a.rows), first = static_cast<unsigned>(a.first), best = UINT_MAX;
    MT_UNROLL(4)
    for (size_t e = token * a.k; e < (token + 1) * a.k; e++) {
        unsigned row = static_cast<unsigned>(a.places[e]) - first;
        row = a.down ? rows - 1 - row : row;
        if (row < rows && row >= from && row < best) {
            best = row;
            *entry = e;
        }
    }
    return best;
}

template <typename T, int N>
static __global__ void __launch_bounds__(256) combine(struct mt_moe_combine a, size_t vecs, unsigned columns)
{
    size_t token, at, entry = 0;
    row_of_tile(columns, UNROLL, &token, &at);
    if (token >= a.n)
        return;
    float x[UNROLL][N] = {}, sum[UNROLL][N] = {}, *dst = a.sum + token * a.c;
    bool any = false;
    for (unsigned row, from = 0; (row = next_entry(a, token, from, &entry)) < a.rows; from = row + 1) {
        float w = a.weights ? a.weights[entry] : 1.0f;
        const T *src = static_cast<const T *>(a.src) + (a.down ? a.rows - 1 - row : row) * a.c;
        each_vector<UNROLL>(at, vecs, [&](int u, size_t i) {
            load_n<T, N>(src + i * N, x[u]);
            if (!any)
                load_floats<N>(dst + i * N, sum[u]);
        });
        any = true;
        MT_UNROLL(UNROLL)
        for (int u = 0; u < UNROLL; u++)
            for (int k = 0; k < N; k++)
                sum[u][k] += w * x[u][k];
    }
    if (any)
        each_vector<UNROLL>(at, vecs, [&](int u, size_t i) { store_floats<N>(dst + i * N, sum[u]); });
}

static cudaError_t gather_scaled(const struct mt_moe_gather *a, float scale, cudaStream_t stream)
{
    return for_vectors(a->dtype, a->c, [=](auto v) {
        using V = decltype(v);
        row_tiles t = tile_rows(a->n_padded, a->c / V::n, UNROLL);
        return MT_LAUNCH((gather<typename V::type, V::n>), grid_of(t.blocks), dim3(t.x, t.y), 0, stream, *a, scale,
                         a->c / V::n, t.columns);
    });
}

cudaError_t mt_cuda_moe_gather(const struct mt_moe_gather *a, cudaStream_t stream)
{
    return gather_scaled(a, 1, stream);
}

cudaError_t mt_cuda_embedding(const struct mt_embedding *a, cudaStream_t stream)
{
    const struct mt_moe_gather of = {a->n, a->n, a->c, 1, a->dtype, a->ids, a->table, nullptr, a->out};
    return gather_scaled(&of, scale_in(a->dtype, a->scale), stream);
}

cudaError_t mt_cuda_moe_combine(const struct mt_moe_combine *a, cudaStream_t stream)
{
    return for_vectors(a->dtype, a->c, [=](auto v) {
        using V = decltype(v);
        row_tiles t = tile_rows(a->n, a->c / V::n, UNROLL);
        return MT_LAUNCH((combine<typename V::type, V::n>), grid_of(t.blocks), dim3(t.x, t.y), 0, stream, *a,
                         a->c / V::n, t.columns);
    });
}
