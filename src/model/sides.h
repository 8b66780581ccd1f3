/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "model/state.h"

/**
 * Pieces of work that run beside each other on the device's side streams (device/device.h), and whose results are taken
 * on COMPUTE in the order of the pieces: experts, whose outputs are summed in order. So bits do not depend on the
 * number of side streams. Without any, all of this does nothing and the pieces run on COMPUTE.
 *
 *   fork;
 *   for each piece { turn to a side, take rows of scratch, work, COMPUTE follows, take the results, give the rows };
 *   join
 *
 * What a side needs for itself (workspace, operands in FP8, intermediate products of adapters) takes its place in the
 * model when it is turned to. Rows of scratch are shared: a ring, whose oldest rows are taken again when COMPUTE has
 * done with them.
 */
struct mt_sides {
    mt_model *m;
    size_t rows;  /* of the scratch */
    int n, side;  /* 0: none; that which is turned to, 0: COMPUTE */
    size_t next;  /* first row that has not been taken in this turn of the ring */
    struct mt_side_rows {
        size_t first, end;
        int event; /* of mt_model.side_event, which follows the rows' last use */
    } taken[MT_SIDE_ROWS];
    size_t n_taken;  /* oldest first */
    int next_event;
    int freed;       /* event of the last rows that became free; 0: none have yet */
};

/** How many side streams experts of such a model run on: 0 without mixtures, and where what they share has no copy for
 * each side (DoRA, dropout, directions). */
int mt_model_sides(const struct mt_model_params *p, mt_device *dev);

/** Their streams and events, once the scratch is laid out. */
int mt_model_sides_create(mt_model *m, struct mt_err *err);
void mt_model_sides_destroy(mt_model *m);

/** Pieces use `rows` rows of scratch altogether. Sides wait for what COMPUTE has been given so far. */
int mt_sides_fork(struct mt_sides *s, mt_model *m, size_t rows, struct mt_err *err);
/** Turns to the side of piece number i, from 0; returns it: from 1, or 0 without sides. */
int mt_sides_turn(struct mt_sides *s, size_t i);
/** Takes n rows of scratch for the side that is turned to: *first is the first. */
int mt_sides_take_rows(struct mt_sides *s, size_t n, size_t *first, struct mt_err *err);
/** Turns to COMPUTE, which waits for what the side has been given. */
int mt_sides_follow(struct mt_sides *s, struct mt_err *err);
/** The rows that were taken last are free when COMPUTE has come so far. */
int mt_sides_give_rows(struct mt_sides *s, struct mt_err *err);
/** Turns to COMPUTE, which waits for all sides; also after errors, so that nothing runs on. */
int mt_sides_join(struct mt_sides *s, struct mt_err *err);
