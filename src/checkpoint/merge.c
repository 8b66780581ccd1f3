/* SPDX-License-Identifier: Apache-2.0 */
#include "checkpoint/merge.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/dtype.h"
#include "base/mem.h"
#include "checkpoint/layout_files.h"
#include "device/merge_job.h"
#include "hf/hf_config.h"
#include "model/packing.h"
#include "weights/peft.h"
#include "weights/sources.h"

/* A tensor of the merged model. */
struct merged {
    const struct mt_st_tensor *t;     /* that of the base; decoded: its codes */
    const struct mt_stored *stored;   /* it is made of the layout's tensors: decoded, or with adapters; NULL: of t alone */
    bool decoded;
    const struct mt_st_tensor *whole; /* of the adapters' file: its module was trained whole; NULL: it was not */
};

struct mt_merge {
    struct mt_adapter_spec spec;
    struct mt_st_model st;          /* the adapters */
    const struct mt_st_model *base;
    const struct mt_family *family;
    struct mt_layout *layout;       /* of the base with the adapters, as in training */
    struct mt_sources sources;      /* of the base */
    struct mt_layout_files files;   /* its tensors, with the adapters */
    struct mt_stored_reader factors[2][2]; /* A and others, B; of gate_up_proj, whose matrices take turns with others' */
    struct merged *tensors;
    size_t n;
    bool f32, bf16;                 /* bf16: the base has bf16 tensors */
    bool decodes;                   /* what is packed is decoded */
    bool exact, exact_bf16;         /* mt_merge_as_trained(), in bf16 */
    bool keeps;                     /* mt_merge_keep_dtypes() */
    const struct mt_tensor *now;    /* whose A and B are loaded */
    struct mt_merge_place place;    /* of these */
    float *a, *b;                   /* [rank, in], [out, rank] */
    float *row;                     /* [in] */
    float *by;                      /* [out] with DoRA: magnitude / |W + s B A|; NULL: 1 */
    struct mt_rounded rounding;
};

/* The tensor of a module that was trained whole. */
static const struct mt_st_tensor *whole(const struct mt_merge *m, const char *tensor)
{
    char name[MT_PEFT_NAME];
    if (strlen(tensor) >= MT_TENSOR_NAME)
        return NULL;
    mt_peft_whole_name(name, m->family, tensor);
    return mt_st_find(&m->st, name);
}

/* Has one of the layout's tensors that it holds an adapter? */
static bool is_adapted(const struct mt_merge *m, const struct mt_stored *s)
{
    struct mt_merge_place p;
    for (size_t i = s->first_piece; i < s->first_piece + s->n_pieces; i++)
        if (mt_adapter_of(&m->layout->tensors[m->layout->pieces[i]], &p))
            return true;
    return false;
}

static const struct mt_packed_source *source_of(const struct mt_merge *m, const struct mt_stored *s)
{
    return &m->sources.of[m->layout->pieces[s->first_piece]];
}

/* --- the tensors -------------------------------------------------------------------------------------- */

/* held: [n_tensors] of the files, the layout's tensor that it is, or whose codes it is; NULL: none. What is packed is
 * decoded if any of it changes, since packing the result again would lose what adapters add. */
static void list_tensors(struct mt_merge *m, const struct mt_stored *const *held)
{
    const struct mt_st_model *base = m->base;
    bool all = m->f32;
    for (size_t i = 0; i < base->n_tensors && !all; i++)
        all = held[i] && source_of(m, held[i])->format && (is_adapted(m, held[i]) || whole(m, held[i]->name));
    for (size_t i = 0; i < base->n_tensors; i++) {
        const struct mt_st_tensor *t = &base->tensors[i];
        bool packed = held[i] && source_of(m, held[i])->format;
        if (all && !packed && (mt_packed_is_piece(t->name) || (!held[i] && mt_packed_is_bias(base, t))))
            continue;
        struct merged x = {.t = t, .decoded = all && packed};
        if (x.decoded || (held[i] && is_adapted(m, held[i])))
            x.stored = held[i];
        x.whole = whole(m, x.decoded ? x.stored->name : t->name);
        m->tensors[m->n++] = x;
        m->decodes |= x.decoded;
    }
}

static int open_base(struct mt_merge *m, struct mt_err *err)
{
    const struct mt_layout *l = m->layout;
    MT_FREED const struct mt_stored **held = mt_calloc(m->base->n_tensors, sizeof(*held));
    m->tensors = mt_calloc(m->base->n_tensors, sizeof(*m->tensors));
    m->sources.st = *m->base;
    int rc = held && m->tensors ? mt_sources_find(&m->sources, l, err)
                                : mt_fail_nomem(err, "an export", m->base->n_tensors * sizeof(*m->tensors));
    for (size_t i = 0; i < l->n_stored && !rc; i++) {
        const struct mt_st_tensor *t = source_of(m, &l->stored[i])->codes;
        if (t)
            held[t - m->base->tensors] = &l->stored[i];
    }
    if (!rc)
        list_tensors(m, held);
    return rc;
}

