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
