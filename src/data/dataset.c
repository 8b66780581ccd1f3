/* SPDX-License-Identifier: Apache-2.0 */
#include "data/dataset.h"

#include <fcntl.h>
#include <glob.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <unistd.h>
#include <xxhash.h>

#include "base/fs.h"
#include "base/mem.h"
#include "data/samples.h"
#include "data/shard.h"

struct mt_dataset {
    struct mt_shard shard;
    struct mt_dataset_stats stats;
    char format[24];
};

static int hash_file(XXH3_state_t *state, const char *path, struct mt_err *err)
{
    char buf[65536];
    FILE *f = fopen(path, "re");
    if (!f)
        return mt_fail(err, MT_ERR_INPUT, -errno, "cannot open data file %s: %s", path,
                       strerror(errno));
    size_t n;
    while ((n = fread(buf, 1, sizeof(buf), f)) > 0)
        XXH3_64bits_update(state, buf, n);
    int rc = ferror(f) ? mt_fail(err, MT_ERR_INPUT, -EIO, "cannot read %s", path) : 0;
    fclose(f);
    return rc;
}

/* The key of the cache: contents, names' endings and all options that change the tokens. */
static int hash_sources(uint64_t *out, const struct mt_dataset_params *p, const glob_t *files,
                        struct mt_err *err)
{
    XXH3_state_t *state = XXH3_createState();
    char options[256];
    int rc = 0;
    if (!state)
        return mt_fail_nomem(err, "a hash", 576);
    XXH3_64bits_reset(state);
    int n = snprintf(options, sizeof(options), "v1 %d %.64s %d %zu %zu", (int)p->format, p->tokenizer,
                     (int)p->overlong, p->seq_len, p->vocab);
    XXH3_64bits_update(state, options, (size_t)n);
    for (size_t i = 0; i < files->gl_pathc && !rc; i++) {
        const char *dot = strrchr(files->gl_pathv[i], '.');
        if (dot)
            XXH3_64bits_update(state, dot, strlen(dot));
        rc = hash_file(state, files->gl_pathv[i], err);
    }
    *out = XXH3_64bits_digest(state) | 1;
    XXH3_freeState(state);
    return rc;
}

static int expand(glob_t *g, const struct mt_cfg_list *files, struct mt_err *err)
{
    if (!files->n)
        return mt_fail(err, MT_ERR_USAGE, -EINVAL, "data.train names no file");
    for (int i = 0; i < files->n; i++) {
        const char *pattern = files->items[i], *colon = strrchr(pattern, ':');
        char *end = NULL;
        if (colon && (strtod(colon + 1, &end), end != colon + 1 && !*end) && !mt_path_exists(pattern))
            return mt_fail(err, MT_ERR_USAGE, -ENOTSUP,
                           "data.train: \"%s\": weights of files are not supported yet", pattern);
        int rc = glob(pattern, i ? GLOB_APPEND : 0, NULL, g);
        if (rc)
            return mt_fail(err, MT_ERR_INPUT, -ENOENT, "data.train: no file matches \"%s\"", pattern);
    }
    return 0;
}

static int make_shard(const struct mt_dataset_params *p, const glob_t *files, const char *path,
                      uint64_t hash, struct mt_err *err)
{
    struct mt_shard_writer w;
    struct mt_shard_header h = {.vocab = p->vocab, .source_hash = hash};
    int rc = mt_shard_writer_open(&w, path, err);
    struct mt_sample_reader r = {.p = p, .out = &w, .format = p->format};
    for (size_t i = 0; i < files->gl_pathc && !rc; i++)
        rc = mt_samples_read_file(&r, files->gl_pathv[i], err);
    if (!rc)
        rc = mt_samples_check(&r, err);
    if (!rc) {
        h.stats = r.stats;
        snprintf(h.format, sizeof(h.format), "%s",
                 r.plain_text ? "plain text" : mt_format_name(r.format));
        rc = mt_shard_writer_commit(&w, &h, err);
    }
    mt_samples_finish(&r);
    mt_shard_writer_finish(&w);
    return rc;
}

/* One run makes a shard while others wait for it. */
static int lock_cache(const char *dir, int *fd, struct mt_err *err)
{
    char *path = mt_path_join(dir, "lock");
    int rc = path ? mt_mkdir_p(dir, err) : -ENOMEM;
    *fd = rc ? -1 : open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    if (!rc && (*fd < 0 || flock(*fd, LOCK_EX)))
        rc = mt_fail(err, MT_ERR_RUNTIME, -errno, "cannot lock %s: %s", path, strerror(errno));
    free(path);
    return rc;
}

