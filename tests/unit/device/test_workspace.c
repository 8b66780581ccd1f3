/* SPDX-License-Identifier: Apache-2.0 */
/* A workspace that is planned for the longest micro-batch serves every shorter one: it has what their blocks of rows need. */

#include "cuda/cuda_kind.h"
#include "cuda/workspace.h"
#include "test.h"

enum { MOST = 33000 };

static const struct mt_device_kind *const kinds[] = {&mt_cpu_kind, &mt_cuda_kind};
static const size_t longest[] = {4500, 10000, 24000, 32000, MOST};

static size_t norm(const struct mt_device_kind *k, const struct mt_device_limits *l, size_t n, size_t c)
{
    return k->workspace(l, MT_DEV_RMSNORM_BWD, &(struct mt_rmsnorm_bwd){.n = n, .c = c});
}

static size_t bias(const struct mt_device_kind *k, const struct mt_device_limits *l, size_t n, size_t c)
{
    return k->workspace(l, MT_DEV_BIAS_BWD, &(struct mt_bias_bwd){.n = n, .c = c});
}

static size_t rope(const struct mt_device_kind *k, const struct mt_device_limits *l, size_t n, size_t c)
{
    return k->workspace(l, MT_DEV_QK_ROPE_BWD, &(struct mt_qk_rope_bwd){.fwd.n = n, .dq = mt_heads(NULL, c, 8, c / 16)});
}

static size_t stats(const struct mt_device_kind *k, const struct mt_device_limits *l, size_t n, size_t c)
{
    return k->workspace(l, MT_DEV_ROUTER_STATS, &(struct mt_router_stats){.n = n, .e = c / 16});
}

static size_t gate(const struct mt_device_kind *k, const struct mt_device_limits *l, size_t n, size_t c)
{
    return k->workspace(l, MT_DEV_SHARED_GATE_BWD, &(struct mt_shared_gate_bwd){.n = n, .c = c});
}

static size_t sink(const struct mt_device_kind *k, const struct mt_device_limits *l, size_t n, size_t c)
{
    return k->workspace(l, MT_DEV_ATTENTION_SINK_BWD, &(struct mt_attention_sink_bwd){.n = n, .o = mt_heads(NULL, c, c / 64, 64)});
}

TEST(shorter_micro_batches_need_no_more)
{
    size_t (*const ops[])(const struct mt_device_kind *, const struct mt_device_limits *, size_t, size_t) = {norm, bias, rope, stats,
                                                                                                        gate, sink};
    for (size_t k = 0; k < sizeof(kinds) / sizeof(kinds[0]); k++) {
        struct mt_device_limits l = mt_device_kind_limits(kinds[k], (size_t)1 << 30, 4);
        for (size_t o = 0; o < sizeof(ops) / sizeof(ops[0]); o++)
            for (size_t i = 0; i < sizeof(longest) / sizeof(longest[0]); i++) {
                size_t planned = ops[o](kinds[k], &l, longest[i], 2048);
                for (size_t n = 1; n <= longest[i]; n += 1 + n % 3)
                    if (ops[o](kinds[k], &l, n, 2048) > planned)
                        fail_msg("%s, operation %zu: %zu rows need more than %zu", kinds[k]->name, o, n, longest[i]);
                for (size_t c = 64; c <= 2048 && ops[o] == bias; c += 64)
                    if (bias(kinds[k], &l, longest[i], c) > planned)
                        fail_msg("%s: a bias of %zu needs more than one of 2048", kinds[k]->name, c);
            }
    }
}

/* The sums that a kernel writes: a row of them for each block of so many rows, of the n that there are. */
TEST(each_block_of_rows_has_its_sums)
{
    struct mt_device_limits l = mt_device_kind_limits(&mt_cuda_kind, (size_t)1 << 30, 4);
    for (size_t i = 0; i < sizeof(longest) / sizeof(longest[0]); i++)
        for (size_t n = 1; n <= longest[i]; n++) {
            size_t rows = (n + 1023) / 1024 > 4 ? (n + 1023) / 1024 : 4;
            if ((n + rows - 1) / rows * 4096 * sizeof(float) > norm(&mt_cuda_kind, &l, longest[i], 4096))
                fail_msg("%zu rows write beyond what is planned for %zu", n, longest[i]);
        }
}

/* To 16, 32, ..., 128, then to four lengths of each doubling: 160, 192, 224, 256, 320, ... */
TEST(lengths_are_padded_to_few_others)
{
    size_t padded = 16, step = 16;
    for (size_t len = 1; len <= 70000; len++) {
        if (len > padded) {
            if (padded >= 128 && !(padded & (padded - 1)))
                step = padded / 4;
            padded += step;
        }
        assert_int_equal(mt_cuda_padded_len(len), padded);
    }
}

static size_t bytes_between(const void *a, const void *b)
{
    return (size_t)((const char *)b - (const char *)a);
}

