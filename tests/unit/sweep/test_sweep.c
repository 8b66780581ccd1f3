/* SPDX-License-Identifier: Apache-2.0 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/fs.h"
#include "sweep/sweep.h"
#include "test.h"

static int read_text(struct mt_sweep *s, const char *text, struct mt_err *err)
{
    char path[] = "/tmp/mt-sweep-XXXXXX";
    int fd = mkstemp(path);
    assert_true(fd >= 0);
    assert_int_equal(mt_write_all(fd, text, strlen(text)), 0);
    close(fd);
    int rc = mt_sweep_read(s, path, err);
    unlink(path);
    return rc;
}

static const char *axis(const struct mt_sweep_job *j, int k)
{
    return cJSON_GetArrayItem(j->axes, k)->valuestring;
}

TEST(a_grid_crosses_its_axes)
{
    MT_CLOSED_BY(mt_sweep_finish) struct mt_sweep s = {0};
    MUST(read_text, &s, "[global]\nmodel.path = m\n[train]\nbatch_size = 8\n"
         "[sweep]\ntrain.micro_batch = 1, 2,4\nmemory.slots = 2, 3\nsteps = 4\n"
         "warmup_steps = 1\nrepeat = 2\nspread = 5%\ncooldown = 100ms\n");
    assert_int_equal(s.n_jobs, 6);
    assert_string_equal(axis(&s.jobs[0], 0), "1");
    assert_string_equal(axis(&s.jobs[0], 1), "2");
    assert_string_equal(axis(&s.jobs[1], 1), "3"); /* the last axis runs fastest */
    assert_string_equal(axis(&s.jobs[5], 0), "4");
    assert_non_null(strstr(s.jobs[5].ini, "micro_batch = 4\n"));
    assert_non_null(strstr(s.jobs[5].ini, "batch_size = 8\n"));
    assert_non_null(strstr(s.jobs[5].ini, "steps = 5\n")); /* warm-up and measured */
    assert_true(fabs(s.cooldown - 0.1) < 1e-12 && fabs(s.spread - 0.05) < 1e-12);
    for (size_t i = 0; i < 6; i++)
        for (size_t k = 0; k < i; k++)
            assert_string_not_equal(s.jobs[i].hash, s.jobs[k].hash);
}

TEST(a_zip_pairs_them_and_wants_equal_lengths)
{
    struct mt_sweep s;
    struct mt_err err = {0};
    MUST(read_text, &s, "[sweep]\nmode = zip\ntrain.micro_batch = 1, 2\nmemory.slots = 2, 3\n");
    assert_int_equal(s.n_jobs, 2);
    assert_string_equal(axis(&s.jobs[1], 0), "2");
    assert_string_equal(axis(&s.jobs[1], 1), "3");
    mt_sweep_finish(&s);
    assert_int_equal(read_text(&s, "[sweep]\nmode = zip\ntrain.micro_batch = 1\nmemory.slots = 2, 3\n", &err),
                     -EINVAL);
    assert_non_null(strstr(err.msg, "zip"));
}

TEST(jobs_are_variants_of_the_whole_grid)
{
    MT_CLOSED_BY(mt_sweep_finish) struct mt_sweep s = {0};
    MUST(read_text, &s, "[sweep]\nmemory.slots = 2, 3\n[job plain]\n[job f32]\nmodel.dtype = f32\n");
    assert_int_equal(s.n_jobs, 4);
    assert_string_equal(s.jobs[0].name, "plain"); /* a job without keys is a job */
    assert_null(strstr(s.jobs[0].ini, "f32"));
    assert_string_equal(s.jobs[2].name, "f32");
    assert_non_null(strstr(s.jobs[2].ini, "dtype = f32"));
}

TEST(every_bad_line_is_named)
{
    static const struct {
        const char *text, *word;
    } bad[] = {{"[sweep]\nmode = dance\n", "grid or zip"},
               {"[sweep]\nrepeats = 3\n", "repeats"},
               {"[sweep]\nrepeat = 0\n", "repeat must be a whole number of 1 or more"},
               {"[sweep]\nsteps = 3x\n", "steps must be"},
               {"[sweep]\ntrain.micro_bach = 1\n", "micro_batch"},
               {"[sweep]\non_oom = cry\n", "record or abort"},
               {"[sweep]\ncooldown = soon\n", "duration"},
               {"[job a]\nsteps = 3\n", "SECTION.KEY"}};
    for (size_t i = 0; i < sizeof(bad) / sizeof(*bad); i++) {
        struct mt_sweep s;
        struct mt_err err = {0};
        assert_int_equal(read_text(&s, bad[i].text, &err), -EINVAL);
        assert_int_equal(err.kind, MT_ERR_USAGE);
        if (!strstr(err.msg, bad[i].word) || !strstr(err.msg, ":2:"))
            fail_msg("%s gives \"%s\"", bad[i].text, err.msg);
    }
}

