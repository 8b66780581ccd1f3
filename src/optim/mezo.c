/* SPDX-License-Identifier: Apache-2.0 */
/* MeZO (Malladi et al. 2023, algorithm 1): a step of SGD along noise z, by the difference of the losses of w + eps z
 * and w - eps z. No state, and no gradient: it is g z, of which z is made again. */
#include <math.h>

#include "base/mem.h"
#include "base/philox.h"
#include "optim/kernel.h"
#include "optim/optimizer.h"

bool mt_mezo_takes(const struct mt_numerics *n, uint64_t step, int layer, int n_layers)
{
    const uint64_t stream = UINT64_C(0xAA) << 56 | step;
    uint64_t some = MT_MAX((uint64_t)llround(n->mezo.layers * n_layers), UINT64_C(1));
    return layer < 0 || mt_permute((uint64_t)layer, (uint64_t)n_layers, n->seed, stream) < some;
}

static uint64_t update(const struct mt_optimizer *, const struct mt_update *u, enum mt_isa isa)
{
    struct mt_kernel k = mt_kernel_of(u);
    k.rule = MT_RULE_SGD;
    k.s.step = (float)u->lr;
    return mt_kernel_run(&k, isa);
}

static size_t limit_bytes(const struct mt_state_shape *)
{
    return sizeof(float);
}

#define MEZO .type = "mezo", .title = "MeZO", .grain = 1, .lean_masters = true, .zeroth = true, .thread_ns = 3.7, .update = update
static const struct mt_optimizer mezo = {MEZO};
const struct mt_optimizer mt_mezo_small = {MEZO, .n_states = 1,
                                           .state = {MT_STATE_APART("limit", "limits of tensors", limit_bytes, false)}};
MT_OPTIMIZER(mezo, &mezo);
