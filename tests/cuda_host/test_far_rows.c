/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Matrices of more than 2^32 elements, of which an operation touches a few rows: the same bits as with these rows side
 * by side. The emulation's device memory is there when it is touched, so that it takes no such memory to test it.
 * Operations on whole matrices of that size are not here: their rows are counted in the same way.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/dtype.h"
#include "base/mem.h"
#include "base/strbuf.h"
#include "device/ops.h"
#include "kinds/kinds.h"

enum { ROWS = 5, WIDTH = 64, HEAD = 16, N_Q = 2, N_KV = 1, MAX_BUFFERS = 32, MAX_RESULT = 1 << 14 };
enum { OWN_ROWS = 300, OWN_HEAD = 64, MOST_WIDTH = N_Q * OWN_HEAD }; /* of attention of our own */
static const size_t budget = (size_t)400 << 30;

/* The distance of rows, and the index of a row that is not one of the first. */
struct place {
    size_t ld, row;
};
static const struct place near = {WIDTH + 8, 2}, far = {((size_t)1 << 31) + 8, ((size_t)1 << 29) + 1};
static const struct place own_near = {MOST_WIDTH + 8, 0}, own_far = {INT32_MAX / 128 / 8 * 8, 0}; /* the most it takes */

static mt_device *dev;
static struct mt_err err;
static void *buffers[MAX_BUFFERS];
static int n_buffers;
static char result[MAX_RESULT];
static size_t n_result;

static void must(int rc)
{
    if (rc) {
        printf("FAIL %s\n", err.msg);
        exit(1);
    }
}

static void *take(size_t bytes)
{
    if (n_buffers == MAX_BUFFERS)
        abort();
    must(mt_device_alloc(dev, bytes, "test", &buffers[n_buffers], &err));
    return buffers[n_buffers++];
}

static void *upload(const void *host, size_t bytes)
{
    void *p = take(bytes);
    must(mt_device_copy(dev, MT_STREAM_COMPUTE, &(struct mt_copy){p, bytes, host, bytes, bytes, 1}, &err));
    must(mt_device_sync(dev, &err));
    return p;
}

/* A row of a matrix. */
static char *row_at(void *p, enum mt_dtype t, size_t row, size_t ld)
{
    return (char *)p + row * ld * mt_dtype_size(t);
}

/* Writes `width` values at p: a function of the seed, or 0 for seed 0. */
static void put(char *p, enum mt_dtype t, size_t width, unsigned seed)
{
    char host[4 * MOST_WIDTH];
    for (size_t i = 0; i < width; i++) {
        float v = seed ? (float)((seed * 7919 + (unsigned)i * 104729) % 509) / 509.0f - 0.4f : 0.0f;
        uint16_t half = mt_f32_to_bf16(v);
        memcpy(host + i * mt_dtype_size(t), t == MT_F32 ? (void *)&v : &half, mt_dtype_size(t));
    }
    size_t bytes = width * mt_dtype_size(t);
    must(mt_device_copy(dev, MT_STREAM_COMPUTE, &(struct mt_copy){p, bytes, host, bytes, bytes, 1}, &err));
    must(mt_device_sync(dev, &err));
}

static void *rows_of(enum mt_dtype t, size_t n, size_t width, size_t ld, unsigned seed)
{
    void *p = take(((n - 1) * ld + width) * mt_dtype_size(t));
    for (size_t i = 0; i < n; i++)
        put(row_at(p, t, i, ld), t, width, seed ? seed + (unsigned)i : 0);
    return p;
}

static void keep(const void *p, enum mt_dtype t, size_t width)
{
    size_t bytes = width * mt_dtype_size(t);
    if (n_result + bytes > sizeof(result))
        abort();
    must(mt_device_copy(dev, MT_STREAM_COMPUTE, &(struct mt_copy){result + n_result, bytes, p, bytes, bytes, 1}, &err));
    must(mt_device_sync(dev, &err));
    n_result += bytes;
}

static void keep_rows(void *p, enum mt_dtype t, size_t n, size_t width, size_t ld)
{
    for (size_t i = 0; i < n; i++)
        keep(row_at(p, t, i, ld), t, width);
}

