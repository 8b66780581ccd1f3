/* SPDX-License-Identifier: Apache-2.0 */
#ifndef MT_DATA_SHARD_H
#define MT_DATA_SHARD_H

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include "base/err.h"
#include "data/dataset.h"

/**
 * A token shard: a 4 KiB header; tokens, u32; the loss mask, a bit a token, padded to 8 bytes; and
 * n_samples + 1 sample offsets, u64. Written to a temporary name and renamed.
 */
struct mt_shard_header {
    char magic[8]; /* "MTTOKENS" */
    uint32_t version, token_bytes;
    uint64_t vocab, n_tokens, n_samples, source_hash;
    struct mt_dataset_stats stats; /* `format` and `from_cache` mean nothing here */
    char format[24];
};

struct mt_shard {
    const struct mt_shard_header *header;
    const uint32_t *tokens;
    const uint8_t *mask;
    const uint64_t *offsets;
    void *map;
    size_t map_bytes;
};

/** Maps a shard and checks every size in it against the file. -EINVAL where it is not whole. */
int mt_shard_open(struct mt_shard *s, const char *path, uint64_t source_hash, struct mt_err *err);
void mt_shard_close(struct mt_shard *s);

struct mt_shard_writer {
    FILE *f;
    char path[4096], tmp[4096];
    uint64_t n_tokens, n_samples;
    uint64_t *offsets;
    size_t cap_offsets;
    uint8_t *mask;
    size_t cap_mask;
};

int mt_shard_writer_open(struct mt_shard_writer *w, const char *path, struct mt_err *err);
/** mask[i] != 0: token i is trained; NULL: all. */
int mt_shard_writer_add(struct mt_shard_writer *w, const uint32_t *ids, const uint8_t *mask, size_t n,
                        struct mt_err *err);
/** Completes the file and gives it its name. */
int mt_shard_writer_commit(struct mt_shard_writer *w, const struct mt_shard_header *h,
                           struct mt_err *err);
/** Drops what was not committed. */
void mt_shard_writer_finish(struct mt_shard_writer *w);

#endif
