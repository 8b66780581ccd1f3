/* SPDX-License-Identifier: Apache-2.0 */
#include "checkpoint/merge.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/dtype.h"
#include "base/mem.h"
#include "model/peft.h"

#define WEIGHT ".weight"

struct mt_merge {
    struct mt_adapter_spec spec;
    struct mt_st_model st;  /* the adapters */
    bool open, f32, bf16;   /* bf16: the base has bf16 tensors */
    const struct mt_st_tensor *now; /* tensor of the base whose A and B are loaded */
    float *a, *b, *row;     /* [rank, in], [out, rank], [in] */
    float *by;              /* [out] with DoRA: magnitude / |W + s B A|; NULL: 1 */
    size_t rank, in;
    float scale;
};

/* "lora_A.weight" and the like of a module. */
static const struct mt_st_tensor *factor(const struct mt_merge *m, const struct mt_st_tensor *t, const char *which)
{
    char ours[MT_TENSOR_NAME], name[MT_PEFT_NAME];
    size_t n = strlen(t->name), k = strlen(WEIGHT);
    if (n <= k || n >= 100 || strcmp(t->name + n - k, WEIGHT))
        return NULL;
    snprintf(ours, sizeof(ours), "%.*s.%s", (int)(n - k), t->name, which);
    mt_peft_tensor_name(name, ours);
    return mt_st_find(&m->st, name);
}

/* The tensor of a module that was trained whole. */
static const struct mt_st_tensor *whole(const struct mt_merge *m, const struct mt_st_tensor *t)
{
    char name[MT_PEFT_NAME];
    if (strlen(t->name) >= MT_TENSOR_NAME)
        return NULL;
    mt_peft_tensor_name(name, t->name);
    return mt_st_find(&m->st, name);
}

static int check_factors(const struct mt_merge *m, const struct mt_st_tensor *t, struct mt_err *err)
{
    const struct mt_st_tensor *a = factor(m, t, MT_LORA_A WEIGHT), *b = factor(m, t, MT_LORA_B WEIGHT);
    const struct mt_st_tensor *magnitude = factor(m, t, MT_LORA_MAGNITUDE);
    bool lengths = m->spec.dora ? magnitude && magnitude->n_dims == 1 && magnitude->shape[0] == t->shape[0]
                                : !magnitude;
    if (b && lengths && t->n_dims == 2 && a->n_dims == 2 && b->n_dims == 2 && a->shape[1] == t->shape[1] &&
        b->shape[0] == t->shape[0] && a->shape[0] == b->shape[1])
        return 0;
    return mt_fail(err, MT_ERR_INPUT, -EINVAL, "%s: the adapter of \"%s\" has another shape than the model's matrix",
                   m->st.files[0].path, t->name);
}

static int fail_packed(const struct mt_merge *m, const struct mt_st_model *base, const struct mt_st_tensor *t,
                       struct mt_err *err)
{
    return mt_fail(err, MT_ERR_USAGE, -EINVAL, "%s: tensor \"%s\" is packed, and packing it again would lose what %s "
                   "adds: name the model in bf16 with --model, and pack the result (export --base-dtype)",
                   base->files[t->file].path, t->name, m->st.files[0].path);
}

