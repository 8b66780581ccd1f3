/* SPDX-License-Identifier: Apache-2.0 */
#include "train/reference.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/log.h"
#include "base/mem.h"
#include "train/cluster.h"

static const char START[] = "start";

/* Held-out samples of the training data have numbers of that, and their place. */
static size_t evaluation_at(const struct mt_inputs *in)
{
    return in->eval_data ? mt_sampler_n_answers(in->sampler) : 0;
}

const double *mt_reference_of_training(const struct mt_train_state *st)
{
    return st->reference;
}

const double *mt_reference_of_evaluation(const struct mt_session *s, size_t learner, const struct mt_train_state *st)
{
    return st->reference ? st->reference + evaluation_at(&s->setup->in[learner]) : NULL;
}

/* Documents of the step whose log-probability is not known yet. */
static size_t count_unknown(const struct mt_step_data *data, const double *of)
{
    size_t n = 0;
    for (size_t m = 0; m < data->n; m++)
        for (size_t d = 0; d < data->micro[m].n_docs; d++)
            n += isnan(of[data->micro[m].sample[d]]) != 0;
    return n;
}

static void take(const struct mt_step_data *data, const double *doc_loss, double *of)
{
    for (size_t m = 0; m < data->n; m++)
        for (size_t d = 0; d < data->micro[m].n_docs; d++, doc_loss++)
            if (isnan(of[data->micro[m].sample[d]]))
                of[data->micro[m].sample[d]] = -*doc_loss;
}

static size_t most_docs(const struct mt_step_data *data)
{
    return data->cap ? data->cap * data->micro[0].cap_docs : 0;
}

/* A step of an epoch on which some answers are new; later epochs have few of them or none. act: of which data. */
static int run_step(struct mt_session *s, size_t learner, enum mt_cluster_act act, struct mt_step_data *data,
                    double *doc_loss, double *of, struct mt_err *err)
{
    struct mt_eval_result sum = {.doc_loss = doc_loss};
    if (!count_unknown(data, of))
        return 0;
    int rc = mt_cluster_begin(s->setup->cluster, &(struct mt_cluster_do){.act = act, .at = data->step}, err);
    if (rc)
        return rc;
    rc = mt_engine_eval(s->engine, (int)learner, data, &sum, err);
    mt_cluster_end(s->setup->cluster, rc);
    if (!rc)
        take(data, doc_loss, of);
    return rc;
}

/* `steps`: those of the run. */
static int fill(struct mt_session *s, size_t learner, mt_sampler *sampler, uint64_t steps, double *of,
                struct mt_err *err)
{
    struct mt_step_data data;
    uint64_t epoch = mt_sampler_steps_per_epoch(sampler);
    const struct mt_inputs *in = &s->setup->in[learner];
    enum mt_cluster_act act = sampler == in->eval_sampler ? MT_CLUSTER_EVAL : MT_CLUSTER_EVAL_TRAINING;
    bool whole = mt_sampler_rows_per_epoch(sampler) >= mt_sampler_n_rows(sampler); /* an epoch visits all rows */
    int rc = mt_step_data_init(&data, sampler, err);
    if (rc)
        return rc;
    double *doc_loss = mt_calloc(most_docs(&data) + 1, sizeof(*doc_loss));
    if (!doc_loss)
        rc = mt_fail_nomem(err, "log-probabilities of the reference", most_docs(&data) * sizeof(*doc_loss));
    int64_t t0 = mt_now_ns(), said = t0;
    for (uint64_t i = 0; i < steps && !rc && !(whole && i == epoch); i++) {
        rc = mt_sampler_fill(sampler, i, &data, err);
        if (!rc)
            rc = run_step(s, learner, act, &data, doc_loss, of, err);
        double part = (double)(i + 1) / (double)MT_MIN(steps, epoch), spent = mt_seconds_since(t0);
        if (mt_now_ns() - said > 10000000000 && part < 1) {
            mt_info("log-probabilities of the reference: %.0f%%, %.0f s left", 100 * part, spent / part - spent);
            said = mt_now_ns();
        }
    }
    free(doc_loss);
    mt_step_data_finish(&data);
    return rc;
}

size_t mt_reference_count(const struct mt_inputs *in)
{
    return mt_sampler_n_answers(in->sampler) +
           (in->eval_data && in->eval_sampler ? mt_sampler_n_answers(in->eval_sampler) : 0);
}

bool mt_reference_is_start(const struct mt_inputs *in)
{
    return !strcmp(in->cfg->preference.reference, START);
}

/* Checkpoints of earlier versions do not say it: it was the start. */
static const char *known_of(const struct mt_train_state *st)
{
    return st->reference_of ? st->reference_of : START;
}

bool mt_reference_is_known(const struct mt_inputs *in, const struct mt_train_state *st)
{
    return st->reference && st->n_reference == mt_reference_count(in) &&
           !strcmp(known_of(st), in->cfg->preference.reference);
}

int mt_reference_fill(struct mt_session *s, size_t learner, const struct mt_inputs *in, double *of, struct mt_err *err)
{
    int rc = fill(s, learner, in->sampler, in->total_steps, of, err);
    if (!rc && in->eval_sampler)
        rc = fill(s, learner, in->eval_sampler, mt_sampler_steps_per_epoch(in->eval_sampler), of + evaluation_at(in),
                  err);
    return rc;
}

int mt_reference_set(const struct mt_inputs *in, struct mt_train_state *st, double *of, int rc, struct mt_err *err)
{
    char *what = rc ? NULL : strdup(in->cfg->preference.reference);
    if (!rc && !what)
        rc = mt_fail_nomem(err, "the reference", strlen(in->cfg->preference.reference));
    if (rc) {
        free(of);
        return rc;
    }
    free(st->reference);
    free(st->reference_of);
    st->reference = of;
    st->n_reference = mt_reference_count(in);
    st->reference_of = what;
    return 0;
}

static int make(struct mt_session *s, size_t learner, struct mt_train_state *st, struct mt_err *err)
{
    const struct mt_inputs *in = &s->setup->in[learner];
    size_t n = mt_reference_count(in);
    double *of = mt_calloc(n, sizeof(*of));
    if (!of)
        return mt_fail_nomem(err, "log-probabilities of the reference", n * sizeof(*of));
    for (size_t i = 0; i < n; i++)
        of[i] = NAN;
    mt_info("log-probabilities of %zu answers under the model as it is, before the first step", n);
    int rc = mt_reference_fill(s, learner, in, of, err);
    return mt_reference_set(in, st, of, rc, err);
}

int mt_reference_make(struct mt_session *s, size_t learner, struct mt_train_state *st, struct mt_err *err)
{
    const struct mt_inputs *in = &s->setup->in[learner];
    if (!mt_objective_of(mt_setup_numerics_of(s->setup, learner))->reference || mt_reference_is_known(in, st))
        return 0;
    if (st->step && st->reference && st->n_reference == mt_reference_count(in))
        return mt_fail(err, MT_ERR_CHECKPOINT, -EINVAL, "the checkpoint's reference is %s, and the model as it was at the start is "
                       "no more: set preference.reference = %s", known_of(st), known_of(st));
    if (st->step)
        return mt_fail(err, MT_ERR_CHECKPOINT, -EINVAL, "the checkpoint has %zu log-probabilities of the reference, the data "
                       "have %zu answers: it does not belong to them", st->n_reference, mt_reference_count(in));
    return make(s, learner, st, err);
}
