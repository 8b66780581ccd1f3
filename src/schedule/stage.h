/* SPDX-License-Identifier: Apache-2.0 */
#ifndef MT_SCHEDULE_STAGE_H
#define MT_SCHEDULE_STAGE_H

#include <limits.h>

#include "schedule/build.h"

/*
 * What the second placer works on: stage.c says what it is for, lists the objects and the order of the steps
 * and walks them; stage_emit.c keeps the staging buffers and emits what each step takes.
 */
enum { MT_STAGE_NEVER = INT_MAX, MT_STAGE_NONE = -1 };

/* One step of the walk: an instruction of the placed program, or the update of a unit. */
struct mt_stage_step {
    int old, unit; /* old MT_STAGE_NONE: the update */
    int next_use;  /* step at which its staged object is read next; MT_STAGE_NEVER: not, or made anew first */
};

struct mt_stage_buffer {
    int object;                    /* of the new program, or MT_STAGE_NONE */
    int32_t touched[MT_N_QUEUES];  /* newest instruction of each queue that uses the buffer */
};

struct mt_staged {
    int buffer, next_use;
    bool dirty;
    int32_t made[MT_N_QUEUES]; /* what a reader must wait for */
    int32_t home;              /* WRITE that brought the newest content to the disk */
};

struct mt_stager {
    const struct mt_program_params *params;
    const struct mt_program *old;
    struct mt_program *out;
    int32_t *map;      /* old position -> new */
    struct mt_stage_step *steps;
    size_t n_steps;
    int *unit_staged, *unit_grad, *unit_state; /* objects by unit (state: of the first piece), or NONE */
    int *unit_update;  /* position of a unit's update in the old program, or NONE */
    int *spilled;      /* by old object, or MT_STAGE_NONE */
    struct mt_staged *staged; /* by object of the new program */
    struct mt_stage_buffer *buffers[MT_N_POOLS];
    size_t next_piece; /* buffer of the ring */
    bool failed;
};

/** Pieces in which the unit is updated, and the elements of each. */
size_t mt_stage_n_pieces(const struct mt_stager *s, size_t unit);
size_t mt_stage_piece_elems(const struct mt_stager *s, size_t unit, size_t piece);
/** The unit's staged planes where an update changes any of them, or MT_STAGE_NONE. */
int mt_stage_updated(const struct mt_stager *s, size_t unit);
/** The staged object of a step, or MT_STAGE_NONE; *made: the step makes its content anew. */
int mt_stage_object_of(const struct mt_stager *s, const struct mt_stage_step *t, bool *made);
/** The update of a unit, with the reads before it and the writes behind; the position of its last piece. */
int32_t mt_stage_emit_update(struct mt_stager *s, const struct mt_stage_step *t);
/** An instruction of the placed program, with what brings its staged object to memory. */
void mt_stage_emit_old(struct mt_stager *s, const struct mt_stage_step *t);

#endif
