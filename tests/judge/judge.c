/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a model computes, as text: the device operations of a layer's forward and backward in their order, with all
 * their numbers, and for each array which value it holds and what is written to it. No address and no place in scratch
 * is in it, so that two programs with equal texts compute the same bits on every device, however they lay out memory.
 * Nothing is computed: operations go to a device that only counts.
 *
 *   judge VARIANT MODEL...   the text of models (folders, or files like config.json)
 *   judge digests MODEL...   a line a model: a digest of each variant's text
 */
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/fs.h"
#include "base/mem.h"
#include "kinds/kinds.h"
#include "log.h"
#include "model/model.h"
#include "model/packing.h"
#include "model/part.h"
#include "model/state.h"
#include "optim/optimizer.h"
#include "weights/weights.h"

enum { TOKENS = MT_JUDGE_TOKENS, DOCS = 2, EXPERTS_TOLD = 2, RANK = 8 };
#define MOMENTS ((size_t)1 << 40)

struct judge {
    struct mt_judge_log log;
    const struct mt_layout *layout;
    mt_device *dev;
    mt_model *m;
};

/* What the host has sent before a step. */
static void known_inputs(struct judge *j)
{
    const mt_model *m = j->m;
    const struct mt_micro_inputs *in = &m->inputs[0];
    size_t n = m->p.max_tokens, e = m->layout->cfg.moe.n_experts > 0 ? (size_t)m->layout->cfg.moe.n_experts : 0;
    mt_judge_known(&j->log, in->ids, 4 * n, "ids");
    mt_judge_known(&j->log, in->cu_seqlens, 4 * (DOCS + 1), "cu_seqlens");
    mt_judge_known(&j->log, in->loss_rows, 4 * n, "loss_rows");
    mt_judge_known(&j->log, in->targets, 4 * n, "targets");
    mt_judge_known(&j->log, in->run_ids, 4 * n, "run_ids");
    mt_judge_known(&j->log, in->run_starts, 4 * (n + 1), "run_starts");
    mt_judge_known(&j->log, in->order, 4 * n, "order");
    mt_judge_known(&j->log, in->weights, 4 * n, "row_weights");
    for (int i = 0; i < MT_MAX_ROPES; i++) {
        const struct mt_rope_rows *r = &in->rope[i];
        char name[32];
        size_t half = r->n_table_rows ? (size_t)m->layout->cfg.rope[i].dims / 2 : 0;
        snprintf(name, sizeof(name), "positions%d", i);
        mt_judge_known(&j->log, r->positions, r->positions ? 4 * n : 0, name);
        snprintf(name, sizeof(name), "cos%d", i);
        mt_judge_known(&j->log, r->cos_t, 4 * r->n_table_rows * half, name);
        snprintf(name, sizeof(name), "sin%d", i);
        mt_judge_known(&j->log, r->sin_t, 4 * r->n_table_rows * half, name);
    }
    mt_judge_known(&j->log, m->select_bias, 4 * e * (size_t)m->layout->cfg.n_layers, "select_bias");
    mt_judge_known(&j->log, m->one, mt_model_n_ones(m->layout) * mt_dtype_size(m->dt), "ones");
    mt_judge_known(&j->log, m->shares, 4 * e, "shares");
    mt_judge_known(&j->log, m->stats_dev, m->stats_bytes, "statistics");
}

/* A tensor's name without the number of its layer. */
static const char *short_name(const struct mt_tensor *t)
{
    const char *name = t->name;
    static const char layers[] = "layers.";
    const char *at = strstr(name, layers);
    if (!at)
        return name;
    name = at + strlen(layers);
    while (*name && *name != '.')
        name++;
    return *name ? name + 1 : name;
}

/* --- a layer ------------------------------------------------------------------------------------ */

enum { MAX_UNITS = 80 };

struct variant {
    const char *name;
    enum mt_dtype dtype;
    bool fp8, adapter, dora, packed, eval, balance;
    double dropout;
    const char *freeze;
    bool recompute, halves;
    bool weighed;          /* rows of the loss have weights of their own, which are known late */
    const char *optimizer; /* that makes directions of gradients; NULL: none */
    const char *device;    /* whose workspaces and padding; NULL: cpu. cuda: experts side by side */
    bool overlap;          /* two arrays of scratch share memory: a fault that a text must show */
};

