/* SPDX-License-Identifier: Apache-2.0 */
/* Which buffer the placer takes (Belady 1966). */
#include "base/mem.h"
#include "schedule/placer.h"

enum { NONE = MT_NO_ENTRY, BLOCK = MT_PLACE_BLOCK };

static struct mt_place_best best_of(const int *until, const int *used, int begin, int end)
{
    struct mt_place_best b = {.until = NONE, .used = INT_MAX, .at = begin, .known = true};
    for (int i = begin; i < end; i++)
        b.until = MT_MAX(b.until, until[i]);
    for (int i = begin; i < end; i++)
        b.used = MT_MIN(b.used, until[i] == b.until ? used[i] : INT_MAX);
    while (until[b.at] != b.until || used[b.at] != b.used)
        b.at++;
    return b;
}

/* The buffer that is needed last, and of several the one that was used first. A plan spends much of its time here, and
 * a step of thousands of micro-batches has thousands of buffers: only blocks that changed are looked through. */
static int pick_last(struct mt_placer *p, int lane, int pool)
{
    struct mt_place_lane *l = &p->lane[lane];
    const int n = p->draft->pool[lane][pool].n;
    struct mt_place_best best = {.until = NONE, .at = NONE};
    for (int i = 0; i < n; i += BLOCK) {
        struct mt_place_best *b = &l->best[pool][i / BLOCK];
        if (!b->known)
            *b = best_of(l->until[pool], l->used[pool], i, MT_MIN(i + BLOCK, n));
        if (b->until > best.until || (b->until == best.until && b->until != NONE && b->used < best.used))
            best = *b;
    }
    return best.at;
}

/* The same of those last used by compute entry `newest` or before; NONE: there is none. */
static int pick_of(struct mt_placer *p, int lane, int pool, int newest)
{
    const struct mt_place_lane *l = &p->lane[lane];
    const int *until = l->until[pool], *used = l->used[pool], n = p->draft->pool[lane][pool].n;
    int best = NONE, last = NONE;
    for (int i = 0; i < n; i++)
        last = used[i] <= newest ? MT_MAX(last, until[i]) : last;
    for (int i = 0; i < n && last != NONE; i++)
        if (until[i] == last && used[i] <= newest && (best == NONE || used[i] < used[best]))
            best = i;
    return best;
}

/*
 * With several lanes, what a micro-batch hands over leaves its buffer at once, and the next one's input would wait for
 * that copy: buffers of the lane's last few operations are left alone if there are others. So a few go round, where one
 * would be enough.
 */
int mt_placer_pick(struct mt_placer *p, int lane, int pool)
{
    enum { FEW = 3 };
    struct mt_place_lane *l = &p->lane[lane];
    bool hands_over = pool == MT_POOL_BOUNDARY || (pool >= MT_POOL_RECORD && pool <= MT_POOL_RECORD_LAST);
    int best = NONE;
    if (l->n_touched[pool] < p->draft->pool[lane][pool].n)
        return l->n_touched[pool]++;
    if (p->n_lanes > 1 && hands_over)
        best = pick_of(p, lane, pool, (int)p->q.compute.n - 1 - FEW * p->n_lanes);
    return best != NONE ? best : pick_last(p, lane, pool);
}
