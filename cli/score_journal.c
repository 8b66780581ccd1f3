/* SPDX-License-Identifier: Apache-2.0 */
#include "score_journal.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <xxhash.h>

#include "base/fs.h"
#include "base/mem.h"

struct header {
    char magic[8];
    uint64_t key;
};

struct block_header {
    uint32_t n_samples, n_tokens;
    uint64_t sum; /* XXH3 of what follows: samples, lengths, tokens */
};

static const char MAGIC[8] = "MTSCORE1";

static size_t block_bytes(const struct block_header *h)
{
    return (size_t)h->n_samples * 2 * sizeof(uint32_t) + (size_t)h->n_tokens * sizeof(struct score_token);
}

/* Keeps a block in memory. -EINVAL: it is none of these samples. */
static int keep(struct score_journal *j, const struct score_block *b, struct mt_err *err)
{
    size_t at = j->n_tokens, all = 0;
    for (uint32_t i = 0; i < b->n_samples; i++) {
        all += b->length[i];
        if (b->sample[i] >= j->n_samples || j->sample[b->sample[i]].done)
            return -EINVAL;
    }
    if (all != b->n_tokens)
        return -EINVAL;
    if (!mt_grow(&j->token, &j->cap_tokens, at + b->n_tokens + 1, sizeof(*j->token)))
        return mt_fail_nomem(err, "scores", (at + b->n_tokens) * sizeof(*j->token));
    memcpy(j->token + at, b->token, b->n_tokens * sizeof(*j->token));
    j->n_tokens += b->n_tokens;
    for (uint32_t i = 0; i < b->n_samples; at += b->length[i++])
        j->sample[b->sample[i]] = (struct score_sample){at, b->length[i], true};
    return 0;
}

/* Takes in the whole blocks of text; *end: where they end. */
static int take_in(struct score_journal *j, const char *text, size_t len, size_t *end, struct mt_err *err)
{
    struct block_header h;
    int rc = 0;
    for (*end = sizeof(struct header); !rc && len - *end >= sizeof(h);) {
        memcpy(&h, text + *end, sizeof(h));
        const char *p = text + *end + sizeof(h);
        size_t bytes = block_bytes(&h);
        if (len - *end - sizeof(h) < bytes || XXH3_64bits(p, bytes) != h.sum)
            break;
        MT_FREED char *copy = NULL; /* aligned */
        if ((rc = MT_NEW(&copy, bytes, "scores", err)))
            return rc;
        memcpy(copy, p, bytes);
        const uint32_t *sample = (const void *)copy, *length = sample + h.n_samples;
        const void *token = length + h.n_samples;
        rc = keep(j, &(struct score_block){h.n_samples, h.n_tokens, sample, length, token}, err);
        *end += rc ? 0 : sizeof(h) + bytes;
    }
    return rc == -EINVAL ? 0 : rc;
}

/* A header and the n bytes that follow it, and syncs. */
static int write_out(struct score_journal *j, const void *header, size_t size, const void *p, size_t n,
                     struct mt_err *err)
{
    bool ok = fwrite(header, 1, size, j->f) == size && fwrite(p, 1, n, j->f) == n && !fflush(j->f) &&
              !fdatasync(fileno(j->f));
    return ok ? 0 : mt_fail(err, MT_ERR_RUNTIME, -EIO, "cannot write %s: %s: make room, and score goes on from there", j->path,
                             strerror(errno));
}

int score_journal_open(struct score_journal *j, const char *path, uint64_t key, size_t n_samples, struct mt_err *err)
{
    struct header h = {.key = key};
    MT_FREED char *text = NULL;
    size_t len = 0, end = 0;
    memcpy(h.magic, MAGIC, sizeof(MAGIC));
    *j = (struct score_journal){.path = path, .n_samples = n_samples};
    int rc = MT_NEW(&j->sample, n_samples, "scores", err);
    if (!rc && mt_path_exists(path))
        rc = mt_read_file(path, &text, &len, err);
    if (!rc && len >= sizeof(h) && memcmp(text, &h, sizeof(h)) != 0)
        rc = mt_fail(err, MT_ERR_USAGE, -EEXIST, "%s was begun with another model, other data or other settings: finish with "
                     "those, or give --force to start over", path);
    if (!rc && len >= sizeof(h))
        rc = take_in(j, text, len, &end, err);
    if (rc)
        return rc;
    j->f = fopen(path, end ? "r+be" : "wbe");
    if (!j->f || (end && (ftruncate(fileno(j->f), (off_t)end) || fseek(j->f, 0, SEEK_END))))
        return mt_fail(err, MT_ERR_RUNTIME, -errno, "cannot write %s: %s", path, strerror(errno));
    return write_out(j, &h, end ? 0 : sizeof(h), "", 0, err);
}

int score_journal_add(struct score_journal *j, const struct score_block *b, struct mt_err *err)
{
    struct block_header h = {b->n_samples, b->n_tokens, 0};
    size_t bytes = block_bytes(&h), list = b->n_samples * sizeof(uint32_t);
    MT_FREED char *p = mt_calloc(bytes + 1, 1);
    if (!p)
        return mt_fail_nomem(err, "scores", bytes);
    memcpy(p, b->sample, list);
    memcpy(p + list, b->length, list);
    memcpy(p + 2 * list, b->token, b->n_tokens * sizeof(*b->token));
    h.sum = XXH3_64bits(p, bytes);
    return keep(j, b, err) ?: write_out(j, &h, sizeof(h), p, bytes, err);
}

void score_journal_close(struct score_journal *j)
{
    mt_close_stream(&j->f);
    free(j->sample);
    free(j->token);
    *j = (struct score_journal){0};
}
