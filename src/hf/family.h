/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "hf/layer.h"
#include "hf/moe.h"

/**
 * A family of models is a row of a table (families.h): how its config.json is read, which parts its decoder
 * layers consist of, and how its tensors are named on disk. The same code serves all rows; none of it
 * asks which family it is.
 */

/** When the block has a feature. */
enum mt_feature {
    MT_FEATURE_NEVER,
    MT_FEATURE_ALWAYS,
    MT_FEATURE_BY_KEY,     /* if its key in config.json is true: attention_bias (mt_family.bias_key), mlp_bias */
    MT_FEATURE_UNLESS_OFF, /* also if it is absent */
};

/** Which layers have a sliding window, unless layer_types in config.json names them one by one, which rules that treat
 * all layers alike do not allow. */
enum mt_window_rule {
    MT_WINDOW_NONE,         /* whatever config.json says */
    MT_WINDOW_EVERY_LAYER,  /* sliding_window; null is none, absent is the class default */
    MT_WINDOW_UPPER_LAYERS, /* with use_sliding_window, from layer max_window_layers on */
    MT_WINDOW_BY_FLAG,      /* with use_sliding_window, every layer */
    MT_WINDOW_FROM_LAYER,   /* from layer max_window_layers on */
    MT_WINDOW_ANY_LAYERS,   /* sliding_window; those that layer_types names, if absent all */
    MT_WINDOW_EVEN_LAYERS,  /* layers 0, 2, 4 ... */
    MT_WINDOW_ALL_BUT,      /* all layers but each sliding_window_pattern-th one (6th, 12th ...) */
    MT_WINDOW_ALL_AFTER,    /* the same, but of each group of so many layers the first has none */
    MT_WINDOW_ALL_BUT_FIRST,   /* as ALL_BUT, and the first layer has none either */
    MT_WINDOW_ALL_BUT_BACKWARD, /* as ALL_BUT, but counted backward from the last layer, which has none */
    MT_WINDOW_EVEN_LOWER_LAYERS, /* with use_sliding_window, layers 0, 2, 4 ... below max_window_layers */
};

/** Which layers rotate queries and keys; the others know no positions. */
enum mt_rope_rule {
    MT_ROPE_EVERY_LAYER,
    MT_ROPE_OF_WINDOWS,  /* those with a window; without a sliding_window all */
    MT_ROPE_OF_WINDOWS_ALONE, /* those with a window */
    MT_ROPE_BY_TYPE,     /* all if position_embedding_type is "rope"; null, absent or "nope": none */
    MT_ROPE_BY_THETAS,   /* layer_rope_theta: 0 for those that do not; if absent, each 4th, backward from the last */
    MT_ROPE_NEVER,       /* none */
    MT_ROPE_BY_LIST,     /* no_rope_layers: 0 for those that do not; if absent, each no_rope_layer_interval-th (4th) */
};

/**
 * A tensor with an unusual name or form on disk ("mlp.gate_proj.weight" -> "feed_forward.w1.weight"). In the names of
 * an expert's tensors, `*` stands for its number.
 */
struct mt_tensor_on_disk {
    const char *usual, *name; /* what follows "model.layers.N."; the whole name of what is in no layer */
    bool is_row;              /* a vector, stored as [1, n] */
    bool is_conv;             /* a matrix [n, taps], stored as [n, 1, taps] */
    bool is_scalar;           /* a vector of one element, stored without a dimension */
    bool is_f32;              /* stored as F32 even in a file of bf16 */
    const char *module;       /* its module in transformers, by whose name adapters go; NULL: as on disk */
};

/** One tensor on disk that holds a tensor of all experts: [experts, rows, columns], or [experts, rows] for vectors. */
struct mt_fused_tensor {
    const char *name;
    const char *usual[2];     /* an expert's tensors in it, with equally many rows; the second may be NULL */
    bool is_transposed;       /* [experts, columns, rows] */
    bool alternate;           /* rows of the two alternate; else the second's follow the first's */
    const char *parameter;    /* its name in transformers; NULL: as on disk */
};