/* Buffers of the units of a layer. */
struct buffers {
    void *x[MAX_UNITS + 1], *weights[MAX_UNITS], *grad[MAX_UNITS], *cast[MAX_UNITS];
    void *record[MAX_UNITS][MT_MAX_SEGMENTS];
    void *shared[MT_N_ROLES]; /* of all units of a layer */
    void *dx, *moments;
};

static void must(int rc, const struct mt_err *err)
{
    if (!rc)
        return;
    fprintf(stderr, "judge: %s\n", err->msg);
    exit(1);
}

static void *take(struct judge *j, size_t bytes)
{
    struct mt_err err = {0};
    void *p = NULL;
    must(mt_device_alloc(j->dev, bytes, "judge", &p, &err), &err);
    return p;
}

static size_t hidden_bytes(const struct judge *j)
{
    return TOKENS * (size_t)j->layout->cfg.hidden * mt_dtype_size(j->m->dt);
}

static void known_weights(struct judge *j, size_t unit, void *w)
{
    const struct mt_layout *l = j->layout;
    const struct mt_unit *u = &l->units[unit];
    size_t e = mt_dtype_size(j->m->dt);
    struct mt_err err = {0};
    mt_judge_known(&j->log, w, mt_unit_slot_bytes(l, unit, j->m->dt), "padding");
    for (size_t k = u->first_range; k < u->first_range + u->n_ranges; k++) {
        const struct mt_range *r = &l->ranges[k];
        size_t at = r->kind == MT_RANGE_PACKED ? 0 : mt_unit_range_at(l, unit, r, j->m->dt);
        for (size_t i = u->first_tensor; i < u->first_tensor + u->n_tensors; i++) {
            const struct mt_tensor *t = &l->tensors[i];
            if (!t->packed && t->first >= r->first && t->first < r->first + r->n)
                mt_judge_known(&j->log, (char *)w + (at + t->first - r->first) * e, t->n * e, short_name(t));
        }
    }
    const struct mt_tensor *f32 = mt_unit_f32_tensor(l, unit, j->m->dt);
    if (f32)
        mt_judge_known(&j->log, (char *)w + mt_unit_f32_at(l, unit, j->m->dt), f32->n * sizeof(float), "router in f32");
    if (u->n_in_planes[MT_RANGE_PACKED])
        mt_judge_known(&j->log, (char *)w + mt_unit_landing(l, unit, j->m->dt), u->n_in_planes[MT_RANGE_PACKED],
                       "packed");
    must(mt_unit_decode(l, unit, j->m->dt, w, j->dev, &err), &err);
}

static void tell_gradients(struct judge *j, size_t unit, const float *g)
{
    const struct mt_unit *u = &j->layout->units[unit];
    char name[MT_TENSOR_NAME + 8];
    for (size_t i = u->first_tensor; g && i < u->first_tensor + u->n_tensors; i++) {
        const struct mt_tensor *t = &j->layout->tensors[i];
        snprintf(name, sizeof(name), "d %s", short_name(t));
        if (t->trainable && t->expert < EXPERTS_TOLD)
            mt_judge_told(&j->log, g + t->grad, t->n * sizeof(float), name);
    }
}

static void tell_cast(struct judge *j, size_t unit, const char *cast)
{
    const struct mt_unit *u = &j->layout->units[unit];
    char name[MT_TENSOR_NAME + 8];
    for (size_t i = u->first_tensor; cast && i < u->first_tensor + u->n_tensors; i++) {
        const struct mt_tensor *t = &j->layout->tensors[i];
        snprintf(name, sizeof(name), "cast %s", short_name(t));
        if (t->trainable)
            mt_judge_told(&j->log, cast + t->grad * 2, t->n * 2, name);
    }
}

