/* SPDX-License-Identifier: Apache-2.0 */
#include "train/shared.h"

#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include "base/mem.h"
#include "objective/objective.h"
#include "optim/optimizer.h"

const char *mt_shared_alone(const struct mt_shared_of *a)
{
    return a->numerics->groups > 1      ? "it has train.groups above 1, and groups are of the micro-batches of one run"
           : a->numerics->optimizer->zeroth ? "its steps perturb the weights of one run (optimizer.type = mezo)"
           : a->cfg->adapter.merge_every ? "it changes it (adapter.merge_every)"
                                         : NULL;
}

const char *mt_shared_difference(const struct mt_shared_of *a, const struct mt_shared_of *b)
{
    const struct mt_numerics *x = a->numerics, *y = b->numerics;
    const struct {
        const char *key;
        bool same;
    } keys[] = {
        {"model.path", !strcmp(a->model, b->model)},
        {"model.init", a->cfg->model.init == b->cfg->model.init},
        {"train.seed of random weights", a->cfg->model.init != MT_INIT_RANDOM || x->seed == y->seed},
        {"model.base_dtype", a->cfg->model.base_dtype == b->cfg->model.base_dtype},
        {"model.dtype", x->dtype == y->dtype},
        {"model.compute", mt_settled_compute(x) == mt_settled_compute(y)},
        {"train.objective", mt_objective_of(x) == mt_objective_of(y)},
        {"policy.temperature", x->objective_keys.policy.temperature == y->objective_keys.policy.temperature},
        {"distill.top", x->objective_keys.top == y->objective_keys.top},
        {"train.router_aux_loss", x->router_aux_loss == y->router_aux_loss},
        {"data.seq_len", x->seq_len == y->seq_len},
        {"train.micro_batch", x->micro_batch == y->micro_batch},
        {"train.chunk", mt_row_chunks(x) == mt_row_chunks(y)},
        {"optimizer.type or state_dtype", x->optimizer == y->optimizer},
        {"optimizer.master", x->master == y->master},
        {"optimizer.grad_dtype", x->grad_dtype == y->grad_dtype},
        {"memory.logits_chunk", x->logits_chunk == y->logits_chunk},
        {"memory.logits_piece", x->logits_piece == y->logits_piece},
        {"memory.unit", a->cfg->placement.unit == b->cfg->placement.unit},
    };
    for (size_t k = 0; k < MT_ARRAY_LEN(keys); k++)
        if (!keys[k].same)
            return keys[k].key;
    return NULL;
}

static struct mt_shared_of shared_of(const struct mt_inputs *in)
{
    return (struct mt_shared_of){in->cfg, &in->numerics, in->model_dir};
}

/* What is auto in one run is what others have, from their checkpoints or configurations: one choice is made for all. */
static int take_from_others(const struct mt_setup *s, struct mt_err *err)
{
    static const struct {
        const char *key;
        size_t at;
    } chosen[] = {{"train.micro_batch", offsetof(struct mt_numerics, micro_batch)},
                  {"memory.logits_chunk", offsetof(struct mt_numerics, logits_chunk)},
                  {"memory.logits_piece", offsetof(struct mt_numerics, logits_piece)}};
    int rc = 0;
    for (size_t k = 0; k < MT_ARRAY_LEN(chosen); k++) {
        int64_t value = MT_AUTO;
        char text[32];
        for (size_t i = 0; i < s->n_learners && value == MT_AUTO; i++)
            memcpy(&value, (const char *)&s->in[i].numerics + chosen[k].at, sizeof(value));
        snprintf(text, sizeof(text), "%lld", (long long)value);
        for (size_t i = 0; i < s->n_learners && value != MT_AUTO && !rc; i++) {
            int64_t *own = (int64_t *)((char *)&s->in[i].numerics + chosen[k].at);
            rc = *own == MT_AUTO ? mt_config_override(s->in[i].cfg, chosen[k].key, text, "of the other runs", err) : 0;
            *own = *own == MT_AUTO ? value : *own;
        }
    }
    return rc;
}

int mt_shared_check(const struct mt_setup *s, struct mt_err *err)
{
    int rc = s->n_learners > 1 ? take_from_others(s, err) : 0;
    if (rc)
        return rc;
    const struct mt_shared_of a = shared_of(s->in);
    for (size_t i = 0; i < s->n_learners && s->n_learners > 1; i++) {
        const struct mt_shared_of b = shared_of(&s->in[i]);
        const char *why = mt_shared_alone(&b), *key = why ? NULL : mt_shared_difference(&a, &b);
        if (why)
            return mt_fail(err, MT_ERR_USAGE, -EINVAL, "the run of %s cannot share a base: %s", b.cfg->checkpoint.dir,
                           why);
        if (key)
            return mt_fail(err, MT_ERR_USAGE, -EINVAL, "the runs of %s and %s cannot share a base: %s differs",
                           a.cfg->checkpoint.dir, b.cfg->checkpoint.dir, key);
    }
    return 0;
}

int mt_shared_request(struct mt_setup *s, struct mt_err *err)
{
    size_t n = s->n_learners;
    if (n == 1)
        return 0;
    MT_FREED struct mt_lay_out *o = NULL;
    int rc = MT_NEW(&o, n, "the learners", err) ?: MT_NEW(&s->learner, n, "the learners", err);
    for (size_t i = 0; i < n && !rc; i++) {
        const struct mt_inputs *in = &s->in[i];
        o[i] = (struct mt_lay_out){in->cfg, &s->in->hf, s->in->model_dir, &in->resumed};
        s->learner[i] = in->numerics;
    }
    rc = rc ?: mt_plan_lay_out_shared(&s->shared[0], &s->shared[1], o, n, err);
    if (rc)
        return rc;
    struct mt_plan_request *r = &s->request;
    r->layout = s->shared[0];
    r->halves = s->shared[1];
    r->learner = s->learner;
    r->n_learners = n;
    for (size_t i = 1; i < n; i++) {
        r->numerics.rows_per_step += s->learner[i].rows_per_step;
        if (s->in[i].cfg->data.packing)
            r->docs_per_row = (size_t)r->numerics.seq_len;
    }
    return 0;
}

int mt_shared_take_choice(struct mt_setup *s, struct mt_err *err)
{
    int rc = 0;
    for (size_t i = 0; i < s->n_learners && s->learner && !rc; i++) {
        struct mt_numerics *n = &s->learner[i];
        struct mt_layout *own = s->choice.layout == s->shared[1] ? s->in[i].halves : s->in[i].layout;
        n->micro_batch = s->choice.numerics.micro_batch;
        n->logits_chunk = s->choice.numerics.logits_chunk;
        n->logits_piece = s->choice.numerics.logits_piece;
        rc = mt_layout_share(own, s->choice.layout, (int)i, err);
    }
    return rc;
}
