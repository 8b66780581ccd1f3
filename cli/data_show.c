/* SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/fs.h"
#include "base/mem.h"
#include "base/strbuf.h"
#include "base/visible.h"
#include "cli.h"
#include "data/text.h"
#include "train/inputs.h"

/* The samples to show, and the form. */
struct show {
    const struct mt_inputs *in;
    uint64_t first, n;
    struct mt_text_sample *samples; /* owned, with their `trained` */
    bool colour;
    struct mt_str *html; /* NULL: to the terminal */
    size_t shown;        /* number of headings printed */
};

static const char PAGE[] =
    "<!doctype html><html lang=\"en\"><meta charset=\"utf-8\">"
    "<meta name=\"viewport\" content=\"width=device-width\"><title>Training samples</title><style>"
    ":root{color-scheme:light dark;--t:#b7e4c7;--b:#fff;--f:#222;--m:#777}"
    "@media(prefers-color-scheme:dark){:root{--t:#1b5e37;--b:#16181d;--f:#ddd;--m:#999}}"
    "body{font:15px/1.5 system-ui,sans-serif;max-width:60em;margin:2em auto;padding:0 1em;"
    "background:var(--b);color:var(--f)}h2{font-size:1em;margin:2em 0 .3em}"
    "h2 small{color:var(--m);font-weight:normal}"
    "pre{white-space:pre-wrap;overflow-wrap:anywhere;border-left:3px solid var(--m);padding-left:1em}"
    "mark{background:var(--t);color:inherit;border-radius:2px}</style>"
    "<h1>Training samples</h1><p>The loss is taken on <mark>marked</mark> tokens.</p>\n";

static void append(struct mt_str *out, const char *text, size_t len, bool html)
{
    for (size_t i = 0, n; i < len; i += n) {
        unsigned u = mt_steering(text + i, len - i, &n);
        if (u)
            mt_str_printf(out, u < 256 ? "\\x%02x" : "\\u%04x", u);
        else if (html && strchr("<>&", text[i]))
            mt_str_printf(out, "&#%d;", text[i]);
        else
            mt_str_append(out, text + i, n);
    }
}

static void heading(struct show *w, size_t k)
{
    char place[4200];
    const struct mt_text_sample *t = &w->samples[k];
    size_t trained = 0;
    for (size_t i = 1; i < t->n; i++)
        trained += t->trained[i];
    mt_dataset_place(w->in->data, w->first + k, place, sizeof(place));
    if (w->html) {
        mt_str_printf(w->html, "%s<h2>%llu <small>", k ? "</pre>\n" : "",
                      (unsigned long long)(w->first + k));
        append(w->html, place, strlen(place), true);
        mt_str_printf(w->html, ": %zu tokens, %zu trained</small></h2><pre>", t->n, trained);
    } else {
        printf("%s=== sample %llu, %s: %zu tokens, %zu trained\n", k ? "\n\n" : "",
               (unsigned long long)(w->first + k), place, t->n, trained);
    }
}

static void on_piece(void *ctx, size_t sample, const char *text, size_t len, bool trained)
{
    struct show *w = ctx;
    while (w->shown <= sample)
        heading(w, w->shown++);
    if (w->html) {
        mt_str_printf(w->html, trained ? "<mark>" : "");
        append(w->html, text, len, true);
        mt_str_printf(w->html, trained ? "</mark>" : "");
        return;
    }
    MT_STR_FREED struct mt_str safe = {0};
    append(&safe, text, len, false);
    fputs(!trained ? "" : w->colour ? "\033[30;42m" : "⟦", stdout);
    fputs(safe.p ? safe.p : "", stdout);
    fputs(!trained ? "" : w->colour ? "\033[0m" : "⟧", stdout);
}

