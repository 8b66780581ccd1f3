/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Losses of preferences. The log-probability S of an answer is the sum over its tokens, -sum of their losses, taken
 * in double in the order of the rows; R is the same under the reference (the model as training began). A loss is a
 * function of the sums of an item (of a pair, or of one rated answer), and its derivatives by S, negated and divided by
 * the number of the step's items, are the weights of the answer's rows. So a gradient is exact, whatever the loss.
 *
 * c = S - R of the chosen answer, r that of the rejected one, d = beta (c - r), L = tokens of an answer.
 */
#include "objective/objective.h"

#include <math.h>

/* An answer of an item. */
struct answer {
    double logp;   /* S */
    double ratio;  /* S - R; without a reference S */
    double tokens; /* L */
};

/* A loss; `slope`: its derivatives by the sums of the chosen and of the rejected answer. */
struct form {
    double (*pair)(const struct mt_objective_keys *k, const struct answer *chosen, const struct answer *rejected,
                   double slope[2]);
    /* Instead a loss of the margin: beta times the difference of ratios, or of log-probabilities, or of their means,
     * less gamma; *slope: its derivative. */
    double (*of_margin)(const struct mt_objective_keys *k, double margin, double *slope);
    bool of_logps, of_means, less_gamma;
    /* A loss of single answers instead. */
    double (*rated)(const struct mt_objective_keys *k, bool desirable, double ratio, double *slope);
    bool averages;  /* rewards and log-probabilities are means over tokens */
    bool level;     /* ratios count from the mean one of mismatched answers, if that is positive */
};

enum { CHOSEN, REJECTED };

static double sigmoid(double x)
{
    return 1 / (1 + exp(-x));
}

static double log_sigmoid(double x)
{
    return x >= 0 ? -log1p(exp(-x)) : x - log1p(exp(x));
}

/* -(1 - e) log s(x) - e log s(-x); *slope: its derivative. */
static double mixed(double x, double e, double *slope)
{
    *slope = e * sigmoid(x) - (1 - e) * sigmoid(-x);
    return -(1 - e) * log_sigmoid(x) - e * log_sigmoid(-x);
}

/* Direct preference optimization (Rafailov et al. 2023); with label_smoothing its conservative form. */
static double smoothed(const struct mt_objective_keys *k, double margin, double *slope)
{
    return mixed(margin, k->label_smoothing, slope);
}

/* max(0, 1 - d) (Zhao et al. 2023). */
static double hinge(const struct mt_objective_keys *, double margin, double *slope)
{
    *slope = margin < 1 ? -1 : 0;
    return margin < 1 ? 1 - margin : 0;
}

static double margin_loss(const struct form *f, const struct mt_objective_keys *k, const struct answer *c,
                          const struct answer *r, double slope[2])
{
    double by_c = f->of_means ? c->tokens : 1, by_r = f->of_means ? r->tokens : 1, by_margin;
    double x = k->beta * ((f->of_logps ? c->logp : c->ratio) / by_c - (f->of_logps ? r->logp : r->ratio) / by_r);
    double loss = f->of_margin(k, f->less_gamma ? x - k->gamma : x, &by_margin);
    slope[CHOSEN] = k->beta * by_margin / by_c;
    slope[REJECTED] = -k->beta * by_margin / by_r;
    return loss;
}

/* Azar et al. 2023, of means over tokens: (delta - 1 / (2 beta))^2. */
static double ipo(const struct mt_objective_keys *k, const struct answer *c, const struct answer *r,
                  double slope[2])
{
    double off = c->ratio / c->tokens - r->ratio / r->tokens - 1 / (2 * k->beta);
    slope[CHOSEN] = 2 * off / c->tokens;
    slope[REJECTED] = -2 * off / r->tokens;
    return off * off;
}

/* An unbiased estimate where a share of the labels is wrong (Chowdhury et al. 2024). */
static double robust(const struct mt_objective_keys *k, const struct answer *c, const struct answer *r,
                     double slope[2])
{
    double e = k->label_smoothing, d = k->beta * (c->ratio - r->ratio), all = 1 - 2 * e;
    slope[CHOSEN] = -k->beta * ((1 - e) * sigmoid(-d) + e * sigmoid(d)) / all;
    slope[REJECTED] = -slope[CHOSEN];
    return (-(1 - e) * log_sigmoid(d) + e * log_sigmoid(-d)) / all;
}

