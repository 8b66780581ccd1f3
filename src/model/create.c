/* SPDX-License-Identifier: Apache-2.0 */
#include "model/model.h"

#include <stdlib.h>

#include "base/mem.h"
#include "model/linear.h"
#include "model/moe.h"
#include "model/outputs.h"
#include "model/packing.h"
#include "model/part.h"
#include "model/recipe.h"
#include "model/sides.h"
#include "store/planes.h"

enum { ALIGN = MT_RECORD_ALIGN };

/* The memory that a part needs while it runs, computed once for each kind in each kind of layer. */
struct part_bytes {
    const struct mt_part_kind *kind;
    const struct mt_layer_spec *spec;
    size_t scratch, workspace;
};

static const struct part_bytes *bytes_of_part(struct part_bytes *known, const struct mt_part *part,
                                              const struct mt_model_params *p, mt_device *dev)
{
    const struct mt_part_kind *kind = part->kind;
    while (known->kind && (known->kind != kind || known->spec != part->spec))
        known++;
    if (!known->kind && part->recipe)
        *known = (struct part_bytes){kind, part->spec, mt_recipe_place(part->recipe, p, dev, NULL),
                                     mt_recipe_workspace(part->recipe, p, dev)};
    else if (!known->kind)
        *known = (struct part_bytes){kind, part->spec,
                                     kind->scratch_bytes ? kind->scratch_bytes(p, part->spec, dev) : 0,
                                     kind->workspace_bytes ? kind->workspace_bytes(p, part->spec, dev) : 0};
    return known;
}

static size_t record_bytes(const struct mt_model_params *p, size_t unit)
{
    struct mt_segment segment[MT_MAX_SEGMENTS];
    size_t n = mt_unit_segments(p->layout, unit, p->dtype, p->max_tokens, segment), bytes = 0;
    for (size_t i = 0; i < n; i++)
        bytes += segment[i].bytes;
    return bytes;
}

/* The largest record and scratch of a unit, since units run one at a time; and the largest workspace. */
static void unit_bytes(size_t *scratch, size_t *workspace, mt_device *dev, const struct mt_model_params *p)
{
    const struct mt_layout *l = p->layout;
    struct part_bytes known[MT_N_PART_KINDS * MT_MAX_SPECS + 1] = {{0}};
    *scratch = *workspace = 0;
    for (size_t u = 0; u < l->n_units; u++) {
        const struct mt_unit *unit = &l->units[u];
        size_t most = 0;
        for (size_t i = unit->first_part; i < unit->first_part + unit->n_parts; i++) {
            const struct part_bytes *k = bytes_of_part(known, &l->parts[i], p, dev);
            most = MT_MAX(most, k->scratch);
            *workspace = MT_MAX(*workspace, k->workspace);
        }
        *scratch = MT_MAX(*scratch, record_bytes(p, u) + most);
    }
}

/* Bytes of x A^T of a layer's adapters, at most; or of experts' alone. */
static size_t adapter_bytes(const struct mt_model_params *p, mt_device *dev, bool experts)
{
    const struct mt_layout *l = p->layout;
    size_t most = 0;
    for (size_t i = 0; i < l->n_adapters; i++) {
        bool expert = l->tensors[l->adapters[i].target[0].tensor].expert >= 0;
        size_t rows = expert ? mt_expert_tile_rows(p, dev) : experts ? 0 : p->max_tokens;
        most = MT_MAX(most, l->adapters[i].rank * rows);
    }
    return most * mt_dtype_size(p->dtype);
}

/* Bytes of an adapter's input after dropout. */
static size_t dropped_bytes(const struct mt_model_params *p)
{
    size_t in = 0;
    for (size_t i = 0; p->backward && i < p->layout->n_adapters; i++)
        if (p->layout->adapters[i].dropout > 0)
            in = MT_MAX(in, p->layout->adapters[i].in);
    return p->max_tokens * in * mt_dtype_size(p->dtype);
}

