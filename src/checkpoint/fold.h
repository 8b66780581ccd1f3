/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "hf/source.h"

/**
 * A PEFT folder's adapters with one rank and a scale of 1, for programs that read no rank_pattern and alpha_pattern: the
 * rank is the largest, smaller ones are padded with zeros, and B is multiplied by the scale that its module had. The
 * products are the same. Other tensors (magnitudes, modules that are trained whole) do not change.
 */
struct mt_fold;

/**
 * `weights`, the folder's adapter_model.safetensors, stays the caller's and open. *config is replaced by the text of the
 * adapters' new adapter_config.json. MT_ERR_INPUT: not supported; MT_ERR_USAGE: adapters of all experts together.
 */
int mt_fold_open(struct mt_fold **out, const char *dir, const struct mt_st_model *weights, char **config,
                 struct mt_err *err);
void mt_fold_close(struct mt_fold **f);
/** Adds its tensors. */
int mt_fold_list(struct mt_fold *f, struct mt_source_list *out, struct mt_err *err);
