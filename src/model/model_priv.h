/* SPDX-License-Identifier: Apache-2.0 */
#ifndef MT_MODEL_MODEL_PRIV_H
#define MT_MODEL_MODEL_PRIV_H

#include "device/ops.h"
#include "model/model.h"

/** Widths derived from the config, in elements. */
struct mt_widths {
    size_t c, f, q, kv, qkv, qk; /* hidden, ffn, query, one of k and v, all three, q and k */
    size_t rot;
};
struct mt_widths mt_widths(const struct mt_hf_config *cfg);

/** Takes `bytes` at *at, aligned to MT_RECORD_ALIGN; returns where they start from base (NULL: sizes alone). */
void *mt_take(void *base, size_t *at, size_t bytes);

/** The inputs of one micro-batch on the device; the same block in host memory is copied there. */
struct mt_inputs {
    int32_t *ids, *positions, *cu_seqlens, *loss_rows, *targets, *run_ids, *run_starts, *order;
    float *own_cos, *own_sin; /* [max_tokens, rot/2] rotary rows of this micro-batch alone; NULL: never needed */
    /* what `positions` are rows of: the model's tables or own_cos and own_sin */
    const float *cos_t, *sin_t;
    size_t n_table_rows;
    size_t n_tokens, n_docs, max_len, n_loss, n_runs;
    const int32_t *cu_seqlens_host;
};
/** The arrays of a micro-batch's input block, from `base` on (NULL: sizes alone); returns its bytes. */
size_t mt_inputs_layout(struct mt_inputs *in, const struct mt_model_params *p, void *base);

struct mt_model {
    mt_device *dev;
    struct mt_model_params p;
    const struct mt_layout *layout;
    struct mt_widths wd;
    enum mt_dtype dt;
    float loss_scale;

    void *scratch; /* one allocation, cut into: */
    void *h, *dh;      /* [max_tokens, hidden] */
    void *cast_start, *workspace;
    void *unit_scratch; /* of the unit that runs: its record where none is kept, then its parts' scratch */
    float *logits;
    void *tables; /* cos, sin */
    float *cos_t, *sin_t; /* [n_table_rows, rot/2] */

    size_t input_bytes; /* of one micro-batch's block */
    void *inputs_dev, *inputs_host;
    struct mt_inputs *inputs; /* [max_micro] device pointers */

    size_t stats_bytes;
    char *stats_dev, *stats_host; /* losses and correct by micro-batch, then partials */
    size_t *partials_at;          /* [n_tensors + 1] first partial of a tensor */
};

float *mt_model_stats_loss(const mt_model *m, char *base, size_t mb);
int32_t *mt_model_stats_correct(const mt_model *m, char *base, size_t mb);
float *mt_model_stats_partials(const mt_model *m, char *base);

/** Device bytes of the rotary tables. */
size_t mt_rope_table_bytes(const struct mt_model_params *p);
int mt_model_upload_tables(mt_model *m, struct mt_err *err);

/** Element `at` of an array of the compute dtype. */
static inline void *mt_elem(const mt_model *m, const void *base, size_t at)
{
    return (char *)(uintptr_t)base + at * mt_dtype_size(m->dt);
}

/** Gradient of a parameter, or NULL where there is none to be kept. */
static inline float *mt_grad_of(float *g, struct mt_param p)
{
    return p.n && p.trainable ? g + p.grad : NULL;
}

/* Steps shared by forward and backward (linear.c). */
int mt_linear(mt_model *m, size_t n, size_t in, size_t out, const void *x, const void *w,
              struct mt_param p, struct mt_param bias, const void *residual, void *y,
              struct mt_err *err);
/** dx = dy W; dW += dy^T x; db += colsum dy. */
struct mt_linear_bwd {
    size_t n, in, out;
    const void *x, *w, *dy;
    struct mt_param p, bias;
    float *g;
    void *dx;
};
int mt_linear_weight_grad(mt_model *m, const struct mt_linear_bwd *a, struct mt_err *err);
int mt_linear_input_grad(mt_model *m, const struct mt_linear_bwd *a, struct mt_err *err);
/** Both, the weight's first. */
int mt_linear_backward(mt_model *m, const struct mt_linear_bwd *a, struct mt_err *err);

/** norm of x with stored or new rstd. */
int mt_norm(mt_model *m, size_t n, const void *x, const void *w, struct mt_param p, void *y,
            float *rstd, bool use_rstd, struct mt_err *err);
/** dx = dres + J^T dy. */
int mt_norm_backward(mt_model *m, size_t n, const void *dy, const void *x, const void *w,
                     struct mt_param p, const float *rstd, const void *dres, void *dx, float *g,
                     struct mt_err *err);

#endif
