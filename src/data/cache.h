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

#endif
