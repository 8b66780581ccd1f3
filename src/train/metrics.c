/* SPDX-License-Identifier: Apache-2.0 */
#include "train/metrics.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/fs.h"
#include "base/json.h"
#include "base/mem.h"
#include "base/strbuf.h"
#include "train/append.h"
#include "train/feed.h"
#include "train/tensorboard.h"

enum { JSONL, CSV, LAYERS, N_FILES };

static const char *const file_names[N_FILES] = {"metrics.jsonl", "metrics.csv", "metrics-layers.csv"};

struct table {
    const char *const *columns;
    size_t n;
};

/* Columns of metrics.csv that every run has. A step's record leaves those of an evaluation empty, and the other way
 * round. */
static const char *const columns[] = {
    "step",       "epoch",   "tokens", "loss_tokens", "loss",     "lr",        "grad_norm", "clip",
    "tok_s",      "loss_tok_s", "t_step", "t_fwd",    "t_bwd",    "t_opt",     "t_wait_h2d", "t_data",
    "h2d_bytes",  "d2h_bytes", "t_disk_read", "t_disk_write", "skipped", "eval_loss", "eval_ppl", "eval_accuracy", "eval_tokens",
    "aux_loss", "merged_share", "eval_reward",
};

/* What is recorded of each set of eval.sets. */
enum { N_OF_SET = 4, SET_COLUMN = 160 };
static const char *const of_set[N_OF_SET] = {"loss", "ppl", "accuracy", "tokens"};

static const char *column_of_set(char to[SET_COLUMN], const char *set, size_t len, int k)
{
    snprintf(to, SET_COLUMN, "eval_%.*s_%s", (int)MT_MIN(len, (size_t)120), set, of_set[k]);
    return to;
}

enum { MOST_COLUMNS = 1024 };

struct mt_metrics {
    /* columns; those of the objective's measures and of eval.sets; those that only rows before a resume have. Owned. */
    char *csv[MOST_COLUMNS];
    struct table table[N_FILES]; /* n 0: the kind of file has no columns */
    struct mt_append file[N_FILES];
    bool on[N_FILES];
    struct mt_tensorboard *tensorboard;
    struct mt_feed *feed;
};

/* Of metrics-layers.csv. */
static const char *const layer_columns[] = {"step", "layer", "expert_balance", "expert_entropy", "experts_idle",
                                            "expert_max_share"};

/* Adds a column to metrics.csv; beyond the most there may be, none. */
__attribute__((format(printf, 3, 4)))
static int add_column(struct mt_metrics *m, struct mt_err *err, const char *fmt, ...)
{
    struct table *t = &m->table[CSV];
    va_list args;
    if (t->n == MOST_COLUMNS)
        return 0;
    va_start(args, fmt);
    int n = vasprintf(&m->csv[t->n], fmt, args);
    va_end(args);
    if (n < 0) {
        m->csv[t->n] = NULL;
        return mt_fail_nomem(err, "metrics", sizeof(*m));
    }
    t->n++;
    return 0;
}

/* A loss has its columns anyhow. */
static int set_tables(struct mt_metrics *m, const struct mt_objective *o, const struct mt_cfg_list *sets,
                      struct mt_err *err)
{
    int rc = 0;
    char name[SET_COLUMN];
    m->table[CSV] = (struct table){(const char *const *)m->csv, 0};
    m->table[LAYERS] = (struct table){layer_columns, MT_ARRAY_LEN(layer_columns)};
    for (size_t i = 0; i < MT_ARRAY_LEN(columns) && !rc; i++)
        rc = add_column(m, err, "%s", columns[i]);
    for (int i = 1; i < o->n_measures && !rc; i++) {
        bool has = !strcmp(o->measures[i], "reward"); /* as every run has it */
        rc = add_column(m, err, "%s", o->measures[i]) ?: has ? 0 : add_column(m, err, "eval_%s", o->measures[i]);
    }
    for (int i = 0; i < sets->n && i < MT_EVAL_SETS; i++)
        for (int k = 0; k < N_OF_SET && !rc; k++)
            rc = add_column(m, err, "%s", column_of_set(name, sets->items[i], strcspn(sets->items[i], ":"), k));
    return rc;
}

struct field {
    const char *p;
    size_t n;
};

/* The fields of a line of metrics.csv, in which none has a comma or a quote; returns how many. */
static size_t split(const char *line, size_t len, struct field *f)
{
    size_t n = 0;
    while (len && (line[len - 1] == '\n' || line[len - 1] == '\r'))
        len--;
    for (const char *end = line + len; line <= end && n < MOST_COLUMNS; n++) {
        const char *comma = memchr(line, ',', (size_t)(end - line));
        f[n] = (struct field){line, (size_t)((comma ? comma : end) - line)};
        line = f[n].p + f[n].n + 1;
    }
    return n;
}

