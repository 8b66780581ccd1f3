/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "base/mem.h"
#include "device/ops.h"
#include "model/model.h"

/* The state of a model, and what its files share: a unit's products are linear.h, a mixture's lists moe.h. */

/** Reserves `bytes` at *at, aligned to MT_RECORD_ALIGN; returns their address from base (NULL: sizes alone). */
void *mt_take(void *base, size_t *at, size_t bytes);

/** Rotary rows of a micro-batch's tokens, of one of the model's embeddings (mt_hf_config.rope). */
struct mt_rope_rows {
    int32_t *positions;         /* [max_tokens] rows of the tables */
    float *own_cos, *own_sin;   /* [max_tokens, dims/2] rows of this micro-batch alone; NULL: never needed */
    const float *cos_t, *sin_t; /* the tables: the model's, or own_cos and own_sin */
    size_t n_table_rows;
};

/** The inputs of one micro-batch on the device; the same block in host memory is copied there. */
struct mt_micro_inputs {
    int32_t *ids, *cu_seqlens, *loss_rows, *targets, *run_ids, *run_starts, *order;
    float *weights; /* of the loss rows; NULL: without row_weights */
    int32_t *few;       /* [max_tokens, few]; NULL: none */
    float *few_values;  /* [max_tokens, few] */
    struct mt_rope_rows rope[MT_MAX_ROPES];
    size_t n_tokens, n_docs, max_len, n_loss, n_runs;
    size_t row_before, doc_before, doc_after, n_padding; /* of a chunk (struct mt_batch) */
    size_t first_row; /* index of its first row in its learner's rows of the step */
    size_t first_loss; /* of a chunk: loss rows of its row before it */
    int32_t *past, *table[MT_N_CACHE_KINDS]; /* of a cache (struct mt_batch); NULL: there is none */
    const int32_t *past_host, *table_host[MT_N_CACHE_KINDS];
    int learner;      /* whose adapters it runs through */
    struct mt_model_learner of; /* of that learner; zero in an evaluation */
    const int32_t *cu_seqlens_host;
};
/** The arrays of a micro-batch's input block, from `base` on (NULL: sizes alone); returns its bytes. */
size_t mt_inputs_layout(struct mt_micro_inputs *in, const struct mt_model_params *p, void *base);
/** Those in host memory, from which they are uploaded. */
struct mt_micro_inputs mt_inputs_on_host(const mt_model *m, size_t mb);

/** A micro-batch whose rows are weighed while the step runs. */
struct mt_weighing {
    struct mt_model *m;
    size_t mb;
};

/** Scratch of mt_product(): operands in FP8. */
struct mt_product_scratch {
    float *parts; /* [2 MT_AMAX_PARTS] largest magnitudes of A's pieces, then of B's */
    float *scale; /* [2] of A and B */
    uint8_t *a, *b;
    const void *known; /* the matrix whose magnitudes A's are, which has not changed since; NULL: none */
};
/** Weights that became codes (mt_model_encode()); w NULL: those of the running unit have not. */
struct mt_coded {
    const char *w;
    size_t unit; /* whose tensors they are */
};

/** Where products of a running unit or expert find codes in place of weights. */
struct mt_codes {
    const void *w; /* the weights, of which only unpacked tensors are there; NULL: all are */
    size_t first;  /* which element of the unit they begin with */
    size_t unit;
    const char *slot; /* its buffer */
};
/** Scratch of which each stream of operations has its own. */
struct mt_own_scratch {
    void *workspace;
    struct mt_codes codes;
    struct mt_coded coded;
    struct mt_product_scratch product;
    void *adapter_x, *adapter_dy; /* [max_tokens or rows of an expert's tile, rank]: x A^T; s dy B */
    const struct mt_adapter *dy_of; /* whose s dy B that is, until its weights' gradients are made; NULL: nobody's */
};
/** Outputs of experts that have not been summed yet (outputs.h): those at places [first, end); if these are the same,
 * none. */
