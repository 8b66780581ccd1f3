/* SPDX-License-Identifier: Apache-2.0 */
#ifndef MT_HF_FAMILY_H
#define MT_HF_FAMILY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/**
 * A family of models is a row of a table (family.c): how its config.json is read, which parts its decoder
 * layers are made of, and how its tensors are named on disk. All rows are read by the same code; none of it
 * asks which family it is.
 */

/** When a feature of the block is there. */
enum mt_feature {
    MT_FEATURE_NEVER,
    MT_FEATURE_ALWAYS,
    MT_FEATURE_BY_KEY, /* where the key of config.json says so: attention_bias, mlp_bias */
};

/** Which layers see a sliding window. layer_types, where config.json has it, names them one by one. */
enum mt_window_rule {
    MT_WINDOW_NONE,         /* whatever config.json says */
    MT_WINDOW_EVERY_LAYER,  /* sliding_window; null is none, absent is the class default */
    MT_WINDOW_UPPER_LAYERS, /* with use_sliding_window, from layer max_window_layers on */
};

/** A tensor's name on disk where it is not the usual one: "mlp.gate_proj.weight" -> "feed_forward.w1.weight". */
struct mt_tensor_rename {
    const char *usual, *on_disk; /* what follows "model.layers.N." */
};

enum { MT_FAMILY_MAX_PARTS = 4 };

struct mt_family {
    const char *architecture, *model_type; /* architectures[0]; model_type, where architectures is absent */
    int64_t n_kv_heads, head_dim;          /* class defaults; 0: num_attention_heads, hidden_size / heads */
    int64_t window;                        /* class default of sliding_window */
    enum mt_window_rule windows;
    enum mt_feature qkv_bias, o_bias, mlp_bias;
    bool qk_norm;                          /* RMSNorm of each query and key head, before the rotary embedding */
    const char *parts[MT_FAMILY_MAX_PARTS]; /* of a decoder layer, in order of the forward pass: names of
                                              src/model/parts.h; NULL ends the list */
    const struct mt_tensor_rename *renames; /* NULL: none; a row of NULLs ends the list */
};

/** The family of an architecture, or of a model_type where `architecture` is NULL; NULL: not supported. */
const struct mt_family *mt_family_find(const char *architecture, const char *model_type);
/** Supported architectures for messages: "A, B, C". Writes at most `len` bytes, the terminating 0 included. */
void mt_family_list(char *buf, size_t len);
/** The name on disk of a layer's tensor whose usual name is `usual`. */
const char *mt_family_tensor_name(const struct mt_family *f, const char *usual);

#endif
