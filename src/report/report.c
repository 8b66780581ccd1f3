/* SPDX-License-Identifier: Apache-2.0 */
#include "report/report.h"

#include <math.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/fs.h"
#include "base/json.h"
#include "base/mem.h"
#include "base/strbuf.h"
#include "report_scripts.inc"

/* --- records, by columns -------------------------------------------------------------------------- */

enum { MOST_KEYS = 256 };

/* Numbers of records: a column for each key, NaN in rows whose record lacks it. */
struct table {
    struct {
        char *key;
        double *v; /* [cap] */
    } column[MOST_KEYS];
    size_t n_columns, n, cap;
    bool failed; /* for want of memory */
};

/* A key's number in the last row; NULL: there is no memory for it, or there are too many keys. */
static double *cell(struct table *t, const char *key, const char *suffix)
{
    size_t i = 0, len = strlen(key);
    while (i < t->n_columns && (strncmp(t->column[i].key, key, len) || strcmp(t->column[i].key + len, suffix)))
        i++;
    if (i == MOST_KEYS)
        return NULL;
    if (i == t->n_columns) {
        MT_FREED char *name = mt_calloc(len + strlen(suffix) + 1, 1);
        MT_FREED double *v = mt_calloc(t->cap, sizeof(double));
        t->failed |= !name || !v;
        if (!name || !v)
            return NULL;
        for (size_t k = 0; k < t->cap; k++)
            v[k] = NAN;
        strcat(strcpy(name, key), suffix);
        t->column[t->n_columns].key = MT_GIVE(name);
        t->column[t->n_columns++].v = MT_GIVE(v);
    }
    return &t->column[i].v[t->n - 1];
}

static void add_record(struct table *t, const cJSON *record)
{
    t->n++;
    for (const cJSON *o = record->child; o; o = o->next) {
        double *v = cJSON_IsNumber(o) && o->string ? cell(t, o->string, "") : NULL;
        if (v)
            *v = o->valuedouble;
    }
}

/* Layers of a step, whose records stand together, are one row: the mean, the least and the largest of each key. */
static void add_layer(struct table *t, const cJSON *record, int *n_layers)
{
    double step = mt_json_number(record, "step", NAN), *last = t->n ? cell(t, "step", "") : NULL;
    if (!last || *last != step) {
        t->n++;
        *n_layers = 0;
    }
    ++*n_layers;
    for (const cJSON *o = record->child; o; o = o->next) {
        double *mean = cJSON_IsNumber(o) && o->string ? cell(t, o->string, "") : NULL;
        double *least = mean ? cell(t, o->string, " least") : NULL, *most = mean ? cell(t, o->string, " most") : NULL;
        if (!most || !least)
            continue;
        *mean = isnan(*mean) ? o->valuedouble : *mean + (o->valuedouble - *mean) / *n_layers;
        *least = fmin(*least, o->valuedouble);
        *most = fmax(*most, o->valuedouble);
    }
}

/* Numbers as text, which takes a tenth of the memory of a list of items. */
static cJSON *list_of(const double *v, size_t n)
{
    MT_STR_FREED struct mt_str s = {0};
    for (size_t i = 0; i < n; i++)
        if (isfinite(v[i]))
            mt_str_printf(&s, "%c%.9g", i ? ',' : '[', v[i]);
        else
            mt_str_printf(&s, "%cnull", i ? ',' : '[');
    mt_str_printf(&s, n ? "]" : "[]");
    cJSON *list = s.failed ? NULL : cJSON_CreateRaw(s.p);
    if (!list)
        mt_json_lost();
    return list;
}

static void add_table(cJSON *run, const char *name, struct table *t)
{
    cJSON *o = cJSON_AddObjectToObject(run, name);
    for (size_t i = 0; i < t->n_columns; i++) {
        mt_json_add(o, t->column[i].key, list_of(t->column[i].v, t->n));
        free(t->column[i].key);
        free(t->column[i].v);
    }
    if (t->failed)
        mt_json_lost();
}

/* --- folders ---------------------------------------------------------------------------------------- */

static bool has(const char *dir, const char *file)
{
    return mt_path_exists(MT_PATH("%s/%s", dir, file));
}

static int read_json(cJSON **out, const char *dir, const char *file, struct mt_err *err)
{
    return mt_json_read_file(out, MT_PATH("%s/%s", dir, file), MT_ERR_INPUT, err);
}

static void add_metrics(cJSON *run, char *text)
{
    enum { STEPS, EVALS, LAYERS, N };
    static const char *const names[N] = {"steps", "evals", "layers"};
    MT_FREED struct table *t = mt_calloc(N, sizeof(*t));
    size_t lines = 1;
    int n_layers = 0;
    char *save = NULL;
    for (const char *c = text; *c; c++)
        lines += *c == '\n';
    for (int i = 0; t && i < N; i++)
        t[i].cap = lines;
    for (char *line = strtok_r(text, "\n", &save); t && line; line = strtok_r(NULL, "\n", &save)) {
        MT_JSON_FREED cJSON *o = cJSON_Parse(line); /* NULL for an incomplete last line */
        if (cJSON_IsNumber(mt_json_get(o, "step")) && !mt_json_get(o, "eval_loss") && mt_json_get(o, "layer"))
            add_layer(&t[LAYERS], o, &n_layers);
        else if (cJSON_IsNumber(mt_json_get(o, "step")))
            add_record(&t[mt_json_get(o, "eval_loss") ? EVALS : STEPS], o);
    }
    for (int i = 0; t && i < N; i++)
        add_table(run, names[i], &t[i]);
    if (!t)
        mt_json_lost();
}

