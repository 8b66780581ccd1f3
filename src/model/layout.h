/* SPDX-License-Identifier: Apache-2.0 */
#ifndef MT_MODEL_LAYOUT_H
#define MT_MODEL_LAYOUT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/err.h"
#include "config/config.h"
#include "hf/hf_config.h"

/** A Hugging Face tensor and its place in its unit's planes. */
struct mt_tensor {
    char name[128];
    int n_dims;
    int64_t shape[2];
    size_t unit;
    size_t first, n;  /* elements [first, first + n) of the unit's planes */
    bool trainable;   /* not frozen */
    bool decay;       /* weight decay applies */
};

enum mt_unit_kind { MT_UNIT_EMBED, MT_UNIT_LAYER, MT_UNIT_HEAD };
/** What of a decoder layer a unit is: both halves, or one where that suits the device better. */
enum mt_layer_part { MT_PART_ATTENTION = 1, MT_PART_MLP = 2, MT_PART_BOTH = 3 };

/**
 * A matrix or vector as the device uses it: one tensor, or several that lie end to end (q, k, v; gate,
 * up), so that one matrix product serves them. `at` is the first element in the unit's planes.
 */
struct mt_param {
    size_t at, n;   /* n = 0: the model has none */
    bool trainable; /* any of its tensors is */
};

struct mt_unit {
    enum mt_unit_kind kind;
    int layer;                   /* of MT_UNIT_LAYER */
    enum mt_layer_part part;     /* of MT_UNIT_LAYER */
    int block;                   /* 0: embed; 1 and up: the layer; last: head. However layers are cut */
    char name[32];               /* "embed", "layer 7", "layer 7 mlp", "head" */
    size_t n_elems;              /* of its planes: params at 64-element borders, end padded to
                                    MT_JOIN_BLOCK */
    size_t n_params;             /* without padding */
    size_t first_tensor, n_tensors;
    bool trainable;
    struct mt_param table;                                  /* embed: [vocab, hidden]; untied head */
    struct mt_param norm;                                   /* head: final norm */
    struct mt_param ln1, qkv, qkv_b, q_norm, k_norm, o, o_b; /* layer */
    struct mt_param ln2, gate_up, gate_up_b, down, down_b;
};

/** Units in forward order: embed, layers, head. A tied head has no table of its own. */
struct mt_layout {
    struct mt_hf_config cfg;
    bool halves;               /* attention and MLP are units of their own */
    struct mt_unit *units;
    size_t n_units;
    struct mt_tensor *tensors; /* grouped by unit, in plane order */
    size_t n_tensors;
    uint64_t n_params;         /* without padding; a tied table counts once */
    bool tied;
};

/**
 * Lays the model out; `halves` cuts each layer in two, which is placement: the tensors, their order and every
 * result stay the same. `freeze` globs name tensors not trained. Decay: not for biases and norms (`bias`,
 * `norm` in the name), and for embeddings only with decay_embeddings (embed_tokens and lm_head).
 */
int mt_layout_create(struct mt_layout **out, const struct mt_hf_config *cfg,
                     const struct mt_cfg_list *freeze, bool decay_embeddings, bool halves, struct mt_err *err);
void mt_layout_destroy(struct mt_layout **l);
const struct mt_tensor *mt_layout_find(const struct mt_layout *l, const char *name);

#endif
