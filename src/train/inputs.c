/* SPDX-License-Identifier: Apache-2.0 */
#include "train/inputs.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/fs.h"
#include "base/log.h"
#include "base/mem.h"
#include "checkpoint/overlay.h"
#include "config/schema.h"
#include "data/teacher.h"
#include "data/vocabulary.h"
#include "hw/hw.h"
#include "objective/policy.h"
#include "plan/resolve.h"
#include "weights/peft.h"

/* A run by blocks goes on from what it trained before. */
static int find_weights(struct mt_inputs *in, struct mt_err *err)
{
    const struct mt_resumed *r = &in->resumed;
    const char *out = in->cfg->checkpoint.dir;
    if (r->overlay)
        return mt_overlay_adopt(r->dir ? r->dir : out, r->overlay, out, in->model_dir, &in->weights_dir, err);
    in->weights_dir = strdup(in->model_dir);
    return in->weights_dir ? 0 : mt_fail_nomem(err, in->model_dir, strlen(in->model_dir));
}

static int lay_out(struct mt_inputs *in, struct mt_err *err)
{
    int rc = find_weights(in, err);
    if (!rc && in->draws)
        return mt_plan_lay_out_to_generate(&in->layout, &in->halves, in->cfg, &in->hf, in->weights_dir, err);
    return rc ? rc : mt_plan_lay_out(&in->layout, &in->halves, in->cfg, &in->hf, in->weights_dir, &in->resumed, err);
}

/* Adapters of a run that merges them belong to what others were merged into. */
static int check_adapted(const struct mt_inputs *in, struct mt_err *err)
{
    const char *path = in->cfg->adapter.path;
    MT_FREED char *overlay = NULL;
    if (*path && !in->resumed.dir)
        mt_overlay_of_adapters(&overlay, path, NULL);
    return !overlay || strstr(in->model_dir, overlay)
               ? 0
               : mt_fail(err, MT_ERR_USAGE, -EINVAL, "the adapters in %s are of %s, which others were merged into before, and not of %s: "
                         "name the folder beside that checkpoint as the model, or export the checkpoint (megatrain export), which makes "
                         "one model of all", path, overlay, in->model_dir);
}

static bool has_experts(const struct mt_hf_config *c)
{
    bool has = false;
    for (int64_t i = 0; i < c->n_layers; i++)
        has |= mt_layer_of(c, i)->is_mixture;
    return has;
}

static int open_model(struct mt_inputs *in, struct mt_err *err)
{
    int rc = mt_hf_find_model(&in->model_dir, in->cfg->model.path, err);
    rc = rc ?: mt_hf_config_read(&in->hf, in->model_dir, err);
    if (!rc && in->cfg->numerics.router_aux_loss > 0 && !has_experts(&in->hf))
        rc = mt_fail(err, MT_ERR_USAGE, -EINVAL, "train.router_aux_loss balances the experts of a mixture, and %s is none: "
                     "remove it", in->model_dir);
    rc = rc ?: check_adapted(in, err) ?: lay_out(in, err);
    if (rc)
        return rc;
    int64_t reach = in->hf.n_ropes ? mt_rope_reach(&in->hf.rope[0]) : in->hf.max_pos;
    if (in->cfg->numerics.seq_len > reach)
        mt_warn("data.seq_len = %lld is beyond the %lld tokens of the model's max_position_embeddings and rope_scaling: it has not "
                "learnt what lies farther back", (long long)in->cfg->numerics.seq_len, (long long)reach);
    if (!strcmp(in->cfg->optimizer.type, "muon") && in->cfg->model.init == MT_INIT_WEIGHTS && !in->hf.family->by_muon)
        mt_warn("optimizer.type = muon: models of this class are not known to have been trained with Muon; fine-tuning one that "
                "AdamW has trained is worse with it than with AdamW (arXiv 2605.10468)");
    return 0;
}

/* What adapters add to a packed matrix would be lost when it is packed again. */
static int check_merging(const struct mt_inputs *in, struct mt_err *err)
{
    const struct mt_layout *l = in->layout;
    for (size_t i = 0; in->cfg->adapter.merge_every && i < l->n_tensors; i++)
        if (l->tensors[i].packed && l->tensors[i].param->adapter)
            return mt_fail(err, MT_ERR_USAGE, -EINVAL, "adapter.merge_every: %s is %s in the model's files, and what adapters add "
                           "would be lost in packing it again: train on the model in bf16, or set adapter.merge_every = 0",
                           l->tensors[i].name, mt_packed_names[l->tensors[i].packed]);
    return 0;
}