/* Bytes of the codes of A and B in any product of a linear layer of n rows; weights [out, in] are encoded with it. */
static void widen_codes(size_t *a, size_t *b, bool backward, size_t n, size_t weights, size_t out, size_t in)
{
    size_t rows = backward ? mt_codes_ld(n) : n;
    *a = MT_MAX(*a, rows * (backward ? MT_MAX(in, out) : in));
    *b = MT_MAX(*b, MT_MAX(weights, backward ? rows * in : 0));
}

/* Operands of the largest products; experts: of theirs alone. */
static void lay_out_product(struct mt_product_scratch *s, const struct mt_model_params *p, mt_device *dev, bool experts,
                            void *base, size_t *at)
{
    const struct mt_layout *l = p->layout;
    size_t a = 0, b = 0;
    for (const struct mt_tensor *t = l->tensors; t < l->tensors + l->n_tensors && p->fp8; t++) {
        size_t in = (size_t)t->shape[1], n = t->expert >= 0 ? mt_expert_tile_rows(p, dev) : p->max_tokens;
        bool counts = l->units[t->unit].kind == MT_UNIT_LAYER && (t->expert >= 0 || !experts);
        if (counts && t->n_dims == 2 && !t->adapter && t->param && in && t->first == t->param->at &&
            mt_has_whole_vectors(t->param->n / in, in))
            widen_codes(&a, &b, p->backward, n, p->coded_weights && mt_coded_elems(l, t) ? 0 : t->param->n,
                        t->param->n / in, in);
    }
    s->parts = mt_take(base, at, a ? 2 * MT_AMAX_PARTS * sizeof(float) : 0);
    s->scale = mt_take(base, at, a ? 2 * sizeof(float) : 0);
    s->a = mt_take(base, at, a);
    s->b = mt_take(base, at, b);
}

static void lay_out_adapters(struct mt_own_scratch *s, const struct mt_model_params *p, mt_device *dev, bool experts,
                             void *base, size_t *at)
{
    s->adapter_x = mt_take(base, at, adapter_bytes(p, dev, experts));
    s->adapter_dy = mt_take(base, at, p->backward ? adapter_bytes(p, dev, experts) : 0);
}

/* What each side stream has for itself. */
static void lay_out_sides(mt_model *m, const struct mt_model_params *p, mt_device *dev, void *base, size_t *at)
{
    m->n_sides = mt_model_sides(p, dev);
    for (int i = 1; i <= m->n_sides; i++) {
        lay_out_adapters(&m->side[i], p, dev, true, base, at);
        lay_out_product(&m->side[i].product, p, dev, true, base, at);
        m->side[i].workspace = mt_take(base, at, mt_part_experts.workspace_bytes(p, NULL, dev));
    }
    m->side_memory = mt_take(base, at, (size_t)m->n_sides * mt_device_limits(dev)->side_bytes);
}

