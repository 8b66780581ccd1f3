/* SPDX-License-Identifier: Apache-2.0 */
#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/fs.h"
#include "base/json.h"
#include "base/mem.h"
#include "base/strbuf.h"
#include "base/units.h"
#include "bench.h"
#include "checkpoint/output.h"

/* --- tables --------------------------------------------------------------------------------------- */

static int export(const struct bench *b, const char *option, const char *name, const struct mt_str *text,
                  struct mt_err *err)
{
    const char *also = cli_arg(b->args, option), *path = MT_PATH("%s/%s", b->dir, name);
    if (text->failed)
        return mt_fail_nomem(err, path, text->len);
    int rc = mt_write_file(path, text->p ? text->p : "", text->len, err);
    return rc || !also ? rc : mt_write_file(also, text->p ? text->p : "", text->len, err);
}

static int write_tables(const struct bench *b, struct mt_err *err)
{
    MT_STR_FREED struct mt_str csv = {0}, md = {0}, json = {0};
    mt_sweep_csv(&csv, b->rows, b->n_rows);
    mt_sweep_markdown(&md, b->rows, b->n_rows);
    MT_JSON_FREED cJSON *o = mt_sweep_json(b->rows, b->n_rows);
    MT_FREED char *text = mt_json_print(o, true);
    mt_str_printf(&json, "%s\n", text ? text : "");
    return export(b, "export-csv", "sweep.csv", &csv, err)
        ?: export(b, "export-json", "sweep.json", &json, err)
        ?: export(b, "export-markdown", "sweep.md", &md, err);
}

/* Whether a job failed. That it does not fit is a result. */
static bool failed(const struct mt_sweep_row *r)
{
    return mt_choice_find("ok|does not fit|predicted", r->status) < 0;
}

/* Prints the last line of a failed job's log. */
static void print_reason(const struct bench *b, const struct mt_sweep_row *r)
{
    char line[1024], last[1024] = "";
    const char *path = MT_PATH("%.3000s/%s.0.log", b->dir, r->job->hash);
    MT_STREAM_CLOSED FILE *f = fopen(path, "re");
    while (f && fgets(line, sizeof(line), f))
        if (*line != '\n')
            memcpy(last, line, sizeof(line));
    last[strcspn(last, "\n")] = 0;
    fprintf(stderr, "    %s (%s)\n", *last ? last : "its log is empty", path);
}

static void print_live(const struct bench *b, const struct mt_sweep_row *r, size_t done, size_t all)
{
    char what[80];
    const struct mt_stats *s = &r->seconds;
    if (b->cli->quiet)
        return;
    bench_describe(what, sizeof(what), r->job);
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
    const char *dot = strrchr(name, '.');
    bool ours = strspn(name, "0123456789abcdef") == 16 && name[16] == '.';
    return mt_choice_find("sweep.csv|sweep.json|sweep.md", name) >= 0 ||
           (ours && mt_choice_find(".ini|.log|.json|.machine|.rates", dot) >= 0);
}

/* The folder of a run: "<hash>.<number>" in runs/. */
static bool is_own_run(const char *name)
{
    return strspn(name, "0123456789abcdef") == 16 && name[16] == '.' && name[17] &&
           strspn(name + 17, "0123456789") == strlen(name + 17);
}

static int remove_own(const char *dir, bool (*is_own)(const char *), struct mt_err *err)
{
    MT_DIR_CLOSED DIR *d = opendir(dir);
    int rc = 0;
    for (struct dirent *e; d && !rc && (e = readdir(d));) {
        MT_FREED char *path = is_own(e->d_name) ? mt_path_join(dir, e->d_name) : NULL;
        if (path)
            rc = mt_remove_tree(path, err);
    }
    return rc;
}

/* Removes earlier results only: the folder may hold other files. */
static int remove_results(const char *dir, struct mt_err *err)
{
    return remove_own(MT_PATH("%s/runs", dir), is_own_run, err) ?: remove_own(dir, is_own_file, err);
}

