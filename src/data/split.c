/* SPDX-License-Identifier: Apache-2.0 */
/* Training and evaluation samples of one data set. */
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#include "base/mem.h"
#include "base/sort.h"
#include "data/dataset.h"

static uint64_t sample_hash(const mt_dataset *d, uint64_t i)
{
    const uint32_t *ids;
    size_t n = mt_dataset_sample(d, i, &ids, NULL);
    return XXH3_64bits(ids, n * sizeof(*ids));
}

/* The hash below which a sample is held out. */
static int split_limit(const mt_dataset *d, const char *eval, uint64_t *limit, struct mt_err *err)
{
    char *end = NULL;
    uint64_t n = mt_dataset_stats(d)->n_samples;
    double v = strtod(eval, &end);
    if (end != eval && !strcmp(end, "%") && v >= 0 && v < 100) {
        *limit = (uint64_t)(v / 100 * 0x1p64);
        return 0;
    }
    bool whole = end != eval && !*end && v == (double)(uint64_t)MT_MAX(v, 0.0);
    if (end != eval && !*end && v > 0 && v < 1)
        return mt_fail(err, MT_ERR_USAGE, -EINVAL, "data.eval = %s: a share is written %g%%", eval, 100 * v);
    if (!whole || v >= (double)n)
        return mt_fail(err, MT_ERR_USAGE, -EINVAL,
                       "data.eval = %s: must be a file, a percentage, or a number of samples below "
                       "%llu",
                       eval, (unsigned long long)n);
    MT_FREED uint64_t *h = mt_calloc(n, sizeof(*h));
    if (!h)
        return mt_fail_nomem(err, "the evaluation split", n * sizeof(*h));
    for (uint64_t i = 0; i < n; i++)
        h[i] = sample_hash(d, i);
    mt_sort_u64(h, n);
    *limit = v > 0 ? h[(uint64_t)v] : 0;
    return 0;
}

int mt_dataset_split(const mt_dataset *d, const char *eval, struct mt_split *train,
                     struct mt_split *held_out, struct mt_err *err)
{
    uint64_t n = mt_dataset_stats(d)->n_samples, limit = 0;
    int rc = eval[0] ? split_limit(d, eval, &limit, err) : 0;
    if (rc)
        return rc;
    *train = *held_out = (struct mt_split){0};
    for (uint64_t i = 0; i < n && !rc; i++) {
        struct mt_split *side = limit && sample_hash(d, i) < limit ? held_out : train;
        if (!mt_grow(&side->samples, &side->cap, side->n + 1, sizeof(*side->samples)))
            rc = mt_fail_nomem(err, "the evaluation split", n * sizeof(*side->samples));
        else
            side->samples[side->n++] = (uint32_t)i;
    }
    if (!rc && !train->n)
        rc = mt_fail(err, MT_ERR_INPUT, -ENODATA, "data.eval = %s leaves nothing to train on", eval);
    if (rc) {
        mt_split_finish(train);
        mt_split_finish(held_out);
    }
    return rc;
}

void mt_split_finish(struct mt_split *s)
{
    free(s->samples);
    *s = (struct mt_split){0};
}
