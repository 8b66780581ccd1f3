/* SPDX-License-Identifier: Apache-2.0 */
/* An engine over a device that only counts: submits single instructions, to learn what they cost. */
#include <stdlib.h>

#include "base/mem.h"
#include "engine/engine_priv.h"

/* Operands of one instruction never share a buffer, so a buffer an operand is enough. */
static int make_buffers(mt_engine *e, struct mt_err *err)
{
    const size_t apart = (size_t)1 << 36; /* addresses, not memory */
    int rc = 0;
    for (int i = 0; i < MT_N_POOLS && !rc; i++) {
        e->buffers[i] = mt_calloc(MT_MAX_OPERANDS + 1, sizeof(void *));
        if (!e->buffers[i])
            return mt_fail_nomem(err, "device pools", MT_MAX_OPERANDS * sizeof(void *));
        for (int k = 0; k < MT_MAX_OPERANDS && !rc; k++)
            rc = mt_device_alloc(e->dev, apart, mt_pools[i].name, &e->buffers[i][k], err);
    }
    return rc;
}

int mt_engine_create_dry(mt_engine **out, const struct mt_engine_params *p, struct mt_err *err)
{
    mt_engine *e = mt_calloc(1, sizeof(*e));
    if (!e)
        return mt_fail_nomem(err, "the engine", sizeof(*e));
    e->p = *p;
    e->dev = p->dev;
    e->layout = p->layout;
    mt_exec_init(e);
    struct mt_model_params mp = mt_engine_model_params(p);
    int rc = mt_model_create(&e->model, e->dev, &mp, err);
    if (!rc)
        rc = make_buffers(e, err);
    if (rc) {
        mt_engine_destroy(&e);
        return rc;
    }
    *out = e;
    return 0;
}

int mt_engine_dry_upload(mt_engine *e, const struct mt_batch *micro, size_t n, struct mt_err *err)
{
    return mt_model_upload(e->model, micro, n, 1, err);
}

int mt_engine_dry_submit(mt_engine *e, const struct mt_program *prog, const struct mt_instr *in,
                         struct mt_err *err)
{
    struct mt_instr own = *in;
    for (int k = 0; k < own.n_operands; k++)
        own.operand[k].buffer = (int16_t)k;
    return mt_exec_submit(e, prog, &own, err);
}
