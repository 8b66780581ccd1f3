/* SPDX-License-Identifier: Apache-2.0 */
/* The keys of mixtures of experts, whose names differ between families and versions of transformers. */
#include "hf/moe.h"

#include <stddef.h>
#include <string.h>

#include "base/mem.h"
#include "hf/hf_config.h"
#include "hf/keys.h"

/* The first of the names that is present; if none is, the first name. */
static const char *name_of(const struct mt_keys *k, const char *const *names, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (mt_keys_find(k, names[i]))
            return names[i];
    return names[0];
}

/* An integer, or a list that has the same integer for each layer. */
static int64_t read_number(struct mt_keys *k, const char *key, int64_t def, int64_t max)
{
    const cJSON *list = mt_keys_find(k, key);
    if (!cJSON_IsArray(list) || !list->child)
        return mt_keys_int(k, key, def, 1, max);
    for (const cJSON *v = list->child; v; v = v->next)
        if (!cJSON_IsNumber(v) || v->valuedouble != list->child->valuedouble)
            mt_keys_refuse(k, key, "must be the same for all layers");
    double first = list->child->valuedouble;
    if (cJSON_IsNumber(list->child) && first >= 1 && first <= (double)max && first == (double)(int64_t)first)
        return (int64_t)first;
    mt_keys_refuse(k, key, "must be a positive integer, or a list of them");
    return def;
}

static const char *count_key(const struct mt_keys *k)
{
    static const char *const names[] = {"num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"};
    return name_of(k, names, MT_ARRAY_LEN(names));
}

/* No experts at all, in a family that may have some. */
static bool is_dense(const struct mt_keys *k, const struct mt_moe_family *f, int64_t n_layers, const bool *sparse)
{
    const cJSON *v = mt_keys_find(k, count_key(k));
    bool any = false;
    for (int64_t i = 0; i < n_layers; i++)
        any |= sparse[i];
    if (f->layers == MT_MOE_BY_KIND)
        return !any;
    return f->none_is_dense && cJSON_IsNumber(v) && v->valuedouble == 0;
}

static void read_shape(struct mt_keys *k, struct mt_hf_config *c, const struct mt_moe_family *f, int64_t ffn)
{
    static const char *const chosen[] = {"num_experts_per_tok", "moe_k", "moe_topk", "top_k_experts"};
    const char *count = count_key(k), *top = name_of(k, chosen, MT_ARRAY_LEN(chosen));
    const char *width = f->width_is_ffn ? "intermediate_size" : f->width_key ? f->width_key : "moe_intermediate_size";
    struct mt_moe *m = &c->moe;
    if (!m->n_experts && !mt_keys_find(k, count))
        mt_keys_refuse(k, count, "is missing");
    if (!m->top_k && !mt_keys_find(k, top))
        mt_keys_refuse(k, top, "is missing");
    m->n_experts = read_number(k, count, m->n_experts, MT_MOE_MAX_EXPERTS);
    m->top_k = read_number(k, top, m->top_k, MT_MOE_MAX_EXPERTS);
    m->width = f->width_is_ffn ? ffn : read_number(k, width, m->width, 1 << 24);
    if (m->top_k > m->n_experts)
        mt_keys_refuse(k, top, "is larger than the number of experts");
    if (f->latent_key)
        m->latent = mt_keys_int(k, f->latent_key, 0, 0, 1 << 24);
    if (m->latent % 8)
        mt_keys_refuse(k, f->latent_key, "must be a multiple of 8");
    if (m->width % 8 || m->width < 1)
        mt_keys_refuse(k, width, "must be a multiple of 8");
}

static void read_shared(struct mt_keys *k, struct mt_hf_config *c, const struct mt_moe_family *f, int64_t ffn)
{
    static const char *const counts[] = {"n_shared_experts", "num_shared_experts", "moe_num_shared_experts"};
    const char *count = name_of(k, counts, MT_ARRAY_LEN(counts));
    struct mt_moe *m = &c->moe;
    if (f->shared == MT_MOE_SHARED_WIDTH)
        m->shared_width = mt_keys_int(k, f->shared_key ? f->shared_key : "shared_expert_intermediate_size",
                                      m->shared_width, 1, 1 << 24);
    if (f->shared == MT_MOE_SHARED_COUNT)
        m->shared_width = m->width * mt_keys_int(k, count, f->shared_count, 0, 1024);
    if (f->shared == MT_MOE_SHARED_FFN)
        m->shared_width = ffn;
}

static void read_groups(struct mt_keys *k, struct mt_moe *m)
{
    m->n_group = mt_keys_int(k, "n_group", MT_MAX(m->n_group, (int64_t)1), 1, MT_MOE_MAX_EXPERTS);
    m->topk_group = mt_keys_int(k, "topk_group", MT_MAX(m->topk_group, (int64_t)1), 1, MT_MOE_MAX_EXPERTS);
    if (m->n_experts % m->n_group || (m->n_group > 1 && m->n_experts / m->n_group < 2))
        mt_keys_refuse(k, "n_group", "does not divide the experts into groups of two or more");
    else if (m->topk_group > m->n_group || m->top_k > m->topk_group * (m->n_experts / m->n_group))
        mt_keys_refuse(k, "topk_group", "leaves fewer experts than each token uses, or is more than n_group");
}

