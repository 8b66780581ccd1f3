/* SPDX-License-Identifier: Apache-2.0 */
#include "hf/hf_config.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/fs.h"
#include "base/json.h"
#include "base/log.h"
#include "base/mem.h"
#include "hf/keys.h"
#include "hf/layers.h"
#include "hf/mixer.h"
#include "hf/quantization.h"
#include "hf/refused.h"
#include "hf/rope.h"
#include "hf/safetensors.h"

/* Goes on to text_config of a model of several kinds of input, whose decoder's family it returns; NULL: none. */
static const struct mt_family *read_nested(struct mt_keys *r, struct mt_hf_config *c, const char *arch,
                                           const char *type)
{
    const struct mt_nested_family *n = mt_family_find_nested(arch, type);
    const cJSON *text = mt_keys_find(r, "text_config"), *own = cJSON_IsObject(text) ? mt_json_get(text, "model_type") : NULL;
    const char *name = cJSON_IsString(own) ? own->valuestring : n ? n->text[0][0] : NULL;
    if (!n || !cJSON_IsObject(text))
        return NULL;
    for (size_t i = 0; i < MT_ARRAY_LEN(n->text) && n->text[i][0] && !c->family; i++)
        if (!strcmp(name, n->text[i][0]))
            c->family = mt_family_find(NULL, n->text[i][1]);
    if (!c->family) {
        mt_keys_refuse(r, "text_config", "describes a decoder that is not supported in this architecture");
        return NULL;
    }
    c->nested = n;
    c->names = &mt_text_names[n->names];
    r->root = text;
    return c->family;
}

static const struct mt_family *read_family(struct mt_keys *r, struct mt_hf_config *c)
{
    const cJSON *list = mt_keys_find(r, "architectures"), *type = mt_keys_find(r, "model_type");
    const char *arch = cJSON_IsArray(list) && cJSON_IsString(list->child) ? list->child->valuestring
                                                                           : NULL;
    const char *model_type = cJSON_IsString(type) ? type->valuestring : NULL;
    c->names = &mt_text_names[MT_TEXT_FLAT];
    c->family = mt_family_find(arch, model_type);
    if (c->family)
        c->names = &mt_text_names[c->family->names];
    else
        c->family = read_nested(r, c, arch, model_type);
    const char *why = mt_refused_reason(arch, model_type);
    if (!c->family && !r->rc && why)
        r->rc = mt_fail(r->err, MT_ERR_INPUT, -EINVAL, "%s: architecture \"%.60s\" is not supported: it %s", r->name,
                        arch ? arch : model_type, why);
    if (!c->family && !r->rc)
        r->rc = mt_fail(r->err, MT_ERR_INPUT, -EINVAL,
                        "%s: architecture \"%.60s\" (model_type \"%.40s\") is not supported: megatrain help models lists "
                        "those that are", r->name, arch ? arch : "none", model_type ? model_type : "none");
    return c->family;
}

static bool has_number(const struct mt_family *f, const char *key)
{
    for (const struct mt_family_number *n = f->numbers; n && n->key; n++)
        if (!strcmp(n->key, key))
            return true;
    return false;
}

static bool must_be_zero(const struct mt_family *f, const char *key)
{
    for (const struct mt_family_zero *z = f->zeros; z && z->key; z++)
        if (!strcmp(z->key, key))
            return true;
    return false;
}

