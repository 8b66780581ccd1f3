/* SPDX-License-Identifier: Apache-2.0 */
/* Tokens are drawn as often as the softmax of their logits says, whatever their block. */
#include <math.h>
#include <stdlib.h>

#include "base/mem.h"
#include "base/philox.h"
#include "device/cpu/logits.h"
#include "test.h"
#include "train/draw.h"

enum { VOCAB = 2 * MT_LOGITS_BLOCK + 77, GROUP = 100, DRAWS = 20000, FEWER = 4000, SEED = 5 };

/* Those of input tokens are never drawn; others are spread, so that some have nearly no weight. */
static void fill(float *logit, double *share, double temperature)
{
    double sum = 0, best = -INFINITY;
    mt_philox_normal(logit, VOCAB, 0, 1, 2, 6);
    logit[3] = logit[MT_LOGITS_BLOCK] = -INFINITY;
    for (int i = 0; i < VOCAB; i++)
        best = fmax(best, (double)logit[i]);
    for (int i = 0; i < VOCAB; i++)
        sum += share[i] = exp(((double)logit[i] - best) / temperature);
    for (int i = 0; i < VOCAB; i++)
        share[i] /= sum;
}

static void draw_many(const struct mt_generation *g, const float *logit, size_t n, size_t *seen)
{
    struct mt_drawing d;
    MUST(mt_drawing_init, &d, g, VOCAB);
    for (size_t k = 0; k < n; k++)
        seen[mt_draw_token(&d, logit, 7, k)]++;
    mt_drawing_finish(&d);
}

TEST(tokens_are_drawn_by_their_shares)
{
    for (double temperature = 1; temperature < 10; temperature *= 3) {
        static float logit[VOCAB];
        static double share[VOCAB];
        size_t seen[VOCAB] = {0};
        fill(logit, share, temperature);
        draw_many(&(struct mt_generation){.seed = SEED, .temperature = temperature, .top_p = 1}, logit, DRAWS, seen);
        assert_true(!seen[3] && !seen[MT_LOGITS_BLOCK]);
        for (int first = 0; first < VOCAB; first += GROUP) {
            double want = 0, got = 0;
            for (int i = first; i < MT_MIN(first + GROUP, (int)VOCAB); i++) {
                want += share[i] * DRAWS;
                got += (double)seen[i];
            }
            if (!(fabs(got - want) <= 4 * sqrt(want + 1))) /* four standard deviations */
                fail_msg("tokens %d...: %g of %g", first, got, want);
        }
    }
}

static const float *by; /* logits to sort by */
static int before(const void *a, const void *b)
{
    const size_t x = *(const size_t *)a, y = *(const size_t *)b;
    return by[x] != by[y] ? by[x] < by[y] ? 1 : -1 : (x > y) - (x < y);
}

/* The same by sorting all. */
static size_t drawn_of_sorted(const struct mt_generation *g, const float *logit, double u)
{
    size_t order[VOCAB], n = g->top_k ? g->top_k : VOCAB, kept = 0;
    double weight[VOCAB], sum = 0, at = 0;
    for (size_t i = 0; i < VOCAB; i++)
        order[i] = i;
    by = logit;
    qsort(order, VOCAB, sizeof(*order), before);
    for (size_t i = 0; i < n; i++)
        sum += weight[i] = (double)mt_logits_weight(logit[order[i]], logit[order[0]], (float)g->temperature);
    do
        at += weight[kept++];
    while (kept < n && at < g->top_p * sum && weight[kept] >= g->min_p);
    sum = 0;
    for (size_t i = 0; i < n && sum < u * at; i++) {
        sum += weight[i];
        kept = i;
    }
    return order[kept];
}

TEST(a_cut_draws_what_sorting_would)
{
    static float logit[VOCAB];
    static double share[VOCAB];
    static const struct mt_generation cuts[] = {{.top_p = 0.9}, {.top_p = 0.001}, {.top_p = 1, .top_k = 40}, {.top_p = 1, .min_p = 0.05},
                                                {.top_p = 0.5, .top_k = 300, .min_p = 0.01}, {.top_p = 1, .top_k = 1}};
    for (int flat = 0; flat < 4; flat++) /* spread; less; with equal ones and both zeros; all equal but two */
        for (size_t c = 0; c < MT_ARRAY_LEN(cuts); c++) {
            struct mt_generation g = cuts[c];
            struct mt_drawing d;
            g.seed = SEED;
            g.temperature = 1.5;
            fill(logit, share, 1);
            for (int i = 0; i < VOCAB && flat; i++)
                if (isfinite(logit[i]))
                    logit[i] = flat == 1 ? 0.01f * logit[i] : flat == 2 ? rintf(0.3f * logit[i]) : 2;
            MUST(mt_drawing_init, &d, &g, VOCAB);
            for (size_t k = 0; k < 40; k++) {
                size_t want = drawn_of_sorted(&g, logit, mt_philox_uniform(SEED, 7, k)), got = mt_draw_token(&d, logit, 7, k);
                if (got != want)
                    fail_msg("logits %d, cut %zu, draw %zu: %zu instead of %zu", flat, c, k, got, want);
            }
            mt_drawing_finish(&d);
        }
}

/* Where nothing is cut, candidates in their order have the same shares as all tokens. */
TEST(a_cut_leaves_the_likeliest)
{
    static float logit[VOCAB];
    static double share[VOCAB];
    fill(logit, share, 3);
    size_t best = mt_logits_best(logit, VOCAB), seen[VOCAB] = {0};
    draw_many(&(struct mt_generation){.seed = SEED, .temperature = 3, .top_p = 0.5}, logit, FEWER, seen);
    double kept = 0, least = share[best];
    for (int i = 0; i < VOCAB; i++) {
        kept += seen[i] ? share[i] : 0;
        least = seen[i] ? fmin(least, share[i]) : least;
    }
    for (int i = 0; i < VOCAB; i++)
        assert_true(seen[i] || share[i] <= least || share[i] * FEWER < 20);
    assert_true(kept >= 0.5 && kept - least < 0.5);
    logit[VOCAB - 1] = logit[best] + 1;
    assert_int_equal(mt_logits_best(logit, VOCAB), VOCAB - 1);
    logit[9] = logit[VOCAB - 1];
    assert_int_equal(mt_logits_best(logit, VOCAB), 9);
}
