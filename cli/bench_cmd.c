/* SPDX-License-Identifier: Apache-2.0 */
#include <dirent.h>
#include <fnmatch.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/fs.h"
#include "base/json.h"
#include "base/log.h"
#include "base/mem.h"
#include "bench_child.h"
#include "bench_predict.h"
#include "bench_share.h"
#include "checkpoint/checkpoint.h"
#include "checkpoint/output.h"
#include "cli.h"
#include "sweep/sweep.h"

enum { MAX_RUNS = 64 };

struct bench {
    struct cli *cli;
    const struct cli_args *args;
    struct mt_sweep sweep;
    char dir[4096];
    struct mt_sweep_row *rows; /* of the selected jobs, so far */
    size_t n_rows;
    struct plan_view view; /* of the current job */
    bool predicted;        /* view.choice is valid */
    bool interrupted, unpredicted; /* unpredicted: the reason for missing predictions has been printed */
    size_t *group;         /* [sweep.n_jobs] the first of the jobs that share a base; its own number: it shares none */
    int lock; /* on the folder; -1: not held */
};

static bool chosen(const struct bench *b, const struct mt_sweep_job *j)
{
    const char *glob = cli_arg(b->args, "only");
    if (!glob || !fnmatch(glob, j->name, 0))
        return true;
    for (size_t i = 0; i < j->axes.n; i++) {
        char point[600];
        snprintf(point, sizeof(point), "%s=%s", j->axes.p[i].key, j->axes.p[i].value);
        if (!fnmatch(glob, point, 0))
            return true;
    }
    return false;
}

static void describe(char *buf, size_t len, const struct mt_sweep_job *j)
{
    int at = snprintf(buf, len, "%s", j->name);
    for (size_t i = 0; i < j->axes.n && at >= 0 && (size_t)at < len; i++) {
        const char *dot = strchr(j->axes.p[i].key, '.');
        at += snprintf(buf + at, len - (size_t)at, "%s%s=%s", at ? " " : "", dot ? dot + 1 : "",
                       j->axes.p[i].value);
    }
    if (!buf[0])
        snprintf(buf, len, "%s", j->hash);
}

static int write_job(const struct bench *b, const struct mt_sweep_job *j, char *path, size_t len,
                     struct mt_err *err)
{
    snprintf(path, len, "%.3000s/%s.ini", b->dir, j->hash);
    return mt_write_file(path, j->ini, strlen(j->ini), err);
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
    p->model_flops = p->tokens * mt_layout_flops_per_token(v->layout, (size_t)r->numerics.seq_len);
    p->peak_flops = 1e12 * rate[mt_machine_peak(&r->numerics)].value;
    for (int i = 0; i < MT_SIM_N_PHASES; i++)
        snprintf(p->bound[i], sizeof(p->bound[i]), "%s", mt_sim_resource_name(c->sim.bound[i]));
}

