/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "model/product.h"

/* Steps shared by forward and backward: linear layers, their adapters, norms, activations. */

/** y = x W^T + b (+ residual), rounded; if the layer has adapters that are not merged into W, then
 * y = y + s (x A^T) B^T, rounded again. */
int mt_linear(mt_model *m, size_t n, size_t in, size_t out, const void *x, const void *w,
              struct mt_param p, struct mt_param bias, const void *residual, void *y,
              struct mt_err *err);
/**
 * dx = dy W; dW += dy^T x; db += colsum dy. Adapters: dx += s (dy B) A unless W has them; dB += s dy^T (x A^T); dA +=
 * s (dy B)^T x. The input's gradient must be computed first: it leaves s dy B for the weights' gradient.
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

/** Into FP32, where several layers are summed and rounded once: sum [n, out] += x W^T and its adapters; backward: both,
 * but sum [n, in] += the input's gradient, and a->dx is not used. */
struct mt_linear_add {
    size_t n, in, out;
    const void *x, *w;
    struct mt_param p;
};
int mt_linear_add(mt_model *m, const struct mt_linear_add *a, float *sum, struct mt_err *err);
int mt_linear_add_backward(mt_model *m, const struct mt_linear_bwd *a, float *sum, struct mt_err *err);

/** db += column sums of dy [n, c], of that dtype; db NULL: does nothing. */
int mt_column_sums(mt_model *m, size_t n, size_t c, enum mt_dtype dtype, const void *dy, float *db, struct mt_err *err);

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
    bool f32; /* residual and y are FP32; only for mt_dora_forward() */
};
/** y = residual + b + g z; residual NULL: 0. */
int mt_dora_forward(mt_model *m, const struct mt_dora_run *a, struct mt_param bias, const void *residual, void *y,
                    struct mt_err *err);
/** dz = g dy, for the gradients of x, A and B, in scratch, valid until the next call. x is not read. */
int mt_dora_output_grad(mt_model *m, const struct mt_dora_run *a, const void *dy, const void **dz, struct mt_err *err);
/** That dz again, of the layer that the last call was for. */
const void *mt_dora_kept_grad(const mt_model *m, const struct mt_dora_run *a);
/** dm += sum of dy z / |W + s B A|, after mt_dora_output_grad() of the same layer. */
int mt_dora_magnitude_grad(mt_model *m, const struct mt_dora_run *a, const void *dy, float *g, struct mt_err *err);
/** After the layer's last call: its scratch is of no further use. */
void mt_dora_end(mt_model *m);
/** Scratch of these; 0: the model has no DoRA. */
size_t mt_dora_bytes(const struct mt_model_params *p);

/** A norm of n rows of the hidden state; w: the unit's weights, p: the norm's. */
struct mt_norm {
    const struct mt_norm_spec *spec;
    double eps; /* if not 0, instead of that of spec */
    size_t n;
    const void *x, *w;
    struct mt_param p;
    float *rstd; /* [n] */
};
/** Bytes of m->own.workspace for such norms. */
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

/** The activation of an MLP, of n rows: of gate and up [n, 2 f], or of up alone [n, f]. */
struct mt_mlp_act {
    size_t n, f;
    bool ungated;        /* of up alone */
    int kind;            /* enum mt_glu_kind; of up alone enum mt_activate_kind, unless there is: */
    const void *shape;   /* xIELU's curve, or NULL */
    float alpha, limit;  /* of MT_GLU_CLAMPED */
    const void *x, *dout;
    void *out, *dx;      /* backward: out is made again and may be dout, NULL: it is not wanted; dx may be x */
    float *dshape;       /* NULL: not wanted */
};
int mt_mlp_act(mt_model *m, const struct mt_mlp_act *a, struct mt_err *err);
int mt_mlp_act_backward(mt_model *m, const struct mt_mlp_act *a, struct mt_err *err);
