/* SPDX-License-Identifier: Apache-2.0 */
#include "data/notes.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/log.h"
#include "base/mem.h"

/* Copies the field that ends at the next tab or line's end; returns what follows it. */
static const char *field(char *to, size_t size, const char *from)
{
    size_t n = strcspn(from, "\t\n");
    snprintf(to, size, "%.*s", (int)MT_MIN(n, size - 1), from);
    return from + n + (from[n] == '\t');
}

static const char *parse(struct mt_note *note, const char *line)
{
    char level[4], n[24];
    line = field(level, sizeof(level), line);
    line = field(note->key, sizeof(note->key), line);
    line = field(n, sizeof(n), line);
    line = field(note->place, sizeof(note->place), line);
    line = field(note->text, sizeof(note->text), line);
    line = field(note->mend, sizeof(note->mend), line);
    note->level = level[0];
    note->n = strtoull(n, NULL, 10);
    line += strcspn(line, "\n");
    return line + (*line == '\n');
}

int mt_notes_add(struct mt_notes *l, const char *packed, const char *path, struct mt_err *err)
{
    while (*packed) {
        struct mt_note note = {.path = path, .n_files = 1};
        packed = parse(&note, packed);
        struct mt_note *same = (struct mt_note *)mt_notes_find(l, note.key);
        if (same) {
            same->n += note.n;
            same->n_files++;
            continue;
        }
        if (!mt_grow(&l->items, &l->cap, l->n + 1, sizeof(*l->items)))
            return mt_fail_nomem(err, "notes on the data", sizeof(note));
        l->items[l->n++] = note;
    }
    return 0;
}

const struct mt_note *mt_notes_find(const struct mt_notes *l, const char *key)
{
    for (size_t i = 0; i < l->n; i++)
        if (!strcmp(l->items[i].key, key))
            return &l->items[i];
    return NULL;
}

const char *mt_note_print(const struct mt_note *note, char *buf, size_t len)
{
    char more[80] = "";
    if (note->n > 1 && note->n_files > 1)
        snprintf(more, sizeof(more), ", and so in %llu more sample%s of %zu files", (unsigned long long)note->n - 1,
                 note->n > 2 ? "s" : "", note->n_files);
    else if (note->n > 1)
        snprintf(more, sizeof(more), ", and so in %llu more sample%s", (unsigned long long)note->n - 1, note->n > 2 ? "s" : "");
    else if (note->n_files > 1)
        snprintf(more, sizeof(more), ", and so of %zu more file%s", note->n_files - 1, note->n_files > 2 ? "s" : "");
    snprintf(buf, len, "%s%s: %s%s%s%s", note->path, note->place, note->text, more, *note->mend ? ": " : "", note->mend);
    return buf;
}

void mt_notes_say(const struct mt_notes *l)
{
    char text[5200];
    for (size_t i = 0; i < l->n; i++)
        if (l->items[i].level != 'y')
            mt_log(l->items[i].level == 'w' ? MT_LOG_WARN : MT_LOG_INFO, "%s", mt_note_print(&l->items[i], text, sizeof(text)));
}

void mt_notes_finish(struct mt_notes *l)
{
    free(l->items);
    *l = (struct mt_notes){0};
}
