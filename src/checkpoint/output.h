/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdbool.h>

#include "base/err.h"

/**
 * The output folder of a run. While the run lasts, people rename folders, remove them, or mount others over them: the
 * folder is known by what it is, not only by its name. One process holds the lock of its file .lock.
 */
struct mt_output {
    char dir[4096];   /* where it is now: read it anew for each use */
    int fd, lock;     /* the folder, and its .lock; -1: none */
};

/**
 * Makes the folder if it is missing, takes its lock, and removes what killed runs have left half done. The error names
 * the process that has the lock (-EBUSY, MT_ERR_USAGE).
 */
int mt_output_open(struct mt_output *o, const char *dir, struct mt_err *err);
/** Releases the lock. Accepts one that was not opened, if both descriptors are -1. */
void mt_output_close(struct mt_output *o);
/**
 * Makes sure, before a save, that the folder is the one that is locked. If it was renamed, it is used under its new
 * name. If it was removed, it is made again. If another folder or another run is in its place, `dir` becomes
 * "<dir>-<run>". Each is warned of.
 */
int mt_output_find(struct mt_output *o, const char *run, struct mt_err *err);

/**
 * Takes DIR/.lock for this process; the error names the holder. Closing the descriptor releases the lock. A file system
 * without locks is only a warning.
 */
int mt_output_lock(const char *dir, int *fd, struct mt_err *err);
/** Whether a process of this machine holds the folder's lock. */
bool mt_output_in_use(const char *dir);
