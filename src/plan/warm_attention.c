/* SPDX-License-Identifier: Apache-2.0 */
#include "plan/warm_attention.h"

#include "base/mem.h"
#include "plan/warm.h"

static bool same_view(const struct mt_heads *a, const struct mt_heads *b)
{
    return a->n == b->n && a->dim == b->dim && a->ld == b->ld && a->stride == b->stride;
}

static bool same_forward(const struct mt_attention *a, const struct mt_attention *b)
{
    return a->window == b->window && a->dtype == b->dtype && a->cap == b->cap && same_view(&a->q, &b->q) &&
           same_view(&a->k, &b->k) && same_view(&a->v, &b->v) && same_view(&a->o, &b->o);
}

void mt_warm_attention_note(void *ctx, enum mt_dev_op op, const void *args)
{
    struct mt_warm_attention *w = ctx;
    bool backward = op == MT_DEV_ATTENTION_BWD;
    if (!backward && op != MT_DEV_ATTENTION)
        return;
    const struct mt_attention_bwd b = backward ? *(const struct mt_attention_bwd *)args
                                               : (struct mt_attention_bwd){.fwd = *(const struct mt_attention *)args};
    if (b.dk_sum.p) /* of rows in chunks, which need no plan */
        return;
    for (int i = 0; i < w->n; i++)
        if (w->call[i].backward == backward && same_forward(&w->call[i].args.fwd, &b.fwd))
            return;
    if (w->n == (int)MT_ARRAY_LEN(w->call))
        return;
    w->call[w->n].backward = backward;
    w->call[w->n++].args = b;
}

/* Buffers of one call, from the device's free memory. */
struct buffers {
    mt_device *dev;
    void *p[10];
    int n, rc; /* rc: the first failure */
    struct mt_err err;
};

static void *take(struct buffers *r, size_t bytes, bool zero)
{
    void *p = NULL;
    if (r->rc)
        return NULL;
    r->rc = mt_device_alloc(r->dev, MT_MAX(bytes, (size_t)1), "attention's first run", &p, &r->err);
    if (r->rc)
        return NULL;
    r->p[r->n++] = p;
    if (zero)
        r->rc = mt_op_zero(r->dev, &(struct mt_zero){p, bytes}, &r->err);
    return p;
}

static void upload(struct buffers *r, void *dst, const void *src, size_t bytes)
{
    if (!r->rc)
        r->rc = mt_device_copy(r->dev, MT_STREAM_COMPUTE, &(struct mt_copy){dst, bytes, src, bytes, bytes, 1}, &r->err);
}

/* The documents of a micro-batch, and buffers of its size: what is read may be the same zeros. */
static void fill_forward(struct buffers *r, struct mt_attention *a, const struct mt_batch *b)
{
    size_t e = mt_dtype_size(a->dtype), widest = MT_MAX(MT_MAX(a->q.ld, a->k.ld), MT_MAX(a->v.ld, a->o.ld));
    size_t bytes = (b->n_docs + 1) * sizeof(int32_t);
    struct mt_attention most = *a;
    most.n = a->most_n;
    most.max_len = a->most_len;
    a->n = b->n_tokens;
    a->n_docs = b->n_docs;
    a->max_len = b->max_doc_len;
    a->past = 0; /* those that go on need no plan */
    int32_t *cu = take(r, bytes, false);
    upload(r, cu, b->cu_seqlens, bytes);
    a->cu_seqlens = cu;
    a->cu_seqlens_host = b->cu_seqlens;
    a->q.p = a->k.p = a->v.p = take(r, a->n * widest * e, true);
    a->o.p = take(r, a->n * a->o.ld * e, true);
    a->lse = take(r, a->n * a->q.n * sizeof(float), true);
    a->workspace = take(r, mt_op_attention_workspace(r->dev, &most), false);
}

static void fill_backward(struct buffers *r, struct mt_attention_bwd *b)
{
    size_t e = mt_dtype_size(b->fwd.dtype);
    b->d_o.p = b->fwd.o.p;
    b->dq.p = take(r, b->fwd.n * b->dq.ld * e, false);
    b->dk.p = take(r, b->fwd.n * b->dk.ld * e, false);
    b->dv.p = take(r, b->fwd.n * b->dv.ld * e, false);
}

/* *ran: whether there was memory for it. */
static int run(mt_device *dev, struct mt_attention_bwd args, bool backward, const struct mt_batch *b, bool *ran,
               struct mt_err *err)
{
    struct buffers r = {.dev = dev};
    fill_forward(&r, &args.fwd, b);
    if (backward)
        fill_backward(&r, &args);
    if (!r.rc)
        r.rc = backward ? mt_op_attention_bwd(dev, &args, &r.err) : mt_op_attention(dev, &args.fwd, &r.err);
    int synced = mt_device_sync(dev, r.rc ? NULL : &r.err);
    r.rc = r.rc ?: synced;
    for (int i = 0; i < r.n; i++)
        mt_device_free(dev, r.p[i]);
    *ran = !r.rc;
    if (!r.rc || r.rc == -ENOMEM)
        return 0;
    if (err)
        *err = r.err;
    return r.rc;
}

static bool same_documents(const struct mt_batch *a, const struct mt_batch *b)
{
    bool same = a->n_docs == b->n_docs;
    for (size_t i = 0; i <= a->n_docs && same; i++)
        same = a->cu_seqlens[i] == b->cu_seqlens[i];
    return same;
}

/* Whether an earlier micro-batch has the documents of this one. */
static bool is_again(const struct mt_step_data *step, size_t micro)
{
    bool again = false;
    for (size_t i = 0; i < micro && !again; i++)
        again = same_documents(&step->micro[i], &step->micro[micro]);
    return again;
}

int mt_warm_attention_run(const struct mt_warm_attention *w, mt_device *dev, const struct mt_step_data *step,
                          size_t *n_calls, struct mt_err *err)
{
    int rc = 0;
    *n_calls = 0;
    for (size_t m = 0; m < step->n && *n_calls < MT_WARM_CALLS && !rc; m++) {
        bool ran = false;
        if (is_again(step, m))
            continue;
        for (int i = 0; i < w->n && !rc; i++)
            rc = run(dev, w->call[i].args, w->call[i].backward, &step->micro[m], &ran, err);
        *n_calls += ran;
    }
    return rc;
}