/* Cuts the scratch from `base` (NULL: sizes only); returns its bytes. */
static size_t scratch_layout(mt_model *m, mt_device *dev, const struct mt_model_params *p,
                             void *base)
{
    size_t at = 0, hidden = p->max_tokens * (size_t)p->layout->cfg.hidden * mt_dtype_size(p->dtype);
    size_t scratch, workspace, decoded = 0;
    unit_bytes(&scratch, &workspace, dev, p);
    for (size_t i = 0; i < p->layout->n_tensors && p->coded_weights; i++)
        scratch = MT_MAX(scratch, mt_coded_elems(p->layout, &p->layout->tensors[i]) * mt_dtype_size(p->dtype));
    for (size_t u = 0; u < p->layout->n_units; u++)
        decoded = MT_MAX(decoded, mt_unit_decoded_bytes(p->layout, u, p->dtype));
    m->decoded = mt_take(base, &at, decoded);
    m->shares = mt_take(base, &at, (size_t)p->layout->cfg.moe.n_experts * sizeof(float));
    m->coded_scale = mt_take(base, &at, p->coded_weights ? p->layout->n_tensors * sizeof(float) : 0);
    m->outputs.n = mt_outputs_rows(p, dev);
    m->outputs.rows = mt_take(base, &at, mt_outputs_bytes(p, dev));
    m->h = mt_take(base, &at, hidden);
    m->dh = mt_take(base, &at, hidden);
    /* for a cast to 16 bits in place */
    m->cast_start = mt_take(base, &at, p->backward ? (size_t)MT_SUMSQ_BLOCK * 2 : 0);
    m->direct = mt_take(base, &at, mt_direct_scratch_bytes(p));
    lay_out_adapters(&m->own, p, dev, false, base, &at);
    m->dora = mt_take(base, &at, mt_dora_bytes(p));
    m->adapter_in = mt_take(base, &at, dropped_bytes(p));
    lay_out_product(&m->own.product, p, dev, false, base, &at);
    m->own.workspace = mt_take(base, &at, workspace);
    lay_out_sides(m, p, dev, base, &at);
    m->unit_scratch = mt_take(base, &at, scratch);
    m->scratch_end = mt_take(base, &at, 0);
    return at;
}

void mt_model_poison_parts(const mt_model *m, void *from)
{
    char *h = m->h, *records = m->unit_scratch, *end = m->scratch_end, *after = from ? from : records;
    mt_model_poison(m, h, (size_t)(records - h));
    mt_model_poison(m, after, (size_t)(end - after));
}

/* Its place behind the tables. */
static size_t one_at(const struct mt_layout *l, const struct mt_model_params *p)
{
    size_t tables = mt_align_up(mt_rope_table_bytes(p), ALIGN) + mt_select_bias_bytes(l);
    return mt_model_n_ones(l) ? mt_align_up(tables, ALIGN) : tables;
}

/* Rows of FP32 logits, and of gradients in a buffer of their own. */
static void logits_rows(const struct mt_model_params *p, size_t *logits, size_t *gradients)
{
    size_t chunk = MT_MIN(p->logits_chunk, p->max_tokens), piece = p->logits_piece ? p->logits_piece : chunk;
    *logits = MT_MIN(piece, chunk);
    *gradients = p->backward && piece < chunk ? chunk : 0;
}

size_t mt_model_lay_out_logits(mt_model *m, const struct mt_model_params *p, void *base)
{
    size_t logits, gradients, at = 0, ld = mt_model_logits_ld(p->layout);
    logits_rows(p, &logits, &gradients);
    m->logits = mt_take(base, &at, logits * ld * sizeof(float));
    m->dlogits = gradients ? mt_take(base, &at, gradients * ld * mt_dtype_size(p->dtype)) : NULL;
    return at;
}

static size_t used_bytes(const struct mt_model_params *p)
{
    return p->used_rows ? mt_align_up(mt_model_max_used_rows(p) * sizeof(int32_t), ALIGN) : 0;
}

static size_t weight_bytes(const struct mt_model_params *p)
{
    return p->row_weights ? mt_align_up(p->max_micro * p->max_tokens * sizeof(float), ALIGN) : 0;
}

/* Of the step's inputs: a block for each micro-batch, then weights of loss rows, then the used rows. */
static size_t all_input_bytes(const mt_model *m)
{
    return m->p.max_micro * m->input_bytes + weight_bytes(&m->p) + m->used_bytes;
}

