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
    return in->eval_data ? mt_sampler_stats(in->sampler)->n_answers : 0;
}

const double *mt_reference_of_evaluation(const struct mt_session *s, size_t learner, const struct mt_train_state *st)
{
    return st->reference ? st->reference + evaluation_at(&s->setup->in[learner]) : NULL;
}

/* Documents of the step whose log-probability is not known yet. */
static size_t count_unknown(const struct mt_step_data *data, const double *of)
{
    size_t unknown = 0, n;
    const struct mt_batch *b = mt_step_whole(data, &n);
    for (const struct mt_batch *end = b + n; b < end; b++)
        for (size_t d = 0; d < b->n_docs; d++)
            unknown += isnan(of[b->sample[d]]) != 0;
    return unknown;
}

static void take(const struct mt_step_data *data, const double *doc_loss, double *of)
{
    size_t n;
    const struct mt_batch *b = mt_step_whole(data, &n);
    for (const struct mt_batch *end = b + n; b < end; b++)
        for (size_t d = 0; d < b->n_docs; d++, doc_loss++)
            if (isnan(of[b->sample[d]]))
                of[b->sample[d]] = -*doc_loss;
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
    mt_cluster_end(s->setup->cluster, rc, err);
    if (!rc)
        take(data, doc_loss, of);
    return rc;
}

/* What is done with the steps of some data; session NULL: it is only looked for answers that are not known. */
struct visit {
    struct mt_session *session;
    size_t learner;
    bool unknown; /* there are some */
};

/* Steps from `first` on visit each row before this one, or the end of the run. From the run's first step a pass over all
 * rows begins; from another one it may be over half, and the next one may begin within an epoch. */
static uint64_t last_of_pass(const mt_sampler *s, uint64_t first, uint64_t end)
{
    const struct mt_sampler_stats *of = mt_sampler_stats(s);
    uint64_t pass = of->epochs_per_pass * of->steps_per_epoch;
    return MT_MIN(end, first ? first + 3 * pass : pass);
}

/* Steps [first, end) of a sampler, over which later ones have nothing new. */
static int visit(struct visit *v, mt_sampler *sampler, uint64_t first, uint64_t end, double *of, struct mt_err *err)
{
    MT_CLOSED_BY(mt_step_data_finish) struct mt_step_data data = {.n = 0};
    struct mt_session *s = v->session;
    bool evaluation = s && sampler == s->setup->in[v->learner].eval_sampler;
    enum mt_cluster_act act = evaluation ? MT_CLUSTER_EVAL : MT_CLUSTER_EVAL_TRAINING;
    int rc = mt_step_data_init(&data, sampler, err);
    if (rc)
        return rc;
    MT_FREED double *doc_loss = NULL;
    rc = MT_NEW(&doc_loss, most_docs(&data), "log-probabilities of the reference", err);
    int64_t t0 = mt_now_ns(), said = t0;
    end = last_of_pass(sampler, first, end);
    for (uint64_t i = first; i < end && !rc && (s || !v->unknown); i++) {
        rc = mt_sampler_fill(sampler, i, &data, err);
        v->unknown |= !rc && count_unknown(&data, of);
        if (!rc && s)
            rc = run_step(s, v->learner, act, &data, doc_loss, of, err);
        double part = (double)(i + 1 - first) / (double)(end - first), spent = mt_seconds_since(t0);
        if (mt_now_ns() - said > 10000000000 && part < 1) {
            mt_info("log-probabilities of the reference: %.0f%%, %.0f s left", 100 * part, spent / part - spent);
            said = mt_now_ns();
        }
    }
    return rc;
}

/* The steps that are left, and those of evaluations. */
static int visit_all(struct visit *v, const struct mt_inputs *in, uint64_t first, double *of, struct mt_err *err)
{
    int rc = visit(v, in->sampler, first, in->total_steps, of, err);
    if (rc || !in->eval_sampler)
        return rc;
    uint64_t steps = mt_sampler_stats(in->eval_sampler)->steps_per_epoch;
    return visit(v, in->eval_sampler, 0, steps, of + evaluation_at(in), err);
}

