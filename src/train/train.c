/* SPDX-License-Identifier: Apache-2.0 */
#include "train/train.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/log.h"
#include "base/mem.h"
#include "data/loader.h"
#include "optim/lr.h"
#include "plan/trace.h"
#include "train/metrics.h"

enum { MAX_LOG_HISTORY = 20000, TRACED_STEP = 3 };

struct loop {
    const struct mt_train_params *p;
    struct mt_session *s;
    struct mt_train_state *st;
    struct mt_metrics *metrics;
    mt_loader *loader;
    int64_t start_ns, saved_ns;
    uint64_t first_step;
    double step_seconds; /* of a step, smoothed */
    bool evaluated;      /* at this step already */
};

void mt_train_phase(struct mt_train_control *c, const char *phase)
{
    atomic_store(&c->phase_ns, mt_now_ns());
    atomic_store(&c->phase, phase);
}

void mt_train_request_stop(struct mt_train_control *c, int signo)
{
    mt_engine *e = atomic_load(&c->engine);
    atomic_store(&c->stop, signo);
    if (e)
        mt_engine_interrupt(e);
}

static double since(int64_t t0)
{
    return (double)(mt_now_ns() - t0) * 1e-9;
}

static void remember(struct loop *l, const cJSON *record)
{
    if (!l->st->log_history)
        l->st->log_history = cJSON_CreateArray();
    if (cJSON_GetArraySize(l->st->log_history) < MAX_LOG_HISTORY)
        cJSON_AddItemToArray(l->st->log_history, cJSON_Duplicate(record, 1));
}

int mt_train_evaluate(struct mt_session *s, struct mt_eval_report *out, struct mt_err *err)
{
    struct mt_step_data data;
    struct mt_eval_result sum = {0};
    int64_t t0 = mt_now_ns();
    int rc = mt_step_data_init(&data, s->eval_sampler, err);
    if (rc)
        return rc;
    uint64_t steps = mt_sampler_steps_per_epoch(s->eval_sampler);
    for (uint64_t i = 0; i < steps && !rc; i++) {
        rc = mt_sampler_fill(s->eval_sampler, i, &data, err);
        if (!rc)
            rc = mt_engine_eval(s->engine, &data, &sum, err);
    }
    mt_step_data_finish(&data);
    if (rc)
        return rc;
    out->n_loss = sum.n_loss;
    out->loss = sum.n_loss ? sum.loss_sum / (double)sum.n_loss : NAN;
    out->accuracy = sum.n_loss ? (double)sum.n_correct / (double)sum.n_loss : NAN;
    out->seconds = since(t0);
    return 0;
}

static int evaluate(struct loop *l, struct mt_err *err)
{
    struct mt_eval_report r = {.step = l->st->step};
    if (!l->s->eval_sampler || l->evaluated)
        return 0;
    mt_train_phase(l->p->control, "evaluating");
    int rc = mt_engine_flush(l->s->engine, err);
    if (!rc)
        rc = mt_train_evaluate(l->s, &r, err);
    if (rc)
        return rc;
    l->evaluated = true;
    r.best = isfinite(r.loss) && !(l->st->best_loss <= r.loss);
    if (r.best) {
        l->st->best_loss = r.loss;
        l->st->best_step = l->st->step;
    }
    l->st->bad_evals = r.best ? 0 : l->st->bad_evals + 1;
    cJSON *record = mt_metrics_eval_record(&r);
    remember(l, record);
    rc = mt_metrics_write(l->metrics, record, err);
    cJSON_Delete(record);
    if (l->p->events.eval)
        l->p->events.eval(l->p->events.ctx, &r);
    return rc;
}

static int save(struct loop *l, bool full, struct mt_err *err)
{
    const struct mt_config *c = l->s->cfg;
    int64_t t0 = mt_now_ns();
    if (mt_history_holds(l->p->history, l->p->dir, l->st->step, full))
        return 0;
    mt_train_phase(l->p->control, "saving a checkpoint");
    int rc = mt_engine_flush(l->s->engine, err);
    l->st->updates = mt_engine_updates(l->s->engine);
    if (!rc)
        rc = mt_checkpoint_save(&(struct mt_checkpoint_save){.dir = l->p->dir,
                                                             .model_dir = l->s->model_dir,
                                                             .layout = l->s->layout,
                                                             .planes = l->s->planes,
                                                             .state = l->st,
                                                             .history = l->p->history,
                                                             .full = full,
                                                             .shard_bytes = c->checkpoint.shard_size},
                                err);
    if (rc)
        return rc;
    l->saved_ns = mt_now_ns();
    if (l->p->events.saved)
        l->p->events.saved(l->p->events.ctx, l->st->step, since(t0));
    struct mt_prune_policy prune = {.keep = (uint64_t)c->checkpoint.keep,
                                    .keep_every = (uint64_t)c->checkpoint.keep_every,
                                    .keep_best = c->checkpoint.keep_best && isfinite(l->st->best_loss),
                                    .best_step = l->st->best_step,
                                    .lineage = &l->st->lineage};
    struct mt_err why;
    if (mt_checkpoint_prune(NULL, l->p->dir, &prune, &why))
        mt_warn("old checkpoints stay: %s", why.msg);
    return 0;
}