/* A format of merged weights is the base's own. */
static int check_merge_aware(const struct mt_inputs *in, struct mt_err *err)
{
    static const enum mt_packed formats[] = {[MT_MERGE_NF4] = MT_PACKED_NF4, [MT_MERGE_MXFP4] = MT_PACKED_MXFP4,
                                             [MT_MERGE_FP8] = MT_PACKED_FP8, [MT_MERGE_INT4] = MT_PACKED_INT4,
                                             [MT_MERGE_NVFP4] = MT_PACKED_NVFP4};
    const struct mt_layout *l = in->layout;
    enum mt_merge_aware mode = l->adapter_default.merge;
    bool recomputed = l->adapter_default.merge_scale == MT_SCALES_RECOMPUTED, any = false;
    for (size_t i = 0; mode > MT_MERGE_BF16 && i < l->n_tensors; i++) {
        const struct mt_tensor *t = &l->tensors[i];
        bool kept = t->packed >= MT_N_PACKABLE; /* a kind of FP8 whose scales are not made here */
        enum mt_packed f = kept && mt_packed_formats[t->packed].bytes ? MT_PACKED_FP8 : t->packed;
        if (t->adapter || !t->param->adapter || !f)
            continue;
        any = true;
        bool zeros = mt_scale_has_zeros(t->scale), read_only = zeros || (kept && f == t->packed);
        if (f != formats[mode] || zeros)
            return mt_fail(err, MT_ERR_USAGE, -EINVAL, "adapter.merge_aware = %s: %s is %s%s: %s",
                           mt_packed_names[formats[mode]], t->name, mt_packed_names[t->packed],
                           zeros ? " with zero points" : "", read_only ? "set it to bf16" : "name that format, or bf16");
        if (recomputed && (kept || (t->scale != mt_packed_formats[f].scale && t->scale != MT_SCALE_E4M3)))
            return mt_fail(err, MT_ERR_USAGE, -EINVAL, "adapter.merge_scale = recomputed: %s is %s with scales that can only be "
                           "kept (nested, of other blocks than 128x128, or of another type): set it to frozen", t->name,
                           mt_packed_names[t->packed]);
    }
    if (mode > MT_MERGE_BF16 && !any)
        return mt_fail(err, MT_ERR_USAGE, -EINVAL, "adapter.merge_aware = %s, but no matrix with an adapter is packed so: set "
                       "model.base_dtype, or adapter.merge_aware = bf16", mt_packed_names[formats[mode]]);
    return 0;
}

int mt_inputs_freeze_all(struct mt_config *cfg, const char *why, struct mt_err *err)
{
    int rc = mt_config_override(cfg, "train.blocks", "off", why, err)
          ?: mt_config_override(cfg, "model.share_layers", "1", why, err);
    bool as_trained = cfg->adapter.kind != MT_ADAPTER_NONE || (cfg->model.base_dtype && cfg->model.freeze.n) ||
                      cfg->numerics.mezo.on_load;
    return rc || as_trained ? rc : mt_config_override(cfg, "model.freeze", "*", why, err);
}

static int open_set(struct mt_inputs *in, mt_dataset **out, const struct mt_cfg_list *files, const char *key,
                    struct mt_err *err)
{
    char cache[4096];
    MT_FREED int *cpus = NULL;
    int n = 1, rc = mt_hw_cores(&cpus, &n, err);
    if (rc)
        return rc;
    if (in->cfg->placement.threads != MT_AUTO)
        n = (int)in->cfg->placement.threads;
    if (!strcmp(in->cfg->data.cache_dir, "auto"))
        mt_cache_dir(cache, sizeof(cache));
    else
        mt_path_printf(cache, sizeof(cache), "%s", in->cfg->data.cache_dir);
    return mt_dataset_open(out,
                           &(struct mt_dataset_params){
                               .files = files,
                               .key = key,
                               .columns = &in->cfg->data.columns,
                               .max_samples = (size_t)in->cfg->data.max_samples,
                               .format = in->cfg->data.format,
                               .tokenizer = in->cfg->data.tokenizer,
                               .overlong = in->cfg->data.overlong,
                               .max_untrained = in->cfg->data.max_untrained,
                               .seq_len = (size_t)in->cfg->numerics.seq_len,
                               .vocab = (size_t)in->hf.vocab,
                               .cache_dir = cache,
                               .model_dir = in->model_dir,
                               .template_ = in->cfg->data.template_,
                               .train_on = in->cfg->data.train_on,
                               .n_processes = n,
                               .prepared_only = in->prepared_only,
                               .policy = &in->numerics.objective_keys.policy,
                           },
                           err);
}