TEST(statistics_are_those_of_the_textbook)
{
    const double odd[] = {3, 1, 2}, even[] = {4, 1, 3, 2}, one[] = {7};
    struct mt_stats s = mt_stats_of(odd, 3);
    assert_true(s.median == 2 && s.min == 1 && s.max == 3 && fabs(s.deviation - 1) < 1e-12);
    s = mt_stats_of(even, 4);
    assert_true(s.median == 2.5 && fabs(s.deviation - sqrt(5.0 / 3)) < 1e-12);
    s = mt_stats_of(one, 1);
    assert_true(s.median == 7 && s.deviation == 0);
}

TEST(a_run_is_kept_and_found_again)
{
    char dir[] = "/tmp/mt-runs-XXXXXX";
    struct mt_sweep_run a = {.status = "ok", .seconds = 0.123456789012345, .tok_s = 1e5, .peak_bytes = 3e9}, b;
    struct mt_err err = {0};
    assert_non_null(mkdtemp(dir));
    assert_int_equal(mt_sweep_run_load(&b, dir, "abc", 0, &err), -ENOENT);
    MUST(mt_sweep_run_save, &a, dir, "abc", 0);
    MUST(mt_sweep_run_load, &b, dir, "abc", 0);
    assert_true(a.seconds == b.seconds && a.tok_s == b.tok_s && a.peak_bytes == b.peak_bytes);
    assert_string_equal(b.status, "ok");
    assert_int_equal(mt_sweep_run_load(&b, dir, "abc", 1, &err), -ENOENT);
    mt_remove_tree(dir, NULL);
}

static struct mt_sweep_row row_of(const struct mt_sweep_job *j, double seconds, double spread, double predicted, size_t n)
{
    struct mt_sweep_run runs[3] = {{.status = "ok", .seconds = seconds * (1 - spread)},
                                   {.status = "ok", .seconds = seconds},
                                   {.status = "ok", .seconds = seconds * (1 + spread)}};
    struct mt_sweep_prediction p = {.fits = true, .seconds = predicted, .tokens = 100};
    struct mt_sweep_row r;
    mt_sweep_row_fill(&r, j, runs, n, &p);
    return r;
}

static struct mt_sweep_row row(const struct mt_sweep_job *j, double seconds, double spread, double predicted)
{
    return row_of(j, seconds, spread, predicted, 3);
}

TEST(comparison_tells_change_from_noise)
{
    MT_CLOSED_BY(mt_sweep_finish) struct mt_sweep s = {0};
    MT_STR_FREED struct mt_str out = {0};
    MUST(read_text, &s, "[sweep]\nmemory.slots = 2, 3, 4, 5\n");
    struct mt_sweep_row before[3] = {row(&s.jobs[0], 1, 0.01, 1), row(&s.jobs[1], 1, 0.01, 1),
                                     row(&s.jobs[2], 1, 0.1, 1)};
    struct mt_sweep_row now[3] = {row(&s.jobs[0], 1.1, 0.01, 1), row(&s.jobs[1], 0.8, 0.01, 1),
                                  row(&s.jobs[2], 1.1, 0.1, 1)};
    MT_JSON_FREED cJSON *a = mt_sweep_json(before, 3), *b = mt_sweep_json(now, 3);
    mt_sweep_compare(&out, a, b);
    assert_non_null(strstr(out.p, "| +10.0 | slower |"));
    assert_non_null(strstr(out.p, "| -20.0 | faster |"));
    assert_non_null(strstr(out.p, "| +10.0 | same |"));
    assert_non_null(strstr(out.p, "1 faster, 1 slower, 1 the same"));
    mt_str_finish(&out);
    cJSON_Delete(b);
    now[2] = row(&s.jobs[3], 1, 0.1, 1);
    b = mt_sweep_json(now, 3);
    mt_sweep_compare(&out, a, b);
    assert_non_null(strstr(out.p, "gone"));
    assert_non_null(strstr(out.p, "new"));
    mt_str_finish(&out);
    cJSON_Delete(b);
    now[0] = row_of(&s.jobs[0], 3, 0.01, 1, 1);
    b = mt_sweep_json(now, 1);
    assert_null(cJSON_GetObjectItem(cJSON_GetArrayItem(cJSON_GetObjectItem(b, "rows"), 0), "deviation_pct"));
    mt_sweep_compare(&out, a, b);
    assert_non_null(strstr(out.p, "| noise unknown |"));
    assert_non_null(strstr(out.p, "0 faster, 0 slower, 0 the same within the noise; 1 of a single run"));
}