/* The buffers of the values that the unit uses in its forward, or in its backward. */
static struct mt_unit_run run_of(const struct judge *j, const struct buffers *b, size_t i, size_t unit, bool backward)
{
    bool table = j->layout->units[unit].kind == MT_UNIT_EMBED;
    struct mt_unit_run run = {.unit = unit, .first = true, .cast_dtype = MT_BF16};
    struct mt_port port[MT_MAX_PORTS];
    size_t n_ports = mt_unit_ports(j->layout, unit, j->m->dt, TOKENS, TOKENS, port);
    void *of[MT_N_ROLES];
    memcpy(of, b->shared, sizeof(of));
    of[table ? MT_ROLE_TABLE : MT_ROLE_WEIGHTS] = b->weights[i];
    of[MT_ROLE_X] = b->x[i];
    of[MT_ROLE_Y] = b->x[i + 1];
    of[MT_ROLE_DX] = b->dx;
    of[table ? MT_ROLE_TABLE_GRAD : MT_ROLE_GRAD] = b->grad[i];
    of[MT_ROLE_CAST] = b->cast[i];
    of[MT_ROLE_MOMENTS] = b->moments;
    for (size_t k = 0; k < n_ports; k++)
        if (backward ? port[k].backward : port[k].forward)
            run.at[port[k].role] = of[port[k].role];
    for (size_t k = 0; k < MT_MAX_SEGMENTS; k++)
        run.at[mt_record_role(k)] = b->record[i][k];
    return run;
}

static struct buffers take_buffers(struct judge *j, size_t first, size_t n, const struct variant *v)
{
    const struct mt_layout *l = j->layout;
    struct buffers b = {.dx = take(j, mt_model_boundary_bytes(j->m)),
                        .moments = v->optimizer ? take(j, MOMENTS) : NULL};
    for (int role = 1; role < MT_N_ROLES; role++) {
        size_t bytes = mt_roles[role].reach == MT_REACH_LAYER
                           ? mt_layout_value_bytes(l, (enum mt_role)role, v->dtype, TOKENS, TOKENS)
                           : 0;
        b.shared[role] = bytes ? take(j, bytes) : NULL;
    }
    for (size_t i = 0; i < n; i++) {
        const struct mt_unit *u = &l->units[first + i];
        struct mt_segment segment[MT_MAX_SEGMENTS];
        size_t n_segments = mt_unit_segments(l, first + i, v->dtype, TOKENS, segment);
        b.x[i + 1] = u->per_step ? NULL : take(j, mt_model_boundary_bytes(j->m));
        b.weights[i] = take(j, mt_unit_slot_bytes(l, first + i, v->dtype));
        b.grad[i] = u->n_grad && !v->eval ? take(j, u->n_grad * sizeof(float)) : NULL;
        b.cast[i] = u->n_grad && u->per_step && !v->eval ? take(j, u->n_elems * 2) : NULL;
        for (size_t k = 0; k < n_segments && !v->recompute && !v->eval; k++)
            b.record[i][k] = segment[k].bytes ? take(j, segment[k].bytes) : NULL;
    }
    b.x[0] = take(j, mt_model_boundary_bytes(j->m));
    for (size_t i = 0; i < n; i++) /* units of the whole step have no boundary of their own */
        if (!b.x[i + 1])
            b.x[i + 1] = b.x[i];
    return b;
}

/* Values to which the first of several units adds: a program zeroes them before. */
static void known_sums(struct judge *j, size_t first, size_t n, const struct buffers *b)
{
    for (size_t i = 0; i < n; i++) {
        struct mt_port port[MT_MAX_PORTS];
        size_t n_ports = mt_unit_ports(j->layout, first + i, j->m->dt, TOKENS, TOKENS, port);
        for (size_t k = 0; k < n_ports; k++)
            if (b->shared[port[k].role] &&
                ((port[k].forward & MT_ADD) == MT_ADD || (port[k].backward & MT_ADD) == MT_ADD))
                mt_judge_known(&j->log, b->shared[port[k].role],
                               mt_layout_value_bytes(j->layout, (enum mt_role)port[k].role, j->m->dt, TOKENS, TOKENS),
                               "zeros");
    }
}