/* Before data are read, which may take minutes. A run that goes on has it in its checkpoint. */
static int check_reference(const struct mt_inputs *in, struct mt_err *err)
{
    const char *what = in->cfg->preference.reference;
    const struct mt_objective *o = mt_objective_of(&in->numerics);
    if (!strcmp(what, "start"))
        return 0;
    if (!o->reference)
        return mt_fail(
            err, MT_ERR_USAGE, -EINVAL,
            "preference.reference = %s: preference.loss = %s needs no reference: remove the "
            "key",
            what, in->cfg->preference.loss);
    if (in->resumed.dir)
        return 0;
    if (!mt_path_exists(what))
        return mt_fail(
            err, MT_ERR_USAGE, -ENOENT,
            "preference.reference = %s: there is no such folder or file (or start: the model "
            "as training begins)",
            what);
    return !mt_is_dir(what) && o->mismatched
               ? mt_fail(err, MT_ERR_USAGE, -EINVAL,
                         "preference.reference = %s: %s needs log-probabilities of mismatched "
                         "answers, which no "
                         "file has: give the folder of the reference",
                         what, in->cfg->preference.loss)
               : 0;
}

static int open_data(struct mt_inputs *in, enum mt_inputs_use use, struct mt_err *err)
{
    const char *eval = in->cfg->data.eval;
    bool eval_file = eval[0] && mt_key_is_path(mt_key_find("data", "eval"), eval, eval);
    char *item = in->cfg->data.eval;
    struct mt_cfg_list list = {&item, 1};
    bool sampled = !in->cfg->data.train.n && in->cfg->policy.rollouts[0]; /* in rounds, which are yet to come */
    bool train = use == MT_RUN_TRAIN ? !sampled : !eval_file;
    if (train && !in->cfg->data.train.n)
        return mt_fail(err, MT_ERR_USAGE, -EINVAL, "data.train is not set: it names the files to train on");
    int rc = train ? open_set(in, &in->data, &in->cfg->data.train, "data.train", err) : 0;
    if (!rc && eval_file)
        rc = open_set(in, &in->eval_data, &list, "data.eval", err);
    if (!rc && train)
        rc = mt_dataset_split(in->data, eval_file ? "" : eval, &in->split, &in->held_out, err);
    return rc;
}

int mt_inputs_tokenizer_hash(uint64_t *out, const struct mt_inputs *in, struct mt_err *err)
{
    *out = 1;
    return strcmp(in->cfg->data.tokenizer, "byte") ? mt_vocabulary_hash(out, in->model_dir, err) : 0;
}

static int open_teacher(struct mt_inputs *in, struct mt_err *err)
{
    struct mt_teacher_params p = {.path = in->cfg->distill.teacher,
                                  .data = in->data,
                                  .top = (size_t)in->numerics.objective_keys.top,
                                  .vocab = (size_t)in->hf.vocab};
    if (!mt_objective_of(&in->numerics)->teacher)
        return 0;
    int rc = mt_inputs_tokenizer_hash(&p.tokenizer, in, err);
    return rc ? rc : mt_teacher_open(&in->teacher, &p, err);
}

/* The first file of rated answers, or NULL. */
static const struct mt_data_source *rated_source(const mt_dataset *d)
{
    for (size_t i = 0; i < mt_dataset_n_sources(d); i++)
        if (!strcmp(mt_dataset_source(d, i)->stats.format, "rated"))
            return mt_dataset_source(d, i);
    return NULL;
}

