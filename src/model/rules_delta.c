/* SPDX-License-Identifier: Apache-2.0 */
/* The rules of linear recurrences: the short convolution, gates, the gated delta rule or Mamba 2's, and their norm. */
#include <math.h>

#include "base/mem.h"
#include "model/rule.h"

/* Where inputs of the convolution from column `first` on lie in what is carried or handed on. */
static size_t inputs_at(const struct mt_rule_run *r, const struct mt_unit_cache *of, size_t first, enum mt_dtype dtype)
{
    return of->inputs + first * ((size_t)r->recipe->spec->delta.taps - 1) * mt_dtype_size(dtype);
}

/* What earlier tokens left for the states, or for inputs of the convolution from column `first` on; in place. */
static struct mt_carried carried(const struct mt_rule_run *r, bool inputs, size_t first)
{
    char *cache = mt_value(r->run, MT_ROLE_CACHE);
    struct mt_unit_cache of = mt_recipe_cache(r->recipe, r->m->dt, 1);
    if (!cache)
        return (struct mt_carried){.after = NULL};
    cache += inputs ? inputs_at(r, &of, first, r->m->dt) : 0;
    return (struct mt_carried){cache, cache, of.bytes, r->run->in->past, r->run->in->table[MT_CACHE_STATES]};
}

/* The same from chunk to chunk of a row: what each left but the last lies one after the other; what backward leaves in
 * turn in two places. When a chunk is made again for backward, it was left. */
static struct mt_handed handed(const struct mt_rule_run *r, bool inputs, size_t first, bool backward)
{
    const struct mt_micro_inputs *in = r->run->in;
    enum mt_dtype dtype = backward ? MT_F32 : r->m->dt;
    char *p = mt_value(r->run, backward ? MT_ROLE_DKEYS : MT_ROLE_KEYS);
    if (!p)
        return (struct mt_handed){.to = NULL};
    struct mt_unit_cache of = mt_recipe_cache(r->recipe, dtype, 0);
    size_t chunk = r->run->of->mb % mt_model_chunks(&r->m->p);
    p += inputs ? inputs_at(r, &of, first, dtype) : 0;
    if (backward)
        return (struct mt_handed){in->doc_after ? p + (chunk + 1) % 2 * of.bytes : NULL,
                                  in->doc_before ? p + chunk % 2 * of.bytes : NULL};
    return (struct mt_handed){in->doc_before ? p + (MT_MAX(chunk, (size_t)1) - 1) * of.bytes : NULL,
                              in->doc_after && !r->run->dx ? p + chunk * of.bytes : NULL};
}

/* --- short convolutions of queries, keys and values: in[i] -> out[i], whose columns are the channels */

enum { PARTS = 3 };

static struct mt_short_conv conv_args(const struct mt_rule_run *r, int i)
{
    size_t at = r->node->out[i].first, taps = (size_t)r->recipe->spec->delta.taps;
    const void *bias = mt_rule_weight(r, 1);
    return (struct mt_short_conv){.n = r->n, .taps = taps, .n_docs = r->run->in->n_docs, .dtype = r->m->dt,
                                  .cu_seqlens = r->run->in->cu_seqlens, .x = r->in[i], .y = r->out[i],
                                  .w = mt_elem(r->m, mt_rule_weight(r, 0), at * taps),
                                  .bias = bias ? mt_elem(r->m, bias, at) : NULL,
                                  .carried = carried(r, true, at), .handed = handed(r, true, at, false)};
}

static int conv(const struct mt_rule_run *r, struct mt_err *err)
{
    int rc = 0;
    for (int i = 0; i < PARTS && !rc; i++) {
        struct mt_short_conv a = conv_args(r, i);
        rc = mt_op_short_conv(r->m->dev, &a, err);
    }
    return rc;
}

