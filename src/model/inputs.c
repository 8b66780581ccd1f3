/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The inputs of forward and backward besides weights: the micro-batches' tokens, and rotary tables.
 *
 * If the rotary embedding depends on a document's length, so does the table that its tokens use: with
 * longrope there are two on the device and the positions of longer documents index the second; with dynamic
 * scaling each length beyond the model's own has its own angles, and a micro-batch with such a document
 * uploads the rows of all its tokens with it.
 */
#include <stdlib.h>

#include "base/dtype.h"
#include "base/mem.h"
#include "model/moe.h"
#include "model/part.h"

enum { ALIGN = MT_RECORD_ALIGN, N_INPUT_ARRAYS = 7 };

/* Of a rotary embedding: rows of its first table, and of all of them together; numbers of a row. */
struct table_rows {
    enum mt_rope_lengths lengths;
    size_t first, all, half;
};

static struct table_rows table_rows(const struct mt_model_params *p, int rope)
{
    const struct mt_rope_config *c = &p->layout->cfg.rope[rope];
    size_t limit;
    struct table_rows r = {.lengths = mt_rope_lengths(c, p->max_len, &limit), .half = c->dims / 2};
    r.first = r.lengths == MT_ROPE_ONE_TABLE ? p->max_len : limit;
    r.all = r.first + (r.lengths == MT_ROPE_TWO_TABLES ? p->max_len : 0);
    return r;
}

size_t mt_rope_table_bytes(const struct mt_model_params *p)
{
    size_t bytes = 0;
    for (int i = 0; i < p->layout->cfg.n_ropes; i++) {
        struct table_rows r = table_rows(p, i);
        bytes += 2 * mt_align_up(r.all * r.half * 4, ALIGN);
    }
    return bytes;
}

/* Where nothing is computed (assumed_rows), nobody reads tables: a plan would spend a quarter of its time on them. */
static void make_tables(const mt_model *m, int rope, size_t n_pos, size_t seq_len, float *cos_t, float *sin_t)
{
    if (!m->p.assumed_rows)
        mt_rope_tables(&m->layout->cfg.rope[rope], n_pos, seq_len, cos_t, sin_t);
}

/* Makes the tables of a rotary embedding in host memory, [2, all, half], and copies them to *at, which goes on. */
static int upload_rope(mt_model *m, int rope, char **at, float *host, struct mt_err *err)
{
    struct table_rows r = table_rows(&m->p, rope);
    size_t n = r.all * r.half, bytes = n * sizeof(float), later = r.first * r.half;
    m->rope[rope].cos_t = (float *)(void *)*at;
    m->rope[rope].sin_t = (float *)(void *)(*at + mt_align_up(bytes, ALIGN));
    *at += 2 * mt_align_up(bytes, ALIGN);
    make_tables(m, rope, r.first, r.first, host, host + n);
    if (r.lengths == MT_ROPE_TWO_TABLES)
        make_tables(m, rope, m->p.max_len, m->p.max_len, host + later, host + n + later);
    return mt_model_copy(m, m->rope[rope].cos_t, host, bytes, err)
        ?: mt_model_copy(m, m->rope[rope].sin_t, host + n, bytes, err);
}

/* Vectors of weights where a norm has none. */
static int upload_ones(mt_model *m, struct mt_err *err)
{
    size_t n = mt_model_n_ones(m->layout), size = mt_dtype_size(m->dt), bytes = n * size;
    const float f32 = 1;
    const uint16_t bf16 = mt_f32_to_bf16(1);
    MT_FREED char *host = mt_calloc(n, size);
    if (!host)
        return mt_fail_nomem(err, "rotary tables", bytes);
    for (size_t i = 0; i < n; i++)
        memcpy(host + i * size, m->dt == MT_F32 ? (const void *)&f32 : &bf16, size);
    int rc = mt_model_copy(m, m->one, host, bytes, err);
    int sync = mt_device_sync(m->dev, rc ? NULL : err);
    return rc ?: sync;
}

