/* SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/fs.h"
#include "cli.h"
#include "report/chart.h"
#include "report/report.h"

static int write_html(const struct mt_report *r, const char *path, const char *title, struct mt_err *err)
{
    struct mt_str s = {0};
    mt_report_html(&s, r, title);
    int rc = s.failed ? mt_fail_nomem(err, path, s.len) : mt_write_file(path, s.p, s.len, err);
    mt_str_finish(&s);
    return rc;
}

/* One file for each picture; equal names in later sections get a number. */
static int write_svgs(const struct mt_report *r, const char *dir, struct mt_err *err)
{
    int rc = mt_mkdir_p(dir, err);
    for (size_t i = 0; i < r->n && !rc; i++) {
        const struct mt_panel *p = &r->panels[i];
        char path[4200];
        struct mt_str s = {0};
        if (!p->name[0])
            continue;
        mt_chart_standalone(&s, p->content);
        mt_path_printf(path, sizeof(path), "%s/%s.svg", dir, p->name);
        for (int k = 2; mt_path_exists(path) && k < 1000; k++) {
            bool ours = false;
            for (size_t j = 0; j < i; j++)
                ours |= !strcmp(r->panels[j].name, p->name);
            if (!ours)
                break;
            mt_path_printf(path, sizeof(path), "%s/%s-%d.svg", dir, p->name, k);
        }
        rc = s.failed ? mt_fail_nomem(err, path, s.len) : mt_write_file(path, s.p, s.len, err);
        mt_str_finish(&s);
    }
    return rc;
}

int cli_cmd_report(struct cli *cli, const struct cli_args *args)
{
    struct mt_report r;
    struct mt_err err = {0};
    char html[4200];
    const char *path = cli_arg(args, "html"), *svg = cli_arg(args, "svg");
    int rc = mt_report_make(&r, (const char *const *)args->operands, (size_t)args->n_operands, &err);
    if (rc)
        return cli_fail(&err);
    mt_path_printf(html, sizeof(html), "%s/report.html", args->operands[0]);
    path = path ? path : html;
    rc = write_html(&r, path, args->n_operands > 1 ? "megatrain: several runs" : args->operands[0], &err);
    if (!rc && svg)
        rc = write_svgs(&r, svg, &err);
    if (!rc && !cli->quiet)
        printf("%s\n", path);
    mt_report_finish(&r);
    return rc ? cli_fail(&err) : 0;
}