/* A periodic save that finds no room is told and tried again: the run is worth more than one save. */
static int save_or_warn(struct loop *l, bool full, struct mt_err *err)
{
    struct mt_err why = {0};
    int rc = save(l, full, &why);
    if (rc == -ENOSPC || rc == -EDQUOT) {
        mt_warn("checkpoint of step %llu not saved: %s", (unsigned long long)l->st->step, why.msg);
        l->saved_ns = mt_now_ns();
        return 0;
    }
    if (rc && err)
        *err = why;
    return rc;
}

static bool save_due(const struct loop *l)
{
    const struct mt_cfg_interval *every = &l->s->cfg->checkpoint.every;
    if (every->is_time)
        return every->seconds > 0 && since(l->saved_ns) >= every->seconds;
    return every->steps && l->st->step % (uint64_t)every->steps == 0;
}

static bool file_request(const struct loop *l, const char *name)
{
    char path[4200];
    snprintf(path, sizeof(path), "%.4000s/%s", l->p->dir, name);
    return !remove(path);
}

static int count_skip(struct loop *l, const struct mt_step_result *r, struct mt_err *err)
{
    if (!r->skipped) {
        l->st->skips_in_row = 0;
        return 0;
    }
    l->st->skips++;
    l->st->skips_in_row++;
    mt_warn("step %llu skipped: the gradient of %s is not finite (%llu in a row, %llu in all)",
            (unsigned long long)l->st->step, r->bad_tensor, (unsigned long long)l->st->skips_in_row,
            (unsigned long long)l->st->skips);
    if (l->st->skips_in_row < (uint64_t)l->s->cfg->train.max_skips)
        return 0;
    return mt_fail(err, MT_ERR_TRAINING, -EDOM,
                   "%llu steps in a row had a gradient that is not finite (first bad tensor: %s): the "
                   "last checkpoint is good; lower train.learning_rate",
                   (unsigned long long)l->st->skips_in_row, r->bad_tensor);
}

static int report_step(struct loop *l, struct mt_step_report *r, struct mt_err *err)
{
    uint64_t left = l->s->total_steps - MT_MIN(l->s->total_steps, l->st->step);
    l->step_seconds = l->step_seconds > 0 ? 0.9 * l->step_seconds + 0.1 * r->seconds : r->seconds;
    r->eta_seconds = l->step_seconds * (double)left;
    r->step = l->st->step;
    r->total_steps = l->s->total_steps;
    r->epoch = (double)l->st->step / (double)l->st->steps_per_epoch;
    r->total_tokens = l->st->tokens;
    r->h2d_bytes = l->s->choice.engine.h2d_bytes;
    r->d2h_bytes = l->s->choice.engine.d2h_bytes;
    r->uses_disk = l->s->choice.engine.uses_disk;
    cJSON *record = mt_metrics_step_record(r);
    if (l->st->step % (uint64_t)l->s->cfg->log.every == 0)
        remember(l, record);
    int rc = mt_metrics_write(l->metrics, record, err);
    cJSON_Delete(record);
    if (l->p->events.step && (l->st->step % (uint64_t)l->s->cfg->log.every == 0 || left == 0))
        l->p->events.step(l->p->events.ctx, r);
    return rc;
}

/* Writes what the step that has just ended did, beside what was predicted. */
static int write_trace(struct loop *l, struct mt_err *err)
{
    uint64_t done = l->st->step - l->first_step;
    bool last = l->st->step >= l->s->total_steps || (l->p->max_steps && done >= l->p->max_steps);
    if (!l->p->trace || done > TRACED_STEP || (done < TRACED_STEP && !last))
        return 0;
    struct mt_trace_span *spans = NULL;
    struct mt_sim_graph graph = {0};
    size_t n = 0;
    int rc = mt_engine_trace_read(l->s->engine, &spans, &n, err);
    if (!rc) {
        mt_engine_trace(l->s->engine, false);
        if (l->s->predicted)
            mt_session_predict(l->s, &graph, NULL);
        rc = mt_trace_write(l->p->trace, spans, n, &graph, l->s->layout, err);
    }
    free(spans);
    mt_sim_graph_finish(&graph);
    return rc;
}