int mt_model_upload_tables(mt_model *m, struct mt_err *err)
{
    size_t floats = mt_rope_table_bytes(&m->p) / sizeof(float);
    MT_FREED float *host = mt_calloc(floats, sizeof(float));
    float *next = host;
    char *at = m->tables;
    int rc = 0;
    if (!host)
        return mt_fail_nomem(err, "rotary tables", floats * sizeof(float));
    for (int i = 0; i < m->layout->cfg.n_ropes && !rc; i++) {
        struct table_rows r = table_rows(&m->p, i);
        rc = upload_rope(m, i, &at, next, err);
        next += 2 * r.all * r.half;
    }
    if (!rc && m->one)
        rc = upload_ones(m, err);
    int sync = mt_device_sync(m->dev, rc ? NULL : err);
    return rc ?: sync;
}

static void lay_out_rope(struct mt_rope_rows *r, const struct mt_model_params *p, int rope, size_t *at, void *base)
{
    struct table_rows t = table_rows(p, rope);
    size_t own = t.lengths == MT_ROPE_A_TABLE_EACH ? p->max_tokens * t.half * sizeof(float) : 0;
    r->positions = mt_take(base, at, (p->max_tokens + 1) * sizeof(int32_t));
    r->own_cos = own ? mt_take(base, at, own) : NULL;
    r->own_sin = own ? mt_take(base, at, own) : NULL;
}

size_t mt_inputs_layout(struct mt_micro_inputs *in, const struct mt_model_params *p, void *base)
{
    int32_t **array[N_INPUT_ARRAYS] = {&in->ids,     &in->cu_seqlens, &in->loss_rows, &in->targets,
                                       &in->run_ids, &in->run_starts, &in->order};
    size_t at = 0;
    for (int i = 0; i < N_INPUT_ARRAYS; i++) {
        size_t n = (array[i] == &in->cu_seqlens ? p->max_docs : p->max_tokens) + 1;
        *array[i] = mt_take(base, &at, n * sizeof(int32_t));
    }
    in->past = p->cache.slots ? mt_take(base, &at, p->max_docs * sizeof(int32_t)) : NULL;
    for (int i = 0; i < MT_N_CACHE_KINDS; i++)
        in->table[i] = p->cache.slots ? mt_take(base, &at, p->max_docs * p->cache.ld[i] * sizeof(int32_t)) : NULL;
    in->few = p->few ? mt_take(base, &at, p->max_tokens * p->few * sizeof(int32_t)) : NULL;
    in->few_values = p->few ? mt_take(base, &at, p->max_tokens * p->few * sizeof(float)) : NULL;
    for (int i = 0; i < p->layout->cfg.n_ropes; i++)
        lay_out_rope(&in->rope[i], p, i, &at, base);
    return at;
}

struct mt_micro_inputs mt_inputs_on_host(const mt_model *m, size_t mb)
{
    struct mt_micro_inputs host;
    mt_inputs_layout(&host, &m->p, (char *)m->inputs_host + mb * m->input_bytes);
    return host;
}

/* Gives each token of the micro-batch a row of the rotary tables: *dev says which tables, host->positions the row. */
static void place_positions(const mt_model *m, const struct mt_batch *b, int rope, struct mt_rope_rows *host,
                            struct mt_rope_rows *dev)
{
    struct table_rows r = table_rows(&m->p, rope);
    bool own = r.lengths == MT_ROPE_A_TABLE_EACH && b->max_doc_len > r.first;
    dev->cos_t = own ? dev->own_cos : m->rope[rope].cos_t;
    dev->sin_t = own ? dev->own_sin : m->rope[rope].sin_t;
    dev->n_table_rows = own ? m->p.max_tokens : r.all;
    for (size_t d = 0; d < b->n_docs; d++) {
        size_t first = (size_t)b->cu_seqlens[d], len = (size_t)b->cu_seqlens[d + 1] - first;
        size_t whole = len + (d ? 0 : b->doc_before) + (d + 1 < b->n_docs ? 0 : b->doc_after);
        int32_t row = own ? (int32_t)first : whole > r.first ? (int32_t)r.first : 0;
        if (own)
            make_tables(m, rope, len, len, host->own_cos + first * r.half, host->own_sin + first * r.half);
        for (size_t i = first; i < first + len; i++)
            host->positions[i] = b->positions[i] + row;
    }
}

