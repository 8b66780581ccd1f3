/* SPDX-License-Identifier: Apache-2.0 */
#include "train/blocks.h"

#include <errno.h>
#include <stdlib.h>

#include "base/mem.h"
#include "checkpoint/manifest.h"
#include "checkpoint/overlay.h"
#include "train/saves.h"

uint64_t mt_blocks_end_of(const struct mt_inputs *in, const struct mt_train_state *st)
{
    struct mt_blocks b;
    int rc = mt_blocks_init(&b, in->cfg, in->hf.n_layers, NULL);
    return rc || !b.n ? 0 : mt_blocks_end(&b, st->blocks.phase);
}

/* The sums that the next phase must find of what was frozen in this one; what was trained is in the overlay, which was
 * read back. NULL: no memory. */
static cJSON *sums_of(struct mt_session *s, size_t learner)
{
    const struct mt_layout *l = mt_setup_layout_of(s->setup, learner);
    const uint64_t *sum = mt_session_base_sums(s, learner);
    cJSON *all = cJSON_CreateObject();
    bool whole = all != NULL;
    for (size_t i = 0; i < l->n_tensors && whole; i++) {
        char text[MT_SUM_TEXT];
        if (!l->tensors[i].in_base)
            continue;
        cJSON *one = cJSON_CreateObject();
        mt_sum_format(text, sum[i]);
        whole = mt_json_add(all, l->tensors[i].name, one) && cJSON_AddStringToObject(one, "xxh3", text);
    }
    if (!whole)
        cJSON_Delete(all);
    return whole ? all : NULL;
}

static int write_overlay(const struct mt_train_params *p, char **name, struct mt_err *err)
{
    const struct mt_inputs *in = &p->session->setup->in[p->learner];
    const struct mt_cfg_list *always = &in->cfg->train.blocks_always;
    struct mt_overlay_write o = {.dir = p->dir,
                                 .parent = p->state->blocks.overlay,
                                 .base_dir = in->model_dir,
                                 .phase = p->state->blocks.phase + 1,
                                 .layout = mt_setup_layout_of(p->session->setup, p->learner),
                                 .planes = p->session->planes,
                                 .always = (const char *const *)always->items,
                                 .n_always = (size_t)always->n};
    return mt_overlay_write(&o, name, err);
}

int mt_blocks_finish(const struct mt_train_params *p, struct mt_err *err)
{
    struct mt_train_state *st = p->state;
    char *name = NULL;
    bool lost;
    mt_train_phase(p->control, "writing a trained block");
    int rc = p->output ? mt_output_find(p->output, st->lineage.run, err) : 0;
    if (!rc)
        rc = mt_saves_settle(p, true, &lost, err);
    if (!rc)
        rc = mt_session_sum_base(p->session, err);
    if (!rc)
        rc = mt_saves_note_findings(st, p->session->setup, err);
    if (!rc && atomic_load(&p->control->stop))
        rc = mt_fail(err, MT_ERR_RUNTIME, -ECANCELED, "the run was asked to stop before the next block");
    if (!rc)
        rc = write_overlay(p, &name, err);
    mt_json_begin();
    cJSON *sums = rc ? NULL : sums_of(p->session, p->learner);
    if (!rc && !sums)
        rc = mt_fail_nomem(err, "sums of the base", 1);
    if (rc) {
        free(name);
        return rc;
    }
    cJSON_Delete(st->frozen);
    free(st->blocks.overlay);
    st->frozen = sums;
    st->blocks.overlay = name;
    st->blocks.updates = st->updates = mt_engine_updates(p->session->engine, p->learner);
    st->blocks.phase++;
    mt_overlay_prune(p->dir, name);
    return 0;
}
