/* SPDX-License-Identifier: Apache-2.0 */
#ifndef MT_HF_KEYS_H
#define MT_HF_KEYS_H

#include <cjson/cJSON.h>
#include <stdbool.h>
#include <stdint.h>

#include "base/err.h"

/**
 * Reading the keys of a JSON object that a stranger wrote. A key that is absent or null has its default; one of the
 * wrong type or out of bounds is refused by name (MT_ERR_INPUT) and read as its default. The first failure stays.
 */
struct mt_keys {
    const cJSON *root;
    const char *name; /* of the file, for messages */
    struct mt_err *err;
    int rc;
};

/** "NAME: "key" why" */
void mt_keys_refuse(struct mt_keys *k, const char *key, const char *why);
/** NULL: absent or null. */
const cJSON *mt_keys_find(const struct mt_keys *k, const char *key);
int64_t mt_keys_int(struct mt_keys *k, const char *key, int64_t def, int64_t min, int64_t max);
/** Refused where it is absent; from 1. */
int64_t mt_keys_need_int(struct mt_keys *k, const char *key, int64_t max);
/** 0 or more. */
double mt_keys_number(struct mt_keys *k, const char *key, double def);
bool mt_keys_bool(struct mt_keys *k, const char *key, bool def);

#endif
