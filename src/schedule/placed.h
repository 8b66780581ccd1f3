/* SPDX-License-Identifier: Apache-2.0 */
#ifndef MT_SCHEDULE_PLACED_H
#define MT_SCHEDULE_PLACED_H

#include "schedule/build.h"

/* What the placer makes of a draft, before its queues are merged into one program. */

enum { MT_NO_ENTRY = -1 };

/** Place of a copy in its queue: by release, then need, then age. */
struct mt_copy_key {
    int release, need, id;
};

#define MT_NO_KEY ((struct mt_copy_key){MT_NO_ENTRY, MT_NO_ENTRY, MT_NO_ENTRY})

static inline int mt_compare_keys(const struct mt_copy_key *a, const struct mt_copy_key *b)
{
    if (a->release != b->release)
        return a->release < b->release ? -1 : 1;
    if (a->need != b->need)
        return a->need < b->need ? -1 : 1;
    return (a->id > b->id) - (a->id < b->id);
}

/** An instruction on its way into the program: what it waits for, in terms that sorting keeps. */
struct mt_placed {
    struct mt_instr in;
    struct mt_copy_key key;         /* copies: own place */
    struct mt_copy_key load, store; /* newest load and store to wait for */
    int compute, adam;              /* compute entry (end of its group), unit whose update must be done */
};

struct mt_placed_list {
    struct mt_placed *e;
    size_t n, cap;
};

/** One list a queue; poisons belong behind the compute entry that they wait for. */
struct mt_placed_queues {
    struct mt_placed_list compute, loads, stores, poisons, host;
};

/**
 * Sorts the copies and writes the program: each copy right behind the compute entry that releases it. Takes
 * objects and pools from the draft.
 */
int mt_placed_merge(struct mt_program *out, struct mt_program *draft, struct mt_placed_queues *q,
                    struct mt_err *err);

#endif