/* Does the base have a matrix for every adapter, and a tensor for each that was trained whole? */
static int check_base(struct mt_merge *m, const struct mt_st_model *base, struct mt_err *err)
{
    size_t used = 0, all = 0;
    bool table = false, head = false;
    int rc = 0;
    for (size_t i = 0; i < base->n_tensors && !rc; i++) {
        const struct mt_st_tensor *t = &base->tensors[i], *w = whole(m, t);
        m->bf16 |= t->dtype == MT_ST_BF16;
        head |= !strcmp(t->name, "lm_head.weight");
        table |= w && !strcmp(t->name, "model.embed_tokens.weight");
        used += w != NULL;
        if (w && (w->n_elems != t->n_elems || w->n_dims != t->n_dims))
            rc = mt_fail(err, MT_ERR_INPUT, -EINVAL, "%s: \"%s\" has another shape than the model's", m->st.files[0].path,
                         w->name);
        if (!rc && factor(m, t, MT_LORA_A WEIGHT)) {
            rc = t->dtype > MT_ST_F64 ? fail_packed(m, base, t, err) : check_factors(m, t, err);
            used += m->spec.dora ? 3 : 2;
        }
    }
    for (size_t i = 0; i < m->st.n_tensors; i++) {
        const char *name = m->st.tensors[i].name;
        bool tied = table && !head && !strcmp(name, "base_model.model.lm_head.weight"); /* a second copy of the table */
        all += !strstr(name, ".base_layer.") && !tied;
    }
    if (!rc && used != all)
        rc = mt_fail(err, MT_ERR_INPUT, -EINVAL, "%s: only %zu of its %zu tensors fit this model: are the adapters for another "
                     "one? Name that with --model", m->st.files[0].path, used, all);
    return rc;
}

int mt_merge_open(struct mt_merge **out, const char *dir, const struct mt_st_model *base, bool f32, struct mt_err *err)
{
    char path[4200];
    struct mt_merge *m = mt_calloc(1, sizeof(*m));
    if (!m)
        return mt_fail_nomem(err, dir, sizeof(*m));
    m->f32 = f32;
    snprintf(path, sizeof(path), "%.4000s/" MT_PEFT_WEIGHTS, dir);
    int rc = mt_peft_read_spec(&m->spec, dir, err);
    if (!rc)
        rc = mt_st_open_file(&m->st, path, err);
    m->open = !rc;
    if (!rc)
        rc = check_base(m, base, err);
    if (rc)
        mt_merge_close(&m);
    else
        *out = m;
    return rc;
}

static void forget(struct mt_merge *m)
{
    free(m->a);
    free(m->b);
    free(m->row);
    free(m->by);
    m->a = m->b = m->row = m->by = NULL;
    m->now = NULL;
}

void mt_merge_close(struct mt_merge **merge)
{
    struct mt_merge *m = *merge;
    if (!m)
        return;
    forget(m);
    if (m->open)
        mt_st_close(&m->st);
    mt_adapter_spec_finish(&m->spec);
    free(m);
    *merge = NULL;
}

enum mt_st_dtype mt_merge_dtype(const struct mt_merge *m, const struct mt_st_tensor *t)
{
    return m->f32 ? MT_ST_F32 : m->bf16 ? t->dtype : MT_ST_BF16;
}

/* w[j] += s sum over k of b[k] a[k, j], for columns [j, j + n) of a row. */
static void add_row(const struct mt_merge *m, const float *b, size_t j, size_t n, float *w)
{
    memset(m->row, 0, n * sizeof(float));
    for (size_t k = 0; k < m->rank; k++)
        for (size_t i = 0; i < n; i++)
            m->row[i] += b[k] * m->a[k * m->in + j + i];
    for (size_t i = 0; i < n; i++)
        w[i] += m->scale * m->row[i];
}

/* Reads the model's matrix once, to compute the norms of its rows with the adapter added. */
static int take_lengths(struct mt_merge *m, const struct mt_st_model *base, const struct mt_st_tensor *t,
                        struct mt_err *err)
{
    const struct mt_st_tensor *magnitude = factor(m, t, MT_LORA_MAGNITUDE);
    size_t out = (size_t)t->shape[0];
    float *w = mt_calloc(m->in, sizeof(float));
    m->by = mt_calloc(out, sizeof(float));
    int rc = w && m->by ? mt_st_read_f32(&m->st, magnitude, 0, out, m->by, err)
                        : mt_fail_nomem(err, t->name, (m->in + out) * sizeof(float));
    for (size_t row = 0; row < out && !rc; row++) {
        double sum = 0;
        rc = mt_st_read_f32(base, t, row * m->in, m->in, w, err);
        if (!rc)
            add_row(m, m->b + row * m->rank, 0, m->in, w);
        for (size_t i = 0; i < m->in && !rc; i++)
            sum += (double)w[i] * (double)w[i];
        m->by[row] = (float)((double)m->by[row] / sqrt(sum));
    }
    free(w);
    return rc;
}

