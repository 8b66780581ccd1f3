/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Products of linear layers. With model.compute = fp8 both operands become codes of E4M3 with one
 * scale each, from their own largest magnitudes in this product: of the whole weight, and of the
 * rows of a micro-batch or of an expert's tile, none of which placement divides. Matrix units take
 * rows along K alone, so an operand that has K along its columns is turned while it is encoded;
 * tokens are then padded with zeros.
 */
#include "model/product.h"

#include <errno.h>

#include "model/packing.h"

size_t mt_coded_elems(const struct mt_layout *l, const struct mt_tensor *t)
{
    const struct mt_unit *u = &l->units[t->unit];
    const struct mt_param *p = t->param; /* of an adapter: not a linear layer's weight */
    bool linear = p->linear && t->first == p->at && u->kind == MT_UNIT_LAYER && !u->per_step && !u->codes_stay;
    for (const struct mt_adapter *a = p->adapter; a; a = a->next)
        linear &= !a->dora || a->merged; /* else norms are of the weights themselves */
    return linear && mt_has_whole_vectors(p->n / (size_t)t->shape[1], (size_t)t->shape[1]) ? p->n : 0;
}

bool mt_unit_becomes_codes(const struct mt_layout *l, size_t unit)
{
    const struct mt_unit *u = &l->units[unit];
    for (size_t i = u->first_tensor; i < u->first_tensor + u->n_tensors; i++)
        if (mt_coded_elems(l, &l->tensors[i]))
            return true;
    return false;
}

/* Codes lie in the first half of the place that the weights had in bf16, those of the transpose in the second. */
static int encode_weight(mt_model *m, const struct mt_tensor *t, void *w, struct mt_err *err)
{
    size_t n = mt_coded_elems(m->layout, t), in = (size_t)t->shape[1];
    uint8_t *place = mt_elem(m, w, t->first);
    struct mt_amax amax = {n, m->dt, m->unit_scratch, m->own.product.parts};
    struct mt_quantise codes = {.rows = n / in, .cols = in, .dtype = m->dt, .x = amax.x, .parts = amax.parts,
                                .codes = place, .codes_t = m->p.backward ? place + n : NULL,
                                .scale = &m->coded_scale[t - m->layout->tensors]};
    return mt_op_cast(m->dev, &(struct mt_cast){n, m->dt, m->dt, place, m->unit_scratch}, err)
        ?: mt_op_amax(m->dev, &amax, err)
        ?: mt_op_quantise(m->dev, &codes, err);
}

int mt_model_encode(mt_model *m, size_t unit, void *w, struct mt_err *err)
{
    const struct mt_tensor *t = &m->layout->tensors[m->layout->units[unit].first_tensor];
    const struct mt_tensor *end = t + m->layout->units[unit].n_tensors;
    int rc = 0;
    m->own.product.known = NULL;
    for (; m->p.coded_weights && t < end && !rc; t++)
        rc = mt_coded_elems(m->layout, t) ? encode_weight(m, t, w, err) : 0;
    return rc;
}

/* Takes B's codes, if it is such a weight. */
static bool take_coded(struct mt_gemm *codes, const mt_model *m, const struct mt_gemm *g)
{
    const struct mt_coded *c = &m->own.coded;
    const struct mt_unit *u = &m->layout->units[c->unit];
    const uint8_t *b = g->b;
    for (size_t i = u->first_tensor; c->w && !g->trans_a && i < u->first_tensor + u->n_tensors; i++) {
        const struct mt_tensor *t = &m->layout->tensors[i];
        if (b != mt_elem(m, c->w, t->first) || !mt_coded_elems(m->layout, t))
            continue;
        codes->b = g->trans_b ? b : b + t->param->n;
        codes->b_scale = &m->coded_scale[i];
        return true;
    }
    return false;
}

/* x [rows, cols], whose columns are K unless it is turned. */
struct operand {
    const void *x;
    size_t rows, cols;
    bool turn;
    uint8_t *codes;
    float *scale;
};

/* known: `parts` has its magnitudes already. */
static int encode(mt_model *m, const struct operand *o, bool known, float *parts, struct mt_err *err)
{
    struct mt_amax amax = {o->rows * o->cols, m->dt, o->x, parts};
    int rc = known ? 0 : mt_op_amax(m->dev, &amax, err);
    return rc ? rc : mt_op_quantise(m->dev,
                                    &(struct mt_quantise){
                                        .rows = o->rows,
                                        .cols = o->cols,
                                        .dtype = m->dt,
                                        .x = o->x,
                                        .parts = parts,
                                        .codes = o->turn ? NULL : o->codes,
                                        .codes_t = o->turn ? o->codes : NULL,
                                        .scale = o->scale,
                                    },
                                    err);
}

