/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "hf/layer.h"
#include "model/part.h"

/**
 * A part of a layer as a list of operations on named values: what it computes, forward and backward, what it keeps and
 * the memory that it needs follow from the list. Functions with the names of operations (mt_norm_of(), mt_linear_of()
 * ...) add to it, in the order of the forward pass; a part's recipe is a function that calls them.
 *
 * A value has a row for each token. It is kept in a segment of the part's record, or made again when backward needs it:
 * by the same operations, so with the same bits. Nothing is optimised: an operation of the list is one of the device.
 */

/** Columns of a value: `heads` pieces of `dim` elements that begin `stride` elements apart, from `first` on. */
struct mt_view {
    int value;
    size_t first, heads, dim, stride;
};
enum { MT_NO_VALUE = -1, MT_UNKEPT = -1 };

struct mt_recipe_value {
    const char *name;
    size_t width;        /* elements of a token */
    bool f32;            /* FP32, whatever the compute dtype */
    int segment;         /* of the record that keeps it, or MT_UNKEPT */
    bool in_y;           /* it lies where the part's output will */
    bool ghost;          /* only its gradient has memory */
    int role, grad_role; /* it, and its gradient, are own rows of a value of the unit (enum mt_role); 0: not */
};

/** Bytes of an element. */
static inline size_t mt_recipe_elem(const struct mt_recipe_value *v, enum mt_dtype dtype)
{
    return v->f32 ? sizeof(float) : mt_dtype_size(dtype);
}

enum { MT_NODE_INS = 6, MT_NODE_OUTS = 4, MT_NODE_PARAMS = 3 };
struct mt_rule;
/** An operation of a recipe. */
struct mt_node {
    const struct mt_rule *rule;
    struct mt_view in[MT_NODE_INS], out[MT_NODE_OUTS]; /* MT_NO_VALUE: it has none there */
    int param[MT_NODE_PARAMS];                         /* roles of its parameters, or -1 */
    double number;                                     /* eps, or a factor */
    int kind;                                          /* which of several, as the rule says */
    int q_rope;                                        /* rope: the table of queries, where kind is that of keys */
    bool pairs;                                        /* rope: pairs are neighbours */
    bool apart; /* the gradients of outputs lie apart from those of inputs, whatever the rule says */
};

enum { MT_RECIPE_VALUES = 24, MT_RECIPE_NODES = 24, MT_TAPE_ACTIONS = 56, MT_TAPE_BUFFERS = 40, MT_TAPE_MAX = 10 };

/** The memory that an action uses: a buffer of the tape, and in it an element of each row. */
struct mt_at {
    int buffer; /* MT_NO_VALUE: none */
    size_t first, ld, stride;
};

/** One call of a rule. */
enum mt_act { MT_ACT_FORWARD, MT_ACT_BACKWARD, MT_ACT_INPUT_GRAD, MT_ACT_WEIGHT_GRAD, MT_ACT_SUM };
struct mt_action {
    enum mt_act act;
    int node;
    unsigned outs;   /* forward: bit i: out[i] is made; what is not is there already */
    unsigned remade; /* backward: node whose weight gradient follows, and needs out[0] again, plus 1; 0: none */
    struct mt_at in[MT_NODE_INS], out[MT_NODE_OUTS], d_in[MT_NODE_INS], d_out[MT_NODE_OUTS];
    struct mt_at add; /* what d_in[0] adds to */
    int workspace;    /* buffer of the rule's scratch, or MT_NO_VALUE */
};

/** Memory of a tape: what the part is given, a value of the unit or its gradient, of the record, or scratch from
 * one action to another. */
enum mt_buffer_kind {
    MT_BUFFER_X,
    MT_BUFFER_Y,
    MT_BUFFER_DX,
    MT_BUFFER_ROLE,
    MT_BUFFER_GRAD,
    MT_BUFFER_RECORD,
    MT_BUFFER_SCRATCH,
    MT_BUFFER_WORK
};
struct mt_buffer {
    enum mt_buffer_kind kind;
    int of;       /* the value; WORK: the node */
    size_t width; /* SCRATCH: elements of a token */
    bool f32;
    int from, to; /* first and last action that uses it */
};

/** A pass over a part: calls of rules, one after the other. */
struct mt_tape {
    struct mt_action action[MT_TAPE_ACTIONS];
    struct mt_buffer buffer[MT_TAPE_BUFFERS];
    int n_actions, n_buffers;
};

struct mt_recipe {
    struct mt_recipe_value value[MT_RECIPE_VALUES];
    struct mt_node node[MT_RECIPE_NODES];
    int n_values, n_nodes;
    int y; /* the value of the output; value 0 is the input */
    /* Bit i: a linear layer has its weight at role i: it computes with adapters (mt_linear()), and its gradient is a
     * single product, which can overwrite. */
    unsigned linears;
    const struct mt_hf_config *cfg;
    const struct mt_layer_spec *spec;
    const struct mt_part_kind *kind;
    size_t n_segments, index;                          /* index: in mt_layout.recipes */
    struct mt_tape prepare[1 << MT_PART_MAX_SEGMENTS]; /* by the segments that are kept */
    struct mt_tape finish, backward;
};

