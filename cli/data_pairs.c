/* SPDX-License-Identifier: Apache-2.0 */
#include "data_pairs.h"

#include <stdio.h>
#include <stdlib.h>
#include <xxhash.h>

#include "base/mem.h"

/* Hashes of a pair's answers, each with the prompt. */
struct pair {
    uint64_t chosen, rejected;
};

static int order(const void *a, const void *b)
{
    const struct pair *x = a, *y = b;
    if (x->chosen != y->chosen)
        return x->chosen < y->chosen ? -1 : 1;
    return (x->rejected > y->rejected) - (x->rejected < y->rejected);
}

static uint64_t ones(const uint8_t *mask, size_t n)
{
    uint64_t sum = 0;
    for (size_t i = 0; i < n; i++)
        sum += mask[i] != 0;
    return sum;
}

/* Adds item i. pair: where it goes if it is one. */
static void add_item(struct cli_pairs *p, const mt_dataset *d, uint64_t i, uint8_t *mask, struct pair *pair)
{
    const uint32_t *ids;
    size_t n = mt_dataset_sample(d, i, &ids, mask), first = mt_dataset_chosen(d, i);
    uint64_t good = ones(mask, first), bad = ones(mask + first, n - first);
    p->n_good += first > 0;
    p->n_bad += n > first;
    p->good_tokens += good;
    p->bad_tokens += bad;
    if (!first || first == n)
        return;
    *pair = (struct pair){XXH3_64bits(ids, first * sizeof(*ids)), XXH3_64bits(ids + first, (n - first) * sizeof(*ids))};
    p->n++;
    p->n_longer += good > bad;
    p->n_ties += good == bad;
}

int cli_pairs_count(const mt_dataset *d, struct cli_pairs *out, struct mt_err *err)
{
    const struct mt_dataset_stats *s = mt_dataset_stats(d);
    *out = (struct cli_pairs){.n_equal = s->n_equal};
    if (!s->answers)
        return 0;
    MT_FREED struct pair *pairs = mt_calloc(s->n_samples, sizeof(*pairs));
    MT_FREED uint8_t *mask = mt_calloc(s->max_len, 1);
    int rc = pairs && mask ? 0 : mt_fail_nomem(err, "statistics of pairs", s->n_samples * sizeof(*pairs));
    for (uint64_t i = 0; i < s->n_samples && !rc; i++)
        add_item(out, d, i, mask, &pairs[out->n]);
    if (!rc)
        qsort(pairs, out->n, sizeof(*pairs), order);
    for (uint64_t i = 0; i < out->n && !rc; i++) {
        struct pair other = {pairs[i].rejected, pairs[i].chosen};
        out->n_reversed += bsearch(&other, pairs, out->n, sizeof(*pairs), order) != NULL;
    }
    return rc;
}

static double over(uint64_t part, uint64_t whole)
{
    return whole ? (double)part / (double)whole : 0;
}

void cli_pairs_print(const struct cli_pairs *p)
{
    if (!p->n_good && !p->n_bad)
        return;
    if (p->n || p->n_equal)
        printf("Pairs       %llu; %llu more of equal answers are left out; of %llu another pair says the opposite\n",
               (unsigned long long)p->n, (unsigned long long)p->n_equal, (unsigned long long)p->n_reversed);
    if (p->n)
        printf("Lengths     %.1f%% of chosen answers are longer than the rejected ones, %.1f%% equally long%s\n",
               100 * over(p->n_longer, p->n), 100 * over(p->n_ties, p->n),
               over(p->n_longer, p->n) > 0.6 ? ": a model may learn to write more" : "");
    printf("Answers     %llu good ones, %.1f tokens on average; %llu bad ones, %.1f\n", (unsigned long long)p->n_good,
           over(p->good_tokens, p->n_good), (unsigned long long)p->n_bad, over(p->bad_tokens, p->n_bad));
}
