/* SPDX-License-Identifier: Apache-2.0 */
/* What a session reads: the model's configuration, the data; and what of it makes a step. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/fs.h"
#include "base/log.h"
#include "base/mem.h"
#include "config/schema.h"
#include "hw/hw.h"
#include "train/session_priv.h"

static int check_mixture(const struct mt_session *s, struct mt_err *err)
{
    const struct mt_numerics *n = &s->cfg->numerics;
    if (n->schedule == MT_SCHEDULE_MICROBATCH)
        return mt_fail(err, MT_ERR_USAGE, -EINVAL,
                       "memory.schedule = microbatch: %s has experts, which run once a step over the tokens of all "
                       "micro-batches: set it to layered", s->model_dir);
    return 0;
}

int mt_session_open_model(struct mt_session *s, struct mt_err *err)
{
    int rc = mt_hf_find_model(&s->model_dir, s->cfg->model.path, err);
    if (!rc)
        rc = mt_hf_config_read(&s->hf, s->model_dir, err);
    if (!rc && s->hf.moe.n_experts)
        rc = check_mixture(s, err);
    if (!rc && s->cfg->numerics.router_aux_loss > 0 && !s->hf.moe.n_experts)
        rc = mt_fail(err, MT_ERR_USAGE, -EINVAL, "train.router_aux_loss balances the experts of a mixture, and %s is none: "
                     "remove it", s->model_dir);
    if (!rc)
        rc = mt_plan_lay_out(&s->layout, &s->halves, s->cfg, &s->hf, s->model_dir, s->from_files, err);
    if (rc)
        return rc;
    if (s->cfg->numerics.seq_len > s->hf.max_pos)
        mt_warn("data.seq_len = %lld is beyond the model's max_position_embeddings = %lld",
                (long long)s->cfg->numerics.seq_len, (long long)s->hf.max_pos);
    return 0;
}

static int cache_dir(const struct mt_config *cfg, char *buf, size_t len)
{
    const char *xdg = getenv("XDG_CACHE_HOME"), *home = getenv("HOME");
    if (strcmp(cfg->data.cache_dir, "auto"))
        return snprintf(buf, len, "%s", cfg->data.cache_dir);
    if (xdg && *xdg)
        return snprintf(buf, len, "%s/megatrain", xdg);
    return snprintf(buf, len, "%s/.cache/megatrain", home ? home : ".");
}

static int open_set(struct mt_session *s, mt_dataset **out, const struct mt_cfg_list *files,
                    struct mt_err *err)
{
    char cache[4096];
    int n = 1, *cpus = NULL, rc = mt_hw_cores(&cpus, &n, err);
    free(cpus);
    if (rc)
        return rc;
    if (s->cfg->placement.threads != MT_AUTO)
        n = (int)s->cfg->placement.threads;
    cache_dir(s->cfg, cache, sizeof(cache));
    return mt_dataset_open(out,
                           &(struct mt_dataset_params){
                               .files = files,
                               .format = s->cfg->data.format,
                               .tokenizer = s->cfg->data.tokenizer,
                               .overlong = s->cfg->data.overlong,
                               .seq_len = (size_t)s->cfg->numerics.seq_len,
                               .vocab = (size_t)s->hf.vocab,
                               .cache_dir = cache,
                               .model_dir = s->model_dir,
                               .template_ = s->cfg->data.template_,
                               .train_on = s->cfg->data.train_on,
                               .n_processes = n,
                           },
                           err);
}

static int open_data(struct mt_session *s, struct mt_err *err)
{
    const char *eval = s->cfg->data.eval;
    bool eval_file = eval[0] && mt_key_is_path(mt_key_find("data", "eval"), eval, eval);
    char *item = s->cfg->data.eval;
    struct mt_cfg_list list = {&item, 1};
    int rc = open_set(s, &s->data, &s->cfg->data.train, err);
    if (!rc && eval_file)
        rc = open_set(s, &s->eval_data, &list, err);
    if (!rc)
        rc = mt_dataset_split(s->data, eval_file ? "" : eval, &s->split, &s->held_out, err);
    return rc;
}

static struct mt_sampler_params sampler_params(const struct mt_session *s)
{
    return (struct mt_sampler_params){
        .data = s->data,
        .split = &s->split,
        .seq_len = (size_t)s->numerics.seq_len,
        .rows_per_step = (size_t)s->numerics.rows_per_step,
        .micro_batch = (size_t)s->numerics.micro_batch,
        .packing = s->cfg->data.packing,
        .shuffle = s->cfg->data.shuffle,
        .seed = (uint64_t)s->cfg->train.seed,
        .weighted = true,
    };
}

static int make_samplers(struct mt_session *s, struct mt_err *err)
{
    struct mt_sampler_params p = sampler_params(s);
    int rc = mt_sampler_create(&s->sampler, &p, err);
    uint64_t most = (uint64_t)s->cfg->eval.max_samples;
    p.shuffle = p.weighted = false;
    if (s->eval_data) {
        struct mt_split unused = {0};
        mt_split_finish(&s->held_out);
        p.data = s->eval_data;
        if (!rc)
            rc = mt_dataset_split(s->eval_data, "", &s->held_out, &unused, err);
        mt_split_finish(&unused);
    }
    s->held_out.n = MT_MIN(s->held_out.n, most);
    p.split = &s->held_out;
    if (!rc && s->held_out.n)
        rc = mt_sampler_create(&s->eval_sampler, &p, err);
    else if (!rc && s->cfg->data.eval[0])
        mt_warn("data.eval = %s holds out no sample: nothing is evaluated", s->cfg->data.eval);
    return rc;
}

static int count_steps(struct mt_session *s, struct mt_err *err)
{
    const struct mt_config *c = s->cfg;
    uint64_t per_epoch = mt_sampler_steps_per_epoch(s->sampler);
    if (c->train.steps)
        s->total_steps = (uint64_t)c->train.steps;
    else if (c->train.epochs > 0)
        s->total_steps = (uint64_t)llround(c->train.epochs * (double)per_epoch);
    else
        s->total_steps = mt_div_up((size_t)c->train.tokens,
                                   (size_t)(s->numerics.rows_per_step * s->numerics.seq_len));
    if (!s->total_steps)
        return mt_fail(err, MT_ERR_USAGE, -EINVAL, "train.epochs = %g is less than a step",
                       c->train.epochs);
    const struct mt_cfg_amount *warmup = &c->train.warmup, *decay = &c->train.decay;
    double total = (double)s->total_steps;
    s->lr = (struct mt_lr){
        .schedule = c->train.schedule,
        .peak = c->train.learning_rate,
        .min_ratio = c->train.min_lr_ratio,
        .warmup = warmup->is_ratio ? (uint64_t)llround(warmup->ratio * total) : (uint64_t)warmup->count,
        .decay = decay->is_ratio ? (uint64_t)(decay->ratio * total) : (uint64_t)decay->count,
        .total = s->total_steps,
    };
    return 0;
}

int mt_session_open_inputs(struct mt_session *s, struct mt_config *cfg, const cJSON *from_files, struct mt_err *err)
{
    *s = (struct mt_session){.cfg = cfg, .from_files = from_files};
    int rc = mt_resolve_learning_rate(cfg, err);
    if (!rc)
        rc = mt_resolve_numerics(&s->numerics, cfg, err); /* what it refuses is refused before data are read */
    if (!rc)
        rc = mt_session_open_model(s, err);
    return rc ? rc : open_data(s, err);
}

int mt_session_lay_out_steps(struct mt_session *s, struct mt_err *err)
{
    s->numerics.micro_batch = mt_resolve_micro_batch(&s->numerics); /* where no plan has decided it */
    int rc = make_samplers(s, err);
    return rc ? rc : count_steps(s, err);
}
