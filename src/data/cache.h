/* SPDX-License-Identifier: Apache-2.0 */
#ifndef MT_DATA_CACHE_H
#define MT_DATA_CACHE_H

#include "data/dataset.h"
#include "data/shard.h"
#include "data/sources.h"

/**
 * The shards of all files, from the cache or made now: one for each file, named by the hash of the file's content and
 * of all that changes its tokens (tokenizer, template, format, helper), so that a stale one is never used.
 * shards[i] belongs to l->items[i] and is the caller's to close; made[i]: it was made now.
 * One process at a time makes shards in a cache; others wait.
 */
int mt_cache_open_shards(struct mt_shard *shards, bool *made, const struct mt_source_list *l,
                         const struct mt_dataset_params *p, struct mt_err *err);

enum { MT_CACHE_OLD_HASHES = 8 };
/**
 * What builds with shards of version 2 may have called the source, if it gave them the same tokens: files that C code
 * reads, by what it hashed then; others by the shards of theirs that are still in the cache. Returns how many.
 */
size_t mt_cache_old_hashes(uint64_t hash[MT_CACHE_OLD_HASHES], const struct mt_source_file *f, const struct mt_shard *s,
                           const struct mt_dataset_params *p);

#endif
