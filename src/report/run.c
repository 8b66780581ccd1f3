/* SPDX-License-Identifier: Apache-2.0 */
/* Pictures of training runs. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/fs.h"
#include "base/mem.h"
#include "report/chart.h"
#include "report/report_priv.h"

enum { MAX_RUNS = 8, MAX_PARTS = 24, N_QUEUES = 27 /* of a trace with eight GPUs */ };

static const char *const keys[MT_N_COLS] = {
    "step",  "tokens", "loss",       "lr",     "grad_norm", "tok_s",     "t_step",   "t_fwd",
    "t_bwd", "t_opt",  "t_wait_h2d", "t_data", "h2d_bytes", "d2h_bytes"};

static cJSON *read_json(const char *dir, const char *file)
{
    char path[4200];
    cJSON *o = NULL;
    mt_path_printf(path, sizeof(path), "%s/%s", dir, file);
    return mt_path_exists(path) && !mt_json_read_file(&o, path, MT_ERR_INPUT, NULL) ? o : NULL;
}

static const struct {
    const char *key, *name, *title, *label;
    bool low; /* is the worst */
} spreads[MT_N_SPREADS] = {
    {"expert_balance", "balance", "Balance of experts", "1: even; experts: one has all", false},
    {"expert_entropy", "entropy", "Entropy of the choice of experts", "1: even; 0: one has all", true},
    {"experts_idle", "idle-experts", "Experts without rows", "experts", false},
    {"expert_max_share", "fullest-expert", "Share of the fullest expert", "of a layer's rows", false},
};

/* A row of a layer. Rows of a step stand together. */
static void read_layer(struct mt_run_data *r, double step, const cJSON *o, int *n_layers)
{
    bool first = !r->experts.n || r->experts.step[r->experts.n - 1] != step;
    if (first) {
        r->experts.step[r->experts.n++] = step;
        *n_layers = 0;
    }
    ++*n_layers;
    for (int k = 0; k < MT_N_SPREADS; k++) {
        double value = mt_json_number(o, spreads[k].key, NAN);
        double *mean = &r->experts.mean[k][r->experts.n - 1], *worst = &r->experts.worst[k][r->experts.n - 1];
        *mean += (value - *mean) / *n_layers;
        *worst = first ? value : spreads[k].low ? fmin(*worst, value) : fmax(*worst, value);
    }
}

static bool alloc_experts(struct mt_run_data *r, size_t lines)
{
    r->experts.step = mt_calloc(lines, sizeof(double));
    bool ok = r->experts.step;
    for (int k = 0; k < MT_N_SPREADS; k++) {
        r->experts.mean[k] = mt_calloc(lines, sizeof(double));
        r->experts.worst[k] = mt_calloc(lines, sizeof(double));
        ok = ok && r->experts.mean[k] && r->experts.worst[k];
    }
    return ok;
}

static int read_metrics(struct mt_run_data *r, char *text, struct mt_err *err)
{
    size_t lines = 1;
    char *save = NULL;
    for (const char *c = text; *c; c++)
        lines += *c == '\n';
    for (int k = 0; k < MT_N_COLS; k++)
        if (!(r->col[k] = mt_calloc(lines, sizeof(double))))
            return mt_fail_nomem(err, "a report", lines * sizeof(double));
    r->eval_step = mt_calloc(lines, sizeof(double));
    r->eval_loss = mt_calloc(lines, sizeof(double));
    int n_layers = 0;
    if (!alloc_experts(r, lines) || !r->eval_step || !r->eval_loss)
        return mt_fail_nomem(err, "a report", lines * sizeof(double));
    int rc = mt_lines_alloc(&r->lines, lines + 1, err);
    if (!rc)
        rc = mt_set_lines_alloc(&r->sets, lines + 1, err);
    for (char *line = strtok_r(text, "\n", &save); line && !rc; line = strtok_r(NULL, "\n", &save)) {
        cJSON *o = cJSON_Parse(line); /* NULL for an incomplete last line */
        const cJSON *step = mt_json_get(o, "step"), *eval = mt_json_get(o, "eval_loss");
        if (cJSON_IsNumber(step)) {
            mt_lines_read(&r->lines, step->valuedouble, o);
            mt_set_lines_read(&r->sets, step->valuedouble, o);
        }
        if (cJSON_IsNumber(step) && eval) {
            r->eval_step[r->n_eval] = step->valuedouble;
            r->eval_loss[r->n_eval++] = cJSON_IsNumber(eval) ? eval->valuedouble : NAN;
        } else if (cJSON_IsNumber(step) && mt_json_get(o, "layer")) {
            read_layer(r, step->valuedouble, o, &n_layers);
        } else if (cJSON_IsNumber(step)) {
            for (int k = 0; k < MT_N_COLS; k++)
                r->col[k][r->n] = mt_json_number(o, keys[k], NAN);
            r->n++;
        }
        cJSON_Delete(o);
    }
    return rc;
}

