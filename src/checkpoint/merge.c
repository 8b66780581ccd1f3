/* SPDX-License-Identifier: Apache-2.0 */
#include "checkpoint/merge.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/dtype.h"
#include "base/fs.h"
#include "base/mem.h"
#include "checkpoint/merge_base.h"
#include "device/merge_job.h"
#include "hf/hf_config.h"
#include "weights/peft.h"

/* What the layout says of a tensor of the model's files: its adapter, as in training. */
struct site {
    const struct mt_adapter *ad; /* NULL: it has none */
    const struct mt_adapter_target *target;
    const struct mt_tensor *of;  /* the layout's tensor; of a tensor of all experts, the first expert's */
    const struct mt_st_tensor *a, *b, *magnitude; /* in the adapters' file */
};

/* An expert's matrix that is a tensor of its own in the files, of an adapter of all experts. */
struct share {
    size_t expert, part, n_parts; /* part: 0 gate, 1 up, of 2; or the whole of down_proj */
};

/* A and B of an adapter, as they are used. */
struct factors {
    const struct mt_st_tensor *of; /* their A in the file; NULL: none are loaded */
    float *a, *b;
};

struct mt_merge {
    struct mt_adapter_spec spec;
    struct mt_st_model st;         /* the adapters */
    struct mt_merge_base base;
    const struct mt_family *family;
    struct mt_layout *layout;      /* of the base with the adapters */
    const struct mt_stored **name; /* [layout->n_stored] by name */
    struct site *site;             /* [layout->n_stored] */
    bool open, f32, bf16;          /* bf16: the base has bf16 tensors */
    bool exact, exact_bf16;        /* mt_merge_as_trained(), in bf16 */
    bool keeps;                    /* mt_merge_keep_dtypes() */
    const struct mt_merged *now;   /* the tensor whose A and B are loaded */
    struct factors kept[2];        /* experts' matrices take turns: of gate_up_proj, and of down_proj or any other */
    /* Of a matrix [out, in]: [rank, in], [out, rank]. Of all experts' [experts, in, out] (turned): [experts * rank, in],
     * [experts * rank, out]. Of their [experts, out, in], and of an expert's own (share): [experts * rank, in],
     * [parts * out, rank * experts]. */
    const float *a, *b;
    float *row;                    /* [width] */
    struct share share;            /* n_parts 0: none */
    bool turned;
    size_t experts;                /* that a and b are for */
    float *by;                     /* [out] with DoRA: magnitude / |W + s B A|; NULL: 1 */
    size_t rank, in, width;        /* width: columns of a row of the tensor */
    float scale;
    struct mt_rounded rounding;
};

static int by_name(const void *a, const void *b)
{
    return strcmp((*(const struct mt_stored *const *)a)->name, (*(const struct mt_stored *const *)b)->name);
}

static int compare_name(const void *name, const void *stored)
{
    return strcmp(name, (*(const struct mt_stored *const *)stored)->name);
}

/* Of the files' tensor of that name; NULL: it has no adapter. */
static struct site *site_of(const struct mt_merge *m, const char *name)
{
    const struct mt_stored **found = bsearch(name, m->name, m->layout->n_stored, sizeof(*m->name), compare_name);
    struct site *s = found ? &m->site[*found - m->layout->stored] : NULL;
    return s && s->ad ? s : NULL;
}

/* The tensor of the adapters' file that is, or holds, a target's A, B or magnitudes; NULL: there is none. */
static const struct mt_st_tensor *factor(const struct mt_merge *m, const struct mt_adapter *ad,
                                         const struct mt_adapter_target *target, const struct mt_param *p)
{
    const struct mt_layout *l = m->layout;
    size_t before = p == &ad->a ? (size_t)(target - ad->target) : 0; /* those of other targets */
    for (size_t i = target->tensor; p->n && i < l->n_tensors; i++)
        if (l->tensors[i].adapter == ad && l->tensors[i].param == p && !before--)
            return mt_st_find(&m->st, l->stored[l->tensors[i].place.stored].name);
    return NULL;
}