/* The class of a family has one score and does not read this key: another score is of another model. */
static void check_score(struct mt_keys *k, const struct mt_moe *m)
{
    const cJSON *v = mt_keys_find(k, "scoring_func");
    const char *said = cJSON_IsString(v) ? v->valuestring : "", *name = m->score == MT_MOE_SIGMOID ? "sigmoid" : "softmax";
    bool named_by_method = m->score == MT_MOE_SIGMOID && !strcmp(said, "noaux_tc"); /* dots.llm1 */
    if (v && strcmp(said, name) && !named_by_method)
        mt_keys_refuse(k, "scoring_func", "is not the score of this architecture");
}

static void read_rule(struct mt_keys *k, struct mt_hf_config *c, const struct mt_moe_family *f)
{
    struct mt_moe *m = &c->moe;
    if (f->renorm_by_key && !mt_keys_bool(k, "norm_topk_prob", f->renorm_by_key == MT_MOE_UNLESS_OFF))
        m->renorm = MT_MOE_NO_RENORM;
    const cJSON *method = f->group_method ? mt_keys_find(k, "topk_method") : NULL;
    if (f->group_method && cJSON_IsString(method) && strcmp(method->valuestring, f->group_method) &&
        strcmp(method->valuestring, "greedy"))
        mt_keys_refuse(k, "topk_method", "is not supported");
    if (f->groups && (!f->group_method || (cJSON_IsString(method) && !strcmp(method->valuestring, f->group_method))))
        read_groups(k, m);
    if (f->eps_key)
        m->renorm_eps = mt_keys_number(k, f->eps_key, m->renorm_eps);
    if (f->scale_key)
        m->scale = mt_keys_number(k, f->scale_key, m->scale);
    if (m->clamped) {
        m->alpha = mt_keys_number(k, "swiglu_alpha", m->alpha);
        m->limit = mt_keys_number(k, "swiglu_limit", m->limit);
    }
    check_score(k, m);
    if (mt_keys_number(k, "router_jitter_noise", 0) != 0)
        mt_keys_refuse(k, "router_jitter_noise", "other than 0 is not supported");
}

/* --- which layers ---------------------------------------------------------------------------------- */

static void leave_dense(struct mt_keys *k, int64_t n_layers, bool *sparse, const char *key)
{
    const cJSON *list = mt_keys_find(k, key);
    if (list && !cJSON_IsArray(list))
        mt_keys_refuse(k, key, "must be a list of layers");
    for (const cJSON *v = cJSON_IsArray(list) ? list->child : NULL; v; v = v->next) {
        if (!cJSON_IsNumber(v))
            mt_keys_refuse(k, key, "must be a list of layers");
        else if (v->valuedouble >= 0 && v->valuedouble < (double)n_layers)
            sparse[(size_t)v->valuedouble] = false;
    }
}

static void take_types(struct mt_keys *k, int64_t n_layers, bool *sparse, const char *key)
{
    const cJSON *v = mt_keys_of_layers(k, key, n_layers);
    sparse[0] = false;
    for (int64_t i = 0; v; v = v->next, i++) {
        sparse[i] = cJSON_IsString(v) && !strcmp(v->valuestring, "sparse");
        if (!sparse[i] && !(cJSON_IsString(v) && !strcmp(v->valuestring, "dense")))
            mt_keys_refuse(k, key, "names a kind of layer that is neither \"dense\" nor \"sparse\"");
    }
}

static void read_layers(struct mt_keys *k, int64_t n_layers, const struct mt_moe_family *f, bool *sparse)
{
    int64_t step = 1, first = 0, last = n_layers - 1;
    if (f->layers == MT_MOE_SPARSE_STEP)
        step = mt_keys_int(k, "decoder_sparse_step", 1, 1, MT_MAX_LAYERS);
    bool types = f->layers == MT_MOE_LAYER_TYPES;
    if (f->layers == MT_MOE_TYPES_OR_FIRST)
        types = mt_keys_find(k, "mlp_layer_types") != NULL;
    if (f->layers == MT_MOE_AFTER_FIRST || (f->layers == MT_MOE_TYPES_OR_FIRST && !types))
        first = mt_keys_int(k, f->dense_key ? f->dense_key : "first_k_dense_replace", f->first_dense, 0, MT_MAX_LAYERS);
    if (f->layers == MT_MOE_INTERVAL) {
        step = mt_keys_int(k, "moe_layer_interval", 1, 1, MT_MAX_LAYERS);
        first = mt_keys_int(k, "moe_layer_start_index", 1, 0, MT_MAX_LAYERS);
        last = mt_keys_int(k, "moe_layer_end_index", -1, -1, MT_MAX_LAYERS);
    }
    for (int64_t i = 0; i < n_layers; i++)
        sparse[i] = (i + 1) % step == 0 && i >= first && (last < 0 || i <= last);
    if (f->layers == MT_MOE_SPARSE_STEP)
        leave_dense(k, n_layers, sparse, "mlp_only_layers");
    if (types)
        take_types(k, n_layers, sparse, "mlp_layer_types");
}

void mt_moe_read(struct mt_keys *k, struct mt_hf_config *c, const struct mt_layer_spec *s, bool *sparse)
{
    const struct mt_moe_family *f = c->family->moe;
    if (!f || (f->key && !mt_keys_bool(k, f->key, false)) || is_dense(k, f, c->n_layers, sparse))
        return;
    c->moe = f->values;
    if (c->moe.ungated && s->activation != MT_ACTIVATION_RELU2)
        mt_keys_refuse(k, c->family->activation_key, "must be relu2 beside experts without gates");
    read_shape(k, c, f, s->ffn);
    read_shared(k, c, f, s->ffn);
    read_rule(k, c, f);
    if (f->layers != MT_MOE_BY_KIND)
        read_layers(k, c->n_layers, f, sparse);
    c->moe.scale *= c->moe.scale_is_residual ? s->residual : 1;
}
