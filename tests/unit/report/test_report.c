/* SPDX-License-Identifier: Apache-2.0 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/fs.h"
#include "base/mem.h"
#include "base/philox.h"
#include "report/axis.h"
#include "report/chart.h"
#include "report/report_priv.h"

enum { N = 400 };

static void a_smoothed_line_does_not_lag(void **state)
{
    (void)state;
    double line[N], loss[N];
    for (int i = 0; i < N; i++) {
        line[i] = 5 - 0.01 * i;
        loss[i] = 2 + 8 * exp(-i / 30.0);
    }
    line[7] = line[200] = NAN;
    line[201] = INFINITY;
    double *of_line = mt_smooth(line, N), *of_loss = mt_smooth(loss, N);
    for (int i = 0; i < N; i++) {
        assert_int_equal(isfinite(of_line[i]), isfinite(line[i]));
        assert_true(!isfinite(line[i]) || fabs(of_line[i] - line[i]) < 1e-9);
        assert_true(fabs(of_loss[i] - loss[i]) < 0.03 * 8);
    }
    free(of_line);
    free(of_loss);
}

/* Root of the mean square of [from, to). */
static double size_of(const double *v, int from, int to)
{
    double sum = 0;
    for (int i = from; i < to; i++)
        sum += v[i] * v[i];
    return sqrt(sum / (to - from));
}

static void it_has_less_noise(void **state)
{
    (void)state;
    double noise[N];
    for (int i = 0; i < N; i++)
        noise[i] = mt_philox_uniform(5, 0, (uint64_t)i) - 0.5;
    double *smooth = mt_smooth(noise, N);
    assert_true(size_of(smooth, 100, N - 20) < size_of(noise, 100, N - 20) / 4);
    assert_true(size_of(smooth, N - 20, N) < size_of(noise, N - 20, N) / 1.5);
    free(smooth);
}

static void few_values_stay_themselves(void **state)
{
    (void)state;
    const double v[] = {3, 1};
    for (size_t n = 0; n <= 2; n++) {
        double *smooth = mt_smooth(v, n);
        assert_non_null(smooth);
        for (size_t i = 0; i < n; i++)
            assert_true(fabs(smooth[i] - v[i]) < 1e-12);
        free(smooth);
    }
}

static int read_run(struct mt_run_data *r, const char *text, struct mt_err *err)
{
    char dir[] = "/tmp/mt-report-XXXXXX", path[64];
    assert_non_null(mkdtemp(dir));
    snprintf(path, sizeof(path), "%s/metrics.jsonl", dir);
    assert_int_equal(mt_write_file(path, text, strlen(text), err), 0);
    int rc = mt_run_data_read(r, dir, err);
    unlink(path);
    rmdir(dir);
    return rc;
}

static void records_of_a_run_are_told_apart(void **state)
{
    (void)state;
    struct mt_run_data r;
    struct mt_err err = {0};
    const char *text = "{\"step\": 1, \"loss\": 2.5, \"lr\": null}\n"
                       "{\"step\": 1, \"layer\": 0, \"expert_balance\": 1.5, \"expert_entropy\": 0.9}\n"
                       "{\"step\": 1, \"layer\": 1, \"expert_balance\": 2.5, \"expert_entropy\": 0.5}\n"
                       "{\"step\": 2, \"loss\": 2.25, \"lr\": 0.5, \"rewards/margins\": 0.25}\n"
                       "{\"step\": 2, \"eval_loss\": 2.375, \"eval_held_loss\": 2, \"eval_held_tokens\": 9, "
                       "\"eval_nll_loss\": 3}\n"
                       "{\"step\": 3, \"loss\": 1"; /* the run was killed here */
    assert_int_equal(read_run(&r, text, &err), 0);
    assert_int_equal(r.n, 2);
    assert_true(r.col[MT_COL_LOSS][1] == 2.25 && isnan(r.col[MT_COL_LR][0]) && r.col[MT_COL_LR][1] == 0.5);
    assert_true(r.n_eval == 1 && r.eval_step[0] == 2 && r.eval_loss[0] == 2.375);
    assert_true(r.experts.n == 1 && r.experts.mean[MT_SPREAD_BALANCE][0] == 2 && r.experts.worst[MT_SPREAD_BALANCE][0] == 2.5);
    assert_true(r.experts.worst[MT_SPREAD_ENTROPY][0] == 0.5); /* the least is the worst */
    assert_true(r.lines.n == 1 && r.lines.n_eval == 0 && r.lines.step[0] == 2);
    assert_true(r.sets.n_sets == 1 && !strcmp(r.sets.name[0], "held") && r.sets.loss[0][0] == 2);
    mt_run_data_finish(&r);
}

static void what_is_no_number_is_not_drawn(void **state)
{
    (void)state;
    const double x[] = {1, 2, 3}, y[] = {1, NAN, 2};
    struct mt_series s = {.name = "a <b>", .x = x, .y = y, .n = 3};
    struct mt_chart c = {.title = "T & t", .x_label = "step", .y_label = "", .series = &s, .n_series = 1};
    struct mt_str svg = {0};
    mt_chart_lines(&svg, &c);
    assert_non_null(strstr(svg.p, "T &amp; t"));
    assert_null(strstr(svg.p, "<b>"));
    assert_null(strstr(svg.p, "nan"));
    mt_str_finish(&svg);
}

static void the_labels_of_an_axis_are_written_alike(void **state)
{
    (void)state;
    static const struct {
        bool log;
        double min, max;
        const char *first, *last;
    } axes[] = {{false, 0.002, 0.01, "0.002", "0.01"}, {false, 0.001, 0.005, "1e-3", "5e-3"}, {false, 4000, 20000, "4k", "20k"},
                {true, -5, 0, "1e-5", "1"}, {true, 0, 2.75, "1", "100"}};
    for (size_t i = 0; i < MT_ARRAY_LEN(axes); i++) {
        struct mt_axis a = {.min = axes[i].min, .max = axes[i].max, .log = axes[i].log, .from = 0, .to = 1};
        double ticks[24];
        char label[32];
        size_t n = mt_axis_ticks(&a, ticks, 24);
        double alike = mt_axis_alike(&a, ticks, n);
        assert_string_equal(mt_axis_label(label, sizeof(label), ticks[0], alike), axes[i].first);
        assert_string_equal(mt_axis_label(label, sizeof(label), ticks[n - 1], alike), axes[i].last);
    }
}

static void a_folder_of_neither_is_named(void **state)
{
    (void)state;
    struct mt_report r = {0};
    struct mt_err err = {0};
    const char *dir = "/tmp/mt-report-that-is-not-there";
    assert_true(mt_report_make(&r, &dir, 1, &err) < 0);
    assert_non_null(strstr(err.msg, dir));
    mt_report_finish(&r);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_smoothed_line_does_not_lag),    cmocka_unit_test(it_has_less_noise),
        cmocka_unit_test(few_values_stay_themselves),      cmocka_unit_test(records_of_a_run_are_told_apart),
        cmocka_unit_test(what_is_no_number_is_not_drawn),  cmocka_unit_test(a_folder_of_neither_is_named),
        cmocka_unit_test(the_labels_of_an_axis_are_written_alike),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
