/* SPDX-License-Identifier: Apache-2.0 */
/* Widths and sizes that the files of a model share. */
#include "base/mem.h"
#include "model/part.h"
#include "model/state.h"

struct mt_widths mt_widths(const struct mt_hf_config *cfg, const struct mt_layer_spec *s)
{
    struct mt_widths w = {
        .c = (size_t)cfg->hidden,
        .f = (size_t)s->ffn,
        .q = (size_t)(s->n_heads * s->head_dim),
        .kv = (size_t)(s->n_kv_heads * s->head_dim),
        .v = (size_t)(s->n_kv_heads * s->v_dim),
        .o = (size_t)(s->n_heads * s->v_dim),
    };
    w.qk = w.q + w.kv + (s->v_norm ? w.v : 0);
    w.qkv = w.q + (s->gate ? w.o : 0) + w.kv + (s->v_is_k ? 0 : w.v);
    return w;
}

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
    return mt_layout_boundary_bytes(m->layout, m->dt, m->p.max_tokens);
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
