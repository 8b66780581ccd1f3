/* SPDX-License-Identifier: Apache-2.0 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/fs.h"
#include "base/json.h"
#include "base/mem.h"
#include "base/philox.h"
#include "test.h"
#include "train/metrics.h"

static char dir[64], path[128];
static const struct mt_config jsonl = {.log = {.jsonl = true, .exec = ""}};

static int set_up(void **)
{
    snprintf(dir, sizeof(dir), "/tmp/mt-metrics-XXXXXX");
    if (!mkdtemp(dir))
        return -1;
    snprintf(path, sizeof(path), "%s/metrics.jsonl", dir);
    return 0;
}

static int tear_down(void **)
{
    return mt_remove_tree(dir, NULL);
}

static struct mt_step_report report(uint64_t step, double loss)
{
    return (struct mt_step_report){.step = step, .total_steps = 9, .epoch = 0.1 * (double)step,
                                   .result = {.loss = loss, .grad_norm = loss / 3, .clip = 1}, .lr = 1e-5 / 3,
                                   .seconds = 0.3, .tokens = 30, .loss_tokens = 20};
}

static void write_steps(uint64_t from, uint64_t to, uint64_t open_at)
{
    struct mt_metrics *m = NULL;
    assert_int_equal(mt_metrics_open(&m, &jsonl, dir, open_at, mt_objective_find("cross_entropy"), false, NULL), 0);
    for (uint64_t s = from; s <= to; s++) {
        struct mt_step_report r = report(s, (double)s);
        MT_JSON_FREED cJSON *o = mt_metrics_step_record(&r);
        mt_metrics_write(m, o);
    }
    mt_metrics_close(&m);
    assert_null(m);
}

static void expect_steps(uint64_t n)
{
    MT_FREED char *text = NULL;
    size_t len = 0;
    uint64_t seen = 0;
    assert_int_equal(mt_read_file(path, &text, &len, NULL), 0);
    for (char *line = text, *nl; (nl = strchr(line, '\n')); line = nl + 1) {
        MT_JSON_FREED cJSON *o = cJSON_ParseWithLength(line, (size_t)(nl - line));
        assert_non_null(o);
        assert_int_equal(mt_json_get(o, "step")->valueint, ++seen);
    }
    assert_int_equal(seen, n);
}

/* As read by a spreadsheet: a row of other columns than the header's would be another row. */
TEST_WITH(rows_stay_below_their_names_when_sets_change, set_up, tear_down)
{
    char *one[] = {"old:a.jsonl"}, *two[] = {"new:b.jsonl"}, csv[128];
    MT_FREED char *text = NULL;
    struct mt_config cfg = {.log = {.csv = true, .exec = ""}, .eval = {.sets = {one, 1}}};
    struct mt_eval_report r = {.step = 1, .loss = 1, .n_loss = 4, .n_sets = 1,
                               .sets = {{.name = "old", .loss = 0.25, .accuracy = 0.5, .n_loss = 3}}};
    size_t len = 0;
    snprintf(csv, sizeof(csv), "%s/metrics.csv", dir);
    for (uint64_t s = 0; s < 3; s++) { /* the third resume finds its columns as they are */
        struct mt_metrics *m = NULL;
        assert_int_equal(mt_metrics_open(&m, &cfg, dir, s, mt_objective_find("cross_entropy"), false, NULL), 0);
        cJSON *o = mt_metrics_eval_record(&r);
        mt_metrics_write(m, o);
        cJSON_Delete(o);
        mt_metrics_close(&m);
        r.step++;
        r.sets[0].name = "new";
        r.sets[0].loss = 0.75;
        cfg.eval.sets.items = two;
    }
    assert_int_equal(mt_read_file(csv, &text, &len, NULL), 0);
    char *row[4], *at = text;
    for (int i = 0; i < 4; i++)
        row[i] = strsep(&at, "\n");
    assert_string_equal(at, "");
    assert_non_null(strstr(row[0], ",eval_new_loss,eval_new_ppl,eval_new_accuracy,eval_new_tokens,eval_old_loss,"));
    assert_non_null(strstr(row[1], ",,,,,0.25,"));
    assert_non_null(strstr(row[2], ",0.75,"));
    assert_non_null(strstr(row[3], ",0.75,"));
    for (int i = 0; i < 4; i++) {
        int commas = 0;
        for (const char *c = row[i]; *c; c++)
            commas += *c == ',';
        assert_int_equal(commas, 28 - 1 + 2 * 4);
    }
}

TEST_WITH(a_resumed_run_cuts_what_went_further, set_up, tear_down)
{
    write_steps(1, 7, 0);
    expect_steps(7);
    write_steps(5, 8, 4); /* resumed from step 4 */
    expect_steps(8);
    write_steps(9, 9, 8);
    expect_steps(9);
    write_steps(1, 2, 0); /* a run that starts anew */
    expect_steps(2);
}

