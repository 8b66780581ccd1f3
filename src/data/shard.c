/* SPDX-License-Identifier: Apache-2.0 */
#include "data/shard.h"

#include <fcntl.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

#include "base/fs.h"
#include "base/mem.h"
#include "base/read_progress.h"
#include "base/sum64.h"

enum { HEADER = MT_SHARD_HEADER_BYTES };

_Static_assert(sizeof(struct mt_shard_header) <= HEADER, "the header must fit its page");

static int not_whole(struct mt_err *err, const char *path, const char *what)
{
    return mt_fail(err, MT_ERR_INPUT, -EINVAL, "%s: not a complete token shard: %s", path, what);
}

static int check(struct mt_shard *s, const char *path, uint64_t hash, struct mt_err *err)
{
    const struct mt_shard_header *h = s->map;
    if (memcmp(h->magic, "MTTOKENS", 8) || h->version != MT_SHARD_VERSION || h->token_bytes != 4)
        return not_whole(err, path, "another format or version");
    if (hash && h->source_hash != hash)
        return not_whole(err, path, "made from other sources");
    size_t tokens, mask, offsets, places, values = 0, total = HEADER;
    if (h->n_samples == UINT64_MAX || !mt_mul_size(h->n_tokens, 4, &tokens) ||
        !mt_mul_size(h->n_samples + 1, 8, &offsets) || !mt_mul_size(h->n_samples, 8, &places) ||
        (h->flags & MT_SHARD_ROLLOUTS && !mt_mul_size(h->n_tokens, sizeof(*s->values), &values)))
        return not_whole(err, path, "sizes overflow");
    tokens = mt_align_up(tokens, 8);
    mask = mt_align_up(mt_div_up(h->n_tokens, 8), 8);
    if (tokens < h->n_tokens || !mt_add_size(total, tokens, &total) ||
        !mt_add_size(total, mask, &total) || !mt_add_size(total, offsets, &total) ||
        !mt_add_size(total, values, &total) || !mt_add_size(total, places, &total) || total != s->map_bytes)
        return not_whole(err, path, "the size of the file does not match its header");
    s->header = h;
    s->tokens = (const uint32_t *)((const char *)s->map + HEADER);
    s->mask = (const uint8_t *)s->map + HEADER + tokens;
    s->offsets = (const uint64_t *)((const char *)s->map + HEADER + tokens + mask);
    s->values = values ? (const void *)(s->offsets + h->n_samples + 1) : NULL;
    s->places = s->offsets + h->n_samples + 1 + values / sizeof(*s->places);
    if (!memchr(h->format, 0, sizeof(h->format)) || !memchr(h->untrained_at, 0, sizeof(h->untrained_at)) ||
        !memchr(h->notes, 0, sizeof(h->notes)))
        return not_whole(err, path, "a name in it has no end");
    if (h->flags & MT_SHARD_ANSWERS && h->n_samples % 2)
        return not_whole(err, path, "a pair lacks an answer");
    for (uint64_t i = 0; i < h->n_samples; i++) {
        if (s->offsets[i] > s->offsets[i + 1])
            return not_whole(err, path, "sample offsets go backwards");
        if (s->offsets[i + 1] - s->offsets[i] > h->max_len)
            return not_whole(err, path, "a sample is longer than its header says");
    }
    if (s->offsets[0] != 0 || s->offsets[h->n_samples] != h->n_tokens)
        return not_whole(err, path, "samples do not cover the tokens");
    return 0;
}

/* For training, which must not read the mapping (mt_shard_read()). */
static int copy_offsets(struct mt_shard *s, struct mt_err *err)
{
    size_t n = s->header->n_samples + 1;
    s->own_offsets = mt_calloc(n, sizeof(*s->own_offsets));
    if (!s->own_offsets)
        return mt_fail_nomem(err, "the samples of a token shard", n * sizeof(*s->own_offsets));
    memcpy(s->own_offsets, s->offsets, n * sizeof(*s->own_offsets));
    s->offsets = s->own_offsets;
    return 0;
}

