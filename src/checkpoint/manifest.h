/* SPDX-License-Identifier: Apache-2.0 */
#ifndef MT_CHECKPOINT_MANIFEST_H
#define MT_CHECKPOINT_MANIFEST_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/err.h"

/**
 * What saving and loading agree on.
 *
 * megatrain/state.json has, under "files", for every file its "size", its "xxh3", and for a safetensors file
 * the "tensors" with the XXH3 of each one's bytes. Sums are 16 hexadecimal digits. megatrain/seal.json
 * seals state.json. Where weights are saved alone, manifest.json takes the place of state.json.
 */
#define MT_STATE_NAME "state.json"
#define MT_MANIFEST_NAME "manifest.json"
enum { MT_SUM_TEXT = 17 };
void mt_sum_format(char text[MT_SUM_TEXT], uint64_t sum);

/** The whole text of seal.json for a file `name` of that sum: each damage to it shows. Freed with free(). */
char *mt_seal_text(const char *name, uint64_t sum);

/** XXH3 and size of a file's bytes [first, first + n), or to its end with n = UINT64_MAX. */
int mt_sum_file(const char *path, uint64_t first, uint64_t n, uint64_t *sum, uint64_t *size,
                struct mt_err *err);

/** The step of "checkpoint-<step>" or, with suffix ".tmp", of "checkpoint-<step>.tmp"; false for any other name. */
bool mt_checkpoint_parse_name(const char *name, const char *suffix, uint64_t *step);
/** Steps of DIR's checkpoints by their names, newest first; *steps is the caller's. A missing folder has none. */
int mt_checkpoint_list(const char *dir, uint64_t **steps, size_t *n, struct mt_err *err);

#endif