static int open_folder(struct bench *b, const char *sweep_path, struct mt_err *err)
{
    const char *out = cli_arg(b->args, "out"), *name = out ? out : sweep_path;
    size_t len = strlen(name) - (!out && mt_ends_with(sweep_path, ".ini") ? strlen(".ini") : 0);
    snprintf(b->dir, sizeof(b->dir), "%.*s%s", (int)len, name, out ? "" : ".bench");
    int rc = 0;
    if (mt_is_dir(b->dir) && cli_arg(b->args, "force"))
        rc = remove_results(b->dir, err);
    else if (mt_is_dir(b->dir) && !cli_arg(b->args, "resume"))
        return mt_fail(err, MT_ERR_USAGE, -EEXIST,
                       "%s exists already: continue with --resume, remove its earlier results with --force, or "
                       "choose --out",
                       b->dir);
    const char *runs = MT_PATH("%s/runs", b->dir);
    return rc ?: mt_mkdir_p(runs, err) ?: mt_output_lock(runs, &b->lock, err);
}

static size_t n_chosen(const struct bench *b)
{
    size_t n = 0;
    for (size_t i = 0; i < b->sweep.n_jobs; i++)
        n += bench_chosen(b, &b->sweep.jobs[i]);
    return n;
}

static int run_sweep(struct bench *b, struct mt_err *err)
{
    MT_FREED struct mt_sweep_run *runs = NULL;
    size_t all = n_chosen(b);
    int rc = bench_find_groups(b, err)
          ?: MT_NEW(&runs, BENCH_MAX_RUNS, "a sweep", err)
          ?: MT_NEW(&b->rows, b->sweep.n_jobs, "a sweep", err);
    for (size_t i = 0; i < b->sweep.n_jobs && !rc && !b->interrupted; i++) {
        const struct mt_sweep_job *j = &b->sweep.jobs[i];
        struct mt_sweep_prediction p;
        size_t n = 0;
        if (!bench_chosen(b, j))
            continue;
        if (b->group[i] == i)
            rc = bench_run_group(b, i, err);
        if (rc || b->interrupted)
            break;
        rc = bench_predict(b, j, &p, err);
        if (!rc && !cli_arg(b->args, "predict-only"))
            rc = bench_run_job(b, j, runs, &n, err);
        plan_view_close(&b->view);
        if (rc || b->interrupted)
            break;
        mt_sweep_row_fill(&b->rows[b->n_rows++], j, runs, n, &p);
        print_live(b, &b->rows[b->n_rows - 1], b->n_rows, all);
        rc = write_tables(b, err);
    }
    return rc;
}

static int read_table(cJSON **out, const char *path, struct mt_err *err)
{
    const char *file = MT_PATH(mt_is_dir(path) ? "%s/sweep.json" : "%s", path);
    return mt_json_read_file(out, file, MT_ERR_INPUT, err);
}

static int compare(const struct cli_args *args, struct mt_err *err)
{
    MT_JSON_FREED cJSON *a = NULL, *b = NULL;
    MT_STR_FREED struct mt_str text = {0};
    if (args->n_operands != 2)
        return cli_usage("bench --compare needs two result folders");
    int rc = read_table(&a, args->operands[0], err) ?: read_table(&b, args->operands[1], err);
    if (!rc) {
        mt_sweep_compare(&text, a, b);
        printf("%s", text.p ? text.p : "");
    }
    return rc;
}

int cli_cmd_bench(struct cli *cli, const struct cli_args *args, struct mt_err *err)
{
    struct bench b = {.cli = cli, .args = args, .lock = -1};
    if (cli_arg(args, "compare"))
        return compare(args, err);
    int rc = mt_sweep_read(&b.sweep, args->operands[0], err);
    if (!rc && !n_chosen(&b))
        rc = mt_fail(err, MT_ERR_USAGE, -ENOENT, "no job matches --only %s", cli_arg(args, "only"));
    rc = rc ?: open_folder(&b, args->operands[0], err) ?: run_sweep(&b, err);
    if (!rc && !b.interrupted) {
        MT_STR_FREED struct mt_str md = {0};
        mt_sweep_markdown(&md, b.rows, b.n_rows);
        printf("%s", md.p ? md.p : "");
    }
    size_t n_failed = 0;
    for (size_t i = 0; i < b.n_rows; i++)
        n_failed += failed(&b.rows[i]);
    if (!rc && !b.interrupted && n_failed && n_failed == b.n_rows)
        rc = mt_fail(err, MT_ERR_RUNTIME, -EIO, "every one of the sweep's %zu jobs failed; %s holds their logs",
                     n_failed, b.dir);
    free(b.rows);
    free(b.group);
    mt_sweep_finish(&b.sweep);
    mt_close_fd(&b.lock);
    return rc ? rc : b.interrupted ? 130 : 0;
}