/* A key that changes the computation and is not supported must be refused, never ignored. */
static void refuse_unsupported(struct mt_keys *r, const struct mt_family *f)
{
    static const char *const absent[] = {
        "vision_config", "text_config", "audio_config", "clip_qkv", "final_logit_softcapping", "attn_logit_softcapping",
        "query_pre_attn_scalar", "residual_multiplier", "embedding_multiplier", "logits_scaling", "logit_scale",
        "attention_multiplier",
    };
    static const char *const of_mixtures[] = {"num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts",
                                              "num_nextn_predict_layers"};
    if (mt_keys_find(r, "auto_map") && !f->code_is_known)
        mt_keys_refuse(r, "auto_map", "names code in the model's folder, which is never run");
    for (size_t i = 0; i < MT_ARRAY_LEN(absent); i++)
        if (mt_keys_find(r, absent[i]) && !has_number(f, absent[i]))
            mt_keys_refuse(r, absent[i], "is not supported");
    for (size_t i = 0; i < MT_ARRAY_LEN(of_mixtures) && !f->moe; i++)
        if (mt_keys_find(r, of_mixtures[i]) && !must_be_zero(f, of_mixtures[i]))
            mt_keys_refuse(r, of_mixtures[i], "is not supported in this architecture");
    for (size_t i = 0; i < MT_ARRAY_LEN(f->refused_flags) && f->refused_flags[i]; i++) {
        const cJSON *flag = mt_keys_find(r, f->refused_flags[i]);
        if (flag && !(cJSON_IsString(flag) && !strcmp(flag->valuestring, "vision")) && !cJSON_IsFalse(flag))
            mt_keys_refuse(r, f->refused_flags[i], "must not be true: that is not supported in this architecture");
    }
    for (const struct mt_family_zero *z = f->zeros; z && z->key; z++)
        if (mt_keys_number(r, z->key, z->by_default) != 0)
            mt_keys_refuse(r, z->key, z->reason);
    if (f->needs_rope_scaling && !mt_keys_find(r, "rope_scaling") && !mt_keys_find(r, "rope_parameters"))
        mt_keys_refuse(r, "rope_scaling", "is missing");
    if (mt_keys_number(r, "attention_dropout", 0) != 0 && f->ignores_dropout)
        mt_warn("%s: \"attention_dropout\" and \"residual_dropout\" count as 0", r->name);
    else if (mt_keys_number(r, "attention_dropout", 0) != 0)
        mt_keys_refuse(r, "attention_dropout", "other than 0 is not supported");
    if (mt_keys_number(r, "resid_pdrop", 0) != 0 || mt_keys_number(r, "embd_pdrop", 0) != 0)
        mt_keys_refuse(r, "resid_pdrop", "or embd_pdrop other than 0 is not supported");
    if (mt_keys_bool(r, "is_encoder_decoder", false))
        mt_keys_refuse(r, "is_encoder_decoder", "is not supported");
}

static void read_activation(struct mt_keys *r, const struct mt_family *f, struct mt_layer_spec *s)
{
    static const struct {
        const char *name;
        enum mt_activation activation;
        bool of_gates, ungated;
    } known[] = {{"silu", MT_ACTIVATION_SILU, true, false},
                 {"gelu_pytorch_tanh", MT_ACTIVATION_GELU_TANH, true, true},
                 {"relu2", MT_ACTIVATION_RELU2, false, true},
                 {"xielu", MT_ACTIVATION_XIELU, false, true}};
    const char *key = f->activation_key ? f->activation_key : "hidden_act", *usual = f->activation ? f->activation : "silu";
    const cJSON *v = mt_keys_find(r, key);
    const char *name = cJSON_IsString(v) ? v->valuestring : v ? "?" : usual;
    for (size_t i = 0; i < MT_ARRAY_LEN(known); i++)
        if (!strcmp(name, known[i].name) && (s->ungated ? known[i].ungated : known[i].of_gates)) {
            s->activation = known[i].activation;
            return;
        }
    mt_keys_refuse(r, key, s->ungated ? "must be relu2, gelu_pytorch_tanh or xielu in this architecture, whose MLP has no "
                                        "gate"
                                      : "must be silu or gelu_pytorch_tanh");
}

