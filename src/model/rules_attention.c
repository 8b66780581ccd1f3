/* SPDX-License-Identifier: Apache-2.0 */
/* The rules of attention: norms of heads, rotary embeddings, attention itself, sinks, gates. */
#include "base/mem.h"
#include "model/rule.h"

/* --- norms of heads: in[0] -> out[0], and in[1] -> out[1] if there is one; statistics of each in out[2] and out[3]. A
 * side without a parameter has weights of 1 ------------------------------------------------------ */

static const void *head_weight(const struct mt_rule_run *r, int side)
{
    return mt_rule_weight(r, side) ?: r->m->one;
}

static struct mt_row_groups rows_of(const struct mt_heads *h)
{
    return (struct mt_row_groups){h->n, h->ld, h->stride};
}

static int norm_side(const struct mt_rule_run *r, int i, struct mt_err *err)
{
    const struct mt_heads *x = &r->in[i];
    return mt_op_rmsnorm(r->m->dev,
                         &(struct mt_rmsnorm){.n = r->n * x->n, .c = x->dim, .dtype = r->m->dt,
                                              .eps = (float)r->node->number,
                                              .plus_one = r->node->kind & MT_HEAD_NORM_PLUS_ONE,
                                              .round_once = r->node->kind & MT_HEAD_NORM_ROUND_ONCE, .x = x->p,
                                              .x_at = rows_of(x), .w = head_weight(r, i), .y = r->out[i].p,
                                              .y_at = rows_of(&r->out[i]), .rstd = r->out[2 + i].p,
                                              .use_rstd = !(r->outs >> (2 + i) & 1)},
                         err);
}

static int head_norm(const struct mt_rule_run *r, struct mt_err *err)
{
    int rc = norm_side(r, 0, err);
    return rc || !r->in[1].p ? rc : norm_side(r, 1, err);
}

static int norm_side_backward(const struct mt_rule_run *r, int i, struct mt_err *err)
{
    const struct mt_heads *x = &r->in[i];
    return mt_op_rmsnorm_bwd(
        r->m->dev,
        &(struct mt_rmsnorm_bwd){.n = r->n * x->n, .c = x->dim, .dtype = r->m->dt,
                                 .plus_one = r->node->kind & MT_HEAD_NORM_PLUS_ONE,
                                 .round_once = r->node->kind & MT_HEAD_NORM_ROUND_ONCE, .dy = r->d_out[i].p, .x = x->p,
                                 .x_at = rows_of(x), .w = head_weight(r, i), .rstd = r->out[2 + i].p,
                                 .dres = i ? NULL : r->add, .dx = r->d_in[i].p, .dy_at = rows_of(&r->d_out[i]),
                                 .dx_at = rows_of(&r->d_in[i]), .dw = mt_rule_grad(r, i),
                                 .workspace = r->m->own.workspace},
        err);
}

static int head_norm_backward(const struct mt_rule_run *r, struct mt_err *err)
{
    int rc = norm_side_backward(r, 0, err);
    return rc || !r->in[1].p ? rc : norm_side_backward(r, 1, err);
}

static size_t head_norm_workspace(const struct mt_recipe *r, const struct mt_node *n, const struct mt_model_params *p,
                                  mt_device *dev)
{
    struct mt_rmsnorm_bwd a = {.n = p->max_tokens * n->in[0].heads, .c = n->in[0].dim};
    (void)r; /* of keys there are no more than of queries */
    return mt_op_rmsnorm_bwd_workspace(dev, &a);
}

const struct mt_rule mt_rule_head_norm = {.name = "head norm", .reads_in = 3, .reads_out = 12, .statistics = 12,
                                          .through = 3, .adds = true, .forward = head_norm,
                                          .backward = head_norm_backward, .workspace = head_norm_workspace};

/* --- rotary embeddings of queries and keys, with QK-norm if the node has its weights. Queries may have a table of
 * their own: then these are two operations ------------------------------------------------------- */

