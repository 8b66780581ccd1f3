/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "data/dataset.h"
#include "data/shard.h"
#include "data/sources.h"

/**
 * Opens the shards of all files and makes those that the cache lacks. A shard is named by a hash of its file's content
 * and of all that changes its tokens (tokenizer, template, format, helper): a stale one is never used.
 * shards[i] belongs to l->items[i], and the caller closes it; made[i]: it was made now.
 * One process at a time makes shards in a cache; others wait.
 */
int mt_cache_open_shards(struct mt_shard *shards, bool *made, const struct mt_source_list *l,
                         const struct mt_dataset_params *p, struct mt_err *err);
