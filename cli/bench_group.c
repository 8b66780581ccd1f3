/* SPDX-License-Identifier: Apache-2.0 */
/* Jobs of a sweep that run on one base. */
#include <stdio.h>
#include <string.h>

#include "base/fs.h"
#include "base/log.h"
#include "base/mem.h"
#include "base/strbuf.h"
#include "bench.h"
#include "cli.h"
#include "config/schema.h"
#include "plan/resolve.h"
#include "sweep/sweep.h"
#include "train/shared.h"

/** A job's configuration, as far as it decides which jobs may share a base. */
struct bench_share {
    struct mt_config *cfg;       /* owned; NULL: it cannot be read, which its own run will say */
    struct mt_numerics numerics;
    struct mt_shared_of of;      /* both */
};

static bool same_text(const struct mt_config *a, const struct mt_config *b, const struct mt_key *key)
{
    MT_STR_FREED struct mt_str x = {0}, y = {0};
    mt_key_print(a, key, &x);
    mt_key_print(b, key, &y);
    return !x.failed && !y.failed && x.len == y.len && (!x.len || !memcmp(x.p, y.p, x.len));
}

static const char *alone(const struct bench_share *a)
{
    if (!a->cfg)
        return "its configuration cannot be read";
    if (a->cfg->adapter.kind == MT_ADAPTER_NONE)
        return "it trains no adapters (adapter.kind)";
    return mt_shared_alone(&a->of);
}

/*
 * Why jobs of these configurations, or `a` with any, do not run on one base: "its runs train no adapters
 * (adapter.kind)", or "memory.slots differs"; NULL: they may. Beside what a shared run refuses, keys of placement and
 * of the machine are compared: a sweep over these asks for the time of each.
 */
static const char *bench_share_refusal(const struct bench_share *a, const struct bench_share *b, char *buf, size_t len)
{
    const char *why = alone(a), *key = NULL;
    why = why ? why : alone(b);
    if (why)
        return why;
    for (size_t i = 0; i < mt_n_keys() && !key; i++) {
        const struct mt_key *k = mt_key_at(i);
        if ((k->role == MT_PLACEMENT || k->role == MT_MACHINE) && !same_text(a->cfg, b->cfg, k)) {
            snprintf(buf, len, "%s.%s differs", k->section, k->name);
            return buf;
        }
    }
    key = mt_shared_difference(&a->of, &b->of);
    snprintf(buf, len, "%s differs", key ? key : "");
    return key ? buf : NULL;
}

static int refuse(const struct bench *b, size_t first, size_t job, const char *why, struct mt_err *err)
{
    char x[80], y[80];
    bench_describe(x, sizeof(x), &b->sweep.jobs[first]);
    bench_describe(y, sizeof(y), &b->sweep.jobs[job]);
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
        if (b->group[k] != k || !bench_chosen(b, &b->sweep.jobs[k]))
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

int bench_find_groups(struct bench *b, struct mt_err *err)
{
    size_t n = b->sweep.n_jobs;
    char ini[3200];
    bool measured = cli_arg(b->args, "measure");
    MT_FREED struct bench_share *s = NULL;
    int rc = MT_NEW(&s, n, "a sweep", err) ?: MT_NEW(&b->group, n, "a sweep", err);
    for (size_t i = 0; i < n && !rc; i++)
        b->group[i] = i;
    if (!rc && measured && b->sweep.share_base == MT_SHARE_ON)
        rc = mt_fail(err, MT_ERR_USAGE, -EINVAL, "--measure is of one job at a time: set share_base = off");
    bool none = measured || b->sweep.share_base == MT_SHARE_OFF || cli_arg(b->args, "predict-only");
    for (size_t i = 0; i < n && !none && !rc; i++) {
        if (!bench_chosen(b, &b->sweep.jobs[i]))
            continue;
        rc = bench_write_job(b, &b->sweep.jobs[i], ini, sizeof(ini), err);
        if (!rc && (cli_load_file(&s[i].cfg, ini, MT_TO_TRAIN, b->args, NULL)
                 ?: mt_resolve_numerics(&s[i].numerics, s[i].cfg, NULL)))
            mt_config_destroy(&s[i].cfg);
        if (s[i].cfg)
            s[i].of = (struct mt_shared_of){s[i].cfg, &s[i].numerics, s[i].cfg->model.path};
        rc = rc ?: find_group(b, s, i, err);
    }
    for (size_t i = 0; s && i < n; i++)
        mt_config_destroy(&s[i].cfg);
    return rc;
}

/* The k-th run of these jobs on one base. *refused: they cannot, and run alone. */
static int run_shared(struct bench *b, const size_t *job, size_t n, int k, struct mt_sweep_run *r, bool *refused,
                      struct mt_err *err)
{
    int rc = bench_child_run(r, b, &(struct bench_child){.job = job, .n = n, .k = k}, err);
    size_t ok = 0;
    for (size_t i = 0; i < n && !rc; i++)
        ok += !strcmp(r[i].status, "ok");
    *refused = !ok;
    for (size_t i = 0; i < n && !rc && ok && !b->interrupted; i++)
        if (!strcmp(r[i].status, "ok"))
            rc = mt_sweep_run_save(&r[i], b->dir, b->sweep.jobs[job[i]].hash, k, err);
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

int bench_run_group(struct bench *b, size_t first, struct mt_err *err)
{
    size_t job[MT_SWEEP_SHARED], n = 0;
    int most = MT_MIN(MT_MAX(b->sweep.max_repeat, b->sweep.repeat), BENCH_MAX_RUNS);
    for (size_t i = first; i < b->sweep.n_jobs; i++)
        if (b->group[i] == first && bench_chosen(b, &b->sweep.jobs[i]) && !ran_alone(b, i))
            job[n++] = i;
    MT_FREED struct mt_sweep_run *r = NULL, *of_first = NULL;
    int rc = MT_NEW(&r, n + 1, "a sweep", err) ?: MT_NEW(&of_first, (size_t)most, "a sweep", err);
    for (int k = 0; k < most && n > 1 && !rc && !b->interrupted; k++) {
        bool refused = false;
        if (k >= b->sweep.repeat && bench_spread(of_first, k) <= b->sweep.spread)
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
    return rc;
}
