/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Learning from a teacher (Hinton et al. 2015) that was run before: of each trained token its K likeliest tokens with
 * their log-probabilities, and the probability P of all others together. The loss of a row is the forward KL divergence
 * of these K + 1 outcomes,
 *
 *     sum over the K of p (log p - log q) + P (log P - log Q),
 *
 * with q and Q of the student. By logits its gradient is q - p for the K, and q (1 - P / Q) for all others: so all
 * others have the row's weight in common, and the gradients of the K and of the target are given one by one. With a share a of
 * the data's own tokens the loss is (1 - a) times that, plus a times the loss of the target.
 */
#include "objective/objective.h"

#include <math.h>

/* Less is no probability, but what rounding leaves. */
static const double LEAST_REST = 1e-7;

struct row {
    const struct mt_objective_step *s;
    size_t top;
    int32_t target;
    struct mt_teacher_row teacher;
};

static struct row row_of(const struct mt_objective_step *s, const struct mt_batch *b, size_t doc, int32_t i)
{
    struct row r = {.s = s, .top = (size_t)s->keys->top, .target = b->targets[i]};
    r.teacher = mt_teacher_row(s->teacher, (uint64_t)b->sample[doc], (uint64_t)(i - b->doc_rows[doc]));
    return r;
}

static void choose(const struct mt_objective_step *s, const struct mt_batch *b, int32_t *ids)
{
    size_t top = (size_t)s->keys->top, few = top + 2;
    for (size_t d = 0; d < b->n_docs; d++)
        for (int32_t i = b->doc_rows[d]; i < b->doc_rows[d + 1]; i++) {
            struct row r = row_of(s, b, d, i);
            int32_t *of = ids + (size_t)i * few;
            of[top] = r.target;
            of[top + 1] = -1; /* the row's loss */
            for (size_t k = 0; k < top; k++) {
                of[k] = (int32_t)r.teacher.token[k].id;
                if (of[k] == r.target)
                    of[top] = -1;
            }
        }
}

/* The gradient by a logit that was capped goes through the cap. */
static double through_cap(const struct row *r, double logit, double gradient)
{
    double cap = r->s->logit_cap, x = cap > 0 ? logit / cap : 0;
    return gradient * (1 - x * x);
}

/* lse: log-sum-exp of the row's logits. Returns the weight of all other tokens. */
static float learn_row(const struct row *r, double lse, float *few)
{
    double a = r->s->keys->share, by = 1 / (double)r->s->n_loss, sum = 0, kl = 0;
    for (size_t k = 0; k < r->top; k++)
        sum += exp((double)few[k] - lse);
    double rest = fmax(1 - sum, LEAST_REST);
    for (size_t k = 0; k < r->top; k++) {
        double logit = (double)few[k], logp = (double)r->teacher.token[k].logp, p = exp(logp), q = exp(logit - lse);
        double own = (int32_t)r->teacher.token[k].id == r->target;
        kl += p > 0 ? p * (logp - (logit - lse)) : 0;
        few[k] = (float)(by * through_cap(r, logit, (1 - a) * (q - p) + a * (q - own)));
    }
    double p_rest = r->teacher.rest, others = (1 - a) * (1 - p_rest / rest) + a;
    kl += p_rest > 0 ? p_rest * (log(p_rest) - log(rest)) : 0;
    double logit = (double)few[r->top]; /* of the target, where it is none of the K */
    few[r->top] = (float)(by * through_cap(r, logit, others * exp(logit - lse) - a));
    few[r->top + 1] = (float)kl;
    return (float)(by * others);
}

static void learn(const struct mt_objective_step *s, const struct mt_batch *b, const float *loss, float *few,
                  float *weight)
{
    for (size_t d = 0; d < b->n_docs; d++)
        for (int32_t i = b->doc_rows[d]; i < b->doc_rows[d + 1]; i++) {
            struct row r = row_of(s, b, d, i);
            float *of = few + (size_t)i * (r.top + 2);
            size_t at = r.top;
            for (size_t k = 0; k < r.top; k++)
                at = (int32_t)r.teacher.token[k].id == r.target ? k : at;
            weight[i] = learn_row(&r, (double)of[at] + (double)loss[i], of);
        }
}

enum { LOSS, KL, NLL, N_MEASURES };

static void measure(const struct mt_objective_step *s, const struct mt_micro_losses *m, struct mt_measure *sum)
{
    size_t top = (size_t)s->keys->top;
    double a = s->keys->share;
    for (size_t i = 0; i < m->batch->n_loss; i++) {
        double kl = (double)m->few[i * (top + 2) + top + 1], nll = (double)m->loss[i];
        sum[LOSS].sum += (1 - a) * kl + a * nll;
        sum[KL].sum += kl;
        sum[NLL].sum += nll;
    }
    for (int k = 0; k < N_MEASURES; k++)
        sum[k].n += (double)m->batch->n_loss;
}

extern const struct mt_objective mt_distill;
const struct mt_objective mt_distill = {.name = "distill", .title = "distillation", .needs_losses = true, .teacher = true,
                                        .n_measures = N_MEASURES, .measures = {"loss", "kl", "nll_loss"}, .choose = choose,
                                        .learn = learn, .measure = measure};
