/* SPDX-License-Identifier: Apache-2.0 */
#include "workspace.h"

#include <limits.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "device/arena.h"

/* --- sums over rows ---------------------------------------------------------------------------- */

enum { MAX_PARTIALS = 1024, MIN_ROWS = 4, MIN_BIAS_ROWS = 32, BIAS_COLUMNS = 256 };
enum { MAX_CONV_PARTIALS = 64, MIN_CONV_ROWS = 64 }; /* each of taps rows */

size_t mt_cuda_sum_rows(size_t n)
{
    return MT_MAX(mt_div_up(n, MAX_PARTIALS), (size_t)MIN_ROWS);
}

size_t mt_cuda_more_sum_rows(size_t n)
{
    return MT_MAX(mt_div_up(n, MAX_PARTIALS), (size_t)MIN_BIAS_ROWS);
}

size_t mt_cuda_short_conv_bwd_rows(size_t n)
{
    return MT_MAX(mt_div_up(n, MAX_CONV_PARTIALS), (size_t)MIN_CONV_ROWS);
}

size_t mt_cuda_bias_bwd_rows(size_t n, size_t c)
{
    size_t blocks = mt_div_up(MAX_PARTIALS, mt_div_up(c, BIAS_COLUMNS));
    return MT_MAX(mt_div_up(n, blocks), (size_t)MIN_BIAS_ROWS);
}

/* Bytes of a row of c sums for each block of rows; enough for n rows or any fewer, which may form more blocks. */
static size_t partials_bytes(size_t n, size_t least_rows, size_t c)
{
    return MT_MIN(mt_div_up(n, least_rows), (size_t)MAX_PARTIALS) * c * sizeof(float);
}

/* The workspace of an operation with arguments `a`, in which blocks of its n rows have c sums each. */
#define SUMS(op, n, least_rows, c)                                                                 \
    size_t mt_cuda_##op##_workspace(const struct mt_##op *a)                                       \
    {                                                                                              \
        return partials_bytes(a->n, least_rows, c);                                                \
    }
SUMS(attention_sink_bwd, n, MIN_ROWS, a->o.n)
SUMS(delta_gates_bwd, fwd.n, MIN_BIAS_ROWS, 3 * a->fwd.a.n * a->fwd.a.dim)
SUMS(gated_norm_bwd, fwd.n, MIN_ROWS,
     (a->fwd.gate_first ? 1 : MT_CUDA_GATED_NORM_WARPS) * mt_gated_norm_weights(&a->fwd))
SUMS(layernorm_bwd, n, MIN_ROWS, (a->biased ? 2 : 1) * a->c)
SUMS(qk_rope_bwd, fwd.n, MIN_ROWS, 2 * a->dq.dim)
SUMS(rmsnorm_bwd, n, MIN_ROWS, a->c)
SUMS(router_stats, n, MIN_BIAS_ROWS, a->e)
SUMS(shared_gate_bwd, n, MIN_ROWS, a->c)
SUMS(xielu_bwd, n, MIN_ROWS, 2)

/* With fewer columns there are more blocks, so that the number of sums is about the same. */
size_t mt_cuda_bias_bwd_workspace(const struct mt_bias_bwd *a)
{
    size_t most = (size_t)MAX_PARTIALS * BIAS_COLUMNS + a->c;
    return MT_MIN(mt_div_up(a->n, MIN_BIAS_ROWS) * a->c, most) * sizeof(float);
}

/* The kernel needs none. */
size_t mt_cuda_attention_cached_workspace(const struct mt_attention_cached *)
{
    return 0;
}

size_t mt_cuda_route_lists_workspace(const struct mt_route_lists *a)
{
    return (mt_div_up(a->n, MT_CUDA_ROUTE_TOKENS) * (a->e + 1) + a->e) * sizeof(int32_t);
}

size_t mt_cuda_short_conv_bwd_workspace(const struct mt_short_conv_bwd *a)
{
    size_t blocks = MT_MIN(mt_div_up(a->fwd.n, MIN_CONV_ROWS), (size_t)MAX_CONV_PARTIALS);
    return blocks * a->fwd.x.n * a->fwd.x.dim * (a->fwd.taps + 1) * sizeof(float);
}

size_t mt_cuda_packed_gemm_workspace(const struct mt_packed_gemm *)
{
    return 0;
}

