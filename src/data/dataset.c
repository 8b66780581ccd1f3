/* SPDX-License-Identifier: Apache-2.0 */
#include "data/dataset.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#include "base/mem.h"
#include "data/cache.h"
#include "data/columns.h"
#include "data/rollouts.h"

/* A sample of training: a range of a shard's tokens, at most seq_len of them; of answers, an item of the shard. */
struct view {
    uint64_t start;
    uint32_t len, chosen; /* chosen: tokens of the chosen answer, which come first */
    uint32_t gap;         /* tokens of the shard after them that are left out (data.overlong = truncate) */
    uint64_t joined;      /* with a gap: where the item begins in part.joined */
};

struct part {
    struct mt_shard shard;
    struct mt_data_source pub;
    struct view *views; /* NULL: the shard's samples unchanged */
    size_t cap;
    uint32_t *joined;   /* tokens of items with a gap */
    size_t n_joined, cap_joined;
};

struct mt_dataset {
    struct mt_source_list files;
    struct part *parts;
    size_t n_parts;
    struct mt_dataset_stats stats;
    struct mt_notes notes;
    struct mt_rollout *rollouts; /* [n_samples]; NULL: they are no rollouts */
    uint64_t hash;
    struct mt_dataset_params params;
    char *cache_dir;
    char overlong_at[160];
    uint64_t n_cut; /* of stats.n_untrained: those that data.seq_len cuts before their first trained token */
    char cut_at[160];
};

static const struct part *part_of(const mt_dataset *d, uint64_t i)
{
    size_t lo = 0, hi = d->n_parts;
    while (hi - lo > 1) {
        size_t mid = (lo + hi) / 2;
        if (d->parts[mid].pub.first <= i)
            lo = mid;
        else
            hi = mid;
    }
    return &d->parts[lo];
}

static void place_of(const struct part *p, uint64_t sample, char *buf, size_t len)
{
    unsigned long long at = p->shard.places[sample];
    snprintf(buf, len, p->shard.header->place_kind == MT_PLACE_LINE ? "%s:%llu" : "%s[%llu]",
             p->pub.path, at);
}

static int push_view(struct part *p, struct view v, uint64_t n_trained, struct mt_err *err)
{
    struct mt_dataset_stats *s = &p->pub.stats;
    if (!mt_grow(&p->views, &p->cap, s->n_samples + 1, sizeof(*p->views)))
        return mt_fail_nomem(err, "the samples", s->n_samples * sizeof(*p->views));
    p->views[s->n_samples++] = v;
    s->n_tokens += v.len;
    s->n_trained += n_trained;
    s->max_len = MT_MAX(s->max_len, v.len);
    return 0;
}

static int add_view(struct part *p, struct view v, struct mt_err *err)
{
    return push_view(p, v, mt_shard_count_trained(&p->shard, v.start + 1, (uint64_t)v.len - 1), err);
}

static int split(struct part *p, uint64_t start, uint64_t end, size_t max, struct mt_err *err)
{
    int rc = 0;
    for (; start + 1 < end && !rc; start += max) {
        uint64_t len = MT_MIN(end - start, max);
        if (mt_shard_count_trained(&p->shard, start + 1, len - 1))
            rc = add_view(p, (struct view){.start = start, .len = (uint32_t)len}, err);
    }
    return rc;
}

/* Samples of the shard that are one of training. */
static uint64_t docs_of(const struct part *p)
{
    return p->shard.header->flags & MT_SHARD_ANSWERS ? 2 : 1;
}

/* A sample of the shard, or an item, whole. */
static struct view whole_view(const struct part *p, uint64_t i)
{
    const uint64_t k = docs_of(p), *at = p->shard.offsets + k * i;
    return (struct view){.start = at[0], .len = (uint32_t)(at[k] - at[0]), .chosen = (uint32_t)(at[1] - at[0])};
}

static struct view view_at(const struct part *p, uint64_t i)
{
    return p->views ? p->views[i] : whole_view(p, i);
}

/* Notes a sample that no trained token is left of once it is cut. */
static void note_cut(mt_dataset *d, struct part *p, uint64_t i)
{
    char where[4200];
    place_of(p, i, where, sizeof(where));
    p->pub.stats.n_untrained++;
    d->n_cut++;
    mt_note_place(d->cut_at, sizeof(d->cut_at), where);
}

