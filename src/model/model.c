/* SPDX-License-Identifier: Apache-2.0 */
#include "model/model.h"

#include <stdlib.h>

#include "base/mem.h"
#include "model/model_priv.h"
#include "store/planes.h"

enum { ALIGN = 256, N_INPUT_ARRAYS = 8 };

struct mt_widths mt_widths(const struct mt_hf_config *cfg)
{
    struct mt_widths w = {
        .c = (size_t)cfg->hidden,
        .f = (size_t)cfg->ffn,
        .q = (size_t)(cfg->n_heads * cfg->head_dim),
        .kv = (size_t)(cfg->n_kv_heads * cfg->head_dim),
        .rot = mt_rope_rotated_dims(cfg),
    };
    w.qk = w.q + w.kv;
    w.qkv = w.qk + w.kv;
    return w;
}

/* Takes `bytes` at *at, aligned; returns where it starts from base. */
static void *take(void *base, size_t *at, size_t bytes)
{
    void *p = base ? (char *)base + *at : NULL;
    *at += mt_align_up(bytes, ALIGN);
    return p;
}

size_t mt_record_layout(struct mt_record *r, const struct mt_hf_config *cfg, enum mt_layer_part part,
                        enum mt_dtype dtype, size_t n, void *base)
{
    struct mt_widths w = mt_widths(cfg);
    size_t at = 0, e = mt_dtype_size(dtype), heads = (size_t)(cfg->n_heads + cfg->n_kv_heads);
    *r = (struct mt_record){NULL};
    if (part & MT_PART_ATTENTION) {
        r->qkv = take(base, &at, n * w.qkv * e);
        r->qk = cfg->qk_norm ? take(base, &at, n * w.qk * e) : r->qkv;
        r->o = take(base, &at, n * w.q * e);
        r->lse = take(base, &at, n * (size_t)cfg->n_heads * 4);
        r->rstd1 = take(base, &at, n * 4);
        r->rstd_qk = cfg->qk_norm ? take(base, &at, n * heads * 4) : NULL;
    }
    if (part == MT_PART_BOTH)
        r->x2 = take(base, &at, n * w.c * e);
    if (part & MT_PART_MLP) {
        r->gate_up = take(base, &at, n * 2 * w.f * e);
        r->rstd2 = take(base, &at, n * 4);
    }
    return at;
}

size_t mt_layout_boundary_bytes(const struct mt_layout *l, enum mt_dtype dtype, size_t max_tokens)
{
    return mt_align_up(max_tokens * (size_t)l->cfg.hidden * mt_dtype_size(dtype), ALIGN);
}

size_t mt_unit_record_bytes(const struct mt_layout *l, size_t unit, enum mt_dtype dtype, size_t max_tokens)
{
    struct mt_record r;
    const struct mt_unit *u = &l->units[unit];
    return u->kind == MT_UNIT_LAYER ? mt_record_layout(&r, &l->cfg, u->part, dtype, max_tokens, NULL) : 0;
}

size_t mt_model_boundary_bytes(const mt_model *m)
{
    return mt_layout_boundary_bytes(m->layout, m->dt, m->p.max_tokens);
}

size_t mt_model_auto_logits_chunk(const struct mt_layout *l)
{
    /* 64 MiB of FP32 logits: long enough for the matrix product, small beside a layer's scratch */
    size_t rows = ((size_t)64 << 20) / (4 * (size_t)l->cfg.vocab), chunk = 64;
    while (chunk * 2 <= rows && chunk < 4096)
        chunk *= 2;
    return chunk;
}

static size_t workspace_bytes(mt_device *dev, const struct mt_model_params *p,
                              const struct mt_hf_config *cfg)
{
    struct mt_widths w = mt_widths(cfg);
    size_t n = p->max_tokens, n_q = (size_t)cfg->n_heads, n_kv = (size_t)cfg->n_kv_heads;
    size_t d = (size_t)cfg->head_dim;
    size_t widest = MT_MAX(MT_MAX(w.qkv, 2 * w.f), w.c);
    size_t need = MT_MAX(mt_op_rmsnorm_bwd_workspace(dev, n, w.c), mt_op_bias_bwd_workspace(dev, n, widest));
    return MT_MAX(need, mt_op_qk_rope_bwd_workspace(dev, n, n_q, n_kv, d));
}

