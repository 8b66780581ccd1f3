/* SPDX-License-Identifier: Apache-2.0 */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/fs.h"
#include "base/json.h"
#include "base/mem.h"
#include "base/sort.h"
#include "sweep/sweep.h"

struct mt_stats mt_stats_of(const double *v, size_t n)
{
    struct mt_stats s = {.n = n};
    MT_FREED double *sorted = mt_calloc(n, sizeof(double));
    double sum = 0, squares = 0;
    if (!sorted)
        return (struct mt_stats){NAN, NAN, NAN, NAN, NAN, 0};
    memcpy(sorted, v, n * sizeof(double));
    mt_sort_doubles(sorted, n);
    s.min = sorted[0];
    s.max = sorted[n - 1];
    s.median = n % 2 ? sorted[n / 2] : (sorted[n / 2 - 1] + sorted[n / 2]) / 2;
    for (size_t i = 0; i < n; i++)
        sum += v[i];
    s.mean = sum / (double)n;
    for (size_t i = 0; i < n; i++)
        squares += (v[i] - s.mean) * (v[i] - s.mean);
    s.deviation = n > 1 ? sqrt(squares / (double)(n - 1)) : 0;
    return s;
}

/* The numbers of a run, listed once for both writing and reading. */
#define RUN_FIELDS(X)                                                                              \
    X(seconds) X(tok_s) X(t_fwd) X(t_bwd) X(t_wait) X(t_adam) X(h2d_bytes) X(d2h_bytes)            \
    X(device_bytes) X(peak_bytes) X(planned_bytes) X(loss) X(shared_by)

#define RUN_PATH(dir, hash, k) MT_PATH("%.3000s/%s.%d.json", dir, hash, k)

int mt_sweep_run_save(const struct mt_sweep_run *r, const char *dir, const char *hash, int k,
                      struct mt_err *err)
{
    const char *path = RUN_PATH(dir, hash, k);
    MT_JSON_FREED cJSON *o = cJSON_CreateObject();
    cJSON_AddStringToObject(o, "status", r->status);
#define ADD_FIELD(f) cJSON_AddNumberToObject(o, #f, r->f);
    RUN_FIELDS(ADD_FIELD)
#undef ADD_FIELD
    MT_FREED char *text = mt_json_print(o, true);
    return text ? mt_write_file(path, text, strlen(text), err) : mt_fail_nomem(err, path, 1);
}

int mt_sweep_run_load(struct mt_sweep_run *r, const char *dir, const char *hash, int k,
                      struct mt_err *err)
{
    const char *path = RUN_PATH(dir, hash, k);
    MT_JSON_FREED cJSON *o = NULL;
    if (!mt_path_exists(path))
        return -ENOENT;
    int rc = mt_json_read_file(&o, path, MT_ERR_RUNTIME, err);
    if (rc)
        return rc;
    *r = (struct mt_sweep_run){{0}};
    snprintf(r->status, sizeof(r->status), "%s", mt_json_string(o, "status", ""));
#define GET_FIELD(f) r->f = mt_json_number(o, #f, 0);
    RUN_FIELDS(GET_FIELD)
#undef GET_FIELD
    return 0;
}

static double median_prediction(const struct mt_sweep_run *runs, size_t n)
{
    MT_FREED double *v = mt_calloc(n, sizeof(double));
    for (size_t i = 0; v && i < n; i++)
        v[i] = runs[i].predicted;
    return v ? mt_stats_of(v, n).median : 0;
}

/* Ratios of the runs that succeeded; `predicted` 0: over each run's own prediction. */
static struct mt_stats ratios_of(const struct mt_sweep_run *runs, size_t n, double predicted)
{
    MT_FREED double *v = mt_calloc(n, sizeof(double));
    size_t good = 0;
    for (size_t i = 0; v && i < n; i++)
        if (!strcmp(runs[i].status, "ok"))
            v[good++] = predicted > 0 ? runs[i].seconds / predicted : runs[i].ratio;
    return good ? mt_stats_of(v, good) : (struct mt_stats){0};
}