TEST_WITH(a_line_that_a_crash_cut_is_dropped, set_up, tear_down)
{
    write_steps(1, 3, 0);
    FILE *f = fopen(path, "ae");
    fprintf(f, "{\"step\": 3, \"lo");
    fclose(f);
    write_steps(4, 4, 3);
    expect_steps(4);
}

TEST_WITH(numbers_read_back_exactly, set_up, tear_down)
{
    for (uint64_t i = 0; i < 2000; i++) {
        struct mt_philox b = mt_philox(1, 2, i);
        uint64_t bits = (uint64_t)b.v[0] << 32 | b.v[1];
        double loss;
        memcpy(&loss, &bits, sizeof(loss));
        if (!isfinite(loss))
            continue;
        struct mt_step_report r = report(i, loss);
        MT_JSON_FREED cJSON *o = mt_metrics_step_record(&r);
        MT_FREED char *text = mt_json_print(o, false);
        MT_JSON_FREED cJSON *back = cJSON_Parse(text);
        assert_true(mt_json_get(back, "loss")->valuedouble == loss);
        assert_true(mt_json_get(back, "lr")->valuedouble == 1e-5 / 3);
    }
}

TEST_WITH(a_skipped_step_is_told_with_its_tensor, set_up, tear_down)
{
    struct mt_step_report r = report(3, 2);
    r.result.skipped = true;
    r.result.grad_norm = NAN;
    snprintf(r.result.bad_tensor, sizeof(r.result.bad_tensor), "model.norm.weight");
    MT_JSON_FREED cJSON *o = mt_metrics_step_record(&r);
    MT_FREED char *text = mt_json_print(o, false);
    assert_non_null(strstr(text, "\"grad_norm\":null"));
    assert_non_null(strstr(text, "\"skipped\":true"));
    assert_non_null(strstr(text, "\"bad_tensor\":\"model.norm.weight\""));
    assert_null(strstr(text, "nan"));
}

static double layer_value(const int32_t *rows, size_t n, const char *key)
{
    MT_JSON_FREED cJSON *o = mt_metrics_layer_record(3, 1, rows, n);
    double v = mt_json_get(o, key)->valuedouble;
    return v;
}

TEST_WITH(a_layer_says_how_its_experts_are_used, set_up, tear_down)
{
    const int32_t even[] = {5, 5, 5, 5}, one[] = {0, 7, 0, 0}, none[] = {0, 0, 0, 0}, some[] = {1, 3, 0, 0};
    assert_float_equal(layer_value(even, 4, "expert_balance"), 1, 1e-12);
    assert_float_equal(layer_value(even, 4, "expert_entropy"), 1, 1e-12);
    assert_float_equal(layer_value(even, 4, "experts_idle"), 0, 0);
    assert_float_equal(layer_value(one, 4, "expert_balance"), 4, 1e-12);
    assert_float_equal(layer_value(one, 4, "expert_entropy"), 0, 1e-12);
    assert_float_equal(layer_value(one, 4, "experts_idle"), 3, 0);
    assert_float_equal(layer_value(one, 4, "expert_max_share"), 1, 0);
    assert_float_equal(layer_value(none, 4, "expert_balance"), 0, 0);
    assert_float_equal(layer_value(some, 4, "expert_balance"), 2.5, 1e-12); /* 4 (1/16 + 9/16) */
}

TEST_WITH(an_evaluation_has_its_perplexity, set_up, tear_down)
{
    struct mt_eval_report r = {.step = 4, .n_loss = 10, .loss = 2.5, .accuracy = 0.25};
    cJSON *printed = mt_metrics_eval_record(&r);
    char *text = cJSON_PrintUnformatted(printed);
    MT_JSON_FREED cJSON *o = cJSON_Parse(text);
    cJSON_Delete(printed);
    free(text);
    assert_true(mt_json_get(o, "eval_loss")->valuedouble == 2.5);
    assert_true(mt_json_get(o, "eval_ppl")->valuedouble == exp(2.5));
    assert_null(mt_json_get(o, "loss"));
}

TEST_WITH(a_folder_that_is_not_there_is_an_error, set_up, tear_down)
{
    struct mt_metrics *m = NULL;
    struct mt_err err = {0};
    const struct mt_objective *o = mt_objective_find("cross_entropy");
    assert_int_equal(mt_metrics_open(&m, &jsonl, "/no/such/folder", 0, o, false, &err), -ENOENT);
    assert_null(m);
    assert_non_null(strstr(err.msg, "/no/such/folder/metrics.jsonl"));
}