int mt_run_data_read(struct mt_run_data *r, const char *dir, struct mt_err *err)
{
    char path[4200], *text = NULL;
    size_t len = strlen(dir);
    *r = (struct mt_run_data){{0}};
    while (len > 1 && dir[len - 1] == '/')
        len--;
    size_t at = len;
    while (at > 0 && dir[at - 1] != '/')
        at--;
    snprintf(r->name, sizeof(r->name), "%.*s", (int)(len - at), dir + at);
    mt_path_printf(path, sizeof(path), "%s/metrics.jsonl", dir);
    int rc = mt_read_file(path, &text, &len, err);
    if (!rc)
        rc = read_metrics(r, text, err);
    free(text);
    if (rc) {
        mt_run_data_finish(r);
        return rc;
    }
    r->info = read_json(dir, "run.json");
    r->trace = read_json(dir, "trace.json");
    return 0;
}

void mt_run_data_finish(struct mt_run_data *r)
{
    for (int k = 0; k < MT_N_COLS; k++)
        free(r->col[k]);
    free(r->eval_step);
    free(r->eval_loss);
    free(r->experts.step);
    for (int k = 0; k < MT_N_SPREADS; k++) {
        free(r->experts.mean[k]);
        free(r->experts.worst[k]);
    }
    mt_lines_finish(&r->lines);
    mt_set_lines_finish(&r->sets);
    cJSON_Delete(r->info);
    cJSON_Delete(r->trace);
    *r = (struct mt_run_data){{0}};
}

static int add_lines(struct mt_report *r, const char *section, const char *name, const struct mt_chart *c,
                     struct mt_err *err)
{
    struct mt_str s = {0};
    mt_chart_lines(&s, c);
    return mt_report_add(r, section, name, &s, err);
}

/* Loss over steps, or over tokens: each step (faint), the smoothed line, and the evaluations. */
static int add_loss(struct mt_report *r, const char *section, const struct mt_run_data *runs, size_t n,
                    int x, struct mt_err *err)
{
    struct mt_series s[3 * MAX_RUNS] = {{0}};
    double *mean[MAX_RUNS] = {NULL};
    size_t k = 0;
    bool evaluated = false;
    for (size_t i = 0; i < n; i++) {
        const struct mt_run_data *d = &runs[i];
        int colour = (int)i * 2;
        evaluated |= d->n_eval > 0;
        mean[i] = mt_smooth(d->col[MT_COL_LOSS], d->n);
        if (!mean[i])
            continue;
        s[k++] = (struct mt_series){.x = d->col[x], .y = d->col[MT_COL_LOSS], .n = d->n, .colour = colour,
                                    .faint = true};
        s[k++] = (struct mt_series){.name = n > 1 ? d->name : "loss", .x = d->col[x], .y = mean[i],
                                    .n = d->n, .colour = colour};
        if (x == MT_COL_STEP)
            s[k++] = (struct mt_series){.name = n > 1 ? NULL : "evaluation", .x = d->eval_step,
                                        .y = d->eval_loss, .n = d->n_eval, .colour = colour + 1,
                                        .points = true};
    }
    bool tokens = x == MT_COL_TOKENS, points = n > 1 && !tokens && evaluated;
    struct mt_chart c = {.title = tokens ? "Loss over tokens" : "Loss",
                         .x_label = tokens ? "tokens" : points ? "step (points: evaluations)" : "step",
                         .y_label = "nats a token", .series = s, .n_series = k};
    int rc = add_lines(r, section, tokens ? "loss-tokens" : "loss", &c, err);
    for (size_t i = 0; i < n; i++)
        free(mean[i]);
    return rc;
}

/* A column of metrics.jsonl over steps. */
struct column {
    const char *name, *title, *unit;
    int col;
    bool log;
};