void mt_sweep_row_fill(struct mt_sweep_row *row, const struct mt_sweep_job *job,
                       const struct mt_sweep_run *runs, size_t n, const struct mt_sweep_prediction *p)
{
    MT_FREED double *seconds = mt_calloc(n + 1, sizeof(double));
    size_t good = 0;
    bool paired = n > 0, shared = false;
    *row = (struct mt_sweep_row){.job = job, .predicted = *p};
    snprintf(row->status, sizeof(row->status), "%s", n ? "ok" : p->fits ? "predicted" : "does not fit");
    for (size_t i = 0; i < n; i++) {
        if (strcmp(runs[i].status, "ok"))
            memcpy(row->status, runs[i].status, sizeof(row->status));
        else if (seconds)
            seconds[good++] = runs[i].seconds;
        paired &= runs[i].ratio > 0;
        shared |= runs[i].shared_by > 1;
    }
    if (shared)
        row->predicted = (struct mt_sweep_prediction){.fits = p->fits};
    if (good && paired)
        row->predicted.seconds = median_prediction(runs, n);
    if (good && row->predicted.seconds > 0)
        row->ratio = ratios_of(runs, n, paired ? 0 : row->predicted.seconds);
    if (good) {
        row->seconds = mt_stats_of(seconds, good);
        double nearest = INFINITY, peak = 0;
        for (size_t i = 0; i < n; i++) {
            double d = fabs(runs[i].seconds - row->seconds.median);
            peak = fmax(peak, runs[i].peak_bytes);
            if (!strcmp(runs[i].status, "ok") && d < nearest) {
                nearest = d;
                row->run = runs[i];
            }
        }
        row->run.peak_bytes = peak;
    }
}

/* --- tables -------------------------------------------------------------------------------------- */

static double ratio(double a, double b)
{
    return b > 0 ? a / b : NAN;
}

/* NAN: none. */
static double known_loss(const struct mt_sweep_row *r)
{
    return r->seconds.n && r->run.loss > 0 ? r->run.loss : NAN;
}

/* What a row has in a column: text, or a number. */
struct cell {
    const char *name, *text; /* text NULL: a number */
    double value;            /* NAN: none */
    const char *format;      /* of the number in Markdown */
};
typedef void cell_fn(void *out, const struct cell *c);

/* Calls back for the point, the status and each number of a row. */
static void each_cell(const struct mt_sweep_row *r, cell_fn *fn, void *out)
{
    const struct mt_sweep_prediction *p = &r->predicted;
    const struct mt_stats *s = &r->seconds;
    bool measured = s->n > 0, repeated = s->n > 1;
    double t = measured ? s->median : p->seconds;
    const struct cell numbers[] = {
        {"predicted_s", NULL, p->seconds > 0 ? p->seconds : NAN, "%.4g"},
        {"measured_s", NULL, measured ? s->median : NAN, "%.4g"},
        {"min_s", NULL, measured ? s->min : NAN, "%.4g"},
        {"max_s", NULL, measured ? s->max : NAN, "%.4g"},
        {"deviation_pct", NULL, repeated ? 100 * ratio(s->deviation, s->median) : NAN, "%.1f"},
        {"runs", NULL, (double)s->n, "%.0f"},
        {"measured_over_predicted", NULL, r->ratio.n ? r->ratio.median : NAN, "%.3f"},
        {"ratio_deviation_pct", NULL, r->ratio.n > 1 ? 100 * ratio(r->ratio.deviation, r->ratio.median) : NAN, "%.1f"},
        {"tok_s", NULL, measured && r->run.tok_s > 0 ? r->run.tok_s : ratio(p->tokens, t), "%.4g"},
        {"model_tflops", NULL, ratio(p->model_flops * 1e-12, t), "%.4g"},
        {"utilisation_pct", NULL, p->peak_flops > 0 ? 100 * ratio(p->model_flops / p->peak_flops, t) : NAN, "%.1f"},
        {"wait_h2d_pct", NULL, measured ? 100 * ratio(r->run.t_wait, s->median) : NAN, "%.1f"},
        {"h2d_gbs", NULL, measured ? ratio(r->run.h2d_bytes * 1e-9, s->median) : NAN, "%.4g"},
        {"d2h_gbs", NULL, measured ? ratio(r->run.d2h_bytes * 1e-9, s->median) : NAN, "%.4g"},
        {"device_mib", NULL, (r->run.device_bytes > 0 ? r->run.device_bytes : p->device_bytes) / 1048576, "%.1f"},
        {"peak_rss_mib", NULL, measured ? r->run.peak_bytes / 1048576 : NAN, "%.1f"},
        {"planned_host_mib", NULL, (r->run.planned_bytes > 0 ? r->run.planned_bytes : p->host_bytes) / 1048576, "%.1f"},
        {"loss", NULL, known_loss(r), "%.4g"},
        {"shared_by", NULL, r->run.shared_by > 1 ? r->run.shared_by : NAN, "%.0f"},
    };
    for (const cJSON *a = r->job->axes->child; a; a = a->next)
        fn(out, &(struct cell){a->string, a->valuestring, NAN, ""});
    fn(out, &(struct cell){"status", r->status, NAN, ""});
    for (size_t i = 0; i < MT_ARRAY_LEN(numbers); i++)
        fn(out, &numbers[i]);
}

