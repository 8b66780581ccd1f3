/* SPDX-License-Identifier: Apache-2.0 */
#ifndef MT_MODEL_MODEL_PRIV_H
#define MT_MODEL_MODEL_PRIV_H

#include "device/ops.h"
#include "model/model.h"

/** Widths of a layer, in elements. */
struct mt_widths {
    size_t c, f, q, kv, qkv, qk; /* hidden, ffn, query, one of k and v; what the product gives: all three and gates, or
                                    q and k alone; what is kept apart of it after norms: q and k, and v if it has one */
};
struct mt_widths mt_widths(const struct mt_hf_config *cfg, const struct mt_layer_spec *s);

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
    float *weights; /* [max_tokens] of the loss rows; NULL: without row_weights */
    int32_t *few;       /* [max_tokens, few]; NULL: none */
    float *few_values;  /* [max_tokens, few] */
    struct mt_rope_rows rope[MT_MAX_ROPES];
    size_t n_tokens, n_docs, max_len, n_loss, n_runs;
    size_t first_row; /* index of its first row in its learner's rows of the step */
    int learner;      /* whose adapters it runs through */
    struct mt_model_learner of; /* of that learner; zero in an evaluation */
    const int32_t *cu_seqlens_host;
};
/** The arrays of a micro-batch's input block, from `base` on (NULL: sizes alone); returns its bytes. */
size_t mt_inputs_layout(struct mt_micro_inputs *in, const struct mt_model_params *p, void *base);

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

/** Rows of which the largest logits are to be found. */
struct mt_top_piece {
    struct mt_model *m;
    size_t mb, first, rows;
};

struct mt_model {
    mt_device *dev;
    struct mt_model_params p;
    const struct mt_layout *layout;
    struct {
        size_t c; /* hidden; all other widths are of a layer: mt_widths() */
    } wd;
    enum mt_dtype dt;
    bool training;     /* the uploaded micro-batches are a step's, not an evaluation's */
    struct mt_weighing *weighings; /* [max_micro] */

    struct mt_top_piece *top_pieces; /* [max_micro, max_tokens] by first row; NULL: without `top` */
    float *top_logits;         /* [part of a piece, vocab] in host memory */
    struct mt_top *top;        /* [max_micro, max_tokens, top] */
    float *top_rest;           /* [max_micro, max_tokens] */

    void *scratch; /* one allocation, cut into: */
    void *h, *dh;      /* [max_tokens, hidden] */
    void *cast_start, *workspace;
    struct mt_product_scratch product;
    void *direct;      /* mt_direct_scratch_bytes() */
    void *adapter_x, *adapter_dy; /* [max_tokens or rows of an expert's tile, rank]: x A^T; s dy B */
    void *dora;                   /* mt_dora_bytes() */
    void *adapter_in;             /* with dropout: [max_tokens, in] x after dropout, or a gradient before it */
    void *unit_scratch; /* of the running unit: its record if it is not kept, then its parts' scratch */
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
    int32_t *counts;        /* [groups, n_layers, 2 (n_experts + 1)] counts and starts of experts' lists, in host memory */
    mt_event *counts_ready;
    float *shares;          /* [n_experts] each expert's share of the rows of all layers; on the device */
    float *shares_host;
};

/* top.c */
int mt_model_top_create(mt_model *m, struct mt_err *err);
void mt_model_top_destroy(mt_model *m);
/** Sends logits of the micro-batch's rows [first, first + rows) to the host, where the largest are found. */
int mt_model_top_rows(mt_model *m, size_t mb, size_t first, size_t rows, struct mt_err *err);

/* moe.c: shared by the parts of a mixture of experts. */

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
/** Rows of the micro-batch's group in this step, including those of padding, which go to no expert. */
size_t mt_model_rows_in_use(const mt_model *m, size_t mb);

/** Bytes of values of a group: the router's norm of x, the sums in FP32, the routing, its weights. */
struct mt_part_shape;
size_t mt_rows_bytes(const struct mt_part_shape *s);   /* [rows, hidden] */
size_t mt_sum_bytes(const struct mt_part_shape *s);    /* [rows, hidden] */
size_t mt_routing_bytes(const struct mt_part_shape *s);
size_t mt_routing_weights_bytes(const struct mt_part_shape *s); /* [rows, top_k] */