int mt_model_bytes(struct mt_model_bytes *out, mt_device *dev, const struct mt_model_params *p,
                   struct mt_err *)
{
    mt_model sizes = {0};
    struct mt_micro_inputs in;
    *out = (struct mt_model_bytes){
        .scratch = scratch_layout(&sizes, dev, p, NULL),
        .logits = mt_model_lay_out_logits(&sizes, p, NULL),
        .inputs = p->max_micro * mt_inputs_layout(&in, p, NULL) + weight_bytes(p) + used_bytes(p) +
                  mt_model_stats_bytes(p),
        .tables = one_at(p->layout, p) + mt_align_up(mt_model_n_ones(p->layout) * mt_dtype_size(p->dtype), ALIGN),
        .counts = mt_model_counts_bytes(p),
    };
    return 0;
}

static int alloc_host(mt_model *m, struct mt_err *err)
{
    /* if nothing is computed, little of it is used: mapped without being touched */
    int (*alloc)(void **, size_t, const char *, struct mt_err *) = m->p.assumed_rows ? mt_host_map : mt_host_alloc;
    int rc = alloc(&m->inputs_host, all_input_bytes(m), "step inputs", err);
    void *stats = NULL;
    rc = rc ?: alloc(&stats, m->stats_bytes, "step statistics", err);
    m->stats_host = stats;
    void *counts = NULL;
    if (!rc && m->counts_bytes)
        rc = alloc(&counts, m->counts_bytes, "rows of experts", err);
    m->counts = counts;
    m->shares_host = counts ? (float *)counts + m->counts_bytes / sizeof(float) - m->layout->cfg.moe.n_experts : NULL;
    if (!rc && counts)
        rc = mt_device_register_host(m->dev, counts, m->counts_bytes, err);
    if (!rc && counts)
        rc = mt_event_create(m->dev, &m->counts_ready, err);
    return rc ?: mt_device_register_host(m->dev, m->inputs_host, all_input_bytes(m), err)
              ?: mt_device_register_host(m->dev, m->stats_host, m->stats_bytes, err);
}

static int alloc_device(mt_model *m, struct mt_err *err)
{
    struct mt_model_bytes b;
    void *logits = NULL, *stats = NULL;
    int rc = mt_model_bytes(&b, m->dev, &m->p, err)
          ?: mt_device_alloc(m->dev, b.scratch, "scratch", &m->scratch, err)
          ?: mt_device_alloc(m->dev, b.logits, "logits", &logits, err);
    if (!rc)
        mt_model_lay_out_logits(m, &m->p, logits);
    rc = rc ?: mt_device_alloc(m->dev, b.tables, "rotary tables", &m->tables, err)
            ?: mt_device_alloc(m->dev, all_input_bytes(m), "inputs", &m->inputs_dev, err)
            ?: mt_device_alloc(m->dev, m->stats_bytes, "inputs", &stats, err);
    m->stats_dev = stats;
    return rc;
}

/* With FP8 compute, codes of E4M3 are made from decoded weights. */
static size_t coded_rows(const struct mt_model_params *p, mt_device *dev)
{
    bool generates = p->cache.slots && !p->backward;
    bool takes = generates && !p->fp8 && p->dtype == MT_BF16 && mt_layout_codes_multiply(p->layout);
    return takes ? mt_device_limits(dev)->coded_rows : 0;
}