static void fill_block(mt_model *m, size_t i, const struct mt_batch *b)
{
    struct mt_micro_inputs host = mt_inputs_on_host(m, i), *dev = &m->inputs[i];
    const struct {
        int32_t *dst;
        const int32_t *src;
        size_t n;
    } part[] = {
        {host.ids, b->ids, b->n_tokens},
        {host.cu_seqlens, b->cu_seqlens, b->n_docs + 1},
        {host.loss_rows, b->loss_rows, b->n_loss},
        {host.targets, b->targets, b->n_loss},
        {host.run_ids, b->run_ids, b->n_runs},
        {host.run_starts, b->run_starts, b->n_runs + 1},
        {host.order, b->order, b->n_tokens},
        {host.past, b->past, b->cache.slots ? b->n_docs : 0},
    };
    for (int k = 0; b->cache.slots && k < MT_N_CACHE_KINDS; k++) {
        memcpy(host.table[k], b->table[k], b->n_docs * m->p.cache.ld[k] * sizeof(int32_t));
        dev->table_host[k] = host.table[k];
    }
    for (size_t k = 0; k < MT_ARRAY_LEN(part); k++)
        if (part[k].n)
            memcpy(part[k].dst, part[k].src, part[k].n * sizeof(int32_t));
    for (int k = 0; k < m->layout->cfg.n_ropes; k++)
        place_positions(m, b, k, &host.rope[k], &dev->rope[k]);
    dev->n_tokens = b->n_tokens;
    dev->n_docs = b->n_docs;
    dev->max_len = b->max_doc_len;
    dev->row_before = b->row_before;
    dev->doc_before = b->doc_before;
    dev->doc_after = b->doc_after;
    dev->n_padding = b->n_padding;
    dev->n_loss = b->n_loss;
    dev->n_runs = b->n_runs;
    dev->cu_seqlens_host = host.cu_seqlens;
    dev->past_host = host.past;
}

/* Lists the different tokens of all micro-batches, and sends the list. */
static int upload_used_rows(mt_model *m, const struct mt_model_step *step, struct mt_err *err)
{
    size_t words = mt_div_up((size_t)m->layout->cfg.vocab, (size_t)64), n = 0;
    memset(m->seen, 0, words * sizeof(*m->seen));
    for (size_t i = 0; i < step->n; i++)
        for (size_t k = 0; k < step->micro[i].n_runs; k++)
            m->seen[step->micro[i].run_ids[k] / 64] |= (uint64_t)1 << step->micro[i].run_ids[k] % 64;
    for (size_t w = 0; w < words; w++)
        for (uint64_t bits = m->seen[w]; bits; bits &= bits - 1)
            m->used_host[n++] = (int32_t)(64 * w) + __builtin_ctzll(bits);
    m->n_used = n;
    return mt_model_copy(m, m->used_dev, m->used_host, n * sizeof(int32_t), err);
}

/* Whose the micro-batch is, and where its rows are among those of that learner's step. */
static void place_among_learners(mt_model *m, size_t i, const struct mt_model_step *step)
{
    struct mt_micro_inputs *in = &m->inputs[i];
    in->first_loss = i && in->row_before ? m->inputs[i - 1].first_loss + m->inputs[i - 1].n_loss : 0;
    in->weights = m->weights_dev ? m->weights_dev + mt_model_loss_at(m, i) : NULL;
    in->learner = step->micro[i].learner;
    in->of = step->learner ? step->learner[in->learner] : (struct mt_model_learner){0};
    in->first_row = 0;
    for (size_t k = i; k-- > 0;) {
        const struct mt_micro_inputs *before = &m->inputs[k];
        if (before->learner == in->learner) { /* its last one, of which there may be tens of thousands */
            in->first_row = before->first_row + before->n_tokens;
            break;
        }
    }
}

