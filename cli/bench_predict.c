/* SPDX-License-Identifier: Apache-2.0 */
#include "bench_predict.h"

#include <stdlib.h>

#include "base/fs.h"
#include "base/json.h"
#include "base/mem.h"
#include "rates.h"

/* Keeps the placement that was chosen: with other rates the search might choose another. */
static int seconds_with(double *seconds, const struct plan_view *v, const struct mt_machine *m, struct mt_err *err)
{
    struct mt_plan_choice c;
    struct mt_plan_request r = mt_plan_request_as(&v->request, &v->choice);
    r.machine = m;
    int rc = mt_plan_evaluate(&c, &r, NULL, err);
    if (rc)
        return rc;
    *seconds = c.sim.seconds;
    mt_plan_choice_finish(&c);
    return 0;
}

struct steps {
    const struct plan_view *view;
    struct mt_machine machine;
    struct rates_log log;
    double *predicted, *ratio; /* [n] */
    size_t n;
};

/* Predicts a step with a measurement of the operations before and after it. */
static int predict_step(struct steps *s, int step, double measured, struct mt_err *err)
{
    const double *before = rates_log_after(&s->log, step - 1), *after = rates_log_after(&s->log, step);
    double predicted = 0;
    if (!before || !after || !(measured > 0))
        return 0;
    for (size_t i = 0; i < s->log.n_ops; i++)
        if (!mt_machine_add_sample(&s->machine, &s->log.ops[i], (before[i] + after[i]) / 2))
            return mt_fail_nomem(err, "a prediction", s->log.n_ops * sizeof(struct mt_op_sample));
    int rc = seconds_with(&predicted, s->view, &s->machine, err);
    if (rc)
        return rc;
    s->predicted[s->n] = predicted;
    s->ratio[s->n++] = measured / predicted;
    return 0;
}

static int predict_all(struct steps *s, const cJSON *metrics, int skip, struct mt_err *err)
{
    const cJSON *o;
    int rc = 0;
    cJSON_ArrayForEach(o, metrics) {
        const cJSON *t = mt_json_get(o, "t_step"), *step = mt_json_get(o, "step");
        if (!rc && cJSON_IsNumber(t) && cJSON_IsNumber(step) && skip-- <= 0)
            rc = predict_step(s, step->valueint, t->valuedouble, err);
    }
    return rc;
}

int bench_predict_steps(struct mt_sweep_run *run, const struct plan_view *v, const struct bench_measured *m, int skip,
                        struct mt_err *err)
{
    struct steps s = {.view = v};
    MT_JSON_FREED cJSON *metrics = NULL;
    run->predicted = run->ratio = 0;
    if (!mt_path_exists(m->machine) || !mt_path_exists(m->rates) || !mt_path_exists(m->metrics))
        return 0;
    int rc = mt_json_read_lines(&metrics, m->metrics, err);
    size_t most = rc ? 0 : (size_t)cJSON_GetArraySize(metrics);
    s.predicted = mt_calloc(most + 1, sizeof(double));
    s.ratio = mt_calloc(most + 1, sizeof(double));
    if (!rc && (!s.predicted || !s.ratio))
        rc = mt_fail_nomem(err, "predictions", most * sizeof(double));
    rc = rc ?: mt_machine_read(&s.machine, m->machine, err)
            ?: rates_log_read(&s.log, m->rates, err)
            ?: predict_all(&s, metrics, skip, err);
    if (!rc && s.n) {
        run->predicted = mt_stats_of(s.predicted, s.n).median;
        run->ratio = mt_stats_of(s.ratio, s.n).median;
    }
    rates_log_finish(&s.log);
    mt_machine_finish(&s.machine);
    free(s.predicted);
    free(s.ratio);
    return rc;
}