int mt_shard_open(struct mt_shard *s, const char *path, uint64_t hash, struct mt_err *err)
{
    struct stat st;
    *s = (struct mt_shard){0};
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0 || fstat(fd, &st)) {
        int e = errno;
        mt_close_fd(&fd);
        return mt_fail(err, MT_ERR_INPUT, -e, "cannot open %s: %s", path, strerror(e));
    }
    s->map_bytes = (size_t)st.st_size;
    s->map = s->map_bytes > HEADER ? mmap(NULL, s->map_bytes, PROT_READ, MAP_SHARED, fd, 0)
                                   : MAP_FAILED;
    if (s->map == MAP_FAILED) {
        close(fd);
        s->map = NULL;
        return not_whole(err, path, "too short, or it cannot be mapped");
    }
    s->fd = fd;
    int rc = check(s, path, hash, err) ?: copy_offsets(s, err);
    if (rc)
        mt_shard_close(s);
    return rc;
}

static int read_at(const struct mt_shard *s, void *dst, size_t n, size_t at, struct mt_err *err)
{
    int rc = mt_pread_all(s->fd, dst, n, at);
    return rc ? mt_fail(err, MT_ERR_RUNTIME, rc, "cannot read the token cache at byte %zu: %s", at,
                        rc == -ENODATA ? "the file was truncated" : strerror(-rc)) : 0;
}

/* The same, of what has been verified: whole blocks are read and compared. */
static int read_checked(const struct mt_shard *s, void *dst, size_t n, size_t at, struct mt_err *err)
{
    char block[MT_SHARD_BLOCK], *to = dst;
    size_t end = (size_t)((const char *)s->places - (const char *)s->map);
    if (!s->block_sum)
        return read_at(s, dst, n, at, err);
    for (size_t last = at + n, part; at < last; at += part, to += part) {
        size_t b = (at - HEADER) / MT_SHARD_BLOCK, from = HEADER + b * MT_SHARD_BLOCK;
        size_t len = MT_MIN(sizeof(block), end - from);
        int rc = read_at(s, block, len, from, err);
        for (int tries = 0; !rc && mt_sum64(block, len, b) != s->block_sum[b]; tries++) {
            if (tries)
                return mt_fail(err, MT_ERR_RUNTIME, -EBADMSG,
                               "the token cache has changed since it was checked, at byte %zu: remove it (data.cache_dir), and "
                               "go on with --resume", from);
            posix_fadvise(s->fd, (off_t)from, (off_t)len, POSIX_FADV_DONTNEED);
            rc = read_at(s, block, len, from, err);
        }
        if (rc)
            return rc;
        part = MT_MIN(last, from + len) - at;
        memcpy(to, block + (at - from), part);
    }
    return 0;
}

int mt_shard_read(const struct mt_shard *s, uint64_t first, size_t n, uint32_t *ids, uint8_t *mask, struct mt_err *err)
{
    uint8_t bits[512];
    size_t tokens = (size_t)((const char *)s->tokens - (const char *)s->map);
    size_t masks = (size_t)((const char *)s->mask - (const char *)s->map);
    int rc = read_checked(s, ids, n * sizeof(*ids), tokens + (size_t)first * sizeof(*ids), err);
    for (uint64_t at = first; mask && !rc && at < first + n;) {
        uint64_t byte = at / 8, end = MT_MIN(first + n, (byte + sizeof(bits)) * 8);
        rc = read_checked(s, bits, (size_t)((end + 7) / 8 - byte), masks + (size_t)byte, err);
        for (; at < end && !rc; at++)
            *mask++ = bits[at / 8 - byte] >> (at % 8) & 1;
    }
    return rc;
}

int mt_shard_read_values(const struct mt_shard *s, uint64_t first, size_t n, union mt_rollout_values *values,
                         struct mt_err *err)
{
    size_t at = (size_t)((const char *)s->values - (const char *)s->map);
    return read_checked(s, values, n * sizeof(*values), at + (size_t)first * sizeof(*values), err);
}

void mt_shard_close(struct mt_shard *s)
{
    if (s->map) {
        munmap(s->map, s->map_bytes);
        close(s->fd);
    }
    free(s->own_offsets);
    free(s->block_sum);
    *s = (struct mt_shard){0};
}