static int open_or_make(mt_dataset *d, const struct mt_dataset_params *p, const glob_t *files,
                        struct mt_err *err)
{
    char path[4096];
    uint64_t hash = 0;
    int fd = -1, rc = hash_sources(&hash, p, files, err);
    if (rc)
        return rc;
    snprintf(path, sizeof(path), "%.4000s/%016llx.tokens", p->cache_dir, (unsigned long long)hash);
    rc = lock_cache(p->cache_dir, &fd, err);
    bool cached = !rc && !mt_shard_open(&d->shard, path, hash, NULL);
    if (!rc && !cached) {
        rc = make_shard(p, files, path, hash, err);
        if (!rc)
            rc = mt_shard_open(&d->shard, path, hash, err);
    }
    if (fd >= 0)
        close(fd);
    if (rc)
        return rc;
    d->stats = d->shard.header->stats;
    memcpy(d->format, d->shard.header->format, sizeof(d->format) - 1);
    d->stats.format = d->format;
    d->stats.from_cache = cached;
    return 0;
}

int mt_dataset_open(mt_dataset **out, const struct mt_dataset_params *p, struct mt_err *err)
{
    glob_t files = {0};
    mt_dataset *d = mt_calloc(1, sizeof(*d));
    if (!d)
        return mt_fail_nomem(err, "a data set", sizeof(*d));
    int rc = expand(&files, p->files, err);
    if (!rc)
        rc = open_or_make(d, p, &files, err);
    globfree(&files);
    if (rc) {
        mt_dataset_destroy(&d);
        return rc;
    }
    *out = d;
    return 0;
}

void mt_dataset_destroy(mt_dataset **d)
{
    if (*d)
        mt_shard_close(&(*d)->shard);
    free(*d);
    *d = NULL;
}

const struct mt_dataset_stats *mt_dataset_stats(const mt_dataset *d)
{
    return &d->stats;
}

uint64_t mt_dataset_hash(const mt_dataset *d)
{
    return d->shard.header->source_hash;
}

size_t mt_dataset_sample(const mt_dataset *d, uint64_t i, const uint32_t **ids, uint8_t *trained)
{
    uint64_t at = d->shard.offsets[i], n = d->shard.offsets[i + 1] - at;
    if (ids)
        *ids = d->shard.tokens + at;
    for (uint64_t k = 0; trained && k < n; k++)
        trained[k] = d->shard.mask[(at + k) / 8] >> ((at + k) % 8) & 1;
    return n;
}

static uint64_t sample_hash(const mt_dataset *d, uint64_t i)
{
    const uint32_t *ids;
    size_t n = mt_dataset_sample(d, i, &ids, NULL);
    return XXH3_64bits(ids, n * sizeof(*ids));
}

static int compare_u64(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

/* The hash below which a sample is held out. */
static int split_limit(const mt_dataset *d, const char *eval, uint64_t *limit, struct mt_err *err)
{
    char *end = NULL;
    uint64_t n = d->shard.header->n_samples;
    double v = strtod(eval, &end);
    if (end != eval && !strcmp(end, "%") && v >= 0 && v < 100) {
        *limit = (uint64_t)(v / 100 * 0x1p64);
        return 0;
    }
    if (end == eval || *end || v < 0 || v >= (double)n)
        return mt_fail(err, MT_ERR_USAGE, -EINVAL,
                       "data.eval = %s: not a file, a percentage, or fewer samples than the %llu there "
                       "are",
                       eval, (unsigned long long)n);
    uint64_t *h = mt_calloc(n, sizeof(*h));
    if (!h)
        return mt_fail_nomem(err, "the evaluation split", n * sizeof(*h));
    for (uint64_t i = 0; i < n; i++)
        h[i] = sample_hash(d, i);
    qsort(h, n, sizeof(*h), compare_u64);
    *limit = v > 0 ? h[(uint64_t)v] : 0;
    free(h);
    return 0;
}

int mt_dataset_split(const mt_dataset *d, const char *eval, struct mt_split *train,
                     struct mt_split *held_out, struct mt_err *err)
{
    uint64_t n = d->shard.header->n_samples, limit = 0;
    int rc = eval[0] ? split_limit(d, eval, &limit, err) : 0;
    if (rc)
        return rc;
    *train = (struct mt_split){.samples = mt_calloc(n, sizeof(uint64_t))};
    *held_out = (struct mt_split){.samples = mt_calloc(n, sizeof(uint64_t))};
    if (!train->samples || !held_out->samples) {
        mt_split_finish(train);
        mt_split_finish(held_out);
        return mt_fail_nomem(err, "the evaluation split", 2 * n * sizeof(uint64_t));
    }
    for (uint64_t i = 0; i < n; i++) {
        struct mt_split *side = limit && sample_hash(d, i) < limit ? held_out : train;
        side->samples[side->n++] = i;
    }
    if (!train->n) {
        mt_split_finish(train);
        mt_split_finish(held_out);
        return mt_fail(err, MT_ERR_INPUT, -ENODATA, "data.eval = %s leaves nothing to train on", eval);
    }
    return 0;
}

void mt_split_finish(struct mt_split *s)
{
    free(s->samples);
    *s = (struct mt_split){0};
}