/* --- distances of rows --------------------------------------------------------------------------- */

static void cross_entropy(const struct place *at)
{
    static const int32_t targets[ROWS] = {3, -1, 40, 7, 0};
    void *d = rows_of(MT_BF16, ROWS, WIDTH, at->ld, 0);
    struct mt_cross_entropy a = {.n = ROWS, .vocab = WIDTH, .ld = at->ld, .dtype = MT_BF16, .dlogits = d,
                                 .ld_dlogits = at->ld, .scale = 1, .targets = upload(targets, sizeof(targets)),
                                 .logits = rows_of(MT_F32, ROWS, WIDTH, at->ld, 1), .loss = take(64)};
    must(mt_op_cross_entropy(dev, &a, &err));
    keep(a.loss, MT_F32, ROWS);
    keep_rows(d, MT_BF16, ROWS, WIDTH, at->ld);
}

static void bias_bwd(const struct place *at)
{
    struct mt_bias_bwd a = {.n = ROWS, .c = WIDTH, .ld = at->ld, .dtype = MT_BF16,
                            .dy = rows_of(MT_BF16, ROWS, WIDTH, at->ld, 1), .x = rows_of(MT_BF16, ROWS, WIDTH, at->ld, 9),
                            .db = rows_of(MT_F32, 1, WIDTH, WIDTH, 0)};
    a.workspace = take(mt_op_bias_bwd_workspace(dev, &a));
    must(mt_op_bias_bwd(dev, &a, &err));
    keep(a.db, MT_F32, WIDTH);
}

/* Queries and keys in rows of both. */
static void sides(void *rows, size_t ld, struct mt_heads *q, struct mt_heads *k)
{
    *q = mt_heads(rows, ld, N_Q, HEAD);
    *k = mt_heads((char *)rows + N_Q * HEAD * sizeof(uint16_t), ld, N_KV, HEAD);
}

static void qk_rope(const struct place *at)
{
    static const int32_t positions[ROWS] = {0, 1, 2, 1, 0};
    enum { HEADS = N_Q + N_KV };
    struct mt_qk_rope a = {.n = ROWS, .rot = HEAD, .dtype = MT_BF16, .eps = 1e-6f,
                           .positions = upload(positions, sizeof(positions)), .cos_t = rows_of(MT_F32, 3, 8, 8, 4),
                           .sin_t = rows_of(MT_F32, 3, 8, 8, 5), .max_pos = 3, .q_norm = rows_of(MT_BF16, 1, HEAD, HEAD, 6),
                           .k_norm = rows_of(MT_BF16, 1, HEAD, HEAD, 7), .rstd = take(256)};
    sides(rows_of(MT_BF16, ROWS, WIDTH, at->ld, 1), at->ld, &a.q, &a.k);
    sides(rows_of(MT_BF16, ROWS, WIDTH, at->ld, 0), at->ld, &a.to_q, &a.to_k);
    must(mt_op_qk_rope(dev, &a, &err));
    keep_rows(a.to_q.p, MT_BF16, ROWS, HEADS * HEAD, at->ld);
    void *dqkv = rows_of(MT_BF16, ROWS, WIDTH, at->ld, 0);
    struct mt_qk_rope_bwd b = {.fwd = a, .dq_norm = rows_of(MT_F32, 1, HEAD, HEAD, 0),
                               .dk_norm = rows_of(MT_F32, 1, HEAD, HEAD, 0)};
    sides(rows_of(MT_BF16, ROWS, WIDTH, at->ld, 8), at->ld, &b.dq, &b.dk);
    sides(dqkv, at->ld, &b.to_dq, &b.to_dk);
    b.workspace = take(mt_op_qk_rope_bwd_workspace(dev, &b));
    must(mt_op_qk_rope_bwd(dev, &b, &err));
    keep_rows(dqkv, MT_BF16, ROWS, HEADS * HEAD, at->ld);
    keep(b.dq_norm, MT_F32, HEAD);
}