static int add_overlong(mt_dataset *d, struct part *p, uint64_t i,
                        const struct mt_dataset_params *dp, struct mt_err *err)
{
    uint64_t start = p->shard.offsets[i], end = p->shard.offsets[i + 1];
    struct mt_dataset_stats *s = &p->pub.stats;
    char where[4200];
    if (p->shard.header->flags & MT_SHARD_PLAIN_TEXT)
        return split(p, start, end, dp->seq_len, err);
    place_of(p, i, where, sizeof(where));
    mt_note_place(d->overlong_at, sizeof(d->overlong_at), where);
    s->n_overlong++;
    switch (docs_of(p) > 1 && dp->overlong != MT_OVERLONG_DROP ? MT_OVERLONG_ERROR : dp->overlong) {
    case MT_OVERLONG_SPLIT:
        s->n_split++;
        return split(p, start, end, dp->seq_len, err);
    case MT_OVERLONG_TRUNCATE:
        if (!mt_shard_count_trained(&p->shard, start + 1, dp->seq_len - 1)) {
            note_cut(d, p, i);
            return 0;
        }
        s->n_truncated++;
        return add_view(p, (struct view){.start = start, .len = (uint32_t)dp->seq_len}, err);
    case MT_OVERLONG_DROP:
        s->n_dropped++;
        return 0;
    case MT_OVERLONG_ERROR:
    default:
        return 0; /* so that all are counted before the error is reported */
    }
}

/* Keeps the tokens of an item without those in its gap. */
static int join(struct part *p, struct view *v, struct mt_err *err)
{
    const uint32_t *tokens = p->shard.tokens + v->start;
    size_t rest = v->len - v->chosen;
    if (!mt_grow(&p->joined, &p->cap_joined, p->n_joined + v->len, sizeof(*p->joined)))
        return mt_fail_nomem(err, "cut answers", (p->n_joined + v->len) * sizeof(*p->joined));
    v->joined = p->n_joined;
    memcpy(p->joined + p->n_joined, tokens, v->chosen * sizeof(*tokens));
    memcpy(p->joined + p->n_joined + v->chosen, tokens + v->chosen + v->gap, rest * sizeof(*tokens));
    p->n_joined += v->len;
    return 0;
}

static bool equal_answers(const struct part *p, const struct view *v)
{
    const uint32_t *tokens = p->shard.tokens + v->start;
    return 2 * v->chosen == v->len && !memcmp(tokens, tokens + v->chosen + v->gap, v->chosen * sizeof(*tokens));
}

static uint64_t count_answer(const struct part *p, uint64_t start, size_t n)
{
    return n ? mt_shard_count_trained(&p->shard, start + 1, n - 1) : 0;
}

/* An item with data.overlong = truncate: each answer of a pair keeps its first seq_len / 2 tokens, as TRL's with a
 * max_length of that; a rated one seq_len. */
static int add_cut_item(mt_dataset *d, struct part *p, uint64_t i, size_t seq_len, struct mt_err *err)
{
    const uint64_t *at = p->shard.offsets + 2 * i;
    struct mt_dataset_stats *s = &p->pub.stats;
    size_t chosen = at[1] - at[0], rest = at[2] - at[1], most = chosen && rest ? seq_len / 2 : seq_len;
    if (chosen <= most && rest <= most)
        return add_view(p, whole_view(p, i), err);
    struct view v = {.start = at[0], .chosen = (uint32_t)MT_MIN(chosen, most)};
    v.gap = (uint32_t)chosen - v.chosen;
    v.len = v.chosen + (uint32_t)MT_MIN(rest, most);
    uint64_t good = count_answer(p, v.start, v.chosen), bad = count_answer(p, at[1], v.len - v.chosen);
    s->n_overlong++;
    if ((chosen && !good) || (rest && !bad)) {
        note_cut(d, p, 2 * i);
        return 0;
    }
    if (equal_answers(p, &v)) {
        s->n_equal++;
        return 0;
    }
    s->n_truncated++;
    int rc = v.gap ? join(p, &v, err) : 0;
    return rc ?: push_view(p, v, good + bad, err);
}

/* The longest sample that stays as it is, whatever it is. */
static size_t uncut_len(const struct part *p, const struct mt_dataset_params *dp)
{
    return docs_of(p) > 1 && dp->overlong == MT_OVERLONG_TRUNCATE ? dp->seq_len / 2 : dp->seq_len;
}

