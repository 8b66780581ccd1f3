/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "base/mem.h"
#include "model/recipe.h"
#include "model/state.h"

/** Attention over a run's tokens and documents, by its layer's rule; its operands are yet to be set. */
static inline struct mt_attention mt_attention_of(const struct mt_part_run *r)
{
    const mt_model *m = r->m;
    const struct mt_layer_spec *s = r->part->spec;
    return (struct mt_attention){
        .n = r->in->n_tokens,
        .window = (size_t)s->window,
        .n_docs = r->in->n_docs,
        .max_len = r->in->max_len,
        .most_n = m->p.max_tokens,
        .most_len = m->p.max_len,
        .dtype = m->dt,
        .scale = (float)s->score_scale,
        .cap = (float)s->score_cap,
        .cu_seqlens = r->in->cu_seqlens,
        .cu_seqlens_host = r->in->cu_seqlens_host,
    };
}

/** From the input of attention's product to that of the output's: the heads' outputs, with sinks and gates. */
struct mt_view mt_attention_outputs(struct mt_recipe *r, struct mt_view h);

/** Keys that a query sees, on average over documents of seq_len tokens. */
static inline double mt_attention_keys_seen(const struct mt_layer_spec *s, size_t seq_len)
{
    double len = (double)seq_len, window = s->window ? MT_MIN((double)s->window, len) : len;
    return (window * (window + 1) / 2 + (len - window) * window) / len;
}
