/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include "base/err.h"
#include "data/notes.h"

enum { MT_SHARD_HEADER_BYTES = 4096, MT_SHARD_VERSION = 6 };
/** The unit of a sample's place: none, lines from 1, elements from 0. */
enum mt_place_kind { MT_PLACE_NONE, MT_PLACE_LINE, MT_PLACE_INDEX };
enum {
    MT_SHARD_PLAIN_TEXT = 1, /* flag: one text, to be cut into rows */
    MT_SHARD_ANSWERS = 2,    /* flag: samples 2i and 2i + 1 are item i: the chosen and the rejected answer to a prompt,
                                each with the prompt; of a rated answer one is empty. max_len is that of an item */
    MT_SHARD_ROLLOUTS = 4,   /* flag: tokens have values, between the offsets and the places */
};

/** Values of a token of a rollout, NaN where there is none: its advantage; its log-probability under the sampler, under
 * the policy that is updated, under a reference. Of a sample's first token, which nothing predicts, they are the
 * sample's. */
union mt_rollout_values {
    struct {
        float advantage, logprob, old, ref;
    };
    struct {
        float reward, temperature;
        uint64_t group; /* a hash of its name; 0: none. Of the lowest 8 bits the first: the completion was cut off; the
                           others: 1 and mt_rollout.noise */
    } of;
};

/**
 * A token shard, one for each source file: a 4 KiB header; tokens, u32, padded to 8 bytes; the loss mask, one bit per
 * token, padded to 8 bytes; n_samples + 1 sample offsets, u64; of rollouts, the values of each token (union
 * mt_rollout_values); n_samples places in the source, u64.
 * Samples are whole, whatever the length of rows. Little-endian. Written to a temporary name and renamed.
 * scripts/megatrain_data/shard.py writes the same, without the checksums.
 */
struct mt_shard_header {
    char magic[8]; /* "MTTOKENS" */
    uint32_t version, token_bytes;
    uint64_t vocab, n_tokens, n_samples, source_hash;
    uint64_t n_trained, max_len;
    uint64_t n_untrained; /* samples left out, as none of their tokens is trained */
    uint64_t n_bytes;     /* of the source */
    uint32_t place_kind, flags;
    char format[24];
    char untrained_at[160]; /* places of the first few untrained samples */
    uint64_t content_sum;   /* XXH3 of what is before the places, which training depends on */
    uint64_t places_sum;    /* XXH3 of places. Both sums are 0 until the shard is sealed */
    uint64_t n_equal;       /* pairs left out, as their answers are equal */
    char notes[MT_NOTES_BYTES]; /* on its samples (notes.h), ended by a zero */
    uint64_t header_sum;    /* XXH3 of the header before it; 0 until the shard is sealed */
};
enum { MT_SHARD_BLOCK = 64 << 10 }; /* bytes that are checked together while training */

struct mt_shard {
    const struct mt_shard_header *header;
    const uint32_t *tokens;
    const uint8_t *mask;
    const uint64_t *offsets, *places; /* offsets: own_offsets */
    const union mt_rollout_values *values; /* NULL: it has none */
    uint64_t *own_offsets;            /* a copy in memory */
    uint64_t *block_sum;              /* once it has been verified: of each block of tokens and mask; else NULL */
    int fd; /* valid if `map` is not NULL */
    void *map;
    size_t map_bytes;
};

/** Maps a shard and checks every size in it against the file. -EINVAL: they do not agree. */
int mt_shard_open(struct mt_shard *s, const char *path, uint64_t source_hash, struct mt_err *err);
void mt_shard_close(struct mt_shard *s);
/** Writes the checksums of a complete shard. */
int mt_shard_seal(const char *path, struct mt_err *err);
/** Reads all of it, and keeps sums of its blocks, with which mt_shard_read() compares. -EBADMSG: it does not match its
 * checksums. */
int mt_shard_verify(struct mt_shard *s, const char *path, struct mt_err *err);
/** Copies tokens [first, first + n) to `ids`, and which of them are trained to `mask` (may be NULL). It reads the file:
 * one that is truncated or unreadable is an error, whereas an access to the mapping would end the process. -EBADMSG: it
 * is not what was verified. */
int mt_shard_read(const struct mt_shard *s, uint64_t first, size_t n, uint32_t *ids, uint8_t *mask, struct mt_err *err);
/** The same of the values of rollouts. */
int mt_shard_read_values(const struct mt_shard *s, uint64_t first, size_t n, union mt_rollout_values *values,
                         struct mt_err *err);
/** Trained tokens in [first, first + n). */
uint64_t mt_shard_count_trained(const struct mt_shard *s, uint64_t first, uint64_t n);

struct mt_shard_writer {
    FILE *f;
    char path[4096], tmp[4096];
    uint64_t n_tokens, n_samples;
    uint64_t *offsets, *places;
    size_t cap_offsets, cap_places;
    uint8_t *mask;
    union mt_rollout_values *values; /* [n_values] */
    size_t cap_mask, n_values, cap_values;
};

int mt_shard_writer_open(struct mt_shard_writer *w, const char *path, struct mt_err *err);
/** Appends tokens to the current sample. mask[i] != 0: token i is trained; NULL: all. */
int mt_shard_writer_append(struct mt_shard_writer *w, const uint32_t *ids, const uint8_t *mask,
                           size_t n, struct mt_err *err);
/** Of rollouts: the values of as many tokens, in their order. */
int mt_shard_writer_values(struct mt_shard_writer *w, const union mt_rollout_values *values, size_t n,
                           struct mt_err *err);
/** Ends the current sample. */
int mt_shard_writer_end(struct mt_shard_writer *w, uint64_t place, struct mt_err *err);
/** Completes the file and gives it its name. Of `h`: vocab, source_hash and all fields after n_samples are used. */
int mt_shard_writer_commit(struct mt_shard_writer *w, const struct mt_shard_header *h,
                           struct mt_err *err);
/** Frees the writer; removes the file if it was not committed. */
void mt_shard_writer_finish(struct mt_shard_writer *w);