/* A number that some families have; others refuse its key. */
static void read_number(struct mt_keys *r, struct mt_hf_config *c, struct mt_layer_spec *s,
                        const struct mt_family_number *n)
{
    double none = n->value == MT_VALUE_OUTPUT_FACTOR ? 1 : 0;
    double v = mt_keys_is_null(r, n->key) ? none : mt_keys_number(r, n->key, n->by_default);
    bool cap = n->value == MT_VALUE_SCORE_CAP || n->value == MT_VALUE_LOGIT_CAP;
    if (!cap && !(v > 0))
        mt_keys_refuse(r, n->key, "must be positive");
    else if (n->value == MT_VALUE_QUERY_SCALAR)
        s->score_scale = 1 / sqrt(v);
    else if (n->value == MT_VALUE_QUERY_FACTOR)
        s->score_scale *= v;
    else if (n->value == MT_VALUE_LOGIT_DIVISOR)
        c->logit_scale = 1 / v;
    else
        *(n->value == MT_VALUE_SCORE_SCALE     ? &s->score_scale
          : n->value == MT_VALUE_OUTPUT_FACTOR ? &s->o_scale
          : n->value == MT_VALUE_SCORE_CAP     ? &s->score_cap
          : n->value == MT_VALUE_LOGIT_CAP     ? &c->logit_cap
          : n->value == MT_VALUE_LOGIT_SCALE   ? &c->logit_scale
          : n->value == MT_VALUE_EMBED_SCALE   ? &c->embed_scale
                                               : &s->residual) = v;
}

static void read_numbers(struct mt_keys *r, struct mt_hf_config *c, struct mt_layer_spec *s)
{
    const struct mt_family *f = c->family;
    s->score_scale = s->score_scale > 0 ? s->score_scale : 1.0 / sqrt((double)s->head_dim);
    s->residual = s->o_scale = c->logit_scale = 1;
    bool by_width = f->embed_by_width && (!f->embed_by_width_key || mt_keys_bool(r, f->embed_by_width_key, false));
    c->embed_scale = by_width ? sqrt((double)c->hidden) : 1;
    for (const struct mt_family_number *n = f->numbers; n && n->key; n++)
        read_number(r, c, s, n);
}

/* -1 if the value is not a token id. */
static int64_t token_id(const cJSON *v)
{
    return cJSON_IsNumber(v) && v->valuedouble >= 0 && v->valuedouble < 0x1p31
               ? (int64_t)v->valuedouble
               : -1;
}

static void add_eos(struct mt_hf_config *c, const cJSON *v)
{
    if (cJSON_IsArray(v)) {
        for (v = v->child; v; v = v->next)
            add_eos(c, v);
        return;
    }
    int64_t id = token_id(v);
    if (id < 0 || c->n_eos == MT_MAX_EOS)
        return;
    for (int i = 0; i < c->n_eos; i++)
        if (c->eos[i] == id)
            return;
    c->eos[c->n_eos++] = id;
}

static void read_tokens(struct mt_keys *r, struct mt_hf_config *c)
{
    c->bos = token_id(mt_keys_find(r, "bos_token_id"));
    c->pad = token_id(mt_keys_find(r, "pad_token_id"));
    add_eos(c, mt_keys_find(r, "eos_token_id"));
}

/* num_key_value_heads and head_dim say nothing here, and files differ in them. */
static void read_latent_heads(struct mt_keys *r, const struct mt_latent_family *f, struct mt_layer_spec *s)
{
    const int64_t most = 1 << 16;
    s->n_heads = s->n_kv_heads = mt_keys_need_int(r, "num_attention_heads", 1 << 14);
    s->q_latent = mt_keys_is_null(r, "q_lora_rank") ? 0 : mt_keys_int(r, "q_lora_rank", f->q_latent, 1, most);
    s->kv_latent = mt_keys_int(r, "kv_lora_rank", f->kv_latent, 1, most);
    s->nope_dim = mt_keys_int(r, "qk_nope_head_dim", f->nope_dim, 1, MT_ROPE_MAX_FACTORS);
    s->rope_dim = mt_keys_int(r, "qk_rope_head_dim", f->rope_dim, 1, MT_ROPE_MAX_FACTORS);
    s->v_dim = mt_keys_int(r, "v_head_dim", f->v_dim, 1, 2 * MT_ROPE_MAX_FACTORS);
    s->head_dim = s->nope_dim + s->rope_dim;
    if (s->q_latent % 8 || s->kv_latent % 8)
        mt_keys_refuse(r, s->q_latent % 8 ? "q_lora_rank" : "kv_lora_rank", "must be a multiple of 8");
    if (s->nope_dim % 8 || s->rope_dim % 8 || s->v_dim % 8)
        mt_keys_refuse(r, "qk_nope_head_dim", "must, as qk_rope_head_dim and v_head_dim, be a multiple of 8");
    if (!mt_keys_bool(r, "rope_interleave", true))
        mt_keys_refuse(r, "rope_interleave", "other than true is not supported");
    if (!s->q_latent && mt_keys_bool(r, "attention_bias", false))
        mt_keys_refuse(r, "attention_bias", "without a q_lora_rank is not supported");
}