static int run_step(struct loop *l, struct mt_err *err)
{
    const struct mt_config *c = l->s->cfg;
    struct mt_step_report r = {0};
    const struct mt_step_data *data;
    int64_t t0 = mt_now_ns();
    mt_train_phase(l->p->control, "training");
    int rc = mt_loader_get(l->loader, l->st->step, &data, err);
    if (rc)
        return rc;
    r.lr = mt_lr_at(c->train.schedule, c->train.learning_rate,
                    mt_engine_next_update(l->s->engine), l->s->warmup_steps, l->s->total_steps,
                    c->train.min_lr_ratio);
    rc = mt_engine_step(l->s->engine, data, r.lr, &r.result, err);
    if (rc)
        return rc;
    r.seconds = since(t0);
    r.tokens = data->n_tokens;
    r.loss_tokens = data->n_loss;
    l->st->step++;
    atomic_store(&l->p->control->step, l->st->step);
    l->st->tokens += r.tokens;
    l->st->loss_tokens += r.loss_tokens;
    l->st->seconds += r.seconds;
    l->evaluated = false;
    rc = report_step(l, &r, err);
    if (!rc)
        rc = write_trace(l, err);
    return rc ? rc : count_skip(l, &r.result, err);
}

/* What is due between two steps; *end is set where the run is to end. */
static int between_steps(struct loop *l, enum mt_train_end *end, bool *over, struct mt_err *err)
{
    const struct mt_config *c = l->s->cfg;
    bool full = c->checkpoint.save == MT_SAVE_FULL;
    int rc = 0;
    if (c->eval.every && l->st->step % (uint64_t)c->eval.every == 0)
        rc = evaluate(l, err);
    if (!rc && (save_due(l) || atomic_exchange(&l->p->control->save, false) ||
                file_request(l, "SAVE")))
        rc = save_or_warn(l, full, err);
    if (rc)
        return rc;
    if (c->eval.early_stop_patience && l->st->bad_evals >= (uint64_t)c->eval.early_stop_patience) {
        *end = MT_END_EARLY;
        *over = true;
    } else if (c->checkpoint.time_limit > 0 && since(l->start_ns) >= c->checkpoint.time_limit) {
        *end = MT_END_TIME;
        *over = true;
    } else if (file_request(l, "STOP")) {
        *end = MT_END_SIGNAL;
        *over = true;
    }
    return 0;
}

static bool more_steps(const struct loop *l)
{
    uint64_t done = l->st->step - l->first_step;
    return l->st->step < l->s->total_steps && (!l->p->max_steps || done < l->p->max_steps);
}

static int run_steps(struct loop *l, enum mt_train_end *end, struct mt_err *err)
{
    bool over = false;
    int rc = 0;
    *end = MT_END_DONE;
    if (l->s->cfg->eval.at_start && !l->st->step)
        rc = evaluate(l, err);
    while (!rc && !over && more_steps(l)) {
        if (!atomic_load(&l->p->control->stop))
            rc = run_step(l, err);
        if (atomic_load(&l->p->control->stop) && (!rc || rc == -ECANCELED)) {
            *end = MT_END_SIGNAL;
            mt_engine_clear_interrupt(l->s->engine);
            return 0;
        }
        if (!rc)
            rc = between_steps(l, end, &over, err);
    }
    return rc;
}

static int finish_run(struct loop *l, enum mt_train_end end, struct mt_err *err)
{
    const struct mt_config *c = l->s->cfg;
    bool full = c->checkpoint.save == MT_SAVE_FULL;
    if (l->p->no_save)
        return mt_engine_flush(l->s->engine, err);
    if (end == MT_END_SIGNAL) {
        if (c->checkpoint.on_signal == MT_ON_SIGNAL_NONE)
            return mt_engine_flush(l->s->engine, err);
        return save(l, full && c->checkpoint.on_signal == MT_ON_SIGNAL_FULL, err);
    }
    int rc = end == MT_END_TIME ? 0 : evaluate(l, err);
    return rc ? rc : save(l, full, err);
}

int mt_train_run(const struct mt_train_params *p, enum mt_train_end *end, struct mt_err *err)
{
    struct loop l = {.p = p, .s = p->session, .st = p->state, .start_ns = mt_now_ns()};
    l.saved_ns = l.start_ns;
    l.first_step = p->state->step;
    p->state->steps_per_epoch = mt_sampler_steps_per_epoch(l.s->sampler);
    p->state->total_steps = l.s->total_steps;
    mt_engine_set_updates(l.s->engine, p->state->updates);
    int rc = mt_loader_create(&l.loader, l.s->sampler, p->state->step, l.s->total_steps, err);
    if (!rc)
        rc = mt_metrics_open(&l.metrics, l.s->cfg, p->dir, p->state->step, err);
    if (!rc) {
        mt_engine_trace(l.s->engine, p->trace != NULL);
        atomic_store(&p->control->engine, l.s->engine);
        rc = run_steps(&l, end, err);
        if (!rc)
            rc = finish_run(&l, *end, err);
        atomic_store(&p->control->engine, NULL);
    }
    mt_metrics_close(&l.metrics);
    mt_loader_destroy(&l.loader);
    return rc;
}