static inline const char *mt_fused_parameter(const struct mt_fused_tensor *t)
{
    return t->parameter ? t->parameter : t->name;
}

/** What a number of config.json is, in families that have it; others refuse its key. A cap of 0 or null is none. */
enum mt_family_value {
    MT_VALUE_QUERY_SCALAR,  /* scores are q . k / sqrt(number), not sqrt(head_dim) */
    MT_VALUE_SCORE_SCALE,   /* scores are q . k * number */
    MT_VALUE_OUTPUT_FACTOR, /* outputs of heads are multiplied by it, as if values were; null: 1 */
    MT_VALUE_QUERY_FACTOR,  /* scores are q . k * number / sqrt(head_dim) */
    MT_VALUE_SCORE_CAP,     /* scores become n * tanh(score / n) */
    MT_VALUE_LOGIT_CAP,     /* the same of logits */
    MT_VALUE_LOGIT_SCALE,   /* logits are multiplied by it */
    MT_VALUE_LOGIT_DIVISOR, /* logits are divided by it */
    MT_VALUE_EMBED_SCALE,   /* embeddings are multiplied by it */
    MT_VALUE_RESIDUAL,      /* what attention and MLP add to the hidden state is multiplied by it */
};
struct mt_family_number {
    const char *key;
    enum mt_family_value value;
    double by_default; /* if the key is absent */
};

/** A number that must be 0: what it would add is not supported. */
struct mt_family_zero {
    const char *key;
    double by_default;  /* if the key is absent */
    const char *reason; /* what the error says */
};

/**
 * Layers without a window have heads of another width, by a key; and with another key true fewer keys, whose products
 * are also the values (mt_layer_spec.v_is_k). A list per_layer_config may say the same of each layer.
 */
struct mt_full_heads {
    const char *head_dim, *k_is_v, *n_kv_heads;
    int64_t default_head_dim;
};

/** Multi-head latent attention: class defaults of q_lora_rank, kv_lora_rank, qk_nope_head_dim, qk_rope_head_dim and
 * v_head_dim. */
struct mt_latent_family {
    int64_t q_latent, kv_latent, nope_dim, rope_dim, v_dim;
    bool part_of_head; /* partial_rotary_factor may be there: the rotated part of a whole head */
};

/** A number of at least 1 that a layer's specification has of config.json. */
struct mt_family_count {
    const char *key;     /* NULL: config.json does not say; it is by_default */
    size_t at;           /* offset of the int64_t in struct mt_layer_spec */
    int64_t by_default, most;
    int64_t multiple_of; /* 0: of any number */
    const char *divides; /* the key of a number that it divides; NULL: none */
};

/** A kind of layer, of a family that has several. */
struct mt_layer_kind {
    const char *name, *old_name; /* in layer_types or layers_block_type; the second may be NULL */
    char letter;                 /* in hybrid_override_pattern, which may be instead; 0: families without it */
    const char *parts[MT_LAYER_MAX_PARTS]; /* none: those of the family */
    bool is_mixture;             /* MT_MOE_BY_KIND */
};

/** Mamba 2: how config.json says what its part needs beside numbers. A NULL key is none. */
struct mt_plain_family {
    const char *expand_key;         /* with hidden_size the width of all heads: of values, if v_dim is absent or "auto" */
    const char *conv_bias_key;      /* true: the convolution has a bias */
    const char *flags[2];           /* keys that must not be true: biases of products */
    const char *limits_key;         /* [least, most] of a step; absent: 0, without end */
    const char *least_key;          /* the same of least alone, */
    double least;                   /* and its class default */
    const char *activation_key;     /* must be silu; NULL: hidden_act */
};

/** Other mixers than attention. The kinds of layers are named by a list or a pattern in config.json; without either all
 * are kind 0 but each n-th, which is kind 1. */
struct mt_mixer_family {
    const struct mt_layer_kind *kinds; /* [n_kinds]; the first is the mixer's */
    size_t n_kinds;
    const char *interval_key; /* n; NULL: all layers are kind 0 */
    int64_t interval;         /* its class default */
    const struct mt_family_count *counts; /* what its specification holds */
    size_t n_counts;
    const struct mt_plain_family *plain;  /* NULL: the gated delta rule */
};