/* What a part of a layer needs while it runs, from *at on; the two never run at once. */
static void part_layout(mt_model *m, mt_device *dev, const struct mt_model_params *p, enum mt_layer_part part,
                        void *base, size_t *at)
{
    const struct mt_hf_config *cfg = &p->layout->cfg;
    struct mt_widths w = mt_widths(cfg);
    struct mt_record r;
    size_t e = mt_dtype_size(p->dtype), n = p->max_tokens, back = p->backward ? n * e : 0;
    if (p->layout->halves)
        take(base, at, mt_record_layout(&r, cfg, part, p->dtype, n, NULL));
    if (part == MT_PART_ATTENTION) {
        m->d_o = take(base, at, back * w.q);
        m->dqkv = take(base, at, back * w.qkv);
        m->attention_workspace = take(base, at,
                                      mt_op_attention_workspace(dev, n, p->max_len, (size_t)cfg->n_heads,
                                                                (size_t)cfg->n_kv_heads, (size_t)cfg->head_dim,
                                                                p->dtype));
    } else {
        m->s = take(base, at, MT_MAX(n * w.f * e, back * w.c));
    }
}

/* Cuts the scratch from `base` (NULL: sizes only); returns its bytes. */
static size_t scratch_layout(mt_model *m, mt_device *dev, const struct mt_model_params *p,
                             void *base)
{
    const struct mt_hf_config *cfg = &p->layout->cfg;
    struct mt_widths w = mt_widths(cfg);
    struct mt_record r;
    size_t at = 0, e = mt_dtype_size(p->dtype), n = p->max_tokens;
    m->h = take(base, &at, n * w.c * e);
    m->dh = take(base, &at, n * w.c * e);
    m->cast_start = take(base, &at, p->backward ? (size_t)MT_SUMSQ_BLOCK * 2 : 0); /* of a cast to 16 bits in place */
    m->head_rstd = take(base, &at, n * 4);
    m->workspace = take(base, &at, workspace_bytes(dev, p, cfg));
    m->record = take(base, &at, 0); /* of a whole layer, or of either half */
    if (!p->layout->halves)
        take(base, &at, mt_record_layout(&r, cfg, MT_PART_BOTH, p->dtype, n, NULL));
    size_t attention = at, mlp = at;
    part_layout(m, dev, p, MT_PART_ATTENTION, base, &attention);
    part_layout(m, dev, p, MT_PART_MLP, base, &mlp);
    return MT_MAX(attention, mlp);
}

/* The arrays of a micro-batch's input block, in the order of struct mt_inputs; returns its bytes. */
static size_t input_layout(struct mt_inputs *in, const struct mt_model_params *p, void *base)
{
    int32_t **array[N_INPUT_ARRAYS] = {&in->ids,     &in->positions, &in->cu_seqlens,
                                       &in->loss_rows, &in->targets,   &in->run_ids,
                                       &in->run_starts, &in->order};
    size_t at = 0;
    for (int i = 0; i < N_INPUT_ARRAYS; i++) {
        size_t n = (array[i] == &in->cu_seqlens ? p->max_docs : p->max_tokens) + 1;
        *array[i] = take(base, &at, n * sizeof(int32_t));
    }
    return at;
}

static size_t n_partials(const struct mt_layout *l, size_t *at)
{
    size_t n = 0;
    for (size_t t = 0; t < l->n_tensors; t++) {
        if (at)
            at[t] = n;
        n += mt_div_up(l->tensors[t].n, MT_SUMSQ_BLOCK);
    }
    if (at)
        at[l->n_tensors] = n;
    return n;
}

static size_t stats_of_micro(const struct mt_model_params *p)
{
    return mt_align_up(p->max_tokens * 4, ALIGN);
}

static size_t stats_bytes(const struct mt_model_params *p)
{
    return p->max_micro * 2 * stats_of_micro(p) +
           mt_align_up(n_partials(p->layout, NULL) * 4, ALIGN);
}

static size_t table_elems(const struct mt_model_params *p)
{
    return p->max_len * mt_rope_rotated_dims(&p->layout->cfg) / 2;
}

static size_t logits_bytes(const struct mt_model_params *p)
{
    size_t rows = MT_MIN(p->logits_chunk, p->max_tokens);
    return mt_align_up(rows * (size_t)p->layout->cfg.vocab * 4, ALIGN);
}