/* Without a tokenizer, tokens are shown as numbers. */
static void show_numbers(struct show *w)
{
    struct mt_str text = {0};
    for (size_t k = 0; k < w->n; k++)
        for (size_t i = 0; i < w->samples[k].n; i++) {
            const struct mt_text_sample *t = &w->samples[k];
            mt_str_printf(&text, "%u ", t->ids[i]);
            if (i + 1 == t->n || t->trained[i] != t->trained[i + 1]) {
                on_piece(w, k, text.p ? text.p : "", text.len, t->trained[i]);
                mt_str_finish(&text);
            }
        }
}

static void show_json(const struct show *w)
{
    for (size_t k = 0; k < w->n; k++) {
        const struct mt_text_sample *t = &w->samples[k];
        printf("{\"sample\": %llu, \"input_ids\": [", (unsigned long long)(w->first + k));
        for (size_t i = 0; i < t->n; i++)
            printf("%s%u", i ? ", " : "", t->ids[i]);
        printf("], \"labels\": [");
        for (size_t i = 0; i < t->n; i++)
            printf("%s%lld", i ? ", " : "", t->trained[i] ? (long long)t->ids[i] : -100LL);
        printf("]}\n");
    }
}

static int show_text(struct show *w, struct mt_err *err)
{
    const struct mt_inputs *in = w->in;
    struct mt_text_params p = {.bytes = !strcmp(in->cfg->data.tokenizer, "byte"),
                               .model_dir = in->model_dir};
    if (!p.bytes && !mt_text_has_tokenizer(in->model_dir)) {
        show_numbers(w);
        return 0;
    }
    return mt_text_decode(&p, w->samples, w->n, on_piece, w, err);
}

static int take_samples(struct show *w, struct mt_err *err)
{
    uint64_t have = mt_dataset_stats(w->in->data)->n_samples;
    if (w->first >= have)
        return mt_fail(err, MT_ERR_USAGE, -ERANGE, "--first %llu: there are %llu samples",
                       (unsigned long long)w->first, (unsigned long long)have);
    w->n = MT_MIN(w->n, have - w->first);
    int rc = MT_NEW(&w->samples, w->n, "samples to show", err);
    for (uint64_t k = 0; k < w->n && !rc; k++) {
        struct mt_text_sample *t = &w->samples[k];
        uint8_t *mask;
        t->n = mt_dataset_sample(w->in->data, w->first + k, &t->ids, NULL);
        rc = MT_NEW(&mask, t->n, "samples to show", err);
        if (!rc) {
            mt_dataset_sample(w->in->data, w->first + k, NULL, mask);
            mask[0] = 0; /* the first token has no predecessor */
        }
        t->trained = mask;
    }
    return rc;
}

int cli_data_show(const struct cli *cli, const struct cli_args *args, const struct mt_inputs *in,
                  struct mt_err *err)
{
    const char *html = cli_arg(args, "html");
    MT_STR_FREED struct mt_str page = {0};
    struct show w = {.in = in,
                     .first = (uint64_t)cli_whole(args, "first", 0),
                     .n = (uint64_t)cli_whole(args, "samples", 3),
                     .colour = cli->colour_always || (cli->colour && isatty(STDOUT_FILENO)),
                     .html = html ? &page : NULL};
    int rc = take_samples(&w, err);
    if (!rc && html)
        mt_str_append(&page, PAGE, sizeof(PAGE) - 1);
    if (!rc && cli_arg(args, "json"))
        show_json(&w);
    else if (!rc)
        rc = show_text(&w, err);
    if (!rc && html) {
        mt_str_printf(&page, "</pre></html>\n");
        rc = page.failed ? mt_fail_nomem(err, html, page.len)
                         : mt_write_file(html, page.p, page.len, err);
        if (!rc)
            printf("%s: %llu samples\n", html, (unsigned long long)w.n);
    } else if (!rc && !cli_arg(args, "json")) {
        putchar('\n');
    }
    for (uint64_t k = 0; w.samples && k < w.n; k++)
        free((uint8_t *)w.samples[k].trained);
    free(w.samples);
    return rc;
}
