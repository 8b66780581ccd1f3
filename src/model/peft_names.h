/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "model/layout.h"

/* How PEFT names what it adapts: the part of its format that the layout depends on. weights/peft.h has the rest. */

/** The name in adapter_model.safetensors of a trained tensor. */
enum { MT_PEFT_NAME = MT_STORED_NAME };
void mt_peft_tensor_name(char name[MT_PEFT_NAME], const char *ours);

/** The same of a tensor that is trained whole, by the name that transformers has for it; ours: that of the files. */
void mt_peft_whole_name(char name[MT_PEFT_NAME], const struct mt_family *f, const char *ours);

/**
 * Must the matrix of that module (mt_stored_module()) be listed in PEFT's target_parameters, not in target_modules? In a
 * mixture of experts PEFT takes names such as "gate_proj" to mean the experts' fused matrices, so the MLPs of dense
 * layers and shared experts, which have the same names, are listed there; and routers, if they are parameters in
 * transformers, no linear modules. PEFT does not support dropout and DoRA for these.
 */
bool mt_peft_wraps_parameter(const struct mt_layout *l, const char *module);