/* All but inputs and results. */
static struct mt_qk_rope rope_args(const struct mt_rule_run *r, int table)
{
    struct mt_rope_rows rows = {0};
    if (table != MT_NO_ROPE)
        rows = r->run->in->rope[table];
    return (struct mt_qk_rope){.n = r->n,
                               .rot = table == MT_NO_ROPE ? 0 : r->m->layout->cfg.rope[table].dims,
                               .pairs = r->node->pairs, .dtype = r->m->dt, .eps = (float)r->node->number,
                               .positions = rows.positions, .cos_t = rows.cos_t, .sin_t = rows.sin_t,
                               .max_pos = rows.n_table_rows, .q_norm = mt_rule_weight(r, 0),
                               .k_norm = mt_rule_weight(r, 1), .rstd = r->out[2].p};
}

/* The view, or no heads of it. */
static struct mt_heads if_there(struct mt_heads h, bool there)
{
    struct mt_heads none = {0};
    return there && h.p ? h : none;
}

static int turn(const struct mt_rule_run *r, int table, bool q, bool k, struct mt_err *err)
{
    struct mt_qk_rope a = rope_args(r, table);
    q = q && r->outs & 1;
    k = k && r->outs & 2;
    a.q = if_there(r->in[0], q);
    a.k = if_there(r->in[1], k);
    a.to_q = if_there(r->out[0], q);
    a.to_k = if_there(r->out[1], k);
    return a.q.n || a.k.n ? mt_op_qk_rope(r->m->dev, &a, err) : 0;
}

static int turn_back(const struct mt_rule_run *r, int table, bool q, bool k, struct mt_err *err)
{
    struct mt_qk_rope_bwd a = {.fwd = rope_args(r, table), .dq = if_there(r->d_out[0], q),
                               .dk = if_there(r->d_out[1], k), .to_dq = if_there(r->d_in[0], q),
                               .to_dk = if_there(r->d_in[1], k), .dq_norm = mt_rule_grad(r, 0),
                               .dk_norm = mt_rule_grad(r, 1),
                               .workspace = r->m->own.workspace};
    if (a.fwd.q_norm) { /* else they are not read */
        a.fwd.q = r->in[0];
        a.fwd.k = r->in[1];
    }
    return a.dq.n || a.dk.n ? mt_op_qk_rope_bwd(r->m->dev, &a, err) : 0;
}

static int rope(const struct mt_rule_run *r, struct mt_err *err)
{
    bool both = r->node->q_rope == r->node->kind;
    int rc = turn(r, r->node->kind, both, true, err);
    return rc || both ? rc : turn(r, r->node->q_rope, true, false, err);
}

static int rope_backward(const struct mt_rule_run *r, struct mt_err *err)
{
    bool both = r->node->q_rope == r->node->kind;
    int rc = turn_back(r, r->node->kind, both, true, err);
    return rc || both ? rc : turn_back(r, r->node->q_rope, true, false, err);
}

static size_t rope_workspace(const struct mt_recipe *r, const struct mt_node *n, const struct mt_model_params *p,
                             mt_device *dev)
{
    struct mt_qk_rope_bwd a = {.fwd.n = p->max_tokens, .dq = mt_rule_shape(r, &n->in[0]),
                               .dk = mt_rule_shape(r, &n->in[1])};
    return mt_op_qk_rope_bwd_workspace(dev, &a);
}

const struct mt_rule mt_rule_rope = {.name = "rope", .reads_out = 4, .statistics = 4, .through = 3, .forward = rope,
                                     .backward = rope_backward, .workspace = rope_workspace};

/* --- a copy of heads to another value ----------------------------------------------------------- */

static int copy_rows(const struct mt_rule_run *r, size_t n, struct mt_heads from, struct mt_heads to,
                     struct mt_err *err)
{
    struct mt_qk_rope a = {.n = n, .dtype = r->m->dt, .q = from, .to_q = to};
    return mt_op_qk_rope(r->m->dev, &a, err);
}