/* The gradient of a unit is complete: directions, if an optimizer makes some, and the cast. */
static void cast(struct judge *j, const struct buffers *b, size_t i, size_t unit)
{
    struct mt_err err = {0};
    struct mt_unit_run run = {.unit = unit, .cast_dtype = MT_BF16};
    float *g = b->grad[i];
    run.at[MT_ROLE_GRAD] = g;
    run.at[MT_ROLE_WEIGHTS] = b->weights[i];
    run.at[MT_ROLE_MOMENTS] = b->moments;
    if (b->moments)
        must(mt_model_direct(j->m, &run, &err), &err);
    must(mt_model_grad_cast(j->m, unit, g, take(j, j->layout->units[unit].n_elems * 2), MT_BF16, &err), &err);
}

/* Between runs of units other micro-batches and layers use the scratch: a unit finds nothing there that it could read,
 * but experts' outputs that are still to be summed, and shares, which are of the whole step. */
static void forget_scratch(struct judge *j)
{
    const mt_model *m = j->m;
    struct mt_model_bytes all;
    struct mt_err err = {0};
    must(mt_model_bytes(&all, j->dev, &m->p, &err), &err);
    mt_judge_forget(j->log.memory, m->h, (size_t)((char *)m->scratch + all.scratch - (char *)m->h)); /* the last of it */
    mt_judge_forget(j->log.memory, m->logits, all.logits);
}

/* Units [first, first + n), the embedding or those of a layer. */
static void tell_units(struct judge *j, size_t first, size_t n, const struct variant *v)
{
    struct mt_err err = {0};
    struct buffers b = take_buffers(j, first, n, v);
    bool table = j->layout->units[first].kind == MT_UNIT_EMBED;
    mt_judge_memory_clear(j->log.memory);
    j->log.n_ops = 0;
    known_inputs(j);
    mt_judge_known(&j->log, b.x[0], hidden_bytes(j), "x");
    known_sums(j, first, n, &b);
    for (size_t i = 0; i < n; i++) {
        known_weights(j, first + i, b.weights[i]);
        struct mt_unit_run run = run_of(j, &b, i, first + i, false);
        mt_judge_say(&j->log, "   %s forward\n", j->layout->units[first + i].name);
        forget_scratch(j);
        must(mt_model_forward(j->m, &run, &err), &err);
    }
    mt_judge_told(&j->log, b.x[n], hidden_bytes(j), "y");
    mt_judge_known(&j->log, b.dx, hidden_bytes(j), "dy");
    mt_judge_known(&j->log, b.moments, b.moments ? MOMENTS : 0, "moments");
    mt_judge_known(&j->log, b.shared[MT_ROLE_DWEIGHTS], /* of which each expert writes the entries of its rows */
                   mt_layout_value_bytes(j->layout, MT_ROLE_DWEIGHTS, j->m->dt, TOKENS, TOKENS), "no entries");
    for (size_t i = n; i-- > 0 && !v->eval;) {
        const struct mt_unit *u = &j->layout->units[first + i];
        if ((table && !u->trainable) || !j->layout->parts[u->first_part].kind->backward)
            continue;
        struct mt_unit_run run = run_of(j, &b, i, first + i, true);
        if (table)
            mt_judge_known(&j->log, b.grad[i], u->n_grad * sizeof(float), "zeros");
        mt_judge_say(&j->log, "   %s backward\n", u->name);
        forget_scratch(j);
        must(mt_model_backward(j->m, &run, &err), &err);
        tell_gradients(j, first + i, u->per_step ? NULL : b.grad[i]);
        if (b.grad[i] && !u->per_step)
            cast(j, &b, i, first + i);
        tell_cast(j, first + i, b.cast[i]);
    }
    if (!v->eval && !table)
        mt_judge_told(&j->log, b.dx, hidden_bytes(j), "dx");
}