static int conv_backward(const struct mt_rule_run *r, struct mt_err *err)
{
    float *dw = mt_rule_grad(r, 0), *dbias = mt_rule_grad(r, 1);
    int rc = 0;
    for (int i = 0; i < PARTS && !rc; i++) {
        size_t at = r->node->out[i].first, taps = (size_t)r->recipe->spec->delta.taps;
        struct mt_short_conv_bwd a = {.fwd = conv_args(r, i), .dy = r->d_out[i], .dx = r->d_in[i],
                                      .dw = dw ? dw + at * taps : NULL, .dbias = dbias ? dbias + at : NULL,
                                      .handed = handed(r, true, at, true),
                                      .workspace = r->m->own.workspace};
        rc = mt_op_short_conv_bwd(r->m->dev, &a, err);
    }
    return rc;
}

static size_t conv_workspace(const struct mt_recipe *r, const struct mt_node *n, const struct mt_model_params *p,
                             mt_device *dev)
{
    size_t most = 0;
    for (int i = 0; i < PARTS; i++) {
        struct mt_short_conv_bwd a = {.fwd = {.n = p->max_tokens, .taps = (size_t)r->spec->delta.taps,
                                              .x = mt_rule_shape(r, &n->in[i])}};
        most = MT_MAX(most, mt_op_short_conv_bwd_workspace(dev, &a));
    }
    return most;
}

static double conv_macs(const struct mt_recipe *r, const struct mt_node *n, size_t)
{
    return (double)(r->value[n->out[0].value].width * (size_t)r->spec->delta.taps);
}

const struct mt_rule mt_rule_short_conv = {.name = "short_conv", .reads_in = 7, .forward = conv,
                                           .backward = conv_backward, .workspace = conv_workspace, .macs = conv_macs};

/* --- gates: a in in[0], b in in[1] -> beta, g; out[2] is a ghost that takes the gradients of skips */

static struct mt_delta_gates gates_args(const struct mt_rule_run *r)
{
    const struct mt_delta_spec *s = &r->recipe->spec->delta;
    return (struct mt_delta_gates){.n = r->n, .dtype = r->m->dt, .plain = s->plain,
                                   .least = (float)s->least, .most = (float)s->most, .a = r->in[0], .b = r->in[1],
                                   .a_log = mt_rule_weight(r, 0), .dt_bias = mt_rule_weight(r, 1), .beta = r->out[0].p,
                                   .g = r->out[1].p};
}

MT_RULE_RUNS(gates, delta_gates, gates_args)

static int gates_backward(const struct mt_rule_run *r, struct mt_err *err)
{
    struct mt_delta_gates_bwd a = {.fwd = gates_args(r), .dbeta = r->d_out[0].p, .dg = r->d_out[1].p,
                                   .dskip = r->d_out[2].p, .da = r->d_in[0], .db = r->d_in[1],
                                   .da_log = mt_rule_grad(r, 0), .ddt_bias = mt_rule_grad(r, 1),
                                   .dd = mt_rule_grad(r, 2), .workspace = r->m->own.workspace};
    return mt_op_delta_gates_bwd(r->m->dev, &a, err);
}

static size_t gates_workspace(const struct mt_recipe *, const struct mt_node *n, const struct mt_model_params *p,
                              mt_device *dev)
{
    size_t heads = mt_view_width(&n->out[0]);
    struct mt_delta_gates_bwd a = {.fwd = {.n = p->max_tokens, .a = mt_heads(NULL, heads, heads, 1)}};
    return mt_op_delta_gates_bwd_workspace(dev, &a);
}

const struct mt_rule mt_rule_delta_gates = {.name = "delta_gates", .reads_in = 3, .forward = gates,
                                            .backward = gates_backward, .workspace = gates_workspace};

/* --- the rule: q, k, v, beta, g -> o; in[5]: where the skips' gradients go ---------------------- */