static const struct mt_adapter_target *target_of(const struct mt_adapter *ad, size_t tensor)
{
    for (size_t i = 0; i < ad->n_targets; i++)
        if (ad->whole || ad->target[i].tensor == tensor)
            return &ad->target[i];
    return NULL;
}

/* Finds the adapters of the files' tensors. */
static int find_sites(struct mt_merge *m, struct mt_err *err)
{
    const struct mt_layout *l = m->layout;
    m->name = mt_calloc(l->n_stored, sizeof(*m->name));
    m->site = mt_calloc(l->n_stored, sizeof(*m->site));
    if (!m->name || !m->site)
        return mt_fail_nomem(err, "the adapters", l->n_stored * sizeof(*m->site));
    for (size_t i = 0; i < l->n_stored; i++)
        m->name[i] = &l->stored[i];
    qsort(m->name, l->n_stored, sizeof(*m->name), by_name);
    for (size_t i = 0; i < l->n_tensors; i++) {
        const struct mt_tensor *t = &l->tensors[i];
        const struct mt_adapter *ad = t->adapter ? NULL : t->param->adapter;
        const struct mt_adapter_target *target = ad ? target_of(ad, i) : NULL;
        struct site *s = &m->site[t->place.stored];
        if (target && !s->ad)
            *s = (struct site){ad, target, t, factor(m, ad, target, &ad->a), factor(m, ad, target, &target->b),
                               factor(m, ad, target, &target->magnitude)};
    }
    return 0;
}

/* Is it an expert's own tensor, while PEFT has the adapter for all experts? */
static struct share share_of(const struct mt_merge *m, const struct site *s, const struct mt_st_tensor *t)
{
    int part = 0;
    if (!s->ad->whole || t->n_dims != 2)
        return (struct share){.n_parts = 0};
    mt_family_joined(m->family, s->of->usual, &part);
    return (struct share){(size_t)s->of->expert, (size_t)part, s->ad->whole->usual[1] ? 2 : 1};
}

/* The tensor of a module that was trained whole. */
static const struct mt_st_tensor *whole(const struct mt_merge *m, const char *tensor)
{
    char name[MT_PEFT_NAME];
    if (strlen(tensor) >= MT_TENSOR_NAME)
        return NULL;
    mt_peft_whole_name(name, m->family, tensor);
    return mt_st_find(&m->st, name);
}

/* mt_peft_check() has compared them with the layout; here it is the base's own tensor. */
static int check_shapes(const struct mt_merge *m, const struct site *s, const struct mt_st_tensor *t,
                        struct mt_err *err)
{
    int64_t parts = MT_MAX((int64_t)share_of(m, s, t).n_parts, (int64_t)1);
    bool all = t->n_dims == 3 && s->ad->whole;
    int in = all && !s->ad->whole->is_transposed ? 2 : 1, out = all ? 3 - in : 0; /* dimensions */
    if ((all || t->n_dims == 2) && s->a->shape[1] == t->shape[in] &&
        s->b->shape[0] == (all ? 1 : parts) * t->shape[out])
        return 0;
    return mt_fail(err, MT_ERR_INPUT, -EINVAL, "%s: the adapter of \"%s\" has another shape than the model's matrix",
                   m->st.files[0].path, t->name);
}

static int fail_other_model(const struct mt_merge *m, size_t fit, size_t all, const char *what, struct mt_err *err)
{
    return mt_fail(err, MT_ERR_INPUT, -EINVAL, "%s: only %zu of its %zu %s fit this model: are the adapters for another "
                   "one? Name that with --model", m->st.files[0].path, fit, all, what);
}