static void tell_head(struct judge *j, size_t unit, const struct variant *v)
{
    const struct mt_layout *l = j->layout;
    struct mt_err err = {0};
    struct buffers b = take_buffers(j, unit, 1, v);
    struct mt_model_head a = {.w = b.weights[0],
                              .table = b.weights[0],
                              .x = b.x[0],
                              .dx = v->eval ? NULL : b.dx,
                              .g = b.grad[0],
                              .g_table = b.grad[0],
                              .first = true,
                              .first_table = true};
    mt_judge_memory_clear(j->log.memory);
    j->log.n_ops = 0;
    known_inputs(j);
    mt_judge_known(&j->log, b.x[0], hidden_bytes(j), "x");
    known_weights(j, unit, b.weights[0]);
    if (l->tied) {
        struct buffers embed = take_buffers(j, 0, 1, v);
        known_weights(j, 0, embed.weights[0]);
        a.table = embed.weights[0];
        a.g_table = embed.grad[0];
    }
    mt_judge_say(&j->log, "   head\n");
    must(mt_model_head(j->m, &a, &err), &err);
    tell_gradients(j, unit, a.g);
    if (l->tied)
        tell_gradients(j, 0, a.g_table);
    mt_judge_told(&j->log, a.dx, hidden_bytes(j), "dx");
}

/* --- a model ------------------------------------------------------------------------------------ */

static const struct variant variants[] = {
    {.name = "f32", .dtype = MT_F32},
    {.name = "bf16", .dtype = MT_BF16},
    {.name = "recompute", .dtype = MT_BF16, .recompute = true},
    {.name = "halves", .dtype = MT_BF16, .halves = true, .recompute = true},
    {.name = "eval", .dtype = MT_BF16, .eval = true},
    {.name = "fp8", .dtype = MT_BF16, .fp8 = true},
    {.name = "frozen", .dtype = MT_BF16, .freeze = "*.0.*"},
    {.name = "lora", .dtype = MT_BF16, .adapter = true, .dropout = 0.1},
    {.name = "dora", .dtype = MT_F32, .adapter = true, .dora = true, .recompute = true},
    {.name = "packed", .dtype = MT_BF16, .adapter = true, .packed = true, .halves = true},
    {.name = "packed-fp8", .dtype = MT_BF16, .fp8 = true, .adapter = true, .packed = true},
    {.name = "balance", .dtype = MT_BF16, .balance = true},
    {.name = "weighed", .dtype = MT_BF16, .weighed = true},
    {.name = "cuda", .dtype = MT_BF16, .device = "cuda", .adapter = true, .packed = true},
    {.name = "muon", .dtype = MT_BF16, .optimizer = "muon"},
    {.name = "apollo", .dtype = MT_BF16, .optimizer = "apollo"},
    {.name = "galore", .dtype = MT_BF16, .optimizer = "galore"},
    {.name = "adafactor", .dtype = MT_BF16, .optimizer = "adafactor"},
    {.name = "overlap", .dtype = MT_BF16, .overlap = true},
};

/* The layer of units [a, a + n) computes what the one before it of units [b, b + n) does. */
static bool alike(const struct mt_layout *l, size_t a, size_t b, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (!mt_layout_alike(l, a + i, b + i) || l->units[a + i].n_grad != l->units[b + i].n_grad)
            return false;
    return true;
}

static size_t units_of_layer(const struct mt_layout *l, size_t first)
{
    size_t n = 1;
    while (l->units[first].kind == MT_UNIT_LAYER && first + n < l->n_units &&
           l->units[first + n].layer == l->units[first].layer)
        n++;
    return n;
}

static void tell_all(struct judge *j, const struct variant *v)
{
    const struct mt_layout *l = j->layout;
    for (size_t u = 0, n; u < l->n_units; u += n) {
        n = units_of_layer(l, u);
        size_t of = 0;
        while (of < u && (units_of_layer(l, of) != n || !alike(l, u, of, n)))
            of += units_of_layer(l, of);
        mt_judge_say(&j->log, "  %s%s%s\n", l->units[u].name, of < u ? " as " : "", of < u ? l->units[of].name : "");
        if (of < u)
            continue;
        if (n > MAX_UNITS) {
            fprintf(stderr, "judge: %s has %zu units\n", l->units[u].name, n);
            exit(1);
        }
        if (l->units[u].kind == MT_UNIT_HEAD)
            tell_head(j, u, v);
        else
            tell_units(j, u, n, v);
    }
}