/* Weights of loss rows that do not depend on losses, and tokens that weights will depend on. */
static void weigh_rows(mt_model *m, size_t i)
{
    const struct mt_model_learner *of = &m->inputs[i].of;
    struct mt_micro_inputs host = mt_inputs_on_host(m, i);
    if (of->choose)
        of->choose(of->weigh_ctx, i, host.few);
    if (of->rows == MT_ROWS_WEIGHED && of->weigh && !m->inputs[i].row_before)
        of->weigh(of->weigh_ctx, i, &(struct mt_row_values){.weight = m->weights_host + mt_model_loss_at(m, i)});
}

int mt_model_check_text(const mt_model *m, const struct mt_batch *micro, size_t n, struct mt_err *err)
{
    const struct mt_hf_config *c = &m->layout->cfg;
    for (int k = 0; k < c->n_input_tokens; k++)
        for (size_t mb = 0; mb < n; mb++)
            for (size_t i = 0; i < micro[mb].n_runs; i++)
                if ((int64_t)micro[mb].run_ids[i] == c->input_token[k])
                    return mt_fail(err, MT_ERR_INPUT, -EINVAL, "the data holds token %lld, which stands for an image, "
                                   "video or sound: only text can be trained on", (long long)c->input_token[k]);
    return 0;
}

int mt_model_upload(mt_model *m, const struct mt_model_step *step, struct mt_err *err)
{
    const struct mt_batch *micro = step->micro;
    size_t n = step->n;
    m->training = step->learner;
    m->n_micro = n;
    m->draw = step->draw;
    if (m->p.groups_of_step)
        m->p.groups.of = n;
    for (size_t i = 0; i < n; i++) {
        if (micro[i].n_tokens > m->p.max_tokens || micro[i].n_docs > m->p.max_docs ||
            micro[i].max_doc_len > m->p.max_len)
            return mt_fail(err, MT_ERR_RUNTIME, -EINVAL,
                           "micro-batch %zu: %zu tokens in %zu documents of up to %zu; planned for "
                           "%zu in %zu of %zu",
                           i, micro[i].n_tokens, micro[i].n_docs, micro[i].max_doc_len,
                           m->p.max_tokens, m->p.max_docs, m->p.max_len);
        /* runs are in order of their ids: the last is the largest */
        uint32_t largest = micro[i].n_runs ? (uint32_t)micro[i].run_ids[micro[i].n_runs - 1] : 0;
        if (largest >= (uint64_t)m->layout->cfg.vocab)
            return mt_fail(err, MT_ERR_INPUT, -ERANGE,
                           "micro-batch %zu holds token %u, the model's vocab_size is %lld: the cache of "
                           "tokens is damaged; remove data.cache_dir",
                           i, largest, (long long)m->layout->cfg.vocab);
        fill_block(m, i, &micro[i]);
        place_among_learners(m, i, step);
        weigh_rows(m, i);
    }
    size_t sums = mt_groups_n(m->p.groups) * mt_model_prob_sum_bytes(&m->p);
    int rc = mt_model_balances(m)
                 ? mt_op_zero(m->dev, &(struct mt_zero){mt_model_prob_sum(m, m->stats_dev, 0), sums}, err) : 0;
    if (!rc)
        rc = mt_model_copy(m, m->inputs_dev, m->inputs_host, n * m->input_bytes, err);
    if (!rc && m->weights_dev)
        rc = mt_model_copy(m, m->weights_dev, m->weights_host, n * m->p.max_tokens * sizeof(float), err);
    return rc || !m->p.used_rows ? rc : upload_used_rows(m, step, err);
}

struct mt_used_rows mt_model_used_rows(const mt_model *m)
{
    return (struct mt_used_rows){m->n_used, m->used_host};
}

struct mt_token_runs mt_model_token_runs(const mt_model *m, size_t mb)
{
    struct mt_micro_inputs host = mt_inputs_on_host(m, mb);
    return (struct mt_token_runs){m->inputs[mb].n_runs, host.run_ids, host.run_starts, host.order};
}
