/* SPDX-License-Identifier: Apache-2.0 */
#ifndef MT_DATA_SAMPLES_H
#define MT_DATA_SAMPLES_H

#include "data/shard.h"

/** What turns files into samples of a shard. */
struct mt_sample_reader {
    const struct mt_dataset_params *p;
    struct mt_shard_writer *out;
    struct mt_dataset_stats stats;
    enum mt_cfg_format format; /* detected, AUTO before that */
    bool plain_text;
    uint32_t *ids;             /* the sample under way */
    uint8_t *mask;
    size_t n, cap_ids, cap_mask;
    char overlong_at[160];     /* the first few places, for the message */
    char untrained_at[160];
};

/** Reads one file: .jsonl (an object a line), .json (an array), anything else: plain text. */
int mt_samples_read_file(struct mt_sample_reader *r, const char *path, struct mt_err *err);
/** Errors that only the whole tells: over-long samples, too many without a trained token. */
int mt_samples_check(const struct mt_sample_reader *r, struct mt_err *err);
void mt_samples_finish(struct mt_sample_reader *r);
const char *mt_format_name(enum mt_cfg_format f);

#endif
