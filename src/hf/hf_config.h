/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/err.h"
#include "base/packed.h"
#include "hf/family.h"

enum mt_rope_type {
    MT_ROPE_DEFAULT,
    MT_ROPE_LINEAR,
    MT_ROPE_DYNAMIC,
    MT_ROPE_LLAMA3,
    MT_ROPE_YARN,
    MT_ROPE_LONGROPE,
    MT_ROPE_PROPORTIONAL, /* whole heads, but all angles behind the first part are 0 */
};

enum { MT_ROPE_MAX_FACTORS = 512, MT_MAX_ROPES = 2, MT_MAX_LAYERS = 1024, MT_MAX_SPECS = 16, MT_MAX_EOS = 16,
       MT_MAX_INPUT_TOKENS = 9 };

struct mt_rope_config {
    enum mt_rope_type type;
    double theta, factor, partial_rotary_factor;
    double low_freq_factor, high_freq_factor;       /* llama3 */
    double beta_fast, beta_slow, mscale, mscale_all_dim;  /* yarn */
    double attention_factor;                        /* yarn, longrope; < 0: derived */
    bool truncate;                                  /* yarn */
    int64_t original_max_pos;                       /* llama3, yarn, longrope */
    int64_t max_pos;                                /* max_position_embeddings */
    double growth;                                  /* not 0: what is rotated is multiplied by 1 + growth * log(1 +
                                                       floor(position / original_max_pos)) (queries of Ministral 3) */
    size_t dims;                                    /* of a head that are rotated */
    size_t still;                                   /* the first of these, whose angles are 0: they grow alone */
    int n_factors;                                  /* longrope: entries of the two lists */
    double short_factor[MT_ROPE_MAX_FACTORS], long_factor[MT_ROPE_MAX_FACTORS];
};

/** Parts of decoder layers whose matrices a packed model keeps plain. */
enum { MT_PLAIN_ATTENTION = 1, MT_PLAIN_MLP = 2, MT_PLAIN_SHARED = 4, MT_PLAIN_EXPERTS = 8 };

/** A decoder as its config.json describes it, with the family's defaults filled in. Both dialects are read. */
struct mt_hf_config {
    const struct mt_family *family;
    int64_t hidden, n_layers, vocab, max_pos;
    double initializer_range;
    const struct mt_nested_family *nested;  /* NULL: config.json describes the decoder alone */
    const struct mt_text_names *names;      /* how its tensors begin in files and modules */
    int64_t input_token[MT_MAX_INPUT_TOKENS]; /* nested: ids that stand for images and the like; such data is refused */
    int n_input_tokens;
    bool tied;                              /* tie_word_embeddings, unless the files have another head */
    double embed_scale;                     /* embeddings are multiplied by it, as rounded to the compute dtype */
    struct mt_norm_spec norm;               /* of the last norm */
    struct mt_norm_spec router_norm;        /* of routers with one of their own (mt_moe.router_norm) */
    double logit_scale;                     /* the head's input is multiplied by it */
    double logit_cap;                       /* logits become cap * tanh(logit / cap); 0: none */
    struct mt_layer_spec spec[MT_MAX_SPECS];
    int n_specs;
    uint8_t layer[MT_MAX_LAYERS];           /* index of a layer's specification */
    struct mt_moe moe;
    bool experts_fused;                     /* the folder has one tensor of all experts where the family has one each */
    int64_t longest;                        /* tokens of a document: a query of longer ones chooses among its keys,
                                               which is not supported; 0: any */
    struct mt_rope_config rope[MT_MAX_ROPES];
    int n_ropes;
    int64_t bos, pad;                       /* -1: none */
    int64_t eos[MT_MAX_EOS];
    int n_eos;
    char torch_dtype[16];                   /* as in the file, or "" */
    unsigned plain_parts;                   /* MT_PLAIN_*: what quantization_config excepts, if it says so by modules */
    enum mt_packed packed;                  /* quantization_config: how the layers' matrices are stored */
    enum mt_scale packed_scale;             /* of int4: the type of its scales, where no file says it */
    bool zeros_less_one;                    /* GPTQ's first format: files have zero points less 1 */
    bool described_anew;                    /* files of our own name their scales otherwise, or have fewer of them */
};

/** Elements of a row that experts take and give. */
static inline size_t mt_moe_row(const struct mt_hf_config *c)
{
    return (size_t)(c->moe.latent ? c->moe.latent : c->hidden);
}

static inline const struct mt_layer_spec *mt_layer_of(const struct mt_hf_config *cfg, int64_t layer)
{
    return &cfg->spec[cfg->layer[layer]];
}

/**
 * Reads DIR/config.json (and the end-of-text ids of generation_config.json). Anything not supported (architecture,
 * rope type, remote code, quantisation, vision, activation, attention soft caps ...) is refused by name
 * (MT_ERR_INPUT); warnings (such as a yarn factor that differs) go to the log.
 */
int mt_hf_config_read(struct mt_hf_config *out, const char *dir, struct mt_err *err);
/** The same from text, for tests and fuzzing; `name` is used in messages. */
int mt_hf_config_parse(struct mt_hf_config *out, const char *text, size_t len, const char *name,
                       struct mt_err *err);

/**
 * Finds the model folder: a directory, or "org/name" in the Hugging Face hub cache ($HF_HUB_CACHE,
 * $HF_HOME/hub, ~/.cache/huggingface/hub; refs/main). The caller frees *dir. Never downloads: the error
 * names the command, `hf download org/name`.
 */
int mt_hf_find_model(char **dir, const char *model, struct mt_err *err);

/**
 * The stored config.json of a published model (configs/models/NAME.json), which is enough to plan with: `model` is its
 * name, with or without an organisation before it, which the name may repeat ("nvidia/NVIDIA-Nemotron-3-Nano"), and with
 * whatever follows a '-' ("Qwen/Qwen3-8B-Base"). Writes its path; false: none is stored.
 */
bool mt_hf_find_stored(char *path, size_t len, const char *model);

/** How the rotary embedding of a document depends on the document's length. */
enum mt_rope_lengths {
    MT_ROPE_ONE_TABLE,    /* not at all */
    MT_ROPE_TWO_TABLES,   /* longrope: short factors up to *limit tokens, long factors for longer documents */
    MT_ROPE_A_TABLE_EACH, /* dynamic: one table up to *limit tokens, one for each greater length */
};
/** Tokens that the embedding is said to reach: max_position_embeddings, or more where a scaling multiplies them. */
int64_t mt_rope_reach(const struct mt_rope_config *r);
/** For documents of up to max_len tokens; *limit: the longest one that uses the first table (one table: max_len). */
enum mt_rope_lengths mt_rope_lengths(const struct mt_rope_config *r, size_t max_len, size_t *limit);

/** A factor of scores in latent attention: YaRN's for the part that is not rotated (DeepSeek-AI 2024). */
double mt_rope_score_factor(const struct mt_rope_config *r);

/**
 * Rotary tables for positions [0, n_pos) of a document of `seq_len` tokens: cos_t and sin_t, [n_pos, dims/2] f32,
 * computed in the precision and order of transformers (inv_freq in f32), times the attention factor.
 */
void mt_rope_tables(const struct mt_rope_config *r, size_t n_pos, size_t seq_len, float *cos_t, float *sin_t);