int mt_model_bytes(struct mt_model_bytes *out, mt_device *dev, const struct mt_model_params *p,
                   struct mt_err *err)
{
    (void)err;
    mt_model sizes = {0};
    struct mt_inputs in;
    *out = (struct mt_model_bytes){
        .scratch = scratch_layout(&sizes, dev, p, NULL),
        .logits = logits_bytes(p),
        .inputs = p->max_micro * input_layout(&in, p, NULL) + stats_bytes(p),
        .tables = 2 * mt_align_up(table_elems(p) * 4, ALIGN),
    };
    return 0;
}

static int upload_tables(mt_model *m, struct mt_err *err)
{
    size_t n = table_elems(&m->p), bytes = n * 4;
    float *host = mt_calloc(2 * n, sizeof(float));
    if (!host)
        return mt_fail_nomem(err, "rotary tables", 2 * n * sizeof(float));
    m->cos_t = m->tables;
    m->sin_t = (float *)(void *)((char *)m->tables + mt_align_up(bytes, ALIGN));
    mt_rope_tables(&m->layout->cfg, m->p.max_len, m->p.max_len, host, host + n);
    int rc = mt_device_copy(m->dev, MT_STREAM_COMPUTE,
                            &(struct mt_copy){m->cos_t, bytes, host, bytes, bytes, 1}, err);
    if (!rc)
        rc = mt_device_copy(m->dev, MT_STREAM_COMPUTE,
                            &(struct mt_copy){m->sin_t, bytes, host + n, bytes, bytes, 1}, err);
    int sync = mt_device_sync(m->dev, rc ? NULL : err);
    free(host);
    return rc ? rc : sync;
}

static int alloc_host(mt_model *m, struct mt_err *err)
{
    int rc = mt_host_alloc(&m->inputs_host, m->p.max_micro * m->input_bytes, "step inputs", err);
    void *stats = NULL;
    if (!rc)
        rc = mt_host_alloc(&stats, m->stats_bytes, "step statistics", err);
    m->stats_host = stats;
    if (!rc)
        rc = mt_device_register_host(m->dev, m->inputs_host, m->p.max_micro * m->input_bytes, err);
    if (!rc)
        rc = mt_device_register_host(m->dev, m->stats_host, m->stats_bytes, err);
    return rc;
}

static int alloc_device(mt_model *m, struct mt_err *err)
{
    struct mt_model_bytes b;
    void *logits = NULL, *stats = NULL;
    int rc = mt_model_bytes(&b, m->dev, &m->p, err);
    if (!rc)
        rc = mt_device_alloc(m->dev, b.scratch, "scratch", &m->scratch, err);
    if (!rc)
        rc = mt_device_alloc(m->dev, b.logits, "logits", &logits, err);
    m->logits = logits;
    if (!rc)
        rc = mt_device_alloc(m->dev, b.tables, "rotary tables", &m->tables, err);
    if (!rc)
        rc = mt_device_alloc(m->dev, m->p.max_micro * m->input_bytes, "inputs", &m->inputs_dev, err);
    if (!rc)
        rc = mt_device_alloc(m->dev, m->stats_bytes, "inputs", &stats, err);
    m->stats_dev = stats;
    return rc;
}

int mt_model_create(mt_model **out, mt_device *dev, const struct mt_model_params *p,
                    struct mt_err *err)
{
    struct mt_inputs in;
    mt_model *m = mt_calloc(1, sizeof(*m));
    if (!m)
        return mt_fail_nomem(err, "the model", sizeof(*m));
    m->dev = dev;
    m->p = *p;
    m->layout = p->layout;
    m->dt = p->dtype;
    m->wd = mt_widths(&p->layout->cfg);
    m->input_bytes = input_layout(&in, p, NULL);
    m->stats_bytes = stats_bytes(p);
    m->inputs = mt_calloc(p->max_micro, sizeof(*m->inputs));
    m->partials_at = mt_calloc(p->layout->n_tensors + 1, sizeof(*m->partials_at));
    int rc = 0;
    if (!m->inputs || !m->partials_at)
        rc = mt_fail_nomem(err, "the model", p->max_micro * sizeof(*m->inputs));
    if (!rc)
        rc = alloc_host(m, err);
    if (!rc)
        rc = alloc_device(m, err);
    if (rc) {
        mt_model_destroy(&m);
        return rc;
    }
    n_partials(p->layout, m->partials_at);
    scratch_layout(m, dev, p, m->scratch);
    for (size_t i = 0; i < p->max_micro; i++)
        input_layout(&m->inputs[i], p, (char *)m->inputs_dev + i * m->input_bytes);
    rc = upload_tables(m, err);
    if (rc) {
        mt_model_destroy(&m);
        return rc;
    }
    *out = m;
    return 0;
}