/** The routing of a layer (device/ops_moe.h). */
struct mt_routing {
    uint16_t *ids;  /* [rows, top_k] */
    float *weights; /* [rows, top_k] */
    int32_t *counts, *starts, *list;
};
/** Its arrays from `base` on (NULL: sizes alone); returns its bytes. */
size_t mt_routing_layout(struct mt_routing *out, const struct mt_moe *moe, size_t rows, void *base);

size_t mt_model_counts_bytes(const struct mt_model_params *p);
/** Copies the counts of a layer's lists, of the micro-batch's group, to the host and waits for them: they are the row counts of products. */
int mt_model_take_counts(mt_model *m, int layer, size_t mb, const struct mt_routing *t, struct mt_err *err);
/** An expert's entries of the layer's list, of the micro-batch's group. */
struct mt_expert_list {
    size_t first, n;
};
struct mt_expert_list mt_model_expert_list(const mt_model *m, int layer, int expert, size_t mb);

/** Rows of an expert that run at once, at most (experts.c). */
size_t mt_expert_tile_rows(const struct mt_model_params *p, mt_device *dev);

/** Is the loss that balances experts part of the step? */
static inline bool mt_model_balances(const mt_model *m)
{
    return m->p.router_aux_loss > 0 && m->training;
}
/** The factor of a row's contribution to that loss's gradient. */
float mt_model_balance_scale(const mt_model *m);
/** [n_experts] sums of the routers' probabilities over rows and layers, after all other statistics at `base`. */
float *mt_model_prob_sum(const mt_model *m, char *base);

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
/** Bytes of a step's statistics; the partial squares of all tensors, at[i]: the first of tensor i (NULL: count alone). */
size_t mt_model_stats_bytes(const struct mt_model_params *p);
size_t mt_model_n_partials(const struct mt_layout *l, size_t *at);
float *mt_model_stats_loss(const mt_model *m, char *base, size_t mb);
int32_t *mt_model_stats_correct(const mt_model *m, char *base, size_t mb);
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
enum { MT_MAX_PRODUCTS = 2 * MT_FAMILY_MAX_PARTS };
int mt_model_begin_grad(mt_model *m, size_t unit, float *g, const struct mt_param *products, size_t n,
                        struct mt_err *err);

/**
 * mt_op_gemm(), in FP8 if the model computes so, A and B are of the compute dtype, and both sides of the linear layer
 * are whole vectors (product.c). Rows of A and B lie side by side.
 */
int mt_product(mt_model *m, const struct mt_gemm *g, struct mt_err *err);
/** d = a W or, transposed, a W^T; plus c. In FP32, so that a sum of several products is rounded once. */
struct mt_sum_product {
    size_t in, out;
    const void *a; /* [n, in] */
    enum mt_dtype dtype; /* of a and w */
    const void *w;
    bool transposed, of_router; /* of a router's own weight: never in FP8 */
    const float *c;
    float *d; /* [n, out] */
};
int mt_sum_product(mt_model *m, size_t n, const struct mt_sum_product *p, struct mt_err *err);
/** After a product with this A: if the next one is a weight's gradient that has it as A, too, its content is the same. */
static inline void mt_product_again(mt_model *m, const void *a)
{
    m->product.known = m->p.fp8 ? a : NULL;
}
/** Are both sides of a linear layer whole vectors of 16 bytes in FP8? */
static inline bool mt_has_whole_vectors(size_t out, size_t in)
{
    return out % 16 == 0 && in % 16 == 0;
}

/* Steps shared by forward and backward (linear.c). */
/** y = x W^T + b (+ residual), rounded; if the layer has adapters, then y = y + s (x A^T) B^T, rounded again. */
int mt_linear(mt_model *m, size_t n, size_t in, size_t out, const void *x, const void *w,
              struct mt_param p, struct mt_param bias, const void *residual, void *y,
              struct mt_err *err);
/**
 * dx = dy W; dW += dy^T x; db += colsum dy. Adapters: dx += s (dy B) A; dB += s dy^T (x A^T); dA += s (dy B)^T x.
 * The input's gradient must be computed first: it leaves s dy B for the weights' gradient.
 */
