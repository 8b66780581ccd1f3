/* SPDX-License-Identifier: Apache-2.0 */
/* Jobs of a sweep, one by one: what they are predicted to take, and runs of them. */
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/log.h"
#include "base/mem.h"
#include "bench.h"
#include "bench_child.h"
#include "bench_predict.h"

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
    p->model_flops = p->tokens * mt_layout_flops_per_token(v->layout, (size_t)r->numerics.seq_len);
    p->peak_flops = 1e12 * rate[mt_machine_peak(&r->numerics)].value;
    for (int i = 0; i < MT_SIM_N_PHASES; i++)
        snprintf(p->bound[i], sizeof(p->bound[i]), "%s", mt_sim_resource_name(c->sim.bound[i]));
}

int bench_predict(struct bench *b, const struct mt_sweep_job *j, struct mt_sweep_prediction *p, struct mt_err *err)
{
    char path[3200];
    struct plan_view *v = &b->view;
    *p = (struct mt_sweep_prediction){.fits = true};
    b->predicted = false;
    int rc = bench_write_job(b, j, path, sizeof(path), err);
    if (rc)
        return rc;
    rc = plan_view_open(v, path, b->args, err)
      ?: plan_view_needs_rates(v, err)
      ?: mt_resolve(&v->choice, &v->request, err);
    if (!rc) {
        take_prediction(p, v);
        b->predicted = true;
    }
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
    char ini[3200], dir[3300], log[3300];
    int rc = bench_write_job(b, j, ini, sizeof(ini), err);
    snprintf(dir, sizeof(dir), "%.3000s/runs/%s.%d", b->dir, j->hash, k);
    snprintf(log, sizeof(log), "%.3000s/%s.%d.log", b->dir, j->hash, k);
    if (rc)
        return rc;
    if (b->sweep.cooldown > 0)
        usleep((useconds_t)(b->sweep.cooldown * 1e6));
    return bench_child_run(r, &(struct bench_child){&ini, &dir, 1, log, steps, rates, b->sweep.warmup_steps,
                                                    b->sweep.warmup_steps + b->sweep.steps}, &b->interrupted, err);
}

static bool measures(const struct bench *b)
{
    return b->predicted && cli_arg(b->args, "measure");
}

static void name_measured(const struct bench *b, struct bench_measured *m, const struct mt_sweep_job *j, int k)
{
    snprintf(m->machine, sizeof(m->machine), "%.3000s/%s.%d.machine", b->dir, j->hash, k);
    snprintf(m->rates, sizeof(m->rates), "%.3000s/%s.%d.rates", b->dir, j->hash, k);
    snprintf(m->metrics, sizeof(m->metrics), "%.3000s/runs/%s.%d/metrics.jsonl", b->dir, j->hash, k);
}

/* A run; the machine is measured right before it and between its steps. That takes memory, so the job's own memory is
 * measured by a short run without it, before the first. */
static int run_measured(struct bench *b, const struct mt_sweep_job *j, int k, struct mt_sweep_run *r,
                        struct mt_err *err)
{
    struct bench_measured m;
    double peak = 0;
    int rc = 0;
    name_measured(b, &m, j, k);
    if (!k) {
        rc = run_child(b, j, k, r, "3", NULL, err);
        peak = r->peak_bytes;
        if (rc || b->interrupted || strcmp(r->status, "ok"))
            return rc;
    }
    rc = plan_view_measure(&b->view, b->cli, true, err)
      ?: mt_machine_write(&b->view.machine, m.machine, err)
      ?: run_child(b, j, k, r, NULL, m.rates, err);
    r->peak_bytes = peak;
    return rc;
}

/* Whether a run's status is a result of its job: other exit codes may be temporary, such as a folder in use. */
static bool is_result(const struct mt_sweep_run *r)
{
    return strncmp(r->status, "exit ", 5) != 0;
}

/* A run; saved when it is complete. */
static int run_once(struct bench *b, const struct mt_sweep_job *j, int k, struct mt_sweep_run *r,
                    struct mt_err *err)
{
    int rc = measures(b) ? run_measured(b, j, k, r, err) : run_child(b, j, k, r, NULL, NULL, err);
    return rc || b->interrupted || !is_result(r) ? rc : mt_sweep_run_save(r, b->dir, j->hash, k, err);
}

static int predict_run(const struct bench *b, const struct mt_sweep_job *j, int k, struct mt_sweep_run *r,
                       struct mt_err *err)
{
    struct bench_measured m;
    name_measured(b, &m, j, k);
    return measures(b) ? bench_predict_steps(r, &b->view, &m, b->sweep.warmup_steps, err) : 0;
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