/* --- a workspace's parts ----------------------------------------------------------------------- */

/* The next part, aligned for every kernel and library. */
static void *take(char *base, size_t *at, size_t bytes)
{
    size_t here = *at;
    *at += mt_align_up(bytes, MT_ARENA_ALIGNMENT);
    return base ? base + here : NULL;
}

/* --- the gated delta rule ---------------------------------------------------------------------- */

enum { DELTA_PAD = 16 };

/* The jobs whose states are kept at a time, and of these every `every`-th: all, unless with fewer, and the others made
 * again, the jobs of all documents are done in fewer turns. floats: of all states; one: of a job's before a chunk. */
static void divide_states(struct mt_cuda_delta_buffers *r, size_t floats, size_t one, size_t chunks, size_t docs)
{
    size_t fewest = SIZE_MAX, at_once = 1;
    r->every = 1;
    for (size_t every = 1; every <= chunks; every *= 2) {
        size_t jobs = MT_MIN(floats / one / (mt_div_up(chunks, every) + (every - 1) * docs), r->n_jobs);
        size_t turns = jobs ? mt_div_up(docs * r->n_jobs, MT_MIN(docs * jobs, (size_t)MT_CUDA_DELTA_SLOTS)) : SIZE_MAX;
        if (turns < fewest) {
            fewest = turns;
            at_once = mt_div_up(r->n_jobs, mt_div_up(r->n_jobs, jobs));
            r->every = every;
        }
    }
    r->group = at_once * r->jobs.heads;
    r->between = r->states ? r->states + at_once * mt_div_up(chunks, r->every) * one : NULL;
}

struct mt_cuda_delta_buffers mt_cuda_delta_buffers_of(const struct mt_delta_rule *a)
{
    const size_t c = MT_DELTA_CHUNK;
    struct mt_delta_jobs jobs = mt_delta_jobs(a);
    size_t wk = mt_align_up(a->k.dim, DELTA_PAD), wv = mt_align_up(a->v.dim, DELTA_PAD), heads = jobs.heads;
    size_t n_jobs = a->k.n * jobs.of_key, slots = MT_MIN(a->n * n_jobs, (size_t)MT_CUDA_DELTA_SLOTS), at = 0;
    size_t chunks = mt_div_up(a->n, c), state = heads * wk * wv, one = chunks * state * sizeof(float); /* of a job */
    size_t all = MT_MIN(n_jobs * one, MT_MAX(one, (size_t)MT_CUDA_DELTA_STATES));
    size_t sums = mt_delta_partial_floats(a) * sizeof(float);
    struct mt_cuda_delta_buffers r = {.wk = (int)wk, .wv = (int)wv, .jobs = jobs, .n_jobs = n_jobs, .n_slots = slots,
                                      .kept = mt_delta_kept(a)};
    /* the matrices of struct work in kernels/delta_chunk.cuh */
    r.slot_floats = c * (4 * wk + 3 * wv + 3 * (wk + wv)) + 7 * c * c + 2 * heads * wk * wv;
    r.slots = take(a->workspace, &at, slots * r.slot_floats * sizeof(float));
    r.states = take(a->workspace, &at, all);
    divide_states(&r, all / sizeof(float), state, chunks, MT_MAX(a->n_docs, (size_t)1));
    if (sums) {
        r.dq = take(a->workspace, &at, sums);
        r.dk = take(a->workspace, &at, sums);
    }
    r.bytes = at;
    return r;
}

size_t mt_cuda_delta_rule_workspace(const struct mt_delta_rule *a)
{
    return mt_cuda_delta_buffers_of(a).bytes;
}

/* --- tiled attention --------------------------------------------------------------------------- */

/* A tile has at most MT_CUDA_TILE_SCORES floats of scores, or MT_CUDA_MIN_TILE_ROWS rows of them. */

size_t mt_cuda_tile_rows(size_t len, size_t n_q)
{
    size_t rows = MT_CUDA_TILE_ROWS;
    while (rows > MT_CUDA_MIN_TILE_ROWS && rows * len * n_q > MT_CUDA_TILE_SCORES)
        rows /= 2;
    return rows;
}

