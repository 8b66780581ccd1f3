/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Losses of a policy on rollouts: a term a token (of gspo one a rollout, which each of its tokens carries), with r =
 * exp(d), d = lp - old, and the advantage A. Formulas are those of TRL (grpo to sapo), prime-rl (dppo), tinker (dro)
 * and of reverse KL to a teacher that saw the policy's own tokens (opd). The divergence from a reference is added with
 * its weight after the factor of a mismatch, as in TRL.
 */
#include "objective/policy.h"

#include <math.h>

/* verl cuts log-ratios there: beyond it a loss has no slope. */
static const double MOST_LOG_RATIO = 20;
static const double LEAST_TEMPERATURE = 0.01;

struct point {
    const struct mt_policy_keys *k;
    const struct mt_policy_token *t;
    double d, r; /* of the token, or of the rollout */
};

/* A loss: its term and *slope by lp; what it sets of *clipped is a share for measures. */
struct form {
    double (*term)(const struct point *p, double *slope, int *clipped);
    enum mt_policy_normalise normalise;
    bool of_row;      /* one ratio for a rollout */
    double clip_low, clip_high, beta;
};

static const struct form *form_of(const struct mt_objective *o)
{
    return o->form;
}

/* Schulman et al. 2017, with two bounds (Yu et al. 2025) and a bound where A < 0 (Ye et al. 2020). */
static double clipped_ratio(const struct point *p, double *slope, int *clipped)
{
    double a = p->t->advantage, c = fmin(fmax(p->r, 1 - p->k->clip_low), 1 + p->k->clip_high), dual = p->k->dual_clip;
    bool use = p->r * a <= c * a;
    *clipped = p->r < 1 - p->k->clip_low && a < 0 ? -1 : p->r > 1 + p->k->clip_high && a > 0 ? 1 : 0;
    if (dual > 0 && a < 0 && fmin(p->r * a, c * a) < dual * a) {
        *slope = 0;
        return -dual * a;
    }
    *slope = use ? -p->r * a : 0;
    return -fmin(p->r * a, c * a);
}

/* MiniMax 2025: the cut ratio is a factor, through which no gradient goes. */
static double cispo(const struct point *p, double *slope, int *clipped)
{
    double a = p->t->advantage, factor = fmin(p->r, p->k->clip_high);
    *clipped = p->r > p->k->clip_high && a > 0;
    *slope = -factor * a;
    return -factor * a * p->t->lp;
}

/* Gao et al. 2025. */
static double sapo(const struct point *p, double *slope, int *clipped)
{
    double a = p->t->advantage, tau = a > 0 ? p->k->tau_positive : p->k->tau_negative;
    double g = 1 / (1 + exp(-tau * (p->r - 1)));
    *clipped = 0;
    *slope = -4 * g * (1 - g) * p->r * a;
    return -4 / tau * g * a;
}

/* Differences of probabilities bound the policy, and a square pulls it back. */
static double dppo(const struct point *p, double *slope, int *clipped)
{
    double a = p->t->advantage, moved = exp(p->t->lp) - exp(p->t->old), beta = p->k->beta;
    *clipped = a > 0 ? moved > p->k->clip_high : -(moved < -p->k->clip_low);
    *slope = (*clipped ? 0 : -p->r * a) + 2 * beta * p->d;
    return (*clipped ? 0 : -p->r * a) + beta * p->d * p->d;
}

/* Richemond et al. 2024. */
static double dro(const struct point *p, double *slope, int *clipped)
{
    double a = p->t->advantage, beta = p->k->beta;
    *clipped = 0;
    *slope = -(a - beta * p->d);
    return -(p->t->lp * a - beta / 2 * p->d * p->d);
}

/* The advantage is what the teacher thinks a token likelier. */
static double opd(const struct point *p, double *slope, int *clipped)
{
    double a = p->t->ref - p->t->lp;
    *clipped = -(exp(p->t->lp) - exp(p->t->old) < -p->k->clip_low);
    *slope = *clipped ? 0 : -a * p->r;
    return *slope;
}

void mt_policy_add(struct mt_policy_sums *s, const struct mt_policy_token *t)
{
    s->ratio += t->lp - t->old;
    s->drift += t->old - t->sampler;
    s->n++;
}

static double mismatch_of(const struct mt_policy_keys *k, const struct mt_policy_sums *s,
                          const struct mt_policy_token *t)
{
    if (k->mismatch == MT_MISMATCH_NONE)
        return 1;
    double f = exp(k->mismatch == MT_MISMATCH_ROW ? s->drift : t->old - t->sampler);
    return f <= k->mismatch_max ? f : k->beyond == MT_BEYOND_DROP ? 0 : k->mismatch_max;
}