static const struct field *find(const struct field *f, size_t n, const char *name)
{
    for (size_t i = 0; i < n; i++)
        if (f[i].n == strlen(name) && !memcmp(f[i].p, name, f[i].n))
            return &f[i];
    return NULL;
}

/* Puts rows of a metrics.csv with other columns (of eval.sets before a resume, say) below this one's names. */
static void move_rows(struct mt_str *out, const struct table *t, const struct field *old, size_t n_old,
                      const char *rows)
{
    struct field f[MOST_COLUMNS];
    size_t at[MOST_COLUMNS]; /* where a row has the field of a column; MOST_COLUMNS: nowhere */
    for (size_t i = 0; i < t->n; i++) {
        const struct field *from = find(old, n_old, t->columns[i]);
        at[i] = from ? (size_t)(from - old) : MOST_COLUMNS;
    }
    while (*rows) {
        size_t len = strcspn(rows, "\n") + 1, n = split(rows, len, f);
        for (size_t i = 0; i < t->n; i++)
            mt_str_printf(out, "%s%.*s", i ? "," : "", at[i] < n ? (int)f[at[i]].n : 0, at[i] < n ? f[at[i]].p : "");
        mt_str_printf(out, "\n");
        rows += len;
    }
}

static bool row_step(int kind, const char *row, size_t len, double *step)
{
    if (kind != JSONL) {
        char *end;
        *step = strtod(row, &end); /* the header is not a number */
        return end != row;
    }
    MT_JSON_FREED cJSON *o = cJSON_ParseWithLength(row, len);
    const cJSON *s = mt_json_get(o, "step");
    bool ok = cJSON_IsNumber(s);
    *step = ok ? s->valuedouble : 0;
    return ok;
}

/* Length of the leading part of the text whose records are of steps up to `last`. */
static void keep_rows(struct mt_str *out, int kind, const char *text, size_t len, uint64_t last)
{
    while (len) {
        const char *nl = memchr(text, '\n', len);
        size_t n = nl ? (size_t)(nl - text) + 1 : len;
        double step;
        if (nl && row_step(kind, text, n, &step) && step <= (double)last)
            mt_str_append(out, text, n);
        text += n;
        len -= n;
    }
}

static void put_header(struct mt_str *s, const struct table *t)
{
    for (size_t i = 0; i < t->n; i++)
        mt_str_printf(s, "%s%s", i ? "," : "", t->columns[i]);
    if (t->n)
        mt_str_printf(s, "\n");
}

/* Header and kept rows of metrics.csv; columns that only these have follow the run's own. */
static int take_rows(struct mt_metrics *m, struct mt_str *out, const char *old, const char *rows, struct mt_err *err)
{
    struct field f[MOST_COLUMNS];
    const struct table *t = &m->table[CSV];
    size_t n = split(old, strcspn(old, "\n"), f);
    int rc = 0;
    for (size_t i = 0; i < n && !rc; i++) {
        bool known = f[i].n == 0;
        for (size_t k = 0; k < t->n && !known; k++)
            known = find(&f[i], 1, t->columns[k]) != NULL;
        if (!known)
            rc = add_column(m, err, "%.*s", (int)f[i].n, f[i].p);
    }
    put_header(out, t);
    move_rows(out, t, f, n, rows);
    return rc;
}

static int open_file(struct mt_metrics *m, int kind, const char *dir, uint64_t step,
                     struct mt_err *err)
{
    const char *path = MT_PATH("%s/%s", dir, file_names[kind]);
    MT_FREED char *old = NULL;
    MT_STR_FREED struct mt_str rows = {0}, kept = {0};
    size_t len = 0;
    int rc = 0;
    if (step && mt_path_exists(path)) /* a new run starts a new file */
        rc = mt_read_file(path, &old, &len, err);
    if (!rc && old)
        keep_rows(&rows, kind, old, len, step);
    if (!rc && kind == CSV && rows.len)
        rc = take_rows(m, &kept, old, rows.p, err);
    else if (!rc) {
        put_header(&kept, &m->table[kind]);
        mt_str_append(&kept, rows.p ? rows.p : "", rows.len);
    }
    rc = rc ?: mt_write_file(path, kept.p ? kept.p : "", kept.len, err)
            ?: mt_append_open(&m->file[kind], path, true, err);
    m->on[kind] = !rc;
    return rc;
}

