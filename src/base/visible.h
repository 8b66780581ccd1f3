/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stddef.h>

#include "base/strbuf.h"

/**
 * Makes text from files (tensor names, samples, paths) safe to print on a terminal: a control character could move the
 * cursor, set the title or send input in the user's name; a mark of writing direction could reverse a line.
 */

/** The character at text[0] if it is one of these controls or marks (newline and tab are not), else 0; *n: its bytes
 * in UTF-8. */
unsigned mt_steering(const char *text, size_t len, size_t *n);
/** Appends the text, which may be a piece of a longer one, with those characters written as \x1b or \u202e. */
void mt_str_visible(struct mt_str *out, const char *text, size_t len);
/** The same into a buffer, truncated where it is full; also escapes bytes that are not UTF-8. src and dst must not
 * overlap. */
void mt_visible(char *dst, size_t size, const char *src);
