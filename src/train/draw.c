/* SPDX-License-Identifier: Apache-2.0 */
#include "train/draw.h"

#include <math.h>
#include <stdlib.h>

#include "base/dtype.h"
#include "base/mem.h"
#include "base/philox.h"
#include "device/cpu/logits.h"

/* Logarithms of weights, beside the likeliest token's 1; the most is of one that is taken for 0. */
enum { FIRST_MARGIN = 8, MOST_MARGIN = 45 };
/* Bits of a digit of the radix selection: a logit has three digits. */
enum { DIGIT = 11 };

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

/* A number of 3 DIGITs that grows with the logit. */
static uint64_t key_of(float logit)
{
    uint32_t bits = mt_f32_bits(logit);
    return (uint64_t)(bits >> 31 ? ~bits : bits | UINT32_C(1) << 31) << 1;
}

/* Candidates within a margin of the likeliest, by their ids; returns how many. */
static size_t collect(const struct mt_drawing *d, const float *logits, float best, double margin)
{
    float least = (float)((double)best - margin * d->g->temperature);
    size_t n = 0;
    for (size_t i = 0; i < d->of; i++)
        if (logits[i] >= least)
            d->candidate[n++] = (struct mt_candidate){logits[i] + 0.0f, (uint32_t)i}; /* -0 is 0 */
    return n;
}

/* The weights of n candidates; returns their sum. */
static double weigh(const struct mt_drawing *d, size_t n, float best)
{
    double sum = 0;
    for (size_t i = 0; i < n; i++)
        sum += d->weight[i] = (double)mt_logits_weight(d->candidate[i].logit, best, (float)d->g->temperature);
    return sum;
}

/* Of n candidates, the likeliest first and of equal ones that with the smaller id, the one at which the sum of weights
 * reaches the target; if none does, the last. They are not sorted: each pass finds a digit of its key. */
static size_t reach(const struct mt_drawing *d, size_t n, double target)
{
    uint64_t key = 0;
    double at = 0;
    size_t found = 0;
    for (int shift = 2 * DIGIT; shift >= 0; shift -= DIGIT) {
        double sum[1 << DIGIT] = {0};
        size_t digit = (1 << DIGIT) - 1, least = digit;
        for (size_t i = 0; i < n; i++) {
            uint64_t begins = key_of(d->candidate[i].logit) >> shift;
            if (begins >> DIGIT != key)
                continue;
            sum[begins & digit] += d->weight[i];
            least = MT_MIN(least, begins & digit);
        }
        for (; digit > least && (!(sum[digit] > 0) || at + sum[digit] < target); digit--)
            at += sum[digit];
        key = key << DIGIT | digit;
    }
    for (size_t i = 0; i < n; i++) {
        if (key_of(d->candidate[i].logit) != key)
            continue;
        at += d->weight[i];
        found = i;
        if (at >= target)
            break;
    }
    return found;
}

/* Leaves those up to the one that reaches the target, of these those with a weight of at least `least`. */
static size_t cut(const struct mt_drawing *d, size_t n, double target, double least)
{
    const struct mt_candidate last = d->candidate[reach(d, n, target)];
    size_t kept = 0;
    for (size_t i = 0; i < n; i++) {
        const struct mt_candidate c = d->candidate[i];
        if (c.logit < last.logit || (c.logit == last.logit && c.id > last.id) || d->weight[i] < least)
            continue;
        d->candidate[kept] = c;
        d->weight[kept++] = d->weight[i];
    }
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

/* Looks at as few as are needed: those near the likeliest, and if these are not enough, more. */
static size_t pick_of_likeliest(const struct mt_drawing *d, const float *logits, float best, double u)
{
    size_t k = d->g->top_k ? MT_MIN(d->g->top_k, d->of) : d->of, n = 0;
    double all = k == d->of ? sum_all(d, logits, best) : 0, sum = 0, kept = 0;
    for (double margin = FIRST_MARGIN;; margin *= 2) {
        n = collect(d, logits, best, margin);
        sum = weigh(d, n, best);
        if (n >= k || margin > MOST_MARGIN || (k == d->of && (sum >= d->g->top_p * all || exp(-margin) < d->g->min_p)))
            break;
    }
    if (n > k) {
        for (size_t i = 0; i < n; i++)
            d->weight[i] = 1;
        n = cut(d, n, (double)k, 0);
        sum = weigh(d, n, best);
    }
    if (d->g->top_p < 1 || d->g->min_p > 0)
        n = cut(d, n, d->g->top_p < 1 ? d->g->top_p * (k == d->of ? all : sum) : INFINITY, d->g->min_p);
    for (size_t i = 0; i < n; i++)
        kept += d->weight[i];
    return d->candidate[reach(d, n, u * kept)].id;
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
        return pick_of_likeliest(d, logits, logits[best], u);
    return pick_of_all(d, logits, logits[best], u);
}
