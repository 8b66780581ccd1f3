/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stddef.h>

#include "config/config.h"
#include "settings/key.h"

/** All keys, by section, in the order of printing: those of schema.c, and after optimizer.type those of optimizers. */
size_t mt_n_keys(void);
const struct mt_key *mt_key_at(size_t i);
/** The number of a key in that order. */
size_t mt_key_index(const struct mt_key *key);

const struct mt_key *mt_key_find(const char *section, const char *name);
/** The nearest name by spelling, or NULL: a section if `section` is NULL, else a key of that section. */
const char *mt_key_suggest(const char *section, const char *name);

/** Parses `text` into the field of `key`. On failure `buf` says what is wrong: -EINVAL, or -ENOMEM. */
int mt_key_parse(struct mt_config *cfg, const struct mt_key *key, const char *text, char *buf,
                 size_t len);
/** Adds the value, as mt_key_parse() takes it. */
void mt_key_print(const struct mt_config *cfg, const struct mt_key *key, struct mt_str *out);
/** The same as a line of a file has it: in quotes, where it would be read as something else without them. */
void mt_key_write(const struct mt_config *cfg, const struct mt_key *key, struct mt_str *out);
/** Adds what it may be, in words: "a whole number (500, 64k, 64Ki), or auto". */
void mt_key_values(const struct mt_key *key, struct mt_str *out);
/** Of an item of MT_KEY_NAMED_PATHS, the length of "NAME:"; 0: it has none, or the key is of another type. */
size_t mt_key_name_of_path(const struct mt_key *key, const char *item);
/** How the address of files in the Hugging Face hub cache begins: it has the place of a path. */
#define MT_HUB_ADDRESS "hf://"
/** For a key that holds a path: whether `value` means the path `path`, not a name. */
bool mt_key_is_path(const struct mt_key *key, const char *value, const char *path);
/** The value that `value` has in `file`: relative paths are taken from the file's folder. The caller frees it; NULL:
 * out of memory. */
char *mt_key_resolve(const struct mt_key *key, const char *file, const char *value);
void mt_key_free(struct mt_config *cfg, const struct mt_key *key);