/* The samples of training: the shard's, with overlong ones treated as data.overlong says. */
static int view_part(mt_dataset *d, struct part *p, const struct mt_dataset_params *dp,
                     struct mt_err *err)
{
    const struct mt_shard_header *h = p->shard.header;
    struct mt_dataset_stats *s = &p->pub.stats;
    int rc = 0;
    s->format = h->format;
    s->n_untrained = h->n_untrained;
    s->answers = h->flags & MT_SHARD_ANSWERS;
    s->rollouts = h->flags & MT_SHARD_ROLLOUTS;
    s->n_equal = h->n_equal;
    s->longest = h->flags & MT_SHARD_PLAIN_TEXT ? MT_MIN(h->max_len, dp->seq_len) : h->max_len;
    if (h->max_len <= uncut_len(p, dp)) {
        s->n_samples = h->n_samples / docs_of(p);
        s->n_tokens = h->n_tokens;
        s->n_trained = h->n_trained;
        s->max_len = h->max_len;
        return 0;
    }
    for (uint64_t k = docs_of(p), i = 0; i < h->n_samples / k && !rc; i++) {
        uint64_t len = p->shard.offsets[k * (i + 1)] - p->shard.offsets[k * i];
        if (k > 1 && dp->overlong == MT_OVERLONG_TRUNCATE)
            rc = add_cut_item(d, p, i, dp->seq_len, err);
        else if (len > dp->seq_len)
            rc = add_overlong(d, p, k * i, dp, err);
        else if (len || k > 1)
            rc = add_view(p, whole_view(p, i), err);
    }
    return rc;
}

static void add_stats(mt_dataset *d, const struct mt_dataset_stats *s)
{
    struct mt_dataset_stats *sum = &d->stats;
    sum->n_samples += s->n_samples;
    sum->n_tokens += s->n_tokens;
    sum->n_trained += s->n_trained;
    sum->max_len = MT_MAX(sum->max_len, s->max_len);
    sum->n_overlong += s->n_overlong;
    sum->n_dropped += s->n_dropped;
    sum->n_truncated += s->n_truncated;
    sum->n_split += s->n_split;
    sum->n_untrained += s->n_untrained;
    sum->n_equal += s->n_equal;
    sum->answers |= s->answers;
    sum->rollouts |= s->rollouts;
    sum->longest = MT_MAX(sum->longest, s->longest);
    sum->from_cache &= s->from_cache;
    sum->format = !sum->format || !strcmp(sum->format, s->format) ? s->format : "mixed";
}

/* Samples without a trained token that are left out without refusing the data: a few of a small set are a slip. */
static uint64_t most_untrained(const struct mt_dataset_params *p, uint64_t n)
{
    enum { FEW = 3, SHARE = 10 };
    uint64_t most = p->max_untrained.is_ratio ? (uint64_t)(p->max_untrained.ratio * (double)n)
                                              : (uint64_t)p->max_untrained.count;
    return MT_MAX(most, MT_MIN((uint64_t)FEW, n / SHARE));
}

static int check_untrained(const mt_dataset *d, const struct mt_dataset_params *p, struct mt_err *err)
{
    const struct mt_dataset_stats *s = &d->stats;
    const struct mt_note *refused = mt_notes_find(&d->notes, "refused"), *roles = mt_notes_find(&d->notes, "roles");
    const char *at = "";
    uint64_t all = s->n_samples + s->n_untrained;
    char why[700];
    snprintf(why, sizeof(why), ": %s (data.train_on; \"train\" or \"weight\" of their messages; labels)",
             roles ? roles->text : "no turn of them is trained");
    if (refused)
        snprintf(why, sizeof(why), ": of %llu of them %s", (unsigned long long)refused->n, refused->text);
    for (size_t i = 0; i < d->n_parts && !*at; i++)
        at = d->parts[i].shard.header->untrained_at;
    if (d->n_cut) {
        snprintf(why, sizeof(why), ": data.seq_len = %zu cuts %llu of them before the first token that is trained: raise it",
                 p->seq_len, (unsigned long long)d->n_cut);
        at = *at ? at : d->cut_at;
    }
    if (!s->n_samples)
        return mt_fail(err, MT_ERR_INPUT, -ENODATA, "no sample has a token to train on (%llu samples: %s)%s",
                       (unsigned long long)all, at, why);
    if (s->n_untrained > most_untrained(p, all))
        return mt_fail(err, MT_ERR_INPUT, -EINVAL,
                       "%llu of %llu samples have no token to train on (%s)%s, or raise data.max_untrained",
                       (unsigned long long)s->n_untrained, (unsigned long long)all, at, why);
    return 0;
}

