/* SPDX-License-Identifier: Apache-2.0 */
#include "train/evaluate.h"

#include <math.h>
#include <string.h>

#include "base/clock.h"
#include "train/cluster.h"

struct evaluation {
    struct mt_session *s;
    size_t learner;
    struct mt_train_control *control;
};

/* The loss of an evaluation without a reference, which its objective would need, is that of the tokens. */
static void take_measures(const struct mt_numerics *n, struct mt_eval_result *sum, struct mt_eval_report *out)
{
    const struct mt_objective *o = mt_objective_of(n);
    if (o->finish && sum->measures[0].n > 0)
        o->finish(&(struct mt_objective_step){.objective = o, .keys = &n->objective_keys}, sum->measures);
    out->objective = o;
    memcpy(out->measures, sum->measures, sizeof(out->measures));
    out->loss = sum->n_loss ? sum->loss_sum / (double)sum->n_loss : NAN;
    if (o->weights && sum->measures[0].n > 0)
        out->loss = mt_measure_mean(&sum->measures[0]);
}

/* One step of the sampler's. */
static int evaluate_step(const struct evaluation *e, mt_sampler *sampler, const struct mt_cluster_do *on,
                         struct mt_step_data *data, struct mt_eval_result *sum, bool *unread, struct mt_err *err)
{
    struct mt_session *s = e->s;
    int rc = mt_sampler_fill(sampler, on->at, data, err);
    *unread = rc;
    rc = rc ?: mt_cluster_begin(s->setup->cluster, on, err);
    if (rc)
        return rc;
    rc = mt_engine_eval(s->engine, (int)e->learner, data, sum, err);
    mt_cluster_end(s->setup->cluster, rc, err);
    *unread = rc == -ENOMEM && mt_engine_whole(s->engine);
    return rc;
}

/* on: what the hosts do in each step of the sampler's. */
static int evaluate_on(const struct evaluation *e, mt_sampler *sampler, struct mt_cluster_do on,
                       const double *reference, struct mt_eval_report *out, bool *unread, struct mt_err *err)
{
    MT_CLOSED_BY(mt_step_data_finish) struct mt_step_data data = {0};
    struct mt_eval_result sum = {.reference = reference};
    int64_t t0 = mt_now_ns();
    int rc = mt_step_data_init(&data, sampler, err);
    *unread = rc;
    if (rc)
        return rc;
    uint64_t steps = mt_sampler_stats(sampler)->steps_per_epoch;
    while (on.at < steps && !rc) {
        rc = evaluate_step(e, sampler, &on, &data, &sum, unread, err);
        on.at += !rc;
        rc = mt_train_heed(e->control, e->learner, on.at, steps, rc, err);
        rc = rc == MT_AGAIN ? 0 : rc;
    }
    if (rc)
        return rc;
    out->n_loss = sum.n_loss;
    take_measures(mt_setup_numerics_of(e->s->setup, e->learner), &sum, out);
    out->accuracy = sum.n_loss ? (double)sum.n_correct / (double)sum.n_loss : NAN;
    out->seconds = mt_seconds_since(t0);
    return 0;
}

int mt_evaluate(struct mt_session *s, size_t learner, struct mt_train_control *control, const double *reference,
                struct mt_eval_report *out, bool *unread, struct mt_err *err)
{
    const struct evaluation e = {s, learner, control};
    const struct mt_inputs *in = &s->setup->in[learner];
    struct mt_cluster_do on = {.act = MT_CLUSTER_EVAL};
    int rc = evaluate_on(&e, in->eval_sampler, on, reference, out, unread, err);
    for (size_t i = 0; i < in->n_sets && !rc; i++) {
        struct mt_eval_report r = {.n_loss = 0};
        on = (struct mt_cluster_do){.act = MT_CLUSTER_EVAL_SET, .set = i};
        if (in->sets[i].sampler)
            rc = evaluate_on(&e, in->sets[i].sampler, on, NULL, &r, unread, err);
        if (!rc && r.n_loss)
            out->sets[out->n_sets++] = (struct mt_eval_of_set){in->sets[i].name, r.n_loss, r.loss, r.accuracy};
        out->seconds += r.seconds;
    }
    return rc;
}