/* Preferences need their objective, and it needs them; of rated answers one that takes each alone. */
static int check_answers(const struct mt_inputs *in, const mt_dataset *d, struct mt_err *err)
{
    const char *loss = in->cfg->preference.loss;
    bool want = mt_objective_of(&in->numerics)->answers, are = d && mt_dataset_stats(d)->answers;
    const struct mt_data_source *rated = are ? rated_source(d) : NULL;
    if (want && rated && !mt_objective_of(&in->numerics)->rated)
        return mt_fail(err, MT_ERR_USAGE, -EINVAL, "preference.loss = %s compares the two answers of a pair, and %s holds answers that "
                       "are rated one by one: set it to kto or apo_zero_unpaired", loss, rated->path);
    if (!d || want == are)
        return 0;
    const struct mt_note *other = d ? mt_notes_find(mt_dataset_notes(d), "other") : NULL;
    if (are && other)
        return mt_fail(err, MT_ERR_USAGE, -EINVAL, "%s: set data.format = %s to train on what its samples have of that; their answers "
                       "with a preference are trained by [preference] loss, which is %s: %s is one", other->path, other->text, loss,
                       rated ? "kto" : "sigmoid");
    if (are)
        return mt_fail(err, MT_ERR_USAGE, -EINVAL, "%s: answers with a preference are trained by [preference] loss, which is %s: "
                       "set it to %s, say", mt_dataset_source(d, 0)->path, loss, rated ? "kto" : "sigmoid");
    return mt_fail(err, MT_ERR_USAGE, -EINVAL, "preference.loss = %s: %s holds %s, not chosen and rejected answers "
                   "(data.format = preference) or rated ones (rated)", loss, mt_dataset_source(d, 0)->path,
                   mt_dataset_stats(d)->format);
}

/* A policy's loss needs rollouts, with the values that its keys name; nothing else takes them. */
static int check_rollouts(const struct mt_inputs *in, const mt_dataset *d, struct mt_err *err)
{
    const struct mt_objective *o = mt_objective_of(&in->numerics);
    bool are = d && mt_dataset_stats(d)->rollouts;
    char place[4200];
    int rc;
    if (d && o->rollouts != are)
        return mt_fail(err, MT_ERR_USAGE, -EINVAL, are ? "%s holds %s, which [policy] loss trains on: set it to dapo, say"
                                                       : "%s holds %s, but policy.loss trains on rollouts (data.format = rollouts)",
                       mt_dataset_source(d, 0)->path, mt_dataset_stats(d)->format);
    uint64_t n = are ? mt_dataset_stats(d)->n_samples : 0;
    size_t len = are ? mt_dataset_stats(d)->max_len : 0, first;
    MT_FREED union mt_rollout_values *values = NULL;
    MT_FREED uint8_t *trained = NULL;
    rc = MT_NEW(&values, len + 1, "rollouts", err) ?: MT_NEW(&trained, len + 1, "rollouts", err);
    for (uint64_t i = 0; i < n && !rc; i++) {
        mt_dataset_sample(d, i, NULL, trained);
        for (first = 1; !trained[first];)
            first++;
        rc = mt_dataset_read_values(d, i, values, err);
        bool silent = o->by_rewards && mt_dataset_rollout(d, i)->noise < 0;
        const char *lacks = rc       ? NULL
                            : silent ? "\"noise\", which says whose reward it is: 2 k and 2 k + 1 are of the weights plus and less noise k of its step"
                                     : mt_policy_lacks(o, &in->numerics.objective_keys.policy, &values[first]);
        if (lacks)
            rc = mt_fail(err, MT_ERR_INPUT, -EINVAL, "%s: the rollout has no %s", mt_dataset_place(d, i, place, sizeof(place)), lacks);
    }
    return rc;
}

/* The sets of eval.sets. */
static int open_sets(struct mt_inputs *in, struct mt_err *err)
{
    const struct mt_cfg_list *of = &in->cfg->eval.sets;
    const struct mt_key *key = mt_key_find("eval", "sets");
    int rc = 0;
    if (!of->n || in->prepared_only)
        return 0;
    if (of->n > MT_EVAL_SETS)
        return mt_fail(err, MT_ERR_USAGE, -EINVAL, "eval.sets has %d sets: at most %d are evaluated", of->n, MT_EVAL_SETS);
    if (mt_objective_of(&in->numerics)->answers || mt_objective_of(&in->numerics)->rollouts)
        return mt_fail(err, MT_ERR_USAGE, -EINVAL, "eval.sets: %s is evaluated on data.eval alone: remove the key",
                       mt_objective_of(&in->numerics)->title);
    rc = MT_NEW(&in->sets, (size_t)of->n, "eval.sets", err);
    for (; in->n_sets < (size_t)of->n && !rc; in->n_sets++) {
        struct mt_eval_set *s = &in->sets[in->n_sets];
        char *item = of->items[in->n_sets], measure[128];
        size_t name = mt_key_name_of_path(key, item);
        char *path = item + name;
        s->name = strndup(item, name - 1);
        snprintf(measure, sizeof(measure), "%.100s_loss", s->name ? s->name : "");
        if (mt_objective_measure(mt_objective_of(&in->numerics), measure) >= 0)
            rc = mt_fail(err, MT_ERR_USAGE, -EINVAL, "eval.sets: %s has a measure of that name: choose another than %s",
                         mt_objective_of(&in->numerics)->title, s->name);
        else
            rc = s->name ? open_set(in, &s->data, &(struct mt_cfg_list){&path, 1}, "eval.sets", err)
                         : mt_fail_nomem(err, item, name);
        rc = rc ?: check_answers(in, s->data, err);
    }
    return rc;
}

