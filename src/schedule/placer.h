/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <limits.h>

#include "base/mem.h"
#include "schedule/placed.h"

/*
 * State of the placer. place.c explains it, walks the draft and lists the copies; place_pick.c chooses buffers;
 * place_state.c allocates the state and finds every operand's next use.
 */
enum { MT_PLACE_NEVER = INT_MAX, MT_PLACE_BLOCK = 64 };

struct mt_place_buffer {
    int object;       /* whose content it has, or MT_NO_ENTRY */
    struct mt_copy_key store; /* newest store that reads it */
    bool pinned;
};

/* An object on a lane. */
struct mt_place_copy {
    int buffer;     /* that has its content, or MT_NO_ENTRY */
    int next_use;   /* draft position of the lane's next use, unless another lane writes it before */
    struct mt_copy_key load;   /* newest load, until a compute entry waits for it */
    struct mt_copy_key loaded_by; /* newest load, which reads its home */
    bool loaded;    /* at least once */
};

struct mt_place_object {
    int last_write; /* compute entry */
    int lane;       /* that made its newest content */
    bool dirty;     /* not yet stored since its last write */
    struct mt_copy_key store; /* newest store to its home */
    int store_lane;
    int gathered;     /* host entry that wrote its home, or MT_NO_ENTRY */
};

/* Of MT_PLACE_BLOCK buffers the one to pick: the largest `until`, of those the least `used`, of those the first. */
struct mt_place_best {
    int until, used, at;
    bool known; /* neither has changed since */
};

/* What a lane has. */
struct mt_place_lane {
    struct mt_place_buffer *buffers[MT_N_POOLS];
    int *until[MT_N_POOLS];    /* of each buffer: its content's next use; MT_PLACE_NEVER: free; MT_NO_ENTRY: stays */
    int *used[MT_N_POOLS];     /* of each buffer: newest compute entry that uses it; where until ends */
    struct mt_place_best *best[MT_N_POOLS]; /* [buffers / MT_PLACE_BLOCK] */
    int n_touched[MT_N_POOLS]; /* buffers used so far: the first so many */
    int first_load_release;    /* of the newest first load of weights, or of what is gathered */
    int last_compute;          /* newest compute entry */
};

struct mt_placer {
    const struct mt_program_params *params;
    struct mt_program *draft;
    int n_lanes;
    struct mt_arrays arrays; /* all that follow but q's */
    struct mt_place_lane lane[MT_MAX_LANES];
    struct mt_place_object *objects;
    struct mt_place_copy *copies;    /* [n_objects, n_lanes] */
    int *first_compute;     /* [n_units] compute entry of the unit's first instruction, or MT_NO_ENTRY */
    int *half_computed;     /* [n_units] the same, of half of its micro-batches */
    int *update;            /* [n_units] host entry of the unit's update, or MT_NO_ENTRY */
    int *ahead;             /* [n_units] the unit two before it on its lane, with several lanes one; or MT_NO_ENTRY */
    struct mt_copy_key *left; /* [n_units] its STORE_GRAD */
    int *next_use; /* [draft instr * MT_MAX_OPERANDS + operand] */
    bool *leaves;  /* the same: another lane reads what is written */
    struct mt_placed_queues q;
    bool failed;
};

/** Everything empty, with the next uses of the draft's operands. false: out of memory; free it all the same. */
bool mt_placer_alloc(struct mt_placer *p);
void mt_placer_free(struct mt_placer *p);
/**
 * The buffer of the lane's pool for a new content: one that was never used, else that whose content is needed last.
 * MT_NO_ENTRY: all are needed now.
 */
int mt_placer_pick(struct mt_placer *p, int lane, int pool);