/* Does the base have a matrix for every adapter, and a tensor for each that was trained whole? */
static int check_base(struct mt_merge *m, struct mt_err *err)
{
    size_t used = m->layout->n_adapter_stored, all = 0, lacking = 0;
    bool table = false, head = false;
    int rc = 0;
    for (size_t i = 0; i < m->layout->n_stored; i++)
        lacking += m->site[i].ad != NULL;
    for (size_t i = 0; i < m->base.n && !rc; i++) {
        const struct mt_st_tensor *t = &m->base.tensors[i].t, *w = whole(m, t->name);
        m->bf16 |= t->dtype == MT_ST_BF16;
        head |= !strcmp(t->name, "lm_head.weight");
        table |= w && !strcmp(t->name, "model.embed_tokens.weight");
        used += w != NULL;
        if (w && (w->n_elems != t->n_elems || w->n_dims != t->n_dims))
            rc = mt_fail(err, MT_ERR_INPUT, -EINVAL, "%s: \"%s\" has another shape than the model's", m->st.files[0].path,
                         w->name);
        const struct site *s = site_of(m, t->name);
        lacking -= s != NULL;
        if (!rc && s)
            rc = check_shapes(m, s, t, err);
    }
    for (size_t i = 0; i < m->st.n_tensors; i++) {
        const char *name = m->st.tensors[i].name;
        bool tied = table && !head && !strcmp(name, "base_model.model.lm_head.weight"); /* a second copy of the table */
        all += !strstr(name, ".base_layer.weight") && !tied;
    }
    if (!rc && table && !head)
        rc = mt_peft_check_tied(&m->st, err);
    if (!rc && (used != all || lacking))
        rc = fail_other_model(m, used - MT_MIN(used, lacking), all, "tensors", err);
    return rc;
}

static size_t n_unused(const struct mt_adapter_list *list)
{
    size_t n = 0;
    for (size_t i = 0; i < list->n; i++)
        n += !list->items[i].used;
    return n;
}

/* As in training, where the same is refused. */
static int lay_out(struct mt_merge *m, const struct mt_hf_config *cfg, const char *dir, struct mt_err *err)
{
    m->spec.dropout = 0; /* of training alone */
    const struct mt_layout_params p = {.cut = mt_cut_layer, .adapter = &m->spec};
    int rc = mt_layout_create(&m->layout, cfg, &p, err);
    size_t all = m->spec.targets.n + m->spec.train_also.n;
    size_t other = n_unused(&m->spec.targets) + n_unused(&m->spec.train_also);
    if (rc == -EINVAL && other)
        return fail_other_model(m, all - other, all, "modules", err);
    if (rc)
        return mt_fail_prefix(err, rc, "%s", m->st.files[0].path);
    rc = mt_peft_check(m->layout, dir, err);
    return rc ?: find_sites(m, err);
}

static bool changes(const void *ctx, const char *name)
{
    return site_of(ctx, name) || whole(ctx, name);
}

int mt_merge_open(struct mt_merge **out, const char *dir, const struct mt_st_model *base, const char *model_dir,
                  bool f32, struct mt_err *err)
{
    struct mt_merge *m = mt_calloc(1, sizeof(*m));
    MT_FREED struct mt_hf_config *cfg = mt_calloc(1, sizeof(*cfg));
    int rc = m && cfg ? mt_hf_config_read(cfg, model_dir, err) : mt_fail_nomem(err, dir, sizeof(*cfg));
    if (!rc) {
        m->f32 = f32;
        m->family = cfg->family;
        rc = mt_peft_read_spec(&m->spec, dir, err);
    }
    const char *path = MT_PATH("%s/" MT_PEFT_WEIGHTS, dir);
    if (!rc) {
        rc = mt_st_open_file(&m->st, path, err);
        m->open = !rc;
    }
    rc = rc ?: lay_out(m, cfg, dir, err)
            ?: mt_merge_base_open(&m->base, base, m->layout, f32, changes, m, err)
            ?: check_base(m, err)
            ?: mt_peft_compare_copies(m->layout, dir, model_dir, err);
    if (rc)
        mt_merge_close(&m);
    else
        *out = m;
    return rc;
}

