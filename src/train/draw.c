/* SPDX-License-Identifier: Apache-2.0 */
#include "train/draw.h"

#include <math.h>
#include <stdlib.h>

#include "base/mem.h"
#include "base/philox.h"
#include "device/cpu/logits.h"

/* Logarithms of weights, beside the likeliest token's 1; the most is of one that is taken for 0. */
enum { FIRST_MARGIN = 8, MOST_MARGIN = 45 };

int mt_drawing_init(struct mt_drawing *d, const struct mt_generation *g, size_t vocab, struct mt_err *err)
{
    *d = (struct mt_drawing){.g = g, .vocab = vocab, .of = g->drawn_of ? MT_MIN(g->drawn_of, vocab) : vocab};
    /* weights: or sums of blocks, which are fewer */
    return MT_NEW(&d->candidate, d->of, "drawing tokens", err) ?: MT_NEW(&d->weight, d->of, "drawing tokens", err);
}

void mt_drawing_finish(struct mt_drawing *d)
{
    free(d->candidate);
    free(d->weight);
    *d = (struct mt_drawing){0};
}

/* The likeliest first; of equal ones that with the smaller id. */
static int compare(const void *a, const void *b)
{
    const struct mt_candidate *x = a, *y = b;
    if (x->logit != y->logit)
        return x->logit < y->logit ? 1 : -1;
    return (x->id > y->id) - (x->id < y->id);
}

/* Candidates within a margin of the likeliest, in order; returns how many. */
static size_t collect(const struct mt_drawing *d, const float *logits, float best, double margin)
{
    float least = (float)((double)best - margin * d->g->temperature);
    size_t n = 0;
    for (size_t i = 0; i < d->of; i++)
        if (logits[i] >= least)
            d->candidate[n++] = (struct mt_candidate){logits[i], (uint32_t)i};
    qsort(d->candidate, n, sizeof(*d->candidate), compare);
    return n;
}

/* Of n candidates with their weights, of which `sum` is that of all that top_k leaves: how many remain. */
static size_t keep_likeliest(const struct mt_drawing *d, size_t n, double sum)
{
    size_t kept = 0;
    double at = 0;
    do
        at += d->weight[kept++];
    while (kept < n && at < d->g->top_p * sum && d->weight[kept] >= d->g->min_p);
    return kept;
}

/* The sum of all weights; those of blocks are left in d->weight. */
static double sum_all(const struct mt_drawing *d, const float *logits, float best)
{
    double sum = 0;
    mt_logits_sums(d->weight, logits, d->of, best, (float)d->g->temperature);
    for (size_t i = 0; i < mt_div_up(d->of, MT_LOGITS_BLOCK); i++)
        sum += d->weight[i];
    return sum;
}

/* Sorts as few as are needed: those near the likeliest, and if these are not enough, more. */
static size_t choose_candidates(const struct mt_drawing *d, const float *logits, float best)
{
    size_t k = d->g->top_k ? MT_MIN(d->g->top_k, d->of) : d->of, n = 0;
    double all = k == d->of ? sum_all(d, logits, best) : 0, sum = 0;
    for (double margin = FIRST_MARGIN;; margin *= 2) {
        n = MT_MIN(collect(d, logits, best, margin), k);
        sum = 0;
        for (size_t i = 0; i < n; i++)
            sum += d->weight[i] = (double)mt_logits_weight(d->candidate[i].logit, best, (float)d->g->temperature);
        if (n == k || margin > MOST_MARGIN || (k == d->of && (sum >= d->g->top_p * all || exp(-margin) < d->g->min_p)))
            break;
    }
    return keep_likeliest(d, n, k == d->of ? all : sum);
}

/* The first candidate at which the weights' sum reaches u of theirs all. */
static size_t pick(const double *weight, size_t n, double u)
{
    double sum = 0, at = 0;
    size_t last = 0;
    for (size_t i = 0; i < n; i++)
        sum += weight[i];
    for (size_t i = 0; i < n; i++) {
        at += weight[i];
        last = weight[i] > 0 ? i : last;
        if (weight[i] > 0 && at >= u * sum)
            return i;
    }
    return last;
}

/* The same of all tokens: the block first, then one of it, whose weights are made again. */
static size_t pick_of_all(struct mt_drawing *d, const float *logits, float best, double u)
{
    double rest = u * sum_all(d, logits, best);
    size_t blocks = mt_div_up(d->of, MT_LOGITS_BLOCK), b = 0;
    while (b + 1 < blocks && rest > d->weight[b])
        rest -= d->weight[b++];
    size_t first = b * MT_LOGITS_BLOCK, n = MT_MIN(d->of - first, (size_t)MT_LOGITS_BLOCK);
    u = d->weight[b] > 0 ? rest / d->weight[b] : 0;
    for (size_t i = 0; i < n; i++)
        d->weight[i] = (double)mt_logits_weight(logits[first + i], best, (float)d->g->temperature);
    return first + pick(d->weight, n, u);
}

size_t mt_draw_token(struct mt_drawing *d, const float *logits, uint64_t stream, size_t at)
{
    const struct mt_generation *g = d->g;
    size_t best = mt_logits_best(logits, d->of);
    if (g->temperature <= 0)
        return best;
    double u = mt_philox_uniform(g->seed, stream, at);
    if (g->top_k || g->top_p < 1 || g->min_p > 0)
        return d->candidate[pick(d->weight, choose_candidates(d, logits, logits[best]), u)].id;
    return pick_of_all(d, logits, logits[best], u);
}