/* Of attention by tiles, as attention_tiled.c takes them: those of a document of `len` tokens. */
static void check_tiles(size_t n_q, size_t len, size_t window)
{
    static char base[1]; /* no part is touched */
    struct mt_attention a = {.n = len, .max_len = len, .window = window, .dtype = MT_F32, .workspace = base,
                             .q = mt_heads(NULL, n_q * 64, n_q, 64), .k = mt_heads(NULL, 64, 1, 64),
                             .v = mt_heads(NULL, 64, 1, 64)};
    struct mt_cuda_tiled_buffers r = mt_cuda_tiled_buffers_of(&a);
    size_t rows = mt_cuda_tile_rows(len, n_q), most = mt_cuda_tile_keys(n_q);
    size_t room = bytes_between(r.s, r.dp) / sizeof(float);
    assert_true(rows % MT_CUDA_MIN_TILE_ROWS == 0 && most % MT_CUDA_COLUMN_ALIGN == 0);
    for (size_t q0 = 0; q0 < len; q0 += rows) {
        size_t here = MT_MIN(rows, len - q0), first = window && q0 + 1 > window ? q0 + 1 - window : 0;
        size_t keys = q0 + here - first / MT_CUDA_COLUMN_ALIGN * MT_CUDA_COLUMN_ALIGN;
        if (n_q * here * mt_align_up(keys, MT_CUDA_COLUMN_ALIGN) > room)
            fail_msg("forward: %zu queries and %zu keys of %zu heads, and room for %zu scores", here, keys, n_q, room);
    }
    size_t here = MT_MIN(len, (size_t)MT_CUDA_TILE_ROWS), keys = MT_MIN(len, most);
    room = MT_MIN(room, bytes_between(r.dp, r.dq) / sizeof(float));
    if (n_q * here * mt_align_up(keys, MT_CUDA_COLUMN_ALIGN) > room)
        fail_msg("backward: %zu queries and %zu keys of %zu heads, and room for %zu scores", here, keys, n_q, room);
    assert_true(bytes_between(r.dq, r.dk) >= n_q * here * 64 * sizeof(float));
    assert_true(bytes_between(r.dk, r.dv) >= len * 64 * sizeof(float));
    assert_true(r.bytes - bytes_between(base, r.dv) >= len * 64 * sizeof(float));
}

TEST(tiles_of_documents_of_real_lengths_have_room)
{
    static const size_t heads[] = {1, 12, 32, 64, 96, 128}, windows[] = {0, 128, 5000};
    static const size_t lens[] = {1, 31, 511, 513, 4100, 32768, 100001, 131072, 262144, (size_t)1 << 20};
    assert_int_equal(setenv("MEGATRAIN_ATTENTION", "tiled", 1), 0); /* else room ends where our own are trusted */
    for (size_t h = 0; h < MT_ARRAY_LEN(heads); h++)
        for (size_t i = 0; i < MT_ARRAY_LEN(lens); i++)
            for (size_t w = 0; w < MT_ARRAY_LEN(windows); w++)
                check_tiles(heads[h], lens[i], windows[w]);
}

static struct mt_cuda_delta_buffers states_of(size_t n, size_t docs, bool plain)
{
    static char base[1]; /* no part is touched */
    struct mt_delta_rule a = {.n = n, .n_docs = docs, .plain = plain, .workspace = base,
                              .q = mt_heads(NULL, 2048, 16, 128), .k = mt_heads(NULL, 2048, 16, 128),
                              .v = mt_heads(NULL, 8192, 64, 128)};
    struct mt_cuda_delta_buffers r = mt_cuda_delta_buffers_of(&a);
    size_t chunks = mt_div_up(n, (size_t)MT_DELTA_CHUNK), one = (size_t)r.wk * (size_t)r.wv * sizeof(float);
    size_t end = r.dq ? bytes_between(base, r.dq) : r.bytes;
    size_t blocks = MT_MIN(docs * r.group / r.jobs.heads, r.n_slots);
    assert_true(r.group >= r.jobs.heads && r.group % r.jobs.heads == 0);
    if (mt_div_up(chunks, r.every) * r.group * one > bytes_between(r.states, r.between))
        fail_msg("%zu chunks of %zu heads have no room", chunks, r.group);
    if (blocks * (r.every - 1) * r.jobs.heads * one > end - bytes_between(base, r.between))
        fail_msg("%zu states between of %zu blocks have no room", r.every - 1, blocks);
    return r;
}

/* The states before the chunks of documents, of the value heads that are done at a time. */
TEST(states_of_long_documents_have_room)
{
    static const size_t lens[] = {1, 64, 65, 16384, 32768, 131072, (size_t)1 << 20}, docs[] = {1, 2, 16, 1000};
    for (size_t i = 0; i < MT_ARRAY_LEN(lens); i++)
        for (size_t d = 0; d < MT_ARRAY_LEN(docs); d++)
            for (int plain = 0; plain < 2 && docs[d] <= lens[i]; plain++)
                states_of(lens[i], docs[d], plain);
}

/* A key head's four value heads have 256 KiB a chunk: in 512 MiB, of 16 key heads those of 128 chunks. */
TEST(all_heads_of_a_long_document_are_done_at_once)
{
    assert_int_equal(states_of(8192, 1, false).every, 1);
    assert_int_equal(states_of(16384, 1, false).every, 4);
    assert_int_equal(states_of(16384, 1, false).group, 64);
    assert_int_equal(states_of(16384, 16, false).every, 1); /* which fill the GPU by eights, too */
    assert_int_equal(states_of(16384, 16, false).group, 32);
    assert_int_equal(states_of(32768, 1, false).group, 64);
}
