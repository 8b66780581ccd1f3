/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "model/model.h"
#include "model/parts.h"

/**
 * A kind of part: its parameters, the record that forward leaves for backward, its scratch, and its forward
 * and backward as device operations. A decoder layer is a list of parts (mt_family.parts); each takes the
 * hidden state x [n, hidden] and gives the next one, y [n, hidden].
 */

struct mt_layout_builder;
struct mt_recipe; /* recipe.h */
struct mt_view;
struct mt_micro_inputs; /* state.h */

/** The sizes of records and of other values depend on these. */
struct mt_part_shape {
    const struct mt_hf_config *cfg;
    const struct mt_layer_spec *spec; /* of the part's layer */
    enum mt_dtype dtype;  /* of activations */
    size_t max_tokens;    /* of a micro-batch */
    size_t group_rows;     /* tokens of a group; 0: not known, as where only records are measured */
    const struct mt_recipe *recipe; /* of the part; NULL: it has none */
};

enum { MT_RECORD_ALIGN = 256 };

/**
 * The record of a part is in segments: each can be kept for backward alone, and prepare() makes the others again. While
 * a record is laid out, `base` are the segments' addresses (NULL: sizes alone), `bytes` how much of each is taken.
 */
enum { MT_PART_MAX_SEGMENTS = 3 };
struct mt_part_record {
    void *base[MT_PART_MAX_SEGMENTS];
    size_t bytes[MT_PART_MAX_SEGMENTS];
};
/** Reserves `bytes` of a segment, aligned to MT_RECORD_ALIGN; returns their address. */
void *mt_record_take(struct mt_part_record *r, int segment, size_t bytes);

/** One run of a part, over one micro-batch. Device pointers, borrowed until the COMPUTE stream has run it. */
struct mt_part_run {
    mt_model *m;
    const struct mt_part *part;
    struct mt_part_shape shape;
    const struct mt_micro_inputs *in;
    const struct mt_unit_run *of; /* the unit's */
    const void *w;   /* weights of the part's unit */
    const void *x;   /* [n, hidden] input; NULL for embed */
    struct mt_part_record record; /* the segments' addresses, MT_RECORD_ALIGN-aligned; bytes are 0 */
    unsigned kept;   /* prepare: bit i: segment i of the record is there already */
    void *scratch;   /* kind->scratch_bytes() bytes, shared with the other parts: undefined at first */
    void *dx;        /* backward: in, gradient of the part's output; out, of x */
    float *g;        /* backward: FP32 gradient of the unit, accumulated into; NULL: none of it is trained */
};

/** A value that a part reads or writes. Of a unit's parts that have a port of one role, the first says how it is used. */
struct mt_part_port {
    enum mt_role role;
    enum mt_access forward, backward;               /* MT_NO_ACCESS: not used in that pass */
    size_t (*bytes)(const struct mt_part_shape *s); /* NULL: another port of the role says, or the unit's sizes */
    bool (*has)(const struct mt_hf_config *cfg);    /* NULL: always */
};

/** Of a part that makes a hidden state of another. */
#define MT_PORTS_OF_HIDDEN_STATE                                                                                       \
    {MT_ROLE_WEIGHTS, MT_READ, MT_READ}, {MT_ROLE_X, MT_READ, MT_READ},                                                \
        {MT_ROLE_Y, MT_WRITE, MT_NO_ACCESS, mt_hidden_bytes},                                                          \
        {MT_ROLE_DX, MT_NO_ACCESS, MT_UPDATE, mt_hidden_bytes}, {MT_ROLE_GRAD, MT_NO_ACCESS, MT_SUM}
size_t mt_hidden_bytes(const struct mt_part_shape *s);

/** The buffer of a value, in a run of a part that has a port of that role; NULL: the run does not use it. */
static inline void *mt_value(const struct mt_part_run *r, enum mt_role role)
{
    return r->of->at[role];
}