/** Places of a tape's scratch, for a model's sizes: bytes from the part's scratch, or buffers that all parts share. */
enum { MT_PLACE_H = -1, MT_PLACE_DH = -2 };
struct mt_places {
    ptrdiff_t at[MT_TAPE_BUFFERS];
    size_t bytes;
};
struct mt_recipe_places {
    struct mt_places prepare[1 << MT_PART_MAX_SEGMENTS], finish, backward;
};

/** Lists the operations of a kind's recipe in a layer like that, and makes the tapes; freed with free(). NULL: out of
 * memory. */
struct mt_recipe *mt_recipe_create(const struct mt_part_kind *kind, const struct mt_hf_config *cfg,
                                   const struct mt_layer_spec *spec);
/** The record's values; of[v] of those that are not kept stays as it is. */
void mt_recipe_lay_out_record(const struct mt_recipe *r, const struct mt_part_shape *s, struct mt_part_record *at,
                              void *of[MT_RECIPE_VALUES]);
/** Bytes of scratch; places may be NULL. */
size_t mt_recipe_place(const struct mt_recipe *r, const struct mt_model_params *p, mt_device *dev,
                       struct mt_recipe_places *places);
size_t mt_recipe_workspace(const struct mt_recipe *r, const struct mt_model_params *p, mt_device *dev);
double mt_recipe_macs(const struct mt_recipe *r, size_t seq_len);
int mt_recipe_prepare(const struct mt_part_run *run, struct mt_err *err);
int mt_recipe_finish(const struct mt_part_run *run, void *y, struct mt_err *err);
int mt_recipe_backward(const struct mt_part_run *run, struct mt_err *err);

/* --- for recipes -------------------------------------------------------------------------------- */

/** The hidden state that the part begins with. */
struct mt_view mt_recipe_x(const struct mt_recipe *r);
/** A new value of `width` elements a token. */
struct mt_view mt_recipe_value(struct mt_recipe *r, const char *name, size_t width, bool f32, int segment);
/** A value that is own rows of the unit's value of that role, and so its gradient, if it has a role. */
struct mt_view mt_recipe_rows(struct mt_recipe *r, const char *name, size_t width, int role, int grad_role);
/** `heads` pieces of a value. */
struct mt_view mt_view_of(struct mt_view v, size_t first, size_t heads, size_t dim, size_t stride);

/** A norm of hidden states with its weights at `role`; eps 0: the specification's. `stats`: the segment that keeps its
 * statistics. */
struct mt_view mt_norm_of(struct mt_recipe *r, const char *name, struct mt_view x, int role, double eps, int stats);
/** x W^T + b, of `width` elements; bias -1: none. */
struct mt_view mt_linear_of(struct mt_recipe *r, const char *name, struct mt_view x, int role, int bias, size_t width,
                            int segment);
/** x W^T + b + residual, as wide as that. */
struct mt_view mt_linear_add_of(struct mt_recipe *r, struct mt_view x, int role, int bias, struct mt_view residual);
/** The activation of the layer's MLP: of gate and up, or of up alone. */
struct mt_view mt_activation_of(struct mt_recipe *r, struct mt_view gate_up, int curve);
/** a + factor * b. */
struct mt_view mt_sum_of(struct mt_recipe *r, struct mt_view a, struct mt_view b, double factor);
/** y, times the layer's number, in place. */
struct mt_view mt_scaled_of(struct mt_recipe *r, struct mt_view y);
enum { MT_HEAD_NORM_PLUS_ONE = 1, MT_HEAD_NORM_ROUND_ONCE = 2 };
/** Two views, of which one may have no value: queries and keys. */
struct mt_pair {
    struct mt_view q, k;
};
/** RMSNorm of each head, from views to others, with the node's parameters, or weights of 1 where it has none; flags:
 * MT_HEAD_NORM_*. `stats`: as of mt_norm_of(). */
struct mt_node *mt_head_norm_of(struct mt_recipe *r, struct mt_pair x, struct mt_pair y, double eps, int flags,
                                int stats);
/** Queries and keys, rotated by a table each (MT_NO_ROPE: only copied). */
struct mt_node *mt_rope_of(struct mt_recipe *r, struct mt_pair x, struct mt_pair y, int rope, int q_rope);
/** Attention by the layer's rule; its outputs are kept in a segment. */
struct mt_view mt_attend_of(struct mt_recipe *r, struct mt_view q, struct mt_view k, struct mt_view v, int segment);
/** Another operation, from x and perhaps `with` to a new value as wide as x. */
struct mt_view mt_other_of(struct mt_recipe *r, const struct mt_rule *rule, const char *name, struct mt_view x,
                           struct mt_view with);
/** A node whose operands the caller sets. */
struct mt_node *mt_node_of(struct mt_recipe *r, const struct mt_rule *rule);
/** Ends the recipe: y = x + residual * after(in W^T + b), where `after` is a norm or nothing. */
struct mt_view mt_leave(struct mt_recipe *r, struct mt_view x, struct mt_view in, int role, int bias, int after,
                        int segment);
static inline struct mt_view mt_no_view(void)
{
    return (struct mt_view){.value = MT_NO_VALUE};
}
