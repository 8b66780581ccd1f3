/* SPDX-License-Identifier: Apache-2.0 */
#include "score_choices.h"

#include <string.h>

#include "base/mem.h"

/* Tokens before the first trained one. */
static size_t prompt_of(const mt_dataset *d, size_t i, const uint32_t **ids, uint8_t *mask)
{
    size_t n = mt_dataset_sample(d, i, ids, mask), k = 0;
    while (k < n && !mask[k])
        k++;
    return k;
}

static double logprob_of(const struct score_journal *j, size_t i)
{
    const struct score_sample *s = &j->sample[i];
    double sum = 0;
    for (size_t k = 0; k < s->n; k++)
        sum -= (double)j->token[s->first + k].loss;
    return sum;
}

/* Marks the best of samples [first, end), which have one prompt. */
static void mark(struct score_choice *c, const struct score_journal *j, size_t first, size_t end)
{
    size_t best = end, best_mean = end;
    double most = 0, most_mean = 0;
    for (size_t i = first; i < end; i++) {
        if (!j->sample[i].done || !j->sample[i].n)
            continue;
        double sum = logprob_of(j, i), mean = sum / (double)j->sample[i].n;
        if (best == end || sum > most) {
            best = i;
            most = sum;
        }
        if (best_mean == end || mean > most_mean) {
            best_mean = i;
            most_mean = mean;
        }
    }
    if (best < end)
        c[best].best = c[best_mean].best_mean = true;
}

/* Whether a sample comes from the same record as the one before it. */
static bool same_record(const mt_dataset *d, size_t i)
{
    char a[4200], b[4200];
    return i && !strcmp(mt_dataset_place(d, i - 1, a, sizeof(a)), mt_dataset_place(d, i, b, sizeof(b)));
}

static bool has_records_of_several(const mt_dataset *d)
{
    /* pieces of a sample that was split are no choices */
    const size_t n = mt_dataset_stats(d)->n_split ? 0 : (size_t)mt_dataset_stats(d)->n_samples;
    for (size_t i = 1; i < n; i++)
        if (same_record(d, i))
            return true;
    return false;
}

int score_choices_find(struct score_choice **out, const mt_dataset *d, const struct score_journal *j,
                       struct mt_err *err)
{
    const struct mt_dataset_stats *s = mt_dataset_stats(d);
    const size_t n = (size_t)s->n_samples;
    MT_FREED struct score_choice *c = NULL;
    MT_FREED uint8_t *mask = NULL;
    const uint32_t *last = NULL, *ids;
    size_t n_last = 0, first = 0;
    const bool by_record = has_records_of_several(d);
    int rc = MT_NEW(&c, n, "choices", err) ?: MT_NEW(&mask, (size_t)s->max_len + 1, "choices", err);
    for (size_t i = 0; i < n && !rc; i++) {
        size_t k = prompt_of(d, i, &ids, mask);
        bool same = by_record ? same_record(d, i) : i && k == n_last && !memcmp(ids, last, k * sizeof(*ids));
        if (i && !same) {
            mark(c, j, first, i);
            first = i;
        }
        c[i].question = i ? c[i - 1].question + !same : 0;
        last = ids;
        n_last = k;
    }
    if (!rc)
        mark(c, j, first, n);
    *out = rc ? NULL : MT_GIVE(c);
    return rc;
}