/* Loads A and B of the tensor, their factor, and DoRA's row factors. */
static int take_factors(struct mt_merge *m, const struct mt_st_model *base, const struct mt_st_tensor *t,
                        const struct mt_st_tensor *a, struct mt_err *err)
{
    const struct mt_st_tensor *b = factor(m, t, MT_LORA_B WEIGHT);
    char module[MT_TENSOR_NAME];
    if (m->now == t)
        return 0;
    forget(m);
    snprintf(module, sizeof(module), "%.*s", (int)(strlen(t->name) - strlen(WEIGHT)), t->name);
    m->scale = (float)mt_adapter_shape_of(&m->spec, module).scale;
    m->rank = (size_t)a->shape[0];
    m->in = (size_t)a->shape[1];
    m->a = mt_calloc(a->n_elems, sizeof(float));
    m->b = mt_calloc(b->n_elems, sizeof(float));
    m->row = mt_calloc(m->in, sizeof(float));
    if (!m->a || !m->b || !m->row)
        return mt_fail_nomem(err, t->name, (a->n_elems + b->n_elems) * sizeof(float));
    int rc = mt_st_read_f32(&m->st, a, 0, a->n_elems, m->a, err);
    if (!rc)
        rc = mt_st_read_f32(&m->st, b, 0, b->n_elems, m->b, err);
    if (!rc && m->spec.dora)
        rc = take_lengths(m, base, t, err);
    m->now = rc ? NULL : t;
    return rc;
}

static void add_adapter(const struct mt_merge *m, size_t first, size_t n, float *w)
{
    for (size_t at = first; at < first + n;) {
        size_t row = at / m->in, col = at % m->in, len = MT_MIN(m->in - col, first + n - at);
        add_row(m, m->b + row * m->rank, col, len, w + (at - first));
        for (size_t i = 0; m->by && i < len; i++)
            w[at - first + i] *= m->by[row];
        at += len;
    }
}

int mt_merge_read(struct mt_merge *m, const struct mt_st_model *base, const struct mt_st_tensor *t, size_t first,
                  size_t n, void *dst, struct mt_err *err)
{
    const struct mt_st_tensor *a = factor(m, t, MT_LORA_A WEIGHT), *w = whole(m, t);
    enum mt_st_dtype dtype = mt_merge_dtype(m, t);
    if (!a && !w && dtype == t->dtype)
        return mt_st_read_raw(base, t, first * mt_st_dtype_size(dtype), n * mt_st_dtype_size(dtype), dst, err);
    if (dtype != MT_ST_F32 && dtype != MT_ST_BF16)
        return mt_fail(err, MT_ERR_INPUT, -EINVAL, "tensor \"%s\" is %s, into which adapters cannot be merged: set --dtype f32",
                       t->name, mt_st_dtype_name(dtype));
    float *x = dtype == MT_ST_F32 ? dst : mt_calloc(n, sizeof(float));
    int rc = x ? 0 : mt_fail_nomem(err, t->name, n * sizeof(float));
    if (!rc)
        rc = w ? mt_st_read_f32(&m->st, w, first, n, x, err) : mt_st_read_f32(base, t, first, n, x, err);
    if (!rc && a)
        rc = take_factors(m, base, t, a, err);
    if (!rc && a)
        add_adapter(m, first, n, x);
    for (size_t i = 0; i < n && !rc && dtype == MT_ST_BF16; i++)
        ((uint16_t *)dst)[i] = mt_f32_to_bf16(x[i]);
    if (x != dst)
        free(x);
    return rc;
}