static int add_column(struct mt_report *r, const char *section, const struct column *of, const struct mt_run_data *runs,
                      size_t n, struct mt_err *err)
{
    struct mt_series s[MAX_RUNS] = {{0}};
    for (size_t i = 0; i < n; i++)
        s[i] = (struct mt_series){.name = n > 1 ? runs[i].name : NULL, .x = runs[i].col[MT_COL_STEP],
                                  .y = runs[i].col[of->col], .n = runs[i].n, .colour = (int)i * 2};
    struct mt_chart c = {.title = of->title, .x_label = "step", .y_label = of->unit, .log_y = of->log, .zero = !of->log,
                         .series = s, .n_series = n};
    return add_lines(r, section, of->name, &c, err);
}

/* The parts of a step's time. Waits for the link are within forward and backward, and are subtracted from them. */
static int add_step_stack(struct mt_report *r, const struct mt_run_data *d, struct mt_err *err)
{
    enum { DATA, WAIT, FWD, BWD, ADAM, SAID, N };
    double *v[N] = {NULL}, *x = mt_calloc(d->n + 1, sizeof(double));
    double said = mt_json_number(mt_json_get(d->info, "predicted"), "t_step", NAN);
    size_t m = 0;
    int rc = x ? 0 : mt_fail_nomem(err, "a report", d->n);
    for (int k = 0; k < N && !rc; k++)
        if (!(v[k] = mt_calloc(d->n + 1, sizeof(double))))
            rc = mt_fail_nomem(err, "a report", d->n);
    for (size_t i = 0; i < d->n && !rc; i++) {
        double fwd = d->col[MT_COL_T_FWD][i], bwd = d->col[MT_COL_T_BWD][i], wait = d->col[MT_COL_T_WAIT][i];
        if (!isfinite(fwd) || !isfinite(bwd) || !(fwd + bwd > 0))
            continue;
        wait = isfinite(wait) ? fmin(wait, fwd + bwd) : 0;
        x[m] = d->col[MT_COL_STEP][i];
        v[DATA][m] = d->col[MT_COL_T_DATA][i];
        v[WAIT][m] = wait;
        v[FWD][m] = fwd * (1 - wait / (fwd + bwd));
        v[BWD][m] = bwd * (1 - wait / (fwd + bwd));
        v[ADAM][m] = d->col[MT_COL_T_OPT][i];
        v[SAID][m++] = said;
    }
    static const char *const names[N] = {"data", "wait for H2D", "forward", "backward",
                                         "update", "predicted"};
    static const int colours[N] = {6, 1, 0, 2, 4, 3};
    struct mt_series s[N];
    size_t n = isfinite(said) ? N : N - 1;
    for (size_t k = 0; k < n; k++)
        s[k] = (struct mt_series){.name = names[k], .x = x, .y = v[k], .n = m, .colour = colours[k],
                                  .dashed = k >= ADAM};
    struct mt_chart c = {.title = "Time of a step", .x_label = "step", .y_label = "seconds", .series = s,
                         .n_series = n};
    struct mt_str text = {0};
    if (!rc) {
        mt_chart_stack(&text, &c);
        rc = mt_report_add(r, d->name, "step-time", &text, err);
    }
    for (int k = 0; k < N; k++)
        free(v[k]);
    free(x);
    return rc;
}

static int add_link_use(struct mt_report *r, const struct mt_run_data *d, struct mt_err *err)
{
    double *v[2] = {mt_calloc(d->n + 1, sizeof(double)), mt_calloc(d->n + 1, sizeof(double))};
    int rc = v[0] && v[1] ? 0 : mt_fail_nomem(err, "a report", d->n);
    for (size_t i = 0; i < d->n && !rc; i++)
        for (int k = 0; k < 2; k++)
            v[k][i] = d->col[k ? MT_COL_D2H : MT_COL_H2D][i] / d->col[MT_COL_T_STEP][i] * 1e-9;
    struct mt_series s[2] = {{.name = "host to device", .x = d->col[MT_COL_STEP], .y = v[0], .n = d->n, .colour = 0},
                             {.name = "device to host", .x = d->col[MT_COL_STEP], .y = v[1], .n = d->n, .colour = 1}};
    struct mt_chart c = {.title = "Link, mean over a step", .x_label = "step", .y_label = "GB/s",
                         .zero = true, .series = s, .n_series = 2};
    if (!rc)
        rc = add_lines(r, d->name, "link", &c, err);
    free(v[0]);
    free(v[1]);
    return rc;
}

