/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "train/control.h"

/**
 * The clock and the output folders of a run: a thread that looks at time limits, at the files STOP and SAVE of each
 * learner's folder, and at what signals have asked. It sets mt_train_asked, and interrupts the engine where that is
 * not answered soon, so that every phase hears of it: at once for a time limit, after a second for STOP and SAVE, since
 * most steps end by then. A learner that a SAVE finds with nothing new is not interrupted, and the user is told.
 */
typedef struct mt_watch mt_watch;

/** Files in the output folder that ask a run to save and stop, or to save. */
#define MT_REQUEST_STOP "STOP"
#define MT_REQUEST_SAVE "SAVE"

struct mt_watched {
    const char *dir;    /* the output folder, which exists */
    double limit;       /* seconds from start_ns on; 0: none */
};

/** Called from the watch's thread. */
struct mt_watch_events {
    void *ctx;
    /** The status: on request, or (asked false) of a phase that takes long. */
    void (*status)(void *ctx, const struct mt_train_control *c, double seconds, bool asked);
    /** All learners are asked to end before training has begun, when nothing is to be saved. Does not return. */
    void (*early)(void *ctx, int stop);
};

/** control->asked[n] are those of of[n], which are copied. start_ns: mt_boot_ns() when the process began. */
int mt_watch_start(mt_watch **out, struct mt_train_control *control, const struct mt_watched *of, int64_t start_ns,
                   const struct mt_watch_events *events, struct mt_err *err);
/** The learner's folder may have been moved, or made again. w NULL: no effect. */
void mt_watch_moved(mt_watch *w, size_t learner, const char *dir);
/** Sets control->engine. Afterwards the engine that it was is interrupted no more. w NULL: sets it alone. */
void mt_watch_engine(mt_watch *w, struct mt_train_control *control, mt_engine *e);
/** Accepts NULL. */
void mt_watch_stop(mt_watch **w);
