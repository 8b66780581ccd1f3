/* SPDX-License-Identifier: Apache-2.0 */
#include "engine/dry.h"

#include <stdlib.h>

#include "base/mem.h"
#include "engine/state.h"

struct mt_dry_engine {
    struct mt_binding b;
    enum mt_row_weights rows;
};

/* Operands of an instruction have separate buffers, so one per operand is enough. */
static int make_buffers(struct mt_binding *b, struct mt_err *err)
{
    const size_t spacing = (size_t)1 << 36; /* of addresses: no memory is allocated */
    int rc = 0;
    for (int i = 0; i < MT_N_POOLS && !rc; i++) {
        b->buffers[i] = mt_calloc(MT_MAX_OPERANDS, sizeof(void *));
        if (!b->buffers[i])
            return mt_fail_nomem(err, "device pools", MT_MAX_OPERANDS * sizeof(void *));
        for (int k = 0; k < MT_MAX_OPERANDS && !rc; k++)
            rc = mt_device_alloc(b->dev, spacing, mt_pools[i].name, &b->buffers[i][k], err);
    }
    return rc;
}

int mt_dry_engine_create(mt_dry_engine **out, const struct mt_engine_params *p, struct mt_err *err)
{
    mt_dry_engine *d = mt_calloc(1, sizeof(*d));
    if (!d)
        return mt_fail_nomem(err, "the engine", sizeof(*d));
    d->b = (struct mt_binding){
        .dev = p->dev, .layout = p->layout, .dtype = p->numerics.dtype, .grad_dtype = p->numerics.grad_dtype,
        .adapters_stay = p->placement.adapters == MT_ADAPTERS_RESIDENT,
        .noisy_loads = p->numerics.mezo.on_load};
    d->rows = mt_learner_row_weights(&p->numerics);
    struct mt_model_params mp = mt_engine_model_params(p);
    int rc = mt_model_create(&d->b.model, d->b.dev, &mp, err) ?: make_buffers(&d->b, err);
    if (rc)
        mt_dry_engine_destroy(&d);
    else
        *out = d;
    return rc;
}

void mt_dry_engine_destroy(mt_dry_engine **dry)
{
    mt_dry_engine *d = *dry;
    if (!d)
        return;
    mt_device_sync(d->b.dev, NULL);
    mt_model_destroy(&d->b.model);
    for (int i = 0; i < MT_N_POOLS; i++) {
        for (int k = 0; d->b.buffers[i] && k < MT_MAX_OPERANDS; k++)
            if (d->b.buffers[i][k])
                mt_device_free(d->b.dev, d->b.buffers[i][k]);
        free(d->b.buffers[i]);
    }
    free(d);
    *dry = NULL;
}

int mt_dry_engine_upload(mt_dry_engine *d, const struct mt_batch *micro, size_t n, struct mt_err *err)
{
    const struct mt_model_learner learner = {.rows = d->rows, .loss_scale = 1};
    return mt_model_upload(d->b.model, &(struct mt_model_step){.micro = micro, .n = n, .learner = &learner}, err);
}

int mt_dry_engine_submit(mt_dry_engine *d, const struct mt_program *prog, const struct mt_instr *in,
                         struct mt_err *err)
{
    struct mt_instr own = *in;
    for (int k = 0; k < own.n_operands; k++)
        own.operand[k].buffer = (int16_t)k;
    return mt_exec_submit(&d->b, prog, &own, err);
}
