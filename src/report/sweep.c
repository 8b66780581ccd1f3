/* SPDX-License-Identifier: Apache-2.0 */
/* Pictures of benchmark sweeps. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "report/chart.h"
#include "report/report_priv.h"

enum { MAX_VALUES = 24, MAX_MAPS = 12, LABEL = 160 };

/* Value of an axis; "" if the file does not have it as text, as we write it. */
static const char *text_of(const cJSON *a)
{
    return cJSON_IsString(a) ? a->valuestring : "";
}

static const char *name_of(const cJSON *a)
{
    return a && a->string ? a->string : "";
}

struct values {
    const char *v[MAX_VALUES];
    size_t n;
};

static size_t index_of(struct values *l, const char *value)
{
    for (size_t i = 0; i < l->n; i++)
        if (!strcmp(l->v[i], value))
            return i;
    if (l->n == MAX_VALUES)
        return MAX_VALUES;
    l->v[l->n] = value;
    return l->n++;
}

/* A row's values on all axes but the first two; each combination has a map of its own. */
static void rest_of(char *buf, size_t len, const cJSON *row)
{
    const cJSON *a;
    int at = snprintf(buf, len, "%s", mt_json_string(row, "job", "")), k = 0;
    cJSON_ArrayForEach(a, mt_json_get(row, "axes")) if (k++ >= 2 && at >= 0 && (size_t)at < len)
        at += snprintf(buf + at, len - (size_t)at, "%s%s = %s", at ? ", " : "", name_of(a), text_of(a));
}

static const cJSON *axis(const cJSON *row, int k)
{
    return cJSON_GetArrayItem(mt_json_get(row, "axes"), k);
}

static int add_map(struct mt_report *r, const char *section, const char *rest, size_t at, const cJSON *rows,
                   struct mt_err *err)
{
    struct values x = {.n = 0}, y = {.n = 0};
    struct mt_cell *cells = mt_calloc(MAX_VALUES * MAX_VALUES, sizeof(*cells));
    const char *x_name = "", *y_name = "";
    const cJSON *row;
    char mine[LABEL], title[2 * LABEL], name[64];
    if (!cells)
        return mt_fail_nomem(err, "a report", MAX_VALUES * MAX_VALUES * sizeof(*cells));
    for (int pass = 0; pass < 2; pass++) {
        cJSON_ArrayForEach(row, rows)
        {
            const cJSON *a = axis(row, 0), *b = axis(row, 1);
            rest_of(mine, sizeof(mine), row);
            if (strcmp(mine, rest) || !a)
                continue;
            size_t j = index_of(&x, text_of(a)), i = index_of(&y, text_of(b));
            x_name = name_of(a);
            y_name = name_of(b);
            if (!pass || i >= MAX_VALUES || j >= MAX_VALUES)
                continue;
            bool fits = strcmp(mt_json_string(row, "status", ""), "does not fit") != 0;
            cells[i * x.n + j] = (struct mt_cell){mt_json_number(row, "tok_s", NAN), fits ? mt_json_string(row, "status", "") : "no fit"};
        }
        for (size_t i = 0; !pass && i < MAX_VALUES * MAX_VALUES; i++)
            cells[i].value = NAN;
    }
    struct mt_str s = {0};
    snprintf(title, sizeof(title), "Speed%s%s", rest[0] ? ": " : "", rest);
    snprintf(name, sizeof(name), "heat-map-%zu", at);
    struct mt_heat_map m = {.title = title, .x_label = x_name, .y_label = y_name, .unit = "tokens a second",
                            .columns = x.v, .rows = y.v, .n_columns = x.n, .n_rows = y.n, .cells = cells};
    mt_chart_heat_map(&s, &m);
    free(cells);
    return mt_report_add(r, section, name, &s, err);
}

static int add_maps(struct mt_report *r, const char *section, const cJSON *rows, struct mt_err *err)
{
    char (*seen)[LABEL] = mt_calloc(MAX_MAPS, LABEL), mine[LABEL];
    const cJSON *row;
    size_t n = 0;
    int rc = seen ? 0 : mt_fail_nomem(err, "a report", MAX_MAPS * LABEL);
    cJSON_ArrayForEach(row, rows)
    {
        bool known = false;
        rest_of(mine, sizeof(mine), row);
        for (size_t i = 0; i < n && !rc; i++)
            known |= !strcmp(seen[i], mine);
        if (rc || known || n == MAX_MAPS || !axis(row, 0))
            continue;
        memcpy(seen[n++], mine, LABEL);
        rc = add_map(r, section, mine, n, rows, err);
    }
    free(seen);
    return rc;
}