static bool adapter_of(struct mt_adapter_spec *s, const struct variant *v)
{
    *s = (struct mt_adapter_spec){
        .on = true, .rank = 4, .alpha = 8, .dora = v->dora, .dropout = v->dropout, .lr_ratio_b = 1};
    return mt_adapter_list_add(&s->targets, MT_ALL_LINEAR, 0);
}

/* False: the model does not have the variant, for the reason in the text. */
static bool lay_out(struct mt_layout **l, const struct mt_hf_config *cfg, const struct variant *v,
                    struct mt_adapter_spec *spec, struct mt_err *err)
{
    struct mt_layout_params p = {.cut = v->halves ? mt_cut_half : mt_cut_layer, .decay_embeddings = true};
    if (v->balance && !cfg->moe.n_experts)
        return false;
    p.cut.expert_group = (size_t)MT_MAX(cfg->moe.n_experts / 2, (int64_t)1);
    p.freeze = &v->freeze;
    p.n_freeze = v->freeze != NULL;
    p.adapter = v->adapter ? spec : NULL;
    p.optimizer = v->optimizer ? mt_optimizer_find(v->optimizer, MT_STATE_F32, NULL) : NULL;
    p.rank = v->optimizer ? RANK : 0;
    if (mt_layout_create(l, cfg, &p, err))
        return false;
    if (v->packed && mt_weights_mark_random(*l, cfg->packed ? cfg->packed : MT_PACKED_NF4, err)) {
        mt_layout_destroy(l);
        return false;
    }
    return true;
}

/* How many rows each expert has, which the host is told by the device: about half of the tokens, of as many experts as
 * that makes, which are spread over all. */
static void route(mt_model *m)
{
    const struct mt_hf_config *cfg = &m->layout->cfg;
    size_t e = (size_t)cfg->moe.n_experts, rows = TOKENS * (size_t)cfg->moe.top_k,
           n = MT_MIN(e, mt_div_up(rows, (size_t)TOKENS / 2));
    for (int64_t l = 0; e && m->counts && l < cfg->n_layers; l++)
        for (size_t i = 0; i < n; i++)
            m->counts[(size_t)l * 3 * (e + 1) + e * i / n] = (int32_t)(rows * (i + 1) / n - rows * i / n);
}

static void open_step(struct judge *j, const struct variant *v, struct mt_batch *batch)
{
    struct mt_err err = {0};
    uint32_t ids[TOKENS / DOCS];
    struct mt_model_params mp = {.layout = j->layout,
                                 .dtype = v->dtype,
                                 .fp8 = v->fp8,
                                 .max_tokens = TOKENS,
                                 .max_docs = DOCS,
                                 .max_len = TOKENS,
                                 .max_micro = 1,
                                 .logits_chunk = 8,
                                 .row_weights = v->weighed,
                                 .expert_streams = v->device ? 2 : 0,
                                 .router_aux_loss = v->balance ? 0.01 : 0,
                                 .backward = !v->eval};
    const struct mt_optimizer *o = j->layout->optimizer;
    for (int i = 0; o && i < o->n_keys; i++)
        mp.optimizer_keys[i] = o->keys[i].def;
    struct mt_meter_params device = {.kind = mt_device_kind(v->device ? v->device : "cpu"),
                                     .budget_bytes = SIZE_MAX / 2,
                                     .n_threads = 1,
                                     .fn = mt_judge_operation,
                                     .copied = mt_judge_copy,
                                     .ctx = &j->log};
    must(mt_device_create_meter(&j->dev, &device, &err), &err);
    must(mt_model_create(&j->m, j->dev, &mp, &err), &err);
    must(mt_batch_init(batch, TOKENS, DOCS, &err), &err);
    for (int d = 0; d < DOCS; d++) {
        for (uint32_t i = 0; i < TOKENS / DOCS; i++)
            ids[i] = (i * 7 + (uint32_t)d) % (uint32_t)j->layout->cfg.vocab;
        must(mt_batch_add(batch, ids, NULL, TOKENS / DOCS, 0, &err), &err);
    }
    mt_batch_seal(batch);
    const struct mt_model_learner learner = {
        .rows = v->weighed ? MT_ROWS_WEIGHED_LATE : MT_ROWS_ALIKE, .loss_scale = 0.5f, .seed = 3, .step = 1};
    must(mt_model_upload(j->m, &(struct mt_model_step){.micro = batch, .n = 1, .learner = v->eval ? NULL : &learner},
                         &err),
         &err);
    route(j->m);
    if (v->overlap)
        j->m->dh = j->m->h;
}