static int fail_other_model(const struct mt_merge *m, size_t fit, size_t all, const char *what, struct mt_err *err)
{
    return mt_fail(err, MT_ERR_INPUT, -EINVAL, "%s: only %zu of its %zu %s fit this model: are the adapters for another "
                   "one? Name that with --model", m->st.files[0].path, fit, all, what);
}

/* As it is in the base, or is decoded. */
static struct mt_st_decl decl_of(const struct mt_merge *m, const struct merged *x)
{
    return x->decoded ? mt_stored_decl(x->stored) : mt_source_raw(m->base, x->t).decl;
}

static bool same_shape(struct mt_st_decl a, struct mt_st_decl b)
{
    return a.n_dims == b.n_dims && !memcmp(a.shape, b.shape, (size_t)a.n_dims * sizeof(*a.shape));
}

/* mt_peft_check() has compared the adapters with the layout, this compares that with the base's own tensors. */
static int check_shapes(const struct mt_merge *m, const struct merged *x, struct mt_err *err)
{
    struct mt_st_decl is = decl_of(m, x);
    if (x->stored && !same_shape(mt_stored_decl(x->stored), is))
        return mt_fail(err, MT_ERR_INPUT, -EINVAL, "%s: the adapter of \"%s\" has another shape than the model's matrix",
                       m->st.files[0].path, is.name);
    if (x->whole && !same_shape(mt_source_raw(&m->st, x->whole).decl, is))
        return mt_fail(err, MT_ERR_INPUT, -EINVAL, "%s: \"%s\" has another shape than the model's", m->st.files[0].path,
                       x->whole->name);
    return 0;
}