/* D'Oosterlinck et al. 2024: the chosen answer becomes likelier, the rejected one less likely. */
static double apo_zero(const struct mt_objective_keys *k, const struct answer *c, const struct answer *r,
                       double slope[2])
{
    double up = sigmoid(k->beta * c->ratio), down = sigmoid(k->beta * r->ratio);
    slope[CHOSEN] = -k->beta * up * sigmoid(-k->beta * c->ratio);
    slope[REJECTED] = k->beta * down * sigmoid(-k->beta * r->ratio);
    return 1 - up + down;
}

/* Both become less likely, the rejected one more so. */
static double apo_down(const struct mt_objective_keys *k, const struct answer *c, const struct answer *r,
                       double slope[2])
{
    double d = k->beta * (c->ratio - r->ratio), up = sigmoid(k->beta * c->ratio);
    slope[REJECTED] = k->beta * sigmoid(d) * sigmoid(-d);
    slope[CHOSEN] = k->beta * up * sigmoid(-k->beta * c->ratio) - slope[REJECTED];
    return up + 1 - sigmoid(d);
}

/* log(1 - e^a), a < 0; *slope: its derivative. */
static double log_rest(double a, double *slope)
{
    *slope = -1 / expm1(-a);
    return a > -M_LN2 ? log(-expm1(a)) : log1p(-exp(a));
}

/* Of the two answers' odds, from means over tokens; slope[2]: by these means. */
static double log_odds(const struct answer *c, const struct answer *r, double slope[2])
{
    double by_c, by_r, a = c->logp / c->tokens, b = r->logp / r->tokens;
    double odds = a - b - (log_rest(a, &by_c) - log_rest(b, &by_r));
    slope[CHOSEN] = 1 - by_c;
    slope[REJECTED] = by_r - 1;
    return odds;
}

/* Hong et al. 2024. */
static double orpo(const struct mt_objective_keys *k, const struct answer *c, const struct answer *r,
                   double slope[2])
{
    double odds = log_odds(c, r, slope), by_odds = -k->beta * sigmoid(-odds);
    slope[CHOSEN] *= by_odds / c->tokens;
    slope[REJECTED] *= by_odds / r->tokens;
    return -k->beta * log_sigmoid(odds);
}

/* apo_zero of one answer: 1 - s(beta c), of an undesirable one s(beta r). */
static double apo_rated(const struct mt_objective_keys *k, bool desirable, double ratio, double *slope)
{
    double sign = desirable ? 1 : -1, weight = desirable ? k->desirable_weight : k->undesirable_weight;
    double x = sign * k->beta * ratio;
    *slope = -weight * sign * k->beta * sigmoid(x) * sigmoid(-x);
    return weight * (1 - sigmoid(x));
}

static const struct form *form_of(const struct mt_objective_step *s)
{
    return s->objective->form;
}

static double pair_loss(const struct mt_objective_step *s, const struct answer *c, const struct answer *r,
                        double slope[2])
{
    const struct form *f = form_of(s);
    return f->pair ? f->pair(s->keys, c, r, slope) : margin_loss(f, s->keys, c, r, slope);
}

/* Of document d; `loss`: of the micro-batch's rows. */
static struct answer answer_of(const struct mt_objective_step *s, const struct mt_batch *b, const float *loss,
                               size_t d)
{
    double sum = 0;
    for (int32_t i = b->answer_rows[d]; i < b->doc_rows[d + 1]; i++)
        sum += (double)loss[i];
    double reference = s->objective->reference ? s->reference[b->sample[d]] : 0;
    return (struct answer){-sum, -sum - reference, (double)(b->doc_rows[d + 1] - b->answer_rows[d])};
}

/* Ethayarajh et al. 2024, equation 7, is apo_rated() of the ratio less z: how far the model has gone from the
 * reference, estimated by the mean ratio of answers to other prompts. No gradient goes through it. Of a micro-batch, as
 * in TRL; 0 for losses without it. */
static double level_of(const struct mt_objective_step *s, const struct mt_batch *b, const float *loss)
{
    struct mt_measure z = {0};
    for (size_t d = 0; d < b->n_docs && form_of(s)->level; d++)
        if (b->role[d] == MT_DOC_MISMATCHED)
            mt_measure_add(&z, answer_of(s, b, loss, d).ratio);
    return z.n > 0 ? fmax(mt_measure_mean(&z), 0) : 0;
}