static void tell(struct mt_str *out, const struct mt_hf_config *cfg, const struct variant *v, size_t *unwritten)
{
    struct judge j = {.log = {.out = out, .memory = mt_judge_memory_create()}};
    struct mt_adapter_spec spec = {0};
    struct mt_layout *l = NULL;
    struct mt_batch batch = {0};
    struct mt_err err = {0};
    if (!adapter_of(&spec, v))
        exit(1);
    if (!lay_out(&l, cfg, v, &spec, &err)) {
        mt_judge_say(&j.log, "  not laid out: %s\n", err.msg);
    } else {
        j.layout = l;
        open_step(&j, v, &batch);
        tell_all(&j, v);
        mt_model_destroy(&j.m);
        mt_device_destroy(&j.dev);
        mt_batch_finish(&batch);
        mt_layout_destroy(&l);
    }
    mt_adapter_spec_finish(&spec);
    mt_judge_memory_destroy(j.log.memory);
    *unwritten += j.log.n_unwritten;
}

static void read_model(struct mt_hf_config *cfg, const char *path)
{
    char file[4096], *text = NULL;
    size_t len;
    struct mt_err err = {0};
    snprintf(file, sizeof(file), mt_is_dir(path) ? "%s/config.json" : "%s", path);
    must(mt_read_file(file, &text, &len, &err), &err);
    must(mt_hf_config_parse(cfg, text, len, file, &err), &err);
    free(text);
    unsigned kinds = 0, all = (1u << cfg->n_specs) - 1;
    for (int64_t i = 0; i < cfg->n_layers; i++) { /* its first layers, until one of each kind is among them */
        kinds |= 1u << cfg->layer[i];
        if (kinds == all)
            cfg->n_layers = i + 1;
    }
}

static unsigned digest(const char *text)
{
    uint64_t h = UINT64_C(14695981039346656037);
    for (; *text; text++)
        h = (h ^ (unsigned char)*text) * UINT64_C(1099511628211);
    return (unsigned)(h >> 32 ^ h);
}

/* The last folder of a path, or its file without .json. */
static void print_name(const char *path)
{
    size_t len = strlen(path);
    while (len && path[len - 1] == '/')
        len--;
    const char *end = path + len, *at = end;
    while (at > path && at[-1] != '/')
        at--;
    if (end - at > 5 && !strncmp(end - 5, ".json", 5))
        end -= 5;
    printf("%.*s", (int)(end - at), at);
}

int main(int argc, char **argv)
{
    bool digests = argc > 2 && !strcmp(argv[1], "digests"), any = digests;
    size_t unwritten = 0;
    for (int i = 2; i < argc; i++) {
        struct mt_hf_config cfg;
        read_model(&cfg, argv[i]);
        if (digests)
            print_name(argv[i]);
        for (size_t k = 0; k < MT_ARRAY_LEN(variants); k++) {
            struct mt_str text = {0};
            if (digests ? variants[k].overlap : strcmp(argv[1], variants[k].name) != 0)
                continue;
            any = true;
            tell(&text, &cfg, &variants[k], &unwritten);
            const char *s = text.p ? text.p : "";
            if (digests)
                printf(" %08x", digest(s));
            else
                printf("%s", s);
            mt_str_finish(&text);
        }
        printf(digests ? "\n" : "");
    }
    if (!any || argc < 3) {
        fprintf(stderr, "usage: judge digests|VARIANT MODEL...; variants:");
        for (size_t k = 0; k < MT_ARRAY_LEN(variants); k++)
            fprintf(stderr, " %s", variants[k].name);
        fprintf(stderr, "\n");
        return 2;
    }
    if (unwritten)
        fprintf(stderr, "judge: %zu arrays are read where nothing was written\n", unwritten);
    return unwritten ? 1 : 0;
}
