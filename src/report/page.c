/* SPDX-License-Identifier: Apache-2.0 */
#include <stdlib.h>
#include <string.h>

#include "base/fs.h"
#include "base/mem.h"
#include "report/chart.h"
#include "report/report_priv.h"

static bool has(const char *dir, const char *file)
{
    char path[4200];
    mt_path_printf(path, sizeof(path), "%s/%s", dir, file);
    return mt_path_exists(path);
}

static int add_sweep(struct mt_report *r, const char *dir, struct mt_err *err)
{
    char path[4200];
    cJSON *table;
    mt_path_printf(path, sizeof(path), "%s/sweep.json", dir);
    int rc = mt_json_read_file(&table, path, MT_ERR_INPUT, err);
    if (rc)
        return rc;
    rc = mt_report_sweep(r, dir, table, err);
    cJSON_Delete(table);
    return rc;
}

int mt_report_make(struct mt_report *out, const char *const *dirs, size_t n, struct mt_err *err)
{
    struct mt_report r = {0};
    struct mt_run_data *runs = mt_calloc(n + 1, sizeof(*runs));
    size_t n_runs = 0;
    int rc = runs ? 0 : mt_fail_nomem(err, "a report", n * sizeof(*runs));
    for (size_t i = 0; i < n && !rc; i++) {
        bool run = has(dirs[i], "metrics.jsonl");
        if (!run && !has(dirs[i], "sweep.json"))
            rc = mt_fail(err, MT_ERR_INPUT, -ENOENT,
                         "%s has neither metrics.jsonl (of a run) nor sweep.json (of a sweep)", dirs[i]);
        if (!rc && run)
            rc = mt_run_data_read(&runs[n_runs], dirs[i], err);
        n_runs += !rc && run;
    }
    if (!rc && n_runs)
        rc = mt_report_runs(&r, runs, n_runs, err);
    for (size_t i = 0; i < n && !rc; i++)
        if (has(dirs[i], "sweep.json"))
            rc = add_sweep(&r, dirs[i], err);
    for (size_t i = 0; i < n_runs; i++)
        mt_run_data_finish(&runs[i]);
    free(runs);
    if (rc) {
        mt_report_finish(&r);
        return rc;
    }
    *out = r;
    return 0;
}

void mt_report_html(struct mt_str *out, const struct mt_report *r, const char *title)
{
    const char *section = "";
    mt_str_printf(out, "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\n"
                       "<meta name=\"viewport\" content=\"width=device-width\">\n");
    if (r->reload)
        mt_str_printf(out, "<meta http-equiv=\"refresh\" content=\"%d\">\n", r->reload);
    mt_str_printf(out, "<title>");
    mt_xml_escape(out, title);
    mt_str_printf(out, "</title>\n<style>\n");
    mt_chart_style(out);
    mt_str_printf(out,
                  "body{background:var(--bg);color:var(--fg);font-family:system-ui,'DejaVu Sans',sans-serif;"
                  "margin:24px;max-width:1360px}h1{font-size:20px}h2{font-size:16px;margin:28px 0 8px}"
                  ".panels{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%%,560px),1fr));gap:16px}"
                  "figure{margin:0;border:1px solid var(--grid);border-radius:8px;padding:6px}"
                  "figure.wide{grid-column:1/-1}"
                  ".table{overflow-x:auto;grid-column:1/-1}table{border-collapse:collapse;font-size:12px}"
                  "th,td{border-bottom:1px solid var(--grid);padding:3px 9px;text-align:right;white-space:nowrap}"
                  "th{color:var(--dim);font-weight:600}\n</style></head><body>\n<h1>");
    mt_xml_escape(out, title);
    mt_str_printf(out, "</h1>\n");
    for (size_t i = 0; i < r->n; i++) {
        const struct mt_panel *p = &r->panels[i];
        if (strcmp(section, p->section)) {
            mt_str_printf(out, "%s<h2>", i ? "</div>\n" : "");
            mt_xml_escape(out, p->section);
            mt_str_printf(out, "</h2><div class=\"panels\">\n");
        }
        section = p->section;
        if (p->name[0])
            mt_str_printf(out, "<figure data-panel=\"%s\"%s>", p->name, strcmp(p->name, "timeline") ? "" : " class=\"wide\"");
        mt_str_append(out, p->content, strlen(p->content));
        if (p->name[0])
            mt_str_printf(out, "</figure>\n");
    }
    mt_str_printf(out, "%s</body></html>\n", r->n ? "</div>\n" : "");
}
