/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Carries every kind of graph that cuda/fused.c asks cuDNN for through its checks, for the GPUs that we build
 * for, described to cuDNN by their properties: needs no GPU. What is refused here is done by tiles there.
 */
#include <stdio.h>
#include <string.h>

#include "base/mem.h"
#include "fused.h"
#include "test.h"

struct gpu {
    int sm, shared, threads, multiprocessors;
};

static const struct gpu gpus[] = {
    {80, 166912, 2048, 108}, {86, 101376, 1536, 82},  {89, 101376, 1536, 128},
    {90, 232448, 2048, 132}, {100, 232448, 2048, 148}, {120, 101376, 1536, 170},
};

/* Query heads, key heads, head size: Qwen2.5-0.5B and 7B, Llama3-8B, Qwen3, Phi-like, one key head, tiny. */
static const struct heads {
    int64_t n_q, n_kv, d;
} heads[] = {{14, 2, 64}, {28, 4, 128}, {32, 8, 128}, {16, 8, 128}, {32, 32, 96}, {7, 1, 96}, {4, 2, 80},
             {4, 2, 16}, {7, 1, 24}, {8, 4, 256}};
/* Documents and their length: as they come in even batches; then as fused.c rounds them. */
static const struct batch {
    int64_t batch, len;
} even[] = {{1, 70}, {3, 333}, {8, 2048}, {1, 8192}},
  rounded[] = {{1, 80}, {32, 112}, {4, 1792}};
static const int64_t windows[] = {0, 64};

static const struct mt_fused_engine *engine;

static void describe_gpu(const struct gpu *g, char *buf, size_t len)
{
    snprintf(buf, len,
             "{\"maxGridSize\":[2147483647,65535,65535],\"maxBlockSize\":[1024,1024,64],"
             "\"deviceName\":\"test\",\"cudaDeviceId\":0,\"deviceVer\":%d,\"multiProcessorCount\":%d,"
             "\"driverVer\":13000,\"maxSharedMemoryPerBlockOptin\":%d,\"maxSharedMemoryPerBlock\":49152,"
             "\"reservedSharedMemoryPerBlock\":1024,\"totalGlobalMem\":25000000000,"
             "\"regsPerBlock\":65536,\"smClockRateKHz\":1700000,\"memClockRateKHz\":2600000,"
             "\"l2CacheSize\":50000000,\"warpSize\":32,\"maxRegistersPerSM\":65536,\"pciDeviceId\":0,"
             "\"maxCtasPerSM\":32,\"maxThreadsPerBlock\":1024,\"maxThreadsPerSM\":%d,\"isTccDriver\":0,"
             "\"supportCoopLaunch\":1}",
             g->sm / 10 * 100 + g->sm % 10 * 10, g->multiprocessors, g->shared, g->threads);
}

static struct mt_fused_shape shape_of(const struct heads *h, const struct batch *b, int64_t window)
{
    float scale = 0.125f;
    uint32_t bits;
    memcpy(&bits, &scale, sizeof(bits));
    int64_t ld = (h->n_q + 2 * h->n_kv) * h->d, ld_o = h->n_q * h->d;
    return (struct mt_fused_shape){.batch = b->batch, .n_q = h->n_q, .n_kv = h->n_kv, .len = b->len,
                                   .dim = h->d, .dim_v = h->d, .window = window < b->len ? window : 0,
                                   .scale_bits = bits, .q = {ld, h->d}, .k = {ld, h->d},
                                   .v = {ld, h->d}, .o = {ld_o, h->d}, .dq = {ld, h->d}, .dk = {ld, h->d},
                                   .dv = {ld, h->d}};
}

/* What fused.c counts on; for the rest it asks and takes a no. */
static bool expected(const struct gpu *g, const struct mt_fused_shape *s)
{
    if (!s->backward)
        return true;
    if (s->dim > 128)
        return g->sm == 90;
    return !s->ragged || (g->sm >= 90 && g->sm < 120);
}

static int check(const struct gpu *g, const char *properties, struct mt_fused_shape s)
{
    char why[256] = "";
    if (!s.backward)
        s.dq = s.dk = s.dv = (struct mt_fused_tensor){0, 0};
    s.total = s.ragged ? s.batch * s.len / 2 : 0;
    bool got = !engine->supports(&s, g->sm, properties, why, sizeof(why));
    if (got == expected(g, &s))
        return 0;
    printf("sm_%d %s %s: %d documents of %d, %d and %d heads of %d, window %d: %s %s\n", g->sm,
           s.backward ? "backward" : "forward", s.ragged ? "packed" : "fixed", (int)s.batch, (int)s.len,
           (int)s.n_q, (int)s.n_kv, (int)s.dim, (int)s.window, got ? "supported" : "refused:", why);
    return 1;
}