static int64_t need_int(struct mt_keys *r, const char *key, int64_t def, int64_t max)
{
    return def ? mt_keys_int(r, key, def, 1, max) : mt_keys_need_int(r, key, max);
}

static void read_heads(struct mt_keys *r, const struct mt_family *f, int64_t hidden, struct mt_layer_spec *s)
{
    if (f->latent) {
        read_latent_heads(r, f->latent, s);
        if (hidden % 8)
            mt_keys_refuse(r, "hidden_size", "must be a multiple of 8");
        return;
    }
    s->n_heads = need_int(r, "num_attention_heads", f->n_heads, 1 << 14);
    bool as_heads = !f->n_kv_heads || mt_keys_is_null(r, "num_key_value_heads"), even = !f->head_dim || mt_keys_is_null(r, "head_dim");
    s->n_kv_heads = mt_keys_int(r, "num_key_value_heads", as_heads ? s->n_heads : f->n_kv_heads, 1, 1 << 14);
    s->head_dim = mt_keys_int(r, "head_dim", even ? hidden / s->n_heads : f->head_dim, 1, 2 * MT_ROPE_MAX_FACTORS);
    if (s->n_heads % s->n_kv_heads)
        mt_keys_refuse(r, "num_key_value_heads", "does not divide num_attention_heads");
    if (s->head_dim % 8 || hidden % 8)
        mt_keys_refuse(r, s->head_dim % 8 ? "head_dim" : "hidden_size", "must be a multiple of 8");
    s->v_dim = f->v_head_dim ? mt_keys_int(r, "v_head_dim", f->v_head_dim, 1, 2 * MT_ROPE_MAX_FACTORS) : s->head_dim;
    if (s->v_dim % 8)
        mt_keys_refuse(r, f->v_head_dim ? "v_head_dim" : "head_dim", "must be a multiple of 8");
    if (s->head_dim < 1 || s->head_dim > 2 * MT_ROPE_MAX_FACTORS)
        mt_keys_refuse(r, "hidden_size", s->head_dim < 1 ? "is smaller than num_attention_heads"
                                                 : "divided by num_attention_heads gives a head_dim of more than 1024");
}

/* Heads of layers without a window: those of the first that per_layer_config describes, or of the keys. */
static void read_full_heads(struct mt_keys *r, const struct mt_full_heads *f, struct mt_layer_spec *s)
{
    const cJSON *list = mt_keys_find(r, "per_layer_config"), *own = cJSON_IsObject(list) ? list->child : NULL;
    struct mt_keys of_layer = {own, r->name, r->err, r->rc};
    const char *n_kv = own ? "num_key_value_heads" : f->n_kv_heads;
    struct mt_keys *k = own ? &of_layer : r;
    for (const cJSON *v = own ? own->next : NULL; v; v = v->next)
        if (!cJSON_Compare(v, own, true))
            mt_keys_refuse(r, "per_layer_config", "must describe all its layers alike");
    s->v_is_k = mt_keys_bool(r, f->k_is_v, false);
    s->head_dim = mt_keys_int(k, own ? "head_dim" : f->head_dim, own ? s->head_dim : f->default_head_dim, 1,
                              2 * MT_ROPE_MAX_FACTORS);
    s->v_dim = s->head_dim;
    if (s->v_is_k || own)
        s->n_kv_heads = mt_keys_int(k, n_kv, s->n_kv_heads, 1, 1 << 14);
    r->rc = r->rc ? r->rc : of_layer.rc;
    if (s->n_heads % s->n_kv_heads)
        mt_keys_refuse(r, f->n_kv_heads, "does not divide num_attention_heads");
    if (s->head_dim % 8)
        mt_keys_refuse(r, f->head_dim, "must be a multiple of 8");
}