struct mt_outputs {
    void *rows; /* [n, mt_moe_row()] */
    size_t n, first, end;
    int64_t origin; /* place of row 0 */
};
/** Rows of scratch that experts have until COMPUTE has come so far, on side streams: so many experts at once. */
enum { MT_SIDE_ROWS = 8, MT_SIDE_EVENTS = MT_MAX_SIDES + MT_SIDE_ROWS };

struct mt_recipe_places; /* recipe.h */
/** Rows whose logits are looked through on the host. */
struct mt_top_piece {
    struct mt_model *m;
    size_t mb, first, rows;
    float *logits;
};

struct mt_model {
    mt_device *dev;
    struct mt_model_params p;
    const struct mt_layout *layout;
    struct mt_arrays arrays; /* lists in host memory that last as long as the model */
    size_t c; /* elements of a hidden state */
    enum mt_dtype dt;
    size_t coded_rows; /* most rows of products that take codes of packed weights: of generation; 0: none do */
    bool training;     /* the uploaded micro-batches are a step's, not an evaluation's */
    struct mt_weighing *weighings; /* [max_micro] */
    struct mt_recipe_places *places; /* [n_recipes] of the layout: where their values are in scratch */

    const struct mt_draw *draw;      /* of the evaluation under way; NULL: none */
    struct mt_top_piece *top_pieces; /* [max_micro, max_tokens] by first row; NULL: without `top` and `draws` */
    float *top_logits;         /* [2 parts of a piece, vocab] in host memory */
    mt_event *logits_ready, *part_copied[2], *part_read[2]; /* of a piece; of each part's place */
    struct mt_top *top;        /* [max_micro, max_tokens, top] */
    float *top_rest;           /* [max_micro, max_tokens] */

    float *coded_scale; /* [n_tensors] of weights that became codes */
    void *scratch; /* one allocation, cut into what lasts beyond a part's run, and, from h on, what does not: */
    char *decoded;     /* the running unit's weights, if it keeps codes in its buffer; NULL: none does */
    void *h, *dh;      /* [max_tokens, hidden] */
    void *cast_start;
    struct mt_own_scratch own;                    /* of the stream that is turned to */
    struct mt_own_scratch side[MT_MAX_SIDES + 1]; /* of the others: of COMPUTE, then of side streams (sides.h) */
    int n_sides;
    size_t expert_gradient; /* mt_expert_gradient_elems(); 0: no layer is a mixture */
    struct mt_outputs outputs;
    void *side_memory;                            /* of the device */
    mt_event *side_event[MT_SIDE_EVENTS];
    void *direct;      /* mt_direct_scratch_bytes() */
    void *dora;                   /* mt_dora_bytes() */
    const struct mt_adapter *dora_of; /* whose g dy is in it; NULL: nobody's */
    void *adapter_in;             /* with dropout: [max_tokens, in] x after dropout, or a gradient before it */
    void *unit_scratch; /* of the running unit: its record if it is not kept, then its parts' scratch */
    void *scratch_end;
    float *logits;     /* [piece, mt_model_logits_ld()] */
    void *dlogits;     /* [chunk, mt_model_logits_ld()], or NULL: they overwrite the logits */
    void *tables; /* cos, sin, select_bias, one */
    void *one;    /* [as many as are needed] 1 in the compute dtype; NULL: not needed */
    struct {
        float *cos_t, *sin_t; /* [n_table_rows, dims/2] */
    } rope[MT_MAX_ROPES];
    float *select_bias;   /* [n_layers, n_experts] biases for choosing experts; NULL: none */
    float *scalars;       /* [n_layers] numbers that layers' outputs are multiplied by; 1 where there is none */
    bool constants_loaded;

    size_t input_bytes; /* of one micro-batch's block */
    void *inputs_dev, *inputs_host;
    float *weights_dev, *weights_host; /* [rows of the step] behind them; NULL: without row_weights */
    struct mt_micro_inputs *inputs; /* [max_micro] device pointers */
    /* used_rows: behind the blocks of all micro-batches; `seen` has a bit for each row of the table */
    size_t used_bytes, n_used;
    int32_t *used_dev, *used_host;
    uint64_t *seen;

