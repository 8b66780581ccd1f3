/* SPDX-License-Identifier: Apache-2.0 */
#ifndef MT_BASE_JSON_H
#define MT_BASE_JSON_H

#include <cjson/cJSON.h>
#include <stdbool.h>
#include <stddef.h>

#include "base/err.h"

/**
 * Parses exactly one JSON value of `len` bytes (no NUL needed). On failure returns -EINVAL with
 * `kind` and a message "name:line:column: ...". The result is freed with cJSON_Delete().
 */
int mt_json_parse(cJSON **out, const char *text, size_t len, const char *name,
                  enum mt_err_kind kind, struct mt_err *err);
int mt_json_read_file(cJSON **out, const char *path, enum mt_err_kind kind, struct mt_err *err);

/**
 * The values of a file of JSON lines, as an array; a line that is not valid, such as an incomplete last one,
 * becomes null. For files much smaller than memory. Freed with cJSON_Delete().
 */
int mt_json_read_lines(cJSON **out, const char *path, struct mt_err *err);

/**
 * cJSON leaves out what it has no memory for, and says nothing. Between these two calls of a thread, whether it had all
 * that it asked for: what is built to be kept is written only where it did.
 */
void mt_json_begin(void);
bool mt_json_complete(void);

/** Case-sensitive member, or NULL (cJSON's own look-up ignores case). */
cJSON *mt_json_get(const cJSON *object, const char *key);
/** The same for keys that mostly come in the object's own order: *last, at first NULL, is the member found last. */
const cJSON *mt_json_get_in_order(const cJSON *object, const cJSON **last, const char *key);

/**
 * Prints with doubles that read back exactly (cJSON's own printing drops the last bits); NaN and
 * infinities become null. The caller frees the text; NULL: no memory.
 */
char *mt_json_print(const cJSON *v, bool pretty);

#endif
