/* SPDX-License-Identifier: Apache-2.0 */
/* The keys of mixtures of experts, whose names differ between families and versions of transformers. */
#include "hf/moe.h"

#include <stddef.h>

#include "base/mem.h"
#include "hf/hf_config.h"
#include "hf/keys.h"

/* The first of the names that is there; else the first. */
static const char *name_of(const struct mt_keys *k, const char *const *names, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (mt_keys_find(k, names[i]))
            return names[i];
    return names[0];
}

static void read_shape(struct mt_keys *k, struct mt_hf_config *c, const struct mt_moe_family *f)
{
    static const char *const experts[] = {"num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"},
                             *const chosen[] = {"num_experts_per_tok", "moe_k", "moe_topk"};
    const char *count = name_of(k, experts, MT_ARRAY_LEN(experts)), *top = name_of(k, chosen, MT_ARRAY_LEN(chosen));
    struct mt_moe *m = &c->moe;
    m->n_experts = mt_keys_int(k, count, m->n_experts, 1, MT_MOE_MAX_EXPERTS);
    m->top_k = mt_keys_int(k, top, m->top_k, 1, MT_MOE_MAX_EXPERTS);
    m->width = f->width_is_ffn ? c->ffn : mt_keys_int(k, "moe_intermediate_size", m->width, 1, 1 << 24);
    if (m->top_k > m->n_experts)
        mt_keys_refuse(k, top, "is more than there are experts");
    if (m->width % 8)
        mt_keys_refuse(k, f->width_is_ffn ? "intermediate_size" : "moe_intermediate_size", "must be a multiple of 8");
    if (f->shared == MT_MOE_SHARED_WIDTH)
        m->shared_width = mt_keys_int(k, "shared_expert_intermediate_size", m->shared_width, 1, 1 << 24);
}

static void read_rule(struct mt_keys *k, struct mt_hf_config *c, const struct mt_moe_family *f)
{
    struct mt_moe *m = &c->moe;
    if (f->renorm_by_key && !mt_keys_bool(k, "norm_topk_prob", false))
        m->renorm = MT_MOE_NO_RENORM;
    if (mt_keys_number(k, "router_jitter_noise", 0) != 0)
        mt_keys_refuse(k, "router_jitter_noise", "other than 0 is not supported");
}

static void leave_dense(struct mt_keys *k, struct mt_hf_config *c, const char *key)
{
    const cJSON *list = mt_keys_find(k, key);
    if (list && !cJSON_IsArray(list))
        mt_keys_refuse(k, key, "must be a list of layers");
    for (const cJSON *v = cJSON_IsArray(list) ? list->child : NULL; v; v = v->next) {
        if (!cJSON_IsNumber(v))
            mt_keys_refuse(k, key, "must be a list of layers");
        else if (v->valuedouble >= 0 && v->valuedouble < (double)c->n_layers)
            c->sparse[(size_t)v->valuedouble] = false;
    }
}

static void read_layers(struct mt_keys *k, struct mt_hf_config *c, const struct mt_moe_family *f)
{
    int64_t step = f->layers == MT_MOE_SPARSE_STEP ? mt_keys_int(k, "decoder_sparse_step", 1, 1, MT_MAX_LAYERS) : 1;
    for (int64_t i = 0; i < c->n_layers; i++)
        c->sparse[i] = (i + 1) % step == 0;
    if (f->layers == MT_MOE_SPARSE_STEP)
        leave_dense(k, c, "mlp_only_layers");
}

void mt_moe_read(struct mt_keys *k, struct mt_hf_config *c)
{
    const struct mt_moe_family *f = c->family->moe;
    if (!f)
        return;
    c->moe = f->values;
    read_shape(k, c, f);
    read_rule(k, c, f);
    read_layers(k, c, f);
}