static int add_scatter(struct mt_report *r, const char *section, const cJSON *table, struct mt_err *err)
{
    const cJSON *rows = mt_json_get(table, "rows"), *row, *a;
    size_t n = 0, total = (size_t)cJSON_GetArraySize(rows);
    double *x = mt_calloc(total + 1, sizeof(double)), *y = mt_calloc(total + 1, sizeof(double));
    char (*label)[LABEL] = mt_calloc(total + 1, LABEL), title[160];
    const char **labels = mt_calloc(total + 1, sizeof(*labels));
    int rc = x && y && label && labels ? 0 : mt_fail_nomem(err, "a report", total * LABEL);
    cJSON_ArrayForEach(row, rows)
    {
        double p = mt_json_number(row, "predicted_s", NAN), m = mt_json_number(row, "measured_s", NAN);
        if (rc || !isfinite(p) || !isfinite(m))
            continue;
        int at = snprintf(label[n], LABEL, "%s", mt_json_string(row, "job", ""));
        cJSON_ArrayForEach(a, mt_json_get(row, "axes")) if (at >= 0 && at < LABEL)
            at += snprintf(label[n] + at, LABEL - (size_t)at, " %s=%s", a->string, a->valuestring);
        x[n] = p;
        y[n] = m;
        labels[n] = label[n];
        n++;
    }
    struct mt_str s = {0};
    snprintf(title, sizeof(title), "Predicted and measured: median error %.1f%%, worst %.1f%%",
             100 * mt_json_number(table, "median_error", NAN), 100 * mt_json_number(table, "worst_error", NAN));
    if (!rc && n) {
        mt_chart_scatter(&s, title, "predicted seconds a step", "measured seconds a step",
                         &(struct mt_points){x, y, labels, n});
        rc = mt_report_add(r, section, "predicted-measured", &s, err);
    }
    free(x);
    free(y);
    free(label);
    free(labels);
    return rc;
}

static void add_cell(struct mt_str *s, const cJSON *v)
{
    char buf[32];
    mt_str_printf(s, "<td>");
    if (cJSON_IsNumber(v)) {
        snprintf(buf, sizeof(buf), "%.4g", v->valuedouble);
        mt_xml_escape(s, buf);
    } else if (cJSON_IsString(v)) {
        mt_xml_escape(s, v->valuestring);
    }
    mt_str_printf(s, "</td>");
}

static int add_table(struct mt_report *r, const char *section, const cJSON *rows, struct mt_err *err)
{
    static const struct {
        const char *key, *head;
    } shown[] = {{"predicted_s", "predicted s"}, {"measured_s", "measured s"},  {"deviation_pct", "spread %"},
                 {"runs", "runs"},               {"measured_over_predicted", "ratio"}, {"tok_s", "tokens/s"},
                 {"model_tflops", "TFLOP/s"},    {"wait_h2d_pct", "wait %"},    {"device_mib", "device MiB"},
                 {"peak_rss_mib", "peak MiB"},   {"planned_host_mib", "planned MiB"}};
    struct mt_str s = {0};
    const cJSON *row, *a, *first = cJSON_GetArrayItem(rows, 0);
    mt_str_printf(&s, "<div class=\"table\"><table><thead><tr><th>job</th>");
    cJSON_ArrayForEach(a, mt_json_get(first, "axes"))
    {
        mt_str_printf(&s, "<th>");
        const char *dot = strchr(a->string, '.');
        mt_xml_escape(&s, dot ? dot + 1 : a->string);
        mt_str_printf(&s, "</th>");
    }
    mt_str_printf(&s, "<th>status</th>");
    for (size_t i = 0; i < MT_ARRAY_LEN(shown); i++)
        mt_str_printf(&s, "<th>%s</th>", shown[i].head);
    mt_str_printf(&s, "</tr></thead><tbody>\n");
    cJSON_ArrayForEach(row, rows)
    {
        mt_str_printf(&s, "<tr>");
        add_cell(&s, mt_json_get(row, "job"));
        cJSON_ArrayForEach(a, mt_json_get(row, "axes")) add_cell(&s, a);
        add_cell(&s, mt_json_get(row, "status"));
        bool any = mt_json_get(row, "tok_s") != NULL; /* a job that does not fit has no figures */
        for (size_t i = 0; i < MT_ARRAY_LEN(shown); i++)
            add_cell(&s, any ? mt_json_get(row, shown[i].key) : NULL);
        mt_str_printf(&s, "</tr>\n");
    }
    mt_str_printf(&s, "</tbody></table></div>\n");
    return mt_report_add(r, section, "", &s, err);
}

int mt_report_sweep(struct mt_report *r, const char *name, const cJSON *table, struct mt_err *err)
{
    const cJSON *rows = mt_json_get(table, "rows");
    int rc = add_maps(r, name, rows, err);
    if (!rc)
        rc = add_scatter(r, name, table, err);
    return rc ? rc : add_table(r, name, rows, err);
}
