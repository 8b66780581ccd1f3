/* SPDX-License-Identifier: Apache-2.0 */
#include "model/peft_names.h"

#include <stdio.h>
#include <string.h>

#include "base/mem.h"

void mt_peft_tensor_name(char name[MT_PEFT_NAME], const char *ours)
{
    snprintf(name, MT_PEFT_NAME, "base_model.model.%s", ours);
}

void mt_peft_whole_name(char name[MT_PEFT_NAME], const struct mt_family *f, const char *ours)
{
    char theirs[MT_TENSOR_NAME];
    mt_family_tensor(theirs, sizeof(theirs), f, ours);
    mt_peft_tensor_name(name, theirs);
}

bool mt_peft_wraps_parameter(const struct mt_layout *l, const char *module)
{
    static const char *const names[] = {".gate_proj", ".up_proj", ".down_proj", ".mlp.gate", ".mlp.router",
                                        ".block_sparse_moe.router", ".mixer.gate"};
    for (size_t i = 0; i < MT_ARRAY_LEN(names); i++)
        if (l->cfg.moe.n_experts && mt_ends_with(module, names[i]))
            return true;
    return false;
}
