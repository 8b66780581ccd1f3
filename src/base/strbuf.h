/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdbool.h>
#include <stddef.h>

/** A growing, always NUL-terminated string; {0} is empty and valid. A failed append sets `failed`. */
struct mt_str {
    char *p;
    size_t len, cap;
    bool failed;
};

void mt_str_append(struct mt_str *s, const char *data, size_t n);
void mt_str_printf(struct mt_str *s, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
/** Appends a finite number in the fewest digits that read back as the same double. */
void mt_str_number(struct mt_str *s, double v);
/** Appends `text`, folded between words into lines of at most `width` columns that begin with `indent`; each ends with
 * a newline. A longer word has a line of its own. */
void mt_str_fold(struct mt_str *s, const char *indent, const char *text, size_t width);
void mt_str_finish(struct mt_str *s);
/** As MT_FREED (mem.h), of a string. */
#define MT_STR_FREED __attribute__((cleanup(mt_str_finish)))

/** Offset of the first byte of `text` that is not UTF-8, or -1. */
long mt_utf8_error(const char *text);

/** The number of edits (insert, delete, replace, swap) between a and b; for "did you mean". */
int mt_edit_distance(const char *a, const char *b);
