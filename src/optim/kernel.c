/* SPDX-License-Identifier: Apache-2.0 */
#include "optim/kernel.h"

#include "base/isa.h"
#include "optim/kernel_body.h"

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
        return mt_has_avx2();
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

uint64_t mt_kernel_run(const struct mt_kernel *k, enum mt_isa isa)
{
    if (isa == MT_ISA_AUTO)
        isa = mt_isa_best();
    return isa == MT_ISA_AVX512 ? mt_kernel_avx512(k) : isa == MT_ISA_AVX2 ? mt_kernel_avx2(k) : mt_kernel_scalar(k);
}

/* Of states and of masters. Tensors of a run are fewer than 2^24, and its updates fewer than 2^32. */
static const uint64_t STREAM = UINT64_C(0xA5) << 56, MASTER_STREAM = UINT64_C(0xA6) << 56;

struct mt_kernel mt_kernel_of(const struct mt_update *u)
{
    return (struct mt_kernel){
        .n = u->n,
        .hi = u->hi,
        .lo = u->lo,
        .lo8 = u->lo8,
        .master = u->master,
        .grad = u->grad,
        .grad_dtype = u->along ? MT_F32 : u->grad_dtype,
        .along = u->along,
        .s = {.clip = u->clip, .keep = (float)(1 - u->lr * u->weight_decay)},
        .stochastic = u->stochastic,
        .seed = u->seed,
        .stream = STREAM | u->t << 24 | u->tensor,
        .master_stream = MASTER_STREAM | u->t << 24 | u->tensor,
        .first = u->first,
    };
}

size_t mt_block8_bytes(const struct mt_state_shape *t)
{
    return t->n_dims > 1 ? (t->n + MT_BLOCK8 - 1) / MT_BLOCK8 * MT_BLOCK8_BYTES : 0;
}

size_t mt_block8_rest_bytes(const struct mt_state_shape *t)
{
    return t->n_dims > 1 ? 0 : t->n * sizeof(float);
}

void mt_kernel_states(struct mt_kernel *k, const struct mt_update *u, enum mt_state_type type, int n)
{
    bool rest = type == MT_STATE_8BIT && !u->state[0];
    k->state_type = rest ? MT_STATE_F32 : type;
    for (int i = 0; i < n; i++)
        k->state[i] = u->state[rest ? n + i : i];
}