/* And the sinks. */
static void attention(const struct place *at)
{
    static const int32_t cu[] = {0, 2, ROWS};
    enum { Q = N_Q * HEAD, KV = N_KV * HEAD };
    const enum mt_dtype t = MT_BF16;
    struct mt_attention a = {.n = ROWS, .n_docs = 2, .max_len = 3, .dtype = t, .scale = 0.25f,
                             .cu_seqlens = upload(cu, sizeof(cu)), .cu_seqlens_host = cu,
                             .q = mt_heads(rows_of(t, ROWS, Q, at->ld, 1), at->ld, N_Q, HEAD),
                             .k = mt_heads(rows_of(t, ROWS, KV, at->ld, 2), at->ld, N_KV, HEAD),
                             .v = mt_heads(rows_of(t, ROWS, KV, at->ld, 3), at->ld, N_KV, HEAD),
                             .o = mt_heads(rows_of(t, ROWS, Q, at->ld, 0), at->ld, N_Q, HEAD), .lse = take(256)};
    struct mt_attention_bwd b = {.d_o = mt_heads(rows_of(t, ROWS, Q, at->ld, 4), at->ld, N_Q, HEAD),
                                 .dq = mt_heads(rows_of(t, ROWS, Q, at->ld, 0), at->ld, N_Q, HEAD),
                                 .dk = mt_heads(rows_of(t, ROWS, KV, at->ld, 0), at->ld, N_KV, HEAD),
                                 .dv = mt_heads(rows_of(t, ROWS, KV, at->ld, 0), at->ld, N_KV, HEAD)};
    a.workspace = take(mt_op_attention_workspace(dev, &a));
    must(mt_op_attention(dev, &a, &err));
    keep_rows(a.o.p, t, ROWS, Q, at->ld);
    b.fwd = a;
    must(mt_op_attention_bwd(dev, &b, &err));
    keep_rows(b.dq.p, t, ROWS, Q, at->ld);
    keep_rows(b.dk.p, t, ROWS, KV, at->ld);
    keep_rows(b.dv.p, t, ROWS, KV, at->ld);
    void *sinks = rows_of(t, 1, N_Q, N_Q, 5);
    must(mt_op_attention_sink(dev, &(struct mt_attention_sink){ROWS, t, sinks, a.o, a.lse}, &err));
    keep_rows(a.o.p, t, ROWS, Q, at->ld);
    struct mt_attention_sink_bwd s = {.n = ROWS, .dtype = t, .sinks = sinks, .o = a.o, .d_o = b.d_o, .lse = a.lse, .dsinks = rows_of(MT_F32, 1, N_Q, N_Q, 0)};
    s.workspace = take(mt_op_attention_sink_bwd_workspace(dev, &s));
    must(mt_op_attention_sink_bwd(dev, &s, &err));
    keep(s.dsinks, MT_F32, N_Q);
}

