/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "schedule/build.h"

/* The placer's result, one list per queue, before these are merged into one program. */

enum { MT_NO_ENTRY = -1 };

/** Order of copies in their queue: by release, then need (compute entries), then age (id). */
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

/** An instruction before the merge. Its waits are keys and indices that stay valid when copies are sorted. */
struct mt_placed {
    int instr;                      /* mt_placed_instr() */
    struct mt_copy_key key;         /* of a copy: its own */
    struct mt_copy_key load, store; /* newest load and store of its lane to wait for */
    int compute, host;              /* compute entry of its lane (with its poisons), host entry, that must have ended */
    int others;                     /* the first copy of another lane to wait for, or MT_NO_ENTRY */
};

/** A copy of another lane that an instruction waits for. */
struct mt_placed_wait {
    struct mt_copy_key key;
    int queue; /* its number: an H2D or D2H queue */
    int next;  /* of the same instruction, or MT_NO_ENTRY */
};

struct mt_placed_list {
    struct mt_placed *e;
    size_t n, cap;
};

/** One list per kind of queue, of all lanes; each poison comes after the compute entry that it waits for. */
struct mt_placed_queues {
    struct mt_placed_list compute, loads, stores, poisons, host;
    struct mt_placed_list updates; /* that use gradients of this step: of the host's queue, too, but released like copies */
    struct mt_placed_wait *wait;
    size_t n_waits, cap_waits;
    struct mt_instr *made; /* the instructions that the placer has added to the draft's */
    size_t n_made, cap_made;
};

/** The instruction of an entry: of the draft, or, with the numbers behind those, one that was made. */
static inline struct mt_instr *mt_placed_instr(const struct mt_program *draft, const struct mt_placed_queues *q,
                                               const struct mt_placed *e)
{
    size_t at = (size_t)e->instr;
    return at < draft->n_instrs ? &draft->instrs[at] : &q->made[at - draft->n_instrs];
}

/**
 * Sorts the copies and writes the program: each copy right after the compute entry that releases it. Takes over the
 * draft's objects and pools.
 */
int mt_placed_merge(struct mt_program *out, struct mt_program *draft, struct mt_placed_queues *q,
                    struct mt_err *err);
