/* SPDX-License-Identifier: Apache-2.0 */
#include "optim/optimizer.h"

#include <string.h>

#include "base/mem.h"

/* Each is defined in a file of its own. A new optimizer is that file, an entry here and a choice of optimizer.type. */
#define OPTIMIZERS(X) X(mt_adamw) X(mt_adamw_bf16)

#define DECLARE(name) extern const struct mt_optimizer name;
OPTIMIZERS(DECLARE)
#define ROW(name) &name,
static const struct mt_optimizer *const optimizers[] = {OPTIMIZERS(ROW)};

const struct mt_optimizer *mt_optimizer_find(const char *type, enum mt_dtype state_dtype)
{
    for (size_t i = 0; i < MT_ARRAY_LEN(optimizers); i++)
        if (!strcmp(optimizers[i]->type, type) && optimizers[i]->state_dtype == state_dtype)
            return optimizers[i];
    return NULL;
}

double mt_optimizer_bytes(const struct mt_optimizer *o, enum mt_dtype grad_dtype)
{
    double state = 2 * (double)mt_dtype_size(MT_BF16); /* hi and lo */
    for (int i = 0; i < o->n_states; i++)
        state += (double)o->state[i].block_bytes / (double)o->state[i].block;
    return 2 * state + (double)mt_dtype_size(grad_dtype);
}
