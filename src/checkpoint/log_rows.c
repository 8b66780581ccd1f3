/* SPDX-License-Identifier: Apache-2.0 */
#include "checkpoint/log_rows.h"

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "base/json.h"
#include "base/mem.h"
#include "base/strbuf.h"

void mt_log_rows_finish(struct mt_log_rows *r)
{
    for (size_t i = 0; i < r->n; i++)
        free(r->row[i]);
    free(r->row);
    *r = (struct mt_log_rows){.n = 0};
}

static bool is_evaluation(const char *row)
{
    return strstr(row, "\"eval_loss\"") != NULL;
}

/* Every second row of steps goes; if all are evaluations, every second one of all. */
static void thin_out(struct mt_log_rows *r)
{
    size_t kept = 0, steps = 0, n_steps = 0;
    for (size_t i = 0; i < r->n; i++)
        n_steps += !is_evaluation(r->row[i]);
    for (size_t i = 0; i < r->n; i++) {
        bool goes = n_steps > r->n / 4 ? !is_evaluation(r->row[i]) && steps++ % 2 : i % 2;
        if (goes)
            free(r->row[i]);
        else
            r->row[kept++] = r->row[i];
    }
    r->n = kept;
    r->every *= 2;
}

static int add_text(struct mt_log_rows *r, char *text)
{
    if (r->n == MT_LOG_ROWS)
        thin_out(r);
    if (!text || !mt_grow(&r->row, &r->cap, r->n + 1, sizeof(*r->row))) {
        free(text);
        return -ENOMEM;
    }
    r->row[r->n++] = text;
    return 0;
}

void mt_log_rows_add(struct mt_log_rows *r, const cJSON *record)
{
    char *text = record ? mt_json_print(record, false) : NULL;
    r->every = MT_MAX(r->every, (size_t)1);
    if (text && !is_evaluation(text) && ++r->skipped < r->every) {
        free(text);
        return;
    }
    if (text && !is_evaluation(text))
        r->skipped = 0;
    if (text)
        add_text(r, text);
}

cJSON *mt_log_rows_json(const struct mt_log_rows *r)
{
    MT_STR_FREED struct mt_str s = {0};
    mt_str_printf(&s, "[");
    for (size_t i = 0; i < r->n; i++)
        mt_str_printf(&s, "%s\n%s", i ? "," : "", r->row[i]);
    mt_str_printf(&s, "%s]", r->n ? "\n" : "");
    cJSON *raw = s.failed ? NULL : cJSON_CreateRaw(s.p);
    if (s.failed)
        mt_json_lost();
    return raw;
}

int mt_log_rows_read(struct mt_log_rows *out, const cJSON *array, struct mt_err *err)
{
    struct mt_log_rows r = {.every = 1};
    int rc = 0;
    for (const cJSON *o = array ? array->child : NULL; o && !rc; o = o->next)
        rc = add_text(&r, mt_json_print(o, false));
    if (rc) {
        mt_log_rows_finish(&r);
        return mt_fail_nomem(err, "the log of a checkpoint", MT_LOG_ROWS);
    }
    *out = r;
    return 0;
}