static void read_shape(struct mt_keys *r, struct mt_hf_config *c, struct mt_layer_spec *s)
{
    const struct mt_family *f = c->family;
    c->hidden = mt_keys_need_int(r, "hidden_size", 1 << 20);
    bool all_experts = f->moe && f->moe->layers == MT_MOE_EVERY_LAYER && !f->moe->width_is_ffn && !f->ffn_key;
    s->ffn = all_experts ? mt_keys_int(r, "intermediate_size", 0, 0, 1 << 24)
                         : mt_keys_need_int(r, f->ffn_key ? f->ffn_key : "intermediate_size", 1 << 24);
    c->n_layers = mt_mixer_count(r, f);
    if (!c->n_layers)
        c->n_layers = mt_keys_need_int(r, "num_hidden_layers", MT_MAX_LAYERS);
    c->vocab = need_int(r, "vocab_size", f->vocab, INT64_C(1) << 30);
    c->max_pos = mt_keys_int(r, "max_position_embeddings", f->max_pos ? f->max_pos : 2048, 1, INT64_C(1) << 40);
    c->initializer_range = mt_keys_number(r, "initializer_range", 0.02);
    c->longest = f->longest_key ? mt_keys_int(r, f->longest_key, f->longest, 1, INT64_C(1) << 40) : 0;
    read_heads(r, f, c->hidden, s);
    mt_mixer_read(r, c, s);
}

static bool has_feature(struct mt_keys *r, enum mt_feature f, const char *key)
{
    return f == MT_FEATURE_ALWAYS || (f >= MT_FEATURE_BY_KEY && mt_keys_bool(r, key, f == MT_FEATURE_UNLESS_OFF));
}

/* What counts at the top of a nested config.json. */
static void read_top(struct mt_keys *r, struct mt_hf_config *c, const cJSON *top)
{
    static const char *const inputs[] = {"image_token_id", "image_token_index", "video_token_id", "audio_token_id",
                                         "vision_start_token_id", "boi_token_index", "boi_token_id", "boa_token_id",
                                         "media_placeholder_token_id"};
    _Static_assert(MT_ARRAY_LEN(inputs) <= MT_MAX_INPUT_TOKENS, "a place for each");
    struct mt_keys at_top = {top, r->name, r->err, r->rc};
    if (!c->nested)
        return;
    c->tied = mt_keys_bool(&at_top, "tie_word_embeddings", c->nested->tied);
    add_eos(c, mt_keys_find(&at_top, "eos_token_id"));
    if (c->logit_cap > 0 && !c->nested->caps_logits)
        mt_keys_refuse(&at_top, "final_logit_softcapping", "is not supported in this architecture, which does not apply it");
    mt_quantization_read(&at_top, c);
    for (size_t i = 0; i < MT_ARRAY_LEN(inputs); i++)
        if (token_id(mt_keys_find(&at_top, inputs[i])) >= 0)
            c->input_token[c->n_input_tokens++] = token_id(mt_keys_find(&at_top, inputs[i]));
    const cJSON *dtype = mt_keys_find(&at_top, "torch_dtype") ? mt_keys_find(&at_top, "torch_dtype")
                                                              : mt_keys_find(&at_top, "dtype");
    if (!c->torch_dtype[0] && cJSON_IsString(dtype))
        snprintf(c->torch_dtype, sizeof(c->torch_dtype), "%s", dtype->valuestring);
    r->rc = at_top.rc;
}

