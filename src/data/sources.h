/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdbool.h>
#include <stddef.h>

#include "base/err.h"
#include "config/config.h"

/** One data file, with its settings. */
struct mt_source_file {
    char *path;
    double weight; /* how often an epoch visits its samples */
    char *entry;   /* its entry in a dataset_info.json, as JSON text; or NULL */
    const struct mt_cfg_list *columns; /* what its records call the fields (columns.h); NULL: as formats do; borrowed */
};
struct mt_source_list {
    struct mt_source_file *items;
    size_t n, cap;
    const char *key; /* of the configuration, which errors name; borrowed */
};

/**
 * The files of `key` (data.train, data.eval), in order: globs (sorted), "path:weight", "hf://datasets/org/name", and
 * "dataset_info.json#name" (LLaMA-Factory's list of data sets; without a name all of its entries). A pattern that matches
 * nothing is an error.
 */
int mt_sources_resolve(struct mt_source_list *out, const struct mt_cfg_list *files, const char *key,
                       struct mt_err *err);
void mt_sources_finish(struct mt_source_list *l);

/**
 * Whether a file needs the data helper (compressed or columnar files, chat, the model's tokenizer). Otherwise the
 * trainer reads it itself (input_ids; text and pairs of strings as bytes).
 */
bool mt_source_needs_helper(const struct mt_source_file *f, enum mt_cfg_format format,
                            const char *tokenizer);
