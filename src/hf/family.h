/* SPDX-License-Identifier: Apache-2.0 */
#ifndef MT_HF_FAMILY_H
#define MT_HF_FAMILY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "hf/moe.h"

/**
 * A family of models is a row of a table (family.c): how its config.json is read, which parts its decoder
 * layers are made of, and how its tensors are named on disk. All rows are read by the same code; none of it
 * asks which family it is.
 */

/** When a feature of the block is there. */
enum mt_feature {
    MT_FEATURE_NEVER,
    MT_FEATURE_ALWAYS,
    MT_FEATURE_BY_KEY, /* where the key of config.json says so: attention_bias (mt_family.bias_key), mlp_bias */
};

/** RMSNorm of queries and keys. */
enum mt_qk_norm_kind {
    MT_QK_NORM_NONE,
    MT_QK_NORM_HEADS,      /* of each head, before the rotary embedding */
    MT_QK_NORM_PROJECTION, /* of all heads of a token together, before it */
    MT_QK_NORM_AFTER_ROPE, /* of each head, after it */
};

/** Which layers see a sliding window. layer_types, where config.json has it, names them one by one. */
enum mt_window_rule {
    MT_WINDOW_NONE,         /* whatever config.json says */
    MT_WINDOW_EVERY_LAYER,  /* sliding_window; null is none, absent is the class default */
    MT_WINDOW_UPPER_LAYERS, /* with use_sliding_window, from layer max_window_layers on */
    MT_WINDOW_BY_FLAG,      /* with use_sliding_window, every layer */
    MT_WINDOW_FROM_LAYER,   /* from layer max_window_layers on, and no layer where that is absent */
    MT_WINDOW_EVEN_LAYERS,  /* layers 0, 2, 4 ... */
    MT_WINDOW_EVEN_LOWER_LAYERS, /* with use_sliding_window, those of layers 0, 2, 4 ... below max_window_layers */
};

/**
 * A tensor that is not on disk as it usually is: another name ("mlp.gate_proj.weight" -> "feed_forward.w1.weight"),
 * or another form. In the names of an expert's tensors, `*` stands for its number.
 */
struct mt_tensor_on_disk {
    const char *usual, *name; /* what follows "model.layers.N." */
    bool is_row;              /* a vector is [1, n] */
    bool is_f32;              /* it is F32 in a file of bf16 */
};

/** Tensors of all experts that are one on disk: [experts, rows, columns], or [experts, rows] of vectors. */
struct mt_fused_tensor {
    const char *name;
    const char *usual[2];     /* an expert's tensors, of as many rows each; the second may be NULL */
    bool is_transposed;       /* [experts, columns, rows] */
    bool alternate;           /* the rows of the two take turns; else those of the second follow */
};

enum { MT_FAMILY_MAX_PARTS = 6 };

struct mt_family {
    const char *architecture, *model_type; /* architectures[0]; model_type, where architectures is absent */
    int64_t n_kv_heads, head_dim;          /* class defaults; 0: num_attention_heads, hidden_size / heads */
    int64_t window;                        /* class default of sliding_window */
    enum mt_window_rule windows;
    double rms_eps, rope_theta;            /* class defaults; 0: 1e-6, 10000 */
    int64_t max_pos;                       /* class default; 0: 2048 */
    enum mt_feature qkv_bias, o_bias, mlp_bias;
    const char *bias_key;                  /* the key of qkv_bias and o_bias; NULL: attention_bias */
    bool bias_by_default;                  /* where that key is absent */
    enum mt_qk_norm_kind qk_norm;
    const char *qk_norm_key;               /* which must be true for it, false where absent; NULL: it is there */
    double partial_rotary;                 /* default of partial_rotary_factor, which is read; 0: it must be 1 */
    bool rope_alpha;                       /* "dynamic" rotary scaling with an alpha is another base, whatever the length */
    bool needs_rope_scaling;               /* config.json must have it, as the class's default is another */
    bool tied;                             /* default of tie_word_embeddings */
    bool sinks;                            /* attention has a logit for nothing, by head */
    bool norm_in_f32;                      /* a norm multiplies by its weight before it rounds, not after */
    const char *refused_flag;              /* a key that must not be true; NULL: none */
    bool code_is_known;                    /* auto_map may be there: its releases are older than the class */
    const char *parts[MT_FAMILY_MAX_PARTS]; /* of a decoder layer, in order of the forward pass: names of
                                              src/model/parts.h; NULL ends the list */
    const char *sparse_parts[MT_FAMILY_MAX_PARTS]; /* of a layer that is a mixture of experts */
    const struct mt_moe_family *moe;       /* NULL: no layer is */
    const struct mt_tensor_on_disk *on_disk; /* NULL: all are as usual; a row of NULLs ends the list */
    const struct mt_fused_tensor *fused;    /* the same */
    bool rope_pairs;                        /* the rotary embedding turns rows 0 and 1, 2 and 3 ... of a head on disk;
                                               here, as everywhere else, rows i and i + half */
    bool shared_renamed;                    /* transformers' module of the shared expert has another name than the
                                               tensors on disk: adapters, which go by modules, cannot name it */
};

/** The family of an architecture, or of a model_type where `architecture` is NULL; NULL: not supported. */
const struct mt_family *mt_family_find(const char *architecture, const char *model_type);
/** Supported architectures for messages: "A, B, C". Writes at most `len` bytes, the terminating 0 included. */
void mt_family_list(char *buf, size_t len);
/** What is special about a layer's tensor on disk, by its usual name; NULL: nothing. */
const struct mt_tensor_on_disk *mt_family_on_disk(const struct mt_family *f, const char *usual);
/** The fused tensor that it is in, as number *part of it; NULL: none. */
const struct mt_fused_tensor *mt_family_fused(const struct mt_family *f, const char *usual, int *part);

#endif
