/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

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
 * Reads a file of JSON lines as an array; an invalid line, such as an incomplete last one, becomes null. For files
 * much smaller than memory. Freed with cJSON_Delete().
 */
int mt_json_read_lines(cJSON **out, const char *path, struct mt_err *err);

/**
 * cJSON drops members silently when an allocation fails. mt_json_complete() returns whether all of cJSON's allocations
 * in this thread since mt_json_begin() succeeded: a file that must be complete is written only then.
 */
void mt_json_begin(void);
bool mt_json_complete(void);
/** Says that an item is missing for which other memory than cJSON's was short. */
void mt_json_lost(void);

/**
 * Add `item` to an object or a list; all may be NULL. They take it in any case: if there is no memory for it, it is
 * deleted, which cJSON's own functions leave to the caller. false: it was not added.
 */
bool mt_json_add(cJSON *object, const char *key, cJSON *item);
bool mt_json_append(cJSON *list, cJSON *item);

/**
 * Adds members to an object, or to a new one if it is NULL, and returns it: "key=%s, other key=%f, third=%d" are text, a
 * number, and true or false.
 */
cJSON *mt_json_put(cJSON *object, const char *members, ...) __attribute__((format(printf, 2, 3)));

/** As MT_FREED (mem.h), of a cJSON pointer. */
#define MT_JSON_FREED __attribute__((cleanup(mt_json_free_at)))
static inline void mt_json_free_at(cJSON **o)
{
    cJSON_Delete(*o);
}

/** Case-sensitive member, or NULL (cJSON's own look-up ignores case). */
cJSON *mt_json_get(const cJSON *object, const char *key);
/** A member as a number or as text; `otherwise` where it is none. Text lives as long as the object. */
double mt_json_number(const cJSON *object, const char *key, double otherwise);
const char *mt_json_string(const cJSON *object, const char *key, const char *otherwise);
/**
 * mt_json_get() for an object with many members, which does not change meanwhile: finds the one after the last found at
 * once, any other in a sorted list, which is made when it is first needed. Begin with the object alone set, or NULL.
 */
struct mt_json_index {
    const cJSON *object, *last;
    const cJSON **sorted; /* [n] by key; of equal keys the first */
    size_t n;
};
const cJSON *mt_json_index_get(struct mt_json_index *x, const char *key);
#define MT_JSON_INDEX_FREED __attribute__((cleanup(mt_json_index_finish)))
void mt_json_index_finish(struct mt_json_index *x);

/** The items of an array, whose look-up by number passes over all before it; the caller frees the list, not them. */
int mt_json_items(const cJSON ***items, size_t *n, const cJSON *array, struct mt_err *err);

/**
 * Replaces *text, an object in JSON (`name` in messages), by what edit(object, arg) makes of it, printed pretty. On
 * failure (-EINVAL: no JSON; -ENOMEM) *text is as it was.
 */
int mt_json_edit(char **text, const char *name, void (*edit)(cJSON *object, const void *arg), const void *arg,
                 enum mt_err_kind kind, struct mt_err *err);

/**
 * Prints with doubles that read back exactly (cJSON's own printing drops the last bits); NaN and
 * infinities become null. The caller frees the text; NULL: out of memory.
 */
char *mt_json_print(const cJSON *v, bool pretty);