/* prompt: of the rows before the answer. */
static void fill(const struct mt_batch *b, size_t d, double prompt, double weight, float *out)
{
    for (int32_t i = b->doc_rows[d]; i < b->doc_rows[d + 1]; i++)
        out[i] = (float)(i < b->answer_rows[d] ? prompt : prompt + weight);
}

/* What the rows of chosen answers weigh beside the preference. */
static double sft_weight(const struct mt_objective_step *s)
{
    return s->keys->sft > 0 && s->n_chosen_rows ? s->keys->sft / (double)s->n_chosen_rows : 0;
}

static void weights(const struct mt_objective_step *s, const struct mt_batch *b, const float *loss, float *weight)
{
    const struct form *f = form_of(s);
    double n = (double)s->n_items, slope[2], level = level_of(s, b, loss);
    for (size_t d = 0; d < b->n_docs; d++) {
        struct answer a = answer_of(s, b, loss, d);
        bool chosen = b->role[d] == MT_DOC_CHOSEN;
        if (b->role[d] == MT_DOC_MISMATCHED) {
            fill(b, d, 0, 0, weight);
        } else if (f->rated) {
            f->rated(s->keys, chosen, a.ratio - level, slope);
            fill(b, d, chosen ? sft_weight(s) : 0, -slope[0] / n, weight);
        } else if (chosen) { /* the rejected answer is the next document */
            struct answer r = answer_of(s, b, loss, d + 1);
            pair_loss(s, &a, &r, slope);
            fill(b, d, sft_weight(s), -slope[CHOSEN] / n, weight);
            fill(b, d + 1, 0, -slope[REJECTED] / n, weight);
        }
    }
}

enum {
    LOSS, REWARD_CHOSEN, REWARD_REJECTED, ACCURACY, MARGIN, LOGP_CHOSEN, LOGP_REJECTED, TOKEN_ACCURACY, NLL,
    LOG_ODDS_RATIO, LOG_ODDS_CHOSEN, KL, N_MEASURES,
};

/* What single answers have. */
static void measure_answer(const struct mt_objective_step *s, const struct answer *a, bool chosen,
                           struct mt_measure *sum)
{
    double by = form_of(s)->averages ? a->tokens : 1;
    mt_measure_add(&sum[chosen ? REWARD_CHOSEN : REWARD_REJECTED], s->keys->beta * (a->ratio / by));
    mt_measure_add(&sum[chosen ? LOGP_CHOSEN : LOGP_REJECTED], a->logp / by);
}

static void measure_pair(const struct mt_objective_step *s, const struct answer *c, const struct answer *r,
                         struct mt_measure *sum)
{
    const struct form *f = form_of(s);
    double slope[2], by_c = f->averages ? c->tokens : 1, by_r = f->averages ? r->tokens : 1;
    double margin = s->keys->beta * (c->ratio / by_c) - s->keys->beta * (r->ratio / by_r);
    mt_measure_add(&sum[LOSS], pair_loss(s, c, r, slope));
    mt_measure_add(&sum[ACCURACY], margin > 0);
    mt_measure_add(&sum[MARGIN], margin);
    if (f->pair != orpo)
        return;
    double odds = log_odds(c, r, slope);
    mt_measure_add(&sum[LOG_ODDS_CHOSEN], odds);
    mt_measure_add(&sum[LOG_ODDS_RATIO], log_sigmoid(odds));
}

/* The rows of a chosen answer. */
static void measure_rows(const struct mt_micro_losses *m, size_t d, struct mt_measure *sum)
{
    for (int32_t i = m->batch->doc_rows[d]; i < m->batch->doc_rows[d + 1]; i++) {
        sum[NLL].sum += (double)m->loss[i];
        sum[NLL].n++;
        sum[TOKEN_ACCURACY].sum += i >= m->batch->answer_rows[d] && m->correct[i];
        sum[TOKEN_ACCURACY].n += i >= m->batch->answer_rows[d];
    }
}