static int check_all(const struct gpu *g, bool backward, bool ragged, const struct batch *b, size_t n)
{
    char properties[1024];
    int wrong = 0;
    describe_gpu(g, properties, sizeof(properties));
    for (size_t h = 0; h < MT_ARRAY_LEN(heads); h++)
        for (size_t i = 0; i < n; i++)
            for (size_t w = 0; w < MT_ARRAY_LEN(windows); w++) {
                struct mt_fused_shape s = shape_of(&heads[h], &b[i], windows[w]);
                if (windows[w] && !s.window)
                    continue;
                s.backward = backward;
                s.ragged = ragged;
                wrong += check(g, properties, s);
            }
    return wrong;
}

TEST(cudnn_supports_what_we_ask_of_it)
{
    int wrong = 0;
    for (size_t g = 0; g < MT_ARRAY_LEN(gpus); g++) {
        wrong += check_all(&gpus[g], false, false, even, MT_ARRAY_LEN(even));
        wrong += check_all(&gpus[g], true, false, even, MT_ARRAY_LEN(even));
        wrong += check_all(&gpus[g], false, true, rounded, MT_ARRAY_LEN(rounded));
        wrong += check_all(&gpus[g], true, true, rounded, MT_ARRAY_LEN(rounded));
        wrong += check_all(&gpus[g], true, false, rounded, MT_ARRAY_LEN(rounded));
    }
    assert_int_equal(wrong, 0);
}

/* So that a yes means something. */
TEST(cudnn_refuses_what_it_cannot)
{
    char properties[1024], why[256] = "";
    struct mt_fused_shape s = shape_of(&(struct heads){4, 3, 64}, &even[0], 0);
    describe_gpu(&gpus[3], properties, sizeof(properties));
    assert_int_not_equal(engine->supports(&s, 90, properties, why, sizeof(why)), 0);
    assert_true(why[0] != 0);
    s = shape_of(&(struct heads){4, 2, 60}, &even[0], 0);
    assert_int_not_equal(engine->supports(&s, 90, properties, why, sizeof(why)), 0);
}

/* The heads of Qwen2.5-7B and of Qwen2.5-0.5B in documents that fill their rows, or packed; and one of them longer. */
static const struct mt_fused_shape *asked(size_t i)
{
    static struct mt_fused_shape s;
    s = shape_of(&heads[i & 1], i & 2 ? &rounded[1] : &even[i & 4 ? 3 : 2], i & 8 ? 64 : 0);
    s.ragged = (i & 2) != 0;
    s.backward = (i & 16) != 0;
    if (!s.backward)
        s.dq = s.dk = s.dv = (struct mt_fused_tensor){0, 0};
    s.total = s.ragged ? s.batch * s.len / 2 : 0;
    return &s;
}

/* A table for the log: which engine of cuDNN a call would run on, and whether making its plan compiles kernels, which
 * takes a second instead of a tenth. */
TEST(each_call_has_an_engine_with_a_name)
{
    enum { ASKED = 32, PACKED = 2, LONGER = 4 };
    for (size_t i = 0; i < ASKED; i++) {
        const struct mt_fused_shape *s = asked(i);
        if ((i & PACKED) && (i & LONGER)) /* the same again */
            continue;
        printf("%-8s %-6s %2lld documents of %4lld, heads of %3lld%s:", s->backward ? "backward" : "forward",
               s->ragged ? "packed" : "fixed", (long long)s->batch, (long long)s->len, (long long)s->dim,
               s->window ? ", window" : "");
        for (size_t g = 0; g < MT_ARRAY_LEN(gpus); g++) {
            char properties[1024], text[256] = "";
            describe_gpu(&gpus[g], properties, sizeof(properties));
            bool can = !engine->supports(s, gpus[g].sm, properties, text, sizeof(text));
            printf(" sm_%d %s%s", gpus[g].sm, can ? text : "refused", g + 1 < MT_ARRAY_LEN(gpus) ? ";" : "\n");
            assert_true(!can || !strncmp(text, "eng", 3));
        }
    }
}

int main(void)
{
    char why[256] = "";
    engine = mt_cuda_fused_engine(why, sizeof(why));
    if (!engine) {
        printf("no engine: %s\n", why);
        return 1;
    }
    return test_run();
}
