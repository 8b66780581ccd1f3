/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdbool.h>
#include <stddef.h>

#include "data/batch.h"
#include "settings/settings.h"

/** Of all trained tokens, whatever the objective; evaluations have it beside the objective's measures. */
#define MT_EVAL_ACCURACY "accuracy"

/** Most measures of an objective, its loss among them. */
enum { MT_MAX_MEASURES = 12 };

/** A mean over a step or an evaluation: origin + sum / n; n 0: there was nothing to measure. */
struct mt_measure {
    double sum, n;
    double origin; /* what was subtracted from each value */
};

/** What an objective knows before a step. */
struct mt_objective_step {
    const struct mt_objective *objective;
    const struct mt_objective_keys *keys;
    const double *reference; /* log-probabilities under the reference, by mt_batch.sample; NULL: without */
    double logit_cap;        /* of the model's logits (Gemma 2); 0: none */
    size_t vocab;            /* tokens of the model */
    size_t n_loss;           /* loss rows of all micro-batches */
    size_t n_items;          /* of preferences: pairs or rated answers; of rollouts, those that are not dropped */
    size_t n_micro;          /* micro-batches; rows, if micro-batches are chunks of these */
    size_t n_policy_tokens;  /* loss rows of rollouts that are not left out */
    size_t n_chosen_rows;    /* loss rows of chosen answers */
    int variant;             /* of the weights, whose rollouts are measured (es) */
};

/** A micro-batch that has run; both arrays by loss row. */
struct mt_micro_losses {
    const struct mt_batch *batch;
    const float *loss;
    const int32_t *correct; /* whether the target was the likeliest token */
    const float *few;       /* [n_loss, mt_objective_few()] what learn() left there */
    const float *entropy;   /* of the model's distribution; NULL: it is not computed */
};

/**
 * What a run minimizes: all that the rest of the program knows of it. The model computes the loss of each loss row (of
 * each token that is a target), -log p; an objective turns these into a weight for each row, such that the gradient of
 * its own loss is the sum of weight times gradient over the rows. Cross-entropy multiplies gradients by the weights;
 * nothing else in a step differs from one objective to another.
 *
 * Both functions are pure: what they compute of a micro-batch depends on that micro-batch and on the step alone. They
 * run on the host, so results have the same bits whatever the device is. Where micro-batches are chunks of a row, they
 * are given the whole row in the place of a micro-batch (but with a teacher, whose rows each have a loss of their own).
 */
struct mt_objective {
    const char *name;  /* train.objective in the configuration, or preference.loss */
    const char *title; /* the printed name */
    bool rollouts;     /* it takes rollouts (mt_batch.values), and only these */
    bool by_rewards;   /* all that it needs of them is their rewards: there are no losses (mt_mezo_keys.rewards) */
    bool (*late)(const struct mt_objective_keys *keys); /* whether needs_losses depends on keys; or NULL */
    bool needs_losses; /* weights depend on the micro-batch's losses: the head computes these in a pass before */
    bool answers;      /* it takes data of preferences (mt_batch.role), and only these */
    bool rated;        /* each answer is an item, not each pair */
    bool mismatched;   /* it needs the log-probabilities of mismatched answers (MT_DOC_MISMATCHED) */
    bool reference;    /* it needs mt_objective_step.reference */
    bool teacher;      /* it needs mt_batch.top; evaluations, which have none, report the token loss alone */
    double beta, sft;  /* what preference.beta and .sft are if auto */
    const void *form;  /* for its functions */
    int n_measures;
    const char *measures[MT_MAX_MEASURES]; /* their names in metrics; the first is the loss that is minimized */
    /** Fills weight[n_loss] of the batch. loss[n_loss] are its losses; NULL unless needs_losses. The function is NULL:
     * each row has the weight 1 / n_loss of the step. */
    void (*weights)(const struct mt_objective_step *s, const struct mt_batch *b, const float *loss, float *weight);
    /** Of a teacher, instead: further tokens of each row, [n_loss, mt_objective_few()], each once or -1; then, from the row's
     * losses and these tokens' logits, weights of all others and, in the place of the logits, the tokens' gradients. */
    void (*choose)(const struct mt_objective_step *s, const struct mt_batch *b, int32_t *ids);
    void (*learn)(const struct mt_objective_step *s, const struct mt_batch *b, const float *loss, float *few,
                  float *weight);
    /** Adds a micro-batch to sum[n_measures]. */
    void (*measure)(const struct mt_objective_step *s, const struct mt_micro_losses *m, struct mt_measure *sum);
    /** When all are added; NULL: nothing is left to do. */
    void (*finish)(const struct mt_objective_step *s, struct mt_measure *sum);
};

/** Further tokens of a loss row: those of the teacher, the target, and a place for the row's loss. 0: it has no teacher. */
enum { MT_FEW_BESIDE = 2 }; /* all but the teacher's */
size_t mt_objective_few(const struct mt_numerics *n);

/** Counts what an objective is to know of micro-batches. */
struct mt_objective_step mt_objective_begin(const struct mt_numerics *n, const struct mt_step_data *data,
                                            const double *reference);
/** Whether weights depend on the micro-batch's losses. */
bool mt_objective_is_late(const struct mt_numerics *n);
/** Finds an objective by the configuration's name; NULL: there is none. */
const struct mt_objective *mt_objective_find(const char *name);
/** The objective of numerics; cross-entropy if they are not resolved. */
const struct mt_objective *mt_objective_of(const struct mt_numerics *n);

/**
 * Index of a measure that compares results, by its name in metrics; -1: the objective has none of that name, or it does
 * not say of itself which of two results is better (kl).
 */
int mt_objective_measure(const struct mt_objective *o, const char *name);
/** What a name compares of the set name[n] of eval.sets, NAME_loss or NAME_accuracy: "loss", MT_EVAL_ACCURACY, or NULL if
 * it is neither. */
const char *mt_measure_of_set(const char *by, const char *name, size_t n);
/** Whether more of a measure is better. */
bool mt_measure_more_is_better(const char *name);

/** Adds a value. Equal values have exactly that value as their mean. */
void mt_measure_add(struct mt_measure *m, double value);
/** Of step or evaluation; NaN if nothing was measured. */
double mt_measure_mean(const struct mt_measure *m);
