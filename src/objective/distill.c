/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Learning from a teacher (Hinton et al. 2015) that was run before: of each trained token its K likeliest tokens with
 * their log-probabilities, and the probability P of all others together. The loss of a row is the forward KL divergence
 * of these K + 1 outcomes,
 *
 *     sum over the K of p (log p - log q) + P (log P - log Q),
 *
 * with q and Q of the student. By logits its gradient is q - p for the K, and q (1 - P / Q) for all others: so all
 * others have the row's weight in common, and the gradients of the K and of the target are given one by one. With a
 * share a of the data's own tokens the loss is (1 - a) times that, plus a times the loss of the target.
 *
 * A temperature T flattens the K + 1 outcomes of both: u = q^(1/T) / z with z such that they sum to 1, w likewise of
 * p. What the teacher thinks of single tokens among all others at T is not known from their sum, so the rest stays one
 * outcome; if the K are the whole vocabulary, this is the softmax of logits / T. The divergence times T^2, which leaves
 * gradients as large as they were (Hinton et al. 2015, section 2), has the gradient T (u - w) by a logit of the K, and
 * q T (U - W) / Q by the others'.
 */
#include "objective/objective.h"

#include <math.h>

/* Less is no probability, but what rounding leaves. */
static const double LEAST_REST = 1e-7;
/* A temperature would magnify that: less is no outcome of its own. */
static const double LEAST_TEMPERED = 1e-6;

struct row {
    const struct mt_objective_step *s;
    size_t top;
    int32_t target;
    const struct mt_top *teacher; /* [top] */
    double rest;                  /* the teacher's probability of all others */
};

static struct row row_of(const struct mt_objective_step *s, const struct mt_batch *b, size_t i)
{
    return (struct row){s, b->n_top, b->targets[i], b->top + i * b->n_top, b->rest[i]};
}

static bool is_token(const struct row *r, size_t k)
{
    return r->teacher[k].id != MT_NO_TOKEN;
}

static void choose(const struct mt_objective_step *s, const struct mt_batch *b, int32_t *ids)
{
    for (size_t i = 0; i < b->n_loss; i++) {
        struct row r = row_of(s, b, i);
        int32_t *of = ids + i * (r.top + MT_FEW_BESIDE);
        of[r.top] = r.target;
        of[r.top + 1] = -1; /* the row's loss */
        for (size_t k = 0; k < r.top; k++) {
            of[k] = is_token(&r, k) ? (int32_t)r.teacher[k].id : -1;
            if (of[k] == r.target)
                of[r.top] = -1;
        }
    }
}

/* The gradient by a logit that was capped goes through the cap. */
static double through_cap(const struct row *r, double logit, double gradient)
{
    double cap = r->s->logit_cap, x = cap > 0 ? logit / cap : 0;
    return gradient * (1 - x * x);
}

/* The K + 1 outcomes of a row at a temperature: p^(1/T) over their sum, 1 where T is 1. */
struct outcomes {
    double temperature, sum;
    double rest; /* its own p^(1/T) over the sum; 0: it is no outcome */
};

static double tempered(const struct outcomes *o, double logp)
{
    return exp(logp / o->temperature) / o->sum;
}

static void add_outcome(struct outcomes *o, double logp)
{
    o->sum += exp(logp / o->temperature);
}

/* all: beside the K no other token is left. */
static void end_outcomes(struct outcomes *o, bool all, double rest)
{
    double t = o->temperature;
    o->rest = t == 1 ? rest : all ? 0 : pow(fmax(rest, LEAST_TEMPERED), 1 / t);
    o->sum = t == 1 ? 1 : o->sum + o->rest;
    o->rest /= o->sum;
}

/* lse: log-sum-exp of the row's logits. Returns the weight of all other tokens. */
static float learn_row(const struct row *r, double lse, float *few)
{
    const struct mt_objective_keys *keys = r->s->keys;
    double a = keys->share, t = keys->temperature, by = 1 / (double)r->s->n_loss, sum = 0, kl = 0;
    struct outcomes p = {.temperature = t}, q = p;
    size_t n = 0; /* of them; the teacher may name tokens that the model lacks */
    for (size_t k = 0; k < r->top; k++)
        if (is_token(r, k)) {
            n++;
            sum += exp((double)few[k] - lse);
            add_outcome(&p, (double)r->teacher[k].logp);
            add_outcome(&q, (double)few[k] - lse);
        }
    double rest = fmax(1 - sum, LEAST_REST);
    end_outcomes(&p, n >= r->s->vocab, r->rest);
    end_outcomes(&q, n >= r->s->vocab, rest);
    for (size_t k = 0; k < r->top; k++) {
        if (!is_token(r, k))
            continue;
        double logit = (double)few[k], logp = (double)r->teacher[k].logp, logq = logit - lse;
        double own = (int32_t)r->teacher[k].id == r->target, p_k = tempered(&p, logp), q_k = tempered(&q, logq);
        kl += p_k > 0 ? p_k * ((logp / t - log(p.sum)) - (logq / t - log(q.sum))) : 0;
        few[k] = (float)(by * through_cap(r, logit, (1 - a) * t * (q_k - p_k) + a * (exp(logq) - own)));
    }
    double others = (1 - a) * t * (q.rest / rest - p.rest / rest) + a;
    kl += p.rest > 0 ? p.rest * (log(p.rest) - log(q.rest)) : 0;
    double logit = (double)few[r->top]; /* of the target, where it is none of the K */
    few[r->top] = (float)(by * through_cap(r, logit, others * exp(logit - lse) - a));
    few[r->top + 1] = (float)(t * t * kl);
    return (float)(by * others);
}

static void learn(const struct mt_objective_step *s, const struct mt_batch *b, const float *loss, float *few,
                  float *weight)
{
    for (size_t i = 0; i < b->n_loss; i++) {
        struct row r = row_of(s, b, i);
        float *of = few + i * (r.top + MT_FEW_BESIDE);
        size_t at = r.top;
        for (size_t k = 0; k < r.top; k++)
            at = (int32_t)r.teacher[k].id == r.target ? k : at;
        weight[i] = learn_row(&r, (double)of[at] + (double)loss[i], of);
    }
}

enum { LOSS, KL, NLL, N_MEASURES };

static void measure(const struct mt_objective_step *s, const struct mt_micro_losses *m, struct mt_measure *sum)
{
    size_t top = m->batch->n_top;
    double a = s->keys->share;
    for (size_t i = 0; i < m->batch->n_loss; i++) {
        double kl = (double)m->few[i * (top + MT_FEW_BESIDE) + top + 1], nll = (double)m->loss[i];
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