static void measure(const struct mt_objective_step *s, const struct mt_micro_losses *m, struct mt_measure *sum)
{
    const struct mt_batch *b = m->batch;
    const struct form *f = form_of(s);
    double slope, level = level_of(s, b, m->loss);
    if (f->level)
        mt_measure_add(&sum[KL], level);
    for (size_t d = 0; d < b->n_docs; d++) {
        if (b->role[d] == MT_DOC_MISMATCHED)
            continue;
        struct answer a = answer_of(s, b, m->loss, d);
        bool chosen = b->role[d] == MT_DOC_CHOSEN;
        measure_answer(s, &a, chosen, sum);
        if (chosen)
            measure_rows(m, d, sum);
        if (f->rated) {
            mt_measure_add(&sum[LOSS], f->rated(s->keys, chosen, a.ratio - level, &slope));
        } else if (chosen) {
            struct answer r = answer_of(s, b, m->loss, d + 1);
            measure_pair(s, &a, &r, sum);
        }
    }
}

/* The loss has the chosen answers' token loss in it; rated answers have a margin only on average. */
static void finish(const struct mt_objective_step *s, struct mt_measure *sum)
{
    if (s->keys->sft > 0 && sum[NLL].n > 0)
        sum[LOSS].origin += s->keys->sft * mt_measure_mean(&sum[NLL]);
    if (form_of(s)->rated && sum[REWARD_CHOSEN].n > 0 && sum[REWARD_REJECTED].n > 0)
        mt_measure_add(&sum[MARGIN], mt_measure_mean(&sum[REWARD_CHOSEN]) - mt_measure_mean(&sum[REWARD_REJECTED]));
}

static const struct form form_mt_dpo = {.of_margin = smoothed};
static const struct form form_mt_dpo_norm = {.of_margin = smoothed, .of_means = true};
static const struct form form_mt_hinge = {.of_margin = hinge};
/* Meng et al. 2024: no reference, a margin gamma. */
static const struct form form_mt_simpo = {.of_margin = smoothed, .of_logps = true, .of_means = true, .less_gamma = true,
                                          .averages = true};
/* Xu et al. 2024: sums without a reference. */
static const struct form form_mt_cpo = {.of_margin = smoothed, .of_logps = true};
static const struct form form_mt_ipo = {.pair = ipo}, form_mt_robust = {.pair = robust};
static const struct form form_mt_apo_zero = {.pair = apo_zero}, form_mt_apo_down = {.pair = apo_down};
static const struct form form_mt_apo_zero_unpaired = {.rated = apo_rated};
static const struct form form_mt_kto = {.rated = apo_rated, .level = true};
static const struct form form_mt_orpo = {.pair = orpo, .averages = true};

#define MEASURES                                                                                    \
    {"loss", "rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins", "logps/chosen",      \
     "logps/rejected", "mean_token_accuracy", "nll_loss", "log_odds_ratio", "log_odds_chosen", "kl"}
#define OBJECTIVE(variable, called, text, ...)                                                      \
    extern const struct mt_objective variable;                                                      \
    const struct mt_objective variable = {.name = called, .title = text, .needs_losses = true, .answers = true, \
                                          .n_measures = N_MEASURES, .measures = MEASURES, .weights = weights, \
                                          .measure = measure, .finish = finish, .form = &form_##variable, \
                                          __VA_ARGS__}

OBJECTIVE(mt_dpo, "sigmoid", "DPO", .reference = true, .beta = 0.1);
OBJECTIVE(mt_dpo_norm, "sigmoid_norm", "DPO of means", .reference = true, .beta = 0.1);
OBJECTIVE(mt_ipo, "ipo", "IPO", .reference = true, .beta = 0.1);
OBJECTIVE(mt_hinge, "hinge", "hinge loss of preferences", .reference = true, .beta = 0.1);
OBJECTIVE(mt_robust, "robust", "robust DPO", .reference = true, .beta = 0.1);
OBJECTIVE(mt_apo_zero, "apo_zero", "APO-zero", .reference = true, .beta = 0.1);
OBJECTIVE(mt_apo_down, "apo_down", "APO-down", .reference = true, .beta = 0.1);
OBJECTIVE(mt_apo_zero_unpaired, "apo_zero_unpaired", "APO-zero of rated answers", .rated = true,
          .reference = true, .beta = 0.1);
OBJECTIVE(mt_kto, "kto", "KTO", .rated = true, .mismatched = true, .reference = true, .beta = 0.1);
OBJECTIVE(mt_simpo, "simpo", "SimPO", .beta = 2);
OBJECTIVE(mt_cpo, "cpo", "CPO", .beta = 0.1, .sft = 1);
OBJECTIVE(mt_orpo, "orpo", "ORPO", .beta = 0.1, .sft = 1);
