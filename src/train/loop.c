/* SPDX-License-Identifier: Apache-2.0 */
#include "train/loop.h"

#include <math.h>
#include <stdio.h>

#include "base/json.h"
#include "base/log.h"
#include "base/mem.h"
#include "checkpoint/history.h"
#include "checkpoint/merge_packed.h"
#include "optim/lr.h"
#include "plan/trace.h"
#include "train/best.h"
#include "train/evaluate.h"
#include "train/reference.h"

struct mt_train_asked *mt_loop_asked(const struct mt_loop *l)
{
    return &l->p->control->asked[l->p->learner];
}

static void remember(struct mt_loop *l, const cJSON *record)
{
    if (record)
        mt_log_rows_add(&l->st->log, record);
}

static void report_evaluation(struct mt_loop *l, struct mt_eval_report *r)
{
    const char *by = l->in->cfg->eval.best_by;
    double value = mt_best_value(by, r);
    r->best = mt_best_is_better(by, value, l->st->best_loss);
    if (r->best) {
        l->st->best_loss = value;
        l->st->best_step = l->st->step;
    }
    l->st->bad_evals = r->best ? 0 : l->st->bad_evals + 1;
    l->st->eval_step = l->st->step;
    mt_saves_evaluated(&l->saves, value, r->best);
    MT_JSON_FREED cJSON *record = mt_metrics_eval_record(r);
    remember(l, record);
    mt_metrics_write(l->metrics, record);
    if (l->p->events.eval)
        l->p->events.eval(l->p->events.ctx, r);
}

int mt_loop_merged_share(const struct mt_loop *l, double *share, struct mt_err *err)
{
    return mt_merge_share(share, l->setup->choice.layout, l->s->planes, l->setup->choice.numerics.dtype, err);
}

int mt_loop_evaluate(struct mt_loop *l, struct mt_err *err)
{
    struct mt_eval_report r = {.step = l->st->step, .loss = NAN, .accuracy = NAN, .reward = NAN};
    struct mt_err why = {0};
    bool unread = false;
    if ((!l->in->eval_sampler && !l->p->answer) || l->evaluated)
        return 0;
    mt_train_phase(l->p->control, "evaluating");
    int rc = mt_train_flush(l->p, err);
    if (rc)
        return rc;
    rc = mt_loop_merged_share(l, &r.merged_share, err);
    if (rc)
        return rc;
    const double *reference = mt_reference_of_evaluation(l->s, l->p->learner, l->st);
    if (l->in->eval_sampler)
        rc = mt_evaluate(l->s, l->p->learner, l->p->control, reference, &r, &unread, &why);
    if (!rc && l->p->answer)
        rc = l->p->answer(l->p->answers, &r, &why);
    if (rc && (!unread || l->st->step == l->first_step)) {
        l->sound = rc != -ECANCELED;
        if (err)
            *err = why;
        return rc;
    }
    l->evaluated = true;
    if (rc)
        mt_warn("no evaluation at step %llu: %s; the run goes on", (unsigned long long)l->st->step, why.msg);
    else
        report_evaluation(l, &r);
    return 0;
}

/* Whether any step of the process was not skipped, in this block or before. */
static bool has_trained(const struct mt_loop *l)
{
    return mt_engine_next_update(l->s->engine, l->p->learner) > l->p->first_update;
}

/* What to do about gradients that are not finite. A smaller rate does not help where no update came before them. */
static const char *advice(const struct mt_loop *l)
{
    if (has_trained(l))
        return "lower train.learning_rate";
    return l->first_step ? "no step since the run went on could be used, so the state that it went on from may have grown too large: go on "
                           "from an earlier checkpoint (--resume=FOLDER) with a lower train.learning_rate"
                         : "no update came before, so the rate is not the cause: weights or data give values that are not finite "
                           "(megatrain eval --per-sample says on which samples, megatrain verify whether the model's files are whole)";
}

static int count_skip(struct mt_loop *l, const struct mt_step_result *r, struct mt_err *err)
{
    if (!r->n_skipped) {
        l->st->skips_in_row = 0;
        return 0;
    }
    snprintf(l->bad_tensor, sizeof(l->bad_tensor), "%s", r->bad_tensor);
    l->st->skips++;
    l->st->skips_in_row++;
    char what[64] = "skipped";
    if (!r->skipped)
        snprintf(what, sizeof(what), "skipped %zu of %zu blocks", r->n_skipped,
                 mt_layout_n_blocks(l->setup->choice.layout));
    mt_warn("step %llu %s: %s of %s %s not finite (%llu in a row, %llu in all)", (unsigned long long)l->st->step, what,
            r->bad_router ? "logits" : "the gradient", r->bad_tensor, r->bad_router ? "are" : "is",
            (unsigned long long)l->st->skips_in_row, (unsigned long long)l->st->skips);
    if (l->st->skips_in_row < (uint64_t)l->in->cfg->train.max_skips)
        return 0;
    return mt_fail(err, MT_ERR_TRAINING, -EDOM,
                   "%llu steps in a row had a gradient that is not finite (first bad tensor: %s): %s; %s",
                   (unsigned long long)l->st->skips_in_row, r->bad_tensor,
                   l->p->history->has ? "the last checkpoint is good" : "there is no checkpoint of this run", advice(l));
}

