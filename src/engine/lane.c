/* SPDX-License-Identifier: Apache-2.0 */
#include "engine/lane.h"

#include <stdlib.h>

#include "base/mem.h"
#include "engine/share.h"

/* Device pools get buffers; host pools those of all lanes. */
static int alloc_pools(struct mt_lane *lane, int number, const struct mt_binding *shared,
                       const struct mt_engine_plan *plan, struct mt_err *err)
{
    struct mt_binding *b = &lane->b;
    size_t bytes[MT_N_POOLS];
    int rc = 0;
    mt_program_buffer_bytes(&plan->program, number, bytes);
    for (int i = 0; i < MT_N_POOLS && !rc; i++) {
        int n = bytes[i] ? plan->program.n_buffers[number][i] : 0;
        b->buffers[i] = mt_pools[i].device ? mt_calloc((size_t)n + 1, sizeof(void *)) : shared->buffers[i];
        if (mt_pools[i].device && !b->buffers[i])
            return mt_fail_nomem(err, "device pools", (size_t)n * sizeof(void *));
        for (int k = 0; k < n && mt_pools[i].device && !rc; k++) /* NULL at the end */
            rc = mt_device_alloc(b->dev, bytes[i], mt_pools[i].name, &b->buffers[i][k], err);
    }
    return rc;
}

int mt_lane_init(struct mt_lane *lane, const struct mt_binding *shared, mt_device *dev, int number,
                 const struct mt_engine_params *p, const struct mt_engine_plan *plan, struct mt_err *err)
{
    struct mt_model_params mp = mt_engine_model_params(p);
    if (!mt_engine_by_data(p) && plan->units[p->layout->n_units - 1].lane != number)
        mp.top = 0; /* without the head */
    *lane = (struct mt_lane){.b = *shared};
    lane->b.dev = dev;
    for (int i = 0; i < MT_N_POOLS; i++)
        lane->b.buffers[i] = NULL;
    lane->resident = mt_calloc(p->layout->n_units, sizeof(*lane->resident));
    if (!lane->resident)
        return mt_fail_nomem(err, "the engine", p->layout->n_units);
    int rc = mt_model_create(&lane->b.model, dev, &mp, err);
    return rc ?: alloc_pools(lane, number, shared, plan, err);
}

void mt_lane_finish(struct mt_lane *lane)
{
    struct mt_binding *b = &lane->b;
    if (b->dev)
        mt_device_sync(b->dev, NULL);
    mt_model_destroy(&b->model);
    for (int i = MT_N_POOLS - 1; i >= 0; i--) {
        size_t n = 0;
        if (!mt_pools[i].device)
            continue;
        while (b->buffers[i] && b->buffers[i][n])
            n++;
        while (n) /* the newest first: thousands that end where free memory begins are freed quickly */
            mt_device_free(b->dev, b->buffers[i][--n]);
        free(b->buffers[i]);
    }
    free(lane->resident);
    *lane = (struct mt_lane){.b.dev = NULL};
}