static void forget(struct mt_merge *m)
{
    free(m->row);
    free(m->by);
    m->row = m->by = NULL;
    m->now = NULL;
}

static void forget_factors(struct factors *f)
{
    free(f->a);
    free(f->b);
    *f = (struct factors){.of = NULL};
}

void mt_merge_close(struct mt_merge **merge)
{
    struct mt_merge *m = *merge;
    if (!m)
        return;
    forget(m);
    forget_factors(&m->kept[0]);
    forget_factors(&m->kept[1]);
    mt_merge_base_close(&m->base);
    if (m->open)
        mt_st_close(&m->st);
    mt_adapter_spec_finish(&m->spec);
    mt_layout_destroy(&m->layout);
    free(m->name);
    free(m->site);
    free(m);
    *merge = NULL;
}

static enum mt_st_dtype dtype_of(const struct mt_merge *m, const struct mt_st_tensor *t)
{
    if (m->keeps)
        return t->dtype == MT_ST_F16 ? MT_ST_F32 : t->dtype;
    return m->f32 ? MT_ST_F32 : m->bf16 ? t->dtype : MT_ST_BF16;
}

void mt_merge_keep_dtypes(struct mt_merge *m)
{
    m->keeps = true;
}

void mt_merge_as_trained(struct mt_merge *m, enum mt_dtype dtype)
{
    m->exact = true;
    m->exact_bf16 = dtype == MT_BF16;
}

/* The half of masters that is computed with. */
static void keep_hi(const struct mt_merge *m, float *x, size_t n)
{
    for (size_t i = 0; i < n && m->exact_bf16; i++) {
        uint16_t hi, lo;
        mt_master_split(x[i], &hi, &lo);
        x[i] = mt_bf16_to_f32(hi);
    }
}

/* Elements of the base as a run begins with them. */
static int read_base(struct mt_merge *m, const struct mt_merged *x, size_t first, size_t n, float *w,
                     struct mt_err *err)
{
    int rc = mt_merge_base_read(&m->base, x, first, n, w, err);
    bool packed = x->stored;
    for (size_t i = 0; i < n && m->exact_bf16 && packed; i++)
        w[i] = mt_bf16_to_f32(mt_f32_to_bf16(w[i]));
    if (!packed)
        keep_hi(m, w, n);
    return rc;
}

bool mt_merge_decodes(const struct mt_merge *m)
{
    return m->base.decodes;
}

/* A row of B A: the sum over k of by[k * step] rows[k, :]. */
struct outer {
    const float *by, *rows;
    size_t step;
};

static struct outer outer_of(const struct mt_merge *m, size_t row)
{
    bool whole = m->now->t.n_dims == 3;
    const struct share *s = &m->share;
    if (s->n_parts) {
        size_t below = s->part * (size_t)m->now->t.shape[0] + row; /* rows of B */
        return (struct outer){m->b + below * m->rank * m->experts + s->expert, m->a + s->expert * m->rank * m->in,
                              m->experts};
    }
    if (whole && !m->turned) {
        size_t out = (size_t)m->now->t.shape[1], expert = row / out;
        const float *b = m->b + row % out * m->rank * m->experts + expert;
        return (struct outer){b, m->a + expert * m->rank * m->in, m->experts};
    }
    size_t first = whole ? row / m->in * m->rank : 0; /* of A and B: the expert's */
    return whole ? (struct outer){m->a + first * m->in + row % m->in, m->b + first * m->width, m->in}
                 : (struct outer){m->b + row * m->rank, m->a, 1};
}

/* w[j] += s (B A)[row, j] for columns [j, j + n) of a row. */
static void add_row(const struct mt_merge *m, size_t row, size_t j, size_t n, float *w)
{
    struct outer o = outer_of(m, row);
    memset(m->row, 0, n * sizeof(float));
    for (size_t k = 0; k < m->rank; k++)
        for (size_t i = 0; i < n; i++)
            m->row[i] += o.by[k * o.step] * o.rows[k * m->width + j + i];
    for (size_t i = 0; i < n; i++)
        w[i] += m->scale * m->row[i];
}