int mt_loop_check_trained(const struct mt_loop *l, struct mt_err *err)
{
    uint64_t done = l->st->step - l->first_step;
    const bool rounds = l->in->cfg->policy.rollouts[0], call = done && !rounds;
    bool any = call ? has_trained(l) : !l->st->step || mt_engine_next_update(l->s->engine, l->p->learner);
    any |= rounds && l->st->step < l->in->total_steps;
    return any ? 0 : mt_fail(err, MT_ERR_TRAINING, -EDOM, "every step %s was skipped, as the gradient was not finite%s%s: "
                             "nothing was trained; %s", call ? "of this call" : "of the run", done ? ", last of " : "",
                             l->bad_tensor, advice(l));
}

static void report_layers(const struct mt_loop *l)
{
    const struct mt_hf_config *c = &l->setup->choice.layout->cfg;
    for (int i = 0; i < (int)c->n_layers; i++) {
        int32_t rows[MT_MOE_MAX_EXPERTS];
        if (!mt_engine_expert_rows(l->s->engine, i, rows))
            continue;
        MT_JSON_FREED cJSON *record = mt_metrics_layer_record(l->st->step, i, rows, (size_t)c->moe.n_experts);
        mt_metrics_write(l->metrics, record);
    }
}

static void report_step(struct mt_loop *l, struct mt_step_report *r)
{
    uint64_t left = l->in->total_steps - MT_MIN(l->in->total_steps, l->st->step);
    l->step_seconds = l->step_seconds > 0 ? 0.9 * l->step_seconds + 0.1 * r->seconds : r->seconds;
    r->eta_seconds = l->step_seconds * (double)left;
    r->step = l->st->step;
    r->total_steps = l->in->total_steps;
    r->epoch = mt_train_state_epochs(l->st);
    r->total_tokens = l->st->tokens;
    r->objective = mt_objective_of(mt_setup_numerics_of(l->setup, l->p->learner));
    r->h2d_bytes = r->objective->by_rewards ? 0 : l->setup->choice.engine.h2d_bytes; /* it computes nothing */
    r->d2h_bytes = l->setup->choice.engine.d2h_bytes;
    r->uses_disk = l->setup->choice.engine.uses_disk || l->setup->choice.engine.uses_files;
    MT_JSON_FREED cJSON *record = mt_metrics_step_record(r);
    if (l->st->step % (uint64_t)l->in->cfg->log.every == 0)
        remember(l, record);
    mt_metrics_write(l->metrics, record);
    report_layers(l);
    if (l->p->events.step && (l->st->step % (uint64_t)l->in->cfg->log.every == 0 || left == 0))
        l->p->events.step(l->p->events.ctx, r);
}

/* Writes the trace of the step that has just ended, with the predicted one beside it. */
static void write_trace(struct mt_loop *l)
{
    uint64_t done = l->st->step - l->first_step;
    bool last = l->st->step >= l->in->total_steps || (l->p->max_steps && done >= l->p->max_steps);
    if (!l->p->trace || done > MT_TRACED_STEP || (done < MT_TRACED_STEP && !last))
        return;
    struct mt_err why;
    MT_FREED struct mt_trace_span *spans = NULL;
    MT_CLOSED_BY(mt_sim_graph_finish) struct mt_sim_graph graph = {0};
    size_t n = 0;
    int rc = mt_engine_trace_read(l->s->engine, &spans, &n, &why);
    if (!rc) {
        mt_engine_trace(l->s->engine, false);
        if (l->setup->predicted)
            mt_setup_predict(l->setup, &graph, NULL);
        rc = mt_trace_write(l->p->trace, spans, n, &graph, l->setup->choice.layout, &why);
    }
    if (rc)
        mt_warn("no trace: %s", why.msg);
}

/* After a merge of adapters it rises anew. */
static double learning_rate(const struct mt_loop *l)
{
    uint64_t k = mt_engine_next_update(l->s->engine, l->p->learner), first = l->st->blocks.updates;
    uint64_t warmup = l->st->blocks.phase ? (uint64_t)l->in->cfg->adapter.merge_warmup : 0;
    double lr = mt_lr_at(&l->in->lr, k);
    return l->in->cfg->adapter.merge_every && k - first < warmup ? lr * ((double)(k - first) / (double)warmup) : lr;
}

int mt_loop_next_data(struct mt_loop *l, struct mt_learner_step *of, struct mt_err *err)
{
    l->sound = true;
    int rc = mt_loader_get(l->loader, l->st->step, &of->data, err);
    of->reference = l->st->reference;
    of->lr = rc ? 0 : learning_rate(l);
    l->sound = false;
    return rc;
}

int mt_loop_end_step(struct mt_loop *l, const struct mt_learner_step *of, const struct mt_step_result *result,
                    double seconds, struct mt_err *err)
{
    struct mt_step_report r = {.result = *result, .lr = of->lr, .seconds = seconds, .tokens = of->data->n_tokens,
                               .loss_tokens = of->data->n_loss};
    l->st->step++;
    l->st->rows = mt_sampler_rows_before(l->in->sampler, l->st->step);
    l->st->tokens += r.tokens;
    l->st->loss_tokens += r.loss_tokens;
    l->st->seconds += r.seconds;
    l->evaluated = false;
    atomic_store(&mt_loop_asked(l)->unsaved, true);
    report_step(l, &r);
    if (l->p->learner == 0)
        write_trace(l);
    return count_skip(l, &r.result, err);
}