size_t mt_cuda_tile_keys(size_t n_q)
{
    size_t keys = MT_CUDA_TILE_SCORES / (MT_CUDA_TILE_ROWS * n_q) / MT_CUDA_COLUMN_ALIGN * MT_CUDA_COLUMN_ALIGN;
    return MT_MAX(keys, (size_t)MT_CUDA_COLUMN_ALIGN);
}

static size_t scores_of(size_t n_q, size_t rows, size_t keys)
{
    return n_q * rows * mt_align_up(keys, MT_CUDA_COLUMN_ALIGN);
}

/* The largest tile in backward, of any document of up to max_len. */
static size_t backward_scores(size_t max_len, size_t n_q)
{
    return scores_of(n_q, MT_MIN(max_len, (size_t)MT_CUDA_TILE_ROWS), MT_MIN(max_len, mt_cuda_tile_keys(n_q)));
}

/* The same, forward or backward. */
static size_t most_scores(size_t max_len, size_t n_q)
{
    size_t most = backward_scores(max_len, n_q);
    for (size_t rows = MT_CUDA_TILE_ROWS; rows >= MT_CUDA_MIN_TILE_ROWS; rows /= 2) {
        size_t len = rows == MT_CUDA_MIN_TILE_ROWS ? max_len : MT_MIN(max_len, MT_CUDA_TILE_SCORES / (rows * n_q));
        most = MT_MAX(most, scores_of(n_q, MT_MIN(rows, len), len));
    }
    return most;
}

size_t mt_cuda_tiled_len(const struct mt_attention *a)
{
    const char *want = getenv("MEGATRAIN_ATTENTION");
    bool own = (!want || !strcmp(want, "own")) && mt_cuda_flash_takes(a);
    return own ? MT_MIN(a->max_len, (size_t)MT_CUDA_TILED_LEN) : a->max_len;
}

struct mt_cuda_tiled_buffers mt_cuda_tiled_buffers_of(const struct mt_attention *a)
{
    size_t len = mt_cuda_tiled_len(a), rows = MT_MIN(len, (size_t)MT_CUDA_TILE_ROWS), at = 0;
    size_t scores = most_scores(len, a->q.n), backward = backward_scores(len, a->q.n);
    size_t keys = a->k.n * len, element = mt_dtype_size(a->dtype);
    char *base = a->workspace;
    struct mt_cuda_tiled_buffers r;
    r.s = take(base, &at, scores * sizeof(float));
    r.dp = take(base, &at, backward * sizeof(float));
    r.dq = take(base, &at, a->q.n * rows * a->q.dim * sizeof(float));
    r.dk = take(base, &at, keys * a->k.dim * sizeof(float));
    r.dv = take(base, &at, keys * a->v.dim * sizeof(float));
    r.p = a->dtype == MT_F32 ? r.s : take(base, &at, scores * element);
    r.ds = a->dtype == MT_F32 ? r.dp : take(base, &at, backward * element);
    r.bytes = at;
    return r;
}

/* --- attention of our own ---------------------------------------------------------------------- */

bool mt_cuda_flash_takes(const struct mt_attention *a)
{
    static const size_t widths[][2] = {{64, 64}, {96, 96}, {128, 128}, {192, 128}, {256, 256}};
    bool known = false;
    for (size_t i = 0; i < MT_ARRAY_LEN(widths); i++)
        known |= a->q.dim == widths[i][0] && a->v.dim == widths[i][1];
    return a->dtype == MT_BF16 && known && a->n + a->past <= INT_MAX / 2;
}

bool mt_cuda_own_first(int capability)
{
    const char *want = getenv("MEGATRAIN_ATTENTION");
    if (want)
        return !strcmp(want, "own");
    return capability / 10 == 8 || capability / 10 == 12;
}

struct mt_cuda_flash_buffers mt_cuda_flash_buffers_of(const struct mt_attention *a)
{
    size_t at = 0;
    struct mt_cuda_flash_buffers r;
    r.tiles = take(a->workspace, &at, (a->n + a->past) * 16);
    r.delta = take(a->workspace, &at, a->n * a->q.n * sizeof(float));
    r.bytes = at;
    return r;
}

/* --- fused attention --------------------------------------------------------------------------- */

enum { PAD_TOKENS = 4096, LINEAR_TOKENS = 32768 };
static const size_t most_for_all = (size_t)512 << 20; /* bytes of the scores' gradients of several groups of heads */
static const size_t most_for_one = (size_t)1 << 30;   /* and of one group */

