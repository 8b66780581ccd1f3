/* SPDX-License-Identifier: Apache-2.0 */
/* data prepare, data stats; data show is in data_show.c. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#include "base/json.h"
#include "base/log.h"
#include "base/mem.h"
#include "base/sort.h"
#include "cli.h"
#include "data/dataset.h"
#include "train/inputs.h"

/** What `data stats` tells of answers with a preference. Lengths are trained tokens, without those of the prompt. */
struct cli_pairs {
    uint64_t n;          /* pairs */
    uint64_t n_equal;    /* pairs left out, as their answers are equal */
    uint64_t n_longer, n_ties; /* pairs whose chosen answer is longer; whose answers are equally long */
    uint64_t n_reversed; /* pairs whose answers another pair has the other way round */
    uint64_t n_good, n_bad;              /* answers: chosen or rated good; rejected or rated bad */
    uint64_t good_tokens, bad_tokens;    /* of these */
};

/* Of a pair, the hashes of its chosen and its rejected answer, each with the prompt; of a sample, the hash of its
 * tokens and its place in the data. */
struct hashed {
    uint64_t hash, other;
};

static int order(const void *a, const void *b)
{
    const struct hashed *x = a, *y = b;
    return mt_compare_u64(&x->hash, &y->hash) ?: mt_compare_u64(&x->other, &y->other);
}

static uint64_t ones(const uint8_t *mask, size_t n)
{
    uint64_t sum = 0;
    for (size_t i = 0; i < n; i++)
        sum += mask[i] != 0;
    return sum;
}

/* Adds item i. pair: where it goes if it is one. */
static void add_item(struct cli_pairs *p, const mt_dataset *d, uint64_t i, uint8_t *mask, struct hashed *pair)
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
    *pair = (struct hashed){XXH3_64bits(ids, first * sizeof(*ids)),
                            XXH3_64bits(ids + first, (n - first) * sizeof(*ids))};
    p->n++;
    p->n_longer += good > bad;
    p->n_ties += good == bad;
}

/* Counts; all 0 if the data have no answers. */
static int cli_pairs_count(const mt_dataset *d, struct cli_pairs *out, struct mt_err *err)
{
    const struct mt_dataset_stats *s = mt_dataset_stats(d);
    *out = (struct cli_pairs){.n_equal = s->n_equal};
    if (!s->answers)
        return 0;
    MT_FREED struct hashed *pairs = mt_calloc(s->n_samples, sizeof(*pairs));
    MT_FREED uint8_t *mask = mt_calloc(s->max_len, 1);
    int rc = pairs && mask ? 0 : mt_fail_nomem(err, "statistics of pairs", s->n_samples * sizeof(*pairs));
    for (uint64_t i = 0; i < s->n_samples && !rc; i++)
        add_item(out, d, i, mask, &pairs[out->n]);
    if (!rc)
        qsort(pairs, out->n, sizeof(*pairs), order);
    for (uint64_t i = 0; i < out->n && !rc; i++) {
        struct hashed other = {pairs[i].other, pairs[i].hash};
        out->n_reversed += bsearch(&other, pairs, out->n, sizeof(*pairs), order) != NULL;
    }
    return rc;
}

static double over(uint64_t part, uint64_t whole)
{
    return whole ? (double)part / (double)whole : 0;
}

static void cli_pairs_print(const struct cli_pairs *p)
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

enum { BARS = 24, BAR_WIDTH = 40 };

/* What `data stats` prints beyond what the data set counts itself. */
struct tally {
    uint64_t bins[BARS], bin_width;
    uint64_t n_duplicates; /* samples with the tokens of an earlier one */
    uint64_t *by_source;   /* the same for each file; owned */
    uint64_t n_leaked;     /* evaluation samples that are training samples too */
    size_t p50, p90, p99;
    struct cli_pairs pairs;
};