/* A size in bytes that a file of others may claim. */
static bool is_size(double bytes)
{
    return bytes >= 0 && bytes < 0x1p63;
}

static int add_memory(struct mt_report *r, const struct mt_run_data *d, struct mt_err *err)
{
    static const char *const tiers[] = {"device", "host", "nvme", "disk"};
    struct mt_bar_part parts[MT_ARRAY_LEN(tiers)][MAX_PARTS];
    struct mt_bar bars[MT_ARRAY_LEN(tiers)];
    size_t n = 0;
    for (size_t t = 0; t < MT_ARRAY_LEN(tiers); t++) {
        const cJSON *row;
        size_t k = 0;
        cJSON_ArrayForEach(row, mt_json_get(d->info, "memory"))
        {
            const cJSON *tier = mt_json_get(row, "tier"), *use = mt_json_get(row, "use");
            double size = mt_json_number(row, "bytes", NAN);
            if (cJSON_IsString(tier) && cJSON_IsString(use) && !strcmp(tier->valuestring, tiers[t]) && is_size(size) &&
                k < MAX_PARTS)
                parts[t][k++] = (struct mt_bar_part){use->valuestring, size};
        }
        if (k)
            bars[n++] = (struct mt_bar){.name = tiers[t], .parts = parts[t], .n_parts = k};
        if (k && !t && is_size(mt_json_number(d->info, "device_budget", NAN)))
            bars[n - 1].limit = mt_json_number(d->info, "device_budget", NAN);
    }
    if (!n)
        return 0;
    struct mt_str s = {0};
    mt_chart_memory(&s, "Memory by use (dashed mark: the device's budget)", bars, n);
    return mt_report_add(r, d->name, "memory", &s, err);
}

/* Colour of an instruction by its kind; the legend has the same order. */
static const char *const kinds[] = {"forward", "backward", "update", "loads", "stores", "disk", "other"};
static const int kind_colours[] = {0, 2, 4, 1, 5, 3, 6};

static int kind_of(const char *op)
{
    static const struct {
        const char *op;
        int kind;
    } table[] = {{"forward", 0}, {"embed", 0}, {"head", 0},  {"backward", 1},  {"embed_bwd", 1},
                 {"grad_cast", 1}, {"update", 2}, {"load", 3}, {"store", 4},     {"store_grad", 4},
                 {"read", 5},    {"write", 5}};
    for (size_t i = 0; i < MT_ARRAY_LEN(table); i++)
        if (!strcmp(op, table[i].op))
            return table[i].kind;
    return 6;
}

/* Rows of a time line: of the first GPU's queues, the host's, the drives' and the other GPUs' those that have spans. */
struct rows {
    const char *name[N_QUEUES]; /* of each row */
    int of[N_QUEUES];           /* a queue's row */
    size_t n;
};

/* A queue whose spans overlap has further rows in the trace, which are drawn as one. */
static int queue_of(const cJSON *e)
{
    double id = mt_json_number(e, "tid", NAN);
    return id >= 0 && id < 16 * N_QUEUES ? (int)id % N_QUEUES : -1;
}

static struct rows find_rows(const cJSON *events)
{
    struct rows rows = {.n = 0};
    const char *names[N_QUEUES] = {"compute", "H2D", "D2H", "host optimizer", "disk reads", "disk writes"};
    bool seen[N_QUEUES] = {true, true, true, true};
    const cJSON *e;
    cJSON_ArrayForEach(e, events)
    {
        const cJSON *name = mt_json_get(e, "name"), *title = mt_json_get(mt_json_get(e, "args"), "name");
        int q = queue_of(e);
        if (!cJSON_IsString(name) || q < 0)
            continue;
        if (strcmp(name->valuestring, "thread_name"))
            seen[q] |= mt_json_get(e, "dur") != NULL;
        else if (cJSON_IsString(title) && mt_json_number(e, "tid", NAN) < N_QUEUES)
            names[q] = title->valuestring;
    }
    for (int q = 0; q < N_QUEUES; q++)
        if (seen[q]) {
            rows.of[q] = (int)rows.n;
            rows.name[rows.n++] = names[q] ? names[q] : "";
        }
    return rows;
}