static int copy_heads(const struct mt_rule_run *r, struct mt_heads from, struct mt_heads to, struct mt_err *err)
{
    return copy_rows(r, r->n, from, to, err);
}

static int copy(const struct mt_rule_run *r, struct mt_err *err)
{
    return copy_heads(r, r->in[0], r->out[0], err);
}

static int copy_backward(const struct mt_rule_run *r, struct mt_err *err)
{
    return copy_heads(r, r->d_out[0], r->d_in[0], err);
}

const struct mt_rule mt_rule_copy = {.name = "copy", .forward = copy, .backward = copy_backward};

/* --- attention: queries, keys, values -> outputs, log-sum-exp ----------------------------------- */

/* Attention over a run's tokens and documents, by its layer's rule; its operands are yet to be set. */
static struct mt_attention attention_of(const struct mt_part_run *r)
{
    const mt_model *m = r->m;
    const struct mt_layer_spec *s = r->part->spec;
    return (struct mt_attention){
        .n = r->in->n_tokens,
        .window = (size_t)s->window,
        .n_docs = r->in->n_docs,
        .max_len = r->in->max_len,
        .most_n = m->p.max_tokens,
        .most_len = m->p.max_len,
        .dtype = m->dt,
        .scale = (float)s->score_scale,
        .cap = (float)s->score_cap,
        .cu_seqlens = r->in->cu_seqlens,
        .cu_seqlens_host = r->in->cu_seqlens_host,
    };
}

static struct mt_attention attention_args(const struct mt_rule_run *r)
{
    struct mt_attention a = attention_of(r->run);
    a.q = r->in[0];
    a.k = r->in[1];
    a.v = r->in[2];
    a.o = r->out[0];
    a.lse = r->out[1].p;
    a.workspace = r->workspace;
    return a;
}

/* The keys, or the values, of the row of which the micro-batch is a chunk; or the sums of their gradients. They begin
 * with the first that its queries see, of `past` tokens before it. */
static struct mt_heads of_row(const struct mt_rule_run *r, enum mt_role role, bool values, size_t past)
{
    const struct mt_heads *k = &r->in[1], *h = &r->in[1 + values];
    size_t width = h->n * h->dim, rows = r->m->p.row_tokens, first = r->run->in->row_before - past;
    size_t size = role == MT_ROLE_DKEYS ? sizeof(float) : mt_dtype_size(r->m->dt);
    char *p = mt_value(r->run, role);
    return mt_heads(p + ((values ? rows * k->n * k->dim : 0) + first * width) * size, width, h->n, h->dim);
}

static bool in_chunks(const struct mt_rule_run *r)
{
    return mt_value(r->run, MT_ROLE_KEYS) != NULL;
}

/* Of what came before the micro-batch a window leaves all but its own length. */
static void see_row(const struct mt_rule_run *r, struct mt_attention *a)
{
    a->past = a->window ? MT_MIN(r->run->in->doc_before, a->window - 1) : r->run->in->doc_before;
    a->k = of_row(r, MT_ROLE_KEYS, false, a->past);
    a->v = of_row(r, MT_ROLE_KEYS, true, a->past);
}

/* In a forward pass the micro-batch adds its keys and values; when it is made again for backward, they are there. */
static int attend_in_row(const struct mt_rule_run *r, struct mt_attention *a, struct mt_err *err)
{
    int rc = 0;
    for (int values = 0; values < 2 && !rc && !r->run->dx; values++)
        rc = copy_heads(r, r->in[1 + values], of_row(r, MT_ROLE_KEYS, values, 0), err);
    see_row(r, a);
    return rc ? rc : mt_op_attention(r->m->dev, a, err);
}