static double share(uint64_t part, uint64_t whole)
{
    return whole ? 100.0 * (double)part / (double)whole : 0;
}

static int print_prepared(const struct mt_inputs *in)
{
    const struct mt_sampler_stats *rows = mt_sampler_stats(in->sampler);
    for (size_t i = 0; i < mt_dataset_n_sources(in->data); i++) {
        const struct mt_data_source *src = mt_dataset_source(in->data, i);
        printf("%s: %s, %llu samples, %llu tokens, %.1f%% trained%s\n", src->path, src->stats.format,
               (unsigned long long)src->stats.n_samples, (unsigned long long)src->stats.n_tokens,
               share(src->stats.n_trained, src->stats.n_tokens),
               src->stats.from_cache ? " (cached)" : "");
    }
    printf("%llu rows of %lld tokens, %.1f%% full; %llu steps a pass\n",
           (unsigned long long)rows->rows_per_epoch, (long long)in->cfg->numerics.seq_len, 100 * rows->efficiency,
           (unsigned long long)rows->steps_per_epoch);
    return 0;
}

/* Hashes of all samples, sorted; NULL: out of memory. */
static struct hashed *hashes(const mt_dataset *d, uint64_t *lengths)
{
    uint64_t n = mt_dataset_stats(d)->n_samples;
    struct hashed *h = mt_calloc(n, sizeof(*h));
    for (uint64_t i = 0; h && i < n; i++) {
        const uint32_t *ids;
        size_t len = mt_dataset_sample(d, i, &ids, NULL);
        h[i] = (struct hashed){XXH3_64bits(ids, len * sizeof(*ids)), i};
        if (lengths)
            lengths[i] = len;
    }
    if (h)
        qsort(h, n, sizeof(*h), order);
    return h;
}

static size_t source_of(const mt_dataset *d, uint64_t sample)
{
    size_t i = mt_dataset_n_sources(d) - 1;
    while (i && mt_dataset_source(d, i)->first > sample)
        i--;
    return i;
}

static void count_lengths(struct tally *t, uint64_t *lens, uint64_t n, uint64_t max_len)
{
    t->bin_width = mt_div_up(max_len + 1, BARS);
    for (uint64_t i = 0; i < n; i++)
        t->bins[lens[i] / t->bin_width]++;
    mt_sort_u64(lens, n);
    t->p50 = lens[n / 2];
    t->p90 = lens[n * 9 / 10];
    t->p99 = lens[n * 99 / 100];
}

static void count_duplicates(struct tally *t, const mt_dataset *d, const struct hashed *h)
{
    for (uint64_t i = 1; i < mt_dataset_stats(d)->n_samples; i++)
        if (h[i].hash == h[i - 1].hash) {
            t->n_duplicates++;
            t->by_source[source_of(d, h[i].other)]++;
        }
}

static int count(const struct mt_inputs *in, struct tally *t, struct mt_err *err)
{
    uint64_t n = mt_dataset_stats(in->data)->n_samples;
    MT_FREED uint64_t *lens = mt_calloc(n, sizeof(*lens));
    uint64_t n_eval = in->eval_data ? mt_dataset_stats(in->eval_data)->n_samples : 0;
    MT_FREED struct hashed *h = lens ? hashes(in->data, lens) : NULL;
    MT_FREED struct hashed *e = h && n_eval ? hashes(in->eval_data, NULL) : NULL;
    *t = (struct tally){.by_source = mt_calloc(mt_dataset_n_sources(in->data), sizeof(*t->by_source))};
    int rc = h && (e || !n_eval) && t->by_source
                 ? 0
                 : mt_fail_nomem(err, "statistics", n * (sizeof(*h) + sizeof(*lens)));
    if (!rc) {
        count_lengths(t, lens, n, mt_dataset_stats(in->data)->max_len);
        count_duplicates(t, in->data, h);
    }
    for (uint64_t i = 0; i < n_eval && !rc; i++)
        t->n_leaked += bsearch(&e[i], h, n, sizeof(*h), mt_compare_u64) != NULL;
    return rc ?: cli_pairs_count(in->data, &t->pairs, err);
}

