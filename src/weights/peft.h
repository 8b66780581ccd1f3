/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "base/json.h"
#include "hf/safetensors.h"
#include "model/layout.h"
#include "model/peft_names.h"
#include "store/planes.h"

/**
 * Adapters in the files of Hugging Face's PEFT: adapter_config.json, and adapter_model.safetensors with
 * base_model.model.NAME.lora_A.weight [rank, in] and .lora_B.weight [out, rank] of a module with an adapter, and
 * base_model.model.NAME.weight of a module that is trained whole. Adapters of the parameters of
 * all experts are listed in target_parameters, and stored for all experts together (mt_adapter.whole).
 */
#define MT_PEFT_CONFIG "adapter_config.json"
#define MT_PEFT_WEIGHTS "adapter_model.safetensors"

bool mt_peft_is_folder(const char *dir);

/**
 * Reads which modules of a model the folder's adapters are for, from the names of its tensors. -EINVAL (MT_ERR_INPUT):
 * the configuration has a setting that is not supported; the message names its key.
 */
int mt_peft_read_spec(struct mt_adapter_spec *out, const char *dir, struct mt_err *err);
/** Are the folder's adapters DoRA's? */
int mt_peft_uses_dora(bool *yes, const char *dir, struct mt_err *err);
/** The model that the folder's configuration names; to be freed by the caller. */
int mt_peft_base_model(char **out, const char *dir, struct mt_err *err);

/** Opens the folder's adapter_model.safetensors. */
int mt_peft_open_weights(struct mt_st_model *st, const char *dir, struct mt_err *err);
/** Fills the planes of all trained tensors from the folder. */
int mt_peft_load(const struct mt_layout *l, mt_plane_set *planes, const char *dir, struct mt_err *err);
/** Checks that the folder has all of them, in the right shapes. */
int mt_peft_check(const struct mt_layout *l, const char *dir, struct mt_err *err);
/** Refuses the files of an adapter of a model with tied embeddings if PEFT trained a copy for each of the two names. */
int mt_peft_check_tied(const struct mt_st_model *st, struct mt_err *err);
/** Warns of each matrix of the model of which the folder holds a copy (PEFT keeps one of the head, with an adapter of
 * it) that differs from MODEL_DIR's. */
int mt_peft_compare_copies(const struct mt_layout *l, const char *dir, const char *model_dir, struct mt_err *err);
/** PEFT's initial values: A uniform in +-1/sqrt(in), by (seed, name, index) alone; B zero; DoRA's
 * magnitudes the lengths of W's rows. */
int mt_adapter_init(const struct mt_layout *l, mt_plane_set *planes, uint64_t seed, struct mt_err *err);

/** Of an adapter_config.json, a pattern whose modules have another scale than alpha / rank of all, NULL: none; *n: how
 * many patterns do. Borrowed from the config. */
const char *mt_peft_other_scale(const cJSON *config, size_t *n);
/** The text of adapter_config.json of the layout's adapters on the model `base`; to be freed. NULL: no memory. */
char *mt_peft_config_text(const struct mt_layout *l, const char *base);
