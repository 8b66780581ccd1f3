/* SPDX-License-Identifier: Apache-2.0 */
#include "config/blocks.h"

#include <ctype.h>
#include <stdlib.h>
#include <string.h>

#include "base/philox.h"

/* Streams of random numbers: each round has an order of its own. */
static const uint64_t STREAM = UINT64_C(0xB1) << 56;

/* Blocks that the text asks for; 0: it is no number. */
static uint64_t count_in(const char *text)
{
    char *end = NULL;
    errno = 0;
    uint64_t n = isdigit((unsigned char)text[0]) ? strtoull(text, &end, 10) : 0;
    return end && !*end && !errno ? n : 0;
}

int mt_blocks_init(struct mt_blocks *b, const struct mt_config *cfg, int64_t n_layers, struct mt_err *err)
{
    const char *text = cfg->train.blocks;
    *b = (struct mt_blocks){.n_layers = (uint64_t)n_layers,
                            .steps = (uint64_t)cfg->train.block_steps,
                            .order = cfg->train.block_order,
                            .seed = (uint64_t)cfg->train.seed};
    if (!strcmp(text, "off"))
        return 0;
    b->n = !strcmp(text, "layers") ? b->n_layers : count_in(text);
    if (b->n && b->n <= b->n_layers)
        return 0;
    b->n = 0;
    return mt_fail(err, MT_ERR_USAGE, -EINVAL, "train.blocks = %s: give off, layers (each layer is a block), or into how many "
                   "blocks the model's %lld layers are divided", text, (long long)n_layers);
}

uint64_t mt_blocks_at(const struct mt_blocks *b, uint64_t phase)
{
    uint64_t at = phase % b->n;
    if (b->order == MT_BLOCKS_DESCENDING)
        return b->n - 1 - at;
    return b->order == MT_BLOCKS_ASCENDING ? at : mt_permute(at, b->n, b->seed, STREAM | phase / b->n);
}

void mt_blocks_layers(const struct mt_blocks *b, uint64_t block, int *first, int *end)
{
    *first = (int)(block * b->n_layers / b->n);
    *end = (int)((block + 1) * b->n_layers / b->n);
}

uint64_t mt_blocks_end(const struct mt_blocks *b, uint64_t phase)
{
    return (phase + 1) * b->steps;
}
