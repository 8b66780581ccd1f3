/* SPDX-License-Identifier: Apache-2.0 */
/* Jobs of a sweep, and runs of them in child processes. */
#include "bench.h"

#include <fcntl.h>
#include <fnmatch.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/fs.h"
#include "base/json.h"
#include "base/mem.h"

/* --- jobs ----------------------------------------------------------------------------------------- */

bool bench_chosen(const struct bench *b, const struct mt_sweep_job *j)
{
    const char *glob = cli_arg(b->args, "only");
    if (!glob || !fnmatch(glob, j->name, 0))
        return true;
    for (const cJSON *a = j->axes->child; a; a = a->next) {
        char point[600];
        snprintf(point, sizeof(point), "%s=%s", a->string, a->valuestring);
        if (!fnmatch(glob, point, 0))
            return true;
    }
    return false;
}

void bench_describe(char *buf, size_t len, const struct mt_sweep_job *j)
{
    int at = snprintf(buf, len, "%s", j->name);
    for (const cJSON *a = j->axes->child; a && at >= 0 && (size_t)at < len; a = a->next) {
        const char *dot = strchr(a->string, '.');
        at += snprintf(buf + at, len - (size_t)at, "%s%s=%s", at ? " " : "", dot ? dot + 1 : "", a->valuestring);
    }
    if (!buf[0])
        snprintf(buf, len, "%s", j->hash);
}

int bench_write_job(const struct bench *b, const struct mt_sweep_job *j, char *path, size_t len, struct mt_err *err)
{
    snprintf(path, len, "%.3000s/%s.ini", b->dir, j->hash);
    return mt_write_file(path, j->ini, strlen(j->ini), err);
}

/* --- a child process -------------------------------------------------------------------------------- */

static const char *hash_of(const struct bench *b, const struct bench_child *c, size_t i)
{
    return b->sweep.jobs[c->job[i]].hash;
}

/* The folder of the i-th run. */
#define DIR_OF(b, c, i) MT_PATH("%.3000s/runs/%s.%d", (b)->dir, hash_of(b, c, i), (c)->k)

/* The i-th configuration, of which the folder has the job's: of several, one that also names the run's folder. */
static int name_ini(char path[3200], const struct bench *b, const struct bench_child *c, size_t i, struct mt_err *err)
{
    char text[7000];
    if (c->n == 1) {
        snprintf(path, 3200, "%.3000s/%s.ini", b->dir, hash_of(b, c, i));
        return 0;
    }
    MT_FREED char *whole = realpath(b->dir, NULL);
    snprintf(path, 3200, "%.3000s/%s.%d.ini", b->dir, hash_of(b, c, i), c->k);
    snprintf(text, sizeof(text), "[global]\ninclude = %s.ini\n[checkpoint]\ndir = %.3000s/runs/%s.%d\n",
             hash_of(b, c, i), whole ? whole : b->dir, hash_of(b, c, i), c->k);
    return mt_write_file(path, text, strlen(text), err);
}

static void be_child(const struct bench *b, const struct bench_child *c, char (*ini)[3200], pid_t parent)
{
    prctl(PR_SET_PDEATHSIG, SIGTERM); /* the child ends if the sweep is killed */
    if (getppid() != parent)
        _exit(143);
    const char *argv[16 + MT_SWEEP_SHARED] = {"megatrain", "run", "--force", "--no-save", "--no-progress"};
    const char *options[][2] = {{"--out", c->n == 1 ? DIR_OF(b, c, 0) : NULL}, {"--max-steps", c->steps},
                                {"--rates", c->rates}};
    int n = 5;
    int fd = open(MT_PATH("%.3000s/%s.%d.log", b->dir, hash_of(b, c, 0), c->k),
                  O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0644);
    int adj = open("/proc/self/oom_score_adj", O_WRONLY | O_CLOEXEC);
    if (fd >= 0) {
        dup2(fd, STDOUT_FILENO);
        dup2(fd, STDERR_FILENO);
    }
    if (adj >= 0 && write(adj, "1000", 4) < 0) /* when memory runs out, the kernel kills the child */
        adj = -1;
    for (size_t i = 0; i < c->n; i++)
        argv[n++] = ini[i];
    for (size_t i = 0; i < MT_ARRAY_LEN(options); i++)
        if (options[i][1]) {
            argv[n++] = options[i][0];
            argv[n++] = options[i][1];
        }
    execv("/proc/self/exe", (char *const *)argv);
    _exit(127);
}

/* Medians over the measured steps of a run's metrics; of losses the mean. *last: its last step that was
 * not skipped: a run that fails skips the last. */