struct mt_policy_term mt_policy_term(const struct mt_objective *o, const struct mt_policy_keys *k,
                                     const struct mt_policy_sums *s, const struct mt_policy_token *t)
{
    double d = form_of(o)->of_row ? s->ratio / s->n : t->lp - t->old;
    double cut = fmin(fmax(d, -MOST_LOG_RATIO), MOST_LOG_RATIO);
    struct point p = {k, t, cut, exp(cut)};
    struct mt_policy_term out = {.factor = mismatch_of(k, s, t)};
    out.loss = out.factor * form_of(o)->term(&p, &out.slope, &out.clipped);
    out.slope *= d == cut ? out.factor : 0;
    if (k->kl_weight > 0) {
        double away = t->ref - t->lp;
        double by = k->kl == MT_KL_K3_RATIO ? p.r : 1, slope = k->kl == MT_KL_K1 ? 1 : 1 - exp(away);
        out.kl = by * (k->kl == MT_KL_K1 ? -away : exp(away) - away - 1);
        out.loss += k->kl_weight * out.kl;
        out.slope += k->kl_weight * (by * slope + (k->kl == MT_KL_K3_RATIO ? out.kl : 0));
    }
    return out;
}

double mt_policy_divisor(const struct mt_objective_step *s, size_t n, size_t n_micro_tokens)
{
    const struct mt_policy_keys *k = &s->keys->policy;
    switch (k->normalise) {
    case MT_BY_MICRO:
        return (double)n_micro_tokens * (double)s->n_micro;
    case MT_BY_ROWS:
        return (double)n * (double)s->n_items;
    case MT_BY_CONSTANT:
        return (double)k->max_tokens * (double)s->n_items;
    case MT_BY_AUTO:
    case MT_BY_TOKENS:
    default:
        return (double)s->n_policy_tokens;
    }
}

/* --- micro-batches --------------------------------------------------------------------------------------------- */

static size_t rows_of(const struct mt_batch *b, size_t d)
{
    return (size_t)(b->doc_rows[d + 1] - b->doc_rows[d]);
}

static size_t tokens_of(const struct mt_batch *b)
{
    size_t n = 0;
    for (size_t d = 0; d < b->n_docs; d++)
        n += b->rollout[d].left_out ? 0 : rows_of(b, d);
    return n;
}

/* loss NULL: no weight depends on it. */
static struct mt_policy_token token_at(const struct mt_objective_step *s, const struct mt_batch *b, const float *loss,
                                       size_t d, int32_t i)
{
    const union mt_rollout_values *v = &b->values[i];
    double lp = loss ? -(double)loss[i] : 0, old = isnan(v->old) ? (double)v->logprob : (double)v->old;
    double advantage = b->rollout[d].advantage;
    return (struct mt_policy_token){lp, s->keys->policy.old == MT_OLD_BATCH ? lp : old, (double)v->ref,
                                    (double)v->logprob, isnan(advantage) ? (double)v->advantage : advantage};
}

static struct mt_policy_sums sums_of(const struct mt_objective_step *s, const struct mt_batch *b, const float *loss,
                                     size_t d)
{
    struct mt_policy_sums sums = {0};
    for (int32_t i = b->doc_rows[d]; i < b->doc_rows[d + 1]; i++) {
        struct mt_policy_token t = token_at(s, b, loss, d, i);
        mt_policy_add(&sums, &t);
    }
    return sums;
}

/* Losses are of logits divided by the temperature, so gradients by logits are that much smaller. */
static void weights(const struct mt_objective_step *s, const struct mt_batch *b, const float *loss, float *weight)
{
    const struct mt_policy_keys *k = &s->keys->policy;
    size_t tokens = tokens_of(b);
    for (size_t d = 0; d < b->n_docs; d++) {
        struct mt_policy_sums sums = sums_of(s, b, loss, d);
        double by = -1 / (mt_policy_divisor(s, rows_of(b, d), tokens) * k->temperature);
        for (int32_t i = b->doc_rows[d]; i < b->doc_rows[d + 1]; i++) {
            struct mt_policy_token t = token_at(s, b, loss, d, i);
            weight[i] = b->rollout[d].left_out ? 0 : (float)(by * mt_policy_term(s->objective, k, &sums, &t).slope);
        }
    }
}

enum {
    LOSS, REWARD, REWARD_STD, ZERO_STD, KL, CLIP_LOW, CLIP_HIGH, CLIP, LENGTH, TRUNCATED, FACTOR, ENTROPY, N_MEASURES,
};

static void add(struct mt_measure *m, double sum, double n)
{
    m->sum += sum;
    m->n += n;
}