/* Of both kinds of rows: those of queries, and of keys and values in blocks of a cache. */
static void attention_cached(const struct place *at)
{
    enum { DOCS = 2, BLOCK = 4, BLOCKS = 2 * DOCS, KV = N_KV * HEAD, Q = N_Q * HEAD };
    static const int32_t cu[] = {0, 1, DOCS}, past[] = {5, 2};
    const enum mt_dtype t = MT_BF16;
    int32_t first = (int32_t)(at->row / 16), table[BLOCKS];
    struct mt_attention a = {.n = DOCS, .n_docs = DOCS, .max_len = 6, .dtype = t, .scale = 0.25f,
                             .cu_seqlens = upload(cu, sizeof(cu)), .cu_seqlens_host = cu,
                             .q = mt_heads(rows_of(t, DOCS, Q, at->ld, 1), at->ld, N_Q, HEAD),
                             .k = mt_heads(rows_of(t, DOCS, KV, at->ld, 2), at->ld, N_KV, HEAD),
                             .v = mt_heads(rows_of(t, DOCS, KV, at->ld, 3), at->ld, N_KV, HEAD),
                             .o = mt_heads(rows_of(t, DOCS, Q, at->ld, 0), at->ld, N_Q, HEAD), .lse = take(256)};
    struct mt_attention_cached c = {.of = a, .block = BLOCK, .table_ld = BLOCKS / DOCS, .past = upload(past, sizeof(past)),
                                    .past_host = past, .table_host = table};
    size_t elems = mt_cache_block_elems(&c);
    c.cache = take(((size_t)first + BLOCKS) * elems * mt_dtype_size(t));
    for (int32_t i = 0; i < BLOCKS; i++) {
        table[i] = first + i;
        for (size_t k = 0; k < elems; k += WIDTH)
            put(row_at(c.cache, t, (size_t)table[i] * (elems / WIDTH) + k / WIDTH, WIDTH), t, WIDTH, 5 + (unsigned)k);
    }
    c.table = upload(table, sizeof(table));
    must(mt_op_attention_cached(dev, &c, &err));
    keep_rows(a.o.p, t, DOCS, Q, at->ld);
    for (int32_t i = 0; i < BLOCKS; i++)
        for (size_t k = 0; k < elems; k += WIDTH)
            keep(row_at(c.cache, t, (size_t)table[i] * (elems / WIDTH) + k / WIDTH, WIDTH), t, WIDTH);
}

/* The last rows of some heads. */
static void keep_heads(const struct mt_heads *h)
{
    enum { LAST = 4 };
    keep_rows(row_at(h->p, MT_BF16, OWN_ROWS - LAST, h->ld), MT_BF16, LAST, h->n * h->dim, h->ld);
}

static struct mt_heads own_heads(size_t n, const struct place *at, unsigned seed)
{
    return mt_heads(rows_of(MT_BF16, OWN_ROWS, n * OWN_HEAD, at->ld, seed), at->ld, n, OWN_HEAD);
}

static void own_attention(const struct place *at)
{
    static const int32_t cu[] = {0, 100, OWN_ROWS};
    struct mt_attention a = {.n = OWN_ROWS, .n_docs = 2, .max_len = 200, .dtype = MT_BF16, .scale = 0.125f,
                             .cu_seqlens = upload(cu, sizeof(cu)), .cu_seqlens_host = cu, .q = own_heads(N_Q, at, 1),
                             .k = own_heads(N_KV, at, 2), .v = own_heads(N_KV, at, 3), .o = own_heads(N_Q, at, 0),
                             .lse = take(N_Q * OWN_ROWS * sizeof(float))};
    a.workspace = take(mt_op_attention_workspace(dev, &a));
    must(mt_op_attention(dev, &a, &err));
    keep_heads(&a.o);
    struct mt_attention_bwd b = {.fwd = a, .d_o = own_heads(N_Q, at, 4), .dq = own_heads(N_Q, at, 0),
                                 .dk = own_heads(N_KV, at, 0), .dv = own_heads(N_KV, at, 0)};
    must(mt_op_attention_bwd(dev, &b, &err));
    keep_heads(&b.dq);
    keep_heads(&b.dk);
    keep_heads(&b.dv);
}

/* --- a row of many ------------------------------------------------------------------------------- */

static void *table(enum mt_dtype t, const struct place *at, unsigned seed)
{
    void *p = take((at->row + 1) * WIDTH * mt_dtype_size(t));
    put(p, t, WIDTH, seed);
    put(row_at(p, t, at->row, WIDTH), t, WIDTH, seed ? seed + 1 : 0);
    return p;
}