size_t mt_cuda_padded_len(size_t len)
{
    size_t step = 16;
    while (step * 8 < len)
        step *= 2;
    return mt_align_up(len, step);
}

size_t mt_cuda_next_power(size_t n)
{
    size_t p = 1;
    while (p < n)
        p *= 2;
    return p;
}

size_t mt_cuda_fused_quadratic_bytes(size_t batch, size_t len, size_t n_q)
{
    return batch * n_q * mt_align_up(len, 64) * mt_align_up(len, 128) * 2;
}

size_t mt_cuda_fused_linear_bytes(size_t tokens, size_t n_q, const struct mt_attention *a)
{
    return tokens * n_q * (8 + (2 * a->q.dim + a->v.dim) * sizeof(float)) + ((size_t)1 << 20);
}

size_t mt_cuda_fused_total(const struct mt_attention *a)
{
    return MT_MIN(mt_cuda_padded_len(a->n), MT_MAX(a->n, a->most_n));
}

/* The longest document of up to len whose backward is fused: longer ones need no space for padded copies. */
static size_t longest_fused(size_t len, size_t group)
{
    while (len > 128 && mt_cuda_fused_quadratic_bytes(1, len, group) > most_for_one)
        len = (len - 1) / 128 * 128;
    return len;
}

struct mt_cuda_fused_buffers mt_cuda_fused_buffers_of(const struct mt_attention *a)
{
    size_t n = a->n, n_q = a->q.n, len = mt_cuda_padded_len(a->max_len), at = 0, batch = mt_cuda_next_power(n);
    /* each term grows with n and max_len: a smaller call fits the workspace that was planned for a larger one */
    size_t group = n_q / a->k.n, one = MT_MIN(mt_cuda_fused_quadratic_bytes(1, len, group), most_for_one);
    size_t all = MT_MIN(n_q * (n + len) * mt_align_up(len, 128) * 2, most_for_all);
    char *base = a->workspace;
    struct mt_cuda_fused_buffers r = {
        .pad_tokens = MT_MAX(longest_fused(len, group), MT_MIN((size_t)PAD_TOKENS, 2 * n))};
    size_t tokens = MT_MAX(MT_MIN(mt_cuda_fused_total(a), (size_t)LINEAR_TOKENS), r.pad_tokens);
    r.stats = take(base, &at, MT_MAX(n, r.pad_tokens) * n_q * sizeof(float));
    r.lens = take(base, &at, batch * sizeof(int32_t));
    r.tables = take(base, &at, MT_CUDA_FUSED_TABLES * (batch + 1) * sizeof(int64_t));
    r.padded = take(base, &at, r.pad_tokens * 2 * (n_q + a->k.n) * (a->q.dim + a->v.dim) * 2);
    r.lib_bytes = mt_cuda_fused_linear_bytes(tokens, n_q, a) + MT_MAX(one, all);
    r.lib = take(base, &at, r.lib_bytes);
    r.bytes = at;
    return r;
}

/* --- of all operations ------------------------------------------------------------------------- */

static size_t attention_workspace(int capability, const struct mt_attention *a)
{
    size_t bytes = mt_cuda_tiled_buffers_of(a).bytes;
    if (a->dtype != MT_BF16 || !a->n || !a->max_len)
        return bytes;
    bytes = MT_MAX(bytes, mt_cuda_flash_buffers_of(a).bytes);
    bool never_fused = mt_cuda_own_first(capability) && mt_cuda_flash_takes(a);
    return never_fused ? bytes : MT_MAX(bytes, mt_cuda_fused_buffers_of(a).bytes);
}

size_t mt_cuda_attention_workspace(const struct mt_attention *a)
{
    return attention_workspace(0, a);
}

size_t mt_cuda_workspace(int capability, enum mt_dev_op op, const void *args)
{
    if (op == MT_DEV_ATTENTION)
        return attention_workspace(capability, args);
    switch (op) {
#define WITHOUT(ID, name, type)
#define WITH(ID, name, type)                                                                       \
    case MT_DEV_##ID:                                                                              \
        return mt_cuda_##name##_workspace(args);
        MT_DEVICE_OPS(WITHOUT, WITH)
#undef WITHOUT
#undef WITH
    default:
        return 0;
    }
}