static bool in_codes(const mt_model *m, const struct mt_gemm *g)
{
    return m->p.fp8 && g->m && g->dtype == m->dt &&
           mt_has_whole_vectors(g->trans_a ? g->m : g->k, g->n);
}

int mt_product(mt_model *m, const struct mt_gemm *g, struct mt_err *err)
{
    struct mt_product_scratch *s = &m->own.product;
    bool known = s->known && s->known == g->a && g->trans_a && !m->p.poison;
    s->known = NULL;
    if (!in_codes(m, g))
        return mt_op_gemm(m->dev, g, err);
    struct operand a = {
        g->a, g->trans_a ? g->k : g->m, g->trans_a ? g->m : g->k, g->trans_a, s->a, &s->scale[0]};
    struct operand b = {
        g->b, g->trans_b ? g->n : g->k, g->trans_b ? g->k : g->n, !g->trans_b, s->b, &s->scale[1]};
    struct mt_gemm codes = *g;
    codes.dtype = MT_E4M3;
    codes.trans_a = false;
    codes.trans_b = true;
    codes.k = codes.lda = codes.ldb = mt_codes_ld(g->k);
    codes.a = s->a;
    codes.b = s->b;
    codes.a_scale = &s->scale[0];
    codes.b_scale = &s->scale[1];
    bool coded = take_coded(&codes, m, g);
    return encode(m, &a, known, s->parts, err)
        ?: (coded ? 0 : encode(m, &b, false, s->parts + MT_AMAX_PARTS, err))
        ?: mt_op_gemm(m->dev, &codes, err);
}

int mt_weight_product(mt_model *m, struct mt_gemm *g, const void *w, size_t at, struct mt_err *err)
{
    const struct mt_codes *c = &m->own.codes;
    size_t size = mt_dtype_size(g->d_dtype);
    g->b = mt_elem(m, w, at);
    if (!c->w || c->w != w)
        return mt_product(m, g, err);
    int rc = 0;
    for (size_t row = 0, rows; row < g->n && !rc; row += rows) {
        const char *bias = g->bias, *add = g->c;
        struct mt_packed_gemm p = {.m = g->m, .d_dtype = g->d_dtype, .a = g->a, .lda = g->lda, .ldc = g->ldc,
                                   .ldd = g->ldd, .bias = bias ? bias + row * mt_dtype_size(g->dtype) : NULL,
                                   .c = add ? add + row * size : NULL, .d = (char *)g->d + row * size,
                                   .workspace = mt_elem(m, w, at + row * g->k)}; /* where it would lie decoded */
        if (!mt_unit_codes(m->layout, c->unit, c->first + at + row * g->k, c->slot, &p.b))
            return row ? mt_fail(err, MT_ERR_RUNTIME, -EINVAL, "matrices of one product are packed in part")
                       : mt_product(m, g, err);
        rows = p.b.rows;
        rc = mt_op_packed_gemm(m->dev, &p, err);
    }
    return rc;
}

struct mt_gemm mt_gemm_output(const struct mt_linear_shape *s, const void *x, const void *w, void *y)
{
    return (struct mt_gemm){.m = s->n, .n = s->out, .k = s->in, .dtype = s->dtype, .d_dtype = s->d_dtype, .a = x,
                            .lda = s->in, .trans_b = true, .b = w, .ldb = s->in, .d = y, .ldd = s->out};
}

struct mt_gemm mt_gemm_input_grad(const struct mt_linear_shape *s, const void *dy, const void *w, void *dx)
{
    return (struct mt_gemm){.m = s->n, .n = s->in, .k = s->out, .dtype = s->dtype, .d_dtype = s->d_dtype, .a = dy,
                            .lda = s->out, .b = w, .ldb = s->in, .d = dx, .ldd = s->in};
}

struct mt_gemm mt_gemm_weight_grad(const struct mt_linear_shape *s, const void *dy, const void *x, float *dw, bool add)
{
    return (struct mt_gemm){.m = s->out, .n = s->in, .k = s->n, .dtype = s->dtype, .d_dtype = MT_F32, .trans_a = true,
                            .a = dy, .lda = s->out, .b = x, .ldb = s->in, .c = add ? dw : NULL, .ldc = s->in, .d = dw,
                            .ldd = s->in};
}