static int check_answers(const mt_dataset *d, const struct mt_dataset_params *p, struct mt_err *err)
{
    const char *what = d->stats.rollouts ? "rollouts" : "answers with a preference";
    for (size_t i = 0; i < d->n_parts; i++)
        if (d->parts[i].pub.stats.answers != d->stats.answers || d->parts[i].pub.stats.rollouts != d->stats.rollouts)
            return mt_fail(err, MT_ERR_INPUT, -EINVAL, "%s holds no %s, other files do: train on them apart", d->parts[i].pub.path, what);
    if ((d->stats.answers || d->stats.rollouts) && p->overlong == MT_OVERLONG_SPLIT)
        return mt_fail(err, MT_ERR_USAGE, -EINVAL, "data.overlong = split: %s are not split; set it to truncate, drop or error", what);
    return 0;
}

/* Errors that are known only when all files have been read. */
static int check_whole(const mt_dataset *d, const struct mt_dataset_params *p, struct mt_err *err)
{
    const struct mt_dataset_stats *s = &d->stats;
    int rc = check_answers(d, p, err);
    if (rc)
        return rc;
    if (s->n_overlong && p->overlong == MT_OVERLONG_ERROR)
        return mt_fail(err, MT_ERR_INPUT, -E2BIG,
                       "%llu sample%s longer than data.seq_len = %zu, the longest has %llu tokens (%s): raise it, or set "
                       "data.overlong = %s",
                       (unsigned long long)s->n_overlong, s->n_overlong == 1 ? " is" : "s are", p->seq_len,
                       (unsigned long long)s->longest, d->overlong_at,
                       s->answers ? "truncate or drop" : "truncate, drop or split");
    if (!s->n_samples && s->n_dropped + s->n_overlong)
        return mt_fail(err, MT_ERR_INPUT, -E2BIG,
                       "no sample is left: %llu are longer than data.seq_len = %zu (%s): raise it",
                       (unsigned long long)s->n_overlong, p->seq_len, d->overlong_at);
    if (!s->n_samples && !s->n_untrained)
        return mt_fail(err, MT_ERR_INPUT, -ENODATA, "the files of %s hold no samples%s", p->key ? p->key : "data.train",
                       s->n_equal ? " but pairs of equal answers" : "");
    if (s->n_samples > INT32_MAX / (s->answers ? 4 : 1))
        return mt_fail(err, MT_ERR_INPUT, -E2BIG, "%llu samples are too many",
                       (unsigned long long)s->n_samples);
    return check_untrained(d, p, err);
}

static uint64_t hash_options(const struct mt_dataset_params *p)
{
    return XXH3_64bits_withSeed(&p->seq_len, sizeof(p->seq_len), (uint64_t)p->overlong);
}

static uint64_t add_part(const mt_dataset *d, size_t part, uint64_t source, uint64_t h)
{
    h = XXH3_64bits_withSeed(&source, sizeof(source), h);
    return XXH3_64bits_withSeed(&d->parts[part].pub.weight, sizeof(double), h);
}

static uint64_t hash_whole(const mt_dataset *d, const struct mt_dataset_params *p)
{
    uint64_t h = hash_options(p);
    for (size_t i = 0; i < d->n_parts; i++)
        h = add_part(d, i, d->parts[i].shard.header->content_sum, h);
    return h | 1;
}

static int open_parts(mt_dataset *d, const struct mt_dataset_params *p, struct mt_err *err)
{
    MT_FREED struct mt_shard *shards = mt_calloc(d->files.n, sizeof(*shards));
    MT_FREED bool *made = mt_calloc(d->files.n, sizeof(*made));
    d->parts = mt_calloc(d->files.n, sizeof(*d->parts));
    int rc = shards && made && d->parts ? 0 : mt_fail_nomem(err, "a data set", d->files.n * 400);
    rc = rc ?: mt_cache_open_shards(shards, made, &d->files, p, err);
    d->stats.from_cache = true;
    for (size_t i = 0; shards && d->parts && i < d->files.n; i++) {
        struct part *part = &d->parts[d->n_parts++];
        part->shard = shards[i]; /* also on failure, so that it is closed with the others */
        part->pub = (struct mt_data_source){.path = d->files.items[i].path,
                                            .weight = d->files.items[i].weight,
                                            .first = d->stats.n_samples};
        part->pub.stats.from_cache = made && !made[i];
        rc = rc ?: view_part(d, part, p, err);
        if (!rc)
            add_stats(d, &part->pub.stats);
        rc = rc ?: mt_notes_add(&d->notes, part->shard.header->notes, part->pub.path, err);
    }
    if (!rc && !p->prepared_only)
        mt_notes_say(&d->notes);
    return rc;
}