size_t mt_reference_count(const struct mt_inputs *in)
{
    return mt_sampler_stats(in->sampler)->n_answers +
           (in->eval_data && in->eval_sampler ? mt_sampler_stats(in->eval_sampler)->n_answers : 0);
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

/* Forgets what is of other data than the run's. */
static int fit(const struct mt_inputs *in, struct mt_train_state *st, struct mt_err *err)
{
    size_t n = mt_reference_count(in), own = mt_sampler_stats(in->sampler)->n_answers;
    bool older = !st->reference_data; /* a checkpoint of an earlier version, which does not say of which data it is */
    bool training = older || st->reference_data == mt_dataset_hash(in->data);
    if (training && st->n_reference == n && (older || st->reference_eval == mt_dataset_hash(in->eval_data)))
        return 0;
    if (older && st->n_reference < own)
        return mt_fail(err, MT_ERR_CHECKPOINT, -EINVAL, "the checkpoint has %zu log-probabilities of the reference, the data "
                       "have %zu answers: it does not belong to them", st->n_reference, n);
    double *of = mt_reference_new(n, err);
    if (of && training)
        memcpy(of, st->reference, own * sizeof(*of));
    return of ? mt_reference_set(in, st, of, 0, err) : -ENOMEM;
}

int mt_reference_lacks(const struct mt_inputs *in, struct mt_train_state *st, bool *lacks, struct mt_err *err)
{
    struct visit look = {.session = NULL};
    *lacks = true;
    if (!st->reference || strcmp(known_of(st), in->cfg->preference.reference))
        return 0;
    int rc = fit(in, st, err) ?: visit_all(&look, in, st->step, st->reference, err);
    *lacks = look.unknown;
    return rc;
}

double *mt_reference_new(size_t n, struct mt_err *err)
{
    double *of;
    int rc = MT_NEW(&of, n, "log-probabilities of the reference", err);
    for (size_t i = 0; i < n && !rc; i++)
        of[i] = NAN;
    return of;
}

int mt_reference_fill(struct mt_session *s, size_t learner, const struct mt_inputs *in, uint64_t first, double *of,
                      struct mt_err *err)
{
    return visit_all(&(struct visit){.session = s, .learner = learner}, in, first, of, err);
}

int mt_reference_compare(struct mt_session *s, const struct mt_inputs *in, const double *known, struct mt_err *err)
{
    size_t n = mt_sampler_stats(in->sampler)->n_answers, differ = 0, far = 0;
    MT_FREED double *of = mt_reference_new(n, err);
    int rc = of ? visit(&(struct visit){.session = s}, in->sampler, 0, 1, of, err) : -ENOMEM;
    for (size_t i = 0; i < n && !rc; i++) {
        differ += known[i] != of[i] && !isnan(known[i]) && !isnan(of[i]);
        /* as a model with other weights has them: computed on another machine they may differ a little */
        far += fabs(known[i] - of[i]) > 0.02 * MT_MAX(fabs(known[i]), 1.0);
    }
    if (!rc && far)
        return mt_fail(err, MT_ERR_CHECKPOINT, -EINVAL, "%s is not the model as it was when training began: %zu log-probabilities of "
                       "the first step are others", in->model_dir, far);
    if (!rc && differ)
        mt_warn("%zu log-probabilities of the first step under the reference differ in bits from the checkpoint's: it was made with "
                "another library or GPU", differ);
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
    st->reference_data = mt_dataset_hash(in->data);
    st->reference_eval = mt_dataset_hash(in->eval_data);
    return 0;
}

static int make(struct mt_session *s, size_t learner, struct mt_train_state *st, struct mt_err *err)
{
    const struct mt_inputs *in = &s->setup->in[learner];
    size_t n = mt_reference_count(in);
    double *of = mt_reference_new(n, err);
    if (!of)
        return -ENOMEM;
    mt_info("log-probabilities of %zu answers under the model as it is, before the first step", n);
    int rc = mt_reference_fill(s, learner, in, 0, of, err);
    return mt_reference_set(in, st, of, rc, err);
}

int mt_reference_make(struct mt_session *s, size_t learner, struct mt_train_state *st, struct mt_err *err)
{
    const struct mt_inputs *in = &s->setup->in[learner];
    if (!mt_objective_of(mt_setup_numerics_of(s->setup, learner))->reference)
        return 0;
    if (!st->step && !st->reference)
        return make(s, learner, st, err);
    bool known = st->reference && !strcmp(known_of(st), in->cfg->preference.reference);
    return known ? 0 : mt_fail(err, MT_ERR_CHECKPOINT, -EINVAL, "the checkpoint's reference is %s, and the model as it was at the "
                               "start is no more: set preference.reference = %s", known_of(st), known_of(st));
}