/* The first of the newest answers to held-out prompts (eval.generate). */
static void add_answers(cJSON *run, const char *dir)
{
    enum { SHOWN = 20 };
    static const char *const keys[] = {"prompt", "messages", "completion", "reward"};
    MT_JSON_FREED cJSON *all = NULL;
    cJSON *shown, *o;
    if (!has(dir, "answers.jsonl") || mt_json_read_lines(&all, MT_PATH("%s/answers.jsonl", dir), NULL))
        return;
    shown = cJSON_AddArrayToObject(run, "answers");
    for (o = all->child; o && cJSON_GetArraySize(shown) < SHOWN; o = o->next) {
        cJSON *of = cJSON_CreateObject();
        for (size_t i = 0; i < MT_ARRAY_LEN(keys); i++)
            if (mt_json_get(o, keys[i]))
                mt_json_add(of, keys[i], cJSON_Duplicate(mt_json_get(o, keys[i]), true));
        mt_json_append(shown, of);
    }
}

static int add_run(cJSON *runs, const char *dir, struct mt_err *err)
{
    static const char *const files[] = {"run.json", "trace.json"}, *const keys[] = {"info", "trace"};
    char path[4200];
    MT_FREED char *text = NULL;
    size_t len = strlen(dir), end = len;
    mt_path_printf(path, sizeof(path), "%s/metrics.jsonl", dir);
    int rc = mt_read_file(path, &text, &len, err);
    if (rc)
        return rc;
    cJSON *run = cJSON_CreateObject();
    while (end > 1 && dir[end - 1] == '/')
        end--;
    snprintf(path, sizeof(path), "%.*s", (int)end, dir);
    cJSON_AddStringToObject(run, "name", strrchr(path, '/') && end > 1 ? strrchr(path, '/') + 1 : path);
    add_metrics(run, text);
    for (int i = 0; i < 2; i++) {
        cJSON *o = NULL;
        if (has(dir, files[i]) && !read_json(&o, dir, files[i], NULL))
            mt_json_add(run, keys[i], o);
    }
    add_answers(run, dir);
    mt_json_append(runs, run);
    return 0;
}

static int add_sweep(cJSON *sweeps, const char *dir, struct mt_err *err)
{
    cJSON *table;
    int rc = read_json(&table, dir, "sweep.json", err);
    if (rc)
        return rc;
    cJSON *sweep = cJSON_CreateObject();
    cJSON_AddStringToObject(sweep, "name", dir);
    mt_json_add(sweep, "table", table);
    mt_json_append(sweeps, sweep);
    return 0;
}

static int add_folders(cJSON *all, const char *const *dirs, size_t n, struct mt_err *err)
{
    cJSON *runs = cJSON_AddArrayToObject(all, "runs"), *sweeps = cJSON_AddArrayToObject(all, "sweeps");
    int rc = 0;
    for (size_t i = 0; i < n && !rc; i++) {
        bool run = has(dirs[i], "metrics.jsonl"), sweep = has(dirs[i], "sweep.json");
        if (!run && !sweep)
            rc = mt_fail(err, MT_ERR_INPUT, -ENOENT,
                         "%s has neither metrics.jsonl (of a run) nor sweep.json (of a sweep)", dirs[i]);
        if (!rc && run)
            rc = add_run(runs, dirs[i], err);
        if (!rc && sweep)
            rc = add_sweep(sweeps, dirs[i], err);
    }
    return rc;
}

/* --- the page --------------------------------------------------------------------------------------- */

/* JSON in a page: no "<", which could end the element that it is in. */
static void append_json(struct mt_str *out, const char *text)
{
    for (size_t n; *text; text += n) {
        n = strcspn(text, "<");
        mt_str_append(out, text, n);
        if (text[n])
            mt_str_append(out, "\\u003c", 6);
        n += text[n] == '<';
    }
}

int mt_report_page(struct mt_str *out, const char *const *dirs, size_t n, const char *title, int reload,
                   struct mt_err *err)
{
    mt_json_begin();
    MT_JSON_FREED cJSON *all = cJSON_CreateObject();
    cJSON_AddStringToObject(all, "title", title);
    int rc = add_folders(all, dirs, n, err);
    MT_FREED char *text = rc ? NULL : mt_json_print(all, false);
    if (!rc && (!text || !mt_json_complete()))
        rc = mt_fail_nomem(err, "a report", 1);
    if (!rc) {
        mt_str_printf(out, "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\n"
                           "<meta name=\"viewport\" content=\"width=device-width\">\n");
        if (reload)
            mt_str_printf(out, "<meta http-equiv=\"refresh\" content=\"%d\">\n", reload);
        mt_str_printf(out, "</head><body><noscript>The script of this page draws its charts.</noscript>\n"
                           "<script type=\"application/json\" id=\"data\">");
        append_json(out, text);
        mt_str_printf(out, "</script>\n<script id=\"draw\">\n%s</script></body></html>\n", draw_text);
        rc = out->failed ? mt_fail_nomem(err, "a report", out->len) : 0;
    }
    return rc;
}

int mt_report_save_pictures(const char *page, const char *dir, struct mt_err *err)
{
    char *const args[] = {"node", "-e", (char *)save_text, "--", (char *)page, (char *)dir, NULL};
    pid_t pid;
    int status = -1, rc = mt_mkdir_p(dir, err);
    if (rc)
        return rc;
    if (posix_spawnp(&pid, "node", NULL, NULL, args, environ))
        return mt_fail(err, MT_ERR_RUNTIME, -ENOENT, "--svg %s: Node.js (node), which draws pictures outside of a browser, "
                       "is not installed; %s has them, too, each with a link that saves it", dir, page);
    waitpid(pid, &status, 0);
    return status ? mt_fail(err, MT_ERR_RUNTIME, -EIO, "--svg %s: Node.js could not draw the pictures of %s", dir, page) : 0;
}