/* Files of a dataset_info.json have columns of their own. */
static int name_columns(struct mt_source_list *l, const struct mt_cfg_list *columns, struct mt_err *err)
{
    int rc = columns && columns->n ? mt_columns_check(columns, err) : 0;
    for (size_t i = 0; i < l->n && columns && columns->n && !rc; i++)
        l->items[i].columns = l->items[i].entry ? NULL : columns;
    return rc;
}

/* What samples are to a policy's objective: of all of them, as advantages are relative to a group's. */
static int weigh_rollouts(mt_dataset *d, const struct mt_policy_keys *keys, struct mt_err *err)
{
    uint64_t n = d->stats.n_samples, at = 0;
    MT_FREED struct mt_rollout_sample *s = mt_calloc(n, sizeof(*s));
    uint32_t alone = 0;
    char place[4200];
    d->rollouts = mt_calloc(n, sizeof(*d->rollouts));
    int rc = s && d->rollouts ? 0 : mt_fail_nomem(err, "rollouts", n * (sizeof(*s) + sizeof(*d->rollouts)));
    for (size_t k = 0; k < d->n_parts && !rc; k++)
        for (uint64_t i = 0; i < d->parts[k].pub.stats.n_samples && !rc; i++, at++) {
            const union mt_rollout_values *v = &d->parts[k].shard.values[view_at(&d->parts[k], i).start];
            double t = isnan(v->of.temperature) ? keys->temperature : (double)v->of.temperature;
            s[at] = mt_rollout_sample_of(v, (uint32_t)k, (uint32_t)at);
            if (fabs(t - keys->temperature) > 1e-6)
                rc = mt_fail(err, MT_ERR_INPUT, -EINVAL, "%s was sampled at temperature %g, policy.temperature is %g: set it to that",
                             mt_dataset_place(d, at, place, sizeof(place)), t, keys->temperature);
        }
    if (!rc && mt_rollouts_weigh(d->rollouts, s, n, keys, &alone))
        rc = mt_fail(err, MT_ERR_INPUT, -EINVAL, "%s is the only rollout of its group: an advantage is relative to others of the same "
                     "prompt; leave it out, sample more, or give it an \"advantage\"", mt_dataset_place(d, alone, place, sizeof(place)));
    return rc;
}

int mt_dataset_open(mt_dataset **out, const struct mt_dataset_params *p, struct mt_err *err)
{
    struct mt_dataset_params q = *p;
    mt_dataset *d = mt_calloc(1, sizeof(*d));
    if (!d)
        return mt_fail_nomem(err, "a data set", sizeof(*d));
    q.n_processes = MT_MAX(q.n_processes, 1);
    d->cache_dir = strdup(p->cache_dir);
    int rc = d->cache_dir ? mt_sources_resolve(&d->files, p->files, p->key ? p->key : "data.train", err)
                         : mt_fail_nomem(err, "a data set", 4096);
    rc = rc ?: name_columns(&d->files, p->columns, err)
            ?: open_parts(d, &q, err)
            ?: check_whole(d, p, err);
    if (!rc && d->stats.rollouts && p->policy)
        rc = weigh_rollouts(d, p->policy, err);
    if (rc) {
        mt_dataset_destroy(&d);
        return rc;
    }
    d->hash = hash_whole(d, p);
    d->params = q;
    d->params.cache_dir = d->cache_dir;
    *out = d;
    return 0;
}

void mt_dataset_destroy(mt_dataset **dataset)
{
    mt_dataset *d = *dataset;
    if (!d)
        return;
    for (size_t i = 0; i < d->n_parts; i++) {
        mt_shard_close(&d->parts[i].shard);
        free(d->parts[i].views);
        free(d->parts[i].joined);
    }
    mt_sources_finish(&d->files);
    mt_notes_finish(&d->notes);
    free(d->parts);
    free(d->rollouts);
    free(d->cache_dir);
    free(d);
    *dataset = NULL;
}

