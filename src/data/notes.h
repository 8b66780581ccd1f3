/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "base/err.h"

enum { MT_NOTES_BYTES = 3072 }; /* of a shard's header */

/** What was noticed of samples when their tokens were made; scripts/megatrain_data/notes.py has the kinds. */
struct mt_note {
    char level;             /* w: a warning; i: worth knowing; y: only errors say it, as their reason */
    char key[48];           /* its kind: "endless", or with a name: "key:loss" */
    char place[32];         /* of the first such sample in its file: ":12" or "[12]"; "": the file is meant */
    char text[420], mend[200];
    const char *path;       /* of that file; borrowed */
    uint64_t n;             /* samples of all files that have it */
    size_t n_files;
};
struct mt_notes {
    struct mt_note *items;
    size_t n, cap;
};

/**
 * Adds what the header of a file's shard holds: lines of level, key, n, place, text and mend with tabs between them, ended by a zero.
 * One of a key that is there adds to its counts. -ENOMEM.
 */
int mt_notes_add(struct mt_notes *l, const char *packed, const char *path, struct mt_err *err);
/** The note of a key, or NULL. */
const struct mt_note *mt_notes_find(const struct mt_notes *l, const char *key);
/** The whole sentence; returns buf. */
const char *mt_note_print(const struct mt_note *note, char *buf, size_t len);
/** Logs those of level w and i. */
void mt_notes_say(const struct mt_notes *l);
void mt_notes_finish(struct mt_notes *l);