TEST(runs_with_predictions_of_their_own_are_compared_with_those)
{
    MT_CLOSED_BY(mt_sweep_finish) struct mt_sweep s = {0};
    MUST(read_text, &s, "[sweep]\nmemory.slots = 2\n");
    /* the machine is half as fast in the second run, and said so */
    struct mt_sweep_run runs[3] = {{.status = "ok", .seconds = 1.0, .predicted = 1.0, .ratio = 1.0, .peak_bytes = 7},
                                   {.status = "ok", .seconds = 2.2, .predicted = 2.0, .ratio = 1.1},
                                   {.status = "ok", .seconds = 1.1, .predicted = 1.0, .ratio = 1.1}};
    struct mt_sweep_prediction p = {.fits = true, .seconds = 5};
    struct mt_sweep_row r;
    mt_sweep_row_fill(&r, &s.jobs[0], runs, 3, &p);
    assert_true(fabs(r.ratio.median - 1.1) < 1e-9);
    assert_true(fabs(r.ratio.min - 1) < 1e-9);
    assert_true(fabs(r.predicted.seconds - 1) < 1e-9);
    assert_true(fabs(mt_sweep_error(&r, 1).median - 0.1) < 1e-9);
    assert_true(r.run.peak_bytes == 7);
    runs[1].ratio = 0; /* one without: all are compared with the job's */
    mt_sweep_row_fill(&r, &s.jobs[0], runs, 3, &p);
    assert_true(fabs(r.ratio.median - 1.1 / 5) < 1e-9);
    assert_true(r.predicted.seconds == 5);
}

TEST(tables_hold_failures_and_errors_of_prediction)
{
    MT_CLOSED_BY(mt_sweep_finish) struct mt_sweep s = {0};
    MT_STR_FREED struct mt_str csv = {0}, md = {0};
    MUST(read_text, &s, "[sweep]\nmemory.slots = 2, 3\n");
    struct mt_sweep_row rows[2] = {row(&s.jobs[0], 1.1, 0.01, 1)};
    struct mt_sweep_run dead = {.status = "signal 9"};
    struct mt_sweep_prediction p = {.fits = true, .seconds = 2, .tokens = 100};
    mt_sweep_row_fill(&rows[1], &s.jobs[1], &dead, 1, &p);
    struct mt_stats e = mt_sweep_error(rows, 2);
    assert_int_equal(e.n, 1);
    assert_true(fabs(e.median - 0.1) < 1e-9);
    mt_sweep_csv(&csv, rows, 2);
    mt_sweep_markdown(&md, rows, 2);
    assert_non_null(strstr(csv.p, "\"signal 9\""));
    assert_non_null(strstr(md.p, "| signal 9 |"));
    assert_non_null(strstr(md.p, "median error 10.0%"));
    assert_null(strstr(csv.p, "nan"));
}

TEST(losses_of_other_numerics_are_compared)
{
    MT_CLOSED_BY(mt_sweep_finish) struct mt_sweep s = {0};
    MT_STR_FREED struct mt_str md = {0};
    MUST(read_text, &s, "[sweep]\nmodel.compute = bf16, fp8\n");
    struct mt_sweep_row rows[2] = {row(&s.jobs[0], 1, 0.01, 1), row(&s.jobs[1], 1, 0.01, 1)};
    rows[0].run.loss = rows[1].run.loss = 2.5;
    mt_sweep_markdown(&md, rows, 2);
    assert_null(strstr(md.p, "Loss over"));
    mt_str_finish(&md);
    rows[1].run.loss = 2.505;
    mt_sweep_markdown(&md, rows, 2);
    assert_non_null(strstr(md.p, "model.compute fp8: 2.505, +0.200% of 2.5 (model.compute bf16)."));
}