/* What attention itself needs. */
static size_t attend_scratch_alone(const struct mt_recipe *r, const struct mt_node *n, const struct mt_model_params *p,
                                   mt_device *dev)
{
    struct mt_attention a = {.n = p->max_tokens, .max_len = p->max_len, .q = mt_rule_shape(r, &n->in[0]),
                             .k = mt_rule_shape(r, &n->in[1]), .v = mt_rule_shape(r, &n->in[2]),
                             .o = mt_rule_shape(r, &n->out[0]), .cap = (float)r->spec->score_cap, .dtype = p->dtype};
    struct mt_attention_cached c = {.of = a};
    size_t whole = p->backward || !p->cache.slots ? mt_op_attention_workspace(dev, &a) : 0;
    return p->cache.slots ? MT_MAX(whole, mt_op_attention_cached_workspace(dev, &c)) : whole;
}

/*
 * Generation from latents. A block of the cache has the normed latents of its tokens, and after them the parts of keys
 * that all heads share, rotated. A pass makes keys and values of earlier tokens again, by the product that made them at
 * first, into blocks in scratch, where attention reads them and adds those of new tokens.
 */
struct latents {
    const struct mt_rule_run *r;
    size_t block, latent, shared, keys, values, kv, e; /* tokens; elements of a token; bytes of an element */
    char *cache, *made, *product;                      /* its blocks; those in scratch; [block, kv] */
};

static struct latents latents_of(const struct mt_recipe *r, const struct mt_node *n, const struct mt_model_params *p)
{
    struct latents l = {.block = p->cache.block, .latent = n->in[3].dim, .shared = (size_t)r->spec->rope_dim,
                        .keys = mt_view_width(&n->in[1]), .values = mt_view_width(&n->in[2]),
                        .e = mt_dtype_size(p->dtype)};
    l.kv = l.keys + l.values - n->in[1].heads * l.shared;
    return l;
}

static size_t made_bytes(const struct latents *l, const struct mt_model_params *p)
{
    size_t blocks = p->cache.slots * p->cache.ld[MT_CACHE_WINDOW];
    return mt_align_up(blocks * l->block * (l->keys + l->values) * l->e, MT_RECORD_ALIGN);
}

/* The block with a document's position: of the cache, or of scratch, where each place of a text has its own. */
static char *block_of(const struct latents *l, char *blocks, size_t width, enum mt_cache_kind of, size_t doc,
                      size_t at)
{
    size_t ld = l->r->m->p.cache.ld[of];
    return blocks + (size_t)l->r->run->in->table_host[of][doc * ld + at / l->block % ld] * l->block * width * l->e;
}

/* Keeps n new tokens of a document, from a position on. */
static int keep_latents(const struct latents *l, size_t doc, size_t at, size_t n, struct mt_err *err)
{
    const struct mt_rule_run *r = l->r;
    const struct mt_micro_inputs *in = r->run->in;
    const struct mt_heads *k = &r->in[1], *c = &r->in[3];
    size_t row = (size_t)in->cu_seqlens_host[doc] + at - (size_t)in->past_host[doc], nope = k->dim - l->shared;
    char *to = block_of(l, l->cache, l->latent + l->shared, MT_CACHE_ALL, doc, at);
    at %= l->block;
    return copy_rows(r, n, mt_heads((const char *)c->p + row * c->ld * l->e, c->ld, 1, l->latent),
                     mt_heads(to + at * l->latent * l->e, l->latent, 1, l->latent), err)
        ?: copy_rows(r, n, mt_heads((const char *)k->p + (row * k->ld + nope) * l->e, k->ld, 1, l->shared),
                     mt_heads(to + (l->block * l->latent + at * l->shared) * l->e, l->shared, 1, l->shared), err);
}

