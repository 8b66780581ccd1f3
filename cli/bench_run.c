/* SPDX-License-Identifier: Apache-2.0 */
/* Jobs of a sweep, one by one: what they are predicted to take, and runs of them. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/fs.h"
#include "base/json.h"
#include "base/log.h"
#include "base/mem.h"
#include "bench.h"
#include "plan_print.h"
#include "rates.h"
#include "sweep/sweep.h"

/* Keeps the placement that was chosen: with other rates the search might choose another. */
static int seconds_with(double *seconds, const struct plan_view *v, const struct mt_machine *m, struct mt_err *err)
{
    MT_CLOSED_BY(mt_plan_choice_finish) struct mt_plan_choice c = {0};
    struct mt_plan_request r = mt_plan_request_as(&v->request, &v->choice);
    r.machine = m;
    int rc = mt_plan_evaluate(&c, &r, NULL, err);
    *seconds = c.sim.seconds;
    return rc;
}

struct steps {
    const struct plan_view *view;
    struct mt_machine machine;
    struct rates_log log;
    double *predicted, *ratio; /* [n] */
    size_t n;
};

/* Predicts a step with a measurement of the operations before and after it. */
static int predict_step(struct steps *s, int step, double measured, struct mt_err *err)
{
    const cJSON *before = rates_log_after(&s->log, step - 1), *after = rates_log_after(&s->log, step);
    double predicted = 0;
    if (!before || !after || !(measured > 0))
        return 0;
    before = before->child;
    after = after->child;
    for (size_t i = 0; i < s->log.n_ops; i++, before = before->next, after = after->next)
        if (!mt_machine_add_sample(&s->machine, &s->log.ops[i], (before->valuedouble + after->valuedouble) / 2))
            return mt_fail_nomem(err, "a prediction", s->log.n_ops * sizeof(struct mt_op_sample));
    int rc = seconds_with(&predicted, s->view, &s->machine, err);
    if (rc)
        return rc;
    s->predicted[s->n] = predicted;
    s->ratio[s->n++] = measured / predicted;
    return 0;
}

static int predict_all(struct steps *s, const cJSON *metrics, int skip, struct mt_err *err)
{
    const cJSON *o;
    int rc = 0;
    cJSON_ArrayForEach(o, metrics) {
        const cJSON *t = mt_json_get(o, "t_step"), *step = mt_json_get(o, "step");
        if (!rc && cJSON_IsNumber(t) && cJSON_IsNumber(step) && skip-- <= 0)
            rc = predict_step(s, step->valueint, t->valuedouble, err);
    }
    return rc;
}

static void finish_steps(struct steps *s)
{
    rates_log_finish(&s->log);
    mt_machine_finish(&s->machine);
    free(s->predicted);
    free(s->ratio);
}

/* Files of measurements taken with a run: a profile taken right before it, and times of operations between its steps
 * (rates.h). */
#define PROFILE_OF(b, j, k) MT_PATH("%.3000s/%s.%d.machine", (b)->dir, (j)->hash, k)
#define RATES_OF(b, j, k) MT_PATH("%.3000s/%s.%d.rates", (b)->dir, (j)->hash, k)

static bool measures(const struct bench *b)
{
    return b->predicted && cli_arg(b->args, "measure");
}

/*
 * Predicts each step of a run after the first ones, for the view's choice: with the profile, and the times of the
 * operations right before and after the step. Sets run->predicted and run->ratio; 0 if a measurement is missing.
 */
static int predict_run(const struct bench *b, const struct mt_sweep_job *j, int k, struct mt_sweep_run *run,
                       struct mt_err *err)
{
    MT_CLOSED_BY(finish_steps) struct steps s = {.view = &b->view};
    MT_JSON_FREED cJSON *metrics = NULL;
    const char *machine = PROFILE_OF(b, j, k), *rates = RATES_OF(b, j, k);
    const char *steps = MT_PATH("%.3000s/runs/%s.%d/metrics.jsonl", b->dir, j->hash, k);
    run->predicted = run->ratio = 0;
    if (!measures(b) || !mt_path_exists(machine) || !mt_path_exists(rates) || !mt_path_exists(steps))
        return 0;
    int rc = mt_json_read_lines(&metrics, steps, err);
    size_t most = rc ? 0 : (size_t)cJSON_GetArraySize(metrics);
    rc = rc ?: MT_NEW(&s.predicted, most, "predictions", err)
            ?: MT_NEW(&s.ratio, most, "predictions", err)
            ?: mt_machine_read(&s.machine, machine, err)
            ?: rates_log_read(&s.log, rates, err)
            ?: predict_all(&s, metrics, b->sweep.warmup_steps, err);
    if (!rc && s.n) {
        run->predicted = mt_stats_of(s.predicted, s.n).median;
        run->ratio = mt_stats_of(s.ratio, s.n).median;
    }
    return rc;
}

/* --- prediction ----------------------------------------------------------------------------------- */

static void take_prediction(struct mt_sweep_prediction *p, const struct plan_view *v)
{
    const struct mt_plan_choice *c = &v->choice;
    const struct mt_plan_request *r = &v->request;
    const struct mt_rate *rate = v->machine.rate;
    p->fits = true;
    p->seconds = c->sim.seconds;
    p->device_bytes = (double)c->engine.device_bytes;
    p->host_bytes = (double)c->host_bytes;
    p->tokens = (double)(r->numerics.rows_per_step * r->numerics.seq_len);
    p->model_flops = p->tokens * mt_layout_flops_per_token(v->layout, (size_t)r->numerics.seq_len) *
                     mt_optimizer_flops_share(&r->numerics);
    p->peak_flops = 1e12 * rate[mt_machine_peak(&r->numerics)].value;
    for (int i = 0; i < MT_SIM_N_PHASES; i++)
        snprintf(p->bound[i], sizeof(p->bound[i]), "%s", mt_queues[c->sim.bound[i]].title);
}

