/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <cjson/cJSON.h>
#include <stdbool.h>
#include <stdint.h>

#include "base/err.h"

/**
 * Reads keys of an untrusted JSON object. A key that is absent or null has its default, but a null flag is false, as in
 * Python; one of the wrong type or out of bounds is refused by name (MT_ERR_INPUT) and read as its default. The first
 * failure is kept.
 */
struct mt_keys {
    const cJSON *root;
    const char *name; /* of the file, for messages */
    struct mt_err *err;
    int rc;
};

/** Fails with "NAME: "key" why", unless something has failed before. */
void mt_keys_refuse(struct mt_keys *k, const char *key, const char *why);
/** NULL: absent or null. */
const cJSON *mt_keys_find(const struct mt_keys *k, const char *key);
/** null, which is not "absent" where the class has a number as its default. */
bool mt_keys_is_null(const struct mt_keys *k, const char *key);
int64_t mt_keys_int(struct mt_keys *k, const char *key, int64_t def, int64_t min, int64_t max);
/** An integer in [1, max]; refused if it is absent. */
int64_t mt_keys_need_int(struct mt_keys *k, const char *key, int64_t max);
/** A number of 0 or more. */
double mt_keys_number(struct mt_keys *k, const char *key, double def);
bool mt_keys_bool(struct mt_keys *k, const char *key, bool def);
/** The first element of a list with one for each layer; NULL: absent, or refused. */
const cJSON *mt_keys_of_layers(struct mt_keys *k, const char *key, int64_t n_layers);