static void print_histogram(const struct tally *t, uint64_t max_len)
{
    uint64_t most = 1;
    int first = 0;
    for (int i = 0; i < BARS; i++)
        most = MT_MAX(most, t->bins[i]);
    while (first + 1 < BARS && !t->bins[first])
        first++;
    printf("\nLength in tokens       samples\n");
    for (int i = first; i < BARS && (uint64_t)i * t->bin_width <= max_len; i++) {
        int width = (int)((double)t->bins[i] / (double)most * BAR_WIDTH + 0.999);
        printf("%8llu - %-8llu %10llu  ", (unsigned long long)i * t->bin_width,
               (unsigned long long)(i + 1) * t->bin_width - 1, (unsigned long long)t->bins[i]);
        for (int k = 0; k < width; k++)
            putchar('#');
        putchar('\n');
    }
}

/* Samples of which something was noticed. */
static uint64_t n_noted(const struct mt_inputs *in, const char *key)
{
    const struct mt_note *note = mt_notes_find(mt_dataset_notes(in->data), key);
    return note ? note->n : 0;
}

static void print_stats(const struct mt_inputs *in, const struct tally *t, bool refused)
{
    const struct mt_dataset_stats *d = mt_dataset_stats(in->data);
    const struct mt_sampler_stats *rows = mt_sampler_stats(in->sampler);
    printf("Source                             samples       tokens  trained   longest  over-long  duplicates  weight\n");
    for (size_t i = 0; i < mt_dataset_n_sources(in->data); i++) {
        const struct mt_data_source *src = mt_dataset_source(in->data, i);
        size_t n = strlen(src->path);
        printf("%-30s %11llu %12llu  %6.1f%%  %8llu  %9llu  %10llu  %6g\n", src->path + (n > 30 ? n - 30 : 0),
               (unsigned long long)src->stats.n_samples, (unsigned long long)src->stats.n_tokens,
               share(src->stats.n_trained, src->stats.n_tokens),
               (unsigned long long)src->stats.longest, (unsigned long long)src->stats.n_overlong,
               (unsigned long long)t->by_source[i], src->weight);
    }
    print_histogram(t, d->max_len);
    printf("\nSamples     %llu (%s); half are up to %zu tokens, 90%% up to %zu, 99%% up to %zu; the "
           "longest %llu\n",
           (unsigned long long)d->n_samples, d->format, t->p50, t->p90, t->p99,
           (unsigned long long)d->longest);
    printf("Tokens      %llu, %.1f%% trained\n", (unsigned long long)d->n_tokens,
           share(d->n_trained, d->n_tokens));
    printf("Over-long   %llu of more than data.seq_len = %lld: %llu truncated, %llu dropped, %llu split%s\n",
           (unsigned long long)d->n_overlong, (long long)in->cfg->numerics.seq_len,
           (unsigned long long)d->n_truncated, (unsigned long long)d->n_dropped,
           (unsigned long long)d->n_split,
           refused && d->n_overlong ? " here, for these figures: with data.overlong = error a run refuses them" : "");
    printf("Left out    %llu samples without a trained token\n", (unsigned long long)d->n_untrained);
    cli_pairs_print(&t->pairs);
    if (n_noted(in, "endless"))
        printf("No end      %llu samples train no token that ends a turn\n", (unsigned long long)n_noted(in, "endless"));
    if (n_noted(in, "special"))
        printf("Special     %llu samples write special tokens out in a message, which become those tokens\n",
               (unsigned long long)n_noted(in, "special"));
    printf("Duplicates  %llu samples (%.2f%%) have the tokens of another", (unsigned long long)t->n_duplicates,
           share(t->n_duplicates, d->n_samples));
    if (in->eval_data)
        printf("; %llu evaluation samples are training samples", (unsigned long long)t->n_leaked);
    printf("\nEvaluation  %llu samples\n", (unsigned long long)in->held_out.n);
    printf("Packing     %llu rows of %lld tokens, %.2f%% full, %.1f samples a row at most; %llu steps a "
           "pass\n",
           (unsigned long long)rows->n_rows, (long long)in->cfg->numerics.seq_len, 100 * rows->efficiency,
           (double)rows->max_docs_per_row, (unsigned long long)rows->steps_per_epoch);
}