int mt_model_create(mt_model **out, mt_device *dev, const struct mt_model_params *p,
                    struct mt_err *err)
{
    struct mt_micro_inputs in;
    mt_model *m = mt_calloc(1, sizeof(*m));
    if (!m)
        return mt_fail_nomem(err, "the model", sizeof(*m));
    m->dev = dev;
    m->p = *p;
    m->layout = p->layout;
    m->dt = p->dtype;
    m->c = (size_t)p->layout->cfg.hidden;
    m->coded_rows = coded_rows(p, dev);
    m->expert_gradient = mt_expert_gradient_elems(p->layout);
    m->input_bytes = mt_inputs_layout(&in, p, NULL);
    m->used_bytes = used_bytes(p);
    m->stats_bytes = mt_model_stats_bytes(p);
    m->counts_bytes = mt_model_counts_bytes(p);
    m->running = m->inputs = mt_arrays_add(&m->arrays, p->max_micro, sizeof(*m->inputs));
    m->partials_at = mt_arrays_add(&m->arrays, p->layout->n_tensors + 1, sizeof(*m->partials_at));
    m->weighings = mt_arrays_add(&m->arrays, p->max_micro, sizeof(*m->weighings));
    m->scalars = mt_arrays_add(&m->arrays, (size_t)p->layout->cfg.n_layers, sizeof(*m->scalars));
    m->places = mt_arrays_add(&m->arrays, p->layout->n_recipes, sizeof(*m->places));
    if (p->used_rows)
        m->seen = mt_arrays_add(&m->arrays, mt_div_up((size_t)p->layout->cfg.vocab, (size_t)64), sizeof(*m->seen));
    for (int64_t i = 0; m->scalars && i < p->layout->cfg.n_layers; i++)
        m->scalars[i] = 1;
    int rc = m->arrays.failed ? mt_fail_nomem(err, "the model", p->max_micro * sizeof(*m->inputs)) : 0;
    rc = rc ?: alloc_host(m, err) ?: alloc_device(m, err);
    if (rc) {
        mt_model_destroy(&m);
        return rc;
    }
    mt_model_place_partials(p->layout, m->partials_at);
    scratch_layout(m, dev, p, m->scratch);
    for (size_t i = 0; i < p->layout->n_recipes; i++)
        mt_recipe_place(p->layout->recipes[i], p, dev, &m->places[i]);
    rc = mt_model_sides_create(m, err);
    for (size_t i = 0; i < p->max_micro; i++)
        m->weighings[i] = (struct mt_weighing){m, i};
    for (size_t i = 0; i < p->max_micro; i++)
        mt_inputs_layout(&m->inputs[i], p, (char *)m->inputs_dev + i * m->input_bytes);
    size_t at = p->max_micro * m->input_bytes, used_at = at + weight_bytes(p);
    m->weights_dev = p->row_weights ? (float *)(void *)((char *)m->inputs_dev + at) : NULL;
    m->weights_host = (float *)(void *)((char *)m->inputs_host + at);
    m->used_dev = (int32_t *)(void *)((char *)m->inputs_dev + used_at);
    m->used_host = (int32_t *)(void *)((char *)m->inputs_host + used_at);
    if (mt_select_bias_bytes(p->layout))
        m->select_bias = (float *)(void *)((char *)m->tables + mt_align_up(mt_rope_table_bytes(p), ALIGN));
    if (mt_model_n_ones(p->layout))
        m->one = (char *)m->tables + one_at(p->layout, p);
    rc = rc ?: mt_model_upload_tables(m, err);
    if (!rc && (p->top || p->draws))
        rc = mt_model_top_create(m, err);
    if (rc)
        mt_model_destroy(&m);
    else
        *out = m;
    return rc;
}

void mt_model_destroy(mt_model **model)
{
    mt_model *m = *model;
    if (!m)
        return;
    mt_model_top_destroy(m);
    void *dev_mem[] = {m->scratch, m->logits, m->tables, m->inputs_dev, m->stats_dev};
    for (size_t i = 0; i < MT_ARRAY_LEN(dev_mem); i++)
        mt_device_free(m->dev, dev_mem[i]);
    if (m->inputs_host)
        mt_device_unregister_host(m->dev, m->inputs_host);
    if (m->stats_host)
        mt_device_unregister_host(m->dev, m->stats_host);
    if (m->counts)
        mt_device_unregister_host(m->dev, m->counts);
    mt_event_destroy(&m->counts_ready);
    mt_model_sides_destroy(m);
    mt_host_free(m->counts, m->counts_bytes);
    mt_host_free(m->inputs_host, all_input_bytes(m));
    mt_host_free(m->stats_host, m->stats_bytes);
    mt_arrays_finish(&m->arrays);
    free(m);
    *model = NULL;
}
