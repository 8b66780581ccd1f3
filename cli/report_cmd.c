/* SPDX-License-Identifier: Apache-2.0 */
#include <poll.h>
#include <signal.h>
#include <stdio.h>

#include "base/fs.h"
#include "base/log.h"
#include "base/strbuf.h"
#include "cli.h"
#include "report/report.h"

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
    MT_STR_FREED struct mt_str s = {0};
    const struct cli_args *args = p->args;
    int rc = mt_report_page(&s, (const char *const *)args->operands, (size_t)args->n_operands,
                            args->n_operands > 1 ? "megatrain: several runs" : args->operands[0], reload, err);
    if (!rc)
        rc = mt_write_file(p->html, s.p, s.len, err); /* in one piece: a browser never reads half a page */
    return rc || !p->svg ? rc : mt_report_save_pictures(p->html, p->svg, err);
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

int cli_cmd_report(struct cli *cli, const struct cli_args *args, struct mt_err *err)
{
    struct pages p = {args, cli_arg(args, "html"), cli_arg(args, "svg")};
    int seconds = (int)cli_whole(args, "watch", 0);
    p.html = p.html ? p.html : MT_PATH("%s/report.html", args->operands[0]);
    if (seconds) {
        struct sigaction stop = {.sa_handler = on_stop};
        sigaction(SIGINT, &stop, NULL);
        sigaction(SIGTERM, &stop, NULL);
    }
    int rc = write_pages(&p, seconds, err);
    if (!rc && !cli->quiet) {
        printf("%s\n", p.html);
        fflush(stdout);
    }
    if (!rc && seconds)
        rc = watch(&p, seconds, err);
    return rc;
}