static void read_norm(struct mt_keys *r, struct mt_hf_config *c, struct mt_layer_spec *s)
{
    static const struct mt_layer_norms usual = {{"input_layernorm.weight", NULL}, {"post_attention_layernorm.weight", NULL}};
    const struct mt_family *f = c->family;
    s->norm = f->norm;
    s->norm.eps = mt_keys_number(r, f->norm_eps_key ? f->norm_eps_key : "rms_norm_eps", f->norm.eps > 0 ? f->norm.eps : 1e-6);
    s->after_eps = f->after_eps_key ? mt_keys_number(r, f->after_eps_key, f->after_eps) : s->norm.eps;
    s->norms = f->norms ? *f->norms : usual;
    c->norm = s->norm;
    if (f->last_norm_plain)
        c->norm = (struct mt_norm_spec){.eps = s->norm.eps, .round_once = true};
    c->router_norm.eps = s->norm.eps; /* rounds before it multiplies by its weight */
}

static void read_flags(struct mt_keys *r, struct mt_hf_config *c, struct mt_layer_spec *s)
{
    const struct mt_family *f = c->family;
    const char *bias = f->bias_key ? f->bias_key : "attention_bias";
    const cJSON *dtype = mt_keys_find(r, "torch_dtype");
    if (!dtype)
        dtype = mt_keys_find(r, "dtype");
    c->tied = mt_keys_bool(r, "tie_word_embeddings", f->tied);
    s->qkv_bias = has_feature(r, f->qkv_bias, bias);
    s->o_bias = has_feature(r, f->o_bias, f->o_bias_key ? f->o_bias_key : bias);
    s->mlp_bias = has_feature(r, f->mlp_bias, f->mlp_bias_key ? f->mlp_bias_key : "mlp_bias");
    if (f->qk_norm_key && !mt_keys_bool(r, f->qk_norm_key, false))
        s->qk_norm = MT_QK_NORM_NONE;
    if (mt_keys_bool(r, "attn_output_gate", s->gate) != s->gate && !s->gate_name) /* if present, it must say so */
        mt_keys_refuse(r, "attn_output_gate", s->gate ? "must be true in this architecture" : "is not supported");
    if (cJSON_IsString(dtype))
        snprintf(c->torch_dtype, sizeof(c->torch_dtype), "%s", dtype->valuestring);
}

/* What layers with a window, of[1], have otherwise. */
static void read_window_heads(struct mt_keys *r, const struct mt_family *f, struct mt_layer_spec of[2])
{
    of[0].sinks &= !f->sinks_of_windows;
    of[1].n_kv_heads *= f->window_kv_times ? f->window_kv_times : 1;
    if (of[1].n_heads % of[1].n_kv_heads)
        mt_keys_refuse(r, "num_key_value_heads", "does not divide num_attention_heads in layers with a window");
}

/* All that layers have in common, and then each layer. */
static void read_decoder(struct mt_keys *r, struct mt_hf_config *c)
{
    struct mt_layer_spec s, of[2];
    memcpy(&s, &c->family->layer, sizeof(s)); /* specifications are compared with their padding, which is 0 here */
    read_shape(r, c, &s);
    refuse_unsupported(r, c->family);
    mt_quantization_read(r, c);
    if (r->rc)
        return;
    read_norm(r, c, &s);
    read_activation(r, c->family, &s);
    read_flags(r, c, &s);
    read_numbers(r, c, &s);
    memcpy(&of[1], &s, sizeof(s));
    if (c->family->full_heads)
        read_full_heads(r, c->family->full_heads, &s);
    mt_rope_read(r, c, (const int64_t[]){c->family->latent ? s.rope_dim : s.head_dim, of[1].head_dim});
    if (c->family->latent)
        s.score_scale *= mt_rope_score_factor(&c->rope[0]);
    memcpy(&of[0], &s, sizeof(s));
    if (!c->family->full_heads)
        memcpy(&of[1], &s, sizeof(s));
    read_window_heads(r, c->family, of);
    mt_layers_read(r, c, of);
    read_tokens(r, c);
}

