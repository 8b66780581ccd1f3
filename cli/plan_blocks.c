/* SPDX-License-Identifier: Apache-2.0 */
/* plan of a run by blocks of layers, or that merges its adapters: what phases and switches take, beside the phase that
 * the plan shows. */
#include <stdio.h>

#include "base/mem.h"
#include "config/blocks.h"
#include "plan_print.h"

enum { LOOKED_AT = 5 }; /* blocks; between them times are nearly straight lines */

static uint64_t phase_of(const struct mt_blocks *b, uint64_t block)
{
    uint64_t phase = 0;
    while (mt_blocks_at(b, phase) != block)
        phase++;
    return phase;
}

static int try_block(double *seconds, double *written, const struct plan_view *v, uint64_t phase, struct mt_err *err)
{
    const struct mt_resumed resumed = {.phase = phase};
    MT_CLOSED_BY(mt_layout_destroy) struct mt_layout *layout = NULL, *halves = NULL;
    struct mt_plan_request r = v->request;
    MT_CLOSED_BY(mt_plan_choice_finish) struct mt_plan_choice c = {.layout = NULL};
    int rc = mt_plan_lay_out(&layout, &halves, v->cfg, &v->hf, v->model_dir, &resumed, err);
    r.layout = layout;
    r.halves = halves;
    rc = rc ?: mt_resolve(&c, &r, err);
    if (!rc) {
        *seconds = c.sim.seconds;
        *written = c.sim.bytes[MT_Q_DISK_WRITE];
    }
    return rc;
}

/* What a switch reads: all weights that are not read in place. */
static double loaded_bytes(const struct mt_plan_choice *c)
{
    double sum = 0;
    for (int k = 0; k < MT_PLANE_STATE; k++)
        sum += k == MT_PLANE_LO ? 0 : (double)(c->plane[k].host_bytes + c->plane[k].disk_bytes);
    return sum;
}

int plan_blocks(struct plan_blocks *out, const struct plan_view *v, struct mt_err *err)
{
    struct mt_blocks b;
    double seconds[LOOKED_AT], written[LOOKED_AT];
    uint64_t at[LOOKED_AT];
    int rc = mt_blocks_init(&b, v->cfg, v->hf.n_layers, err);
    *out = (struct plan_blocks){.n = b.n, .steps = b.steps};
    if (rc || !b.n)
        return rc;
    size_t n = MT_MIN((size_t)LOOKED_AT, (size_t)b.n);
    for (size_t i = 0; i < n && !rc; i++) {
        at[i] = n > 1 ? i * (b.n - 1) / (n - 1) : 0;
        rc = try_block(&seconds[i], &written[i], v, phase_of(&b, at[i]), err);
    }
    if (rc)
        return rc;
    out->seconds = seconds[0];
    out->written = written[0];
    for (size_t i = 1; i < n; i++) /* blocks (at[i - 1], at[i]], on a straight line */
        for (uint64_t k = at[i - 1] + 1; k <= at[i]; k++) {
            double x = (double)(k - at[i - 1]) / (double)(at[i] - at[i - 1]);
            out->seconds += seconds[i - 1] + x * (seconds[i] - seconds[i - 1]);
            out->written += written[i - 1] + x * (written[i] - written[i - 1]);
        }
    out->seconds /= (double)b.n;
    out->written /= (double)b.n;
    out->overlay_bytes = (double)v->layout->n_trained * (double)mt_dtype_size(MT_BF16);
    out->read_bytes = loaded_bytes(&v->choice);
    return 0;
}

void plan_print_blocks(const struct plan_view *v)
{
    struct plan_blocks b;
    const struct mt_numerics *n = &v->choice.numerics;
    struct mt_err err = {0};
    if (plan_blocks(&b, v, &err)) {
        printf("Blocks    another block does not fit: %s\n", err.msg);
        return;
    }
    if (!b.n)
        return;
    printf("Blocks    All of the above is of the lowest block, whose step takes longest; the others fit, too.\n"
           "          Mean of all %llu: %.4g s a step, %.0f tokens/s, %.4g GB written to drives a step.\n"
           "          A switch, every %llu steps, writes %.4g GB and reads %.4g GB.\n",
           (unsigned long long)b.n, b.seconds, (double)(n->rows_per_step * n->seq_len) / b.seconds, b.written * 1e-9,
           (unsigned long long)b.steps, b.overlay_bytes * 1e-9, b.read_bytes * 1e-9);
}

void plan_print_merges(const struct plan_view *v)
{
    long every = (long)v->cfg->adapter.merge_every;
    if (every)
        printf("Merges    Every %ld steps: %.4g GB written to an overlay beside the checkpoints,\n"
               "          which stays as long as one of them names it (weights in bf16).\n",
               every, (double)mt_plan_merged_bytes(v->layout) * 1e-9);
}