int mt_metrics_open(struct mt_metrics **out, const struct mt_config *cfg, const char *dir, uint64_t step,
                    const struct mt_objective *objective, bool layers, struct mt_err *err)
{
    MT_CLOSED_BY(mt_metrics_close) struct mt_metrics *m = NULL;
    int rc = MT_NEW(&m, 1, "metrics", err) ?: set_tables(m, objective, &cfg->eval.sets, err);
    if (!rc && cfg->log.jsonl)
        rc = open_file(m, JSONL, dir, step, err);
    if (!rc && cfg->log.csv)
        rc = open_file(m, CSV, dir, step, err);
    if (!rc && cfg->log.csv && layers)
        rc = open_file(m, LAYERS, dir, step, err);
    if (!rc && cfg->log.tensorboard)
        rc = mt_tensorboard_open(&m->tensorboard, dir, step, err);
    if (!rc)
        *out = MT_GIVE(m);
    return rc;
}

void mt_metrics_feed(struct mt_metrics *m, struct mt_feed *feed)
{
    m->feed = feed;
}

void mt_metrics_close(struct mt_metrics **m)
{
    if (!*m)
        return;
    for (int i = 0; i < N_FILES; i++)
        if ((*m)->on[i])
            mt_append_close(&(*m)->file[i]);
    mt_tensorboard_close(&(*m)->tensorboard);
    for (size_t i = 0; i < (*m)->table[CSV].n; i++)
        free((*m)->csv[i]);
    free(*m);
    *m = NULL;
}

/* {"states": 1234, ...} */
static void add_traffic(cJSON *o, const char *name, const uint64_t bytes[MT_N_DISK_USES])
{
    cJSON *t = cJSON_AddObjectToObject(o, name);
    for (int i = 0; i < MT_N_DISK_USES; i++)
        cJSON_AddNumberToObject(t, mt_disk_use_name((enum mt_disk_use)i), (double)bytes[i]);
}

/* A record that lacks members is none. */
static cJSON *if_complete(cJSON *record)
{
    if (mt_json_complete())
        return record;
    cJSON_Delete(record);
    return NULL;
}

/* What the objective measures beside its loss. */
static void add_measures(cJSON *record, const char *prefix, const struct mt_objective *o, const struct mt_measure *m)
{
    char name[64];
    for (int i = 1; o && i < o->n_measures; i++) {
        snprintf(name, sizeof(name), "%s%s", prefix, o->measures[i]);
        if (m[i].n > 0)
            cJSON_AddNumberToObject(record, name, mt_measure_mean(&m[i]));
    }
}

static cJSON *step_record(const struct mt_step_report *r)
{
    mt_json_begin();
    cJSON *o = cJSON_CreateObject();
    const struct mt_step_result *s = &r->result;
    const struct {
        const char *name;
        double v;
    } fields[] = {
        {"step", (double)r->step},
        {"epoch", r->epoch},
        {"tokens", (double)r->total_tokens},
        {"loss_tokens", (double)r->loss_tokens},
        {"loss", s->loss},
        {"lr", r->lr},
        {"grad_norm", s->grad_norm},
        {"clip", (double)s->clip},
        {"tok_s", (double)r->tokens / r->seconds},
        {"loss_tok_s", (double)r->loss_tokens / r->seconds},
        {"t_step", r->seconds},
        {"t_fwd", s->t_forward},
        {"t_bwd", s->t_backward},
        {"t_opt", s->t_update},
        {"t_wait_h2d", s->t_wait_h2d},
        {"t_data", r->seconds - s->t_step},
        {"h2d_bytes", (double)r->h2d_bytes},
        {"d2h_bytes", (double)r->d2h_bytes},
    };
    for (size_t i = 0; i < MT_ARRAY_LEN(fields); i++)
        cJSON_AddNumberToObject(o, fields[i].name, fields[i].v);
    add_measures(o, "", r->objective, s->measures);
    if (s->aux_loss > 0)
        cJSON_AddNumberToObject(o, "aux_loss", s->aux_loss);
    if (r->uses_disk) {
        mt_json_put(o, "t_disk_read=%f, t_disk_write=%f, t_disk_sums=%f", s->t_disk_read, s->t_disk_write,
                    s->t_disk_sums);
        add_traffic(o, "disk_read", s->traffic.read);
        add_traffic(o, "disk_write", s->traffic.written);
    }
    cJSON_AddBoolToObject(o, "skipped", s->skipped);
    if (s->other_attention)
        cJSON_AddBoolToObject(o, "other_attention", true);
    if (s->n_skipped && !s->skipped)
        cJSON_AddNumberToObject(o, "skipped_blocks", (double)s->n_skipped);
    if (s->n_skipped || s->skipped)
        cJSON_AddStringToObject(o, "bad_tensor", s->bad_tensor);
    return if_complete(o);
}