static int add_timeline(struct mt_report *r, const struct mt_run_data *d, struct mt_err *err)
{
    static const char *const groups[] = {"measured", "predicted"};
    const cJSON *events = mt_json_get(d->trace, "traceEvents"), *e;
    const struct rows rows = find_rows(events);
    size_t n = 0, total = (size_t)cJSON_GetArraySize(events), groups_seen = 1;
    struct mt_span *spans = mt_calloc(total + 1, sizeof(*spans));
    if (!spans)
        return mt_fail_nomem(err, "a report", total * sizeof(*spans));
    cJSON_ArrayForEach(e, events)
    {
        const cJSON *ph = mt_json_get(e, "ph"), *name = mt_json_get(e, "name"), *cat = mt_json_get(e, "cat");
        if (!cJSON_IsString(ph) || strcmp(ph->valuestring, "X") || !cJSON_IsString(name) || !cJSON_IsString(cat))
            continue;
        double at = mt_json_number(e, "ts", NAN) * 1e-6;
        int q = queue_of(e);
        struct mt_span s = {(int)mt_json_number(e, "pid", NAN) - 1, q < 0 ? q : rows.of[q], kind_colours[kind_of(cat->valuestring)],
                            at, at + mt_json_number(e, "dur", NAN) * 1e-6, name->valuestring};
        if (s.group < 0 || s.group > 1 || !isfinite(at))
            continue;
        groups_seen = MT_MAX(groups_seen, (size_t)s.group + 1);
        spans[n++] = s;
    }
    struct mt_str s = {0};
    mt_chart_timeline(&s, &(struct mt_timeline){.title = "Time line of one step", .groups = groups,
                                                .n_groups = groups_seen, .lanes = rows.name, .n_lanes = rows.n,
                                                .spans = spans, .n = n, .legend = kinds,
                                                .legend_colour = kind_colours, .n_legend = MT_ARRAY_LEN(kinds)});
    free(spans);
    return mt_report_add(r, d->name, "timeline", &s, err);
}

static int add_experts(struct mt_report *r, const struct mt_run_data *d, struct mt_err *err)
{
    int rc = 0;
    for (int k = 0; k < MT_N_SPREADS && !rc; k++) {
        const double *step = d->experts.step;
        struct mt_series s[2] = {
            {.name = "mean of layers", .x = step, .y = d->experts.mean[k], .n = d->experts.n, .colour = 0},
            {.name = "worst layer", .x = step, .y = d->experts.worst[k], .n = d->experts.n, .colour = 1}};
        struct mt_chart c = {.title = spreads[k].title, .x_label = "step", .y_label = spreads[k].label, .zero = true,
                             .series = s, .n_series = 2};
        rc = add_lines(r, d->name, spreads[k].name, &c, err);
    }
    return rc;
}

static int add_alone(struct mt_report *r, const struct mt_run_data *d, struct mt_err *err)
{
    int rc = mt_report_lines(r, d->name, &d->lines, err);
    if (!rc)
        rc = mt_report_sets(r, d->name, &d->sets, err);
    if (!rc)
        rc = add_step_stack(r, d, err);
    if (!rc && d->trace)
        rc = add_timeline(r, d, err);
    if (!rc)
        rc = add_memory(r, d, err);
    if (!rc && d->experts.n)
        rc = add_experts(r, d, err);
    return rc ? rc : add_link_use(r, d, err);
}

int mt_report_runs(struct mt_report *r, const struct mt_run_data *runs, size_t n, struct mt_err *err)
{
    static const struct column columns[] = {
        {"learning-rate", "Learning rate", "rate", MT_COL_LR, false},
        {"gradient-norm", "Gradient norm before clipping", "norm", MT_COL_GRAD_NORM, true},
        {"speed", "Speed", "tokens a second", MT_COL_TOK_S, false},
    };
    const char *section = n > 1 ? "All runs" : runs[0].name;
    n = MT_MIN(n, (size_t)MAX_RUNS);
    int rc = add_loss(r, section, runs, n, MT_COL_STEP, err);
    if (!rc)
        rc = add_loss(r, section, runs, n, MT_COL_TOKENS, err);
    for (size_t i = 0; i < MT_ARRAY_LEN(columns) && !rc; i++)
        rc = add_column(r, section, &columns[i], runs, n, err);
    for (size_t i = 0; i < n && !rc; i++)
        rc = add_alone(r, &runs[i], err);
    return rc;
}