static void measure_rollout(const struct mt_rollout *r, size_t rows, struct mt_measure *sum)
{
    if (r->dropped)
        return;
    add(&sum[LENGTH], (double)rows, 1);
    add(&sum[TRUNCATED], r->truncated, 1);
    if (isnan(r->reward))
        return;
    mt_measure_add(&sum[REWARD], r->reward);
    if (isnan(r->deviation))
        return;
    mt_measure_add(&sum[REWARD_STD], r->deviation);
    add(&sum[ZERO_STD], !(r->deviation > 0), 1);
}

static void measure_token(const struct mt_objective_step *s, const struct mt_policy_term *t, double by, double share,
                          struct mt_measure *sum)
{
    add(&sum[LOSS], t->loss * (double)s->n_policy_tokens / by, 1);
    add(&sum[CLIP_LOW], share * (t->clipped < 0), share);
    add(&sum[CLIP_HIGH], share * (t->clipped > 0), share);
    add(&sum[CLIP], share * (t->clipped != 0), share);
    if (s->keys->policy.kl_weight > 0)
        mt_measure_add(&sum[KL], t->kl);
    if (s->keys->policy.mismatch != MT_MISMATCH_NONE)
        mt_measure_add(&sum[FACTOR], t->factor);
}

static void measure(const struct mt_objective_step *s, const struct mt_micro_losses *m, struct mt_measure *sum)
{
    const struct mt_batch *b = m->batch;
    size_t tokens = tokens_of(b);
    for (size_t d = 0; d < b->n_docs; d++) {
        struct mt_policy_sums sums = sums_of(s, b, m->loss, d);
        double by = mt_policy_divisor(s, rows_of(b, d), tokens);
        double share = form_of(s->objective)->of_row ? 1 / sums.n : 1;
        measure_rollout(&b->rollout[d], rows_of(b, d), sum);
        for (int32_t i = b->doc_rows[d]; i < b->doc_rows[d + 1] && !b->rollout[d].left_out; i++) {
            struct mt_policy_token t = token_at(s, b, m->loss, d, i);
            struct mt_policy_term term = mt_policy_term(s->objective, &s->keys->policy, &sums, &t);
            measure_token(s, &term, by, share, sum);
            if (m->entropy)
                add(&sum[ENTROPY], (double)m->entropy[i], 1);
        }
    }
}

/* Nothing was trained: no loss is no bad loss. */
static void finish(const struct mt_objective_step *, struct mt_measure *sum)
{
    sum[LOSS].n += !(sum[LOSS].n > 0);
}

/* Evolution strategies: of the rollouts that a variant of the weights has sampled. */
static void measure_variant(const struct mt_objective_step *s, const struct mt_micro_losses *m, struct mt_measure *sum)
{
    const struct mt_batch *b = m->batch;
    for (size_t d = 0; d < b->n_docs; d++) {
        const struct mt_rollout *r = &b->rollout[d];
        if (r->noise != s->variant)
            continue;
        measure_rollout(r, rows_of(b, d), sum);
        if (!r->left_out)
            mt_measure_add(&sum[LOSS], -r->advantage);
    }
}

/* Without a step before and a reference, r is 1 whatever lp is. */
static bool late(const struct mt_objective_keys *keys)
{
    const struct mt_policy_keys *k = &keys->policy;
    return k->old != MT_OLD_BATCH || k->kl_weight > 0 || k->mismatch != MT_MISMATCH_NONE;
}

static bool always(const struct mt_objective_keys *)
{
    return true;
}

/* --- keys ------------------------------------------------------------------------------------------------------ */

int mt_policy_resolve(const struct mt_objective *o, struct mt_policy_keys *k, struct mt_err *err)
{
    const struct form *f = form_of(o);
    k->clip_low = k->clip_low == MT_AUTO ? f->clip_low : k->clip_low;
    k->clip_high = k->clip_high == MT_AUTO ? f->clip_high : k->clip_high;
    k->beta = k->beta == MT_AUTO ? f->beta : k->beta;
    k->normalise = k->normalise == MT_BY_AUTO ? f->normalise : k->normalise;
    if (k->scale == MT_SCALE_AUTO)
        k->scale = f->normalise == MT_BY_CONSTANT || o->by_rewards ? MT_SCALE_NONE : MT_SCALE_GROUP;
    if (k->temperature < LEAST_TEMPERATURE && !o->by_rewards)
        return mt_fail(err, MT_ERR_USAGE, -EINVAL, "policy.temperature = %g with policy.loss = %s, which divides logits by it: set it to at "
                       "least %g", k->temperature, o->name, LEAST_TEMPERATURE);
    if (k->normalise == MT_BY_CONSTANT && !k->max_tokens)
        return mt_fail(err, MT_ERR_USAGE, -EINVAL, "policy.loss = %s divides by the number of rollouts times policy.max_tokens: set that "
                       "to the most tokens of a completion", o->name);
    if (f->of_row && k->kl == MT_KL_K3_RATIO && k->kl_weight > 0)
        return mt_fail(err, MT_ERR_USAGE, -EINVAL, "policy.kl = k3_ratio with policy.loss = gspo, whose ratio is a rollout's: set it "
                       "to k3");
    if (k->dual_clip > 0 && !(k->dual_clip > 1 && f->term == clipped_ratio))
        return mt_fail(err, MT_ERR_USAGE, -EINVAL, "policy.dual_clip = %g with policy.loss = %s: it is above 1, or 0 for off, and of "
                       "grpo, bnpo, dapo, dr_grpo and gspo", k->dual_clip, o->name);
    if (f->term == clipped_ratio && k->clip_low > 1)
        return mt_fail(err, MT_ERR_USAGE, -EINVAL, "policy.clip_low = %g: a ratio is never below 1 - 1", k->clip_low);
    return 0;
}

