/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/err.h"
#include "settings/settings.h"

/**
 * Low-rank adapters (LoRA; Hu et al. 2021): a linear layer W with an adapter computes y = W x + s B (A x), and
 * A [rank, in] and B [out, rank] are trained instead of W. s = alpha / rank, or alpha / sqrt(rank) with rsLoRA
 * (Kalajdzievski 2023).
 *
 * DoRA (Liu et al. 2024) scales the rows of W + s B A to lengths m, which are trained, too:
 * y = m (W + s B A) x / |W + s B A| by rows. The norms count as constants in backward (section 4.3 there).
 *
 * Adapters are given to a list of modules, named as in PEFT: a tensor's name without ".weight". A name without globs
 * means the module of that name, or those whose name ends in a dot and that name ("q_proj"); a glob is matched
 * against the whole name ("model.layers.3.*").
 */

/** A name or glob of modules, and their value. */
struct mt_adapter_item {
    char *name; /* owned */
    double value;
    bool used;  /* it matched something when a model was laid out */
    bool glob;
};
struct mt_adapter_list {
    struct mt_adapter_item *items; /* owned; the first match counts */
    size_t n, cap;
    size_t *by_name;               /* owned; the items that are no globs, by name and then in order: experts one by one
                                      are tens of thousands */
    size_t n_names, cap_names;
};

/** The adapters of a model: which modules have one, and of which rank. {0}: none. */
struct mt_adapter_spec {
    bool on;
    int64_t rank;
    double alpha;
    bool rslora, dora;
    double dropout;    /* share of the elements of x that training zeroes before A */
    enum mt_merge_aware merge;
    enum mt_merge_scale merge_scale; /* blocks' scales are the base's, or of the merged values */
    double lr_ratio_b; /* learning rate of B over that of A (LoRA+; Hayou et al. 2024) */
    struct mt_adapter_list targets;        /* MT_ALL_LINEAR: the linear layers of attention and MLP of every layer */
    struct mt_adapter_list ranks, alphas;  /* override rank and alpha */
    struct mt_adapter_list train_also;     /* modules that are trained whole */
};
#define MT_ALL_LINEAR "all-linear"
/* The last part but one of a factor's name: "model.layers.0.self_attn.q_proj.lora_A.weight". */
#define MT_LORA_A "lora_A"
#define MT_LORA_B "lora_B"
/* The last part of a magnitude's. */
#define MT_LORA_MAGNITUDE "lora_magnitude_vector"

/** Adds a copy of the name; false: no memory. */
bool mt_adapter_list_add(struct mt_adapter_list *l, const char *name, double value);
/** Does an item have exactly this name? */
bool mt_adapter_list_has(const struct mt_adapter_list *l, const char *name);
void mt_adapter_spec_finish(struct mt_adapter_spec *s);

/** The first item that matches the module, or NULL; marks it as used. */
const struct mt_adapter_item *mt_adapter_match(struct mt_adapter_list *l, const char *module);

/** Rank and alpha of a module's adapter, and the factor of its product. */
struct mt_adapter_shape {
    int64_t rank;
    double alpha, scale;
};
struct mt_adapter_shape mt_adapter_shape_of(struct mt_adapter_spec *s, const char *module);
