/* SPDX-License-Identifier: Apache-2.0 */
#include <stdlib.h>

#include "base/mem.h"
#include "store/disk_priv.h"

/* The drive whose number of slots is farthest below its share after `given` slots. */
static size_t neediest(const struct mt_stripe *s, const double *rates, double sum, size_t given)
{
    size_t best = 0;
    double most = -1;
    for (size_t d = 0; d < s->n_dirs; d++) {
        double owed = (rates ? rates[d] : 1) / sum * (double)(given + 1) - s->per_dir[d];
        if (owed > most + 1e-9) {
            most = owed;
            best = d;
        }
    }
    return best;
}

int mt_stripe_init(struct mt_stripe *s, size_t n_dirs, size_t chunk, const double *rates,
                   struct mt_err *err)
{
    double sum = 0;
    bool equal = true;
    *s = (struct mt_stripe){.chunk = chunk, .n_dirs = n_dirs};
    if (!n_dirs || n_dirs > MT_STRIPE_SLOTS)
        return mt_fail(err, MT_ERR_USAGE, -EINVAL, "%zu folders to stripe over: 1 to %d", n_dirs,
                       MT_STRIPE_SLOTS);
    s->per_dir = mt_calloc(n_dirs, 1);
    if (!s->per_dir)
        return mt_fail_nomem(err, "stripes", n_dirs);
    for (size_t d = 0; d < n_dirs; d++) {
        sum += rates ? rates[d] : 1;
        equal &= !rates || rates[d] == rates[0];
    }
    if (!(sum > 0)) {
        rates = NULL;
        sum = (double)n_dirs;
        equal = true;
    }
    s->n_slots = equal ? n_dirs : MT_STRIPE_SLOTS;
    for (size_t i = 0; i < s->n_slots; i++) {
        size_t d = equal ? i : neediest(s, rates, sum, i);
        s->dir[i] = (uint8_t)d;
        s->rank[i] = s->per_dir[d]++;
    }
    return 0;
}

void mt_stripe_finish(struct mt_stripe *s)
{
    free(s->per_dir);
    *s = (struct mt_stripe){0};
}

uint64_t mt_stripe_file_bytes(const struct mt_stripe *s, size_t dir, uint64_t bytes)
{
    uint64_t chunks = (bytes + s->chunk - 1) / s->chunk, whole = chunks / s->n_slots;
    uint64_t n = whole * s->per_dir[dir];
    for (size_t i = 0; i < chunks % s->n_slots; i++)
        n += s->dir[i] == dir;
    return n * s->chunk;
}

uint64_t mt_stripe_find(const struct mt_stripe *s, uint64_t offset, size_t *dir,
                        uint64_t *file_offset)
{
    uint64_t chunk = offset / s->chunk, in = offset % s->chunk;
    size_t slot = (size_t)(chunk % s->n_slots);
    *dir = s->dir[slot];
    *file_offset = (chunk / s->n_slots * s->per_dir[*dir] + s->rank[slot]) * s->chunk + in;
    return s->n_dirs == 1 ? UINT64_MAX - offset : s->chunk - in;
}