static void rows_by_index(const struct place *at)
{
    int32_t rows[2] = {0, (int32_t)at->row};
    struct mt_rows g = {.n = 2, .c = WIDTH, .dtype = MT_BF16, .rows = upload(rows, sizeof(rows)),
                        .src = table(MT_BF16, at, 1), .dst = take(512)};
    must(mt_op_gather_rows(dev, &g, &err));
    keep(g.dst, MT_BF16, 2 * WIDTH);
    struct mt_embedding e = {.n = 2, .vocab = at->row + 1, .c = WIDTH, .dtype = MT_BF16, .scale = 1, .ids = g.rows,
                             .table = g.src, .out = take(512)};
    must(mt_op_embedding(dev, &e, &err));
    keep(e.out, MT_BF16, 2 * WIDTH);
    static const int32_t starts[] = {0, 1, 2}, order[] = {0, 1};
    float *sums = table(MT_F32, at, 0);
    struct mt_embedding_bwd b = {.n = 2, .vocab = at->row + 1, .c = WIDTH, .n_runs = 2, .dtype = MT_BF16, .scale = 1,
                                 .run_ids = g.rows, .starts = upload(starts, sizeof(starts)),
                                 .order = upload(order, sizeof(order)), .dout = e.out, .dtable = sums};
    must(mt_op_embedding_bwd(dev, &b, &err));
    keep(row_at(sums, MT_F32, at->row, WIDTH), MT_F32, WIDTH);
}

static void rows_of_experts(const struct place *at)
{
    int32_t list[2] = {1, (int32_t)at->row * 2};
    struct mt_moe_gather g = {.n = 2, .n_padded = 2, .c = WIDTH, .k = 2, .dtype = MT_BF16,
                              .list = upload(list, sizeof(list)), .x = table(MT_BF16, at, 1), .out = take(512)};
    must(mt_op_moe_gather(dev, &g, &err));
    keep(g.out, MT_BF16, 2 * WIDTH);
    int32_t places[2] = {(int32_t)at->row, 0}; /* src has that many rows */
    struct mt_moe_combine c = {.n = 2, .c = WIDTH, .k = 1, .rows = at->row + 1, .dtype = MT_BF16,
                               .places = upload(places, sizeof(places)), .src = g.x, .sum = take(2 * WIDTH * sizeof(float))};
    must(mt_op_zero(dev, &(struct mt_zero){c.sum, 2 * WIDTH * sizeof(float)}, &err));
    must(mt_op_moe_combine(dev, &c, &err));
    keep(c.sum, MT_F32, 2 * WIDTH);
}

struct far_case {
    const char *name;
    void (*run)(const struct place *at);
    const struct place *near, *far;
};
static const struct far_case cases[] = {
    {"cross_entropy", cross_entropy, &near, &far},
    {"bias_bwd", bias_bwd, &near, &far},
    {"qk_rope", qk_rope, &near, &far},
    {"attention", attention, &near, &far},
    {"attention_cached", attention_cached, &near, &far},
    {"rows_by_index", rows_by_index, &near, &far},
    {"rows_of_experts", rows_of_experts, &near, &far},
};
static const struct far_case own_cases[] = {{"own_attention", own_attention, &own_near, &own_far}};

/* Number of cases with other results. */
static int run_all(const char *way, const struct far_case *c, size_t n)
{
    static char first[MAX_RESULT];
    struct mt_str found = {0};
    int failures = 0;
    setenv("MEGATRAIN_ATTENTION", way, 1);
    must(mt_device_create(&dev, &(struct mt_device_params){.kind = "cuda", .n_threads = 1, .budget_bytes = budget}, &err));
    for (const struct far_case *end = c + n; c < end; c++) {
        for (int k = 0; k < 2; k++) {
            memcpy(first, result, n_result);
            n_result = 0;
            c->run(k ? c->far : c->near);
            while (n_buffers)
                mt_device_free(dev, buffers[--n_buffers]);
        }
        bool same = n_result && !memcmp(first, result, n_result);
        printf("%s %s: %zu bytes\n", same ? "ok" : "FAIL", c->name, n_result);
        failures += !same;
    }
    mt_device_findings(dev, &found);
    printf("%s: %s\n", way, found.p ? found.p : "");
    failures += found.p && strstr(found.p, "tiles"); /* a wrong result was replaced */
    mt_str_finish(&found);
    mt_device_destroy(&dev);
    return failures;
}

int main(void)
{
    return run_all("fused", cases, MT_ARRAY_LEN(cases)) + run_all("tiled", cases, MT_ARRAY_LEN(cases)) +
               run_all("own", own_cases, MT_ARRAY_LEN(own_cases)) != 0;
}