/* Opens the job's view. Without a profile of the machine there is no prediction, an error if one was asked for. */
static int predict(struct bench *b, const struct mt_sweep_job *j, struct mt_sweep_prediction *p,
                   struct mt_err *err)
{
    char path[3200];
    struct plan_view *v = &b->view;
    *p = (struct mt_sweep_prediction){.fits = true};
    b->predicted = false;
    int rc = write_job(b, j, path, sizeof(path), err);
    if (rc)
        return rc;
    rc = plan_view_open(v, path, b->args, err);
    if (!rc)
        rc = mt_resolve(&v->choice, &v->request, err);
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
    int rc = write_job(b, j, ini, sizeof(ini), err);
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
    rc = plan_view_measure(&b->view, b->cli, true, err);
    if (!rc)
        rc = mt_machine_write(&b->view.machine, m.machine, err);
    if (!rc)
        rc = run_child(b, j, k, r, NULL, m.rates, err);
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

/* Spread of measured / predicted if each run has its own prediction, else of the measured times. */
static double spread_of(const struct mt_sweep_run *runs, int n)
{
    double v[MAX_RUNS];
    for (int i = 0; i < n; i++)
        v[i] = runs[i].ratio > 0 ? runs[i].ratio : runs[i].seconds;
    struct mt_stats s = mt_stats_of(v, (size_t)n);
    return s.median > 0 ? s.deviation / s.median : 0;
}

/* Repeats a job, and again while the results differ too much. */
static int run_job(struct bench *b, const struct mt_sweep_job *j, struct mt_sweep_run *runs, size_t *n,
                   struct mt_err *err)
{
    int most = MT_MIN(MT_MAX(b->sweep.max_repeat, b->sweep.repeat), MAX_RUNS), rc = 0;
    *n = 0;
    for (int k = 0; k < most && !rc && !b->interrupted; k++) {
        if (k >= b->sweep.repeat && spread_of(runs, k) <= b->sweep.spread)
            break;
        rc = mt_sweep_run_load(&runs[k], b->dir, j->hash, k, err);
        if (rc == -ENOENT && k && runs[0].shared_by > 1)
            return 0; /* shared_runs() has repeated it */
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

/* --- several on one base ---------------------------------------------------------------------------- */

static int refuse(const struct bench *b, size_t first, size_t job, const char *why, struct mt_err *err)
{
    char x[80], y[80];
    describe(x, sizeof(x), &b->sweep.jobs[first]);
    describe(y, sizeof(y), &b->sweep.jobs[job]);
    return mt_fail(err, MT_ERR_USAGE, -EINVAL, "share_base = on: the jobs %s and %s cannot share a base: %s; auto "
                   "shares where that is possible", x, y, why);
}

/* Adds a job to the first group that it may be in. With share_base = on, all are of one kind: fails with why not. */
static int find_group(struct bench *b, const struct bench_share *s, size_t job, struct mt_err *err)
{
    bool on = b->sweep.share_base == MT_SHARE_ON;
    char buf[160];
    for (size_t k = 0; k <= job; k++) { /* the last of these is itself */
        size_t n = 0;
        if (b->group[k] != k || !chosen(b, &b->sweep.jobs[k]))
            continue;
        for (size_t i = k; i < job; i++)
            n += b->group[i] == k;
        const char *why = bench_share_refusal(&s[k], &s[job], buf, sizeof(buf));
        if (why && on)
            return refuse(b, k, job, why, err);
        if (why || n >= MT_SWEEP_SHARED)
            continue;
        b->group[job] = k;
        break;
    }
    return 0;
}

/* Which jobs run on one base. */
static int find_groups(struct bench *b, struct mt_err *err)
{
    size_t n = b->sweep.n_jobs;
    char ini[3200];
    bool measured = cli_arg(b->args, "measure");
    struct bench_share *s = mt_calloc(n, sizeof(*s));
    b->group = mt_calloc(n, sizeof(*b->group));
    int rc = s && b->group ? 0 : mt_fail_nomem(err, "a sweep", n * sizeof(*s));
    for (size_t i = 0; i < n && !rc; i++)
        b->group[i] = i;
    if (!rc && measured && b->sweep.share_base == MT_SHARE_ON)
        rc = mt_fail(err, MT_ERR_USAGE, -EINVAL, "--measure is of one job at a time: set share_base = off");
    bool none = measured || b->sweep.share_base == MT_SHARE_OFF || cli_arg(b->args, "predict-only");
    for (size_t i = 0; i < n && !none && !rc; i++) {
        if (!chosen(b, &b->sweep.jobs[i]))
            continue;
        rc = write_job(b, &b->sweep.jobs[i], ini, sizeof(ini), err);
        if (!rc)
            bench_share_open(&s[i], ini, b->args);
        if (!rc)
            rc = find_group(b, s, i, err);
    }
    for (size_t i = 0; s && i < n; i++)
        bench_share_finish(&s[i]);
    free(s);
    return rc;
}

/* The k-th run of these jobs on one base. *refused: they cannot, and run alone. */
static int run_shared(struct bench *b, const size_t *job, size_t n, int k, struct mt_sweep_run *r, bool *refused,
                      struct mt_err *err)
{
    char (*ini)[3200] = mt_calloc(n, sizeof(*ini)), (*dir)[3300] = mt_calloc(n, sizeof(*dir)), log[3300], text[7000];
    int rc = ini && dir ? 0 : mt_fail_nomem(err, "a sweep", n * sizeof(*ini));
    for (size_t i = 0; i < n && !rc; i++) {
        const struct mt_sweep_job *j = &b->sweep.jobs[job[i]];
        snprintf(dir[i], sizeof(dir[i]), "%.3000s/runs/%s.%d", b->dir, j->hash, k);
        snprintf(ini[i], sizeof(ini[i]), "%.3000s/%s.%d.ini", b->dir, j->hash, k);
        char *whole = realpath(b->dir, NULL);
        snprintf(text, sizeof(text), "[global]\ninclude = %s.ini\n[checkpoint]\ndir = %.3000s/runs/%s.%d\n", j->hash,
                 whole ? whole : b->dir, j->hash, k);
        free(whole);
        rc = mt_write_file(ini[i], text, strlen(text), err);
    }
    if (!rc && b->sweep.cooldown > 0)
        usleep((useconds_t)(b->sweep.cooldown * 1e6));
    snprintf(log, sizeof(log), "%.3000s/%s.%d.log", b->dir, b->sweep.jobs[job[0]].hash, k);
    if (!rc)
        rc = bench_child_run(r, &(struct bench_child){.ini = (const char (*)[3200])ini,
                                                      .dir = (const char (*)[3300])dir, .n = n, .log = log,
                                                      .warmup_steps = b->sweep.warmup_steps,
                                                      .all_steps = b->sweep.warmup_steps + b->sweep.steps},
                             &b->interrupted, err);
    size_t ok = 0;
    for (size_t i = 0; i < n && !rc; i++)
        ok += !strcmp(r[i].status, "ok");
    *refused = !ok;
    for (size_t i = 0; i < n && !rc && ok && !b->interrupted; i++)
        if (!strcmp(r[i].status, "ok"))
            rc = mt_sweep_run_save(&r[i], b->dir, b->sweep.jobs[job[i]].hash, k, err);
    free(ini);
    free(dir);
    return rc;
}

/* Whether the job's first run was one alone. */
static bool ran_alone(const struct bench *b, size_t job)
{
    struct mt_sweep_run r;
    return !mt_sweep_run_load(&r, b->dir, b->sweep.jobs[job].hash, 0, NULL) && !(r.shared_by > 1);
}

/* What the folder has of the k-th shared run; false: not all. */
static bool load_shared(struct mt_sweep_run *r, const struct bench *b, const size_t *job, size_t n, int k)
{
    bool all = true;
    for (size_t i = 0; i < n && all; i++)
        all = !mt_sweep_run_load(&r[i], b->dir, b->sweep.jobs[job[i]].hash, k, NULL) && r[i].shared_by > 1;
    return all;
}

/* Of the job that shares a base with later ones: runs all of them, as often as run_job() would, which then finds the
 * results. What fails runs again alone: that tells the reason. */
static int shared_runs(struct bench *b, size_t first, struct mt_err *err)
{
    size_t job[MT_SWEEP_SHARED], n = 0;
    int most = MT_MIN(MT_MAX(b->sweep.max_repeat, b->sweep.repeat), MAX_RUNS), rc = 0;
    for (size_t i = first; i < b->sweep.n_jobs; i++)
        if (b->group[i] == first && chosen(b, &b->sweep.jobs[i]) && !ran_alone(b, i))
            job[n++] = i;
    struct mt_sweep_run *r = mt_calloc(n + 1, sizeof(*r)), *of_first = mt_calloc((size_t)most, sizeof(*r));
    if (!r || !of_first)
        rc = mt_fail_nomem(err, "a sweep", (n + (size_t)most) * sizeof(*r));
    for (int k = 0; k < most && n > 1 && !rc && !b->interrupted; k++) {
        bool refused = false;
        if (k >= b->sweep.repeat && spread_of(of_first, k) <= b->sweep.spread)
            break; /* times are those of all */
        if (!load_shared(r, b, job, n, k))
            rc = run_shared(b, job, n, k, r, &refused, err);
        if (!rc && refused && !b->interrupted) {
            const char *hash = b->sweep.jobs[job[0]].hash;
            if (b->sweep.share_base == MT_SHARE_ON)
                rc = mt_fail(err, MT_ERR_RUNTIME, -EIO, "share_base = on: %zu jobs could not run on one base (%s): "
                             "%.3000s/%s.%d.log says why", n, r[0].status, b->dir, hash, k);
            else
                mt_warn("%zu jobs could not run on one base (%s): they run one by one; %.3000s/%s.%d.log", n,
                        r[0].status, b->dir, hash, k);
            break;
        }
        of_first[k] = r[0];
        for (size_t i = 1; i < n && !(of_first[k].seconds > 0); i++)
            of_first[k] = r[i];
        size_t left = 0; /* what has failed is no part of the next */
        for (size_t i = 0; i < n; i++)
            if (!strcmp(r[i].status, "ok"))
                job[left++] = job[i];
        n = left;
    }
    free(r);
    free(of_first);
    return rc;
}

/* --- tables --------------------------------------------------------------------------------------- */

static int export(const struct bench *b, const char *option, const char *name, const struct mt_str *text,
                  struct mt_err *err)
{
    char path[4200];
    const char *also = cli_arg(b->args, option);
    mt_path_printf(path, sizeof(path), "%s/%s", b->dir, name);
    int rc = text->failed ? mt_fail_nomem(err, path, text->len)
                          : mt_write_file(path, text->p ? text->p : "", text->len, err);
    return rc || !also ? rc : mt_write_file(also, text->p ? text->p : "", text->len, err);
}

static int write_tables(const struct bench *b, struct mt_err *err)
{
    struct mt_str csv = {0}, md = {0}, json = {0};
    mt_sweep_csv(&csv, b->rows, b->n_rows);
    mt_sweep_markdown(&md, b->rows, b->n_rows);
    cJSON *o = mt_sweep_json(b->rows, b->n_rows);
    char *text = mt_json_print(o, true);
    mt_str_printf(&json, "%s\n", text ? text : "");
    free(text);
    cJSON_Delete(o);
    int rc = export(b, "export-csv", "sweep.csv", &csv, err);
    if (!rc)
        rc = export(b, "export-json", "sweep.json", &json, err);
    if (!rc)
        rc = export(b, "export-markdown", "sweep.md", &md, err);
    mt_str_finish(&csv);
    mt_str_finish(&md);
    mt_str_finish(&json);
    return rc;
}

/* Whether a job failed. That it does not fit is a result. */
static bool failed(const struct mt_sweep_row *r)
{
    return strcmp(r->status, "ok") && strcmp(r->status, "does not fit") && strcmp(r->status, "predicted");
}

/* Prints the last line of a failed job's log. */
static void print_reason(const struct bench *b, const struct mt_sweep_row *r)
{
    char path[3300], line[1024], last[1024] = "";
    snprintf(path, sizeof(path), "%.3000s/%s.0.log", b->dir, r->job->hash);
    FILE *f = fopen(path, "re");
    while (f && fgets(line, sizeof(line), f))
        if (*line != '\n')
            memcpy(last, line, sizeof(line));
    if (f)
        fclose(f);
    last[strcspn(last, "\n")] = 0;
    fprintf(stderr, "    %s (%s)\n", *last ? last : "its log is empty", path);
}

static void print_live(const struct bench *b, const struct mt_sweep_row *r, size_t done, size_t all)
{
    char what[80];
    const struct mt_stats *s = &r->seconds;
    if (b->cli->quiet)
        return;
    describe(what, sizeof(what), r->job);
    fprintf(stderr, "%zu/%zu %-44s ", done, all, what);
    if (s->n > 1)
        fprintf(stderr, "%8.4g s +-%4.1f%%", s->median, 100 * s->deviation / s->median);
    else if (s->n)
        fprintf(stderr, "%8.4g s %6s", s->median, "");
    else
        fprintf(stderr, "%-17s", r->status);
    if (r->run.shared_by > 1)
        fprintf(stderr, "  of %.0f jobs on one base", r->run.shared_by);
    if (r->predicted.seconds > 0)
        fprintf(stderr, "  predicted %8.4g s", r->predicted.seconds);
    if (r->ratio.n)
        fprintf(stderr, " (%.2f)", r->ratio.median);
    fprintf(stderr, "\n");
    if (failed(r))
        print_reason(b, r);
}

/* sweep.csv and the like, or a file of a job: its 16 hexadecimal digits and one of our extensions. */
static bool is_own_file(const char *name)
{
    static const char *const whole[] = {"sweep.csv", "sweep.json", "sweep.md"};
    static const char *const endings[] = {".ini", ".log", ".json", ".machine", ".rates"};
    for (size_t i = 0; i < MT_ARRAY_LEN(whole); i++)
        if (!strcmp(name, whole[i]))
            return true;
    const char *dot = strrchr(name, '.');
    bool ours = dot && strspn(name, "0123456789abcdef") == 16 && name[16] == '.';
    for (size_t i = 0; i < MT_ARRAY_LEN(endings); i++)
        if (ours && !strcmp(dot, endings[i]))
            return true;
    return false;
}

/* The folder of a run: "<hash>.<number>" in runs/. */
static bool is_own_run(const char *name)
{
    return strspn(name, "0123456789abcdef") == 16 && name[16] == '.' && name[17] &&
           strspn(name + 17, "0123456789") == strlen(name + 17);
}

static int remove_own(const char *dir, bool (*is_own)(const char *), struct mt_err *err)
{
    DIR *d = opendir(dir);
    int rc = 0;
    for (struct dirent *e; d && !rc && (e = readdir(d));) {
        char *path = is_own(e->d_name) ? mt_path_join(dir, e->d_name) : NULL;
        if (path)
            rc = mt_remove_tree(path, err);
        free(path);
    }
    if (d)
        closedir(d);
    return rc;
}

/* Removes earlier results only: the folder may hold other files. */
static int remove_results(const char *dir, struct mt_err *err)
{
    char runs[4200];
    mt_path_printf(runs, sizeof(runs), "%s/runs", dir);
    int rc = remove_own(runs, is_own_run, err);
    return rc ? rc : remove_own(dir, is_own_file, err);
}

static int open_folder(struct bench *b, const char *sweep_path, struct mt_err *err)
{
    const char *out = cli_arg(b->args, "out");
    size_t len = strlen(sweep_path);
    bool ini = len > 4 && !strcmp(sweep_path + len - 4, ".ini");
    if (out)
        snprintf(b->dir, sizeof(b->dir), "%s", out);
    else
        snprintf(b->dir, sizeof(b->dir), "%.*s.bench", (int)(ini ? len - 4 : len), sweep_path);
    int rc = 0;
    if (mt_is_dir(b->dir) && cli_arg(b->args, "force"))
        rc = remove_results(b->dir, err);
    else if (mt_is_dir(b->dir) && !cli_arg(b->args, "resume"))
        return mt_fail(err, MT_ERR_USAGE, -EEXIST,
                       "%s exists already: continue with --resume, remove its earlier results with --force, or "
                       "choose --out",
                       b->dir);
    char runs[4200];
    mt_path_printf(runs, sizeof(runs), "%s/runs", b->dir);
    if (!rc)
        rc = mt_mkdir_p(runs, err);
    return rc ? rc : mt_output_lock(runs, &b->lock, err);
}

static size_t n_chosen(const struct bench *b)
{
    size_t n = 0;
    for (size_t i = 0; i < b->sweep.n_jobs; i++)
        n += chosen(b, &b->sweep.jobs[i]);
    return n;
}

static int run_sweep(struct bench *b, struct mt_err *err)
{
    struct mt_sweep_run *runs = mt_calloc(MAX_RUNS, sizeof(*runs));
    size_t all = n_chosen(b);
    int rc = find_groups(b, err);
    b->rows = mt_calloc(b->sweep.n_jobs + 1, sizeof(*b->rows));
    if (!rc && (!b->rows || !runs))
        rc = mt_fail_nomem(err, "a sweep", b->sweep.n_jobs * sizeof(*b->rows));
    for (size_t i = 0; i < b->sweep.n_jobs && !rc && !b->interrupted; i++) {
        const struct mt_sweep_job *j = &b->sweep.jobs[i];
        struct mt_sweep_prediction p;
        size_t n = 0;
        if (!chosen(b, j))
            continue;
        if (b->group[i] == i)
            rc = shared_runs(b, i, err);
        if (rc || b->interrupted)
            break;
        rc = predict(b, j, &p, err);
        if (!rc && !cli_arg(b->args, "predict-only"))
            rc = run_job(b, j, runs, &n, err);
        plan_view_close(&b->view);
        if (rc || b->interrupted)
            break;
        mt_sweep_row_fill(&b->rows[b->n_rows++], j, runs, n, &p);
        print_live(b, &b->rows[b->n_rows - 1], b->n_rows, all);
        rc = write_tables(b, err);
    }
    free(runs);
    return rc;
}

static int read_table(cJSON **out, const char *path, struct mt_err *err)
{
    char file[4200];
    mt_path_printf(file, sizeof(file), mt_is_dir(path) ? "%s/sweep.json" : "%s", path);
    return mt_json_read_file(out, file, MT_ERR_INPUT, err);
}

static int compare(const struct cli_args *args)
{
    cJSON *a = NULL, *b = NULL;
    struct mt_str text = {0};
    struct mt_err err;
    if (args->n_operands != 2) {
        fprintf(stderr, "megatrain bench --compare needs two result folders\n");
        return EXIT_USAGE;
    }
    int rc = read_table(&a, args->operands[0], &err);
    if (!rc)
        rc = read_table(&b, args->operands[1], &err);
    if (!rc) {
        mt_sweep_compare(&text, a, b);
        printf("%s", text.p ? text.p : "");
    }
    mt_str_finish(&text);
    cJSON_Delete(a);
    cJSON_Delete(b);
    return rc ? cli_fail(&err) : 0;
}

int cli_cmd_bench(struct cli *cli, const struct cli_args *args)
{
    struct bench b = {.cli = cli, .args = args, .lock = -1};
    struct mt_err err = {0};
    if (cli_arg(args, "compare"))
        return compare(args);
    int rc = mt_sweep_read(&b.sweep, args->operands[0], &err);
    if (!rc && !n_chosen(&b))
        rc = mt_fail(&err, MT_ERR_USAGE, -ENOENT, "no job matches --only %s", cli_arg(args, "only"));
    if (!rc)
        rc = open_folder(&b, args->operands[0], &err);
    if (!rc)
        rc = run_sweep(&b, &err);
    if (!rc && !b.interrupted) {
        struct mt_str md = {0};
        mt_sweep_markdown(&md, b.rows, b.n_rows);
        printf("%s", md.p ? md.p : "");
        mt_str_finish(&md);
    }
    size_t n_failed = 0;
    for (size_t i = 0; i < b.n_rows; i++)
        n_failed += failed(&b.rows[i]);
    if (!rc && !b.interrupted && n_failed && n_failed == b.n_rows)
        rc = mt_fail(&err, MT_ERR_RUNTIME, -EIO, "every one of the sweep's %zu jobs failed; %s holds their logs", n_failed,
                     b.dir);
    free(b.rows);
    free(b.group);
    mt_sweep_finish(&b.sweep);
    if (b.lock >= 0)
        close(b.lock);
    return rc ? cli_fail(&err) : b.interrupted ? 130 : 0;
}