static void finish_sets(struct mt_inputs *in)
{
    for (size_t i = 0; i < in->n_sets; i++) {
        mt_sampler_destroy(&in->sets[i].sampler);
        mt_split_finish(&in->sets[i].rows);
        mt_dataset_destroy(&in->sets[i].data);
        free(in->sets[i].name);
    }
    free(in->sets);
}

static struct mt_sampler_params sampler_params(const struct mt_inputs *in, const struct mt_numerics *n)
{
    return (struct mt_sampler_params){
        .data = in->data,
        .split = &in->split,
        .seq_len = (size_t)n->seq_len,
        .rows_per_step = (size_t)n->rows_per_step,
        .micro_batch = (size_t)n->micro_batch,
        .packing = in->cfg->data.packing,
        .train_prompts = in->cfg->preference.sft_tokens == MT_SFT_ALL,
        .mismatch = mt_objective_of(n)->mismatched,
        .teacher = in->teacher,
        .chunks = mt_row_chunks(n),
        .shuffle = in->cfg->data.shuffle,
        .seed = (uint64_t)in->cfg->train.seed,
        .weighted = true,
    };
}

/* Goes on after the rows that were trained, if the steps before did not have as many each. Where an epoch has other
 * rows than it had, as far into it. */
static void go_on(struct mt_inputs *in)
{
    const struct mt_resumed *r = &in->resumed;
    uint64_t n = mt_sampler_stats(in->sampler)->rows_per_epoch, was = r->rows_per_epoch, rows = r->rows;
    uint64_t per = (uint64_t)in->cfg->policy.steps_per_round, round = r->step / per;
    if (in->cfg->policy.rollouts[0]) { /* each round has data of its own, and begins with them */
        mt_sampler_go_on(in->sampler, round * per, round * n);
        return;
    }
    if (!rows || !was)
        return;
    if (n != was)
        rows = rows / was * n + (uint64_t)((double)(rows % was) * (double)n / (double)was);
    in->moved = rows != mt_sampler_rows_before(in->sampler, r->step);
    if (in->moved)
        mt_sampler_go_on(in->sampler, r->step, rows);
}

static int make_samplers(struct mt_inputs *in, const struct mt_numerics *n, struct mt_err *err)
{
    struct mt_sampler_params p = sampler_params(in, n);
    int rc = in->data ? mt_sampler_create(&in->sampler, &p, err) : 0;
    if (!rc && in->sampler)
        go_on(in);
    uint64_t most = (uint64_t)in->cfg->eval.max_samples;
    p.shuffle = p.weighted = false;
    p.teacher = NULL;
    if (in->eval_data) {
        MT_CLOSED_BY(mt_split_finish) struct mt_split unused = {0};
        mt_split_finish(&in->held_out);
        p.data = in->eval_data;
        rc = rc ?: mt_dataset_split(in->eval_data, "", &in->held_out, &unused, err);
    }
    in->held_out.n = MT_MIN(in->held_out.n, most);
    p.split = &in->held_out;
    if (!rc && in->held_out.n)
        rc = mt_sampler_create(&in->eval_sampler, &p, err);
    else if (!rc && in->cfg->data.eval[0])
        mt_warn("data.eval = %s holds out no sample: nothing is evaluated", in->cfg->data.eval);
    for (struct mt_eval_set *s = in->sets; s < in->sets + in->n_sets && !rc; s++) {
        MT_CLOSED_BY(mt_split_finish) struct mt_split unused = {0};
        mt_sampler_destroy(&s->sampler);
        mt_split_finish(&s->rows);
        rc = mt_dataset_split(s->data, "", &s->rows, &unused, err);
        s->rows.n = MT_MIN(s->rows.n, most);
        p.data = s->data;
        p.split = &s->rows;
        rc = rc ?: mt_sampler_create(&s->sampler, &p, err);
    }
    return rc;
}

