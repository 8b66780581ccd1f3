/* SPDX-License-Identifier: Apache-2.0 */
#include "store/disk_sums.h"

#include <string.h>

#include "base/mem.h"
#include "base/sum64.h"

/* At most: whole blocks, and a part of a block at each end. */
static uint64_t sums_of_piece(uint64_t piece, size_t block)
{
    return piece / block + 2;
}

size_t mt_disk_sums_n(uint64_t bytes, uint64_t piece, size_t block)
{
    if (!bytes)
        return 0;
    if (!piece || piece > bytes)
        piece = bytes;
    return (size_t)((bytes + piece - 1) / piece * sums_of_piece(piece, block));
}

static uint64_t piece_of(const struct mt_disk_sums *s)
{
    return s->piece && s->piece < s->bytes ? s->piece : s->bytes;
}

static uint64_t piece_begin(const struct mt_disk_sums *s, uint64_t offset)
{
    return offset - (offset - s->offset) % piece_of(s);
}

uint64_t mt_disk_block_begin(const struct mt_disk_sums *s, uint64_t offset)
{
    return MT_MAX(offset - offset % s->block, piece_begin(s, offset));
}

uint64_t mt_disk_block_end(const struct mt_disk_sums *s, uint64_t offset)
{
    uint64_t end = MT_MIN(piece_begin(s, offset) + piece_of(s), s->offset + s->bytes);
    return MT_MIN(offset - offset % s->block + s->block, end);
}

uint64_t *mt_disk_sum_of(const struct mt_disk_sums *s, uint64_t offset)
{
    uint64_t begin = piece_begin(s, offset), piece = piece_of(s);
    uint64_t first = (begin - s->offset) / piece * sums_of_piece(piece, s->block);
    return s->sum + first + (offset / s->block - begin / s->block);
}

static void run_job(struct mt_job *j)
{
    struct mt_sum_job *job = (struct mt_sum_job *)j;
    const char *p = job->buf;
    job->sum = mt_sum64(p, job->bytes, job->seed);
    job->sum += !job->sum;
    job->zeros = !p[0] && !memcmp(p, p + 1, job->bytes - 1);
}

struct mt_sum_job mt_sum_job(const void *buf, size_t bytes, uint64_t seed)
{
    return (struct mt_sum_job){.job.run = run_job, .buf = buf, .bytes = bytes, .seed = seed};
}