/* Makes keys and values of a block's first n tokens. */
static int make_again(const struct latents *l, size_t doc, size_t at, size_t n, struct mt_err *err)
{
    const struct mt_rule_run *r = l->r;
    const struct mt_param none = {0};
    const size_t heads = r->in[1].n, wide = r->in[1].dim, nope = wide - l->shared, v = r->in[2].dim;
    const char *from = block_of(l, l->cache, l->latent + l->shared, MT_CACHE_ALL, doc, at);
    char *keys = block_of(l, l->made, l->keys + l->values, MT_CACHE_WINDOW, doc, at);
    char *values = keys + l->block * l->keys * l->e;
    struct mt_heads shared = mt_heads(from + l->block * l->latent * l->e, l->shared, heads, l->shared);
    shared.stride = 0;
    struct mt_heads own = {l->product, l->kv, nope + v, heads, nope};
    return mt_linear(r->m, n, l->latent, l->kv, from, r->run->w, mt_rule_param(r, 0), none, NULL, l->product, err)
        ?: copy_rows(r, n, own, (struct mt_heads){keys, l->keys, wide, heads, nope}, err)
        ?: copy_rows(r, n, shared, (struct mt_heads){keys + nope * l->e, l->keys, wide, heads, l->shared}, err)
        ?: copy_rows(r, n, (struct mt_heads){l->product + nope * l->e, l->kv, nope + v, heads, v},
                     mt_heads(values, l->values, heads, v), err);
}

static int each_block(const struct latents *l, size_t doc, size_t from, size_t to,
                      int (*fn)(const struct latents *l, size_t doc, size_t at, size_t n, struct mt_err *err),
                      struct mt_err *err)
{
    int rc = 0;
    for (size_t n; from < to && !rc; from += n) {
        n = MT_MIN(l->block - from % l->block, to - from);
        rc = fn(l, doc, from, n, err);
    }
    return rc;
}

static int attend_latents(const struct mt_rule_run *r, void *cache, struct mt_attention_cached *a, struct mt_err *err)
{
    const struct mt_micro_inputs *in = r->run->in;
    struct latents l = latents_of(r->recipe, r->node, &r->m->p);
    int rc = 0;
    l.r = r;
    l.cache = cache;
    a->cache = l.made = (char *)r->workspace +
                        mt_align_up(attend_scratch_alone(r->recipe, r->node, &r->m->p, r->m->dev), MT_RECORD_ALIGN);
    l.product = l.made + made_bytes(&l, &r->m->p);
    for (size_t d = 0; d < in->n_docs && !rc; d++) {
        size_t past = (size_t)in->past_host[d], n = (size_t)(in->cu_seqlens_host[d + 1] - in->cu_seqlens_host[d]);
        rc = each_block(&l, d, past, past + n, keep_latents, err) ?: each_block(&l, d, 0, past, make_again, err);
    }
    return rc ?: mt_op_attention_cached(r->m->dev, a, err);
}

/* Of new tokens and those that the cache has. */
static int attend_cached(const struct mt_rule_run *r, void *cache, struct mt_err *err)
{
    const struct mt_micro_inputs *in = r->run->in;
    const struct mt_cache_shape *s = &r->m->p.cache;
    bool latents = r->recipe->spec->latent_cache;
    enum mt_cache_kind of = r->recipe->spec->window || latents ? MT_CACHE_WINDOW : MT_CACHE_ALL;
    struct mt_attention_cached a = {.of = attention_args(r), .block = s->block, .table_ld = s->ld[of], .past = in->past,
                                    .past_host = in->past_host, .table = in->table[of],
                                    .table_host = in->table_host[of], .cache = cache};
    return latents ? attend_latents(r, cache, &a, err) : mt_op_attention_cached(r->m->dev, &a, err);
}

static int attend(const struct mt_rule_run *r, struct mt_err *err)
{
    struct mt_attention a = attention_args(r);
    void *cache = mt_value(r->run, MT_ROLE_CACHE);
    if (in_chunks(r))
        return attend_in_row(r, &a, err);
    return cache ? attend_cached(r, cache, err) : mt_op_attention(r->m->dev, &a, err);
}

static int attend_backward(const struct mt_rule_run *r, struct mt_err *err)
{
    struct mt_attention_bwd a = {.fwd = attention_args(r), .d_o = r->d_out[0], .dq = r->d_in[0], .dk = r->d_in[1],
                                 .dv = r->d_in[2], .sinks = r->recipe->spec->sinks};
    if (in_chunks(r)) {
        see_row(r, &a.fwd);
        a.dk_sum = of_row(r, MT_ROLE_DKEYS, false, a.fwd.past);
        a.dv_sum = of_row(r, MT_ROLE_DKEYS, true, a.fwd.past);
    }
    return mt_op_attention_bwd(r->m->dev, &a, err);
}