/* A quoted cell: a quote in it is doubled (RFC 4180). */
static void csv_text(struct mt_str *out, const char *text)
{
    mt_str_append(out, ",\"", 2);
    for (; *text; text++)
        mt_str_append(out, *text == '"' ? "\"\"" : text, *text == '"' ? 2 : 1);
    mt_str_append(out, "\"", 1);
}

static void csv_name(void *out, const struct cell *c)
{
    mt_str_printf(out, ",%s", c->name);
}

static void csv_cell(void *out, const struct cell *c)
{
    if (c->text)
        csv_text(out, c->text);
    else
        mt_str_printf(out, isfinite(c->value) ? ",%.9g" : ",", c->value);
}

void mt_sweep_csv(struct mt_str *out, const struct mt_sweep_row *rows, size_t n)
{
    if (n) {
        mt_str_printf(out, "hash,job");
        each_cell(rows, csv_name, out);
        mt_str_printf(out, ",forward_bound_by,backward_bound_by\n");
    }
    for (size_t i = 0; i < n; i++) {
        mt_str_printf(out, "%s", rows[i].job->hash);
        csv_text(out, rows[i].job->name);
        each_cell(&rows[i], csv_cell, out);
        mt_str_printf(out, ",%s,%s\n", rows[i].predicted.bound[0], rows[i].predicted.bound[1]);
    }
}

static void markdown_name(void *out, const struct cell *c)
{
    mt_str_printf(out, " %s |", c->name);
}

static void markdown_rule(void *out, const struct cell *c)
{
    mt_str_printf(out, c->text ? "--|" : "--:|");
}

static void markdown_cell(void *out, const struct cell *c)
{
    char number[32] = "";
    if (!c->text && isfinite(c->value))
        snprintf(number, sizeof(number), c->format, c->value);
    mt_str_printf(out, " %s |", c->text ? c->text : number);
}

/* "fast, model.compute fp8" */
static void print_point(struct mt_str *out, const struct mt_sweep_job *j)
{
    mt_str_printf(out, "%s", j->name);
    for (const cJSON *a = j->axes->child; a; a = a->next)
        mt_str_printf(out, "%s%s %s", a != j->axes->child || j->name[0] ? ", " : "", a->string, a->valuestring);
}

static void print_difference(struct mt_str *out, const struct mt_sweep_row *r, const struct mt_sweep_row *from)
{
    double a = r->run.loss, b = from->run.loss;
    mt_str_printf(out, "\nLoss over the measured steps: ");
    print_point(out, r->job);
    mt_str_printf(out, ": %.6g, %+.3f%% of %.6g (", a, 100 * (a / b - 1), b);
    print_point(out, from->job);
    mt_str_printf(out, ").\n");
}