/* Reads the model's matrix once, to compute the norms of its rows with the adapter added. */
static int take_lengths(struct mt_merge *m, const struct mt_merged *x, const struct mt_st_tensor *magnitude,
                        struct mt_err *err)
{
    const struct mt_st_tensor *t = &x->t;
    size_t out = (size_t)t->shape[0];
    MT_FREED float *w = mt_calloc(m->in, sizeof(float));
    m->by = mt_calloc(out, sizeof(float));
    int rc = w && m->by ? mt_st_read_f32(&m->st, magnitude, 0, out, m->by, err)
                        : mt_fail_nomem(err, t->name, (m->in + out) * sizeof(float));
    if (!rc)
        keep_hi(m, m->by, out);
    for (size_t row = 0; row < out && !rc; row++) {
        double sum = 0;
        rc = read_base(m, x, row * m->in, m->in, w, err);
        if (!rc)
            add_row(m, row, 0, m->in, w);
        for (size_t i = 0; i < m->in && !rc; i++)
            sum += (double)w[i] * (double)w[i];
        m->by[row] = m->exact ? m->by[row] * (1 / mt_merge_row_norm(w, m->in))
                              : (float)((double)m->by[row] / sqrt(sum));
    }
    return rc;
}

/* From [out, rank * experts], experts fastest, to [experts * rank, out]. */
static int turn_b(struct mt_merge *m, float **b, struct mt_err *err)
{
    size_t out = m->width, n = m->experts * m->rank;
    float *to = mt_calloc(n * out, sizeof(float));
    if (!to)
        return mt_fail_nomem(err, "an adapter", n * out * sizeof(float));
    for (size_t o = 0; o < out; o++)
        for (size_t k = 0; k < n; k++)
            to[(k % m->experts * m->rank + k / m->experts) * out + o] = (*b)[o * n + k];
    free(*b);
    *b = to;
    return 0;
}

static int load_factors(struct mt_merge *m, struct factors *f, const struct mt_st_tensor *a,
                        const struct mt_st_tensor *b, bool turned, struct mt_err *err)
{
    if (f->of == a)
        return 0;
    forget_factors(f);
    f->a = mt_calloc(a->n_elems, sizeof(float));
    f->b = mt_calloc(b->n_elems, sizeof(float));
    int rc = f->a && f->b ? mt_st_read_f32(&m->st, a, 0, a->n_elems, f->a, err)
                          : mt_fail_nomem(err, a->name, (a->n_elems + b->n_elems) * sizeof(float));
    rc = rc ?: mt_st_read_f32(&m->st, b, 0, b->n_elems, f->b, err);
    if (!rc) {
        keep_hi(m, f->a, a->n_elems);
        keep_hi(m, f->b, b->n_elems);
    }
    if (!rc && turned)
        rc = turn_b(m, &f->b, err);
    f->of = rc ? NULL : a;
    return rc;
}

/* Loads A and B of the tensor, their factor, and DoRA's row factors. */
static int take_factors(struct mt_merge *m, const struct mt_merged *x, const struct site *s, struct mt_err *err)
{
    const struct mt_st_tensor *t = &x->t;
    if (m->now == x)
        return 0;
    forget(m);
    m->share = share_of(m, s, t);
    m->scale = s->target->scale;
    m->experts = s->ad->whole ? (size_t)m->layout->cfg.moe.n_experts : 1;
    m->rank = s->target->rank;
    m->in = (size_t)s->a->shape[1];
    m->width = (size_t)t->shape[t->n_dims - 1];
    m->row = mt_calloc(m->width, sizeof(float));
    if (!m->row)
        return mt_fail_nomem(err, t->name, m->width * sizeof(float));
    struct factors *f = &m->kept[m->share.n_parts == 2];
    m->turned = t->n_dims == 3 && s->ad->whole && s->ad->whole->is_transposed;
    int rc = load_factors(m, f, s->a, s->b, m->turned, err);
    m->a = f->a;
    m->b = f->b;
    m->now = x;
    if (!rc && m->spec.dora)
        rc = take_lengths(m, x, s->magnitude, err);
    m->now = rc ? NULL : x;
    return rc;
}