    size_t stats_bytes;
    char *stats_dev, *stats_host; /* losses and correct by micro-batch, then partials */
    size_t *partials_at;          /* [n_tensors + 1] first partial of a tensor */

    /* The running micro-batch, and the indices in it of the tokens that products have as rows, NULL: all */
    const struct mt_micro_inputs *running;
    const int32_t *rows;
    const void *adapters;   /* of the running unit, if they are not among its weights */
    size_t n_micro;         /* micro-batches of the step that was uploaded last */
    size_t counts_bytes;
    int32_t *counts;        /* [groups, n_layers, 3 (n_experts + 1)] counts, starts and places of experts' lists, in host memory */
    mt_event *counts_ready;
    float *shares;          /* [n_experts] each expert's share of the rows of all layers; on the device */
    float *shares_host;
};

/* top.c */
int mt_model_top_create(mt_model *m, struct mt_err *err);
void mt_model_top_destroy(mt_model *m);
/** Sends logits of the micro-batch's rows [first, first + rows) to the host, where targets are drawn, and these back. */
int mt_model_draw_rows(mt_model *m, size_t mb, size_t first, size_t rows, struct mt_err *err);
/** Sends logits of the micro-batch's rows [first, first + rows) to the host, where the largest are found. */
int mt_model_top_rows(mt_model *m, size_t mb, size_t first, size_t rows, struct mt_err *err);

/** Micro-batches of a row, if they are chunks of it, else 1. */
static inline size_t mt_model_chunks(const struct mt_model_params *p)
{
    return p->row_tokens ? p->row_tokens / p->max_tokens : 1;
}
/** Where the micro-batch's loss rows are in an array of the step's: those of chunks follow each other, so that a row's
 * are one array; else they begin at a multiple of max_tokens. */
static inline size_t mt_model_loss_at(const mt_model *m, size_t mb)
{
    size_t chunks = mt_model_chunks(&m->p);
    return mb / chunks * chunks * m->p.max_tokens + m->inputs[mb].first_loss;
}
/** Rows of the largest group. Those of a micro-batch begin at a multiple of max_tokens. */
static inline size_t mt_model_group_rows(const struct mt_model_params *p)
{
    return p->assumed_rows ? p->assumed_rows : mt_group_most(p->groups, p->max_micro) * p->max_tokens;
}
/** Where in a buffer of its group the rows of a micro-batch begin. */
static inline size_t mt_model_first_row(const mt_model *m, size_t mb)
{
    return (mb - mt_group_first(m->p.groups, mt_group_of(m->p.groups, mb))) * m->p.max_tokens;
}
/** Is the loss that balances experts part of the step? */
static inline bool mt_model_balances(const mt_model *m)
{
    return m->p.router_aux_loss > 0 && m->training;
}
/** Casts one tensor's gradient from `src` to its place in `dst`, a unit's cast gradient, with its partial sums. */
int mt_model_cast_tensor(mt_model *m, size_t tensor, const float *src, void *dst, enum mt_dtype dst_dtype,
                         struct mt_err *err);

/** What a tensor's gradient becomes a direction by (direct.c). moments: the unit's buffer of states; NULL: it stays. */
struct mt_model_direct {
    float *g;            /* the tensor's */
    const void *w;       /* the unit's weights */
    char *moments;
    enum mt_dtype cast_dtype; /* the sums of the gradient's squares are of values as they would be cast */
};
/** In place, before the cast, which then makes no sums. */
int mt_model_direct_tensor(mt_model *m, size_t tensor, const struct mt_model_direct *a, struct mt_err *err);
size_t mt_direct_scratch_bytes(const struct mt_model_params *p);

/** Elements from a row of logits, or of their gradients, to the next: rows are 16-byte aligned. */
size_t mt_model_logits_ld(const struct mt_layout *l);
/** Bytes of a step's statistics; at[i], at most n_tensors: the first partial square of tensor i. */
size_t mt_model_stats_bytes(const struct mt_model_params *p);
void mt_model_place_partials(const struct mt_layout *l, size_t *at);
float *mt_model_stats_loss(const mt_model *m, char *base, size_t mb);
int32_t *mt_model_stats_correct(const mt_model *m, char *base, size_t mb);
/** NULL: it is not computed. */
float *mt_model_stats_entropy(const mt_model *m, char *base, size_t mb);
float *mt_model_stats_partials(const mt_model *m, char *base);