struct mt_family {
    const char *architecture, *model_type; /* architectures[0]; model_type, used if architectures is absent */
    bool by_muon;                          /* its published models were trained with Muon */
    struct mt_layer_spec layer;            /* what no key says of its layers; score_scale 0: 1 / sqrt(head_dim) */
    int64_t n_kv_heads, head_dim;          /* class defaults; 0: num_attention_heads, hidden_size / heads */
    int64_t n_heads, vocab;                /* the same; 0: the keys must be there */
    int64_t window;                        /* class default of sliding_window */
    const char *window_before_key;         /* says how many tokens before it a query sees, if present; NULL: none */
    int64_t window_kv_times;               /* layers with a window have so many times as many keys; 0: as many */
    int64_t v_head_dim;                    /* class default of v_head_dim; 0: values are as wide as keys */
    enum mt_window_rule windows;
    int64_t full_every;                    /* rules by a pattern (ALL_BUT..., ALL_AFTER): its class default, where */
    const char *full_every_key;            /* layer_types is absent; the pattern's key, NULL: sliding_window_pattern */
    bool last_is_full;                     /* the last layer has no window, whatever the rule or layer_types say */
    struct mt_norm_spec norm;              /* eps: class default; 0: 1e-6 */
    const char *norm_eps_key;              /* NULL: rms_norm_eps */
    const char *after_eps_key;             /* eps of norms after a branch; NULL: the same */
    double after_eps;                      /* its class default */
    bool last_norm_plain;                  /* the last norm multiplies by w, once rounded, whatever `norm` says */
    const struct mt_layer_norms *norms;    /* NULL: input_layernorm, post_attention_layernorm, before a branch each */
    enum mt_rope_rule ropes;
    double rope_theta;                     /* class default; 0: 10000 */
    bool mrope;                            /* positions have three axes, which are equal for text */
    bool rope_by_window;                   /* layers with a window have rotary parameters of their own: */
    double window_theta;                   /* class default of their base; 0: as in other layers, without scaling */
    int64_t max_pos;                       /* class default; 0: 2048 */
    enum mt_feature qkv_bias, o_bias, mlp_bias;
    const char *bias_key;                  /* the key of qkv_bias and o_bias; NULL: attention_bias */
    const struct mt_latent_family *latent; /* NULL: ordinary heads */
    const struct mt_mixer_family *mixer;   /* NULL: all layers have attention */
    const char *o_bias_key, *mlp_bias_key; /* NULL: bias_key; mlp_bias */
    const struct mt_full_heads *full_heads; /* NULL: all layers have heads of one width */
    const char *qk_norm_key;               /* the norm is there only if this key is true; NULL: always */
    double partial_rotary;                 /* default of partial_rotary_factor; 0: the key must be 1 */
    bool rope_alpha;                       /* "dynamic" scaling with an alpha changes the base at every length */
    bool q_growth;                         /* queries grow with their positions, by llama_4_scaling_beta */
    bool needs_rope_scaling;               /* rope_scaling must be present: we do not have the class's default */
    bool tied;                             /* default of tie_word_embeddings */
    bool ignores_dropout;                  /* releases say attention_dropout, which is for training by their makers */
    bool sinks_of_windows;                 /* in layers with a window alone */
    bool embed_by_width;                   /* embeddings are multiplied by sqrt(hidden_size) */
    const char *embed_by_width_key;        /* only if this key is true; NULL: always */
    const struct mt_family_number *numbers; /* NULL: none; a row without a key ends the list */
    const char *activation_key;            /* NULL: hidden_act */
    const char *activation;                /* class default; NULL: silu */
    const char *ffn_key;                   /* the key of the MLP's width; NULL: intermediate_size */
    const char *refused_flags[2];          /* keys that must not be true, though they may be "vision" */
    const struct mt_family_zero *zeros;    /* NULL: none; a row without a key ends the list */
    bool code_is_known;                    /* auto_map is ignored: older than the class in transformers */
    const char *parts[MT_LAYER_MAX_PARTS];  /* of a dense layer, in order of the forward pass: names from
                                               src/model/parts.h; none: attention, mlp */
    const char *first_parts[MT_LAYER_MAX_PARTS]; /* of the first layer, if others */
    const struct mt_moe_family *moe;       /* NULL: a dense family */
    const struct mt_tensor_on_disk *on_disk; /* NULL: no exceptions; a row of NULLs ends the list */
    const struct mt_fused_tensor *fused;    /* NULL: none; a row of NULLs ends the list */
    const struct mt_fused_tensor *joined;   /* what transformers alone fuses, if it is not the usual; the same */
    bool rope_pairs;                        /* the rotary embedding rotates rows 0 and 1, 2 and 3 ... of a head on disk;
                                               in memory rows i and i + half, as in other families */
    bool experts_as_stored;                 /* releases have experts fused or one by one: read as they are */
    int names;                              /* as files have its tensors: index of mt_text_names; not of nested ones */
    const char *uncomputed;                 /* tensors whose names begin so are copied, not trained; NULL: none */
    const char *uncomputed_within;          /* and those with this in their names; NULL: none */
    const char *longest_key;                /* mt_hf_config.longest; NULL: 0 */
    int64_t longest;                        /* its class default */
    bool experts_unread;                    /* PEFT 0.21 does not read adapters of this family's experts, one by one */
    const char *peft_refuses;               /* usual name of a matrix whose adapters PEFT 0.21 refuses; or NULL */
};