void mt_model_destroy(mt_model **model)
{
    mt_model *m = *model;
    if (!m)
        return;
    void *dev_mem[] = {m->scratch, m->logits, m->tables, m->inputs_dev, m->stats_dev};
    for (size_t i = 0; i < MT_ARRAY_LEN(dev_mem); i++)
        mt_device_free(m->dev, dev_mem[i]);
    if (m->inputs_host)
        mt_device_unregister_host(m->dev, m->inputs_host);
    if (m->stats_host)
        mt_device_unregister_host(m->dev, m->stats_host);
    mt_host_free(m->inputs_host, m->p.max_micro * m->input_bytes);
    mt_host_free(m->stats_host, m->stats_bytes);
    free(m->inputs);
    free(m->partials_at);
    free(m);
    *model = NULL;
}

static void fill_block(mt_model *m, size_t i, const struct mt_batch *b)
{
    struct mt_inputs host, *dev = &m->inputs[i];
    input_layout(&host, &m->p, (char *)m->inputs_host + i * m->input_bytes);
    const struct {
        int32_t *dst;
        const int32_t *src;
        size_t n;
    } part[] = {
        {host.ids, b->ids, b->n_tokens},
        {host.positions, b->positions, b->n_tokens},
        {host.cu_seqlens, b->cu_seqlens, b->n_docs + 1},
        {host.loss_rows, b->loss_rows, b->n_loss},
        {host.targets, b->targets, b->n_loss},
        {host.run_ids, b->run_ids, b->n_runs},
        {host.run_starts, b->run_starts, b->n_runs + 1},
        {host.order, b->order, b->n_tokens},
    };
    for (size_t k = 0; k < MT_ARRAY_LEN(part); k++)
        memcpy(part[k].dst, part[k].src, part[k].n * sizeof(int32_t));
    dev->n_tokens = b->n_tokens;
    dev->n_docs = b->n_docs;
    dev->max_len = b->max_doc_len;
    dev->n_loss = b->n_loss;
    dev->n_runs = b->n_runs;
    dev->cu_seqlens_host = host.cu_seqlens;
}

int mt_model_upload(mt_model *m, const struct mt_batch *micro, size_t n, float loss_scale,
                    struct mt_err *err)
{
    m->loss_scale = loss_scale;
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
    }
    size_t bytes = n * m->input_bytes;
    return mt_device_copy(m->dev, MT_STREAM_COMPUTE,
                          &(struct mt_copy){m->inputs_dev, bytes, m->inputs_host, bytes, bytes, 1},
                          err);
}

float *mt_model_stats_loss(const mt_model *m, char *base, size_t mb)
{
    return (float *)(void *)(base + mb * 2 * stats_of_micro(&m->p));
}

int32_t *mt_model_stats_correct(const mt_model *m, char *base, size_t mb)
{
    return (int32_t *)(void *)(base + (mb * 2 + 1) * stats_of_micro(&m->p));
}

float *mt_model_stats_partials(const mt_model *m, char *base)
{
    return (float *)(void *)(base + m->p.max_micro * 2 * stats_of_micro(&m->p));
}

static int fetch(mt_model *m, size_t first, size_t bytes, struct mt_err *err)
{
    return mt_device_copy(
        m->dev, MT_STREAM_D2H,
        &(struct mt_copy){m->stats_host + first, bytes, m->stats_dev + first, bytes, bytes, 1}, err);
}

int mt_model_fetch_stats(mt_model *m, size_t n_micro, bool with_gradients, struct mt_err *err)
{
    int rc = fetch(m, 0, n_micro * 2 * stats_of_micro(&m->p), err);
    size_t partials = m->p.max_micro * 2 * stats_of_micro(&m->p);
    if (!rc && with_gradients)
        rc = fetch(m, partials, m->stats_bytes - partials, err);
    return rc;
}

const float *mt_model_losses(const mt_model *m, size_t mb)
{
    return mt_model_stats_loss(m, m->stats_host, mb);
}

const int32_t *mt_model_correct(const mt_model *m, size_t mb)
{
    return mt_model_stats_correct(m, m->stats_host, mb);
}

const float *mt_model_partials(const mt_model *m, size_t tensor, size_t *n)
{
    *n = m->partials_at[tensor + 1] - m->partials_at[tensor];
    return mt_model_stats_partials(m, m->stats_host) + m->partials_at[tensor];
}