static struct mt_delta_rule rule_args(const struct mt_rule_run *r)
{
    bool plain = r->recipe->spec->delta.plain;
    return (struct mt_delta_rule){.n = r->n, .n_docs = r->run->in->n_docs,
                                  .max_len = r->run->in->max_len, .dtype = r->m->dt, .plain = plain, .eps = 1e-6f,
                                  .scale = plain ? 1 : (float)(1 / sqrt((double)r->in[1].dim)),
                                  .skip = plain ? mt_rule_weight(r, 0) : NULL, .cu_seqlens = r->run->in->cu_seqlens,
                                  .cu_seqlens_host = r->run->in->cu_seqlens_host, .q = r->in[0], .k = r->in[1],
                                  .v = r->in[2], .o = r->out[0], .beta = r->in[3].p, .g = r->in[4].p,
                                  .workspace = r->workspace, .carried = carried(r, false, 0),
                                  .handed = handed(r, false, 0, false)};
}

MT_RULE_RUNS(rule, delta_rule, rule_args)

static int rule_backward(const struct mt_rule_run *r, struct mt_err *err)
{
    struct mt_delta_rule_bwd a = {.fwd = rule_args(r), .d_o = r->d_out[0], .dq = r->d_in[0], .dk = r->d_in[1],
                                  .dv = r->d_in[2], .dbeta = r->d_in[3].p, .dg = r->d_in[4].p, .dskip = r->d_in[5].p,
                                  .handed = handed(r, false, 0, true)};
    return mt_op_delta_rule_bwd(r->m->dev, &a, err);
}

static size_t rule_scratch(const struct mt_recipe *r, const struct mt_node *n, const struct mt_model_params *p,
                           mt_device *dev)
{
    struct mt_delta_rule a = {.n = p->max_tokens, .max_len = p->max_len, .dtype = p->dtype,
                              .plain = r->spec->delta.plain, .q = mt_rule_shape(r, &n->in[0]),
                              .k = mt_rule_shape(r, &n->in[1]), .v = mt_rule_shape(r, &n->in[2]),
                              .o = mt_rule_shape(r, &n->in[2])};
    return mt_op_delta_rule_workspace(dev, &a);
}

/* The recurrence: three products of a state with a vector; plain: two. */
static double rule_macs(const struct mt_recipe *r, const struct mt_node *n, size_t)
{
    return (r->spec->delta.plain ? 2 : 3) * (double)mt_view_width(&n->out[0]) * (double)n->in[1].dim;
}

const struct mt_rule mt_rule_delta = {.name = "delta_rule", .reads_in = 31, .forward = rule, .backward = rule_backward,
                                      .scratch = rule_scratch, .macs = rule_macs};

/* --- the norm of its outputs, with a gate in in[1] ---------------------------------------------- */

static struct mt_gated_norm gated_args(const struct mt_rule_run *r)
{
    return (struct mt_gated_norm){.n = r->n, .dtype = r->m->dt,
                                  .gate_first = r->recipe->spec->delta.plain, .eps = (float)r->node->number,
                                  .x = r->in[0], .z = r->in[1], .y = r->out[0], .w = mt_rule_weight(r, 0)};
}

MT_RULE_RUNS(gated, gated_norm, gated_args)

static int gated_backward(const struct mt_rule_run *r, struct mt_err *err)
{
    struct mt_gated_norm_bwd a = {.fwd = gated_args(r), .dy = r->d_out[0], .dx = r->d_in[0], .dz = r->d_in[1],
                                  .dw = mt_rule_grad(r, 0), .workspace = r->m->own.workspace};
    return mt_op_gated_norm_bwd(r->m->dev, &a, err);
}

static size_t gated_workspace(const struct mt_recipe *r, const struct mt_node *n, const struct mt_model_params *p,
                              mt_device *dev)
{
    struct mt_gated_norm_bwd a = {.fwd = {.n = p->max_tokens, .gate_first = r->spec->delta.plain,
                                          .x = mt_rule_shape(r, &n->in[0])}};
    return mt_op_gated_norm_bwd_workspace(dev, &a);
}

const struct mt_rule mt_rule_gated_norm = {.name = "gated_norm", .reads_in = 3, .through = 1, .forward = gated,
                                           .backward = gated_backward, .workspace = gated_workspace};
