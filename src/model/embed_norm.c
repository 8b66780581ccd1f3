/* SPDX-License-Identifier: Apache-2.0 */
/* RMSNorm of embeddings, without a weight, at the beginning of the first layer (Muse Glimmer). No parameters. */
#include "model/layout_builder.h"
#include "model/part.h"
#include "model/state.h"

struct record {
    float *rstd; /* [n] */
};

static void lay_out_record(struct record *r, const struct mt_part_shape *s, struct mt_part_record *at)
{
    r->rstd = mt_record_take(at, 0, s->max_tokens * sizeof(float));
}

MT_PART_RECORD()

static void lay_out(struct mt_layout_builder *b, struct mt_part *p)
{
    (void)b;
    (void)p;
}

static size_t workspace_bytes(const struct mt_model_params *p, const struct mt_layer_spec *s, mt_device *dev)
{
    (void)s;
    return mt_op_rmsnorm_bwd_workspace(dev, &(struct mt_rmsnorm_bwd){.n = p->max_tokens,
                                                                     .c = (size_t)p->layout->cfg.hidden});
}

static int normalise(const struct mt_part_run *r, void *y, bool again, struct mt_err *err)
{
    const mt_model *m = r->m;
    struct record rec = record_of(r);
    return mt_op_rmsnorm(m->dev,
                         &(struct mt_rmsnorm){.n = r->in->n_tokens, .c = m->wd.c, .dtype = m->dt,
                                              .eps = (float)r->part->spec->norm.eps, .round_once = true, .x = r->x,
                                              .w = m->one, .y = y, .rstd = rec.rstd, .use_rstd = again},
                         err);
}

/* Only the statistics: the output is made from them. */
static int prepare(const struct mt_part_run *r, struct mt_err *err)
{
    return r->kept & 1 ? 0 : normalise(r, r->m->h, false, err);
}

static int finish(const struct mt_part_run *r, void *y, struct mt_err *err)
{
    return normalise(r, y, true, err);
}

static int backward(const struct mt_part_run *r, struct mt_err *err)
{
    mt_model *m = r->m;
    struct record rec = record_of(r);
    return mt_op_rmsnorm_bwd(m->dev,
                             &(struct mt_rmsnorm_bwd){.n = r->in->n_tokens, .c = m->wd.c, .dtype = m->dt,
                                                      .round_once = true, .dy = r->dx, .x = r->x, .w = m->one,
                                                      .rstd = rec.rstd, .dx = r->dx, .workspace = m->own.workspace},
                             err);
}

const struct mt_part_kind mt_part_embed_norm = {
    .name = "embed_norm",
    .port = {MT_PORTS_OF_HIDDEN_STATE},
    .lay_out = lay_out,
    .record_bytes = record_bytes,
    .workspace_bytes = workspace_bytes,
    .prepare = prepare,
    .finish = finish,
    .backward = backward,
};
