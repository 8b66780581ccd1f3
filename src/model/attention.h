/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "base/mem.h"
#include "model/recipe.h"
#include "model/state.h"

/** From the input of attention's product to that of the output's: the heads' outputs, with sinks and gates. */
struct mt_view mt_attention_outputs(struct mt_recipe *r, struct mt_view h);
