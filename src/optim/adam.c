/* SPDX-License-Identifier: Apache-2.0 */
#include "optim/adam.h"

#include <math.h>

#include "base/isa.h"
#include "optim/adam_kernel.h"
#include "optim/optimizer.h"

const char *mt_isa_name(enum mt_isa isa)
{
    static const char *const names[] = {"auto", "scalar", "avx2", "avx512"};
    return names[isa];
}

bool mt_isa_available(enum mt_isa isa)
{
    switch (isa) {
    case MT_ISA_AVX512:
        return mt_has_avx512();
    case MT_ISA_AVX2:
        return __builtin_cpu_supports("avx2");
    default:
        return true;
    }
}

enum mt_isa mt_isa_best(void)
{
    return mt_isa_available(MT_ISA_AVX512) ? MT_ISA_AVX512
           : mt_isa_available(MT_ISA_AVX2) ? MT_ISA_AVX2
                                                 : MT_ISA_SCALAR;
}

static mt_adam_fn kernel_of(enum mt_isa isa)
{
    if (isa == MT_ISA_AUTO)
        isa = mt_isa_best();
    return isa == MT_ISA_AVX512 ? mt_adam_avx512 : isa == MT_ISA_AVX2 ? mt_adam_avx2 : mt_adam_scalar;
}

static struct mt_adam_scalars scalars_of(const struct mt_adam *a)
{
    double bc1 = 1 - pow(a->beta1, (double)a->t), bc2 = 1 - pow(a->beta2, (double)a->t);
    return (struct mt_adam_scalars){
        .clip = a->clip,
        .one_minus_beta1 = (float)(1 - a->beta1),
        .beta2 = (float)a->beta2,
        .one_minus_beta2 = (float)(1 - a->beta2),
        .decay = (float)(1 - a->lr * a->weight_decay),
        .step_size = (float)(a->lr / bc1),
        .sqrt_bc2 = (float)sqrt(bc2),
        .eps = (float)a->eps,
    };
}

uint64_t mt_adam_run(const struct mt_adam *a, enum mt_isa isa)
{
    struct mt_adam_scalars s = scalars_of(a);
    return kernel_of(isa)(a, &s, 0, a->n);
}

enum { BETA1, BETA2, EPS, N_KEYS };
static const struct mt_optimizer_key keys[] = {
    [BETA1] = MT_OPTIMIZER_KEY("beta1", 0.9, 0, 0.999999, "Decay of the first moment."),
    [BETA2] = MT_OPTIMIZER_KEY("beta2", 0.999, 0, 0.9999999, "Decay of the second moment."),
    [EPS] = MT_OPTIMIZER_KEY("eps", 1e-8, 0, 1, "Added outside the square root."),
};

static uint64_t update(const struct mt_optimizer *o, const struct mt_update *u, enum mt_isa isa)
{
    struct mt_adam a = {
        .n = u->n,
        .hi = u->hi,
        .lo = u->lo,
        .m = u->state[0],
        .v = u->state[1],
        .grad = u->grad,
        .state_dtype = o->state_dtype,
        .grad_dtype = u->grad_dtype,
        .lr = u->lr,
        .beta1 = u->keys[BETA1],
        .beta2 = u->keys[BETA2],
        .eps = u->keys[EPS],
        .weight_decay = u->weight_decay,
        .t = u->t,
        .clip = u->clip,
    };
    return mt_adam_run(&a, isa);
}

#define ADAMW(dtype_, bytes_)                                                                                      \
    {                                                                                                              \
        .type = "adamw", .title = "AdamW", .state_dtype = dtype_, .grain = 1, .n_states = 2, .n_keys = N_KEYS,     \
        .keys = keys, .update = update,                                                                            \
        .state = {{.name = "exp_avg", .use = "first moments", .dtype = dtype_, .block = 1, .block_bytes = bytes_}, \
                  {.name = "exp_avg_sq", .use = "second moments", .dtype = dtype_, .block = 1,                     \
                   .block_bytes = bytes_}},                                                                        \
    }
const struct mt_optimizer mt_adamw = ADAMW(MT_F32, 4);
static const struct mt_optimizer adamw_bf16 = ADAMW(MT_BF16, 2);
MT_OPTIMIZER(adamw, &mt_adamw, &adamw_bf16);