/**
 * A model of several kinds of input, whose config.json nests that of its decoder (text_config). Only the decoder is
 * computed; all other tensors are copied.
 */
struct mt_nested_family {
    const char *architecture, *model_type;
    const char *text[3][2]; /* model_type of text_config, and the family of that decoder; NULL ends them */
    bool tied;              /* class default of tie_word_embeddings, which counts at the top alone */
    int names;              /* as files have the decoder's tensors: index of mt_text_names */
    bool caps_logits;       /* its class applies the decoder's final_logit_softcapping; else that must be absent */
    const char *others[5];  /* modules in transformers beside the decoder, which are never packed; NULL ends them */
    const char *released;   /* the architecture in releases that came with code of their own; NULL: the same */
};

/** How a decoder's tensors, "model." and "lm_head.", begin in files and in transformers' modules. */
struct mt_text_names {
    const char *in_files, *head_in_files, *modules;
};
enum { MT_TEXT_FLAT, MT_TEXT_WITHIN, MT_TEXT_BEFORE, MT_TEXT_BACKBONE, MT_N_TEXT_NAMES };
extern const struct mt_text_names mt_text_names[MT_N_TEXT_NAMES];

/** NULL: not one of these. */
const struct mt_nested_family *mt_family_find_nested(const char *architecture, const char *model_type);

/** The family of an architecture, or of a model_type if `architecture` is NULL; NULL: not supported. */
const struct mt_family *mt_family_find(const char *architecture, const char *model_type);
/** The families one after the other; NULL: there are no more. */
const struct mt_family *mt_family_at(size_t i);
/** The exception for a layer's tensor, by its usual name; NULL: it has its usual name and form on disk. */
const struct mt_tensor_on_disk *mt_family_on_disk(const struct mt_family *f, const char *usual);
/** The module of a tensor of the family's files, "model.layers.0.mlp.gate.weight": its name in transformers, the last
 * part left out. */
void mt_family_module(char *module, size_t len, const struct mt_family *f, const char *tensor);
/** The name of a tensor of the family's files in transformers: that of its module, and its own last part. */
void mt_family_tensor(char *name, size_t len, const struct mt_family *f, const char *tensor);
/** The fused tensor that holds it, as usual[*part]; NULL: none. */
const struct mt_fused_tensor *mt_family_fused(const struct mt_family *f, const char *usual, int *part);
/** The parameter of all experts that transformers 5 makes of it, whether or not the files hold one: "mlp.experts." and
 * gate_up_proj or down_proj, a bias of these, or as mt_family.joined has it; it is usual[*part] of it. NULL: it is no
 * tensor of an expert. */
const struct mt_fused_tensor *mt_family_joined(const struct mt_family *f, const char *usual, int *part);
