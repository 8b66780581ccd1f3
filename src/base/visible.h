/* SPDX-License-Identifier: Apache-2.0 */
#ifndef MT_BASE_VISIBLE_H
#define MT_BASE_VISIBLE_H

#include <stddef.h>

#include "base/strbuf.h"

/**
 * Text of others (tensor names, samples, paths) before a terminal sees it: a control character could move the cursor,
 * set the title or answer in the user's name, and a mark of writing direction could turn a line around.
 */

/** The character that UTF-8 begins at text[0], where it is one of those; *n: its bytes. Otherwise 0, as for newline and
 * tab. */
unsigned mt_steering(const char *text, size_t len, size_t *n);
/** Appends the text, which may be a piece of a longer one, with those as \x1b or \u202e. */
void mt_str_visible(struct mt_str *out, const char *text, size_t len);
/** The same into a buffer, cut where it is full; also bytes that are no UTF-8. src and dst must not overlap. */
void mt_visible(char *dst, size_t size, const char *src);

#endif