const char *mt_policy_lacks(const struct mt_objective *o, const struct mt_policy_keys *k,
                            const union mt_rollout_values *v)
{
    bool mismatch = k->mismatch != MT_MISMATCH_NONE, file = k->old == MT_OLD_FILE;
    if ((k->kl_weight > 0 || form_of(o)->term == opd) && isnan(v->ref))
        return "\"ref_logprobs\", which policy.kl_weight and opd compare with";
    if (file && mismatch && isnan(v->old))
        return "\"old_logprobs\", which policy.mismatch compares \"logprobs\" with where policy.old = file";
    if (isnan(v->logprob) && (mismatch || (file && isnan(v->old))))
        return "\"logprobs\", which policy.old = file and policy.mismatch need: set policy.old = batch and policy.mismatch = none, or "
               "sample with log-probabilities, which are of token ids and of policy.temperature";
    return NULL;
}

#define MEASURES                                                                                                       \
    {"loss", "reward", "reward_std", "frac_reward_zero_std", "kl", "clip_ratio/low_mean", "clip_ratio/high_mean",          \
     "clip_ratio/region_mean", "completions/mean_length", "completions/clipped_ratio",                                   \
     "sampling/importance_sampling_ratio/mean", "entropy"}
#define POLICY(variable, called, text, needs, ...)                                                                     \
    static const struct form form_##variable = {__VA_ARGS__};                                                          \
    extern const struct mt_objective variable;                                                                         \
    const struct mt_objective variable = {.name = called, .title = text, .late = needs, .rollouts = true,              \
                                          .n_measures = N_MEASURES, .measures = MEASURES, .weights = weights,          \
                                          .measure = measure, .finish = finish, .form = &form_##variable}

POLICY(mt_dapo, "dapo", "DAPO", late, clipped_ratio, MT_BY_TOKENS, .clip_low = 0.2, .clip_high = 0.2);
POLICY(mt_grpo, "grpo", "GRPO", late, clipped_ratio, MT_BY_ROWS, .clip_low = 0.2, .clip_high = 0.2);
POLICY(mt_bnpo, "bnpo", "BNPO", late, clipped_ratio, MT_BY_MICRO, .clip_low = 0.2, .clip_high = 0.2);
POLICY(mt_dr_grpo, "dr_grpo", "Dr. GRPO", late, clipped_ratio, MT_BY_CONSTANT, .clip_low = 0.2, .clip_high = 0.2);
POLICY(mt_gspo, "gspo", "GSPO", late, clipped_ratio, MT_BY_ROWS, .of_row = true, .clip_low = 3e-4, .clip_high = 4e-4);
POLICY(mt_cispo, "cispo", "CISPO", late, cispo, MT_BY_TOKENS, .clip_high = 5);
POLICY(mt_sapo, "sapo", "SAPO", late, sapo, MT_BY_ROWS);
POLICY(mt_dppo, "dppo", "DPPO", late, dppo, MT_BY_TOKENS, .clip_low = 0.2, .clip_high = 0.2, .beta = 1e-3);
POLICY(mt_dro, "dro", "DRO", late, dro, MT_BY_TOKENS, .beta = 0.05);
POLICY(mt_opd, "opd", "on-policy distillation", always, opd, MT_BY_TOKENS, .clip_low = 0.2);

static const struct form by_rewards = {.normalise = MT_BY_TOKENS};
extern const struct mt_objective mt_es;
const struct mt_objective mt_es = {.name = "es", .title = "evolution strategies", .rollouts = true,
                                   .by_rewards = true, .n_measures = N_MEASURES, .measures = MEASURES,
                                   .measure = measure_variant, .form = &by_rewards};