struct mt_part_kind {
    const char *name;
    /** Runs once a group, over the rows of all its micro-batches; else for each micro-batch. */
    bool per_step;
    /** The layer has one such part for each group of experts. */
    bool per_group;
    /** It chooses the experts of a mixture: its parameters are those of MT_ROUTER_* (parts.h). */
    bool routes;
    /** Without a recipe: bit i: the linear layer of role i computes with adapters (mt_linear()). */
    unsigned adapted;
    /** Bit i: so does that of role i, if its adapter is asked for by name: MT_ALL_LINEAR does not mean it. */
    unsigned adapted_by_name;
    /** What it reads and writes, beside its record and its adapters; up to the first without a role. */
    struct mt_part_port port[MT_MAX_PORTS];
    /** Lists its operations and returns its output (recipe.h). NULL: the part has functions of its own for its record,
     * scratch and passes. */
    struct mt_view (*recipe)(struct mt_recipe *r);
    /** Adds the parameters, in the order in which they lie in the unit. NULL: it has none. */
    void (*lay_out)(struct mt_layout_builder *b, struct mt_part *p);
    /** Names of the segments of its record; none: it has one, named as the part is. */
    const char *segment[MT_PART_MAX_SEGMENTS];
    /** memory.offload_attention counts its segments, not memory.offload_layers. */
    bool attends;
    /** Bytes of each segment for a micro-batch; NULL: no record. */
    void (*record_bytes)(const struct mt_part_shape *s, struct mt_part_record *at);
    /** Scratch of one run, of a part in a layer like that. */
    size_t (*scratch_bytes)(const struct mt_model_params *p, const struct mt_layer_spec *s, mt_device *dev);
    /** Workspace of its operations, which all parts share; NULL: none. */
    size_t (*workspace_bytes)(const struct mt_model_params *p, const struct mt_layer_spec *s, mt_device *dev);
    /** From x to the segments of the record that are not in r->kept. NULL: nothing to do. */
    int (*prepare)(const struct mt_part_run *r, struct mt_err *err);
    /** From x and the record to y, which must not overlap x; or with y NULL to other values (mt_value()). NULL: the
     * part is not run by itself (head). */
    int (*finish)(const struct mt_part_run *r, void *y, struct mt_err *err);
    /** From dy in r->dx, x and the record, which is consumed, to dx and the gradients; experts: from and to other
     * values. */
    int (*backward)(const struct mt_part_run *r, struct mt_err *err);
    /** Multiply-adds of a token's forward in documents of seq_len tokens; of experts on average over tokens. */
    double (*macs_per_token)(const struct mt_hf_config *cfg, const struct mt_part *p, size_t seq_len);
};

/** Of a kind with a recipe, which mostly is the only one of its file. */
#define MT_PART_OF(function)                                                                                           \
    .recipe = function, .prepare = mt_recipe_prepare, .finish = mt_recipe_finish, .backward = mt_recipe_backward
#define MT_PART_OF_RECIPE MT_PART_OF(recipe)

/** How many segments its record has; one, if it has no record. */
size_t mt_part_n_segments(const struct mt_part_kind *kind);
/** NULL: no kind has that name. */
const struct mt_part_kind *mt_part_find(const char *name);

/* For lay_out(): parameters and their tensors. */

/**
 * A parameter of `n` tensors of `cols` columns (0: vectors), one under the other, of rows[i] rows each.
 * `usual` is the tensor's name in most families, without "model.layers.N." for parts of a layer; `*` in it means the
 * expert's number.
 */
struct mt_param_tensor {
    const char *usual;
    int64_t rows;
    bool constant;      /* never trained, whatever model.freeze says */
    int64_t head_rows;  /* not 0: its rows are heads of so many rows each, to which the rotary embedding applies */
    float start;        /* random weights: of a vector, all elements */
    float log_to;       /* not 0: its elements are logarithms of numbers drawn evenly between start and this */
};
void mt_layout_add_param(struct mt_layout_builder *b, struct mt_part *p, int role, int64_t cols, size_t n,
                         const struct mt_param_tensor *tensors);
/** Of one tensor. */
void mt_layout_add_tensor(struct mt_layout_builder *b, struct mt_part *p, int role, int64_t rows, int64_t cols,
                          const char *usual);
/** The weight of a norm, of n elements; usual NULL: there is no such norm. */
void mt_layout_add_norm(struct mt_layout_builder *b, struct mt_part *p, int role, int64_t n, const char *usual,
                        const struct mt_norm_spec *norm);
/** Its bias, if it has one (norm->biased): end to end with the weight, which was added last. */
void mt_layout_add_norm_bias(struct mt_layout_builder *b, struct mt_part *p, int role, int64_t n, const char *usual,
                             const struct mt_norm_spec *norm);
/** The number that the layer's output is multiplied by (layer_scalar.c), if it has one. */
void mt_layout_add_scalar(struct mt_layout_builder *b, struct mt_part *p, int role);
/** A parameter of expert p->first_expert + i. */
void mt_layout_add_expert_param(struct mt_layout_builder *b, struct mt_part *p, int i, int role, int64_t cols, size_t n,
                                const struct mt_param_tensor *tensors);
/** After all parameters of expert p->first_expert + i: its adapters. */
void mt_layout_end_expert(struct mt_layout_builder *b, struct mt_part *p, int i);
const struct mt_hf_config *mt_layout_builder_config(const struct mt_layout_builder *b);
