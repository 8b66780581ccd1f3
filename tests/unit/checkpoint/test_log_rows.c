/* SPDX-License-Identifier: Apache-2.0 */
#include "base/json.h"
#include "checkpoint/log_rows.h"
#include "test.h"

static void add(struct mt_log_rows *r, int step, const char *value)
{
    MT_JSON_FREED cJSON *o = cJSON_CreateObject();
    cJSON_AddNumberToObject(o, "step", step);
    cJSON_AddNumberToObject(o, value, 1.5);
    mt_log_rows_add(r, o);
}

/* A long run stays in bounds, from its first step to its last, with all of its evaluations. */
TEST(a_long_log_is_thinned_out)
{
    struct mt_log_rows r = {.n = 0}, again = {.n = 0};
    int n_evaluations = 0, last = 0;
    for (int step = 1; step <= 50000; step++) {
        add(&r, step, "loss");
        if (step % 500 == 0)
            add(&r, step, "eval_loss");
        assert_in_range(r.n, 1, MT_LOG_ROWS);
    }
    cJSON *raw = mt_log_rows_json(&r), *list = cJSON_Parse(raw->valuestring);
    assert_int_equal(cJSON_GetArraySize(list), (int)r.n);
    assert_true(r.n > MT_LOG_ROWS / 3);
    for (const cJSON *o = list->child; o; o = o->next) {
        int step = (int)cJSON_GetObjectItem(o, "step")->valuedouble;
        assert_true(step >= last && step - last <= 32);
        last = step;
        n_evaluations += cJSON_GetObjectItem(o, "eval_loss") != NULL;
    }
    assert_true(last > 50000 - 32);
    assert_int_equal(n_evaluations, 100);
    assert_int_equal(mt_log_rows_read(&again, list, NULL), 0);
    assert_int_equal(again.n, r.n);
    assert_string_equal(again.row[7], r.row[7]);
    cJSON_Delete(raw);
    cJSON_Delete(list);
    mt_log_rows_finish(&r);
    mt_log_rows_finish(&again);
}