int bench_predict(struct bench *b, const struct mt_sweep_job *j, struct mt_sweep_prediction *p, struct mt_err *err)
{
    char path[3200];
    struct plan_view *v = &b->view;
    *p = (struct mt_sweep_prediction){.fits = true};
    b->predicted = false;
    int rc = bench_write_job(b, j, path, sizeof(path), err)
          ?: plan_view_open(v, path, b->args, err)
          ?: plan_view_needs_rates(v, err)
          ?: mt_resolve(&v->choice, &v->request, err);
    if (!rc) {
        take_prediction(p, v);
        b->predicted = true;
    }
    bool mistake = rc && (err->kind == MT_ERR_USAGE || err->kind == MT_ERR_INPUT) && !v->layout;
    if (mistake && !cli_arg(b->args, "predict-only")) /* its run says so, and the others are made */
        return 0;
    if (rc == -ENOSPC) {
        p->fits = false;
        rc = 0;
    } else if ((rc == -ENOENT || rc == -ESTALE) && v->layout && !cli_arg(b->args, "predict-only") &&
               !cli_arg(b->args, "measure")) {
        if (!b->unpredicted)
            mt_warn("the table has no predictions: %s", err->msg);
        b->unpredicted = true;
        rc = 0;
    }
    return rc;
}

/* --- running -------------------------------------------------------------------------------------- */

static int run_child(struct bench *b, const struct mt_sweep_job *j, int k, struct mt_sweep_run *r,
                     const char *steps, const char *rates, struct mt_err *err)
{
    const size_t job = (size_t)(j - b->sweep.jobs);
    return bench_child_run(r, b, &(struct bench_child){&job, 1, k, steps, rates}, err);
}

/* A run; the machine is measured right before it and between its steps. That takes memory, so the job's own memory is
 * measured by a short run without it, before the first. */
static int run_measured(struct bench *b, const struct mt_sweep_job *j, int k, struct mt_sweep_run *r,
                        struct mt_err *err)
{
    double peak = 0;
    int rc = 0;
    if (!k) {
        rc = run_child(b, j, k, r, "3", NULL, err);
        peak = r->peak_bytes;
        if (rc || b->interrupted || strcmp(r->status, "ok"))
            return rc;
    }
    rc = plan_view_measure(&b->view, b->cli, true, err)
      ?: mt_machine_write(&b->view.machine, PROFILE_OF(b, j, k), err)
      ?: run_child(b, j, k, r, NULL, RATES_OF(b, j, k), err);
    r->peak_bytes = peak;
    return rc;
}

/* A run; saved when it is complete, and a result of its job: other exit codes may be temporary, such as a folder in
 * use. */
static int run_once(struct bench *b, const struct mt_sweep_job *j, int k, struct mt_sweep_run *r,
                    struct mt_err *err)
{
    int rc = measures(b) ? run_measured(b, j, k, r, err) : run_child(b, j, k, r, NULL, NULL, err);
    bool result = !b->interrupted && strncmp(r->status, "exit ", 5);
    return rc || !result ? rc : mt_sweep_run_save(r, b->dir, j->hash, k, err);
}

double bench_spread(const struct mt_sweep_run *runs, int n)
{
    double v[BENCH_MAX_RUNS];
    for (int i = 0; i < n; i++)
        v[i] = runs[i].ratio > 0 ? runs[i].ratio : runs[i].seconds;
    struct mt_stats s = mt_stats_of(v, (size_t)n);
    return s.median > 0 ? s.deviation / s.median : 0;
}

int bench_run_job(struct bench *b, const struct mt_sweep_job *j, struct mt_sweep_run *runs, size_t *n,
                  struct mt_err *err)
{
    int most = MT_MIN(MT_MAX(b->sweep.max_repeat, b->sweep.repeat), BENCH_MAX_RUNS), rc = 0;
    *n = 0;
    for (int k = 0; k < most && !rc && !b->interrupted; k++) {
        if (k >= b->sweep.repeat && bench_spread(runs, k) <= b->sweep.spread)
            break;
        rc = mt_sweep_run_load(&runs[k], b->dir, j->hash, k, err);
        if (rc == -ENOENT && k && runs[0].shared_by > 1)
            return 0; /* bench_run_group() has repeated it */
        bool other = !rc && runs[k].shared_by > 1 && b->sweep.share_base == MT_SHARE_OFF;
        if (rc == -ENOENT || other)
            rc = run_once(b, j, k, &runs[k], err);
        if (!rc && !b->interrupted)
            rc = predict_run(b, j, k, &runs[k], err);
        if (!rc && !b->interrupted)
            *n = (size_t)k + 1;
        if (!rc && strcmp(runs[k].status, "ok")) {
            if (b->sweep.abort_on_oom && !strcmp(runs[k].status, "does not fit"))
                rc = mt_fail(err, MT_ERR_NO_FIT, -ENOSPC, "job %s does not fit", j->hash);
            break; /* another run would fail, too */
        }
    }
    return rc;
}