struct mt_linear_bwd {
    size_t n, in, out;
    const void *x, *w, *dy;
    bool f32; /* x and dy are FP32 whatever the compute dtype; only for mt_linear_weight_grad() */
    bool whole; /* never in FP8; the same */
    struct mt_param p, bias;
    float *g;
    bool first; /* dW = dy^T x: overwrites undefined content */
    void *dx;
};
int mt_linear_weight_grad(mt_model *m, const struct mt_linear_bwd *a, struct mt_err *err);
int mt_linear_input_grad(mt_model *m, const struct mt_linear_bwd *a, struct mt_err *err);
/** Both. */
int mt_linear_backward(mt_model *m, const struct mt_linear_bwd *a, struct mt_err *err);

/** Does backward of the layer need x? */
bool mt_linear_is_trained(const struct mt_linear_bwd *a);

/**
 * The adapters of a linear layer, added to its products (adapter_run.c). Rows of y and dy begin every ld elements; y
 * and dx are of the compute dtype, or f32. `adapter`: the layer's, of which the running micro-batch's learner's is used;
 * NULL: does nothing.
 */
struct mt_adapter_run {
    const struct mt_adapter *adapter;
    size_t n, ld;
    enum mt_dtype y_dtype, dx_dtype;
    const void *x, *w, *dy;
    void *y, *dx;
    float *g;
    size_t g_first; /* element of the unit's gradient with which g begins */
};
int mt_adapter_forward(mt_model *m, const struct mt_adapter_run *a, struct mt_err *err);
int mt_adapter_input_grad(mt_model *m, const struct mt_adapter_run *a, struct mt_err *err);
/** After mt_adapter_input_grad() of the same layer. */
int mt_adapter_weight_grad(mt_model *m, const struct mt_adapter_run *a, struct mt_err *err);

/**
 * A linear layer with DoRA (dora_run.c), instead of the layer's own product. x is its input, w the
 * unit's weights, p its weight; rows are p.adapter->out elements.
 */
struct mt_dora_run {
    size_t n;
    const void *x, *w;
    struct mt_param p;
};
/** y = residual + b + g z; residual NULL: 0. */
int mt_dora_forward(mt_model *m, const struct mt_dora_run *a, struct mt_param bias, const void *residual, void *y,
                    struct mt_err *err);
/** dz = g dy, for the gradients of x, A and B, in scratch, valid until the next call. x is not read. */
int mt_dora_output_grad(mt_model *m, const struct mt_dora_run *a, const void *dy, const void **dz, struct mt_err *err);
const void *mt_dora_kept_grad(const mt_model *m);
/** dm += sum of dy z / |W + s B A|, after mt_dora_output_grad() of the same layer. */
int mt_dora_magnitude_grad(mt_model *m, const struct mt_dora_run *a, const void *dy, float *g, struct mt_err *err);
/** Scratch of these; 0: the model has no DoRA. */
size_t mt_dora_bytes(const struct mt_model_params *p);

/** A norm of n rows of the hidden state; w: the unit's weights, p: the norm's. */
struct mt_norm {
    const struct mt_norm_spec *spec;
    size_t n;
    const void *x, *w;
    struct mt_param p;
    float *rstd; /* [n] */
};
/** Bytes of m->workspace for such norms. */
size_t mt_norm_workspace(const struct mt_model_params *p, const struct mt_norm_spec *s, mt_device *dev);
/** y = norm(x); again: with the stored rstd, else that is written. */
int mt_norm(mt_model *m, const struct mt_norm *a, void *y, bool again, struct mt_err *err);
/** Gradients at such a norm: [n, hidden]; dres: of the residual connection beside it, NULL: 0; dx may be dy or dres.
 * g: the unit's gradients of weights. */
struct mt_norm_grad {
    const void *dy, *dres;
    void *dx;
    float *g;
};
/** dx = dres + J^T dy; and the gradient of the weight. */
int mt_norm_backward(mt_model *m, const struct mt_norm *a, const struct mt_norm_grad *d, struct mt_err *err);

#endif