/* Rounded up, as transformers does. */
static uint64_t share_of(const struct mt_inputs *in, double steps)
{
    return (uint64_t)(in->resumed.rounds ? llround(steps) : ceil(steps - 1e-9));
}

static int count_steps(struct mt_inputs *in, const struct mt_numerics *n, struct mt_err *err)
{
    const struct mt_config *c = in->cfg;
    const struct mt_sampler_stats *epoch = mt_sampler_stats(in->sampler);
    uint64_t per_epoch = epoch->steps_per_epoch, rows = epoch->rows_per_epoch;
    uint64_t tokens = (uint64_t)c->train.tokens, seq_len = (uint64_t)n->seq_len;
    if (c->train.steps)
        in->total_steps = (uint64_t)c->train.steps;
    else if (c->train.epochs > 0 && in->moved)
        in->total_steps = mt_sampler_step_at(in->sampler, (uint64_t)llround(c->train.epochs * (double)rows));
    else if (c->train.epochs > 0)
        in->total_steps = (uint64_t)llround(c->train.epochs * (double)per_epoch);
    else if (in->moved)
        in->total_steps = mt_sampler_step_at(in->sampler, mt_div_up(tokens, seq_len));
    else
        in->total_steps = mt_div_up(tokens, (uint64_t)n->rows_per_step * seq_len);
    if (!in->total_steps && c->train.epochs > 0)
        return mt_fail(err, MT_ERR_USAGE, -EINVAL, "train.epochs = %g is less than a step",
                       c->train.epochs);
    const struct mt_cfg_amount *warmup = &c->train.warmup, *decay = &c->train.decay;
    double total = (double)in->total_steps;
    in->lr = (struct mt_lr){
        .schedule = c->train.schedule,
        .peak = c->train.learning_rate,
        .min_ratio = c->train.min_lr_ratio,
        .warmup = warmup->is_ratio ? share_of(in, warmup->ratio * total) : (uint64_t)warmup->count,
        .decay = decay->is_ratio ? (uint64_t)(decay->ratio * total) : (uint64_t)decay->count,
        .total = in->total_steps,
    };
    return 0;
}

/* What a model was trained on it knows: an evaluation on that says nothing of other texts. */
static void warn_of_trained(const struct mt_inputs *in)
{
    size_t n = in->data && in->eval_data ? mt_dataset_n_sources(in->data) : 0;
    for (size_t i = 0; i < n; i++)
        if (mt_is_same_file(mt_dataset_source(in->data, i)->path, in->cfg->data.eval))
            mt_warn("data.eval = %s is trained on, too: it is among data.train. A share, such as data.eval = 2%%, holds "
                    "samples out", in->cfg->data.eval);
}

int mt_inputs_open(struct mt_inputs *in, struct mt_config *cfg, enum mt_inputs_use use,
                   const struct mt_resumed *resumed, struct mt_err *err)
{
    *in = (struct mt_inputs){.cfg = cfg};
    if (resumed)
        in->resumed = *resumed;
    int rc = mt_resolve_learning_rate(cfg, &in->auto_rate, err)
          ?: mt_resolve_numerics(&in->numerics, cfg, err); /* before data are read, which may take minutes */
    if (!rc && use == MT_RUN_EVAL)
        rc = mt_inputs_freeze_all(cfg, "no training", err);
    rc = rc ?: open_model(in, err);
    if (!rc && use == MT_RUN_TRAIN)
        rc = mt_plan_check_trained(in->layout, err) ?: check_merging(in, err);
    rc = rc ?: check_merge_aware(in, err);
    if (!rc && use == MT_RUN_TRAIN)
        rc = check_reference(in, err);
    rc = rc ?: open_data(in, use, err)
            ?: check_answers(in, in->data, err)
            ?: check_answers(in, in->eval_data, err)
            ?: check_rollouts(in, in->data, err)
            ?: check_rollouts(in, in->eval_data, err)
            ?: open_sets(in, err);
    if (rc || use != MT_RUN_TRAIN)
        return rc;
    warn_of_trained(in);
    return open_teacher(in, err);
}