/* Python writes an infinity as a word, which JSON does not have: it becomes a number as long that reads as one. */
static void spell_infinities(char *text, size_t len)
{
    static const char word[] = "Infinity", number[] = "1e999999";
    bool quoted = false;
    for (size_t i = 0; i < len; i++) {
        if (quoted && text[i] == '\\') {
            i++;
            continue;
        }
        quoted ^= text[i] == '"';
        if (!quoted && len - i >= sizeof(word) - 1 && !memcmp(text + i, word, sizeof(word) - 1))
            memcpy(text + i, number, sizeof(number) - 1);
    }
}

/* A key that an object has with two values, of which transformers takes the last and cJSON the first; NULL: none. */
static const char *key_twice(const cJSON *o)
{
    const char *found = NULL;
    for (const cJSON *c = o->child; c && !found; c = c->next)
        found = c->string && !cJSON_Compare(mt_json_get(o, c->string), c, true) ? c->string : key_twice(c);
    return found;
}

int mt_hf_config_parse(struct mt_hf_config *out, const char *text, size_t len, const char *name,
                       struct mt_err *err)
{
    MT_JSON_FREED cJSON *root = NULL;
    MT_FREED struct mt_hf_config *c = mt_calloc(1, sizeof(*c));
    MT_FREED char *spelt = mt_calloc(len + 1, 1);
    if (!c || !spelt)
        return mt_fail_nomem(err, name, sizeof(*c) + len);
    memcpy(spelt, text, len);
    spell_infinities(spelt, len);
    int rc = mt_json_parse(&root, spelt, len, name, MT_ERR_INPUT, err);
    if (!rc && !cJSON_IsObject(root))
        rc = mt_fail(err, MT_ERR_INPUT, -EINVAL, "%s: not a JSON object", name);
    const char *twice = rc ? NULL : key_twice(root);
    if (twice)
        rc = mt_fail(err, MT_ERR_INPUT, -EINVAL, "%s: \"%s\" is there twice, with different values: remove one", name, twice);
    if (!rc) {
        struct mt_keys r = {root, name, err, 0};
        if (read_family(&r, c))
            read_decoder(&r, c);
        if (!r.rc)
            read_top(&r, c, root);
        rc = r.rc;
    }
    if (!rc)
        *out = *c;
    return rc;
}

static void read_generation_eos(struct mt_hf_config *c, const char *dir)
{
    const char *path = MT_PATH("%s/generation_config.json", dir);
    MT_JSON_FREED cJSON *root = NULL;
    if (mt_path_exists(path) && !mt_json_read_file(&root, path, MT_ERR_INPUT, NULL))
        add_eos(c, mt_json_get(root, "eos_token_id"));
}

#define EMBEDDING "embed_tokens.weight"

static const struct mt_st_tensor *find_named(const struct mt_st_model *st, const char *prefix, const char *rest)
{
    char name[128];
    snprintf(name, sizeof(name), "%s%s", prefix, rest);
    return mt_st_find(st, name);
}

/* Files of one class have had several names for the tensors of its decoder: those of this folder, if it has any. */
static void find_names(struct mt_hf_config *c, const struct mt_st_model *st)
{
    for (int i = 0; i < MT_N_TEXT_NAMES; i++)
        if (find_named(st, mt_text_names[i].in_files, EMBEDDING))
            c->names = &mt_text_names[i];
}

