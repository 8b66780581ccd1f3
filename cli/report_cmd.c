/* SPDX-License-Identifier: Apache-2.0 */
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>

#include "base/fs.h"
#include "base/log.h"
#include "cli.h"
#include "report/chart.h"
#include "report/report.h"

static int write_html(const struct mt_report *r, const char *path, const char *title, struct mt_err *err)
{
    struct mt_str s = {0};
    mt_report_html(&s, r, title);
    /* in one piece: a browser never reads half a page */
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

static volatile sig_atomic_t stopped;

static void on_stop(int)
{
    stopped = 1;
}

/* What is asked for on the command line. */
struct pages {
    const struct cli_args *args;
    const char *html, *svg;
};

static int write_pages(const struct pages *p, int reload, struct mt_err *err)
{
    struct mt_report r;
    const struct cli_args *args = p->args;
    int rc = mt_report_make(&r, (const char *const *)args->operands, (size_t)args->n_operands, err);
    if (rc)
        return rc;
    r.reload = reload;
    rc = write_html(&r, p->html, args->n_operands > 1 ? "megatrain: several runs" : args->operands[0], err);
    if (!rc && p->svg)
        rc = write_svgs(&r, p->svg, err);
    mt_report_finish(&r);
    return rc;
}

/* Writes the page until a signal comes, and once more, as one that stays as it is. */
static int watch(const struct pages *p, int seconds, struct mt_err *err)
{
    struct mt_err why = {0};
    while (!stopped) {
        for (int i = 0; i < seconds && !stopped; i++) /* a signal may come just before it waits */
            poll(NULL, 0, 1000);
        if (!stopped && write_pages(p, seconds, &why))
            mt_warn("%s; trying again", why.msg);
    }
    return write_pages(p, 0, err);
}

int cli_cmd_report(struct cli *cli, const struct cli_args *args)
{
    struct mt_err err = {0};
    char html[4200];
    struct pages p = {args, cli_arg(args, "html"), cli_arg(args, "svg")};
    int seconds = (int)cli_whole(args, "watch", 0);
    mt_path_printf(html, sizeof(html), "%s/report.html", args->operands[0]);
    p.html = p.html ? p.html : html;
    if (seconds) {
        struct sigaction stop = {.sa_handler = on_stop};
        sigaction(SIGINT, &stop, NULL);
        sigaction(SIGTERM, &stop, NULL);
    }
    int rc = write_pages(&p, seconds, &err);
    if (!rc && !cli->quiet) {
        printf("%s\n", p.html);
        fflush(stdout);
    }
    if (!rc && seconds)
        rc = watch(&p, seconds, &err);
    return rc ? cli_fail(&err) : 0;
}