static void add_pairs(cJSON *o, const struct cli_pairs *p)
{
    mt_json_put(o, "pairs=%f, equal_pairs=%f, reversed_pairs=%f, chosen_longer=%f, length_ties=%f", (double)p->n,
                (double)p->n_equal, (double)p->n_reversed, (double)p->n_longer, (double)p->n_ties);
    mt_json_put(o, "good_answers=%f, bad_answers=%f, good_tokens=%f, bad_tokens=%f", (double)p->n_good, (double)p->n_bad,
                (double)p->good_tokens, (double)p->bad_tokens);
}

static void add_notes(cJSON *o, const struct mt_notes *l)
{
    char text[5200];
    cJSON *list = cJSON_AddArrayToObject(o, "notes");
    for (size_t i = 0; i < l->n; i++)
        if (l->items[i].level != 'y')
            mt_json_append(list, cJSON_CreateString(mt_note_print(&l->items[i], text, sizeof(text))));
}

static int print_stats_json(const struct mt_inputs *in, const struct tally *t, struct mt_err *err)
{
    const struct mt_dataset_stats *d = mt_dataset_stats(in->data);
    const struct mt_sampler_stats *rows = mt_sampler_stats(in->sampler);
    mt_json_begin();
    MT_JSON_FREED cJSON *o = cJSON_CreateObject();
    cJSON *list = cJSON_AddArrayToObject(o, "sources");
    for (size_t i = 0; i < mt_dataset_n_sources(in->data); i++) {
        const struct mt_data_source *src = mt_dataset_source(in->data, i);
        mt_json_append(list, mt_json_put(NULL, "path=%s, format=%s, samples=%f, tokens=%f, trained=%f, longest=%f, "
                                         "overlong=%f, duplicates=%f, weight=%f", src->path, src->stats.format,
                                         (double)src->stats.n_samples, (double)src->stats.n_tokens,
                                         (double)src->stats.n_trained, (double)src->stats.longest,
                                         (double)src->stats.n_overlong, (double)t->by_source[i], src->weight));
    }
    mt_json_put(o, "samples=%f, tokens=%f, trained=%f, longest=%f, overlong=%f, untrained=%f, endless=%f, special=%f",
                (double)d->n_samples, (double)d->n_tokens, (double)d->n_trained, (double)d->longest,
                (double)d->n_overlong, (double)d->n_untrained, (double)n_noted(in, "endless"),
                (double)n_noted(in, "special"));
    add_notes(o, mt_dataset_notes(in->data));
    if (d->answers)
        add_pairs(o, &t->pairs);
    mt_json_put(o, "duplicates=%f, leaked=%f, eval_samples=%f, p50=%f, p90=%f, p99=%f, rows=%f, efficiency=%f, "
                "steps_per_epoch=%f, bin_width=%f", (double)t->n_duplicates, (double)t->n_leaked,
                (double)in->held_out.n, (double)t->p50, (double)t->p90, (double)t->p99,
                (double)rows->n_rows, rows->efficiency, (double)rows->steps_per_epoch, (double)t->bin_width);
    cJSON *bins = cJSON_AddArrayToObject(o, "histogram");
    for (int i = 0; i < BARS; i++)
        mt_json_append(bins, cJSON_CreateNumber((double)t->bins[i]));
    MT_FREED char *text = mt_json_print(o, true);
    bool complete = text && mt_json_complete();
    if (complete)
        printf("%s\n", text);
    return complete ? 0 : mt_fail_nomem(err, "the counts", 0);
}