static void add_adapter(const struct mt_merge *m, size_t first, size_t n, float *w)
{
    for (size_t at = first; at < first + n;) {
        size_t row = at / m->width, col = at % m->width, len = MT_MIN(m->width - col, first + n - at);
        add_row(m, row, col, len, w + (at - first));
        for (size_t i = 0; m->by && i < len; i++)
            w[at - first + i] *= m->by[row];
        at += len;
    }
}

const struct mt_rounded *mt_merge_rounding(const struct mt_merge *m)
{
    return &m->rounding;
}

/* base: the elements without the adapter, NULL: there is none. */
static void round_to_bf16(struct mt_merge *m, const float *x, const float *base, size_t n, uint16_t *dst)
{
    for (size_t k = 0; k < n; k++)
        dst[k] = mt_f32_to_bf16(x[k]);
    if (base)
        mt_rounded_add(&m->rounding, base, x, dst, n);
}

static int read_merged(const struct mt_source *source, size_t first, size_t n, void *dst, struct mt_err *err)
{
    struct mt_merge *m = source->ctx;
    const struct mt_merged *merged = source->of;
    const struct mt_st_tensor *t = &merged->t, *w = whole(m, t->name);
    const struct site *s = site_of(m, t->name);
    enum mt_st_dtype dtype = source->decl.dtype;
    if (!s && !w && dtype == t->dtype && !merged->stored)
        return mt_st_read_raw(m->base.st, t, first * mt_st_dtype_size(dtype), n * mt_st_dtype_size(dtype), dst, err);
    if (dtype != MT_ST_F32 && dtype != MT_ST_BF16)
        return mt_fail(err, MT_ERR_INPUT, -EINVAL, "tensor \"%s\" is %s, into which adapters cannot be merged: set --dtype f32",
                       t->name, mt_st_dtype_name(dtype));
    bool rounds = dtype == MT_ST_BF16;
    float *x = rounds ? mt_calloc(n, sizeof(float)) : dst, *base = rounds && s ? mt_calloc(n, sizeof(float)) : NULL;
    int rc = x && (base || !rounds || !s) ? 0 : mt_fail_nomem(err, t->name, n * sizeof(float));
    rc = rc ?: w ? mt_st_read_f32(&m->st, w, first, n, x, err) : read_base(m, merged, first, n, x, err);
    if (!rc && s)
        rc = take_factors(m, merged, s, err);
    if (!rc && base)
        memcpy(base, x, n * sizeof(float));
    if (!rc && s)
        add_adapter(m, first, n, x);
    for (size_t k = 0; !rc && s && m->exact && k < n; k++)
        x[k] = mt_bf16_to_f32(mt_f32_to_bf16(x[k]));
    if (!rc && rounds)
        round_to_bf16(m, x, base, n, dst);
    free(base);
    if (x != dst)
        free(x);
    return rc;
}

int mt_merge_list(struct mt_merge *m, bool differing, struct mt_source_list *out, struct mt_err *err)
{
    int rc = 0;
    for (size_t i = 0; i < m->base.n && !rc; i++) {
        const struct mt_merged *x = &m->base.tensors[i];
        struct mt_source s = mt_source_raw(m->base.st, &x->t);
        s = (struct mt_source){s.decl, read_merged, m, x, 0};
        s.decl.dtype = dtype_of(m, &x->t);
        if (!differing || changes(m, x->t.name))
            rc = mt_source_add(out, s, err);
    }
    return rc;
}
