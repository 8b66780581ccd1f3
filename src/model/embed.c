/* SPDX-License-Identifier: Apache-2.0 */
/* The embedding: x = table[ids]. Its input is the token ids, so it has no gradient of an input. */
#include "model/part.h"
#include "model/state.h"

static void lay_out(struct mt_layout_builder *b, struct mt_part *p)
{
    const struct mt_hf_config *c = mt_layout_builder_config(b);
    mt_layout_add_tensor(b, p, MT_EMBED_TABLE, c->vocab, c->hidden, "model.embed_tokens.weight");
}

static int finish(const struct mt_part_run *r, void *y, struct mt_err *err)
{
    const mt_model *m = r->m;
    return mt_op_embedding(m->dev,
                           &(struct mt_embedding){
                               .n = r->in->n_tokens,
                               .vocab = (size_t)m->layout->cfg.vocab,
                               .c = m->c,
                               .dtype = m->dt,
                               .scale = (float)m->layout->cfg.embed_scale,
                               .ids = r->in->ids,
                               .table = mt_elem(m, r->w, r->part->param[MT_EMBED_TABLE].at),
                               .out = y,
                           },
                           err);
}

static int backward(const struct mt_part_run *r, struct mt_err *err)
{
    const mt_model *m = r->m;
    float *dtable = mt_grad_of(r->g, r->part->param[MT_EMBED_TABLE]);
    if (!dtable)
        return 0;
    return mt_op_embedding_bwd(m->dev,
                               &(struct mt_embedding_bwd){
                                   .n = r->in->n_tokens,
                                   .vocab = (size_t)m->layout->cfg.vocab,
                                   .c = m->c,
                                   .n_runs = r->in->n_runs,
                                   .dtype = m->dt,
                                   .scale = (float)m->layout->cfg.embed_scale,
                                   .run_ids = r->in->run_ids,
                                   .starts = r->in->run_starts,
                                   .order = r->in->order,
                                   .dout = r->dx,
                                   .dtable = dtable,
                               },
                               err);
}

void mt_embed_scale_row(const struct mt_hf_config *cfg, enum mt_dtype dtype, void *row, size_t n)
{
    float scale = (float)cfg->embed_scale, *wide = row;
    uint16_t *half = row;
    if (dtype == MT_BF16)
        scale = mt_bf16_to_f32(mt_f32_to_bf16(scale));
    for (size_t i = 0; scale != 1 && i < n; i++) {
        if (dtype == MT_F32)
            wide[i] *= scale;
        else
            half[i] = mt_f32_to_bf16(mt_bf16_to_f32(half[i]) * scale);
    }
}

const struct mt_part_kind mt_part_embed = {
    .name = "embed",
    .port = {{MT_ROLE_TABLE, MT_READ, MT_NO_ACCESS},
             {MT_ROLE_Y, MT_WRITE, MT_NO_ACCESS, mt_hidden_bytes},
             {MT_ROLE_DX, MT_NO_ACCESS, MT_READ, mt_hidden_bytes},
             {MT_ROLE_TABLE_GRAD, MT_NO_ACCESS, MT_ADD}},
    .lay_out = lay_out,
    .finish = finish,
    .backward = backward,
};