static int stats(const struct mt_inputs *in, bool json, bool refused, struct mt_err *err)
{
    struct tally t;
    int rc = count(in, &t, err);
    if (!rc && json)
        rc = print_stats_json(in, &t, err);
    else if (!rc)
        print_stats(in, &t, refused);
    free(t.by_source);
    return rc;
}

/* Samples that data.overlong or data.max_untrained would refuse are shown and counted. */
static int refuse_nothing(struct mt_config *cfg, struct mt_err *err)
{
    const char *overlong = strcmp(cfg->preference.loss, "off") ? "drop" : "truncate"; /* whose answers are cut to a half each */
    int rc = cfg->data.overlong == MT_OVERLONG_ERROR ? mt_config_override(cfg, "data.overlong", overlong, "data show", err) : 0;
    return rc ?: mt_config_override(cfg, "data.max_untrained", "100%", "data show", err);
}

/* Nothing is left at data.seq_len: opens the data again, with rows that hold more, to print what they are. */
static int open_whole(struct mt_inputs *in, struct mt_config *cfg, const char *why, struct mt_err *err)
{
    static const char *const keys[][2] = {{"data.seq_len", "1048576"}, {"train.tokens_per_step", "0"}, {"train.batch_size", "4"},
                                          {"train.micro_batch", "auto"}, {"data.overlong", "drop"}};
    int rc = 0;
    mt_inputs_finish(in);
    *in = (struct mt_inputs){0};
    fflush(stdout);
    mt_warn("%s; these figures are of whole samples, in rows of %s tokens", why, keys[0][1]);
    for (size_t i = 0; i < MT_ARRAY_LEN(keys) && !rc; i++)
        rc = mt_config_override(cfg, keys[i][0], keys[i][1], "data stats", err);
    return rc ?: mt_inputs_open(in, cfg, MT_RUN_TRAIN, NULL, err);
}

int cli_cmd_data(struct cli *cli, const struct cli_args *args, struct mt_err *err)
{
    const char *what = args->operands[0];
    MT_CLOSED_BY(mt_config_destroy) struct mt_config *cfg = NULL;
    MT_CLOSED_BY(mt_inputs_finish) struct mt_inputs in = {0};
    bool is_prepare = !strcmp(what, "prepare"), is_show = !strcmp(what, "show");
    bool is_stats = !strcmp(what, "stats"), json = cli_arg(args, "json") != NULL;
    if (!is_prepare && !is_show && !is_stats) {
        fprintf(stderr, "usage: megatrain data prepare|show|stats CONFIG.ini\n");
        return EXIT_USAGE;
    }
    int rc = cli_load_config(&cfg, MT_TO_TRAIN, args, err);
    /* show overlong samples instead of refusing them */
    bool refused = !rc && !is_prepare && cfg->data.overlong == MT_OVERLONG_ERROR;
    if (!rc && !is_prepare)
        rc = refuse_nothing(cfg, err);
    rc = rc ?: mt_inputs_open(&in, cfg, MT_RUN_TRAIN, NULL, err);
    if ((rc == -ENODATA || rc == -E2BIG) && is_stats && cfg->numerics.seq_len < 1 << 20) {
        struct mt_err why = *err;
        if (open_whole(&in, cfg, why.msg, err)) /* it was not the length: the first reason is the true one */
            *err = why;
        else
            rc = 0;
    }
    rc = rc ?: mt_inputs_lay_out_steps(&in, &in.numerics, err);
    if (!rc && is_prepare)
        rc = print_prepared(&in);
    else if (!rc && is_stats)
        rc = stats(&in, json, refused, err);
    else if (!rc)
        rc = cli_data_show(cli, args, &in, err);
    return rc;
}