static bool are_equal(const struct mt_st_model *st, const struct mt_st_tensor *a, const struct mt_st_tensor *b)
{
    enum { PIECE = 8192 };
    float x[PIECE], y[PIECE];
    bool equal = a->n_elems == b->n_elems;
    for (size_t at = 0; equal && at < a->n_elems; at += PIECE) {
        size_t n = MT_MIN((size_t)PIECE, a->n_elems - at);
        equal = !mt_st_read_f32(st, a, at, n, x, NULL) && !mt_st_read_f32(st, b, at, n, y, NULL) &&
                !memcmp(x, y, n * sizeof(*x));
    }
    return equal;
}

/* A head that is not the embedding counts, as in transformers 5: a class's default of tie_word_embeddings need not be what
 * the files are (Mistral Small 3.2). */
static void find_head(struct mt_hf_config *c, const struct mt_st_model *st, const char *dir)
{
    for (int i = 0; i < MT_N_TEXT_NAMES && c->tied; i++) {
        const struct mt_st_tensor *table = find_named(st, mt_text_names[i].in_files, EMBEDDING),
                                  *head = find_named(st, mt_text_names[i].head_in_files, "weight");
        c->tied = !table || !head || are_equal(st, table, head);
        if (!c->tied)
            mt_warn("%s: %s differs from the embedding, so that it is used, though \"tie_word_embeddings\" of config.json is true "
                    "or absent: set it to false, for programs that go by it", dir, head->name);
    }
}

static void find_experts(struct mt_hf_config *c, const struct mt_st_model *st)
{
    char rest[64];
    for (int64_t i = 0; i < c->n_layers && !c->experts_fused; i++) {
        snprintf(rest, sizeof(rest), "layers.%d.mlp.experts.gate_up_proj", (int)i);
        c->experts_fused = find_named(st, c->names->in_files, rest) != NULL;
    }
}

/* What config.json does not say of the files, if there are any yet. */
static void look_in_files(struct mt_hf_config *c, const char *dir)
{
    MT_CLOSED_BY(mt_st_close) struct mt_st_model st = {0};
    bool needs = c->nested || c->tied || c->family->experts_as_stored;
    if (!needs || mt_st_open_dir(&st, dir, NULL))
        return;
    if (c->nested)
        find_names(c, &st);
    if (c->tied)
        find_head(c, &st, dir);
    if (c->family->experts_as_stored)
        find_experts(c, &st);
}

static bool has_gguf(const char *dir)
{
    bool has = false;
    MT_DIR_CLOSED DIR *d = opendir(dir);
    for (const struct dirent *e; d && !has && (e = readdir(d));)
        has = mt_path_has_extension(e->d_name, ".gguf");
    return has;
}

/* A folder without config.json may be one that is easily taken for a model's. */
static void say_what_it_is(const char *dir, struct mt_err *err)
{
    const char *latest = MT_PATH("%s/latest", dir);
    if (mt_path_exists(MT_PATH("%s/adapter_config.json", dir)))
        mt_fail(err, MT_ERR_INPUT, -ENOENT, "%s is a folder of adapters, not of a model: name it as adapter.path, or --adapter", dir);
    else if (mt_path_exists(latest))
        mt_fail(err, MT_ERR_INPUT, -ENOENT, "%s is the folder of a run: name one of its checkpoints, such as %s", dir, latest);
    else if (has_gguf(dir))
        mt_fail(err, MT_ERR_INPUT, -ENOENT, "%s has GGUF files: get the model that they were made from, with config.json and safetensors", dir);
}

int mt_hf_config_read(struct mt_hf_config *out, const char *dir, struct mt_err *err)
{
    const char *path = MT_PATH("%s/config.json", dir);
    MT_FREED char *text = NULL;
    size_t len = 0;
    int rc = mt_read_file(path, &text, &len, err);
    if (rc && rc != -ENOMEM && err)
        err->kind = MT_ERR_INPUT;
    if (rc == -ENOENT)
        say_what_it_is(dir, err);
    rc = rc ?: mt_hf_config_parse(out, text, len, path, err);
    if (!rc)
        read_generation_eos(out, dir);
    if (!rc)
        look_in_files(out, dir);
    return rc;
}
