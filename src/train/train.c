/* SPDX-License-Identifier: Apache-2.0 */
#include "train/train.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/fs.h"
#include "base/json.h"
#include "base/log.h"
#include "base/mem.h"
#include "checkpoint/history.h"
#include "data/loader.h"
#include "optim/lr.h"
#include "plan/trace.h"
#include "train/metrics.h"
#include "train/reference.h"
#include "train/saves.h"

enum { TRACED_STEP = 3 };

struct loop {
    const struct mt_train_params *p;
    struct mt_session *s;
    const struct mt_setup *setup;
    const struct mt_inputs *in;
    struct mt_train_state *st;
    struct mt_metrics *metrics;
    mt_loader *loader;
    struct mt_saves saves;
    uint64_t first_step;
    double step_seconds; /* of a step, smoothed */
    bool evaluated;      /* at this step */
    bool sound;          /* what failed left the state as it was: data, a computation, an evaluation */
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
    atomic_fetch_add(&c->signals, 1);
    if (e)
        mt_engine_interrupt(e);
}

static double since(int64_t t0)
{
    return (double)(mt_now_ns() - t0) * 1e-9;
}

static void remember(struct loop *l, const cJSON *record)
{
    if (record)
        mt_log_rows_add(&l->st->log, record);
}

/* The loss of an evaluation without a reference, which its objective would need, is that of the tokens. */
static void take_measures(const struct mt_session *s, struct mt_eval_result *sum, struct mt_eval_report *out)
{
    const struct mt_numerics *n = &s->setup->choice.numerics;
    const struct mt_objective *o = mt_objective_of(n);
    if (o->finish && sum->measures[0].n > 0)
        o->finish(&(struct mt_objective_step){.objective = o, .keys = &n->objective_keys}, sum->measures);
    out->objective = o;
    memcpy(out->measures, sum->measures, sizeof(out->measures));
    out->loss = sum->n_loss ? sum->loss_sum / (double)sum->n_loss : NAN;
    if (o->weights && sum->measures[0].n > 0)
        out->loss = mt_measure_mean(&sum->measures[0]);
}

/* *unread: its data could not be read, or there was no memory for it, which says nothing of the engine. */
static int evaluate_all(struct mt_session *s, const double *reference, struct mt_eval_report *out, bool *unread,
                        struct mt_err *err)
{
    struct mt_step_data data;
    struct mt_eval_result sum = {.reference = reference};
    mt_sampler *sampler = s->setup->in->eval_sampler;
    int64_t t0 = mt_now_ns();
    int rc = mt_step_data_init(&data, sampler, err);
    *unread = rc;
    if (rc)
        return rc;
    uint64_t steps = mt_sampler_steps_per_epoch(sampler);
    for (uint64_t i = 0; i < steps && !rc; i++) {
        rc = mt_sampler_fill(sampler, i, &data, err);
        *unread = rc;
        if (!rc) {
            rc = mt_engine_eval(s->engine, 0, &data, &sum, err);
            *unread = rc == -ENOMEM && mt_engine_whole(s->engine);
        }
    }
    mt_step_data_finish(&data);
    if (rc)
        return rc;
    out->n_loss = sum.n_loss;
    take_measures(s, &sum, out);
    out->accuracy = sum.n_loss ? (double)sum.n_correct / (double)sum.n_loss : NAN;
    out->seconds = since(t0);
    return 0;
}

int mt_train_evaluate(struct mt_session *s, struct mt_eval_report *out, struct mt_err *err)
{
    bool unread;
    return evaluate_all(s, NULL, out, &unread, err);
}

static void report_evaluation(struct loop *l, struct mt_eval_report *r)
{
    r->best = isfinite(r->loss) && !(l->st->best_loss <= r->loss);
    if (r->best) {
        l->st->best_loss = r->loss;
        l->st->best_step = l->st->step;
    }
    l->st->bad_evals = r->best ? 0 : l->st->bad_evals + 1;
    cJSON *record = mt_metrics_eval_record(r);
    remember(l, record);
    mt_metrics_write(l->metrics, record);
    cJSON_Delete(record);
    if (l->p->events.eval)
        l->p->events.eval(l->p->events.ctx, r);
}