/* Does the base have a matrix for every adapter, and a tensor for each that was trained whole? */
static int check_base(struct mt_merge *m, struct mt_err *err)
{
    const struct mt_layout *l = m->layout;
    size_t used = l->n_adapter_stored, all = 0, lacking = 0;
    bool table = false, head = false;
    int rc = 0;
    for (size_t i = 0; i < l->n_stored; i++)
        lacking += is_adapted(m, &l->stored[i]) && !source_of(m, &l->stored[i])->codes;
    for (size_t i = 0; i < m->n && !rc; i++) {
        const struct merged *x = &m->tensors[i];
        m->bf16 |= decl_of(m, x).dtype == MT_ST_BF16;
        head |= !strcmp(x->t->name, "lm_head.weight");
        table |= x->whole && !strcmp(x->t->name, "model.embed_tokens.weight");
        used += x->whole != NULL;
        rc = check_shapes(m, x, err);
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
    return mt_peft_check(m->layout, dir, err);
}

/* --- a tensor of the layout -------------------------------------------------------------------------- */

/* The half of masters that is computed with. */
static void keep_hi(const struct mt_merge *m, float *x, size_t n)
{
    for (size_t i = 0; i < n && m->exact_bf16; i++) {
        uint16_t hi, lo;
        mt_master_split(x[i], &hi, &lo);
        x[i] = mt_bf16_to_f32(hi);
    }
}

static int read_base(struct mt_merge *m, const struct mt_tensor *t, size_t first, size_t n, float *w,
                     struct mt_err *err)
{
    bool packed = m->sources.of[t - m->layout->tensors].format;
    int rc = mt_sources_read_f32(&m->sources, t, first, n, w, err);
    for (size_t i = 0; i < n && m->exact_bf16 && packed; i++)
        w[i] = mt_bf16_to_f32(mt_f32_to_bf16(w[i]));
    if (!packed)
        keep_hi(m, w, n);
    return rc;
}

/* w[j] += s (B A)[row, j] for columns [j, j + n) of a row. */
static void add_row(const struct mt_merge *m, size_t row, size_t j, size_t n, float *w)
{
    size_t in = (size_t)m->now->shape[1], rank = m->place.rank;
    memset(m->row, 0, n * sizeof(float));
    for (size_t k = 0; k < rank; k++)
        for (size_t i = 0; i < n; i++)
            m->row[i] += m->b[row * rank + k] * m->a[k * in + j + i];
    for (size_t i = 0; i < n; i++)
        w[i] += m->place.scale * m->row[i];
}

/* Reads the model's matrix once, to compute the norms of its rows with the adapter added. */
static int take_lengths(struct mt_merge *m, struct mt_err *err)
{
    size_t in = (size_t)m->now->shape[1];
    MT_FREED float *w = mt_calloc(in, sizeof(float));
    int rc = w ? 0 : mt_fail_nomem(err, m->now->name, in * sizeof(float));
    for (size_t row = 0; row < (size_t)m->now->shape[0] && !rc; row++) {
        double sum = 0;
        rc = read_base(m, m->now, row * in, in, w, err);
        if (!rc)
            add_row(m, row, 0, in, w);
        for (size_t i = 0; i < in && !rc; i++)
            sum += (double)w[i] * (double)w[i];
        m->by[row] = m->exact ? m->by[row] * (1 / mt_merge_row_norm(w, in)) : (float)((double)m->by[row] / sqrt(sum));
    }
    return rc;
}

static void forget(struct mt_merge *m)
{
    float **of[] = {&m->a, &m->b, &m->row, &m->by};
    for (size_t i = 0; i < MT_ARRAY_LEN(of); i++) {
        free(*of[i]);
        *of[i] = NULL;
    }
    m->now = NULL;
}

/* n elements of the adapters from element `at` of the unit on. */
static int read_factor(struct mt_merge *m, int which, size_t at, size_t n, float **to, struct mt_err *err)
{
    const struct mt_tensor *t = mt_unit_tensor_at(m->layout, m->now->unit, at);
    const struct mt_fused_tensor *all = t->adapter->whole;
    struct mt_stored_reader *r = &m->factors[which][all && all->usual[1]];
    *to = mt_calloc(n, sizeof(float));
    int rc = *to ? mt_stored_read_f32(r, mt_stored_source(r, t), t, at - t->first, n, *to, err)
                 : mt_fail_nomem(err, t->name, n * sizeof(float));
    if (!rc)
        keep_hi(m, *to, n);
    return rc;
}

/* Loads A and B of the tensor, and DoRA's row factors. *any: it has an adapter. */
static int take_factors(struct mt_merge *m, const struct mt_tensor *t, bool *any, struct mt_err *err)
{
    struct mt_merge_place p;
    *any = mt_adapter_of(t, &p);
    if (!*any || m->now == t)
        return 0;
    forget(m);
    m->now = t;
    m->place = p;
    size_t out = (size_t)t->shape[0], in = (size_t)t->shape[1];
    m->row = mt_calloc(in, sizeof(float));
    int rc = m->row ? 0 : mt_fail_nomem(err, t->name, in * sizeof(float));
    rc = rc ?: read_factor(m, 0, p.a, p.rank * in, &m->a, err)
            ?: read_factor(m, 1, p.b, out * p.rank, &m->b, err);
    if (!rc && p.magnitude != SIZE_MAX)
        rc = read_factor(m, 0, p.magnitude, out, &m->by, err) ?: take_lengths(m, err);
    m->now = rc ? NULL : t;
    return rc;
}

static void add_adapter(const struct mt_merge *m, size_t first, size_t n, float *w)
{
    size_t in = (size_t)m->now->shape[1];
    for (size_t at = first, len; at < first + n; at += len) {
        size_t row = at / in, col = at % in;
        len = MT_MIN(in - col, first + n - at);
        add_row(m, row, col, len, w + (at - first));
        for (size_t i = 0; m->by && i < len; i++)
            w[at - first + i] *= m->by[row];
    }
    for (size_t k = 0; m->exact && k < n; k++)
        w[k] = mt_bf16_to_f32(mt_f32_to_bf16(w[k]));
}

static void round_all(uint16_t *dst, const float *x, size_t n)
{
    for (size_t i = 0; i < n; i++)
        dst[i] = mt_f32_to_bf16(x[i]);
}

/* The model's with its adapter: in f32, or rounded to bf16. */
static int read_tensor(void *ctx, const struct mt_values *v, void *dst, struct mt_err *err)
{
    struct mt_merge *m = ctx;
    size_t n = v->n;
    bool rounds = v->size != sizeof(float), adapted;
    MT_FREED float *was = rounds ? mt_alloc_aligned(2 * n * sizeof(float)) : NULL;
    float *x = rounds ? was + n : dst;
    if (rounds && !was)
        return mt_fail_nomem(err, v->t->name, 2 * n * sizeof(float));
    int rc = take_factors(m, v->t, &adapted, err) ?: read_base(m, v->t, v->first, n, x, err);
    if (rc)
        return rc;
    if (rounds && adapted)
        memcpy(was, x, n * sizeof(float));
    if (adapted)
        add_adapter(m, v->first, n, x);
    if (rounds)
        round_all(dst, x, n);
    if (rounds && adapted)
        mt_rounded_add(&m->rounding, was, x, dst, n);
    return 0;
}

/* --- a tensor of the files ----------------------------------------------------------------------------- */

/* Another dtype, or what was trained whole. */
static int read_other(const struct mt_source *source, size_t first, size_t n, void *dst, struct mt_err *err)
{
    struct mt_merge *m = source->ctx;
    const struct merged *x = source->of;
    bool rounds = source->decl.dtype == MT_ST_BF16;
    MT_FREED float *own = rounds ? mt_alloc_aligned(n * sizeof(*own)) : NULL;
    float *w = rounds ? own : dst;
    int rc = w ? mt_st_read_f32(x->whole ? &m->st : m->base, x->whole ? x->whole : x->t, first, n, w, err)
               : mt_fail_nomem(err, x->t->name, n * sizeof(float));
    if (!rc && !x->whole)
        keep_hi(m, w, n);
    if (!rc && rounds)
        round_all(dst, w, n);
    return rc;
}

static enum mt_st_dtype dtype_of(const struct mt_merge *m, enum mt_st_dtype own)
{
    if (m->keeps)
        return own == MT_ST_F16 ? MT_ST_F32 : own;
    return m->f32 ? MT_ST_F32 : m->bf16 ? own : MT_ST_BF16;
}

int mt_merge_list(struct mt_merge *m, bool differing, struct mt_source_list *out, struct mt_err *err)
{
    int rc = 0;
    for (size_t i = 0; i < m->n && !rc; i++) {
        const struct merged *x = &m->tensors[i];
        bool differs = x->whole || (x->stored && is_adapted(m, x->stored));
        struct mt_st_decl d = decl_of(m, x);
        enum mt_st_dtype dtype = dtype_of(m, d.dtype);
        bool raw = !differs && !x->decoded && dtype == d.dtype;
        d.dtype = dtype;
        if (differing && !differs)
            continue;
        if (!raw && dtype != MT_ST_F32 && dtype != MT_ST_BF16)
            return mt_fail(err, MT_ERR_INPUT, -EINVAL, "tensor \"%s\" is %s, into which adapters cannot be merged: set "
                           "--dtype f32", d.name, mt_st_dtype_name(dtype));
        rc = mt_source_add(out, raw ? mt_source_raw(m->base, x->t)
                                : x->stored && !x->whole ? mt_layout_files_source(&m->files, x->stored, d)
                                                         : (struct mt_source){d, read_other, m, x, 0}, err);
    }
    return rc;
}

/* --- opening ---------------------------------------------------------------------------------------- */

int mt_merge_open(struct mt_merge **out, const char *dir, const struct mt_st_model *base, const char *model_dir,
                  bool f32, struct mt_err *err)
{
    struct mt_merge *m = mt_calloc(1, sizeof(*m));
    MT_FREED struct mt_hf_config *cfg = mt_calloc(1, sizeof(*cfg));
    int rc = m && cfg ? mt_hf_config_read(cfg, model_dir, err) : mt_fail_nomem(err, dir, sizeof(*cfg));
    if (!rc) {
        m->base = base;
        m->f32 = f32;
        m->family = cfg->family;
    }
    rc = rc ?: mt_peft_read_spec(&m->spec, dir, err)
            ?: mt_peft_open_weights(&m->st, dir, err)
            ?: lay_out(m, cfg, dir, err)
            ?: open_base(m, err)
            ?: check_base(m, err)
            ?: mt_peft_compare_copies(m->layout, dir, model_dir, err);
    if (rc) {
        mt_merge_close(&m);
        return rc;
    }
    mt_layout_files_begin(&m->files, (struct mt_stored_writer){.l = m->layout, .read = read_tensor, .ctx = m});
    for (int i = 0; i < 4; i++)
        m->factors[i / 2][i % 2] = (struct mt_stored_reader){.l = m->layout, .st = &m->st};
    *out = m;
    return 0;
}

void mt_merge_close(struct mt_merge **merge)
{
    struct mt_merge *m = *merge;
    if (!m)
        return;
    forget(m);
    for (int i = 0; i < 4; i++)
        mt_stored_reader_finish(&m->factors[i / 2][i % 2]);
    mt_layout_files_finish(&m->files);
    mt_sources_forget(&m->sources);
    mt_st_close(&m->st);
    mt_adapter_spec_finish(&m->spec);
    mt_layout_destroy(&m->layout);
    free(m->tensors);
    free(m);
    *merge = NULL;
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

bool mt_merge_decodes(const struct mt_merge *m)
{
    return m->decodes;
}

const struct mt_rounded *mt_merge_rounding(const struct mt_merge *m)
{
    return &m->rounding;
}