/* Checksums of the two parts of a shard. */
static void sum_parts(const struct mt_shard *s, const char *what, uint64_t *content, uint64_t *places)
{
    enum { CHUNK = 16 << 20 };
    const char *from = (const char *)s->tokens, *to = (const char *)s->places;
    struct mt_read_progress progress;
    XXH3_state_t *state = XXH3_createState();
    *content = *places = 0;
    if (!state)
        return;
    XXH3_64bits_reset(state);
    mt_read_progress_begin(&progress, what, s->map_bytes);
    for (; from < to; from += CHUNK) {
        size_t n = MT_MIN((size_t)CHUNK, (size_t)(to - from));
        XXH3_64bits_update(state, from, n);
        mt_read_progress_add(&progress, n);
    }
    mt_read_progress_end(&progress);
    *content = XXH3_64bits_digest(state);
    *content += !*content;
    *places = XXH3_64bits(s->places, s->header->n_samples * sizeof(*s->places));
    *places += !*places;
    XXH3_freeState(state);
}

/* Of the header without its own sum; never 0. */
static uint64_t sum_header(const struct mt_shard_header *h)
{
    uint64_t sum = mt_sum64(h, offsetof(struct mt_shard_header, header_sum), 0);
    return sum + !sum;
}

static int sum_blocks(struct mt_shard *s, const char *path, struct mt_err *err)
{
    const char *from = (const char *)s->map + HEADER;
    size_t bytes = (size_t)((const char *)s->places - from), n = mt_div_up(bytes, MT_SHARD_BLOCK);
    s->block_sum = mt_calloc(n + 1, sizeof(*s->block_sum));
    if (!s->block_sum)
        return mt_fail_nomem(err, path, n * sizeof(*s->block_sum));
    for (size_t b = 0; b < n; b++) {
        size_t at = b * MT_SHARD_BLOCK;
        s->block_sum[b] = mt_sum64(from + at, MT_MIN((size_t)MT_SHARD_BLOCK, bytes - at), b);
    }
    return 0;
}

int mt_shard_verify(struct mt_shard *s, const char *path, struct mt_err *err)
{
    uint64_t content, places;
    const char *what = MT_PATH("checking %s", path);
    free(s->block_sum);
    s->block_sum = NULL;
    int rc = sum_blocks(s, path, err); /* before: what is found right below is no older than they are */
    if (rc)
        return rc;
    sum_parts(s, what, &content, &places);
    bool header = !s->header->header_sum || s->header->header_sum == sum_header(s->header);
    if (header && content == s->header->content_sum && places == s->header->places_sum)
        return 0;
    free(s->block_sum);
    s->block_sum = NULL;
    return mt_fail(err, MT_ERR_INPUT, -EBADMSG, "%s does not match its checksum: the token cache is damaged", path);
}

int mt_shard_seal(const char *path, struct mt_err *err)
{
    struct mt_shard s;
    int rc = mt_shard_open(&s, path, 0, err);
    if (rc)
        return rc;
    MT_FD_CLOSED int fd = open(path, O_RDWR | O_CLOEXEC);
    struct mt_shard_header h = *s.header;
    sum_parts(&s, "", &h.content_sum, &h.places_sum);
    h.header_sum = sum_header(&h);
    mt_shard_close(&s);
    if (fd < 0 || pwrite(fd, &h, sizeof(h), 0) != sizeof(h) || fsync(fd))
        rc = mt_fail(err, MT_ERR_RUNTIME, errno ? -errno : -EIO, "cannot write the checksums of %s: %s", path,
                     strerror(errno));
    return rc;
}

uint64_t mt_shard_count_trained(const struct mt_shard *s, uint64_t first, uint64_t n)
{
    uint64_t sum = 0, end = first + n;
    while (first < end && first % 8)
        sum += s->mask[first / 8] >> (first % 8) & 1, first++;
    for (; first + 8 <= end; first += 8)
        sum += (uint64_t)__builtin_popcount(s->mask[first / 8]);
    for (; first < end; first++)
        sum += s->mask[first / 8] >> (first % 8) & 1;
    return sum;
}

static int fail_write(struct mt_shard_writer *w, struct mt_err *err)
{
    int e = errno ? errno : EIO;
    return mt_fail(err, MT_ERR_RUNTIME, -e, "cannot write %s: %s: it is for token shards; data.cache_dir names another folder", w->tmp,
                   strerror(e));
}