cJSON *mt_metrics_layer_record(uint64_t step, int layer, const int32_t *rows, size_t n_experts)
{
    double all = 0, squares = 0, entropy = 0, most = 0, idle = 0;
    for (size_t i = 0; i < n_experts; i++)
        all += rows[i];
    for (size_t i = 0; i < n_experts; i++) {
        double share = all > 0 ? rows[i] / all : 0;
        squares += share * share;
        entropy -= share > 0 ? share * log(share) : 0;
        most = fmax(most, share);
        idle += rows[i] == 0;
    }
    mt_json_begin();
    return if_complete(mt_json_put(NULL, "step=%f, layer=%f, expert_balance=%f, expert_entropy=%f, experts_idle=%f, "
                                   "expert_max_share=%f", (double)step, (double)layer, squares * (double)n_experts,
                                   n_experts > 1 ? entropy / log((double)n_experts) : 1, idle, most));
}

static cJSON *eval_record(const struct mt_eval_report *r)
{
    mt_json_begin();
    cJSON *o = mt_json_put(NULL, "step=%f, eval_loss=%f", (double)r->step, r->loss);
    if (!r->objective || !r->objective->weights)
        cJSON_AddNumberToObject(o, "eval_ppl", exp(r->loss));
    add_measures(o, "eval_", r->objective, r->measures);
    if (!isnan(r->reward)) {
        cJSON_DeleteItemFromObjectCaseSensitive(o, "eval_reward");
        cJSON_AddNumberToObject(o, "eval_reward", r->reward);
    }
    mt_json_put(o, "eval_accuracy=%f, eval_tokens=%f", r->accuracy, (double)r->n_loss);
    if (!isnan(r->merged_share))
        cJSON_AddNumberToObject(o, "merged_share", r->merged_share);
    for (const struct mt_eval_of_set *s = r->sets; s < r->sets + r->n_sets; s++) {
        const double value[N_OF_SET] = {s->loss, exp(s->loss), s->accuracy, (double)s->n_loss};
        char name[SET_COLUMN];
        for (int k = 0; k < N_OF_SET; k++)
            cJSON_AddNumberToObject(o, column_of_set(name, s->name, strlen(s->name), k), value[k]);
    }
    return if_complete(o);
}

enum { TRIES = 3 }; /* memory that lacked for a moment costs no record */

cJSON *mt_metrics_step_record(const struct mt_step_report *r)
{
    return step_record(r) ?: step_record(r) ?: step_record(r);
}

cJSON *mt_metrics_eval_record(const struct mt_eval_report *r)
{
    return eval_record(r) ?: eval_record(r) ?: eval_record(r);
}

static void put_csv(struct mt_str *s, const struct table *t, const cJSON *record)
{
    for (size_t i = 0; i < t->n; i++) {
        const cJSON *v = mt_json_get(record, t->columns[i]);
        mt_str_printf(s, "%s", i ? "," : "");
        if (cJSON_IsBool(v))
            mt_str_printf(s, "%d", cJSON_IsTrue(v));
        else if (cJSON_IsNumber(v) && isfinite(v->valuedouble))
            mt_str_printf(s, "%.17g", v->valuedouble);
    }
    mt_str_printf(s, "\n");
}

/* The record's row for a kind of file; p NULL: there was no memory for it. */
static struct mt_str row_of(const struct table *t, bool json, const cJSON *record)
{
    struct mt_str row = {0};
    for (int i = 0; i < TRIES && !row.p; i++) {
        MT_FREED char *text = json ? mt_json_print(record, false) : NULL;
        if (text)
            mt_str_printf(&row, "%s\n", text);
        else if (!json)
            put_csv(&row, t, record);
        if (row.failed)
            mt_str_finish(&row);
    }
    return row;
}

void mt_metrics_write(struct mt_metrics *m, const cJSON *record)
{
    if (!record)
        return;
    struct mt_str row = m->on[JSONL] || m->feed ? row_of(NULL, true, record) : (struct mt_str){0};
    if (row.p && m->feed)
        mt_feed_put(m->feed, row.p, row.len);
    if (row.p && m->on[JSONL])
        mt_append_put(&m->file[JSONL], row.p, row.len);
    mt_str_finish(&row);
    int csv = mt_json_get(record, "layer") ? LAYERS : CSV;
    if (m->on[csv]) {
        row = row_of(&m->table[csv], false, record);
        if (row.p)
            mt_append_put(&m->file[csv], row.p, row.len);
        mt_str_finish(&row);
    }
    if (m->tensorboard)
        mt_tensorboard_write(m->tensorboard, record);
}
