/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/** The kinds of parts: X(name) for each mt_part_NAME, defined in NAME.c; the ends of mixtures in mixture_ends.c. */
#define MT_PARTS(X)                                                                                \
    X(embed)                                                                                       \
    X(embed_norm)                                                                                  \
    X(attention)                                                                                   \
    X(mla)                                                                                         \
    X(delta)                                                                                       \
    X(mlp)                                                                                         \
    X(parallel)                                                                                    \
    X(router)                                                                                      \
    X(lists)                                                                                       \
    X(experts)                                                                                     \
    X(beside)                                                                                      \
    X(latent)                                                                                      \
    X(normed)                                                                                      \
    X(combine)                                                                                     \
    X(head)

#define MT_COUNT_PART(name) +1
enum { MT_N_PART_KINDS = 0 MT_PARTS(MT_COUNT_PART) };
#undef MT_COUNT_PART
#define MT_DECLARE_PART(name) extern const struct mt_part_kind mt_part_##name;
struct mt_part_kind;
MT_PARTS(MT_DECLARE_PART)
#undef MT_DECLARE_PART

/* Roles of the parameters: indices of mt_part.param. */
enum { MT_NORMED_NORM };
enum { MT_LATENT_UP /* [hidden, latent] */ };
enum { MT_EMBED_TABLE };                                                                 /* [vocab, hidden] */
enum { MT_HEAD_TABLE, MT_HEAD_NORM };                                                    /* tied: no table */
enum { MT_ATTENTION_NORM, MT_ATTENTION_QKV, MT_ATTENTION_QKV_BIAS, MT_ATTENTION_Q_NORM, MT_ATTENTION_K_NORM,
       MT_ATTENTION_OUT, MT_ATTENTION_OUT_BIAS, MT_ATTENTION_SINKS /* [heads] */, MT_ATTENTION_NORM_AFTER };
enum { MT_PARALLEL_GATE_UP = MT_ATTENTION_NORM_AFTER + 1, MT_PARALLEL_GATE_UP_BIAS, MT_PARALLEL_DOWN,
       MT_PARALLEL_DOWN_BIAS }; /* part parallel, with those of attention */
enum { MT_MLA_NORM, MT_MLA_IN /* [q latent or queries; latent; shared key] */, MT_MLA_IN_BIAS, MT_MLA_Q_NORM, MT_MLA_Q,
       MT_MLA_KV_NORM, MT_MLA_KV, MT_MLA_OUT, MT_MLA_OUT_BIAS, MT_MLA_NORM_AFTER };
enum { MT_DELTA_NORM, MT_DELTA_IN /* [q; k; v; z; b; a], or by key head; plain: [z; v; k; q; a] */,
       MT_DELTA_CONV /* [channels, taps] */, MT_DELTA_DT_BIAS, MT_DELTA_A_LOG, MT_DELTA_OUT_NORM, MT_DELTA_OUT,
       MT_DELTA_NORM_AFTER, MT_DELTA_CONV_BIAS, MT_DELTA_SKIP };
enum { MT_MLP_NORM, MT_MLP_GATE_UP, MT_MLP_GATE_UP_BIAS, MT_MLP_DOWN, MT_MLP_DOWN_BIAS, MT_MLP_NORM_AFTER,
       MT_MLP_SCALAR /* [1] */, MT_BESIDE_NORM_MLP, MT_BESIDE_NORM_SUM /* part beside, with all of the others */,
       MT_MLP_CURVE /* [4] numbers of xIELU */ };
enum { MT_ROUTER_NORM, MT_ROUTER_WEIGHT /* [experts, hidden] */, MT_ROUTER_BIAS, MT_ROUTER_SELECT_BIAS,
       MT_ROUTER_SHARED_GATE_UP, MT_ROUTER_SHARED_DOWN, MT_ROUTER_SHARED_GATE /* [1, hidden] */, MT_ROUTER_OWN_NORM,
       MT_ROUTER_EXPERT_SCALE /* [experts] */, MT_ROUTER_LATENT /* [latent, hidden] */ };
/* Roles of mt_part.expert[i], for each expert of the group. */
enum { MT_EXPERT_GATE_UP, MT_EXPERT_GATE_UP_BIAS, MT_EXPERT_DOWN, MT_EXPERT_DOWN_BIAS };