/* Data that cannot be read, or no memory, end the run before its first step alone: later there is something to lose. */
static int evaluate(struct loop *l, struct mt_err *err)
{
    struct mt_eval_report r = {.step = l->st->step};
    struct mt_err why = {0};
    bool unread = false;
    if (!l->in->eval_sampler || l->evaluated)
        return 0;
    mt_train_phase(l->p->control, "evaluating");
    int rc = mt_engine_flush(l->s->engine, err);
    if (rc)
        return rc;
    rc = evaluate_all(l->s, mt_reference_of_evaluation(l->s, l->st), &r, &unread, &why);
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

bool mt_train_file_request(const struct mt_train_params *p, const char *name)
{
    char path[4200];
    mt_path_printf(path, sizeof(path), "%s/%s", p->dir, name);
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
    mt_warn("step %llu skipped: %s of %s %s not finite (%llu in a row, %llu in all)", (unsigned long long)l->st->step,
            r->bad_router ? "logits" : "the gradient", r->bad_tensor, r->bad_router ? "are" : "is",
            (unsigned long long)l->st->skips_in_row, (unsigned long long)l->st->skips);
    if (l->st->skips_in_row < (uint64_t)l->in->cfg->train.max_skips)
        return 0;
    return mt_fail(err, MT_ERR_TRAINING, -EDOM,
                   "%llu steps in a row had a gradient that is not finite (first bad tensor: %s): %s; lower "
                   "train.learning_rate",
                   (unsigned long long)l->st->skips_in_row, r->bad_tensor,
                   l->p->history->has ? "the last checkpoint is good" : "there is no checkpoint of this run");
}

static void report_layers(const struct loop *l)
{
    const struct mt_hf_config *c = &l->setup->layout->cfg;
    for (int i = 0; i < (int)c->n_layers; i++) {
        const int32_t *rows = mt_engine_expert_rows(l->s->engine, i);
        if (!rows)
            continue;
        cJSON *record = mt_metrics_layer_record(l->st->step, i, rows, (size_t)c->moe.n_experts);
        mt_metrics_write(l->metrics, record);
        cJSON_Delete(record);
    }
}

static void report_step(struct loop *l, struct mt_step_report *r)
{
    uint64_t left = l->in->total_steps - MT_MIN(l->in->total_steps, l->st->step);
    l->step_seconds = l->step_seconds > 0 ? 0.9 * l->step_seconds + 0.1 * r->seconds : r->seconds;
    r->eta_seconds = l->step_seconds * (double)left;
    r->step = l->st->step;
    r->total_steps = l->in->total_steps;
    r->epoch = (double)l->st->step / (double)l->st->steps_per_epoch;
    r->total_tokens = l->st->tokens;
    r->objective = mt_objective_of(&l->setup->choice.numerics);
    r->h2d_bytes = l->setup->choice.engine.h2d_bytes;
    r->d2h_bytes = l->setup->choice.engine.d2h_bytes;
    r->uses_disk = l->setup->choice.engine.uses_disk || l->setup->choice.engine.uses_files;
    cJSON *record = mt_metrics_step_record(r);
    if (l->st->step % (uint64_t)l->in->cfg->log.every == 0)
        remember(l, record);
    mt_metrics_write(l->metrics, record);
    cJSON_Delete(record);
    report_layers(l);
    if (l->p->events.step && (l->st->step % (uint64_t)l->in->cfg->log.every == 0 || left == 0))
        l->p->events.step(l->p->events.ctx, r);
}

/* Writes the trace of the step that has just ended, with the predicted one beside it. */
static void write_trace(struct loop *l)
{
    uint64_t done = l->st->step - l->first_step;
    bool last = l->st->step >= l->in->total_steps || (l->p->max_steps && done >= l->p->max_steps);
    if (!l->p->trace || done > TRACED_STEP || (done < TRACED_STEP && !last))
        return;
    struct mt_err why;
    struct mt_trace_span *spans = NULL;
    struct mt_sim_graph graph = {0};
    size_t n = 0;
    int rc = mt_engine_trace_read(l->s->engine, &spans, &n, &why);
    if (!rc) {
        mt_engine_trace(l->s->engine, false);
        if (l->setup->predicted)
            mt_setup_predict(l->setup, &graph, NULL);
        rc = mt_trace_write(l->p->trace, spans, n, &graph, l->setup->layout, &why);
    }
    if (rc)
        mt_warn("no trace: %s", why.msg);
    free(spans);
    mt_sim_graph_finish(&graph);
}

static int run_step(struct loop *l, struct mt_err *err)
{
    struct mt_step_report r = {0};
    const struct mt_step_data *data;
    int64_t t0 = mt_now_ns();
    l->sound = false;
    mt_train_phase(l->p->control, "training");
    int rc = mt_loader_get(l->loader, l->st->step, &data, err);
    if (rc) {
        l->sound = true;
        return rc;
    }
    r.lr = mt_lr_at(&l->in->lr, mt_engine_next_update(l->s->engine, 0));
    const struct mt_learner_step step = {data, r.lr, mt_reference_of_training(l->st)};
    rc = mt_engine_step(l->s->engine, &step, &r.result, err);
    l->sound = rc && mt_engine_whole(l->s->engine);
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
    report_step(l, &r);
    write_trace(l);
    rc = mt_session_guard(l->s, err);
    return rc ? rc : count_skip(l, &r.result, err);
}

static double time_left(const struct loop *l)
{
    return l->in->cfg->checkpoint.time_limit - (double)(mt_boot_ns() - l->p->start_ns) * 1e-9;
}

/* Time of the limit to reserve for the last save: twice what it is likely to take, so that it can be tried again; at
 * most a quarter. */
static double time_for_save(const struct loop *l)
{
    return l->p->no_save ? 0 : MT_MIN(2 * mt_saves_expect(&l->saves), 0.25 * l->in->cfg->checkpoint.time_limit);
}

/* What is due between two steps. *over: the run is to end, for the reason *end. */
static int between_steps(struct loop *l, enum mt_train_end *end, bool *over, struct mt_err *err)
{
    const struct mt_config *c = l->in->cfg;
    int rc = 0;
    if (c->eval.every && l->st->step % (uint64_t)c->eval.every == 0)
        rc = evaluate(l, err);
    bool due = mt_saves_due(&l->saves), asked = atomic_exchange(&l->p->control->save, false);
    asked |= mt_train_file_request(l->p, "SAVE");
    if (!rc && (due || asked))
        rc = mt_saves_periodic(&l->saves, err);
    if (rc)
        return rc;
    if (c->eval.early_stop_patience && l->st->bad_evals >= (uint64_t)c->eval.early_stop_patience) {
        *end = MT_END_EARLY;
        *over = true;
    } else if (c->checkpoint.time_limit > 0 && time_left(l) <= l->step_seconds + time_for_save(l)) {
        *end = MT_END_TIME;
        *over = true;
    } else if (mt_train_file_request(l->p, "STOP")) {
        *end = MT_END_SIGNAL;
        *over = true;
    }
    return 0;
}

static bool more_steps(const struct loop *l)
{
    uint64_t done = l->st->step - l->first_step;
    return l->st->step < l->in->total_steps && (!l->p->max_steps || done < l->p->max_steps);
}

/* Whether a request to stop cut a step or an evaluation short; if so, the engine is made usable again. */
static bool was_stopped(const struct loop *l, int rc)
{
    bool stopped = atomic_load(&l->p->control->stop) && (!rc || rc == -ECANCELED);
    if (stopped)
        mt_engine_clear_interrupt(l->s->engine);
    return stopped;
}

static int run_steps(struct loop *l, enum mt_train_end *end, struct mt_err *err)
{
    bool over = false;
    int rc = 0;
    *end = MT_END_DONE;
    if (l->in->cfg->eval.at_start && !l->st->step)
        rc = evaluate(l, err);
    if (was_stopped(l, rc)) {
        *end = MT_END_SIGNAL;
        return 0;
    }
    while (!rc && !over && more_steps(l)) {
        if (!atomic_load(&l->p->control->stop))
            rc = run_step(l, err);
        if (!rc && !atomic_load(&l->p->control->stop))
            rc = between_steps(l, end, &over, err);
        if (was_stopped(l, rc)) {
            *end = MT_END_SIGNAL;
            return 0;
        }
    }
    return rc;
}

/* The last evaluation and the last save. A signal during the evaluation changes *why. */
static int finish_run(struct loop *l, enum mt_train_end *why, struct mt_err *err)
{
    enum mt_train_end end = *why;
    const struct mt_config *c = l->in->cfg;
    bool full = c->checkpoint.save == MT_SAVE_FULL;
    bool trained = l->st->step != l->first_step, stopped = end == MT_END_SIGNAL || end == MT_END_TIME;
    double seconds = c->checkpoint.save_deadline;
    if (l->p->no_save || (stopped && !trained) ||
        (end == MT_END_SIGNAL && c->checkpoint.on_signal == MT_ON_SIGNAL_NONE))
        return mt_engine_flush(l->s->engine, err);
    int rc = stopped ? 0 : evaluate(l, err);
    if (rc == -ECANCELED && was_stopped(l, rc)) {
        *why = MT_END_SIGNAL;
        rc = 0;
    }
    if (c->checkpoint.time_limit > 0)
        seconds = MT_MAX(0.0, MT_MIN(seconds, time_left(l)));
    if (end == MT_END_SIGNAL)
        full = full && c->checkpoint.on_signal == MT_ON_SIGNAL_FULL;
    return rc ? rc : mt_saves_final(&l->saves, full, seconds, err);
}

/* Something beside training failed: the state is sound, and is saved before the run ends with that error. */
static void save_before_failing(struct loop *l)
{
    const struct mt_config *c = l->in->cfg;
    struct mt_err err = {0};
    if (l->p->no_save || l->st->step == l->first_step)
        return;
    if (mt_saves_final(&l->saves, c->checkpoint.save == MT_SAVE_FULL, c->checkpoint.save_deadline, &err))
        mt_warn("%s", err.msg);
}

int mt_train_run(const struct mt_train_params *p, enum mt_train_end *end, struct mt_err *err)
{
    const struct mt_setup *setup = p->session->setup;
    struct loop l = {.p = p, .s = p->session, .setup = setup, .in = setup->in, .st = p->state};
    mt_saves_init(&l.saves, p);
    l.first_step = p->state->step;
    p->state->steps_per_epoch = mt_sampler_steps_per_epoch(l.in->sampler);
    p->state->total_steps = l.in->total_steps;
    mt_engine_set_updates(l.s->engine, 0, p->state->updates);
    int rc = mt_loader_create(&l.loader, l.in->sampler, p->state->step, l.in->total_steps, err);
    if (!rc)
        rc = mt_metrics_open(&l.metrics, l.in->cfg, p->dir, p->state->step,
                             l.setup->layout->cfg.moe.n_experts > 0, err);
    if (!rc) {
        mt_train_phase(p->control, "computing the reference");
        rc = mt_reference_make(l.s, l.st, err);
    }
    if (!rc) {
        mt_engine_trace(l.s->engine, p->trace != NULL);
        atomic_store(&p->control->engine, l.s->engine);
        atomic_store(&p->control->begun, true);
        rc = run_steps(&l, end, err);
        if (!rc)
            rc = finish_run(&l, end, err);
        if (rc && l.sound)
            save_before_failing(&l);
        atomic_store(&p->control->engine, NULL);
    }
    mt_saves_finish(&l.saves);
    mt_metrics_close(&l.metrics);
    mt_loader_destroy(&l.loader);
    return rc;
}
