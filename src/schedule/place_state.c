/* SPDX-License-Identifier: Apache-2.0 */
/* The placer's state as it begins. */
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "schedule/placer.h"

enum { NEVER = MT_PLACE_NEVER, NONE = MT_NO_ENTRY, BLOCK = MT_PLACE_BLOCK };

/* An instruction of a lane uses an object: notes its next uses, and of a write that the others' copies are old. */
static void find_next_use(struct mt_placer *p, size_t i, int k, int *next)
{
    const struct mt_instr *in = &p->draft->instrs[i];
    const struct mt_operand *op = &in->operand[k];
    int *of = &next[(size_t)op->object * (size_t)p->n_lanes];
    size_t at = i * MT_MAX_OPERANDS + (size_t)k;
    p->next_use[at] = of[in->lane];
    for (int lane = 0; op->access & MT_WRITE && lane < p->n_lanes; lane++) {
        if (lane == in->lane)
            continue;
        p->leaves[at] |= of[lane] != NEVER;
        of[lane] = NEVER;
    }
    of[in->lane] = (int)i;
}

static bool find_next_uses(struct mt_placer *p)
{
    struct mt_program *d = p->draft;
    size_t n = d->n_objects * (size_t)p->n_lanes;
    int *next = mt_arrays_add(&p->arrays, n, sizeof(int));
    p->next_use = mt_arrays_add(&p->arrays, d->n_instrs * MT_MAX_OPERANDS, sizeof(int));
    p->leaves = mt_arrays_add(&p->arrays, d->n_instrs * MT_MAX_OPERANDS, sizeof(bool));
    if (p->arrays.failed)
        return false;
    for (size_t o = 0; o < n; o++)
        next[o] = NEVER;
    for (size_t i = d->n_instrs; i-- > 0;)
        for (int k = 0; k < d->instrs[i].n_operands; k++)
            find_next_use(p, i, k, next);
    return true;
}

static bool alloc_lane(struct mt_placer *p, int lane)
{
    struct mt_place_lane *l = &p->lane[lane];
    size_t bytes[MT_N_POOLS];
    mt_program_buffer_bytes(p->params, lane, bytes);
    l->first_load_release = l->last_compute = NONE;
    for (int i = 0; i < MT_N_POOLS; i++) {
        int n = bytes[i] && (mt_pools[i].device || !lane) ? p->params->n_buffers[lane][i] : 0;
        p->draft->pool[lane][i] = (struct mt_pool_shape){n, bytes[i]};
        l->buffers[i] = mt_arrays_add(&p->arrays, (size_t)n, sizeof(struct mt_place_buffer));
        l->until[i] = mt_arrays_add(&p->arrays, 2 * (size_t)n, sizeof(int));
        l->best[i] = mt_arrays_add(&p->arrays, mt_div_up((size_t)n, BLOCK), sizeof(struct mt_place_best));
        if (p->arrays.failed)
            return false;
        l->used[i] = l->until[i] + n;
        for (int k = 0; k < n; k++) {
            l->buffers[i][k] = (struct mt_place_buffer){.object = NONE, .store = MT_NO_KEY};
            l->until[i][k] = NEVER;
            l->used[i][k] = NONE;
        }
    }
    return true;
}

/* The lists by unit. */
static bool alloc_units(struct mt_placer *p)
{
    size_t n = p->draft->n_units;
    int before[MT_MAX_LANES][2];
    p->first_compute = mt_arrays_add(&p->arrays, 4 * n, sizeof(int));
    p->left = mt_arrays_add(&p->arrays, n, sizeof(*p->left));
    if (p->arrays.failed)
        return false;
    p->update = p->first_compute + n;
    p->ahead = p->update + n;
    p->half_computed = p->ahead + n;
    memset(before, 0xff, sizeof(before)); /* NONE */
    for (size_t u = 0; u < n; u++) {
        int *of = before[p->params->by_data ? 0 : p->params->units[u].lane];
        p->first_compute[u] = p->half_computed[u] = p->update[u] = NONE;
        p->left[u] = MT_NO_KEY;
        p->ahead[u] = of[p->n_lanes > 1 ? 0 : 1];
        of[1] = of[0];
        of[0] = (int)u;
    }
    return true;
}

static bool alloc_objects(struct mt_placer *p)
{
    size_t n = p->draft->n_objects, copies = n * (size_t)p->n_lanes;
    p->objects = mt_arrays_add(&p->arrays, n, sizeof(*p->objects));
    p->copies = mt_arrays_add(&p->arrays, copies, sizeof(*p->copies));
    if (p->arrays.failed)
        return false;
    for (size_t o = 0; o < n; o++)
        p->objects[o] = (struct mt_place_object){.last_write = NONE, .store = MT_NO_KEY, .gathered = NONE};
    for (size_t i = 0; i < copies; i++)
        p->copies[i] =
            (struct mt_place_copy){.buffer = NONE, .next_use = NEVER, .load = MT_NO_KEY, .loaded_by = MT_NO_KEY};
    return true;
}

bool mt_placer_alloc(struct mt_placer *p)
{
    bool ok = alloc_objects(p) && alloc_units(p) && find_next_uses(p);
    for (int lane = 0; lane < p->n_lanes && ok; lane++)
        ok = alloc_lane(p, lane);
    return ok;
}

void mt_placer_free(struct mt_placer *p)
{
    struct mt_placed_list *list[] = {&p->q.compute, &p->q.loads, &p->q.stores, &p->q.poisons, &p->q.host,
                                    &p->q.updates};
    for (size_t i = 0; i < MT_ARRAY_LEN(list); i++)
        free(list[i]->e);
    free(p->q.wait);
    free(p->q.made);
    mt_arrays_finish(&p->arrays);
}