/** Device bytes of the biases for choosing experts; the biases of a layer (select_bias.c). */
size_t mt_select_bias_bytes(const struct mt_layout *l);
const float *mt_model_select_bias(const mt_model *m, int layer);

/** Elements of mt_model.one. */
size_t mt_model_n_ones(const struct mt_layout *l);

/** h *= the number of the run's layer, if it has one: its output, or the gradient of that. */
struct mt_part_run;
int mt_layer_scale(const struct mt_part_run *r, void *h, struct mt_err *err);
/** Reads the numbers of all layers. */
int mt_layer_scalars_load(mt_model *m, mt_plane_set *planes, struct mt_err *err);

/** Device bytes of the rotary tables. */
size_t mt_rope_table_bytes(const struct mt_model_params *p);
int mt_model_upload_tables(mt_model *m, struct mt_err *err);

/** Sets the rows of the following products, for dropout: these tokens of the micro-batch, NULL: all. */
static inline void mt_model_set_rows(mt_model *m, size_t mb, const int32_t *rows)
{
    m->running = &m->inputs[mb];
    m->rows = rows;
}

/** Of a layer's adapters, from the first learner's on: that of the running micro-batch's learner; NULL: it has none. */
static inline const struct mt_adapter *mt_running_adapter(const mt_model *m, const struct mt_adapter *a)
{
    while (a && a->learner != m->running->learner)
        a = a->next;
    return a;
}

/** Scratch of no further use becomes NaN, if the model is to show who reads it (mt_model_params.poison). */
static inline void mt_model_poison(const mt_model *m, void *p, size_t bytes)
{
    if (m->p.poison && bytes)
        mt_device_poison(m->dev, p, bytes);
}
/** Sets logits and dlogits from `base`, NULL: sizes alone; returns the bytes. */
size_t mt_model_lay_out_logits(mt_model *m, const struct mt_model_params *p, void *base);
/** That of all parts, but records, which end where `from` begins; NULL: with them. */
void mt_model_poison_parts(const mt_model *m, void *from);

/** Copies bytes on COMPUTE, within the device or between it and the host. */
static inline int mt_model_copy(const mt_model *m, void *dst, const void *src, size_t bytes, struct mt_err *err)
{
    return mt_device_copy(m->dev, MT_STREAM_COMPUTE, &(struct mt_copy){dst, bytes, src, bytes, bytes, 1}, err);
}

/** Element `at` of an array of the compute dtype. */
static inline void *mt_elem(const mt_model *m, const void *base, size_t at)
{
    return (char *)(uintptr_t)base + at * mt_dtype_size(m->dt);
}

/** Element `at` of a parameter of the running unit's adapters; w: the unit's weights. */
static inline void *mt_adapter_elem(const mt_model *m, const void *w, struct mt_param p, size_t at)
{
    return m->adapters ? mt_elem(m, m->adapters, p.plane + at) : mt_elem(m, w, p.at + at);
}

/** The activation of a layer's MLP, or shared expert. */
static inline enum mt_glu_kind mt_activation(const struct mt_layer_spec *s)
{
    return s->activation == MT_ACTIVATION_GELU_TANH ? MT_GLU_GELU_TANH : MT_GLU_SILU;
}

/** Gradient of a parameter; NULL: it is not trained. */
static inline float *mt_grad_of(float *g, struct mt_param p)
{
    return p.n && p.trainable ? g + p.grad : NULL;
}

/** Zeros a unit's gradient except that of `products` [n] (at most MT_MAX_PRODUCTS), which products overwrite. */
enum { MT_MAX_PRODUCTS = 2 * MT_LAYER_MAX_PARTS };
int mt_model_begin_grad(mt_model *m, size_t unit, float *g, const struct mt_param *products, size_t n,
                        struct mt_err *err);