/* Jobs that differ only in placement have the same losses; of the others, by how much. */
static void losses(struct mt_str *out, const struct mt_sweep_row *rows, size_t n)
{
    const struct mt_sweep_row *first = NULL;
    for (size_t i = 0; i < n; i++) {
        double loss = known_loss(&rows[i]);
        if (!isfinite(loss))
            continue;
        if (first && loss != first->run.loss)
            print_difference(out, &rows[i], first);
        first = first ? first : &rows[i];
    }
}

static void print_shared(struct mt_str *out, const struct mt_sweep_row *rows, size_t n)
{
    size_t shared = 0;
    for (size_t i = 0; i < n; i++)
        shared += rows[i].run.shared_by > 1;
    if (shared)
        mt_str_printf(out, "\n%zu rows ran on a base that several jobs shared (shared_by): their times, tokens a second "
                      "and memory are of all these jobs at once. share_base = off measures each alone.\n", shared);
}

void mt_sweep_markdown(struct mt_str *out, const struct mt_sweep_row *rows, size_t n)
{
    if (n) {
        mt_str_printf(out, "| job |");
        each_cell(rows, markdown_name, out);
        mt_str_printf(out, "\n|--|");
        each_cell(rows, markdown_rule, out);
        mt_str_printf(out, "\n");
    }
    for (size_t i = 0; i < n; i++) {
        mt_str_printf(out, "| %s |", rows[i].job->name[0] ? rows[i].job->name : rows[i].job->hash);
        each_cell(&rows[i], markdown_cell, out);
        mt_str_printf(out, "\n");
    }
    print_shared(out, rows, n);
    struct mt_stats e = mt_sweep_error(rows, n);
    if (e.n)
        mt_str_printf(out, "\nPredicted against measured over %zu rows: median error %.1f%%, worst %.1f%%.\n",
                      e.n, 100 * e.median, 100 * e.max);
    losses(out, rows, n);
}

/* Text other than the status is of the axes. */
static void json_cell(void *row, const struct cell *c)
{
    if (c->text)
        cJSON_AddStringToObject(strcmp(c->name, "status") ? mt_json_get(row, "axes") : row, c->name, c->text);
    else if (isfinite(c->value))
        cJSON_AddNumberToObject(row, c->name, c->value);
}

cJSON *mt_sweep_json(const struct mt_sweep_row *rows, size_t n)
{
    cJSON *o = cJSON_CreateObject(), *list = cJSON_AddArrayToObject(o, "rows");
    for (size_t i = 0; i < n; i++) {
        cJSON *r = mt_json_put(NULL, "hash=%s, job=%s", rows[i].job->hash, rows[i].job->name);
        cJSON_AddObjectToObject(r, "axes");
        each_cell(&rows[i], json_cell, r);
        if (rows[i].predicted.bound[0][0])
            mt_json_put(r, "forward_bound_by=%s, backward_bound_by=%s", rows[i].predicted.bound[0],
                        rows[i].predicted.bound[1]);
        mt_json_append(list, r);
    }
    struct mt_stats e = mt_sweep_error(rows, n);
    if (e.n)
        mt_json_put(o, "median_error=%f, worst_error=%f", e.median, e.max);
    return o;
}

struct mt_stats mt_sweep_error(const struct mt_sweep_row *rows, size_t n)
{
    MT_FREED double *e = mt_calloc(n, sizeof(double));
    size_t k = 0;
    for (size_t i = 0; e && i < n; i++)
        if (rows[i].ratio.n)
            e[k++] = fabs(rows[i].ratio.median - 1);
    return k ? mt_stats_of(e, k) : (struct mt_stats){0};
}

/* --- comparison ----------------------------------------------------------------------------------- */

static bool same_point(const cJSON *a, const cJSON *b)
{
    return !strcmp(mt_json_string(a, "job", ""), mt_json_string(b, "job", "")) &&
           cJSON_Compare(mt_json_get(a, "axes"), mt_json_get(b, "axes"), true);
}

static const char of_one_run[] = "noise unknown";