uint64_t mt_inputs_prepared_rows(struct mt_config *cfg, const struct mt_hf_config *hf, const char *model_dir,
                                 const struct mt_numerics *n)
{
    MT_CLOSED_BY(mt_inputs_finish) struct mt_inputs in = {.cfg = cfg, .hf = *hf, .numerics = *n, .prepared_only = true};
    struct mt_err unsaid;
    uint64_t rows = 0;
    in.model_dir = strdup(model_dir);
    int rc = in.model_dir && cfg->data.train.n ? open_data(&in, MT_RUN_TRAIN, &unsaid) : -ENOENT;
    struct mt_sampler_params p = sampler_params(&in, n);
    p.micro_batch = (size_t)MT_MAX(n->micro_batch, (int64_t)1);
    if (!rc && !mt_sampler_create(&in.sampler, &p, &unsaid))
        rows = mt_sampler_stats(in.sampler)->rows_per_epoch;
    return rows;
}

void mt_inputs_say_rate(const struct mt_inputs *in)
{
    if (in->auto_rate)
        mt_info("train.learning_rate is %g: auto, since the run trains %s", in->cfg->train.learning_rate, in->auto_rate);
}

/* PASS: tokens of a pass, enough for fast products, few beside the weights. PIECE: tokens of a prompt that a pass takes
 * where layers have a window: each text's cache there has room for the window and one piece. */
struct mt_cache_shape mt_inputs_cache(size_t *draws, const struct mt_layout *l, size_t max_len, size_t n_texts,
                                      size_t most_tokens)
{
    enum { PASS = 2048, PIECE = 256 };
    size_t widest = 0, block = 16;
    *draws = max_len;
    if (!mt_layout_caches(l, max_len))
        return (struct mt_cache_shape){.slots = 0};
    for (int i = 0; i < l->cfg.n_specs; i++)
        block = l->cfg.spec[i].latent_cache ? 64 : block; /* a product makes keys and values of each */
    for (size_t u = 0; u < l->n_units; u++)
        widest = MT_MAX(widest, mt_unit_cache(l, u, MT_F32, block).window);
    *draws = MT_MAX(MT_MIN(n_texts * max_len, (size_t)PASS), n_texts);
    struct mt_cache_shape c = {.slots = n_texts, .block = block, .piece = *draws};
    c.ld[MT_CACHE_ALL] = c.ld[MT_CACHE_WINDOW] = mt_div_up(max_len, block);
    c.ld[MT_CACHE_STATES] = 1;
    if (widest && mt_div_up(widest + PIECE, block) + 1 < c.ld[MT_CACHE_ALL]) {
        c.piece = MT_MIN(*draws, (size_t)PIECE);
        c.ld[MT_CACHE_WINDOW] = mt_div_up(widest + c.piece, block) + 1;
    }
    for (int k = 0; k < MT_N_CACHE_KINDS; k++)
        c.n[k] = n_texts * c.ld[k];
    if (most_tokens) /* a block of each may not be full */
        c.n[MT_CACHE_ALL] = MT_MIN(c.n[MT_CACHE_ALL], most_tokens / block + n_texts);
    return c;
}

struct mt_cache_shape mt_inputs_texts_cache(size_t *draws, const struct mt_layout *l, const struct mt_texts *of,
                                            size_t n)
{
    return mt_inputs_cache(draws, l, of->len, n, of->tokens ? of->tokens[of->n - n] : 0);
}

struct mt_cache_shape mt_inputs_answers_cache(size_t *draws, const struct mt_layout *l, size_t row, size_t max_len,
                                              size_t n_texts)
{
    enum { TEXTS = 16 }; /* more take host memory from the run */
    struct mt_cache_shape c = mt_inputs_cache(draws, l, max_len, MT_MIN(MT_MIN(n_texts, (size_t)TEXTS), row), 0);
    *draws = c.slots ? MT_MIN(*draws, row) : row;
    return c;
}