static int read_metrics(struct mt_sweep_run *r, const char *dir, int skip, struct mt_err *err)
{
    const struct {
        const char *key;
        double *median;
    } fields[] = {{"t_step", &r->seconds}, {"tok_s", &r->tok_s}, {"t_fwd", &r->t_fwd},
                  {"t_bwd", &r->t_bwd}, {"t_wait_h2d", &r->t_wait}, {"t_opt", &r->t_adam},
                  {"h2d_bytes", &r->h2d_bytes}, {"d2h_bytes", &r->d2h_bytes}, {"loss", &r->loss}};
    size_t n = 0;
    MT_FREED double *v = NULL;
    MT_JSON_FREED cJSON *lines = NULL;
    const cJSON *o;
    const char *path = MT_PATH("%s/metrics.jsonl", dir);
    int rc = mt_json_read_lines(&lines, path, err);
    rc = rc ?: MT_NEW(&v, (size_t)cJSON_GetArraySize(lines), path, err);
    for (size_t k = 0; k < MT_ARRAY_LEN(fields) && !rc; k++) {
        int left_out = skip;
        n = 0;
        cJSON_ArrayForEach(o, lines)
            if (mt_json_get(o, "t_step") && left_out-- <= 0)
                v[n++] = mt_json_number(o, fields[k].key, 0);
        if (n)
            *fields[k].median = fields[k].median == &r->loss ? mt_stats_of(v, n).mean : mt_stats_of(v, n).median;
    }
    return rc || n ? rc : mt_fail(err, MT_ERR_RUNTIME, -ENODATA, "%s: no step was measured", path);
}

/* Whether a run has come to this step. */
static bool has_step(const char *dir, int step)
{
    MT_JSON_FREED cJSON *lines = NULL;
    const cJSON *o;
    double last = 0;
    if (!mt_json_read_lines(&lines, MT_PATH("%s/metrics.jsonl", dir), NULL))
        cJSON_ArrayForEach(o, lines)
            if (mt_json_get(o, "t_step") && !cJSON_IsTrue(mt_json_get(o, "skipped")))
                last = mt_json_number(o, "step", 0);
    return last >= step;
}

static void read_run_json(struct mt_sweep_run *r, const char *dir)
{
    MT_JSON_FREED cJSON *o = NULL;
    mt_json_read_file(&o, MT_PATH("%s/run.json", dir), MT_ERR_RUNTIME, NULL);
    r->device_bytes = mt_json_number(o, "device_bytes", 0);
    r->planned_bytes = mt_json_number(o, "host_bytes", 0) + r->device_bytes;
}

static void set_status(struct mt_sweep_run *r, int status)
{
    int code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
    if (WIFSIGNALED(status))
        snprintf(r->status, sizeof(r->status), "signal %d", WTERMSIG(status));
    else if (code)
        snprintf(r->status, sizeof(r->status), code == EXIT_NO_FIT ? "does not fit" : "exit %d", code);
    else
        snprintf(r->status, sizeof(r->status), "ok");
}

int bench_child_run(struct mt_sweep_run *r, struct bench *b, const struct bench_child *c, struct mt_err *err)
{
    MT_FREED char (*ini)[3200] = NULL;
    struct rusage use = {0};
    int status = 0, rc = MT_NEW(&ini, c->n, "a sweep", err);
    for (size_t i = 0; i < c->n && !rc; i++)
        rc = name_ini(ini[i], b, c, i, err);
    if (rc)
        return rc;
    if (b->sweep.cooldown > 0)
        usleep((useconds_t)(b->sweep.cooldown * 1e6));
    memset(r, 0, c->n * sizeof(*r));
    fflush(NULL);
    pid_t parent = getpid(), pid = fork();
    if (!pid)
        be_child(b, c, ini, parent);
    if (pid < 0 || wait4(pid, &status, 0, &use) < 0)
        return mt_fail(err, MT_ERR_RUNTIME, -errno, "cannot start a child process: %s", strerror(errno));
    int code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
    b->interrupted = code == 130 || code == 143;
    double tok_s = 0;
    for (size_t i = 0; i < c->n && !rc; i++) {
        const char *dir = DIR_OF(b, c, i);
        bool others_failed = code == EXIT_TRAINING && c->n > 1 &&
                             has_step(dir, b->sweep.warmup_steps + b->sweep.steps);
        set_status(&r[i], others_failed ? 0 : status);
        r[i].peak_bytes = 1024.0 * (double)use.ru_maxrss;
        if (!strcmp(r[i].status, "ok")) {
            rc = read_metrics(&r[i], dir, b->sweep.warmup_steps, err);
            read_run_json(&r[i], dir);
        }
        r[i].shared_by = (double)c->n;
        tok_s += r[i].tok_s;
    }
    for (size_t i = 0; i < c->n && !rc; i++)
        r[i].tok_s = tok_s;
    return rc;
}