static size_t attend_scratch(const struct mt_recipe *r, const struct mt_node *n, const struct mt_model_params *p,
                             mt_device *dev)
{
    size_t alone = attend_scratch_alone(r, n, p, dev);
    if (!p->cache.slots || !r->spec->latent_cache)
        return alone;
    struct latents l = latents_of(r, n, p);
    return mt_align_up(alone, MT_RECORD_ALIGN) + made_bytes(&l, p) + l.block * l.kv * l.e;
}

/* Keys that a query sees, on average over documents of seq_len tokens. */
static double keys_seen(const struct mt_layer_spec *s, size_t seq_len)
{
    double len = (double)seq_len, window = s->window ? MT_MIN((double)s->window, len) : len;
    return (window * (window + 1) / 2 + (len - window) * window) / len;
}

static double attend_macs(const struct mt_recipe *r, const struct mt_node *n, size_t seq_len)
{
    double seen = keys_seen(r->spec, seq_len);
    return seen * (double)(mt_view_width(&n->in[0]) + mt_view_width(&n->out[0]));
}

const struct mt_rule mt_rule_attend = {.name = "attend", .reads_in = 7, .reads_out = 3, .statistics = 2, .blind = 8,
                                       .forward = attend, .backward = attend_backward, .scratch = attend_scratch,
                                       .macs = attend_macs};

/* --- sinks: outputs and log-sum-exp, in place --------------------------------------------------- */

static int sink(const struct mt_rule_run *r, struct mt_err *err)
{
    struct mt_attention_sink a = {.n = r->n, .dtype = r->m->dt,
                                  .sinks = mt_rule_weight(r, 0), .o = r->out[0],
                                  .lse = r->out[1].p};
    return mt_op_attention_sink(r->m->dev, &a, err);
}

static int sink_backward(const struct mt_rule_run *r, struct mt_err *err)
{
    float *dsinks = mt_rule_grad(r, 0);
    struct mt_attention_sink_bwd a = {.n = r->n, .dtype = r->m->dt,
                                      .sinks = mt_rule_weight(r, 0), .o = r->out[0],
                                      .d_o = r->d_out[0], .lse = r->out[1].p, .dsinks = dsinks,
                                      .workspace = r->m->own.workspace};
    return dsinks ? mt_op_attention_sink_bwd(r->m->dev, &a, err) : 0;
}

static size_t sink_workspace(const struct mt_recipe *r, const struct mt_node *n, const struct mt_model_params *p,
                             mt_device *dev)
{
    struct mt_attention_sink_bwd a = {.n = p->max_tokens, .o = mt_rule_shape(r, &n->out[0]), .dtype = p->dtype};
    return mt_op_attention_sink_bwd_workspace(dev, &a);
}

const struct mt_rule mt_rule_sink = {.name = "sink", .reads_out = 3, .statistics = 2, .blind = 2, .through = 1,
                                     .forward = sink, .backward = sink_backward, .workspace = sink_workspace};

/* --- gates of heads: in[0] times the sigmoid of in[1] ------------------------------------------- */

static struct mt_head_gate gate_args(const struct mt_rule_run *r)
{
    return (struct mt_head_gate){.n = r->n, .dtype = r->m->dt, .x = r->in[0], .gate = r->in[1],
                                 .y = r->out[0]};
}

MT_RULE_RUNS(gate, head_gate, gate_args)

static int gate_backward(const struct mt_rule_run *r, struct mt_err *err)
{
    struct mt_head_gate_bwd a = {.fwd = gate_args(r), .dy = r->d_out[0], .dx = r->d_in[0], .dgate = r->d_in[1]};
    return mt_op_head_gate_bwd(r->m->dev, &a, err);
}

const struct mt_rule mt_rule_gate = {.name = "gate", .reads_in = 3, .through = 1, .forward = gate,
                                     .backward = gate_backward};
