/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "checkpoint/checkpoint.h"
#include "checkpoint/merge.h"

/** What an export says of its result: what it loses, and which programs will not take it so. */

/** config: the text of adapter_config.json. */
void mt_export_warn_of_vllm(const char *config);
/** Of adapters that are merged into a base that is not packed; s: of the run that trained them. */
void mt_export_warn_of_packing(const struct mt_export *e, const struct mt_train_state *s);
/** Of an f32 export of weights that were saved without their masters; of another folder: nothing. */
void mt_export_warn_of_weights(const char *from);
/** Of a run's model in f32 or bf16: which bits it does not have. */
void mt_export_tell_dtype(const struct mt_export *e, const struct mt_train_state *s, bool f32);
/** Accepts NULL: nothing was merged. */
void mt_export_tell_rounding(const struct mt_merge *m);
/** Of a model that was packed in FP8, in NF4. */
void mt_export_warn_of_blocks(const struct mt_layout *l);
void mt_export_warn_of_experts(const struct mt_layout *l);
