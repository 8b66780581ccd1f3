/* SPDX-License-Identifier: Apache-2.0 */
#include "base/block_sum.h"

#include <xxhash.h>

#include "base/mem.h"
#include "base/sum64.h"

uint64_t mt_block_sum(const void *data, size_t bytes)
{
    return mt_sum64(data, bytes, 0);
}

uint64_t mt_tensor_sum(const uint64_t *sum, size_t n_blocks)
{
    return XXH3_64bits(sum, n_blocks * sizeof(*sum));
}

int mt_summer_init(struct mt_summer *s, struct mt_err *err)
{
    *s = (struct mt_summer){.block = XXH3_createState(), .whole = XXH3_createState()};
    return s->block && s->whole ? 0 : mt_fail_nomem(err, "sums of a model's files", MT_SUM_BLOCK);
}

int mt_summer_want_plain(struct mt_summer *s, struct mt_err *err)
{
    s->plain = XXH3_createState();
    return s->plain ? 0 : mt_fail_nomem(err, "sums of a model's files", MT_SUM_BLOCK);
}

uint64_t mt_summer_plain(const struct mt_summer *s)
{
    return XXH3_64bits_digest(s->plain);
}

void mt_summer_finish(struct mt_summer *s)
{
    XXH3_freeState(s->plain);
    XXH3_freeState(s->block);
    XXH3_freeState(s->whole);
    *s = (struct mt_summer){.n = 0};
}

void mt_summer_begin(struct mt_summer *s)
{
    XXH3_64bits_reset(s->block);
    XXH3_64bits_reset(s->whole);
    if (s->plain)
        XXH3_64bits_reset(s->plain);
    s->n = 0;
}

static void end_block(struct mt_summer *s)
{
    uint64_t sum = XXH3_64bits_digest(s->block);
    XXH3_64bits_update(s->whole, &sum, sizeof(sum));
    XXH3_64bits_reset(s->block);
    s->n = 0;
}

void mt_summer_add(struct mt_summer *s, const void *data, size_t bytes)
{
    if (!s)
        return;
    if (s->plain)
        XXH3_64bits_update(s->plain, data, bytes);
    for (size_t at = 0, n; at < bytes; at += n) {
        n = MT_MIN(bytes - at, (size_t)MT_SUM_BLOCK - s->n);
        XXH3_64bits_update(s->block, (const char *)data + at, n);
        s->n += n;
        if (s->n == MT_SUM_BLOCK)
            end_block(s);
    }
}

uint64_t mt_summer_end(struct mt_summer *s)
{
    if (s->n)
        end_block(s);
    return XXH3_64bits_digest(s->whole);
}
