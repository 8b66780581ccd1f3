/* SPDX-License-Identifier: Apache-2.0 */
/* The chart of evaluation sets: eval_NAME_loss of metrics.jsonl, a line a name. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "report/chart.h"
#include "report/report_priv.h"

int mt_set_lines_alloc(struct mt_set_lines *l, size_t n, struct mt_err *err)
{
    l->cap = n;
    l->step = mt_calloc(n, sizeof(double));
    return l->step ? 0 : mt_fail_nomem(err, "a report", n * sizeof(double));
}

void mt_set_lines_finish(struct mt_set_lines *l)
{
    free(l->step);
    for (size_t i = 0; i < l->n_sets; i++)
        free(l->loss[i]);
}

/* The line of a set, which begins at its first record; NULL: there are too many, or no memory. */
static double *line_of(struct mt_set_lines *l, const char *name, size_t len)
{
    for (size_t i = 0; i < l->n_sets; i++)
        if (strlen(l->name[i]) == len && !strncmp(l->name[i], name, len))
            return l->loss[i];
    double *line = l->n_sets < MT_REPORT_SETS && len < sizeof(l->name[0]) ? mt_calloc(l->cap, sizeof(double)) : NULL;
    if (!line)
        return NULL;
    for (size_t i = 0; i < l->cap; i++)
        line[i] = NAN;
    snprintf(l->name[l->n_sets], sizeof(l->name[0]), "%.*s", (int)len, name);
    l->loss[l->n_sets++] = line;
    return line;
}

void mt_set_lines_read(struct mt_set_lines *l, double step, const cJSON *record)
{
    static const char before[] = "eval_", after[] = "_loss";
    size_t first = sizeof(before) - 1, last = sizeof(after) - 1;
    bool any = false;
    for (const cJSON *v = record->child; v; v = v->next) {
        size_t n = v->string ? strlen(v->string) : 0;
        char tokens[128]; /* which tells a set from a measure of the objective, such as nll_loss */
        if (n <= first + last || strncmp(v->string, before, first) != 0 || strcmp(v->string + n - last, after) != 0 ||
            !cJSON_IsNumber(v))
            continue;
        snprintf(tokens, sizeof(tokens), "%.*s_tokens", (int)(n - last), v->string);
        double *line = !mt_json_get(record, tokens) ? NULL : line_of(l, v->string + first, n - first - last);
        if (line)
            line[l->n] = v->valuedouble;
        any |= line != NULL;
    }
    if (any)
        l->step[l->n++] = step;
}

int mt_report_sets(struct mt_report *r, const char *section, const struct mt_set_lines *l, struct mt_err *err)
{
    struct mt_series s[MT_REPORT_SETS] = {{0}};
    struct mt_str text = {0};
    if (!l->n_sets)
        return 0;
    for (size_t i = 0; i < l->n_sets; i++)
        s[i] = (struct mt_series){.name = l->name[i], .x = l->step, .y = l->loss[i], .n = l->n, .colour = (int)i,
                                  .points = true};
    struct mt_chart c = {.title = "Loss of evaluation sets", .x_label = "step", .y_label = "nats a token", .series = s,
                         .n_series = l->n_sets};
    mt_chart_lines(&text, &c);
    return mt_report_add(r, section, "sets", &text, err);
}
