/* SPDX-License-Identifier: Apache-2.0 */
/* Widths and sizes that the files of a model share. */
#include "base/mem.h"
#include "model/part.h"
#include "model/state.h"

/* The gate of a shared expert is the only operation that takes a vector of weights and may have an adapter. */
size_t mt_model_n_ones(const struct mt_layout *l)
{
    size_t n = l->n_adapters && l->cfg.moe.shared_gate;
    for (int i = 0; i < l->cfg.n_specs; i++)
        if (l->cfg.spec[i].v_norm || l->cfg.spec[i].qk_norm == MT_QK_NORM_BARE)
            n = MT_MAX(n, (size_t)l->cfg.spec[i].head_dim);
    if (l->cfg.family->first_parts[0]) /* part embed_norm */
        n = MT_MAX(n, (size_t)l->cfg.hidden);
    return n;
}

void *mt_take(void *base, size_t *at, size_t bytes)
{
    void *p = base ? (char *)base + *at : NULL;
    *at += mt_align_up(bytes, MT_RECORD_ALIGN);
    return p;
}

size_t mt_model_boundary_bytes(const mt_model *m)
{
    const struct mt_part_shape shape = {.cfg = &m->layout->cfg, .dtype = m->dt, .max_tokens = m->p.max_tokens};
    return mt_hidden_bytes(&shape);
}

size_t mt_model_auto_logits_chunk(const struct mt_layout *l)
{
    /* 64 MiB of FP32 logits: enough rows for a fast matrix product, small beside a layer's scratch */
    size_t rows = ((size_t)64 << 20) / (4 * (size_t)l->cfg.vocab), chunk = 64;
    while (chunk * 2 <= rows && chunk < 4096)
        chunk *= 2;
    return chunk;
}

size_t mt_model_logits_ld(const struct mt_layout *l)
{
    return mt_align_up((size_t)l->cfg.vocab, 8);
}

size_t mt_model_max_used_rows(const struct mt_model_params *p)
{
    return MT_MIN((size_t)p->layout->cfg.vocab, p->max_micro * p->max_tokens);
}
