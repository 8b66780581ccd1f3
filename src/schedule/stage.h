/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <limits.h>

#include "base/mem.h"
#include "schedule/build.h"

/*
 * State of the second placer. stage.c explains it, lists the objects and the steps in order, and walks the steps;
 * stage_emit.c manages the staging buffers and emits each step's instructions; stage_state.c answers both.
 */
enum { MT_STAGE_NEVER = INT_MAX, MT_STAGE_NONE = -1 };

/* One step of the walk: an instruction of the placed program, or the update of a unit. */
struct mt_stage_step {
    int old, unit; /* old: position in the placed program; MT_STAGE_NONE: the pending update */
    int next_use;  /* step that reads its staged object next; MT_STAGE_NEVER: none, or it is overwritten first */
};

struct mt_stage_buffer {
    int object;                    /* of the new program, or MT_STAGE_NONE */
    int32_t touched[MT_MAX_QUEUES]; /* newest instruction of each queue that uses the buffer */
};

struct mt_staged {
    int buffer, next_use;
    bool dirty;
    bool kept;       /* a gradient whose update has not been written yet */
    int32_t made[MT_MAX_QUEUES]; /* what a reader must wait for */
    int32_t home;              /* WRITE of the newest content */
};

struct mt_stager {
    const struct mt_program_params *params;
    const struct mt_program *old;
    struct mt_program *out;
    struct mt_arrays arrays; /* what follows */
    int32_t *map;      /* old position -> new */
    struct mt_stage_step *steps;
    size_t n_steps;
    int *unit_staged, *unit_grad, *unit_state; /* objects by unit (state: of the first piece), or MT_STAGE_NONE */
    int *unit_update;  /* position of a unit's update in the old program, or MT_STAGE_NONE */
    int *spilled;      /* by old object, or MT_STAGE_NONE */
    struct mt_staged *staged; /* by object of the new program */
    struct mt_stage_buffer *buffers[MT_N_POOLS];
    int32_t lists;     /* position of the newest lists of experts' rows, or MT_NO_WAIT */
    int n_queues;
    size_t next_piece; /* pieces so far: chooses the buffer in the ring */
    size_t next_grad[MT_N_POOLS]; /* gradients so far: the same */
    bool failed;
    int too_few;       /* the pool of a gradient for which no buffer was free, or MT_NO_POOL */
};

/** Number of pieces in which the unit is updated, and the elements of one. */
size_t mt_stage_n_pieces(const struct mt_stager *s, size_t unit);
size_t mt_stage_piece_elems(const struct mt_stager *s, size_t unit, size_t piece);
/** The object of the unit's staged planes if an update changes any of them, or MT_STAGE_NONE. */
int mt_stage_updated(const struct mt_stager *s, size_t unit);
/** Whether the step is an update with a gradient of this step. */
bool mt_stage_is_own(const struct mt_stager *s, const struct mt_stage_step *t);
/** The staged object of a step, or MT_STAGE_NONE; *made: the step overwrites it. */
int mt_stage_object_of(const struct mt_stager *s, const struct mt_stage_step *t, bool *made);
/** Emits a unit's update with the reads before and the writes after it; returns the position of its last piece. */
int32_t mt_stage_emit_update(struct mt_stager *s, const struct mt_stage_step *t);
/** Emits an instruction of the placed program, after the read of its staged object if that is needed. */
void mt_stage_emit_old(struct mt_stager *s, const struct mt_stage_step *t);
