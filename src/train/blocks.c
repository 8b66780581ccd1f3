/* SPDX-License-Identifier: Apache-2.0 */
#include "train/blocks.h"

#include <stdlib.h>

#include "base/fs.h"
#include "base/log.h"
#include "base/mem.h"
#include "checkpoint/checkpoint.h"
#include "checkpoint/manifest.h"
#include "checkpoint/overlay.h"
#include "train/saves.h"

uint64_t mt_blocks_end_of(const struct mt_inputs *in, const struct mt_train_state *st)
{
    struct mt_blocks b;
    uint64_t merge_every = (uint64_t)in->cfg->adapter.merge_every;
    if (in->layout->share > 1)
        return (uint64_t)in->cfg->train.delink_at;
    if (merge_every)
        return (st->blocks.phase + 1) * merge_every;
    int rc = mt_blocks_init(&b, in->cfg, in->hf.n_layers, NULL);
    return rc || !b.n ? 0 : mt_blocks_end(&b, st->blocks.phase);
}

/* The sums that the next phase must find of what did not change in this one; what did is in the overlay, which was read
 * back. NULL: no memory. */
static cJSON *sums_of(struct mt_session *s, size_t learner)
{
    const struct mt_layout *l = mt_setup_layout_of(s->setup, learner);
    const uint64_t *sum = mt_session_base_sums(s, learner);
    mt_json_begin();
    MT_JSON_FREED cJSON *all = cJSON_CreateObject();
    for (size_t i = 0; i < l->n_tensors; i++) {
        char text[MT_SUM_TEXT];
        mt_sum_format(text, sum[i]);
        if (l->tensors[i].in_base && !l->tensors[i].param->adapter)
            mt_json_add(all, l->tensors[i].name, mt_json_put(NULL, "xxh3=%s", text));
    }
    return mt_json_complete() ? MT_GIVE(all) : NULL;
}

static void tell_rounding(const struct mt_merge *m)
{
    double kept, error;
    if (mt_rounded_share(mt_merge_rounding(m), &kept, &error))
        mt_info("adapters are merged: of what they add, %.1f%% is left in bf16, with an error of %.1f%% of its norm", 100 * kept,
                100 * error);
}

static void tell_block_rounding(const struct mt_overlay_rounding *r, const char *model)
{
    double kept, error;
    if (!mt_rounded_share(&r->all, &kept, &error))
        return;
    mt_info("a block is done, and rounded to bf16, as the model's files are: %.1f%% of what it learned is left, with an error of "
            "%.1f%% of its norm, least of %s (%.1f%%); a model in f32 keeps all of it (megatrain export %s NEW --dtype f32, then "
            "model.path = NEW)", 100 * kept, 100 * error, r->worst, 100 * r->least, model);
}

static struct mt_overlay_write next_overlay(const struct mt_train_params *p)
{
    return (struct mt_overlay_write){.dir = p->dir, .parent = p->state->blocks.overlay,
                                     .base_dir = p->session->setup->in[p->learner].model_dir,
                                     .base = &p->session->base, .phase = p->state->blocks.phase + 1};
}

/* Adds the adapters that are in the folder to the weights of the phase. */
static int merge(const struct mt_train_params *p, const char *adapters, char **name, struct mt_err *err)
{
    const struct mt_inputs *in = &p->session->setup->in[p->learner];
    struct mt_overlay_write o = next_overlay(p);
    o.files = p->files;
    o.shard_bytes = in->cfg->checkpoint.shard_size;
    int rc = mt_merge_open(&o.merge, adapters, &p->session->base, in->weights_dir, false, err);
    if (!rc) {
        mt_merge_keep_dtypes(o.merge);
        rc = mt_overlay_write(&o, name, err);
    }
    if (!rc)
        tell_rounding(o.merge);
    mt_merge_close(&o.merge);
    return rc;
}

static int write_merged(const struct mt_train_params *p, char **name, struct mt_err *err)
{
    const struct mt_inputs *in = &p->session->setup->in[p->learner];
    const struct mt_checkpoint_save s = {.model_dir = in->model_dir, .base_model = in->weights_dir, .files = p->files,
                                         .layout = mt_setup_layout_of(p->session->setup, p->learner),
                                         .planes = p->session->planes};
    char adapters[4096];
    int rc = mt_path_printf(adapters, sizeof(adapters), "%s/overlay-adapters.tmp", p->dir)
          ?: mt_remove_tree(adapters, err)
          ?: mt_checkpoint_write_adapters(&s, adapters, err)
          ?: merge(p, adapters, name, err);
    mt_remove_tree(adapters, NULL);
    return rc;
}

static int write_overlay(const struct mt_train_params *p, char **name, struct mt_err *err)
{
    const struct mt_inputs *in = &p->session->setup->in[p->learner];
    const struct mt_cfg_list *always = &in->cfg->train.blocks_always;
    struct mt_overlay_rounding rounding = {.worst = NULL};
    struct mt_overlay_write o = next_overlay(p);
    o.rounding = &rounding;
    o.layout = mt_setup_layout_of(p->session->setup, p->learner);
    o.planes = p->session->planes;
    o.always = (const char *const *)always->items;
    o.n_always = (size_t)always->n;
    int rc = mt_overlay_write(&o, name, err);
    if (!rc)
        tell_block_rounding(&rounding, in->cfg->model.path);
    return rc;
}

int mt_blocks_finish(const struct mt_train_params *p, struct mt_err *err)
{
    struct mt_train_state *st = p->state;
    MT_FREED char *name = NULL;
    bool lost;
    mt_train_phase(p->control, "writing a trained block");
    int rc = mt_saves_find_folder(p, err)
          ?: mt_saves_settle(p, MT_SETTLE_WAIT, &lost, err)
          ?: mt_session_sum_base(p->session, err)
          ?: mt_saves_note_findings(st, p->session->setup, err);
    if (!rc && mt_train_is_stopped(p->control, p->learner))
        rc = mt_fail(err, MT_ERR_RUNTIME, -ECANCELED, "the run was asked to stop before the next block");
    bool merges = p->session->setup->in[p->learner].cfg->adapter.merge_every;
    rc = rc ?: merges ? write_merged(p, &name, err) : write_overlay(p, &name, err);
    cJSON *sums = rc ? NULL : sums_of(p->session, p->learner);
    if (!sums)
        return rc ?: mt_fail_nomem(err, "sums of the base", 1);
    cJSON_Delete(st->frozen);
    free(st->blocks.overlay);
    st->frozen = sums;
    st->blocks.overlay = MT_GIVE(name);
    st->blocks.updates = st->updates = mt_engine_updates(p->session->engine, p->learner);
    st->blocks.phase++;
    mt_overlay_prune(p->dir, st->blocks.overlay);
    return 0;
}
