/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

/**
 * What a decoder layer computes: of what parts it consists, and the values that these read. Layers that compute the
 * same have the same specification, so that a layer is an index into a short table (mt_hf_config.spec).
 */

/** RMSNorm, or LayerNorm, whose weight and bias are one parameter. */
struct mt_norm_spec {
    double eps;
    bool centred;    /* LayerNorm: subtracts the mean; rounds once */
    bool biased;     /* LayerNorm: has a bias */
    bool plus_one;   /* multiplies by 1 + w: its weights begin at 0 */
    bool round_once; /* multiplies by its weight before it rounds, not after */
};

/**
 * The norms of a layer's branches, attention and MLP: of a branch's input, and of its output before the residual is
 * added. These are the names of their tensors; NULL: there is no such norm.
 */
struct mt_branch_norms {
    const char *before, *after;
};
struct mt_layer_norms {
    struct mt_branch_norms attention, mlp;
    struct mt_branch_norms experts; /* of experts beside an MLP (mt_moe.beside): of their input, and of their sum; */
    const char *mlp_beside;         /* then this is of the MLP's output, and mlp.after of both together */
};

/** RMSNorm of queries and keys. */
enum mt_qk_norm_kind {
    MT_QK_NORM_NONE,
    MT_QK_NORM_HEADS,      /* of each head, before the rotary embedding */
    MT_QK_NORM_PROJECTION, /* of all heads of a token together, before the rotary embedding */
    MT_QK_NORM_AFTER_ROPE, /* of each head, after the rotary embedding */
    MT_QK_NORM_BARE,       /* of each head, before the rotary embedding, without a weight */
};

enum mt_activation { MT_ACTIVATION_SILU, MT_ACTIVATION_GELU_TANH, MT_ACTIVATION_RELU2, MT_ACTIVATION_XIELU /* both of
                     units without a gate */ };

enum { MT_NO_ROPE = -1, MT_LAYER_MAX_PARTS = 6 };

/** The gated delta rule, or the plain one of Mamba 2 (part delta), of a layer that has it instead of attention. */
struct mt_delta_spec {
    int64_t k_heads, v_heads, k_dim, v_dim; /* heads of queries and of keys, of values; their widths */
    int64_t taps;                           /* of the short convolution */
    int64_t joined;                         /* 1: two tensors hold all inputs, by key head; 0: four */
    bool plain;                             /* Mamba 2, whose one tensor of inputs is [z; v; k; q; step] */
    bool conv_bias;                         /* plain: the short convolution has a bias */
    double least, most;                     /* plain: limits of a step */
};

struct mt_layer_spec {
    const char *parts[MT_LAYER_MAX_PARTS]; /* names of its parts (src/model/parts.h); NULL ends a shorter list */
    bool is_mixture;          /* of experts: mt_hf_config.moe */
    struct mt_norm_spec norm; /* of all its norms, also those of queries and keys, but for: */
    double after_eps;         /* eps of those after a branch */
    struct mt_layer_norms norms;
    double residual;          /* factor of what a branch adds to the hidden state */
    const char *scalar_name;  /* the tensor of the number that the layer's output is multiplied by; NULL: none */
    /* attention */
    int64_t n_heads, n_kv_heads, head_dim; /* of queries and keys, and of values but for: */
    int64_t v_dim;            /* width of values, and of a head's output */
    double o_scale;           /* factor of a head's output */
    int64_t window;           /* 0: all earlier tokens */
    int rope;                 /* index of mt_hf_config.rope; MT_NO_ROPE: queries and keys are not rotated */
    int q_rope;               /* that of queries, which may be another */
    double score_scale;       /* factor of q . k */
    double score_cap;         /* scores become cap * tanh(score / cap); 0: none */
    bool qkv_bias, o_bias;
    const char *qkv_name;     /* the tensor that holds queries, keys and values; NULL: one each */
    bool gate;                /* outputs of a head are multiplied by a sigmoid, whose rows follow those of its query, */
    const char *gate_name;    /* or are this tensor, which is after the values; NULL: not */
    bool sinks;               /* each head has a sink: a logit in the softmax without a value */
    enum mt_qk_norm_kind qk_norm;
    bool v_norm;              /* RMSNorm of values, of each head, without a weight */
    bool v_is_k;              /* values are the keys' product, before its norm and rotary embedding; with v_norm alone */
    /* multi-head latent attention (part mla), whose head_dim is nope_dim + rope_dim; 0: attention is another */
    int64_t q_latent, kv_latent; /* widths of latents; q_latent 0: queries have none */
    int64_t nope_dim, rope_dim;
    bool latent_cache;        /* generation keeps latents of earlier tokens, and makes their keys and values again */
    struct mt_delta_spec delta;
    /* MLP */
    int64_t ffn;
    enum mt_activation activation;
    bool ungated;             /* the MLP has no gate: act(h Wup) Wdown */
    bool mlp_bias;
    const char *gate_up_name; /* the tensor that holds gate and up; NULL: one each */
};