const struct mt_dataset_stats *mt_dataset_stats(const mt_dataset *d)
{
    return &d->stats;
}

const struct mt_notes *mt_dataset_notes(const mt_dataset *d)
{
    return &d->notes;
}

size_t mt_dataset_n_sources(const mt_dataset *d)
{
    return d->n_parts;
}

const struct mt_data_source *mt_dataset_source(const mt_dataset *d, size_t i)
{
    return &d->parts[i].pub;
}

uint64_t mt_dataset_hash(const mt_dataset *d)
{
    return d ? d->hash : 0;
}

size_t mt_dataset_sample(const mt_dataset *d, uint64_t i, const uint32_t **ids, uint8_t *trained)
{
    const struct part *p = part_of(d, i);
    struct view v = view_at(p, i - p->pub.first);
    if (ids)
        *ids = v.gap ? p->joined + v.joined : p->shard.tokens + v.start;
    for (uint64_t k = 0, at = v.start; trained && k < v.len; k++, at++) {
        at += v.gap && k == v.chosen ? v.gap : 0;
        trained[k] = p->shard.mask[at / 8] >> (at % 8) & 1;
    }
    return v.len;
}

size_t mt_dataset_chosen(const mt_dataset *d, uint64_t i)
{
    const struct part *p = part_of(d, i);
    return view_at(p, i - p->pub.first).chosen;
}

/* The mask's bits, whose first one is never a target. */
static uint64_t hash_mask(const struct mt_shard *s, uint64_t from, size_t n, uint64_t h)
{
    uint8_t part[256];
    for (size_t i = 0; i < n;) {
        size_t k = 0;
        for (; k < sizeof(part) && i < n; k++, i++)
            part[k] = i && s->mask[(from + i) / 8] >> ((from + i) % 8) & 1;
        h = XXH3_64bits_withSeed(part, k, h);
    }
    return h;
}

uint64_t mt_dataset_sample_hash(const mt_dataset *d, uint64_t i, bool chosen)
{
    const struct part *p = part_of(d, i);
    struct view v = view_at(p, i - p->pub.first);
    size_t n = v.len;
    if (p->pub.stats.answers) {
        v.start += chosen ? 0 : v.chosen + v.gap;
        n = chosen ? v.chosen : v.len - v.chosen;
    }
    return hash_mask(&p->shard, v.start, n, XXH3_64bits(p->shard.tokens + v.start, n * sizeof(uint32_t)));
}

int mt_dataset_read(const mt_dataset *d, uint64_t i, uint32_t *ids, uint8_t *trained, size_t *n, struct mt_err *err)
{
    const struct part *p = part_of(d, i);
    struct view v = view_at(p, i - p->pub.first);
    *n = v.len;
    if (!v.gap)
        return mt_shard_read(&p->shard, v.start, v.len, ids, trained, err);
    int rc = mt_shard_read(&p->shard, v.start, v.chosen, ids, trained, err);
    return rc ? rc : mt_shard_read(&p->shard, v.start + v.chosen + v.gap, v.len - v.chosen, ids + v.chosen,
                                   trained + v.chosen, err);
}

const struct mt_rollout *mt_dataset_rollout(const mt_dataset *d, uint64_t i)
{
    return d->rollouts ? &d->rollouts[i] : NULL;
}

int mt_dataset_read_values(const mt_dataset *d, uint64_t i, union mt_rollout_values *values, struct mt_err *err)
{
    const struct part *p = part_of(d, i);
    struct view v = view_at(p, i - p->pub.first);
    return mt_shard_read_values(&p->shard, v.start, v.len, values, err);
}

const char *mt_dataset_place(const mt_dataset *d, uint64_t i, char *buf, size_t len)
{
    const struct part *p = part_of(d, i);
    uint64_t start = view_at(p, i - p->pub.first).start, lo = 0, hi = p->shard.header->n_samples;
    while (hi - lo > 1) { /* the last sample of the shard that begins at or before it */
        uint64_t mid = (lo + hi) / 2;
        if (p->shard.offsets[mid] <= start)
            lo = mid;
        else
            hi = mid;
    }
    place_of(p, lo, buf, len);
    return buf;
}
