/* SPDX-License-Identifier: Apache-2.0 */
#ifndef MT_DATA_SHARD_H
#define MT_DATA_SHARD_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include "base/err.h"

enum { MT_SHARD_HEADER_BYTES = 4096, MT_SHARD_VERSION = 3 };
/** What the place of a sample counts: nothing, lines from 1, elements from 0. */
enum mt_place_kind { MT_PLACE_NONE, MT_PLACE_LINE, MT_PLACE_INDEX };
enum {
    MT_SHARD_PLAIN_TEXT = 1, /* flag: one text, to be cut where rows end */
    MT_SHARD_UNPADDED = 2,   /* flag: tokens were cut off as padding, which shards of version 2 still had */
};

/**
 * A token shard, one for each source file: a 4 KiB header; tokens, u32, padded to 8 bytes; the loss mask, a bit a
 * token, padded to 8 bytes; n_samples + 1 sample offsets, u64; n_samples places in the source, u64.
 * Samples are whole, independent of the length of rows. Little-endian. Written to a temporary name and
 * renamed; scripts/megatrain_data/shard.py writes the same, but for the sums.
 */
struct mt_shard_header {
    char magic[8]; /* "MTTOKENS" */
    uint32_t version, token_bytes;
    uint64_t vocab, n_tokens, n_samples, source_hash;
    uint64_t n_trained, max_len;
    uint64_t n_untrained; /* samples left out: no token is trained */
    uint64_t n_endless;   /* samples that train no token that ends a turn */
    uint64_t n_bytes;     /* of the source */
    uint32_t place_kind, flags;
    char format[24];
    char untrained_at[160]; /* the first few */
    uint64_t content_sum;   /* XXH3 of tokens, mask and offsets: what training depends on */
    uint64_t places_sum;    /* 0, as the other: not sealed yet */
};

struct mt_shard {
    const struct mt_shard_header *header;
    const uint32_t *tokens;
    const uint8_t *mask;
    const uint64_t *offsets, *places; /* offsets are a copy in memory */
    uint64_t *own_offsets;
    int fd; /* where there is a map */
    void *map;
    size_t map_bytes;
};

/** Maps a shard and checks every size in it against the file. -EINVAL where they do not agree. */
int mt_shard_open(struct mt_shard *s, const char *path, uint64_t source_hash, struct mt_err *err);
void mt_shard_close(struct mt_shard *s);
/** Writes the sums of a shard that is whole. */
int mt_shard_seal(const char *path, struct mt_err *err);
/** Reads all of it. -EBADMSG where it does not agree with its sums. */
int mt_shard_verify(const struct mt_shard *s, const char *path, struct mt_err *err);
/** Is the file a shard of version 2 with the same tokens, mask and offsets? Then *source_hash is its. */
bool mt_shard_was(const struct mt_shard *s, const char *path, uint64_t *source_hash);
/** Tokens [first, first + n), and into `mask` (may be NULL) which of them are trained. Reads the file: one that was cut
 * off, or cannot be read, is an error, where a look at the mapping would end the process. */
int mt_shard_read(const struct mt_shard *s, uint64_t first, size_t n, uint32_t *ids, uint8_t *mask, struct mt_err *err);
/** Trained tokens in [first, first + n). */
uint64_t mt_shard_count_trained(const struct mt_shard *s, uint64_t first, uint64_t n);

struct mt_shard_writer {
    FILE *f;
    char path[4096], tmp[4096];
    uint64_t n_tokens, n_samples;
    uint64_t *offsets, *places;
    size_t cap_offsets, cap_places;
    uint8_t *mask;
    size_t cap_mask;
};

int mt_shard_writer_open(struct mt_shard_writer *w, const char *path, struct mt_err *err);
/** Tokens of the sample under way. mask[i] != 0: token i is trained; NULL: all. */
int mt_shard_writer_append(struct mt_shard_writer *w, const uint32_t *ids, const uint8_t *mask,
                           size_t n, struct mt_err *err);
/** The sample under way is whole. */
int mt_shard_writer_end(struct mt_shard_writer *w, uint64_t place, struct mt_err *err);
/** Completes the file and gives it its name. `h`: vocab, source_hash and what follows n_samples. */
int mt_shard_writer_commit(struct mt_shard_writer *w, const struct mt_shard_header *h,
                           struct mt_err *err);
/** Drops what was not committed. */
void mt_shard_writer_finish(struct mt_shard_writer *w);

#endif