int mt_inputs_open_model(struct mt_inputs *in, struct mt_config *cfg, const struct mt_texts *texts, size_t at_once,
                         struct mt_err *err)
{
    size_t n = MT_MIN(at_once ? at_once : (size_t)MT_TEXTS_FEW, texts->n);
    *in = (struct mt_inputs){.cfg = cfg, .draws = texts->len};
    cfg->numerics.seq_len = (int64_t)texts->len;
    cfg->numerics.micro_batch = 1;
    cfg->numerics.chunk = 0;
    cfg->train.batch_size = (int64_t)n;
    cfg->train.tokens_per_step = 0; /* a run's own, as its rows are */
    cfg->numerics.groups = 1;
    if (cfg->placement.expert_group == MT_AUTO) /* units without rows are not loaded: the smaller, the more of them */
        cfg->placement.expert_group = 1;
    int rc = mt_inputs_freeze_all(cfg, "no training", err);
    rc = rc ?: open_model(in, err);
    if (!rc)
        in->cache = mt_inputs_texts_cache(&in->draws, in->layout, texts, n);
    if (!at_once && in->cache.slots)
        in->texts = *texts;
    return rc;
}

int mt_inputs_open_without_data(struct mt_inputs *in, struct mt_config *cfg, struct mt_err *err)
{
    *in = (struct mt_inputs){.cfg = cfg};
    int rc = mt_resolve_learning_rate(cfg, NULL, err);
    rc = rc ?: mt_resolve_numerics(&in->numerics, cfg, err)
            ?: mt_inputs_freeze_all(cfg, "no training", err);
    return rc ? rc : open_model(in, err);
}

int mt_inputs_use_adapter(struct mt_config *cfg, const char *dir, const char *why,
                          struct mt_err *err)
{
    static const char *const own[] = {
        "adapter.kind",       "adapter.path",       "adapter.rank",         "adapter.alpha",
        "adapter.targets",    "adapter.rslora",     "adapter.rank_pattern", "adapter.alpha_pattern",
        "adapter.train_also", "adapter.lr_ratio_b", "adapter.dropout",      "adapter.merge_every",
        "model.freeze"};
    bool dora = false;
    int rc = 0;
    for (size_t i = 0; i < MT_ARRAY_LEN(own) && !rc; i++)
        rc = mt_config_reset(cfg, own[i], err);
    if (!rc && dir)
        rc = mt_peft_uses_dora(&dora, dir, err);
    if (!rc && dir)
        rc = mt_config_override(cfg, "adapter.kind", dora ? "dora" : "lora", why, err);
    return rc || !dir ? rc : mt_config_override(cfg, "adapter.path", dir, why, err);
}

int mt_inputs_lay_out_steps(struct mt_inputs *in, struct mt_numerics *n, struct mt_err *err)
{
    n->micro_batch = mt_resolve_micro_batch(n); /* unless a plan has decided it */
    int rc = make_samplers(in, n, err);
    return rc || !in->sampler ? rc : count_steps(in, n, err);
}

uint64_t mt_inputs_eval_hash(const struct mt_inputs *in)
{
    uint64_t h = mt_dataset_hash(in->eval_data);
    for (size_t i = 0; i < in->n_sets; i++)
        h = h * UINT64_C(0x9E3779B97F4A7C15) + mt_dataset_hash(in->sets[i].data);
    return h;
}

int mt_inputs_next_block(struct mt_inputs *in, struct mt_config *cfg, const struct mt_resumed *resumed,
                         struct mt_err *err)
{
    mt_sampler_destroy(&in->sampler);
    mt_sampler_destroy(&in->eval_sampler);
    mt_layout_destroy(&in->layout);
    mt_layout_destroy(&in->halves);
    free(in->weights_dir);
    in->weights_dir = NULL;
    in->cfg = cfg;
    in->resumed = *resumed;
    int rc = mt_resolve_numerics(&in->numerics, cfg, err);
    return rc ? rc : lay_out(in, err);
}

void mt_inputs_finish(struct mt_inputs *in)
{
    mt_sampler_destroy(&in->sampler);
    mt_sampler_destroy(&in->eval_sampler);
    mt_split_finish(&in->split);
    mt_split_finish(&in->held_out);
    mt_teacher_close_read(&in->teacher);
    mt_dataset_destroy(&in->data);
    mt_dataset_destroy(&in->eval_data);
    finish_sets(in);
    mt_layout_destroy(&in->layout);
    mt_layout_destroy(&in->halves);
    free(in->model_dir);
    free(in->weights_dir);
    *in = (struct mt_inputs){0};
}