int mt_shard_writer_open(struct mt_shard_writer *w, const char *path, struct mt_err *err)
{
    char zero[HEADER] = {0};
    *w = (struct mt_shard_writer){0};
    if (mt_path_printf(w->path, sizeof(w->path), "%s", path) ||
        mt_path_printf(w->tmp, sizeof(w->tmp), "%s.%d.tmp", path, (int)getpid()))
        return mt_fail(err, MT_ERR_RUNTIME, -ENAMETOOLONG, "path too long: %s", path);
    w->f = fopen(w->tmp, "wbxe");
    if (!w->f || fwrite(zero, HEADER, 1, w->f) != 1)
        return fail_write(w, err);
    return 0;
}

int mt_shard_writer_append(struct mt_shard_writer *w, const uint32_t *ids, const uint8_t *mask,
                           size_t n, struct mt_err *err)
{
    size_t old = mt_div_up(w->n_tokens, 8), now = mt_div_up(w->n_tokens + n, 8);
    if (!mt_grow(&w->mask, &w->cap_mask, now + 8, 1))
        return mt_fail_nomem(err, "the shard writer", now);
    memset(w->mask + old, 0, now + 8 - old);
    for (size_t i = 0; i < n; i++)
        if (!mask || mask[i])
            w->mask[(w->n_tokens + i) / 8] |= (uint8_t)(1u << ((w->n_tokens + i) % 8));
    if (n && fwrite(ids, sizeof(*ids), n, w->f) != n)
        return fail_write(w, err);
    w->n_tokens += n;
    return 0;
}

int mt_shard_writer_values(struct mt_shard_writer *w, const union mt_rollout_values *values, size_t n,
                           struct mt_err *err)
{
    if (!mt_grow(&w->values, &w->cap_values, w->n_values + n, sizeof(*values)))
        return mt_fail_nomem(err, "the shard writer", (w->n_values + n) * sizeof(*values));
    memcpy(w->values + w->n_values, values, n * sizeof(*values));
    w->n_values += n;
    return 0;
}

int mt_shard_writer_end(struct mt_shard_writer *w, uint64_t place, struct mt_err *err)
{
    if (!mt_grow(&w->offsets, &w->cap_offsets, w->n_samples + 2, sizeof(uint64_t)) ||
        !mt_grow(&w->places, &w->cap_places, w->n_samples + 1, sizeof(uint64_t)))
        return mt_fail_nomem(err, "the shard writer", w->n_samples * 16);
    w->offsets[0] = 0;
    w->places[w->n_samples++] = place;
    w->offsets[w->n_samples] = w->n_tokens;
    return 0;
}

int mt_shard_writer_commit(struct mt_shard_writer *w, const struct mt_shard_header *header,
                           struct mt_err *err)
{
    struct mt_shard_header h = *header;
    uint64_t zero = 0;
    const uint64_t *offsets = w->n_samples ? w->offsets : &zero;
    size_t mask = mt_align_up(mt_div_up(w->n_tokens, 8), 8);
    memcpy(h.magic, "MTTOKENS", 8);
    h.version = MT_SHARD_VERSION;
    h.token_bytes = 4;
    h.n_tokens = w->n_tokens;
    h.n_samples = w->n_samples;
    bool ok = w->n_tokens % 2 == 0 || fwrite(&zero, 4, 1, w->f) == 1;
    ok = ok && (!mask || fwrite(w->mask, 1, mask, w->f) == mask);
    ok = ok && fwrite(offsets, 8, w->n_samples + 1, w->f) == w->n_samples + 1;
    ok = ok && (!w->n_values || fwrite(w->values, sizeof(*w->values), w->n_values, w->f) == w->n_values);
    ok = ok && (!w->n_samples || fwrite(w->places, 8, w->n_samples, w->f) == w->n_samples);
    ok = ok && !fseek(w->f, 0, SEEK_SET) && fwrite(&h, sizeof(h), 1, w->f) == 1 && !fflush(w->f);
    ok = ok && !fsync(fileno(w->f)) && !rename(w->tmp, w->path);
    return ok ? 0 : fail_write(w, err);
}

void mt_shard_writer_finish(struct mt_shard_writer *w)
{
    mt_close_stream(&w->f);
    if (w->tmp[0])
        unlink(w->tmp); /* fails after a commit, which renamed the file */
    free(w->offsets);
    free(w->places);
    free(w->mask);
    free(w->values);
    *w = (struct mt_shard_writer){0};
}