/* Two medians differ if the gap exceeds two standard errors and half a percent. One run says nothing of its noise. */
static const char *verdict(const cJSON *a, const cJSON *b, double *change)
{
    double x = mt_json_number(a, "measured_s", 0), y = mt_json_number(b, "measured_s", 0);
    if (!(x > 0) || !(y > 0))
        return "";
    *change = 100 * (y / x - 1);
    if (!(mt_json_number(a, "runs", 0) > 1 && mt_json_number(b, "runs", 0) > 1))
        return of_one_run;
    double dx = x * mt_json_number(a, "deviation_pct", 0) / 100 / sqrt(mt_json_number(a, "runs", 0));
    double dy = y * mt_json_number(b, "deviation_pct", 0) / 100 / sqrt(mt_json_number(b, "runs", 0));
    double noise = fmax(2 * sqrt(dx * dx + dy * dy), 0.005 * x);
    return fabs(y - x) <= noise ? "same" : y > x ? "slower" : "faster";
}

void mt_sweep_compare(struct mt_str *out, const cJSON *a, const cJSON *b)
{
    const cJSON *row, *other, *axis;
    size_t counts[4] = {0}, failed = 0, apart = 0;
    mt_str_printf(out, "| job | point | before s | after s | change %% | verdict |\n|--|--|--:|--:|--:|--|\n");
    cJSON_ArrayForEach(row, mt_json_get(a, "rows"))
    {
        const cJSON *match = NULL;
        double change = 0;
        cJSON_ArrayForEach(other, mt_json_get(b, "rows")) if (same_point(row, other)) match = other;
        mt_str_printf(out, "| %s |", mt_json_string(row, "job", ""));
        cJSON_ArrayForEach(axis, mt_json_get(row, "axes"))
            mt_str_printf(out, " %s=%s", axis->string, axis->valuestring);
        if (!match) {
            mt_str_printf(out, " | %.5g | | | gone |\n", mt_json_number(row, "measured_s", 0));
            continue;
        }
        const char *was = mt_json_string(row, "status", ""), *is = mt_json_string(match, "status", "");
        double x = mt_json_number(row, "measured_s", 0), y = mt_json_number(match, "measured_s", 0);
        double with_x = mt_json_number(row, "shared_by", 0), with_y = mt_json_number(match, "shared_by", 0);
        const char *v = with_x == with_y ? verdict(row, match, &change) : "";
        counts[0] += !strcmp(v, "faster");
        counts[1] += !strcmp(v, "slower");
        counts[2] += !strcmp(v, "same");
        counts[3] += v == of_one_run;
        bool measured = x > 0 && y > 0, alike = !strcmp(was, is);
        failed += !measured;
        apart += alike && measured && with_x != with_y;
        if (!alike)
            mt_str_printf(out, " | | | | %s -> %s |\n", was, is);
        else if (!measured)
            mt_str_printf(out, " | | | | %s in both |\n", was);
        else if (with_x != with_y)
            mt_str_printf(out, " | %.5g | %.5g | | of %.0f and %.0f jobs at once |\n", x, y, fmax(with_x, 1), fmax(with_y, 1));
        else
            mt_str_printf(out, " | %.5g | %.5g | %+.1f | %s |\n", x, y, change, v);
    }
    cJSON_ArrayForEach(other, mt_json_get(b, "rows"))
    {
        bool known = false;
        cJSON_ArrayForEach(row, mt_json_get(a, "rows")) known |= same_point(row, other);
        if (!known)
            mt_str_printf(out, "| %s | | | %.5g | | new |\n", mt_json_string(other, "job", ""),
                          mt_json_number(other, "measured_s", 0));
    }
    mt_str_printf(out, "\n%zu faster, %zu slower, %zu the same within the noise", counts[0], counts[1], counts[2]);
    if (counts[3])
        mt_str_printf(out, "; %zu of a single run, whose noise is unknown (repeat = 3)", counts[3]);
    if (apart)
        mt_str_printf(out, "; %zu not compared, as other numbers of jobs ran at once (share_base = off)", apart);
    if (failed)
        mt_str_printf(out, "; %zu without a measurement on both sides", failed);
    mt_str_printf(out, ".\n");
}
