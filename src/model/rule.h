/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "model/linear.h"
#include "model/recipe.h"

/** One call of a rule: the views of its node in this run, p NULL where there is nothing. */
struct mt_rule_run {
    const struct mt_part_run *run;
    mt_model *m; /* the run's */
    size_t n;    /* tokens */
    const struct mt_recipe *recipe;
    const struct mt_node *node;
    unsigned outs; /* forward: bit i: out[i] is to be made */
    bool remake;   /* backward: out[0] is wanted again, where its gradient was */
    struct mt_heads in[MT_NODE_INS], out[MT_NODE_OUTS], d_in[MT_NODE_INS], d_out[MT_NODE_OUTS];
    const void *add; /* backward: d_in[0] = add + gradient; NULL: 0 */
    void *workspace; /* mt_rule.scratch() bytes */
};

/** What there is to know of an operation of recipes: how it runs, and what its backward reads, makes and overwrites. */
struct mt_rule {
    const char *name;
    unsigned reads_in, reads_out; /* bit i: backward reads in[i], out[i] of the forward pass */
    unsigned statistics; /* bit i: out[i] has no gradient; if it is there, forward makes the other outputs by it */
    unsigned blind;      /* bit i: in[i] gets no gradient */
    unsigned through;    /* bit i: the gradient of out[i] becomes that of in[i] in its place */
    unsigned residual;   /* bit i: the gradient of in[i] is that of out[0] itself */
    bool consumes;       /* backward overwrites in[0] with its gradient, and can make out[0] again where its was */
    bool adds;           /* backward can add to what d_in[0] has */
    int (*forward)(const struct mt_rule_run *r, struct mt_err *err);
    int (*backward)(const struct mt_rule_run *r, struct mt_err *err); /* NULL: nothing to do, or two halves: */
    int (*input_grad)(const struct mt_rule_run *r, struct mt_err *err);
    int (*weight_grad)(const struct mt_rule_run *r, struct mt_err *err); /* after it; reads in[0] */
    /** Bytes of mt_model.own.workspace, and of scratch of its own. NULL: none. */
    size_t (*workspace)(const struct mt_recipe *r, const struct mt_node *n, const struct mt_model_params *p,
                        mt_device *dev);
    size_t (*scratch)(const struct mt_recipe *r, const struct mt_node *n, const struct mt_model_params *p,
                      mt_device *dev);
    /** Multiply-adds of a token, in documents of seq_len tokens. NULL: none that count. */
    double (*macs)(const struct mt_recipe *r, const struct mt_node *n, size_t seq_len);
};

extern const struct mt_rule mt_rule_norm, mt_rule_linear, mt_rule_glu, mt_rule_activate, mt_rule_xielu, mt_rule_sum,
    mt_rule_scaled, mt_rule_cast, mt_rule_rope, mt_rule_head_norm, mt_rule_attend, mt_rule_sink, mt_rule_gate,
    mt_rule_factor, mt_rule_copy, mt_rule_short_conv, mt_rule_delta_gates, mt_rule_delta, mt_rule_gated_norm;

/** What generation keeps of earlier tokens for a part (struct mt_unit_cache). */
struct mt_unit_cache mt_recipe_cache(const struct mt_recipe *r, enum mt_dtype dtype, size_t block);
/** Elements of a row. */
static inline size_t mt_view_width(const struct mt_view *v)
{
    return v->heads * v->dim;
}
/** Parameter `which` of the node; without one of no elements. */
static inline struct mt_param mt_rule_param(const struct mt_rule_run *r, int which)
{
    struct mt_param none = {0};
    int role = r->node->param[which];
    return role < 0 ? none : r->run->part->param[role];
}
/** Its elements in the unit's weights, and in the unit's gradient; NULL: the node has none, or nothing trains it. */
static inline const void *mt_rule_weight(const struct mt_rule_run *r, int which)
{
    struct mt_param p = mt_rule_param(r, which);
    return p.n ? mt_elem(r->m, r->run->w, p.at) : NULL;
}
static inline float *mt_rule_grad(const struct mt_rule_run *r, int which)
{
    return mt_grad_of(r->run->g, mt_rule_param(r, which));
}
/** Defines a function of a rule that runs one operation, of the arguments that another function makes. */
#define MT_RULE_RUNS(function, operation, arguments)                                                                   \
    static int function(const struct mt_rule_run *r, struct mt_err *err)                                               \
    {                                                                                                                  \
        struct mt_##operation a = arguments(r);                                                                        \
        return mt_op_##operation(r->m->dev, &a, err);                                                             \
    }
/** A node's view without memory, for sizes of workspaces. */
static inline struct mt_heads mt_rule_shape(const struct mt_recipe *r, const struct mt_view *v)
{
    struct mt_heads h = {NULL, v->value < 0 ? 0 : r->value[v->value].width, v->stride, v->heads, v->dim};
    return h;
}
